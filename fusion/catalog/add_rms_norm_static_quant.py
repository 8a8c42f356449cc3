"""The residual add, the norm after it and its quantisation to fp8 by a static scale in one launch."""

from __future__ import annotations

from ..chain import Add, Fusion, Norm, Quant
from ..sites import FINAL, INPUT, POST_ATTENTION

FUSION = Fusion(
    name="add_rms_norm_static_quant",
    doc="one kernel for the residual add, the norm after it and its quantisation to fp8 by a static scale",
    level=2,
    roles=(INPUT, POST_ATTENTION, FINAL),
    chain=(Add, Norm, Quant(per="static")),
)
