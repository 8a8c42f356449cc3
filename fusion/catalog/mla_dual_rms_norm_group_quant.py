"""Both latent norms of an MLA layer in one launch, the query's quantised to fp8 with one scale per group of columns."""

from __future__ import annotations

from ..chain import Faster, Fusion, Norm, Quant
from ..sites import LATENTS

FUSION = Fusion(
    name="mla_dual_rms_norm_group_quant",
    doc="one kernel for an MLA layer's latent norms, the query latent in fp8 with one scale per group of columns",
    level=2,
    roles=(LATENTS,),
    chain=(Norm.of("q"), Norm.of("kv"), Quant(per="group", out="q")),
    faster_in=(
        Faster(
            engine="vllm",
            archs=("sm90",),
            figure="1.01, 1.00 and 1.00 times faster per decode step at batch 1, 8 and 64, the kernels of 4 layers 11 to 13 us shorter (DeepSeek-V3 in fp8, CUTLASS linears, vLLM 0.26, H200)",
        ),
    ),
)
