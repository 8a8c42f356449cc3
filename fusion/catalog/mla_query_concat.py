"""The query of an MLA layer that attends to latents, in one launch: its rope, beside the absorbed latent."""

from __future__ import annotations

from ..chain import Concat, Fusion, Rope
from ..latent_ops import MLA, MLA_QUERY_CONCAT
from ..sites import QUERY

FUSION = Fusion(
    name="mla_query_concat",
    doc="one kernel for the rope of an MLA layer's query and its place beside the absorbed latent",
    level=1,
    roles=(QUERY,),
    chain=(Rope(x="q_rope"), Concat),
    op=MLA_QUERY_CONCAT,
    backends=MLA[MLA_QUERY_CONCAT],
    off_unless_faster=True,
    off_in={
        "vllm": "vLLM's attention op joins the query itself, outside of what is compiled",
    },
)
