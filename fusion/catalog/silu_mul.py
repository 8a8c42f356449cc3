"""The product inside a gated MLP and its quantisation in one launch. A compiler makes one kernel of the product alone."""

from __future__ import annotations

from ..chain import SiluMul, quantised
from ..formats import FP8
from ..sites import ACTIVATION

FUSIONS = tuple(
    quantised(
        name="silu_mul_{}_quant",
        doc="one kernel for a gated MLP's silu(gate) * up and its quantisation to {}",
        formats=FP8,
        roles=(ACTIVATION,),
        chain=(SiluMul,),
    )
)
