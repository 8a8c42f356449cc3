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
)
