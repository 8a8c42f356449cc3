"""Both latent norms of an MLA layer in one launch, the query's quantised to fp8 with one scale per token."""

from __future__ import annotations

from ..chain import Fusion, Quant
from ..sites import LATENTS
from .mla_dual_rms_norm import CHAIN

FUSION = Fusion(
    name="mla_dual_rms_norm_per_token_quant",
    doc="one kernel for an MLA layer's latent norms, the query latent in fp8 with one scale per token",
    level=2,
    roles=(LATENTS,),
    chain=(*CHAIN, Quant(per="token", out="q")),
)
