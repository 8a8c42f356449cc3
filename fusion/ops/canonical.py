"""The canonical ops: one norm, and the quantisations of activations.

They are what a model may call to be recognised at once. What no fusion has taken is lowered back to plain arithmetic.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..declare import Epsilon, Like, Op, Rows, Weight, WeightOffset
from ..formats import FORMATS, Format
from ..steps import Quant
from .norm import normalise, normalise_backward

_X = Rows(name="x", doc="(..., width), any strides.", any_strides=True)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001 (torch passes it by name)
    x, weight, ctx.epsilon, ctx.weight_offset = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    return (*normalise_backward(grad, x, weight, ctx.epsilon, ctx.weight_offset), None, None)


RMS_NORM = Op(
    name="rms_norm",
    doc="RMSNorm over the last dimension (arXiv 1910.07467).",
    args=(_X, Weight(name="weight", of="x"), Epsilon(), WeightOffset()),
    results=(Like(name="normed", of="x", doc="x normed."),),
    reference=normalise,
    backward=_backward,
    setup_context=_setup,
)


def _alone(form: Format) -> Op:
    """The quantisation to a format, and nothing else."""
    step = Quant(per=form.word)
    return Op(
        name=form.op,
        doc=f"Quantise to {form.says}; `quantisation` says how.",
        args=(_X, *step.arguments()),
        results=step.results("x"),
        reference=form.function,
    )


CANONICAL = (RMS_NORM, *map(_alone, FORMATS.values()))
