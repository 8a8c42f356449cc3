"""Both latent norms of an MLA layer in one launch, which also quantises the query latent with one scale per token.

The query latent is normed and quantised without a rounding in between (`ops.quantisation` says how).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..chain import Fusion, Norm, Quant
from ..declare import UE8M0, Kernel, Like, Op, QuantDtype, Quantised, Scales
from ..sites import LATENTS
from .mla_dual_rms_norm import NORMS

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def reference(
    q: Tensor, kv: Tensor, qw: Tensor, kvw: Tensor, qe: float, kve: float, dtype: torch.dtype, use_ue8m0: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The query side quantised from float32, the key/value side rounded once."""
    from ..ops.norm import normalise, normalise_wide
    from ..ops.quantisation import quantise

    return (*quantise(normalise_wide(q, qw, qe), dtype, None, False, use_ue8m0), normalise(kv, kvw, kve))


FUSION = Fusion(
    name="mla_dual_rms_norm_per_token_quant",
    doc="one kernel for an MLA layer's latent norms, the query latent in fp8 with one scale per token",
    level=2,
    roles=(LATENTS,),
    chain=(Norm.of("q"), Norm.of("kv"), Quant(per="token", out="q")),
    op=Op(
        name="mla_dual_rms_norm_per_token_quant",
        doc="The dual norm, the query latent quantised to fp8 with one scale per token.",
        args=(*NORMS, QuantDtype(), UE8M0),
        results=(
            Quantised(name="q", of="q", doc="q normed, in fp8."),
            Scales(name="scales", of="q", doc="q's float32 scales, (..., 1)."),
            Like(name="kv", of="kv", doc="kv normed."),
        ),
        reference=reference,
    ),
    backends=(
        Kernel(backend="aiter"),
        Kernel(backend="triton", function="layerfuse.fusion.backends.triton.launch:mla_dual_rms_norm_per_token_quant"),
    ),
)
