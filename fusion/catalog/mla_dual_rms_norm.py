"""Both latent norms of an MLA layer in one launch.

Both inputs may be column ranges of one down-projection's output; nothing is written but the two results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..chain import Fusion, Norm
from ..declare import Epsilon, Kernel, Like, Op, Rows, Weight
from ..sites import LATENTS

if TYPE_CHECKING:
    from torch import Tensor

NORMS = (
    Rows(name="q", width="q_width", doc="(..., q_lora_rank): a split view goes in as it is."),
    Rows(name="kv", width="kv_width", like="q", doc="(..., kv_lora_rank)."),
    Weight(name="q_weight", of="q"),
    Weight(name="kv_weight", of="kv"),
    Epsilon(name="q_epsilon", doc="added to q's mean square; the two sides may differ."),
    Epsilon(name="kv_epsilon", doc="added to kv's mean square."),
)
"""The arguments that every dual norm has."""


def reference(
    q: Tensor, kv: Tensor, q_weight: Tensor, kv_weight: Tensor, q_epsilon: float, kv_epsilon: float
) -> tuple[Tensor, Tensor]:
    """Each norm by itself, accumulated in float32 and rounded once."""
    from ..ops.norm import normalise

    return normalise(q, q_weight, q_epsilon), normalise(kv, kv_weight, kv_epsilon)


FUSION = Fusion(
    name="mla_dual_rms_norm",
    doc="one kernel for the norms of an MLA layer's query and key/value latents",
    level=1,
    roles=(LATENTS,),
    chain=(Norm.of("q"), Norm.of("kv")),
    op=Op(
        name="mla_dual_rms_norm",
        doc="RMSNorm of the query latent and of the key/value latent (DeepSeek-V2, arXiv 2405.04434, section 2.1).",
        args=NORMS,
        results=(Like(name="q", of="q", doc="q normed."), Like(name="kv", of="kv", doc="kv normed.")),
        reference=reference,
    ),
    backends=(
        Kernel(backend="aiter"),
        Kernel(backend="triton", function="layerfuse.fusion.backends.triton.launch:mla_dual_rms_norm"),
    ),
    off_in={
        "vllm": "vLLM's compiler merges the two plain norms by itself: 467.6 us per decode step without the fusion, "
        "470.1 us with it (vLLM 0.26, H200, 6 layers, batch 1)",
    },
)
