"""Both latent norms of an MLA layer, the rope of the key and the write to the cache of latents in one launch."""

from __future__ import annotations

from ..chain import CacheWrite, Fusion, Norm, Rope
from ..latent_ops import MLA, MLA_NORM_ROPE_CACHE
from ..sites import LATENTS

FUSION = Fusion(
    name="mla_norm_rope_cache",
    doc="one kernel for an MLA layer's latent norms, the rope of its key and the write to its cache",
    level=1,
    roles=(LATENTS,),
    chain=(Norm.of("q"), Norm.of("kv"), Rope(x="k_rope"), CacheWrite),
    op=MLA_NORM_ROPE_CACHE,
    backends=MLA[MLA_NORM_ROPE_CACHE],
    off_unless_faster=True,
    off_in={
        "vllm": "vLLM's models write the cache in an op that finds it by the layer's name: cache and slots are in no graph",
    },
)
