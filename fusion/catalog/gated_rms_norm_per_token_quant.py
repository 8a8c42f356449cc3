"""The gated norm of a delta net's heads and its quantisation to fp8 with one scale per token in one launch."""

from __future__ import annotations

from ..chain import Fusion, GatedNorm, Quant
from ..sites import OUTPUT

FUSION = Fusion(
    name="gated_rms_norm_per_token_quant",
    doc="one kernel for a delta net's gated norm and its quantisation to fp8 with one scale per token",
    level=2,
    roles=(OUTPUT,),
    chain=(GatedNorm, Quant(per="token")),
)
