"""The residual add and the norm after it in one launch, with both results; the norm quantised or not.

The sum is normed as it is in float32; what the residual stream carries on is the sum rounded to its dtype.
"""

from __future__ import annotations

from ..chain import Add, Fusion, Norm, quantised
from ..formats import FORMATS
from ..sites import STREAM

FUSIONS = (
    Fusion(
        name="add_rms_norm",
        doc="one kernel for the residual add and the norm that follows it",
        level=1,
        roles=STREAM,
        chain=(Add, Norm),
        pads=True,
    ),
    *quantised(
        name="add_rms_norm_{}_quant",
        doc="one kernel for the residual add, the norm after it and its quantisation to {}",
        formats=FORMATS,
        roles=STREAM,
        chain=(Add, Norm),
    ),
)
