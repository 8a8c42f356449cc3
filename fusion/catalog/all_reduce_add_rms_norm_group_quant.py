"""The all-reduce, the residual add, the norm after it and its quantisation to fp8 with one scale per group of columns in one launch.

Every rank sums all parts in the order of the ranks, in float32, and the residual is added to the unrounded sum.
"""

from __future__ import annotations

from ..chain import Add, AllReduce, Fusion, Norm, Quant
from ..collectives import limit_of
from ..sites import FINAL, INPUT, POST_ATTENTION

FUSION = Fusion(
    name="all_reduce_add_rms_norm_group_quant",
    doc="one kernel for the all-reduce, the residual add, the norm after it and its quantisation to fp8 with one scale per group of columns",
    level=2,
    roles=(INPUT, POST_ATTENTION, FINAL),
    chain=(AllReduce, Add, Norm, Quant(per="group")),
    limit=limit_of("group"),
)
