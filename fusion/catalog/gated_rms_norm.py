"""The gated norm of a delta net's heads in one launch, quantised or not."""

from __future__ import annotations

from ..chain import Fusion, GatedNorm, quantised
from ..formats import FP8
from ..sites import OUTPUT

FUSIONS = (
    Fusion(
        name="gated_rms_norm",
        doc="one kernel for a delta net's gated norm",
        level=1,
        roles=(OUTPUT,),
        chain=(GatedNorm,),
    ),
    *quantised(
        name="gated_rms_norm_{}_quant",
        doc="one kernel for a delta net's gated norm and its quantisation to {}",
        formats=FP8,
        roles=(OUTPUT,),
        chain=(GatedNorm,),
    ),
)
