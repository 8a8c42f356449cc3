"""Finding the quantisation of a norm or a product: what its readers compute, read backwards from the conversions to fp8.

Nothing is rewritten here. What cannot be taken in raises `Unmatched` with the reason, as a sentence.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from attrs import field, frozen
from torch.fx import Node

from ..declare import SmallScales
from ..formats import FORMATS
from ..ops.quantisation import DTYPES, swizzled_shape
from .arithmetic import CLAMPS, aten, bounds_of, convert
from .calls import Call, call_of, overload_of_op
from .errors import Unmatched
from .layouts import ROWS, Layout, layout_of
from .provenance import ROW_PRESERVING
from .quant_forms import FP8, ONE_OP_QUANTS, Described, OneOp, largest_of, name_of
from .quant_scales import FLOATS, divides, given_scale, read_scale
from .values import is_contiguous, is_number, same, same_shape, value

_ON_THE_WAY = {*ROW_PRESERVING, *CLAMPS, convert, aten.div.Tensor, aten.mul.Tensor}
"""What may lie between a tensor and its conversion to fp8."""


@frozen(kw_only=True, eq=False)
class FoundQuant:
    """One quantisation in a graph: of rows, with a scale per `columns` of them, or with one that is given."""

    form: str
    dtype: torch.dtype
    columns: int
    use_ue8m0: bool = False
    fixed: str | None = None
    "The word of a format that is no plain fp8; `dtype` is then that of the values, uint8 for packed ones."
    swizzled: bool = False
    "Whether the scales lie in tiles, see `ops.quantisation.swizzle`: in bytes, or four to an int32."
    layout: Layout | None = None
    "Where the op itself says it; None where the readers of the scales show it."
    values: Node
    "The quantised result: the elements of what is quantised, in order, in whatever shape."
    scales: Node | None = None
    "The scales, float32 or exponents, in order of their groups, in whatever shape; None where the scale is given."
    scale: Node | None = None
    "The scale that is given, static or global, of one element."
    echo: Node | None = None
    "The given scale as an op hands it on."
    nodes: tuple[Node, ...]
    "All that computes it from what is quantised, results included."
    aside: tuple[Node, ...] = field(default=())
    "What else may be unread without it: buffers, the inverse of a given scale."


@frozen(kw_only=True, eq=False)
class Readers:
    """All that reads the result of a norm or a product."""

    quants: list[FoundQuant]
    problems: list[str]
    "Why further quantisations are of no known form."
    others: list[Node]
    "What reads it unquantised."


def find_quants(normed: Node) -> list[FoundQuant]:
    """Every quantisation of a tensor, where all that reads the tensor is its quantisation.

    Raises:
        Unmatched: something else reads it, or a quantisation is of no known form.
    """
    found = readers_of(normed)
    if found.problems:
        raise Unmatched(found.problems[0])
    check_readers(found.quants)
    if found.others:
        raise Unmatched(f"{found.others[0]} reads the result too, and needs it unquantised")
    return found.quants


def readers_of(normed: Node) -> Readers:
    """The quantisations of a tensor, and what else reads it.

    Raises:
        Unmatched: nothing quantises it.
    """
    quants: list[FoundQuant] = []
    problems: list[str] = []
    views = reshapes_of(normed)
    forms = {user: form for view in views for user in view.users if (form := _one_op_form(user, view)) is not None}
    for node in (*forms, *_conversions(normed)):
        try:
            quants.append(_one_op(node, forms[node]) if node in forms else _read(node, normed))
        except Unmatched as reason:
            problems.append(str(reason))
    if not quants and not problems:
        raise Unmatched(nothing_quantises(normed))
    inside = {*views, *(node for quant in quants for node in quant.nodes)}
    others = [user for view in views for user in view.users if user not in inside]
    return Readers(quants=quants, problems=problems, others=others)


def nothing_quantises(normed: Node) -> str:
    """The reason, with what reads the tensor instead."""
    readers = ", ".join(str(user) for user in list(normed.users)[:3])
    return f"nothing quantises the result {normed}; its readers: {readers}"


def reshapes_of(node: Node) -> list[Node]:
    """A node and everything that only reshapes it: the same elements in the same order."""
    found = [node]
    for each in found:
        found += [user for user in each.users if user.target in ROW_PRESERVING and user not in found]
    return found


def unquantised(node: Node) -> Node:
    """What an fp8 tensor, or what it stands for, was before it was scaled and converted; the node itself where it is none.

    Both ways, to fp8 and back, it may be scaled once.
    """
    before, scaled, passed = node, False, False
    while isinstance(value(before), torch.Tensor) or before.target is operator.getitem:
        call = before.args[0] if before.target is operator.getitem else before
        form = ONE_OP_QUANTS.get(overload_of_op(call) or "") if isinstance(call, Node) else None
        if form is not None and isinstance(call, Node):
            source: Node = call_of(call)[form.source]
            return source
        if not passed and value(before).dtype in FP8:
            scaled, passed = False, True
        scales = before.target in (aten.div.Tensor, aten.mul.Tensor)
        large = [each for each in before.args if _is_as_large(each, before)]
        if before.target not in _ON_THE_WAY or len(large) != 1 or (scales and scaled):
            break
        scaled = scaled or scales
        (before,) = large
    return before if passed else node


def _is_as_large(node: Any, other: Node) -> bool:
    val = value(node)
    return isinstance(val, torch.Tensor) and same(val.numel(), value(other).numel())


# ---- one op ----------------------------------------------------------------------------------------------------------


def _one_op_form(node: Node, source: Node) -> OneOp | None:
    """The table's line for a node that quantises `source`."""
    form = ONE_OP_QUANTS.get(overload_of_op(node) or "")
    return form if form is not None and call_of(node)[form.source] is source else None


