"""A norm and its quantisation in one launch. A norm alone is one kernel already."""

from __future__ import annotations

from ..chain import Norm, quantised
from ..formats import FORMATS
from ..sites import STREAM

FUSIONS = tuple(
    quantised(
        name="rms_norm_{}_quant",
        doc="one kernel for a norm and its quantisation to {}",
        formats=FORMATS,
        roles=STREAM,
        chain=(Norm,),
    )
)
