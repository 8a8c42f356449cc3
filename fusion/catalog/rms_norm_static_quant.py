"""A norm and its quantisation to fp8 by a static scale in one launch."""

from __future__ import annotations

from ..chain import Fusion, Norm, Quant
from ..sites import FINAL, INPUT, POST_ATTENTION

FUSION = Fusion(
    name="rms_norm_static_quant",
    doc="one kernel for a norm and its quantisation to fp8 by a static scale",
    level=2,
    roles=(INPUT, POST_ATTENTION, FINAL),
    chain=(Norm, Quant(per="static")),
)
