"""The residual add and the norm after it in one launch, with both results.

The sum is normed as it is in float32; what the residual stream carries on is the sum rounded to its dtype.
"""

from __future__ import annotations

from ..chain import Add, Fusion, Norm
from ..sites import FINAL, INPUT, POST_ATTENTION

FUSION = Fusion(
    name="add_rms_norm",
    doc="one kernel for the residual add and the norm that follows it",
    level=1,
    roles=(INPUT, POST_ATTENTION, FINAL),
    chain=(Add, Norm),
    pads=True,
)
