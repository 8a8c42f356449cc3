"""The all-reduce, the residual add and the norm after it in one launch.

Every rank sums all parts in the order of the ranks, in float32, and the residual is added to the unrounded sum.
"""

from __future__ import annotations

from ..chain import Add, AllReduce, Fusion, Norm
from ..collectives import limit_of
from ..sites import FINAL, INPUT, POST_ATTENTION

FUSION = Fusion(
    name="all_reduce_add_rms_norm",
    doc="one kernel for the all-reduce, the residual add and the norm after it",
    level=1,
    roles=(INPUT, POST_ATTENTION, FINAL),
    chain=(AllReduce, Add, Norm),
    pads=True,
    limit=limit_of("plain"),
)
