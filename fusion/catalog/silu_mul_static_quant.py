"""The product inside a gated MLP and its quantisation to fp8 by a static scale in one launch."""

from __future__ import annotations

from ..chain import Fusion, Quant, SiluMul
from ..sites import ACTIVATION

FUSION = Fusion(
    name="silu_mul_static_quant",
    doc="one kernel for a gated MLP's silu(gate) * up and its quantisation to fp8 by a static scale",
    level=2,
    roles=(ACTIVATION,),
    chain=(SiluMul, Quant(per="static")),
)
