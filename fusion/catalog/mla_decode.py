"""All that stands around an MLA layer's attention in a decode step, in two launches or three. Its place is in an engine's MLA layers alone."""

from __future__ import annotations

from ..chain import Fusion
from ..latent_ops import MLA_NORM_ROPE_CACHE_GROUP_QUANT, MLA_QUERY_ABSORB, MLA_QUERY_ABSORB_STATIC_QUANT
from ..sites import DECODE
from ..steps.decode import Decode, QuantisedDecode

FUSIONS = (
    Fusion(
        name="mla_decode",
        doc="two kernels or three for the norms, ropes, cache write and absorption of an MLA layer's decode step",
        level=1,
        roles=(DECODE,),
        chain=(Decode(op=MLA_QUERY_ABSORB, quantised=MLA_QUERY_ABSORB_STATIC_QUANT),),
        opt_in=True,
        nowhere="there is a place for it in MLA layers of vLLM and SGLang alone",
    ),
    Fusion(
        name="mla_decode_group_quant",
        doc="mla_decode with the query latent quantised in groups in the launch of its norms, for the fp8 linear that reads it",
        level=2,
        roles=(DECODE,),
        chain=(QuantisedDecode(op=MLA_NORM_ROPE_CACHE_GROUP_QUANT),),
        opt_in=True,
        form_of="mla_decode",
        nowhere="there is a place for it in MLA layers that vLLM compiles alone",
    ),
)
