"""RMSNorm as compiled graphs hold it: exact patterns for one width and epsilon, on Inductor's pattern matcher.

The forms are listed in `decomposed` and `ONE_OP_FORMS`; a new one is a line there.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch._inductor.pattern_matcher import (
    MULTIPLE,
    CallFunction,
    FailedMatch,
    KeywordArg,
    Match,
    PatternExpr,
    is_match,
)

aten = torch.ops.aten
_convert = torch.ops.prims.convert_element_type.default


class Commutative(CallFunction):  # type: ignore[misc]
    """A call of two arguments whose order does not matter."""

    def _match(self, node: Any, ctx: Any) -> Any:
        # A failed attempt leaves its sub-matches behind, and the second attempt must not see them.
        before = dict(ctx.pattern_to_node)
        result = super()._match(node, ctx)
        if is_match(result) or not isinstance(node, torch.fx.Node) or len(node.args) != 2:
            return result
        ctx.pattern_to_node = before
        straight: Any = self.flat_args_kwargs  # type: ignore[has-type]
        self.flat_args_kwargs = ([straight[0][1], straight[0][0]], straight[1])
        try:
            return super()._match(node, ctx)
        finally:
            self.flat_args_kwargs = straight


class AnyOf(PatternExpr):  # type: ignore[misc]
    """The first alternative that matches."""

    def __init__(self, *alternatives: PatternExpr) -> None:
        super().__init__()
        self.alternatives = alternatives

    def _match(self, node: Any, ctx: Any) -> Any:
        result: Any = FailedMatch("no alternative")
        for alternative in self.alternatives:
            result = ctx.match(alternative, node)
            if is_match(result):
                return result
        return result


class Literal(PatternExpr):  # type: ignore[misc]
    """A number that is exactly one of these."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.values = values

    def _match(self, node: Any, ctx: Any) -> Any:
        if isinstance(node, float | int) and node in self.values:
            return Match(ctx, self)
        return FailedMatch("another number")


def epsilon_literals(epsilon: float) -> tuple[float, ...]:
    """The numbers that stand for this epsilon in a graph: itself, and itself rounded to float32.

    `torch.rms_norm` traces its epsilon through float32, so 1e-6 appears as 9.999999974752427e-07.
    """
    rounded = struct.unpack("f", struct.pack("f", epsilon))[0]
    return (epsilon, rounded)


class Form(NamedTuple):
    """One way to write a norm: the pattern binds x and weight, and what `NormSites` still has to check."""

    name: str
    pattern: CallFunction


def _x(widened: bool) -> PatternExpr:
    # The widened input may have other readers: it can stay when the norm goes.
    x = KeywordArg("x")
    return CallFunction(_convert, x, torch.float32, _users=MULTIPLE) if widened else x


def _normed(epsilon: float, widened: bool) -> CallFunction:
    """The pattern of `x * rsqrt(mean(x^2) + epsilon)`."""
    square = AnyOf(
        CallFunction(aten.pow.Tensor_Scalar, _x(widened), 2),
        CallFunction(aten.mul.Tensor, _x(widened), _x(widened)),
    )
    mean = CallFunction(aten.mean.dim, square, KeywordArg("dim"), True)
    shifted = CallFunction([aten.add.Tensor, aten.add.Scalar], mean, Literal(*epsilon_literals(epsilon)))
    return Commutative(aten.mul.Tensor, _x(widened), CallFunction(aten.rsqrt.default, shifted))


def decomposed(epsilon: float) -> Iterator[Form]:
    """The arithmetic forms, by where they round."""
    weight = KeywordArg("weight")
    back = KeywordArg("back")
    wide_weight = AnyOf(CallFunction(_convert, KeywordArg("weight"), torch.float32, _users=MULTIPLE), weight)
    # float32 (or float64) models: nothing is converted.
    yield Form("plain", Commutative(aten.mul.Tensor, KeywordArg("weight"), _normed(epsilon, widened=False)))
    # transformers' Llama family and vLLM: rounded before the weight, and after it.
    yield Form(
        "rounded before the weight",
        Commutative(aten.mul.Tensor, KeywordArg("weight"), CallFunction(_convert, _normed(epsilon, True), back)),
    )
    # torch.nn.RMSNorm: the weight is applied in float32, rounded once.
    yield Form(
        "rounded after the weight",
        CallFunction(_convert, Commutative(aten.mul.Tensor, wide_weight, _normed(epsilon, True)), KeywordArg("back")),
    )


def _layerfuse(op: Any, _width: int, eps: Literal) -> CallFunction:
    return CallFunction(op, KeywordArg("x"), KeywordArg("weight"), eps, 0.0)


def _aten(op: Any, width: int, eps: Literal) -> CallFunction:
    return CallFunction(op, KeywordArg("x"), [width], KeywordArg("weight"), eps)


def _aten_pair(op: Any, width: int, eps: Literal) -> CallFunction:
    # The second result, the reciprocal root, is for the backward pass: a reader of it means that this must stay.
    return CallFunction(operator.getitem, _aten(op, width, eps), 0)


def _vllm(op: Any, _width: int, eps: Literal) -> CallFunction:
    return CallFunction(op, KeywordArg("x"), KeywordArg("weight"), eps)


def _vllm_whole(op: Any, _width: int, eps: Literal) -> CallFunction:
    # variance_size None: all of the width.
    return CallFunction(op, KeywordArg("x"), KeywordArg("weight"), eps, None)


ONE_OP_FORMS: tuple[tuple[str, Callable[[Any, int, Literal], CallFunction]], ...] = (
    ("layerfuse::rms_norm", _layerfuse),
    ("aten::rms_norm", _aten),
    ("aten::_fused_rms_norm", _aten_pair),
    ("vllm_ir::rms_norm", _vllm),
    ("vllm_ir::rms_norm", _vllm_whole),
)
"""Norms that graphs hold as one op: qualified name, and how its arguments lie. Ops of engines that are not loaded are
skipped, so naming them here imports nothing."""


def one_op(width: int, epsilon: float) -> Iterator[Form]:
    """The one-op forms whose op exists in this process."""
    for name, build in ONE_OP_FORMS:
        op = find_op(name)
        if op is not None:
            yield Form(name, build(op, width, Literal(*epsilon_literals(epsilon))))


def loaded_ops() -> tuple[str, ...]:
    """The names in `ONE_OP_FORMS` that exist now; an engine may be imported after the first compilation."""
    return tuple(dict.fromkeys(name for name, _ in ONE_OP_FORMS if find_op(name) is not None))


def find_op(name: str) -> Any | None:
    """The default overload of a qualified op name, or None where no loaded library defines it."""
    namespace, op = name.split("::")
    if not torch._C._jit_get_schemas_for_operator(name):
        return None
    return getattr(getattr(torch.ops, namespace), op).default
