"""The query of an MLA layer that attends to latents, in fp8 by a static scale, in one launch."""

from __future__ import annotations

from ..chain import Concat, Fusion, Quant, Rope
from ..latent_ops import MLA, MLA_QUERY_CONCAT_STATIC_QUANT
from ..sites import QUERY

FUSION = Fusion(
    name="mla_query_concat_static_quant",
    doc="one kernel for the rope of an MLA layer's query, its place beside the absorbed latent, and their quantisation to fp8 by a static scale",
    level=2,
    roles=(QUERY,),
    chain=(Rope(x="q_rope"), Concat, Quant(per="static", out="query")),
    op=MLA_QUERY_CONCAT_STATIC_QUANT,
    backends=MLA[MLA_QUERY_CONCAT_STATIC_QUANT],
    off_unless_faster=True,
)
