"""Norms that graphs hold as one op, with a residual added inside or a quantisation behind where the op does that too.

A table says where the arguments and results of each op are. Nothing is imported for an engine's op.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from .adds import FoundAdd
from .arithmetic import ADDS, convert
from .calls import Call, call_of
from .errors import Unmatched
from .found import FoundNorm, PartialMatch
from .index import GraphIndex
from .quant_forms import Described, OneOp
from .quants import FoundQuant, quant_of
from .values import last_width, same, same_shape, value

_CONVERSIONS = (convert, torch.ops.aten._to_copy.default)


class NormOp(NamedTuple):
    """Where the parts of a norm are among the arguments and results of an op, as `calls.Call` counts them."""

    x: int = 0
    weight: int = 1
    epsilon: int = 2
    out: int | None = 0
    "The result that is the norm; None: it is quantised and not given itself."
    residual: int | None = None
    "The argument that is added, where it is given."
    total: int | None = None
    "The result that is the sum."
    offset_at: int | None = None
    "The argument that says what the op adds to the weight."
    whole: int | None = None
    "An argument that is None, or the width in a list, where the norm is over all of the last dimension."
    quant: OneOp | None = None


def _tokens(given: Mapping[str, Any]) -> Described | str:
    return "the scale is bounded above" if given["scale_ub"] is not None else Described(layout=None, largest_fnuz=224.0)


def _groups(given: Mapping[str, Any]) -> Described | str:
    if given["scale_ub"] is not None or given.get("scale_ue8m0"):
        return "the scale is bounded above or a power of two"
    return Described(given["group_size"], None, largest_fnuz=224.0)


def _static(given: Mapping[str, Any]) -> Described:  # noqa: ARG001 (its arguments say nothing more)
    return Described(static=True, largest_fnuz=224.0)


_IN_PLACE = NormOp(x=0, residual=1, weight=2, epsilon=3, out=0, total=1)
_INTO = NormOp(out=0, x=1, weight=2, epsilon=3)
_QUANTISED = NormOp(x=1, weight=2, epsilon=4, out=None)

NORM_OPS: dict[str, NormOp] = {
    "layerfuse::rms_norm": NormOp(offset_at=3),
    # The second result of torch's, the reciprocal root, is for the backward pass.
    "aten::rms_norm": NormOp(weight=2, epsilon=3, whole=1),
    "aten::_fused_rms_norm": NormOp(weight=2, epsilon=3, whole=1),
    "vllm_ir::rms_norm": NormOp(whole=3),
    "vllm_ir::fused_add_rms_norm": NormOp(residual=1, weight=2, epsilon=3, total=1, whole=4),
    # vLLM's csrc/libtorch_stable/torch_bindings.cpp
    "_C::rms_norm": _INTO,
    "_C::fused_add_rms_norm": _IN_PLACE,
    "_C::rms_norm_static_fp8_quant": NormOp(
        x=1, weight=2, epsilon=4, out=None, quant=OneOp(_static, source=1, scales=None, scale=3)
    ),
    "_C::fused_add_rms_norm_static_fp8_quant": NormOp(
        x=1, residual=2, weight=3, epsilon=5, out=None, total=2, quant=OneOp(_static, source=1, scales=None, scale=4)
    ),
    "_C::rms_norm_dynamic_per_token_quant": _QUANTISED._replace(
        residual=6, total=6, quant=OneOp(_tokens, source=1, scales=3)
    ),
    "_C::rms_norm_per_block_quant": _QUANTISED._replace(residual=6, total=6, quant=OneOp(_groups, source=1, scales=3)),
}
"""The ops by qualified name."""


def norm_ops(index: GraphIndex) -> Iterator[FoundNorm | PartialMatch]:
    """The norms of a graph that are one op, in its order, and those of them that cannot be replaced."""
    for call in map(call_of, index.calls(NORM_OPS)):
        yield _found(call, NORM_OPS[call.name]) or _near(call, NORM_OPS[call.name])


def _found(call: Call, form: NormOp) -> FoundNorm | None:
    x, weight, epsilon = call[form.x], call[form.weight], call[form.epsilon]
    width, tensor, factor = last_width(x), value(x), value(weight)
    out = call.node if form.out is None else call.results.get(form.out)
    if out is None or width is None or not isinstance(factor, torch.Tensor) or not isinstance(epsilon, float | int):
        return None
    offset = 0.0 if form.offset_at is None else call[form.offset_at]
    if offset == 0.0 and (stored := _stored(weight, factor)) is not None:
        weight, offset = stored, 1.0
    whole = None if form.whole is None else call[form.whole]
    if whole not in (None, [width]) or offset not in (0.0, 1.0) or isinstance(epsilon, bool):
        return None
    if factor.dim() != 1 or not same(factor.shape[0], width) or factor.device != tensor.device:
        return None
    if form.out is not None and (value(out).dtype != tensor.dtype or not same_shape(value(out).shape, tensor.shape)):
        return None
    if _part(call, form) is not None:
        return None
    try:
        add, quant = _add(call, form), _quant(call, form)
    except Unmatched:
        return None
    if _others_read(call, form):
        return None
    return FoundNorm(
        width=width,
        epsilon=float(epsilon),
        weight_offset=offset,
        form=call.name,
        x=x,
        weight=weight,
        out=out,
        nodes=(*call.nodes, *call.buffers),
        add=add,
        quant=quant,
    )


def _stored(weight: Any, factor: Any) -> Node | None:
    """The weight that one is added to in float32, as the op does that itself where it is told to; None where nothing is.

    vLLM's GemmaRMSNorm gives its op `weight.float() + 1.0`.
    """
    if not isinstance(weight, Node) or weight.target not in ADDS or not isinstance(factor, torch.Tensor):
        return None
    stored, one = weight.args
    if not isinstance(stored, Node) or one != 1 or factor.dtype != torch.float32 or weight.kwargs:
        return None
    if stored.target in _CONVERSIONS and isinstance(stored.args[0], Node):
        stored = stored.args[0]
    return stored if value(stored).dtype.is_floating_point else None


def _add(call: Call, form: NormOp) -> FoundAdd | None:
    residual = None if form.residual is None else call[form.residual]
    if residual is None:
        return None
    x, other = value(call[form.x]), value(residual)
    if x.dtype != other.dtype or x.device != other.device or not same_shape(x.shape, other.shape):
        raise Unmatched("the residual is of another kind")
    return FoundAdd(x=call[form.x], residual=residual, out=call.results.get(-1 if form.total is None else form.total))


def _quant(call: Call, form: NormOp) -> FoundQuant | None:
    if form.quant is None:
        return None
    said = form.quant.read(call.given)
    if isinstance(said, str):
        raise Unmatched(said)
    return quant_of(call, form.quant, said)


def _others_read(call: Call, form: NormOp) -> bool:
    """Whether a result is read that is none of the norm's."""
    known = {form.out, form.total}
    if form.quant is not None:
        known |= {form.quant.values, form.quant.scales}
    if len(call.results) == 1 and call.nodes == (call.node,):
        return False
    inside = {*call.nodes}
    return any(position not in known for position in call.results) or any(
        user not in inside for user in call.node.users
    )


def _part(call: Call, form: NormOp) -> str | None:
    """Why an input that the op writes into cannot be told, or None where it can."""
    part = next((i for i in (form.x, form.residual) if i in call.parts), None)
    return None if part is None else f"{call.name} reads a view of {call[part]}, and writes into it"


def _near(call: Call, form: NormOp) -> PartialMatch:
    epsilon, weight = call[form.epsilon], call[form.weight]
    return PartialMatch(
        root=call.node,
        width=last_width(call[form.x]),
        epsilon=epsilon if isinstance(epsilon, float | int | Node) else None,
        shared=_part(call, form),
        x=call[form.x] if isinstance(call[form.x], Node) else None,
        weights=(weight,) if isinstance(weight, Node) else (),
    )