def _one_op(node: Node, form: OneOp) -> FoundQuant:
    call = call_of(node)
    said = form.read(call.given)
    if isinstance(said, str):
        raise Unmatched(f"{node}: {said}")
    return quant_of(call, form, said)


def quant_of(call: Call, form: OneOp, said: Described) -> FoundQuant:
    """What a call does that its table line describes.

    Raises:
        Unmatched: a result is not read, or is none that the fused op gives.
    """
    values, scales = call.results.get(form.values), call.results.get(-1 if form.scales is None else form.scales)
    if values is None or (scales is None and form.scales is not None and not said.static):
        raise Unmatched(f"one of the two results of {call.node} is not read, or both are read as one")
    if said.fixed is not None:
        return _fixed_quant(call, form, said, values, scales)
    dtype, width = value(values).dtype, value(call[form.source]).shape[-1]
    if dtype not in FP8:
        raise Unmatched(f"{call.node} quantises to {dtype}, and the fused op to fp8")
    reaches = said.largest or (said.largest_fnuz if dtype == torch.float8_e4m3fnuz else largest_of(dtype))
    if not is_number(reaches, largest_of(dtype)):
        raise Unmatched(f"{call.node} reaches {reaches:g}, and the fused op {largest_of(dtype):g}")
    known: dict[str, Any] = {
        "form": call.name,
        "dtype": dtype,
        "values": values,
        "nodes": call.nodes,
        "aside": call.buffers,
    }
    if not same_shape(value(values).shape, value(call[form.source]).shape):
        raise Unmatched(f"{call.node} pads its rows: {tuple(value(values).shape)}")
    if said.static:
        scale = given_scale(call[form.scale or 0], call[form.source])
        if scale is None:
            raise Unmatched(
                f"the scale of {call.node} comes from the values that are quantised: one for the whole tensor"
            )
        return FoundQuant(columns=width, scale=scale, echo=scales, **known)
    columns = width if said.columns is None else said.columns
    if width % columns:
        raise Unmatched(f"the last group of {call.node} is short: {columns} columns of {width}")
    val = value(scales)
    if val.dtype != torch.float32:
        raise Unmatched(f"the scales of {call.node} are {val.dtype}, and the fused op's are torch.float32")
    layout = layout_of(val) if said.layout is None else said.layout
    if layout is None:
        raise Unmatched(f"the scales of {call.node} have strides {tuple(val.stride())}, which is no known layout")
    return FoundQuant(columns=columns, use_ue8m0=said.use_ue8m0, layout=layout, scales=scales, **known)


