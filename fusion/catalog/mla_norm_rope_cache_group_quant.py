"""Both latent norms of an MLA layer, the query's in fp8 with one scale per group of columns, the rope of the key and the cache write."""

from __future__ import annotations

from ..chain import CacheWrite, Fusion, Norm, Quant, Rope
from ..latent_ops import MLA, MLA_NORM_ROPE_CACHE_GROUP_QUANT
from ..sites import LATENTS

FUSION = Fusion(
    name="mla_norm_rope_cache_group_quant",
    doc="one kernel for an MLA layer's latent norms, the query latent in fp8 with one scale per group of columns, the rope of its key and the write to its cache",
    level=2,
    roles=(LATENTS,),
    chain=(Norm.of("q"), Norm.of("kv"), Rope(x="k_rope"), CacheWrite, Quant(per="group", out="q")),
    op=MLA_NORM_ROPE_CACHE_GROUP_QUANT,
    backends=MLA[MLA_NORM_ROPE_CACHE_GROUP_QUANT],
    off_unless_faster=True,
)
