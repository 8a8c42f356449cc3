"""All that stands around an MLA layer's attention in a decode step, in two launches or three. Its place is in an engine's MLA layers alone."""

from __future__ import annotations

from ..chain import Fusion
from ..latent_ops import MLA_QUERY_ABSORB, MLA_QUERY_ABSORB_STATIC_QUANT
from ..sites import DECODE
from ..steps.decode import Decode

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
)
