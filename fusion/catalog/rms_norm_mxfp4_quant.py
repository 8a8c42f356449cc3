"""A norm and its quantisation to MXFP4: fp4 with one exponent per 32 columns in one launch."""

from __future__ import annotations

from ..chain import Fusion, Norm, Quant
from ..sites import FINAL, INPUT, POST_ATTENTION

FUSION = Fusion(
    name="rms_norm_mxfp4_quant",
    doc="one kernel for a norm and its quantisation to MXFP4: fp4 with one exponent per 32 columns",
    level=2,
    roles=(INPUT, POST_ATTENTION, FINAL),
    chain=(Norm, Quant(per="mxfp4")),
)
