"""The product inside a gated MLP and its quantisation to fp8 with one scale per token in one launch."""

from __future__ import annotations

from ..chain import Fusion, Quant, SiluMul
from ..sites import ACTIVATION

FUSION = Fusion(
    name="silu_mul_per_token_quant",
    doc="one kernel for a gated MLP's silu(gate) * up and its quantisation to fp8 with one scale per token",
    level=2,
    roles=(ACTIVATION,),
    chain=(SiluMul, Quant(per="token")),
)
