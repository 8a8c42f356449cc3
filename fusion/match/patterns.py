"""RMSNorm as compiled graphs hold it: patterns on Inductor's pattern matcher that bind input, weight and epsilon.

The forms are lines of `decomposed`; norms that are one op are in `norm_ops`. Patterns hold no state: threads share them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
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


class AnyOf(PatternExpr):  # type: ignore[misc]
    """The first alternative that matches."""

    def __init__(self, *alternatives: PatternExpr) -> None:
        super().__init__()
        self.alternatives = alternatives

    def _match(self, node: Any, ctx: Any) -> Any:
        result: Any = FailedMatch("no alternative")
        for alternative in self.alternatives:
            # A failed attempt leaves its sub-matches behind, and the next attempt must not see them.
            before = dict(ctx.pattern_to_node)
            result = ctx.match(alternative, node)
            if is_match(result):
                return result
            ctx.pattern_to_node = before
        return result


class Literal(PatternExpr):  # type: ignore[misc]
    """A number that is exactly this."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def _match(self, node: Any, ctx: Any) -> Any:
        if isinstance(node, float | int) and node == self.value:
            return Match(ctx, self)
        return FailedMatch("another number")


class Form(NamedTuple):
    """One way to write a norm. The pattern binds x, weight, epsilon, and what `norms` still has to check."""

    name: str
    pattern: CallFunction
    weight_offset: float = 0.0


def _commutative(op: Any, a: PatternExpr, b: PatternExpr, **options: Any) -> PatternExpr:
    return AnyOf(CallFunction(op, a, b, **options), CallFunction(op, b, a, **options))


def _x(widened: bool) -> PatternExpr:
    # The widened input may have other readers: it can stay when the norm goes.
    x = KeywordArg("x")
    return CallFunction(_convert, x, torch.float32, _users=MULTIPLE) if widened else x


def _normed(widened: bool) -> PatternExpr:
    """`x * rsqrt(mean(x^2) + epsilon)`."""
    square = AnyOf(
        CallFunction(aten.pow.Tensor_Scalar, _x(widened), 2),
        CallFunction(aten.mul.Tensor, _x(widened), _x(widened)),
    )
    mean = CallFunction(aten.mean.dim, square, KeywordArg("dim"), True)
    shifted = CallFunction([aten.add.Tensor, aten.add.Scalar], mean, KeywordArg("epsilon"))
    return _commutative(aten.mul.Tensor, _x(widened), CallFunction(aten.rsqrt.default, shifted))


def _weight(offset: float) -> PatternExpr:
    """The weight, widened or not, plus an offset. Several norms may read one weight."""
    weight = AnyOf(CallFunction(_convert, KeywordArg("weight"), torch.float32, _users=MULTIPLE), KeywordArg("weight"))
    if not offset:
        return weight
    return CallFunction([aten.add.Tensor, aten.add.Scalar], weight, Literal(offset), _users=MULTIPLE)


OFFSETS = (1.0, 0.0)
"""What is added to weights. A zero-centred weight is also a weight of its own, so its form comes first."""


@cache
def decomposed() -> tuple[Form, ...]:
    """The arithmetic forms, by where they round."""
    back = KeywordArg("back")
    mul = aten.mul.Tensor
    forms = []
    for offset in OFFSETS:
        weight = _weight(offset)
        # torch.nn.RMSNorm, Gemma, Qwen3-Next: the weight is applied in float32, rounded once.
        for product in _orders(mul, weight, _normed(True)):
            forms.append(Form("rounded after the weight", CallFunction(_convert, product, back), offset))
        # transformers' Llama family and vLLM: rounded before the weight, and after it.
        rounded = CallFunction(_convert, _normed(True), back)
        forms += [Form("rounded before the weight", each, offset) for each in _orders(mul, weight, rounded)]
        # The same with a float32 weight, whose product is float32 until it is converted.
        forms += [
            Form("rounded before a float32 weight", CallFunction(_convert, each, KeywordArg("after")), offset)
            for each in _orders(mul, weight, CallFunction(_convert, _normed(True), back))
        ]
        # float32 (or float64) models: nothing is converted.
        forms += [Form("plain", each, offset) for each in _orders(mul, weight, _normed(False))]
    return tuple(forms)


def _orders(op: Any, a: PatternExpr, b: PatternExpr) -> Iterator[CallFunction]:
    yield CallFunction(op, a, b)
    yield CallFunction(op, b, a)


def find_op(name: str) -> Any | None:
    """The default overload of a qualified op name, or None where no loaded library defines it."""
    namespace, op = name.split("::")
    if not torch._C._jit_get_schemas_for_operator(name):
        return None
    return getattr(getattr(torch.ops, namespace), op).default
