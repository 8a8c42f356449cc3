"""The residual add and the norm after it in one launch, with both results.

The sum is normed as it is in float32; what the residual stream carries on is the sum rounded to its dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..chain import Add, Fusion, Norm
from ..declare import Epsilon, Kernel, Like, Op, Rows, Weight, WeightOffset
from ..sites import FINAL, INPUT, POST_ATTENTION

if TYPE_CHECKING:
    from torch import Tensor


def reference(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, weight_offset: float
) -> tuple[Tensor, Tensor]:
    """The sum in float32 (float64 for float64), then its norm and its rounding."""
    from ..ops.norm import accumulator, normalise

    wide = x.to(accumulator(x.dtype)) + residual
    return normalise(wide, weight, epsilon, weight_offset).to(x.dtype), wide.to(x.dtype).contiguous()


FUSION = Fusion(
    name="add_rms_norm",
    doc="one kernel for the residual add and the norm that follows it",
    level=1,
    roles=(INPUT, POST_ATTENTION, FINAL),
    chain=(Add, Norm(weight_offset="weight_offset")),
    op=Op(
        name="add_rms_norm",
        doc="RMSNorm of `x + residual`, and the sum itself.",
        args=(
            Rows(name="x", doc="(..., hidden_size): what attention or MLP gives."),
            Rows(name="residual", like="x", doc="of x's shape: the residual stream."),
            Weight(name="weight", of="x"),
            Epsilon(),
            WeightOffset(),
        ),
        results=(
            Like(name="normed", of="x", doc="the norm of the float32 sum."),
            Like(name="residual_out", of="x", doc="the sum, rounded to x's dtype."),
        ),
        reference=reference,
    ),
    backends=(
        Kernel(backend="aiter"),
        Kernel(backend="triton", function="layerfuse.fusion.backends.triton.launch:add_rms_norm"),
    ),
    off_in={
        "vllm": "vLLM's models call an op of its own for the add and the norm (fused_add_rms_norm)",
        "sglang": "SGLang's models call an op of its own for the add and the norm (fused_add_rmsnorm)",
    },
)
