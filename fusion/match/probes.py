"""Following columns through a graph by numbers: what a rope does to them shows, however it is written.

Each tensor that is met is worked out for one row, with numbers of our own in place of the columns that come in. Slices, views,
products and sums are followed as they are; which pairs a rope turns is then read off the result. Its leading dimensions are
followed by name, so that a row of cos is known to be that of its own token.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor
from torch.fx import Node

from ..ops.rope import turn
from .activations import aten, is_rounding
from .calls import call_of, name_of_op
from .values import same, same_shape, value

Label = tuple[Node, int] | None
"""A leading dimension: that of a node; None where there is one row."""

ROTARY_OPS = ("_C::rotary_embedding", "vllm::flashinfer_rotary_embedding")
"""vLLM's, which turn query and key in place: (positions, query, key, head size, table of cos and then sin, halves, ...)."""

_SAME = {aten.clone.default, aten.contiguous.default, aten.alias.default, aten.detach.default}
_VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
_SUMS = {aten.mul.Tensor: torch.mul, aten.add.Tensor: torch.add, aten.sub.Tensor: torch.sub}


class Unfollowed(Exception):  # noqa: N818 (as `Unmatched`, a finding)
    """A step that is not followed: its result is columns of its own."""


@frozen(kw_only=True, eq=False)
class Probe:
    """One row of a tensor."""

    tail: Tensor
    "The last one or two dimensions, in float64: two where columns stand in pairs."
    lead: tuple[Label, ...]
    "The dimensions before."
    leaves: frozenset[Node] = frozenset()
    "What columns come from that no table gives."
    rows: frozenset[Node] = frozenset()
    "Look-ups in tables that it depends on."

    def but(self, tail: Tensor, lead: tuple[Label, ...] | None = None) -> Probe:
        """Other columns of the same."""
        return evolve(self, tail=tail, lead=self.lead if lead is None else lead)


@frozen(kw_only=True, eq=False)
class Rows:
    """Rows of a table that are looked up by an index."""

    table: Node
    index: Node


