"""Finding where a normed latent goes: with rope columns beside it, quantised or not, to slots of a cache.

Either an `index_put` of joined columns, by slots or by page and row of the page, or vLLM's op for the same.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from torch.fx import Node

from ..ops.cache_layout import DS_GROUP
from .activations import aten
from .calls import Call, call_of, name_of_op
from .errors import Unmatched
from .quant_forms import FP8
from .quants import check_readers, find_quants, reshapes_of
from .values import same, same_shape, value

CACHE_OP = "_C_cache_ops::concat_and_cache_mla"
"""vLLM's: (latent, rope columns, cache, slots, form of the cache, scale, whether the scale is left out)."""

BY_NAME = ("layer_name",)
"""Arguments by which an engine's op finds a layer's cache outside of the graph."""

_RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_FLOORS = ("floor", "trunc")
"""Roundings of the page of a slot: they differ below 0 only, where nothing is written."""


@frozen(kw_only=True, eq=False)
class FoundWrite:
    """One write to a cache."""

    rope: Node
    "The columns beside the latent."
    slots: Node
    cache: Node
    "What was in the cache before."
    scale: Node | None
    "Of an fp8 cache."
    written: Node
    "The cache afterwards."
    write: Node
    "The node that writes."
    nodes: tuple[Node, ...]
    "All that may be unread without it."
    leading: tuple[Any, ...]
    "The leading dimensions of the latent where it is joined with the rope columns."


def find_write(latent: Node) -> FoundWrite:
    """Where a normed latent is written to.

    Raises:
        Unmatched: it is read by something else too, or the write is of no known form.
    """
    views = reshapes_of(latent)
    readers = list(dict.fromkeys(user for view in views for user in view.users if user not in views))
    for reader in readers:
        if reader.op == "output":
            raise Unmatched(
                f"the normed latent {latent} is a result of the graph: the cache is written in another one, as where an engine "
                "splits its graphs at attention"
            )
        by_name = _found_by_name(reader)
        if by_name is not None:
            raise Unmatched(
                f"{by_name} writes the latent to the cache that it finds by the layer's name: neither cache nor slots are in "
                "this graph"
            )
    if len(readers) != 1:
        names = ", ".join(map(str, readers[:3])) or "nothing"
        raise Unmatched(f"{names} read the normed latent {latent}, which the fused op gives to the cache only")
    (reader,) = readers
    if name_of_op(reader) == CACHE_OP:
        return _of_vllm(reader, views)
    return _of_columns(reader, views)


def _found_by_name(reader: Node) -> str | None:
    """The name of an engine's op that finds what it writes to outside of the graph."""
    name = name_of_op(reader)
    if name is None:
        return None
    given = call_of(reader).given
    return name if any(given.get(argument) is not None for argument in BY_NAME) else None


# ---- vLLM's op -------------------------------------------------------------------------------------------------------


def _of_vllm(node: Node, views: list[Node]) -> FoundWrite:
    call: Call = call_of(node)
    latent, rope, cache, slots, form, scale, unscaled = (call[i] for i in range(7))
    if latent not in views or rope in views or unscaled:
        raise Unmatched(f"{node} writes to the cache in another way than by latent, rope columns and scale")
    if 2 in call.parts:
        raise Unmatched(f"the cache of {node} is a part of {cache}, and the fused op would copy it")
    written = call.results.get(2)
    if written is None:
        raise Unmatched(f"nothing reads the cache that {node} writes to")
    form = "auto" if form in ("bfloat16", "float16", "half") else form
    dtype = value(cache).dtype
    if form.startswith("fp8") and form != "fp8_ds_mla" and dtype not in FP8:
        raise Unmatched(f"the cache {cache} is {dtype} and holds {form}; the fused op takes an fp8 dtype")
    if (form == "fp8_ds_mla") is not (dtype == torch.uint8) or (form == "auto" and dtype in FP8):
        raise Unmatched(f"the cache {cache} is {dtype}, and {node} writes {form}")
    if form == "fp8_ds_mla" and value(latent).shape[-1] % DS_GROUP:
        raise Unmatched(f"{node} writes {form}, of which each {DS_GROUP} columns have a scale")
    return FoundWrite(
        rope=rope,
        slots=slots,
        cache=cache,
        scale=scale if dtype in FP8 else None,
        written=written,
        write=node,
        nodes=(*call.nodes, *views),
        leading=tuple(value(latent).shape[:-1]),
    )


# ---- index_put of joined columns -------------------------------------------------------------------------------------


def _of_columns(joined: Node, views: list[Node]) -> FoundWrite:
    latent, rope = joined_columns(joined)
    if latent not in views:
        raise Unmatched(
            f"{joined} reads the normed latent, and is neither joined with rope columns behind it nor a write to a cache"
        )
    scale, nodes = None, [joined, *views]
    entries = joined
    quantised = any(value(user).dtype in FP8 for user in _floats(joined))
    if quantised:
        quants = find_quants(joined)
        if len(quants) != 1 or quants[0].scale is None:
            raise Unmatched(f"{joined} is quantised by no scale that is given, or several times")
        check_readers(quants)
        scale, entries = quants[0].scale, quants[0].values
        nodes += quants[0].nodes
    rows = reshapes_of(entries)
    readers = list(dict.fromkeys(user for row in rows for user in row.users if user not in rows))
    if len(readers) != 1:
        names = ", ".join(map(str, readers[:3])) or "nothing"
        raise Unmatched(f"{names} read the entries {entries}, which the fused op gives to the cache only")
    (write,) = readers
    if write.op == "output":
        raise Unmatched(f"the entries {entries} are a result of the graph: the cache is written in another one")
    cache, slots = _put(write, rows)
    base, written = _base(cache, write)
    nodes += [*rows, write, *([written] if written is not write else [])]
    return FoundWrite(
        rope=rope,
        slots=slots,
        cache=base,
        scale=scale,
        written=written,
        write=write,
        nodes=tuple(dict.fromkeys(nodes)),
        leading=tuple(value(joined).shape[:-1]),
    )


