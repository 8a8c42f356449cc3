"""`mla_norm_rope_cache_into`: the same launch with the query latent written to a given buffer.

Engines that capture a model in pieces, with its attention between them, need it: a captured piece reads where it read before.
"""

from __future__ import annotations

from typing import Any

from ..declare import Kernel, Op, Rows
from .mla import MLA_NORM_ROPE_CACHE


def _reference(*args: Any) -> None:
    *given, q_out = args
    q_out.copy_(MLA_NORM_ROPE_CACHE.reference(*given))


MLA_NORM_ROPE_CACHE_INTO = Op(
    name="mla_norm_rope_cache_into",
    doc="RMSNorm of the query latent, to a given buffer, and of the key/value latent; the latter goes with the turned rope columns of "
    "the key to its slot of the cache (DeepSeek-V2, arXiv 2405.04434, section 2.1).",
    args=(
        *MLA_NORM_ROPE_CACHE.args,
        Rows(
            name="q_out",
            width="q_width",
            like="q",
            mutated=True,
            doc="written to, of the shape of q, no view of it: the query latent normed, rounded once.",
        ),
    ),
    results=(),
    reference=_reference,
)

MLA_INTO = {
    MLA_NORM_ROPE_CACHE_INTO: (
        Kernel(
            backend="triton",
            made_by="layerfuse.fusion.backends.triton.latents:function_of",
            refuses="layerfuse.fusion.backends.triton.latents:refuses",
        ),
    )
}
"""The op, with its kernel beside the reference."""
