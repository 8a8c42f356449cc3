"""Finding the quantisation of a normed tensor: what its readers compute, read backwards from the conversions to fp8.

Nothing is rewritten here. What cannot be taken in raises `Unmatched` with the reason, as a sentence.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from attrs import frozen
from torch.fx import Node

from .errors import Unmatched
from .provenance import ROW_PRESERVING
from .quant_forms import FP8, Described, convert, describe, is_number, largest_of, name_of
from .quant_scales import FLOATS, divides, read_scale, static
from .values import same, value

aten = torch.ops.aten
_CLAMPS = (aten.clamp_min.default, aten.clamp_max.default, aten.clamp.default)
_ON_THE_WAY = {*ROW_PRESERVING, *_CLAMPS, convert, aten.div.Tensor, aten.mul.Tensor}
"""What may lie between a tensor and its conversion to fp8."""


@frozen(kw_only=True, eq=False)
class FoundQuant:
    """One quantisation in a graph: of rows, with a scale per `columns` of them."""

    form: str
    dtype: torch.dtype
    columns: int
    use_ue8m0: bool
    column_major: bool | None
    "Where the op itself says it; None where the readers of the scales show it."
    values: Node
    "The fp8 result: the elements of what is quantised, in order, in whatever shape."
    scales: Node
    "The float32 scales, in order of their groups, in whatever shape."
    nodes: tuple[Node, ...]
    "All that computes it, both results included."


def find_quants(normed: Node) -> list[FoundQuant]:
    """Every quantisation of a tensor, where all that reads the tensor is its quantisation.

    Raises:
        Unmatched: something else reads it, or a quantisation is of no known form.
    """
    whole = [
        _one_op(node, said)
        for node in reshapes_of(normed)
        for node in node.users
        if (said := describe(node)) is not None
    ]
    sites = whole + [_read(node, normed) for node in _conversions(normed)]
    if not sites:
        readers = ", ".join(str(user) for user in list(normed.users)[:3])
        raise Unmatched(f"nothing quantises the normed tensor {normed} to fp8; its readers: {readers}")
    for site in sites:
        _check_readers(site)
    inside = {node for site in sites for node in site.nodes}
    for view in reshapes_of(normed):
        for user in view.users:
            if user not in inside and user not in reshapes_of(normed):
                raise Unmatched(f"{user} reads the normed tensor too, and needs it unquantised")
    return sites


def reshapes_of(node: Node) -> list[Node]:
    """A node and everything that only reshapes it: the same elements in the same order."""
    found = [node]
    for each in found:
        found += [user for user in each.users if user.target in ROW_PRESERVING and user not in found]
    return found


def _one_op(node: Node, said: Described | str) -> FoundQuant:
    if isinstance(said, str):
        raise Unmatched(said)
    val = value(node)
    parts = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    if set(parts) != {0, 1} or len(node.users) != 2:
        raise Unmatched(f"one of the two results of {node} is not read, or both are read as one")
    width = value(node.args[0]).shape[-1]
    columns = width if said.columns is None else said.columns
    if width % columns:
        raise Unmatched(f"the last group of {node} is short: {columns} columns of {width}")
    if val[0].dtype == torch.float8_e4m3fnuz and said.largest_fnuz != largest_of(val[0].dtype):
        raise Unmatched(f"{node} reaches {said.largest_fnuz:g}, and the fused op {largest_of(val[0].dtype):g}")
    return FoundQuant(
        form=str(node.target),
        dtype=val[0].dtype,
        columns=columns,
        use_ue8m0=said.use_ue8m0,
        column_major=said.column_major,
        values=parts[0],
        scales=parts[1],
        nodes=(node, parts[0], parts[1]),
    )


def _conversions(normed: Node) -> list[Node]:
    """The conversions to fp8 that the tensor flows into by way of nothing but scaling."""
    found: list[Node] = []
    seen = [normed]
    for node in seen:
        for user in node.users:
            if user.target is convert and user.args[1] in FP8:
                found += [user] if user not in found else []
            elif user.target in _ON_THE_WAY and user not in seen:
                seen.append(user)
    return found


def _back(node: Any, stop: Node | None, passed: list[Node], *, floats: bool) -> Any:
    """The node before all reshaping, and before float conversions if those are to be passed too."""
    while isinstance(node, Node) and node is not stop:
        if node.target not in ROW_PRESERVING and not (floats and node.target is convert and node.args[1] in FLOATS):
            break
        passed.append(node)
        node = node.args[0]
    return node


def _read(conversion: Node, normed: Node) -> FoundQuant:
    """One quantisation, from its conversion backwards."""
    dtype: torch.dtype = conversion.args[1]
    nodes = [conversion]
    scaled = _unclamped(conversion.args[0], largest_of(dtype), normed, nodes)
    if scaled is normed or not isinstance(scaled, Node) or scaled.target not in (aten.div.Tensor, aten.mul.Tensor):
        raise Unmatched(f"{conversion} converts {scaled} to fp8, which no scale was applied to")
    nodes.append(scaled)
    operands = list(scaled.args)
    behind: list[list[Node]] = [[], []]
    from_normed = [
        _back(each, normed, passed, floats=True) is normed for each, passed in zip(operands, behind, strict=True)
    ]
    if from_normed[0] is from_normed[1] or (scaled.target is aten.div.Tensor and from_normed[1]):
        raise Unmatched(f"{conversion} quantises {scaled}, which is not the normed tensor over a scale")
    nodes += behind[from_normed.index(True)]
    what, factor = operands if from_normed[0] else reversed(operands)
    scale, used = (factor, factor) if scaled.target is aten.div.Tensor else _from_factor(factor, dtype, nodes)
    scales = _back(scale, normed, nodes, floats=False)
    word, columns = read_scale(scales, normed, dtype, nodes)
    _check_shapes(what, used, columns)
    return FoundQuant(
        form=str(name_of(word)),
        dtype=dtype,
        columns=columns,
        use_ue8m0="u" in word,
        column_major=None,
        values=conversion,
        scales=scales,
        nodes=tuple(dict.fromkeys(nodes)),
    )


def _unclamped(node: Any, largest: float, normed: Node, nodes: list[Node]) -> Any:
    """What is clamped to the format's range, if anything is."""
    while True:
        node = _back(node, normed, nodes, floats=True)
        if not isinstance(node, Node) or node.target not in _CLAMPS:
            return node
        bounds = dict(zip(("min", "max"), node.args[1:], strict=False)) | node.kwargs
        if node.target is aten.clamp_max.default:
            bounds = {"max": node.args[1]}
        for side, wanted in (("min", -largest), ("max", largest)):
            bound = bounds.get(side)
            if bound is not None and not is_number(bound, wanted):
                raise Unmatched(f"{node} clamps to {bound}, and the format reaches {wanted:g}")
        nodes.append(node)
        node = node.args[0]