def joined_columns(node: Node) -> tuple[Any, Any]:
    """The two tensors whose columns a node joins, or a pair of None."""
    if node.target is aten.cat.default and isinstance(node.args[0], list | tuple) and len(node.args[0]) == 2:
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        first, second = node.args[0]
        if isinstance(first, Node) and isinstance(second, Node) and dim in (-1, value(node).dim() - 1):
            return first, second
    return None, None


def _floats(joined: Node) -> list[Node]:
    """What entries flow into element by element: towards their quantisation, if there is one."""
    found = [joined]
    for node in found:
        for user in node.users:
            val = value(user)
            if user not in found and isinstance(val, torch.Tensor) and same_shape(val.shape, value(node).shape):
                found.append(user)
    return found


def _put(write: Node, rows: list[Node]) -> tuple[Node, Node]:
    """The cache as an `index_put` has it, and the slots."""
    if write.target in (aten.index_put_.default, aten._index_put_impl_.default):
        raise Unmatched(f"{write} writes in place in a graph that is not functional")
    if write.target not in (aten.index_put.default, aten._unsafe_index_put.default):
        raise Unmatched(f"{write} ({write.target}) reads the entries, and is no index_put to a cache")
    given: Any = (*write.args, *[None] * 4)
    cache, indices, values, accumulate = given[:4]
    if values not in rows:
        raise Unmatched(f"{write} takes the entries for something else than what it writes")
    if accumulate or write.kwargs.get("accumulate"):
        raise Unmatched(f"{write} adds to what is in the cache")
    shape = value(cache).shape
    if not all(isinstance(index, Node) for index in indices):
        raise Unmatched(f"{write} writes to all of a dimension of the cache {cache}")
    wrong = next((index for index in indices if value(index).dtype not in (torch.int32, torch.int64)), None)
    if wrong is not None:
        raise Unmatched(f"the slots {wrong} are {value(wrong).dtype}; the fused op takes int32 or int64")
    if len(indices) == 1 and len(shape) == 2:
        return cache, indices[0]
    if len(indices) == 2 and len(shape) == 3:
        return cache, _slots_of(indices[0], indices[1], shape[1])
    raise Unmatched(f"{write} writes by {len(indices)} indices to a cache {tuple(shape)}")


def _slots_of(page: Node, row: Node, size: Any) -> Node:
    """The slots whose pages and rows are given."""
    divided = page.target in (aten.div.Tensor_mode, aten.floor_divide.default)
    rounding = page.kwargs.get("rounding_mode", "floor")
    left = row.target in (aten.remainder.Scalar, aten.fmod.Scalar)
    if not divided or not left or rounding not in _FLOORS or page.args[0] is not row.args[0]:
        raise Unmatched(f"{page} and {row} are not the page of a slot and its row there")
    if not all(same(value(node) if isinstance(node, Node) else node, size) for node in (page.args[1], row.args[1])):
        raise Unmatched(f"{page} and {row} are not those of pages of {size} slots, as the cache has them")
    slots = page.args[0]
    if not isinstance(slots, Node) or value(slots).dtype not in (torch.int32, torch.int64):
        raise Unmatched(f"the slots {slots} are no int32 or int64 tensor")
    return slots


def _base(cache: Node, write: Node) -> tuple[Node, Node]:
    """The cache itself where slots of several pages are counted through, before and after the write."""
    if cache.target not in _RESHAPES or not isinstance(cache.args[0], Node):
        return cache, write
    base = cache.args[0]
    back = [
        user for user in write.users if user.target in _RESHAPES and same_shape(value(user).shape, value(base).shape)
    ]
    if len(back) != 1 or len(write.users) != 1 or value(base).dim() != 3:
        raise Unmatched(f"the cache {cache} is a view of {base}, and {write} is not read as one")
    return base, back[0]


# ---- what else is done with the cache --------------------------------------------------------------------------------


def check_cache(found: FoundWrite, before: Node) -> None:
    """Check that the write may be done ahead of a node.

    Raises:
        Unmatched: something there reads the cache as it was, or the cache is a part of another tensor.
    """
    cache = found.cache
    if _is_part(cache):
        raise Unmatched(
            f"the cache {cache} is a part or another form of {cache.args[0]}, and the fused op would copy it"
        )
    held = [cache]
    for node in held:
        held += [user for user in node.users if user not in held and _is_view(user)]
    for node in held:
        for user in node.users:
            back = user.target is aten.copy_.default and user.args[0] is node
            if user not in held and user is not found.write and not back and (before < user or user is before):
                raise Unmatched(
                    f"{user} reads the cache {cache} as it was before the write, which the fused op does earlier"
                )


def _is_view(node: Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    return any(each.alias_info is not None for each in target._schema.returns)


def _is_part(node: Node) -> bool:
    return node.op == "call_function" and _is_view(node)
