"""Both latent norms of an MLA layer, the query's in fp8 by a static scale, the rope of the key and the cache write in one launch."""

from __future__ import annotations

from ..chain import CacheWrite, Fusion, Norm, Quant, Rope
from ..latent_ops import MLA, MLA_NORM_ROPE_CACHE_STATIC_QUANT
from ..sites import LATENTS

FUSION = Fusion(
    name="mla_norm_rope_cache_static_quant",
    doc="one kernel for an MLA layer's latent norms, the query latent in fp8 by a static scale, the rope of its key and the write to its cache",
    level=2,
    roles=(LATENTS,),
    chain=(Norm.of("q"), Norm.of("kv"), Rope(x="k_rope"), CacheWrite, Quant(per="static", out="q")),
    op=MLA_NORM_ROPE_CACHE_STATIC_QUANT,
    backends=MLA[MLA_NORM_ROPE_CACHE_STATIC_QUANT],
    off_unless_faster=True,
)
