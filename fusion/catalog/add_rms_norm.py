"""The residual add and the norm after it in one launch, with both results.

The sum is normed as it is in float32; what the residual stream carries on is the sum rounded to its dtype.
"""

from __future__ import annotations

from ..chain import Add, Fusion, Norm
from ..sites import FINAL, INPUT, POST_ATTENTION

FUSION = Fusion(
    name="add_rms_norm",
    doc="one kernel for the residual add and the norm that follows it",
    level=1,
    roles=(INPUT, POST_ATTENTION, FINAL),
    chain=(Add, Norm),
    pads=True,
    off_in={
        "vllm": "vLLM's compiler merges the add into the norm by itself: with the fusion a decode step took as long, within 1 % "
        "(1.005, 1.004 and 1.001 at batch 1, 8 and 64; DeepSeek-V3 in bfloat16, vLLM 0.26, H200)",
        "sglang": "SGLang's models call an op of its own for the add and the norm (fused_add_rmsnorm)",
    },
)
