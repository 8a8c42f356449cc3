"""Reading the arithmetic of a scale, backwards from the scale to the values that it comes from.

What is of no known form raises `Unmatched` with the reason, as a sentence.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from .arithmetic import CLAMPS, aten, bounds_of, convert
from .errors import Unmatched
from .provenance import ROW_PRESERVING, unshaped
from .quant_forms import LARGEST_FLOOR, largest_of, name_of, spell
from .values import is_number, same, value

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Conversions among these may stand anywhere: they are roundings."""


def given_scale(scale: Any, normed: Node) -> Node | None:
    """A scale that does not come from the normed tensor, before reshapes; None where it does.

    Raises:
        Unmatched: it is no input or constant of the graph, or not of one element.
    """
    if not isinstance(scale, Node):
        raise Unmatched(f"the values are divided by the number {scale}, and the fused op's static scale is a tensor")
    sources, stack = {scale}, [scale]
    for each in stack:
        if each is normed:
            return None
        new = [source for source in each.all_input_nodes if source not in sources]
        sources.update(new)
        stack += new
    given = unshaped(scale)
    val = value(given)
    if given.op in ("placeholder", "get_attr") and not same(val.numel(), 1):
        raise Unmatched(f"the scale {given} is static and of shape {tuple(val.shape)}; the fused op takes one element")
    large = next((each for each in stack if not _is_single(each)), None)
    if large is not None:
        raise Unmatched(f"the scale {given} comes from {large}, and not from the values that are quantised")
    if val.dtype not in FLOATS:
        raise Unmatched(f"the scale {given} is static and {val.dtype}; the fused op takes a float")
    return given


def _is_single(node: Node) -> bool:
    val = value(node)
    return not isinstance(val, torch.Tensor) or same(val.numel(), 1)


def divides(node: Node, dtype: torch.dtype) -> bool:
    """Whether a node divides by the format's largest value."""
    largest = largest_of(dtype)
    if node.target is aten.div.Tensor:
        return is_number(node.args[1], largest)
    return node.target is aten.mul.Tensor and is_number(node.args[1], 1 / largest)


def read_scale(scales: Any, normed: Node, dtype: torch.dtype, nodes: list[Node]) -> tuple[str, int]:
    """The word of a scale, and how many columns share one; its nodes are added to `nodes`."""
    word, reduced = "", False
    columns: int | None = None
    node = scales
    while node is not normed:
        if not isinstance(node, Node):
            raise Unmatched(f"the scale is the number {node}: a static scale")
        nodes.append(node)
        if node.target in ROW_PRESERVING or (node.target is convert and node.args[1] in FLOATS):
            node = node.args[0]
            continue
        letter, before = _step(node, dtype, nodes, reduced)
        if letter == "r":
            columns, reduced = _columns(node, before, normed), True
        if letter == "f":
            _check_floor(node, word, dtype)
        word, node = letter + word, before
    if columns is None:
        raise Unmatched(f"the scale {scales} is {spell(word)}: there is none for each row or group")
    if name_of(word) is None:
        raise Unmatched(f"the scale {scales} is written in no known form ({spell(word)})")
    if value(scales).dtype != torch.float32:
        raise Unmatched(f"the scale {scales} is {value(scales).dtype}, and the fused op's are torch.float32")
    return word, columns


def _step(node: Node, dtype: torch.dtype, nodes: list[Node], reduced: bool) -> tuple[str, Any]:
    """The letter of one step, and what it starts from."""
    target = node.target
    if target is aten.abs.default:
        return "a", node.args[0]
    if target is aten.amax.default:
        return "r", node.args[0]
    if target is operator.getitem and node.args[0].target is aten.max.dim and node.args[1] == 0:
        nodes.append(node.args[0])
        return "r", node.args[0].args[0]
    if target is aten.max.default:
        raise Unmatched(f"{node} takes one scale for the whole tensor")
    if target in CLAMPS:
        if bounds_of(node)[1] is not None:
            raise Unmatched(f"the scale is bounded above ({node}), and the fused op's is not")
        return "f", node.args[0]
    power = _power_of_two(node, nodes)
    if power is not None:
        return "u", power
    if divides(node, dtype):
        return "d", node.args[0]
    if target in (aten.div.Tensor, aten.mul.Tensor) and isinstance(node.args[1], float | int):
        verb = "divides" if target is aten.div.Tensor else "multiplies"
        raise Unmatched(f"{node} {verb} the scale by {node.args[1]:g}; the largest {dtype} is {largest_of(dtype):g}")
    if reduced:
        raise Unmatched(f"the scale comes from {node}, and not from the values that are quantised")
    raise Unmatched(f"the scale comes from {node}, which is no step of a known quantisation")


def _power_of_two(node: Node, nodes: list[Node]) -> Any | None:
    """What is rounded up to a power of two: the x of 2 ** ceil(log2(x))."""
    if node.target is aten.exp2.default:
        ceil = node.args[0]
    elif node.target is aten.pow.Scalar and node.args[0] == 2:
        ceil = node.args[1]
    else:
        return None
    if not isinstance(ceil, Node) or ceil.target is not aten.ceil.default:
        return None
    log = ceil.args[0]
    if not isinstance(log, Node) or log.target is not aten.log2.default:
        return None
    nodes += [ceil, log]
    return log.args[0]


def _columns(node: Node, before: Any, normed: Node) -> int:
    """How many columns one maximum is taken over."""
    reduction = node.args[0] if node.target is operator.getitem else node
    val = value(before)
    given = reduction.args[1] if len(reduction.args) > 1 else []
    dims = [given] if isinstance(given, int) else list(given)
    if not dims or (len(dims) == val.dim() > 1):
        raise Unmatched(f"{reduction} takes one scale for the whole tensor")
    columns, width = val.shape[-1], value(normed).shape[-1]
    if dims not in ([-1], [val.dim() - 1]):
        raise Unmatched(f"{reduction} takes the largest value along dimensions {dims}, not along the last")
    if not isinstance(columns, int) or width % columns:
        raise Unmatched(f"{reduction} takes the largest of {columns} values, which are no part of one row of {width}")
    return columns


def _check_floor(node: Node, after: str, dtype: torch.dtype) -> None:
    floor, _ = bounds_of(node)
    # What comes before a floor is read after it; a floor under the amax still has the division ahead.
    amax = floor if "d" in after else (floor * largest_of(dtype) if isinstance(floor, float | int) else None)
    if not isinstance(amax, float | int):
        raise Unmatched(f"the scale's floor {floor} ({node}) is no number")
    if amax > LARGEST_FLOOR * (1 + 1e-6):
        raise Unmatched(f"{node} raises the largest magnitude of a row to {amax:g}, which concerns more than tiny rows")
