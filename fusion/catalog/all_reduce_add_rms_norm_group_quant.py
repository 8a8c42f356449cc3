"""The all-reduce, the residual add, the norm after it and its quantisation to fp8 with one scale per group of columns in one launch.

Every rank sums all parts in the order of the ranks, in float32, and the residual is added to the unrounded sum.
"""

from __future__ import annotations

from ..chain import Add, AllReduce, Faster, Fusion, Norm, Quant
from ..collectives import limit_of
from ..sites import FINAL, INPUT, POST_ATTENTION

FUSION = Fusion(
    name="all_reduce_add_rms_norm_group_quant",
    doc="one kernel for the all-reduce, the residual add, the norm after it and its quantisation to fp8 with one scale per group of columns",
    level=2,
    roles=(INPUT, POST_ATTENTION, FINAL),
    chain=(AllReduce, Add, Norm, Quant(per="group")),
    limit=limit_of("group"),
    faster_in=(
        Faster(
            engine="vllm",
            archs=("sm90",),
            figure="1.11, 1.08 and 1.07 times faster per decode step at batch 1, 8 and 64, together with all_reduce_add_rms_norm (DeepSeek-V3 in fp8, CUTLASS linears, TP 2, vLLM 0.26 without FlashInfer, H200)",
            ranks=2,
            unless="all_reduce_add_rms_norm",
        ),
    ),
)
