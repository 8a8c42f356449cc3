"""The residual add, the norm after it and its quantisation to fp8 with one scale per group of columns in one launch."""

from __future__ import annotations

from ..chain import Add, Fusion, Norm, Quant
from ..sites import FINAL, INPUT, POST_ATTENTION

FUSION = Fusion(
    name="add_rms_norm_group_quant",
    doc="one kernel for the residual add, the norm after it and its quantisation to fp8 with one scale per group of columns",
    level=2,
    roles=(INPUT, POST_ATTENTION, FINAL),
    chain=(Add, Norm, Quant(per="group")),
    off_in={
        "vllm": (
            "measured faster, together with rms_norm_group_quant: 908.6 us per decode step without them, 852.0 us "
            "with (vLLM 0.26, H200, DeepSeek-V3 in fp8, 4 dense layers, batch 1); its greedy tokens are not yet shown "
            "to be vLLM's"
        ),
    },
)