def _from_factor(factor: Any, dtype: torch.dtype, nodes: list[Node]) -> tuple[Any, Any]:
    """The scale of which the values are multiplied by the inverse, and what has its shape."""
    inverse = _back(factor, None, nodes, floats=False)
    if not isinstance(inverse, Node):
        raise Unmatched(f"the values are multiplied by {inverse}: a static scale")
    times = 1.0
    if inverse.target is aten.mul.Tensor and isinstance(inverse.args[1], float | int):
        nodes.append(inverse)
        times, inverse = float(inverse.args[1]), inverse.args[0]
    if isinstance(inverse, Node) and inverse.target is aten.reciprocal.default:
        nodes.append(inverse)
        over = inverse.args[0]
        if times == 1.0:
            return over, factor
        if is_number(times, largest_of(dtype)):
            # x * (largest / amax), and the scale amax / largest beside it.
            amax = _back(over, None, nodes, floats=False)
            scales = [user for view in reshapes_of(amax) for user in view.users if divides(user, dtype)]
            if len(scales) == 1:
                return scales[0], factor
            raise Unmatched(
                f"the values are divided by {amax}, and its {len(scales)} quotients by the format's largest value "
                "should be one, the scale"
            )
    given = static(inverse) if isinstance(inverse, Node) else None
    raise Unmatched(given or f"the values are multiplied by {inverse}, which is no inverse of a scale")


def _check_shapes(what: Any, scale: Any, columns: int) -> None:
    """One scale must go with each run of `columns` values."""
    values, scales = value(what), value(scale)
    wanted = (*values.shape[:-1], 1)
    if not same(values.shape[-1], columns):
        raise Unmatched(f"the scales are taken over {columns} columns and applied to {values.shape[-1]}")
    if len(scales.shape) != len(wanted) or not all(same(a, b) for a, b in zip(scales.shape, wanted, strict=True)):
        raise Unmatched(f"the scales {tuple(scales.shape)} are not one for each row of {tuple(values.shape)}")


def _check_readers(site: FoundQuant) -> None:
    """Everything but the two results must be read by the quantisation alone."""
    inside = {*site.nodes, *reshapes_of(site.scales), *reshapes_of(site.values)}
    for node in site.nodes:
        if node is site.values or node in reshapes_of(site.scales):
            continue
        for user in node.users:
            if user not in inside:
                raise Unmatched(
                    f"{user} reads the intermediate {node} of the quantisation, which a fused op does not compute"
                )
    for view in reshapes_of(site.scales):
        for user in view.users:
            if user not in inside and (
                user.target is aten.reciprocal.default or (user.target is aten.div.Tensor and user.args[1] is view)
            ):
                raise Unmatched(f"the scale {site.scales} is shared: {user} scales something else by it")
