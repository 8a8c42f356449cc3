"""The residual add, the norm after it and its quantisation to MXFP8: fp8 with one exponent per 32 columns in one launch."""

from __future__ import annotations

from ..chain import Add, Fusion, Norm, Quant
from ..sites import FINAL, INPUT, POST_ATTENTION

FUSION = Fusion(
    name="add_rms_norm_mxfp8_quant",
    doc="one kernel for the residual add, the norm after it and its quantisation to MXFP8: fp8 with one exponent per 32 columns",
    level=2,
    roles=(INPUT, POST_ATTENTION, FINAL),
    chain=(Add, Norm, Quant(per="mxfp8")),
)
