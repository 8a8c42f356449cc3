"""How a layer was sharded: by itself, by the caller, or by what stands around the call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .asking import Asked
from .conversions import whole
from .errors import FOREIGN, ParallelConflictError, ParallelUnknownError, SpecError, UnreadableError, shown
from .linears import is_whole
from .parallel import is_plain_tensor, ranks_summed, shards_of_linear
from .sources import ABSENT
from .spec_fields import made
from .specs import LARGEST, WHOLE, Parallel


class Sharded(Asked):
    """One layer, asked over how many ranks its heads and its MLP are shared."""

    def parallel(self, values: Mapping[str, Any], given: Parallel | None, around: Parallel | None) -> Parallel:
        """How the layer was sharded, by itself, by the caller, or by what stands around the call."""
        if given is None and self.reader.told_by_weights and self.is_whole():
            return WHOLE
        sources, rank, silent = self.evidence(values)
        if given is not None:
            sources["the parallel argument"] = given.size
        if len(set(sources.values())) > 1:
            raise ParallelConflictError(self.name(), sources)
        hint = given or around
        if not sources:
            if hint is None:
                raise ParallelUnknownError(self.name(), silent)
            return hint
        size = next(iter(sources.values()))
        if rank is not None and (type(rank) is not int or rank < 0):
            return Parallel(size=size, rank=rank)  # which refuses it by name
        if rank is not None and rank >= size:
            # The rank in a larger group than the one that now shares the heads (SGLang's decode tensor parallelism
            # rewrites the counts during a forward): it does not tell which share this is.
            rank = None
        if rank is not None and given is not None and given.rank not in (None, rank):
            raise ParallelConflictError(
                f"{self.name()}, rank", {"the layer": rank, "the parallel argument": given.rank}
            )
        if rank is None and hint is not None and hint.size == size:
            rank = hint.rank
        return WHOLE if size == 1 else made(Parallel, {"size": size, "rank": rank})

    def is_whole(self) -> bool:
        """Whether the first weight that tells the sharding has all features, as most layers that no engine built."""
        path = self.reader.weights[0][1]
        try:
            return is_whole(path.find(self.layer))
        except FOREIGN:  # of which `evidence` has words
            return False

    def evidence(self, values: Mapping[str, Any]) -> tuple[dict[str, int], int | None, list[str]]:
        """What says the size (source -> size), the rank if anything says it, and what stayed silent."""
        sources: dict[str, int] = {}
        rank: int | None = None
        silent: list[str] = []
        parsed: Mapping[str, Any] = self.facts.parsed
        group = self.reader.group.of(self.layer, self.path) if self.reader.group is not None else {}
        if "tp_size" in parsed:
            try:
                place, said_size = (parsed["tp_size"][0], group["tp_size"]) if group else self.first(parsed["tp_size"])
                sources[str(place)] = self.size(str(place), said_size)
            except UnreadableError as error:
                silent.extend(error.args)
        for pair in self.facts.spec.pairs:
            # Replicated heads say nothing of the ranks that share them.
            if pair.replicates or pair.total not in values or pair.local not in values:
                continue
            total, local = values[pair.total], values[pair.local]
            ratio = f"{pair.total} / {pair.local}"
            counts = type(total) is int and type(local) is int
            if counts and 0 < local <= total <= LARGEST and total % local == 0:
                sources[ratio] = total // local
            else:
                silent.append(f"{ratio}: {shown(total)} / {shown(local)} is no whole number of ranks")
        if group:
            rank = group["tp_rank"]
        elif "tp_rank" in parsed:
            try:
                _, rank = self.first(parsed["tp_rank"], convert=whole)
            except UnreadableError:
                rank = None
        if not sources and "tp_weight" in parsed:
            for source, path in self.reader.weights:
                try:
                    linear = path.read(self.layer)
                    if is_whole(linear):
                        sources[source], rank = 1, 0 if rank is None else rank
                        break
                    shards = shards_of_linear(linear, path.dimensions)
                except UnreadableError as error:
                    silent.append(f"{source}: {error}")
                    continue
                sources[source] = self.size(source, shards.size)
                rank = shards.rank if rank is None else rank
                break
        return sources, rank, silent

    def mlp_ranks(self) -> int | None:
        """Over how many ranks the MLP is summed, where its weights tell."""
        heads: dict[str, Any] = {}
        for name, head, tail in self.reader.mlp_weights:
            try:
                if name not in heads:  # most are in one module
                    heads[name] = head(self.layer)
                part = tail(heads[name])
                if part is not ABSENT and not is_plain_tensor(part):  # as experts' are
                    return 1 if is_whole(part) else ranks_summed(part)
            except FOREIGN:
                continue
        return None

    def size(self, source: str, value: Any) -> int:
        """A tensor-parallel size, or an error that names where it was read."""
        size = whole(value)
        if type(size) is not int or not 1 <= size <= LARGEST:
            raise SpecError(
                self.facts.spec.__name__, [f"{source}: expected a tensor-parallel size, got {shown(value)}"]
            )
        return size

    def complete(self, values: dict[str, Any]) -> None:
        """Fill the half of each pair that the layer does not hold."""
        size = values["parallel"].size
        for pair in self.facts.spec.pairs:
            total, local = values.get(pair.total), values.get(pair.local)
            if pair.local not in values and type(total) is int and total > 0:
                values[pair.local] = pair.local_of(total, size)
            elif pair.total not in values and type(local) is int:
                if pair.replicates and local == 1 and size > 1:
                    raise SpecError(
                        self.facts.spec.__name__,
                        [f"{pair.total}: one local head on {size} ranks may be a share or a replica; say the total"],
                    )
                values[pair.total] = local * size
            # The half that is there is no whole number, which the spec reports; this one only stands in.
            values.setdefault(pair.total, 1)
            values.setdefault(pair.local, 1)
