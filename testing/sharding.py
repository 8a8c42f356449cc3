"""C7 to C10: how the model is sharded."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import attrs

from ..adapters.errors import ParallelConflictError, ParallelUnknownError, SpecError, UnreadableError
from ..adapters.sources import Path
from ..adapters.specs import FinalNormSpec, LayerSpec, Parallel
from .attribute_patch import changed, without
from .compare import is_stream
from .contract_case import ContractCase, Sample
from .meshes import cuts_of, rank_of_two, sharded_linear
from .reads import counts_say_size, size_paths
from .scenario import scenario

SIZES = (2, 4, 8, 16)
"""Tensor-parallel sizes at which every declaration is asked."""


class ShardingScenarios(ContractCase):
    """Total and local are never mixed up, and a size is never guessed."""

    @scenario(7, "Unsaid sharding is refused")
    def test_c07_unsaid_sharding_is_refused(self) -> None:
        """C7. A layer that does not say its tensor-parallel size is refused, and `parallel=` says it."""
        silenced = 0
        for sample in self._shardable():
            facts = sample.reader.facts
            if counts_say_size(facts) or self.parallel is not None:
                continue
            with ExitStack() as stack:
                for path in size_paths(facts):
                    try:
                        stack.enter_context(without(sample.layer, path))
                    except UnreadableError:
                        continue
                where = f"{sample} when nothing says its size"
                self.validate_refuses(
                    ParallelUnknownError, partial(self.again, sample), sample.path, "parallel=", where=where
                )
                told = self.again(sample, Parallel(size=1, rank=0))
            self.validate_spec(sample.spec, told, f"{sample} with parallel=Parallel(size=1, rank=0)")
            silenced += 1
        if not silenced:
            self.skip("every layer holds total and local counts, so none can be silent about its size")

    @scenario(8, "Contradicted sharding is refused")
    def test_c08_contradicted_sharding_is_refused(self) -> None:
        """C8. A `parallel=` that contradicts the layer is an error that names both."""
        if self.parallel is not None:
            self.skip("these layers do not say their size, so nothing can contradict it")
        for sample in self._shardable():
            wrong = Parallel(size=2 * sample.spec.parallel.size, rank=0)
            self.validate_refuses(
                ParallelConflictError,
                partial(self.again, sample, wrong),
                sample.path,
                "the parallel argument",
                where=f"{sample} with parallel={wrong}",
            )

    @scenario(9, "Declared shards are valid or refused")
    def test_c09_declared_shards_are_valid_or_refused(self) -> None:
        """C9. At TP 2, 4, 8 and 16 the entry gives specs whose counts follow from the totals, or says why not."""
        whole = self.declared()
        for size in SIZES:
            for rank in (0, size - 1):
                where = f"{self.model} at TP {size}, rank {rank}"
                try:
                    shards = self.declared(size, rank)
                except SpecError as error:
                    self.validate(str(size) in str(error), f"{where}: refused without saying why: {error}")
                    continue
                self.validate(len(shards) == len(whole), f"{where}: {len(shards)} layers, {len(whole)} when whole")
                for (name, one), (_, all_) in zip(shards, whole, strict=True):
                    expected = attrs.evolve(all_, parallel=Parallel(size=size, rank=rank), **_local(all_, size))
                    self.validate_spec(expected, one, f"{where}: {name}")

    @scenario(10, "Real shards are read right")
    def test_c10_real_shards_are_read_right(self) -> None:
        """C10. The layers of one rank are read into what the entry declares for that rank."""
        if self._engine_shards() or self._tensor_shards():
            return
        self.skip("these layers tell their size by no weight, and build_sharded is not defined")

    def _engine_shards(self) -> bool:
        any_built = False
        for size in SIZES:
            for rank in (0, size - 1):
                try:
                    self.declared(size, rank)
                except SpecError:
                    break  # C9 holds these to a reason
                model = self.build_sharded(size, rank)
                if model is None:
                    break
                found = self.held(self.asked.specs_in(model, parallel=self.parallel and Parallel(size=size, rank=rank)))
                self.validate_under_tp(size, rank, found, self.engine_of(found, model))
                any_built = True
        return any_built

    def _tensor_shards(self) -> bool:
        samples = [sample for sample in self._shardable() if "tp_weight" in sample.reader.facts.parsed]
        for rank in (0, 1) if samples else ():
            with rank_of_two(rank) as mesh:
                for sample in samples:
                    self._validate_each_cut(sample, mesh, rank)
                    self._validate_own_plan(sample, mesh, rank)
        return bool(samples)

    def _validate_each_cut(self, sample: Sample, mesh: Any, rank: int) -> None:
        """A weight cut where the heads lie shares them; cut elsewhere, every rank has all of them."""
        paths: Any = sample.reader.facts.parsed["tp_weight"]
        with ExitStack() as those_before:
            for path in paths:
                try:
                    linear = path.read(sample.layer)
                except UnreadableError:
                    continue
                weight = Path((*path.steps, "weight"))
                for dim in (0, 1):
                    with changed(sample.layer, weight, sharded_linear(linear, mesh, dim)):
                        spec = self.again(sample)
                    expected = sample.spec.shard(2, rank) if dim in path.dimensions else sample.spec
                    where = f"{sample} as rank {rank} of 2, {path} cut along dimension {dim}"
                    self.validate_spec(expected, spec, where)
                # The first weight that tells is believed, so the next is only asked without it.
                those_before.enter_context(without(sample.layer, weight))

    def _validate_own_plan(self, sample: Sample, mesh: Any, rank: int) -> None:
        """Sharded as the model's own tensor-parallel plan says, the layer holds what that plan leaves it."""
        # The feed-forward of a decoder layer may be cut where its attention is not.
        plan = {to: how for to, how in self.tp_plan().items() if "attn" in to or not is_stream(sample.spec)}
        styles = cuts_of(plan, sample.layer, sample.path)
        if isinstance(sample.spec, FinalNormSpec):  # its sharding is that of the last decoder layer
            last = ("layers", str(sample.spec.layer_index - 1))
            styles = {path: style for path, style in styles.items() if path[:2] == last}
        with ExitStack() as stack:
            for path, style in styles.items():
                weight = sharded_linear(Path(path).read(sample.layer), mesh, 1 if style == "rowwise" else 0)
                stack.enter_context(changed(sample.layer, Path((*path, "weight")), weight))
            spec = self.again(sample)
        # The output projection takes its rows from the heads this rank has; where its output is gathered, it has all.
        expected = sample.spec.shard(2, rank) if "rowwise" in styles.values() else sample.spec
        self.validate_spec(expected, spec, f"{sample} as rank {rank} of 2 of the model's own plan")

    def _shardable(self) -> list[Sample]:
        return [sample for sample in self.samples() if isinstance(sample.spec, LayerSpec)]


def _local(spec: LayerSpec, size: int) -> dict[str, int]:
    """Local counts, worked out here again: an entry must not be its own judge."""
    local = {}
    for pair in spec.pairs:
        total = getattr(spec, pair.total)
        local[pair.local] = max(1, total // size) if pair.replicates else total // size
    return local
