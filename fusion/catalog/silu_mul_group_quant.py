"""The product inside a gated MLP and its quantisation to fp8 with one scale per group of columns in one launch."""

from __future__ import annotations

from ..chain import Fusion, Quant, SiluMul
from ..sites import ACTIVATION

FUSION = Fusion(
    name="silu_mul_group_quant",
    doc="one kernel for a gated MLP's silu(gate) * up and its quantisation to fp8 with one scale per group of columns",
    level=2,
    roles=(ACTIVATION,),
    chain=(SiluMul, Quant(per="group")),
)
