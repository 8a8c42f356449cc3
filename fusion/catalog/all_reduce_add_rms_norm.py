"""The all-reduce, the residual add and the norm after it in one launch; the norm quantised or not.

Every rank sums all parts in the order of the ranks, in float32, and the residual is added to the unrounded sum.
"""

from __future__ import annotations

from ..chain import Add, AllReduce, Fusion, Norm, quantised
from ..collectives import limit_of
from ..formats import FP8
from ..sites import STREAM

FUSIONS = (
    Fusion(
        name="all_reduce_add_rms_norm",
        doc="one kernel for the all-reduce, the residual add and the norm after it",
        level=1,
        roles=STREAM,
        chain=(AllReduce, Add, Norm),
        pads=True,
        limit=limit_of("plain"),
    ),
    *quantised(
        name="all_reduce_add_rms_norm_{}_quant",
        doc="one kernel for the all-reduce, the residual add, the norm after it and its quantisation to {}",
        formats=FP8,
        roles=STREAM,
        chain=(AllReduce, Add, Norm),
        limit=limit_of,
    ),
)
