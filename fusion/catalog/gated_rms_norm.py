"""The gated norm of a delta net's heads in one launch."""

from __future__ import annotations

from ..chain import Fusion, GatedNorm
from ..sites import OUTPUT

FUSION = Fusion(
    name="gated_rms_norm",
    doc="one kernel for a delta net's gated norm",
    level=1,
    roles=(OUTPUT,),
    chain=(GatedNorm,),
)
