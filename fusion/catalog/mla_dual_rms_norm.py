"""Both latent norms of an MLA layer in one launch, the query's quantised or not.

Both inputs may be column ranges of one down-projection's output; nothing is written but the two results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from ..chain import Fusion, Norm, quantised
from ..compose import op_of
from ..formats import FP8
from ..sites import LATENTS

if TYPE_CHECKING:
    from torch import Tensor

CHAIN = (
    Norm.of("q", "the query latent"),
    Norm.of("kv", "the key/value latent (DeepSeek-V2, arXiv 2405.04434, section 2.1)"),
)


def reference(
    q: Tensor,
    kv: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    q_epsilon: float,
    kv_epsilon: float,
    q_weight_offset: float,
    kv_weight_offset: float,
) -> tuple[Tensor, Tensor]:
    """Each norm by itself, accumulated in float32 and rounded once: with a way of its own for a single row."""
    from ..ops.norm import normalise

    return normalise(q, q_weight, q_epsilon, q_weight_offset), normalise(kv, kv_weight, kv_epsilon, kv_weight_offset)


FUSIONS = (
    Fusion(
        name="mla_dual_rms_norm",
        doc="one kernel for the norms of an MLA layer's query and key/value latents",
        level=1,
        roles=(LATENTS,),
        chain=CHAIN,
        op=attrs.evolve(op_of("mla_dual_rms_norm", CHAIN), reference=reference),
    ),
    *quantised(
        name="mla_dual_rms_norm_{}_quant",
        doc="one kernel for an MLA layer's latent norms, the query latent in {}",
        formats=FP8,
        roles=(LATENTS,),
        chain=CHAIN,
        out="q",
    ),
)
