"""Both latent norms of an MLA layer in one launch, the query's quantised or not.

Both inputs may be column ranges of one down-projection's output; nothing is written but the two results.
"""

from __future__ import annotations

import attrs

from ..chain import Fusion, Norm, quantised
from ..compose import op_of
from ..formats import FP8
from ..kernel_source import later
from ..sites import LATENTS

CHAIN = (
    Norm.of("q", "the query latent"),
    Norm.of("kv", "the key/value latent (DeepSeek-V2, arXiv 2405.04434, section 2.1)"),
)


FUSIONS = (
    Fusion(
        name="mla_dual_rms_norm",
        doc="one kernel for the norms of an MLA layer's query and key/value latents",
        level=1,
        roles=(LATENTS,),
        chain=CHAIN,
        op=attrs.evolve(op_of("mla_dual_rms_norm", CHAIN), reference=later("layerfuse.fusion.ops.norm:normalise_both")),
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