@define(kw_only=True, eq=False)
class Prober:
    """Works out probes of one rope, `width` columns wide."""

    width: int
    rows: dict[Node, Rows] = field(factory=dict)
    "Look-ups -> what they look up."
    tables: dict[Node, Tensor] = field(factory=dict)
    "Table -> the numbers that stand for its columns."
    known: dict[Node, Probe] = field(factory=dict)
    aliases: dict[Any, Label] = field(factory=dict)
    "A dimension of an index -> the dimension of the rows that it goes with."
    _random: torch.Generator = field(factory=lambda: torch.Generator().manual_seed(0))

    def of(self, node: Node) -> Probe:
        """The probe of a node; of what is not followed, numbers of its own."""
        if node not in self.known:
            try:
                found = self._follow(node)
            except Unfollowed:
                found = self._leaf(node)
            self.known[node] = found
        return self.known[node]

    def label(self, label: Label) -> Label:
        """The dimension that a dimension goes with."""
        return self.aliases.get(label, label)

    # ---- where columns come from

    def _numbers(self, count: Any) -> Tensor:
        if not isinstance(count, int):
            raise Unfollowed
        return torch.rand(count, generator=self._random, dtype=torch.float64) + 0.5

    def _leaf(self, node: Node) -> Probe:
        val = value(node)
        if not isinstance(val, Tensor) or not val.dim() or not isinstance(val.shape[-1], int):
            raise Unfollowed
        return Probe(tail=self._numbers(val.shape[-1]), lead=_labels(node, val.shape[:-1]), leaves=frozenset((node,)))

    def _looked_up(self, node: Node, table: Any, index: Any) -> Probe:
        wide, val = value(table), value(index)
        if not isinstance(wide, Tensor) or wide.dim() != 2 or not isinstance(val, Tensor) or not val.dim():
            raise Unfollowed
        if table not in self.tables:
            self.tables[table] = self._numbers(wide.shape[1])
        self.rows[node] = Rows(table=table, index=index)
        return Probe(tail=self.tables[table], lead=_labels(index, val.shape), rows=frozenset((node,)))

    # ---- what is done with them

    def _follow(self, node: Node) -> Probe:
        target, args = node.target, node.args
        if node.op != "call_function" or not isinstance(value(node), Tensor):
            raise Unfollowed
        if target is aten.index.Tensor and isinstance(args[1], list | tuple) and len(args[1]) == 1:
            return self._looked_up(node, args[0], args[1][0])
        if target is aten.embedding.default:
            return self._looked_up(node, args[0], args[1])
        if target is aten.index_select.default and args[1] == 0:
            return self._looked_up(node, args[0], args[2])
        if target is operator.getitem:
            return self._part(node)
        if target in _SUMS:
            return self._combined(node)
        if target is aten.neg.default:
            before = self.of(node.args[0])
            return before.but(-before.tail)
        if target is aten.cat.default:
            return self._joined(node)
        if not args or not isinstance(args[0], Node):
            raise Unfollowed
        if target in _SAME or is_rounding(node):
            return self.of(args[0])
        if target in _VIEWS:
            return self._viewed(node)
        return self._moved(node)

    def _part(self, node: Node) -> Probe:
        before, index = node.args[0], node.args[1]
        if not isinstance(before, Node):
            raise Unfollowed
        if name_of_op(before) in ROTARY_OPS:
            return self._rotated(node, before)
        if before.target not in (aten.split_with_sizes.default, aten.split.Tensor) or not isinstance(index, int):
            raise Unfollowed
        whole = self.of(before.args[0])
        dim = _tail_dim(before.args[2] if len(before.args) > 2 else before.kwargs.get("dim", 0), before.args[0], whole)
        sizes: Any = before.args[1]
        if not isinstance(sizes, int) and not all(isinstance(size, int) for size in sizes):
            raise Unfollowed
        return whole.but(torch.split(whole.tail, sizes, dim)[index])

    def _rotated(self, node: Node, before: Node) -> Probe:
        call = call_of(before)
        place = next((place for place, result in call.results.items() if result is node), None)
        rows, index, table, head = call[place or 0], call[0], call[4], call[3]
        plain = not call[6] and not call[7] and place not in call.parts
        if place not in (1, 2) or not plain or head != self.width or not isinstance(rows, Node):
            raise Unfollowed
        x, wide, val = self.of(rows), value(table), value(index)
        if x.tail.shape != (self.width,) or wide.dim() != 2 or wide.shape[1] != self.width or val.dim() != 1:
            raise Unfollowed
        if not same(value(rows).shape[0], val.shape[0]):
            raise Unfollowed
        looked = self._looked_up(before, table, index)
        self._unify(x.lead[0], looked.lead[0])
        pairs = "halves" if call[5] else "interleaved"
        cos, sin = looked.tail.chunk(2)
        return evolve(x, tail=turned(x.tail, cos, sin, pairs), rows=x.rows | looked.rows)

    def _combined(self, node: Node) -> Probe:
        a, b = node.args[:2]
        if not isinstance(a, Node) or not isinstance(b, Node) or node.kwargs:
            raise Unfollowed
        one, other = self.of(a), self.of(b)
        # What no table has a part in is no rope yet: a product with a scale, a bias.
        if one.tail.dim() != other.tail.dim() or not (one.rows or other.rows):
            raise Unfollowed
        longest = max(len(one.lead), len(other.lead))
        leads = [(*[None] * (longest - len(each.lead)), *each.lead) for each in (one, other)]
        lead = tuple(self._unify(x, y) for x, y in zip(*leads, strict=True))
        return _both([one, other], _SUMS[node.target](one.tail, other.tail), lead)

    def _unify(self, one: Label, other: Label) -> Label:
        one, other = self.label(one), self.label(other)
        if one is None or other is None or one == other:
            return one or other
        indices = {rows.index for rows in self.rows.values()}
        if other[0] not in indices:
            one, other = other, one
        if other[0] not in indices or one[0] in indices:
            raise Unfollowed
        self.aliases[other] = one
        return one

    def _joined(self, node: Node) -> Probe:
        parts: Any = node.args[0]
        probes = [self.of(part) for part in parts]
        if len({probe.tail.dim() for probe in probes}) > 1:
            raise Unfollowed
        dim = _tail_dim(node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0), parts[0], probes[0])
        lead = probes[0].lead
        for probe in probes[1:]:
            if [*map(self.label, probe.lead)] != [*map(self.label, lead)]:
                raise Unfollowed
        return _both(probes, torch.cat([probe.tail for probe in probes], dim), lead)

    def _viewed(self, node: Node) -> Probe:
        before: Any = node.args[0]
        probe, old, new = self.of(before), value(before).shape, value(node).shape
        last = old[len(old) - probe.tail.dim() :]
        if not new:
            raise Unfollowed
        if same(new[-1], probe.tail.numel()):
            tail = probe.tail.reshape(-1)
        elif len(new) > 1 and probe.tail.numel() == self.width and same(new[-1] * new[-2], self.width):
            tail = probe.tail.reshape(new[-2], new[-1])
        elif len(new) > 1 and same_shape(new[-len(last) :], last):
            tail = probe.tail
        else:
            raise Unfollowed
        return probe.but(tail, self._lead(probe, old, new[: len(new) - tail.dim()]))

    def _lead(self, probe: Probe, old: Any, new: Any) -> tuple[Label, ...]:
        """The names of leading dimensions that were viewed: dimensions of one row come and go."""
        left = [(label, old[i]) for i, label in enumerate(probe.lead) if label is not None]
        lead: list[Label] = []
        for size in new:
            if same(size, 1):
                lead.append(None)
                continue
            if not left or not same(left[0][1], size):
                raise Unfollowed
            lead.append(left.pop(0)[0])
        if left:
            raise Unfollowed
        return tuple(lead)

    def _moved(self, node: Node) -> Probe:
        """Slices, transpositions, dimensions of one row, repetitions."""
        before: Any = node.args[0]
        probe = self.of(before)
        tail, rank, kept = probe.tail, value(before).dim(), len(probe.lead)
        target, args = node.target, node.args
        given: Any = (*args[1:], *[None] * 4)
        if target is aten.slice.Tensor:
            dim = _tail_dim(given[0] or 0, before, probe)
            start, stop, step = given[1], given[2], given[3]
            return probe.but(aten.slice.Tensor(tail, dim, start, stop, step or 1))
        if target is aten.select.int and tail.dim() == 2:
            return probe.but(tail.select(_tail_dim(given[0], before, probe), given[1]))
        if target is aten.permute.default:
            order = [each % rank for each in given[0]]
            if any((each < kept) is not (i < kept) for i, each in enumerate(order)):
                raise Unfollowed
            return probe.but(
                tail.permute([each - kept for each in order[kept:]]), tuple(probe.lead[each] for each in order[:kept])
            )
        if target is aten.unsqueeze.default:
            at = given[0] % (rank + 1)
            if at <= kept:
                return probe.but(tail, (*probe.lead[:at], None, *probe.lead[at:]))
            if tail.dim() == 1:
                return probe.but(tail.unsqueeze(at - kept))
        if target is aten.squeeze.dim and given[0] % rank < kept and probe.lead[given[0] % rank] is None:
            at = given[0] % rank
            return probe.but(tail, (*probe.lead[:at], *probe.lead[at + 1 :]))
        if target is aten.expand.default and value(node).dim() == rank:
            return self._expanded(node, probe)
        if target is aten.repeat.default and value(node).dim() == rank and all(same(n, 1) for n in given[0][:kept]):
            return probe.but(tail.repeat(given[0][kept:]))
        raise Unfollowed

    def _expanded(self, node: Node, probe: Probe) -> Probe:
        kept, shape = len(probe.lead), value(node).shape
        half = probe.tail.dim() == 1 and 2 * probe.tail.numel() == self.width
        if half and kept and probe.lead[-1] is None and same(shape[kept - 1], 2):
            # The columns once more behind themselves, which a view joins.
            return probe.but(probe.tail.expand(2, -1), probe.lead[:-1])
        return probe.but(probe.tail.expand(tuple(shape[kept:])))


def turned(x: Tensor, cos: Tensor, sin: Tensor, pairs: str) -> Tensor:
    """One row of a rope; `pairs`: a word of `PAIRS`."""
    return turn(x[None], cos[None], sin[None], torch.zeros(1, dtype=torch.int64), pairs)[0]


def _both(probes: list[Probe], tail: Tensor, lead: tuple[Label, ...]) -> Probe:
    leaves = frozenset(leaf for probe in probes for leaf in probe.leaves)
    return Probe(tail=tail, lead=lead, leaves=leaves, rows=frozenset(row for probe in probes for row in probe.rows))


def _labels(node: Node, shape: Any) -> tuple[Label, ...]:
    return tuple(None if same(size, 1) else (node, i) for i, size in enumerate(shape))


def _tail_dim(dim: Any, tensor: Any, probe: Probe) -> int:
    """A dimension of a tensor among those of its tail."""
    rank = value(tensor).dim()
    at: int = dim % rank - (rank - probe.tail.dim())
    if at < 0:
        raise Unfollowed
    return at
