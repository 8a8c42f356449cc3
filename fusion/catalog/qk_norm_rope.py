"""The norms of the query's and the key's heads and the rope behind them in one launch: Qwen3, and Gemma's zero-centred norms."""

from __future__ import annotations

from ..chain import Fusion, HeadNorm, Rope
from ..declare import Kernel
from ..sites import QK

FUSIONS = (
    Fusion(
        name="qk_norm_rope",
        doc="one kernel for the norms of the query's and the key's heads and the rope behind them",
        level=1,
        roles=(QK,),
        chain=(HeadNorm.of("q", "the query's heads"), HeadNorm.of("k", "the key's"), Rope),
        backends=(Kernel(backend="triton", function="layerfuse.fusion.backends.triton.qk_norm_rope:qk_norm_rope"),),
    ),
)
