"""Both latent norms of an MLA layer in one launch, the query's quantised to fp8 by a static scale."""

from __future__ import annotations

from ..chain import Fusion, Quant
from ..sites import LATENTS
from .mla_dual_rms_norm import CHAIN

FUSION = Fusion(
    name="mla_dual_rms_norm_static_quant",
    doc="one kernel for an MLA layer's latent norms, the query latent in fp8 by a static scale",
    level=2,
    roles=(LATENTS,),
    chain=(*CHAIN, Quant(per="static", out="q")),
)
