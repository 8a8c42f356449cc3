"""A norm and its quantisation to fp8 with one scale per group of columns in one launch."""

from __future__ import annotations

from ..chain import Fusion, Norm, Quant
from ..sites import FINAL, INPUT, POST_ATTENTION

FUSION = Fusion(
    name="rms_norm_group_quant",
    doc="one kernel for a norm and its quantisation to fp8 with one scale per group of columns",
    level=2,
    roles=(INPUT, POST_ATTENTION, FINAL),
    chain=(Norm, Quant(per="group")),
)
