"""Finding the rope behind the norms of query and key heads, written out in any way, or as an engine's op.

Written out, it is read column by column: each node on the way from the norm is a row of pieces, each a sum of columns of the norm times
factors. Where a row is what a rope is, it does not matter how it came about: `x * cos + rotate_half(x) * sin`, or halves joined again.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from attrs import frozen
from torch.fx import Node

from .angles import Angles, angles_of
from .arithmetic import ADDS, aten, is_rounding, rounded_to, what_is
from .calls import Call, call_of, name_of_op
from .errors import Unmatched
from .provenance import ROW_PRESERVING, step_back
from .values import last_width, same, same_shape, value

ROPE_OPS = ("_C::rotary_embedding", "vllm::flashinfer_rotary_embedding")
"""Ops that write over query and key: (positions, query, key, head size, cos beside sin, halves), then perhaps the first column that is
turned and whether it is turned back (vLLM's csrc/libtorch_stable/torch_bindings.cpp)."""


@frozen(kw_only=True, eq=False)
class Turned:
    """The rope of one norm."""

    out: Node
    nodes: tuple[Node, ...]
    "All that computes it from the norm, `out` included."
    order: tuple[int, ...] | None = None
    "The dimensions of the norm in their order in `out`; None: the same order."


@frozen(kw_only=True, eq=False)
class FoundRope:
    """The rope of a query's and a key's heads."""

    q: Turned
    k: Turned
    cos: Angles
    sin: Angles
    half: int
    "Pairs of a head that are turned."
    pairs: str
    "A word of `declare.PAIRS`."


def find_rope(q: Node, k: Node, heads: int, kv_heads: int) -> FoundRope:
    """The rope behind two norms, (..., heads, width) each.

    Raises:
        Unmatched: there is none that is known, it differs between the two, or something else reads what lies between.
    """
    call, joined = _op_behind(q)
    if call is not None:
        return _of_op(call, joined, q, k)
    one, other = _written_out(q, heads), _written_out(k, kv_heads)
    if (one.half, one.cos, one.sin) != (other.half, other.cos, other.sin):
        raise Unmatched(f"{q} and {k} are not turned by the same cos and sin")
    return FoundRope(q=one.turned, k=other.turned, cos=one.cos, sin=one.sin, half=one.half, pairs="halves")


# ---- an engine's op --------------------------------------------------------------------------------------------------


def _op_behind(norm: Node) -> tuple[Call | None, list[Node]]:
    """The op that reads a norm, whatever shape it has by then, and what gave it that shape."""
    between: list[Node] = []
    node = norm
    while len(node.users) == 1:
        (reader,) = node.users
        if name_of_op(reader) in ROPE_OPS:
            return call_of(reader), between
        if reader.target not in ROW_PRESERVING:
            break
        between.append(reader)
        node = reader
    return None, []


def _of_op(call: Call, q_joined: list[Node], q: Node, k: Node) -> FoundRope:
    other, k_joined = _op_behind(k)
    if other is None or other.node is not call.node:
        raise Unmatched(f"{call.name} turns {q}, and not {k} with it")
    positions, query, key, head, table, halves = (call[i] for i in range(6))
    if (query, key) != tuple(between[-1] if between else norm for norm, between in ((q, q_joined), (k, k_joined))):
        raise Unmatched(f"{call.name} takes {query} and {key}, which are not the query's and the key's norm")
    if call[6] not in (None, 0) or call[7] not in (None, False) or {1, 2} & call.parts:
        raise Unmatched(
            f"{call.name} turns other columns than the first, turns them back, or writes into a part of a tensor"
        )
    outs, width = [call.results.get(i) for i in (1, 2)], last_width(table)
    if None in outs or width is None or head != last_width(q) or type(halves) is not bool:
        raise Unmatched(
            f"{call.name} has heads of {head} columns and a table of {width}, and the norm has {last_width(q)}"
        )
    if value(positions).dim() != 1:
        raise Unmatched(
            f"{call.name} takes positions of {value(positions).dim()} dimensions, and the fused op one for each token"
        )
    found = [
        Turned(out=out, nodes=(*between, *call.buffers, *call.nodes))
        for out, between in zip(outs, (q_joined, k_joined), strict=True)
        if out
    ]
    cos, sin = (Angles(table, start, positions) for start in (0, width // 2))
    return FoundRope(
        q=found[0], k=found[1], cos=cos, sin=sin, half=width // 2, pairs="halves" if halves else "interleaved"
    )


# ---- written out -----------------------------------------------------------------------------------------------------


class _Term(NamedTuple):
    """Columns of the norm from `start` on, times those of a factor from `column` on."""

    start: int
    sign: int
    factor: Node | None = None
    column: int = 0


class _Piece(NamedTuple):
    """Columns that are a sum of terms."""

    width: int
    terms: frozenset[_Term]


class _Row(NamedTuple):
    """What a node is, along its last dimension."""

    pieces: tuple[_Piece, ...]
    order: tuple[int, ...]
    joined: bool = False
    "Whether its heads lie in one dimension."


class _Read(NamedTuple):
    turned: Turned
    half: int
    cos: Angles
    sin: Angles


def _written_out(norm: Node, heads: int) -> _Read:
    shape = value(norm).shape
    width = last_width(norm)
    if width is None or len(shape) < 3 or not same(shape[-2], heads):
        raise Unmatched(f"the norm {norm} {tuple(shape)} has no dimension of its {heads} heads")
    rows = {norm: _Row((_Piece(width, frozenset({_Term(0, 1)})),), tuple(range(len(shape))))}
    waiting = list(norm.users)
    elsewhere: dict[Node, Node] = {}
    results: list[tuple[Node, Any]] = []
    while waiting:
        node = min(waiting)  # in the graph's order, so that all before it is known
        waiting = [each for each in waiting if each is not node]
        row = _row_of(node, rows, shape)
        if row is None:
            elsewhere |= {source: node for source in node.all_input_nodes if source in rows}  # each use counts
            continue
        rows[node] = row
        if (read := _rope_of(row, width)) is not None:
            results.append((node, read))
        else:
            waiting += [user for user in node.users if user not in rows]
    for source, reader in elsewhere.items():
        raise Unmatched(f"{what_is(reader)} reads {source}, and is no part of a rope of {norm} in a known form")
    if len(results) != 1:
        raise Unmatched(f"{len(results)} ropes of {norm} are there, expected one")
    ((node, (half, cos, sin)),) = results
    order = rows[node].order
    out = rounded_to(value(norm).dtype, node)
    coarse = next((each for each in rows if value(each) is not None and _is_coarse(each, norm)), None)
    if out is None or coarse is not None:
        raise Unmatched(f"{coarse or node} is {value(coarse or node).dtype}, and the norm {norm} {value(norm).dtype}")
    nodes = tuple(each for each in rows if each is not norm)
    turned = Turned(
        out=out,
        nodes=(*nodes, *([] if out is node else [out])),
        order=None if order == tuple(range(len(shape))) else order,
    )
    tables = (angles_of([(term.factor, term.column) for term in each], half, shape, order) for each in (cos, sin))
    return _Read(turned, half, *tables)


def _is_coarse(node: Node, norm: Node) -> bool:
    val = value(node)
    return isinstance(val, torch.Tensor) and val.dtype.itemsize < value(norm).dtype.itemsize


def _row_of(node: Node, rows: dict[Node, _Row], shape: Any) -> _Row | None:
    """What a node is, from those before it; None where it is nothing of a rope."""
    sources = [rows[source] for source in node.all_input_nodes if source in rows]
    if node.op != "call_function" or not sources:
        return None
    row = _computed(node, rows)
    if row is None or node.target in _SPLITS:
        return row
    width = sum(piece.width for piece in row.pieces)
    wanted = [*(shape[i] for i in row.order[:-1]), width]
    if same_shape(value(node).shape, wanted):
        return row._replace(joined=False)
    whole = row.order == tuple(range(len(shape))) and node.target in ROW_PRESERVING
    return row._replace(joined=True) if whole and same(value(node).shape[-1], shape[-2] * width) else None


_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)


def _computed(node: Node, rows: dict[Node, _Row]) -> _Row | None:
    args: Any = node.args
    before = rows.get(args[0]) if isinstance(args[0], Node) else None
    if node.target in (*_SPLITS, *ROW_PRESERVING):
        return before
    if before is not None and before.joined:
        return None
    if node.target is operator.getitem or node.target is aten.slice.Tensor:
        back = step_back(node)
        width = last_width(node)
        if back is None or width is None or back[0] not in rows:
            return None
        row = rows[back[0]]
        return row._replace(pieces=tuple(_cut(row.pieces, back[1], back[1] + width)))
    if node.target is aten.neg.default or is_rounding(node):
        sign = -1 if node.target is aten.neg.default else 1
        return None if before is None else before._replace(pieces=tuple(_signed(before.pieces, sign)))
    if node.target is aten.permute.default:
        dims = [dim % len(args[1]) for dim in args[1]]
        last = len(dims) - 1
        if before is None or dims[last] != last:
            return None
        return before._replace(order=tuple(before.order[dim] for dim in dims))
    if node.target is aten.cat.default:
        parts = [rows[part] for part in args[0] if part in rows]
        dim = args[1] if len(args) > 1 else node.kwargs.get("dim", 0)
        last = dim in (-1, value(node).dim() - 1) and len(parts) == len(args[0])
        if not last or any(part.joined or part.order != parts[0].order for part in parts):
            return None
        return parts[0]._replace(pieces=tuple(piece for part in parts for piece in part.pieces))
    return None if node.kwargs else _arithmetic(node, rows)


def _arithmetic(node: Node, rows: dict[Node, _Row]) -> _Row | None:
    one, other = node.args[:2]
    if node.target is aten.mul.Tensor:
        factor, row = (other, rows.get(one)) if one in rows else (one, rows.get(other))
        if row is None or row.joined or not isinstance(factor, Node) or factor in rows:
            return None
        pieces, column = [], 0
        for piece in row.pieces:
            if any(term.factor is not None for term in piece.terms):
                return None
            terms = frozenset(term._replace(factor=factor, column=column) for term in piece.terms)
            pieces.append(_Piece(piece.width, terms))
            column += piece.width
        return row._replace(pieces=tuple(pieces)) if last_width(factor) == column else None
    if node.target in ADDS or node.target is aten.sub.Tensor:
        a, b = rows.get(one), rows.get(other)
        if a is None or b is None or a.joined or b.joined or a.order != b.order:
            return None
        second = tuple(_signed(b.pieces, -1 if node.target is aten.sub.Tensor else 1))
        summed = _summed(a.pieces, second)
        return None if summed is None else a._replace(pieces=summed)
    return None


def _cut(pieces: Iterable[_Piece], start: int, stop: int) -> Iterator[_Piece]:
    """Columns `start` to `stop` of a row."""
    at = 0
    for piece in pieces:
        low, high = max(start, at), min(stop, at + piece.width)
        if low < high:
            off = low - at
            terms = (
                term._replace(start=term.start + off, column=term.column + off if term.factor is not None else 0)
                for term in piece.terms
            )
            yield _Piece(high - low, frozenset(terms))
        at += piece.width


def _signed(pieces: Iterable[_Piece], sign: int) -> Iterator[_Piece]:
    for piece in pieces:
        yield piece._replace(terms=frozenset(term._replace(sign=sign * term.sign) for term in piece.terms))


def _ends(pieces: Iterable[_Piece]) -> set[int]:
    at, found = 0, set()
    for piece in pieces:
        at += piece.width
        found.add(at)
    return found


def _summed(one: tuple[_Piece, ...], other: tuple[_Piece, ...]) -> tuple[_Piece, ...] | None:
    """The pieces of a sum; None where columns are added to themselves, which no rope does and a set of terms cannot count."""
    start, found = 0, []
    for stop in sorted(_ends(one) | _ends(other)):
        (a,), (b,) = (tuple(_cut(pieces, start, stop)) for pieces in (one, other))
        if {term.start for term in a.terms} & {term.start for term in b.terms}:
            return None
        found.append(_Piece(stop - start, a.terms | b.terms))
        start = stop
    return tuple(found)


def _rope_of(row: _Row, width: int) -> tuple[int, list[_Term], list[_Term]] | None:
    """Half of what is turned, and the terms with cos and with sin, where a row is the rope of a head of this width."""
    pieces = row.pieces
    if len(pieces) not in (2, 3) or pieces[0].width != pieces[1].width or sum(p.width for p in pieces) != width:
        return None
    half = pieces[0].width
    if len(pieces) == 3 and pieces[2].terms != {_Term(2 * half, 1)}:
        return None
    sides = [{(term.start, term.sign): term for term in piece.terms} for piece in pieces[:2]]
    if [set(side) for side in sides] != [{(0, 1), (half, -1)}, {(half, 1), (0, 1)}]:
        return None
    if any(term.factor is None for side in sides for term in side.values()):
        return None
    return half, [sides[0][0, 1], sides[1][half, 1]], [sides[0][half, -1], sides[1][0, 1]]