def _fixed_quant(call: Call, form: OneOp, said: Described, values: Node, scales: Any) -> FoundQuant:
    """A format that is no plain fp8: bytes in row order, as the fused ops give them, or scales in tiles; else one scale per token."""
    made, rows = FORMATS[said.fixed or ""], value(call[form.source])
    *leading, width = rows.shape
    columns = made.block or width
    dtype = DTYPES[made.dtype]
    beside: tuple[Any, ...] = (*leading, width // columns)
    if said.swizzled:
        beside = swizzled_shape(rows.shape, width)
    kinds = {torch.uint8 if made.block else torch.float32: beside}
    if isinstance(made.results[-1], SmallScales):  # the scale itself, and as vLLM hands it on
        kinds |= {torch.float8_e4m3fn: beside, torch.int32: (*beside[:-1], beside[-1] // 4)}
    every = ((values, {dtype: (*leading, width // made.packed)}), (scales, kinds))
    for result, known in every[: len(made.results)]:
        val = value(result)
        shape = known.get(val.dtype)
        if width % columns or shape is None or not same_shape(val.shape, shape) or not is_contiguous(val):
            wanted = next(iter(known))
            raise Unmatched(
                f"{result} is {val.dtype} {tuple(val.shape)} with strides {tuple(val.stride())}, and the fused op gives "
                f"{wanted} {tuple(known[wanted])} row by row"
            )
    scale = None if form.scale is None else given_scale(call[form.scale], call[form.source])
    if form.scale is not None and scale is None:
        raise Unmatched(f"the global scale of {call.node} comes from the values that are quantised")
    return FoundQuant(
        form=call.name,
        dtype=dtype,
        columns=columns,
        fixed=said.fixed,
        swizzled=said.swizzled,
        layout=ROWS,
        values=values,
        scales=scales,
        scale=scale,
        nodes=call.nodes,
        aside=call.buffers,
    )


# ---- step by step ----------------------------------------------------------------------------------------------------


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
    nodes, clamped = [conversion], set[str]()
    scaled = _unclamped(conversion.args[0], largest_of(dtype), normed, nodes, clamped)
    if scaled is normed or not isinstance(scaled, Node) or scaled.target not in (aten.div.Tensor, aten.mul.Tensor):
        raise Unmatched(f"{conversion} converts {scaled} to fp8, which no scale was applied to")
    nodes.append(scaled)
    operands = list(scaled.args)
    behind: list[list[Node]] = [[], []]
    from_normed = [
        _back(each, normed, passed, floats=True) is normed for each, passed in zip(operands, behind, strict=True)
    ]
    if from_normed[0] is from_normed[1] or (scaled.target is aten.div.Tensor and from_normed[1]):
        raise Unmatched(f"{conversion} quantises {scaled}, which is not the result over a scale")
    nodes += behind[from_normed.index(True)]
    what, factor = operands if from_normed[0] else reversed(operands)
    aside: list[Node] = []
    scale, used = (factor, factor) if scaled.target is aten.div.Tensor else _from_factor(factor, dtype, aside)
    static = given_scale(scale, normed)
    if static is not None:
        if clamped != {"min", "max"}:
            raise Unmatched(f"{conversion} does not clamp to the format's range, which a static scale may exceed")
        if not same_shape(value(scaled).shape, value(what).shape):
            raise Unmatched(f"the scale {static} gives {scaled} dimensions that {what} has not")
        return FoundQuant(
            form="a static scale",
            dtype=dtype,
            columns=value(normed).shape[-1],
            scale=static,
            values=conversion,
            nodes=tuple(dict.fromkeys(nodes)),
            aside=tuple(dict.fromkeys(aside)),
        )
    nodes += aside
    scales = _back(scale, normed, nodes, floats=False)
    word, columns = read_scale(scales, normed, dtype, nodes)
    _check_shapes(what, used, columns)
    return FoundQuant(
        form=str(name_of(word)),
        dtype=dtype,
        columns=columns,
        use_ue8m0="u" in word,
        values=conversion,
        scales=scales,
        nodes=tuple(dict.fromkeys(nodes)),
    )


def _unclamped(node: Any, largest: float, normed: Node, nodes: list[Node], clamped: set[str]) -> Any:
    """What is clamped to the format's range, if anything is; the sides are added to `clamped`."""
    while True:
        node = _back(node, normed, nodes, floats=True)
        if not isinstance(node, Node) or node.target not in CLAMPS:
            return node
        for side, bound, wanted in zip(("min", "max"), bounds_of(node), (-largest, largest), strict=True):
            if bound is not None and not is_number(bound, wanted):
                raise Unmatched(f"{node} clamps to {bound}, and the format reaches {wanted:g}")
            if bound is not None:
                clamped.add(side)
        nodes.append(node)
        node = node.args[0]


def _from_factor(factor: Any, dtype: torch.dtype, nodes: list[Node]) -> tuple[Any, Any]:
    """The scale of which the values are multiplied by the inverse, and what has its shape."""
    inverse = _back(factor, None, nodes, floats=False)
    if not isinstance(inverse, Node):
        raise Unmatched(f"the values are multiplied by the number {inverse}, and not by the inverse of a scale")
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
    raise Unmatched(f"the values are multiplied by {inverse}, which is no inverse of a scale")


def _check_shapes(what: Any, scale: Any, columns: int) -> None:
    """One scale must go with each run of `columns` values."""
    values, scales = value(what), value(scale)
    wanted = (*values.shape[:-1], 1)
    if not same(values.shape[-1], columns):
        raise Unmatched(f"the scales are taken over {columns} columns and applied to {values.shape[-1]}")
    if len(scales.shape) != len(wanted) or not all(same(a, b) for a, b in zip(scales.shape, wanted, strict=True)):
        raise Unmatched(f"the scales {tuple(scales.shape)} are not one for each row of {tuple(values.shape)}")


# ---- what reads the intermediates ------------------------------------------------------------------------------------


def check_readers(quants: Iterable[FoundQuant], beside: Iterable[Node] = ()) -> None:
    """Everything but the results must be read by the quantisations alone.

    Args:
        quants: what one fused op is to compute.
        beside: nodes that may read intermediates, since what they read stays.

    Raises:
        Unmatched: something else reads an intermediate, or scales something else.
    """
    several = list(quants)
    inside = {*beside}
    results: set[Node] = set()
    for quant in several:
        scales = [] if quant.scales is None else reshapes_of(quant.scales)
        inside.update(quant.nodes, reshapes_of(quant.values), scales)
        results.update([quant.values, *scales], [] if quant.echo is None else [quant.echo])
    for node in dict.fromkeys(node for quant in several for node in quant.nodes):
        reader = None if node in results else next((user for user in node.users if user not in inside), None)
        if reader is not None:
            raise Unmatched(
                f"{reader} reads the intermediate {node} of the quantisation, which a fused op does not compute"
            )
    for quant in several:
        for view in [] if quant.scales is None else reshapes_of(quant.scales):
            for user in view.users:
                if user not in inside and (
                    user.target is aten.reciprocal.default or (user.target is aten.div.Tensor and user.args[1] is view)
                ):
                    raise Unmatched(f"the scale {quant.scales} is shared: {user} scales something else by it")
