"""Finding the rope of a tensor: what is turned, by which columns of which tables, at which positions, and in which pairs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from typing import Any

import torch
from attrs import frozen
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node

from ..ops.rope import PAIRS
from .errors import Unmatched
from .probes import Probe, Prober, Unfollowed, turned
from .values import same, same_shape, value

Columns = tuple[Node, int, int]
"""Columns of a table, from the one to before the other."""


@frozen(kw_only=True, eq=False)
class FoundRope:
    """A rope of a graph, or columns that none turns."""

    x: Node
    "What is turned."
    pairs: str
    "A word of `PAIRS`."
    cos: Columns | None = None
    sin: Columns | None = None
    positions: Node | None = None
    "The index of the tables; None with them where nothing is turned."
    nodes: tuple[Node, ...] = ()
    "What computes it from x and the tables."


def find_rope(out: Node, width: int, like: Any) -> FoundRope:
    """The rope that gives a tensor.

    Args:
        out: the tensor.
        width: how many columns are turned.
        like: the leading dimensions that what is turned has to have.

    Raises:
        Unmatched: no rope of a known form, or one whose parts the fused op cannot take.
    """
    with unset_fake_temporarily():  # numbers of our own, while Inductor compiles
        return _found(out, width, like)


def _found(out: Node, width: int, like: Any) -> FoundRope:
    prober = Prober(width=width)
    try:
        probe = prober.of(out)
    except Unfollowed:
        raise Unmatched(f"{out} has no columns whose number is known") from None
    if probe.tail.shape != (width,):
        raise Unmatched(f"{out} has {probe.tail.numel()} columns, and a rope of {width} is looked for")
    if not probe.rows:
        return _unturned(out, probe, prober, like)
    if len(probe.leaves) != 1:
        several = " and ".join(sorted(map(str, probe.leaves)))
        raise Unmatched(f"{out} is turned columns of {several}: expected those of one tensor")
    indices = {prober.rows[row].index for row in probe.rows}
    if len(indices) > 1:
        raise Unmatched(f"{out} takes cos and sin at several positions: {' and '.join(sorted(map(str, indices)))}")
    tables = sorted({prober.rows[row].table for row in probe.rows})
    for x in _sources(prober, probe, like):
        for pairs, cos, sin in _ways(tables, prober, width):
            c, s = (prober.tables[table][start:stop] for table, start, stop in (cos, sin))
            got = turned(prober.known[x].tail, c, s, pairs)
            if torch.allclose(got, probe.tail, rtol=1e-9, atol=0.0):
                (positions,) = indices
                _check_rows(out, probe, prober, x, positions)
                return FoundRope(
                    x=x, pairs=pairs, cos=cos, sin=sin, positions=positions, nodes=_between(out, prober, {x, *tables})
                )
    raise Unmatched(_why_not(out, tables, prober, width))


def _sources(prober: Prober, probe: Probe, like: Any) -> Iterator[Node]:
    """What may be turned: columns of the one tensor, the furthest back first."""
    for node, each in sorted(prober.known.items()):
        val = value(node)
        if each.rows or each.leaves != probe.leaves or each.tail.shape != probe.tail.shape:
            continue
        if same_shape(val.shape[:-1], like) and val.stride(-1) == 1:
            yield node


def _ways(tables: list[Node], prober: Prober, width: int) -> Iterator[tuple[str, Columns, Columns]]:
    half = width // 2
    parts: list[Columns] = []
    for table in tables:
        ends = {width: ((0, half), (half, width)), half: ((0, half),)}.get(prober.tables[table].numel(), ())
        parts += [(table, *each) for each in ends]
    for cos, sin in permutations(parts, 2):
        for pairs in PAIRS[:-1]:
            yield pairs, cos, sin


def _check_rows(out: Node, probe: Probe, prober: Prober, x: Node, positions: Node) -> None:
    """Each row must be turned by the position of its own token, and stay where it was."""
    lead = [label for label in map(prober.label, prober.known[x].lead) if label is not None]
    given = [label for label in map(prober.label, probe.lead) if label is not None]
    shape = value(positions).shape
    tokens = [prober.label((positions, i)) for i, size in enumerate(shape) if not same(size, 1)]
    if given != lead or tokens != lead[: len(tokens)]:
        raise Unmatched(
            f"{out} {tuple(value(out).shape)} has its tokens elsewhere than {x} {tuple(value(x).shape)}, or not in the order of "
            f"{positions} {tuple(shape)}"
        )


def _unturned(out: Node, probe: Probe, prober: Prober, like: Any) -> FoundRope:
    """Columns that no table turns. What else may have been done to them is not known."""
    alike = [
        node
        for node, each in sorted(prober.known.items())
        if each.tail.shape == probe.tail.shape and torch.equal(each.tail, probe.tail)
    ]
    fitting = [node for node in alike if same_shape(value(node).shape[:-1], like) and value(node).stride(-1) == 1]
    if not fitting:
        raise Unmatched(f"{out} {tuple(value(out).shape)} has no rows {tuple(like)}")
    return FoundRope(x=fitting[0], pairs="none", nodes=_between(out, prober, {fitting[0]}))


def _between(out: Node, prober: Prober, stops: set[Node]) -> tuple[Node, ...]:
    """All that computes a tensor, up to what a fused op takes."""
    found: dict[Node, None] = {}
    stack = [out]
    for node in stack:
        if node not in found and node not in stops and node.op == "call_function":
            found[node] = None
            inside = node in prober.known or node.users.keys() & prober.known.keys()
            stack += node.all_input_nodes if inside else []
    return tuple(found)


def _why_not(out: Node, tables: list[Node], prober: Prober, width: int) -> str:
    names = " and ".join(map(str, tables))
    widths = [prober.tables[table].numel() for table in tables]
    if len(tables) == 2 and widths == [width, width]:
        return (
            f"the tables {names} are as wide as the rope, {width} columns: that each holds its half twice is not in the graph, "
            "and the fused op takes one half"
        )
    return f"{out} is computed by the tables {names}, and is no rope of a known form"
