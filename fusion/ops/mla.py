"""The ops of an MLA decode layer beside its GEMMs and its attention kernel: what `rope` and `cache_layout` say, in one launch each.

- `mla_norm_rope_cache`: both latent norms, the rope of the key, and the write of both to the token's slot. Also with the
  query latent quantised.
- `mla_query_concat`: the rope of the query beside the absorbed latent query, in one buffer. Also in fp8.
- `mla_query_rope`: the rope alone, into the last columns of a buffer whose first ones the absorbing GEMM has written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from ..declare import (
    Argument,
    Cache,
    Choice,
    Epsilon,
    Index,
    Joined,
    Kernel,
    Like,
    Op,
    QuantDtype,
    Rows,
    StaticScale,
    Table,
    Weight,
    WeightOffset,
)
from ..steps import Quant
from .cache_layout import layout_of
from .norm import normalise_wide
from .quantisation import quantise, quantise_static
from .rope import PAIRS, slots_used, turn, write_entries

_PAIRS = Choice(
    name="pairs",
    words=PAIRS,
    doc="which columns the rope turns together: interleaved (2i and 2i + 1), halves (i and i + width / 2), "
    "interleaved_to_halves (reads the one and writes the other), or none.",
)


def _index(name: str, of: str, doc: str) -> Index:
    return Index(name=name, of=of, doc=f"(tokens,), int32 or int64: {doc}")


def _tables(of: str) -> tuple[Argument, ...]:
    return (
        Table(
            name="cos", of=of, doc=f"(positions, width of {of} / 2), floating: the rope's attention scaling is in it."
        ),
        Table(name="sin", of=of, doc="of the shape of cos."),
        _index("positions", of, "the row of cos and sin that each token takes."),
    )


# ---- norms, rope of the key, cache write -----------------------------------------------------------------------------

_LATENTS = (
    Rows(name="q", width="q_width", doc="(..., width): the query latent; a view of columns goes in as it is."),
    Rows(name="kv", width="kv_width", like="q", doc="(..., width): the key/value latent."),
    Rows(name="k_rope", width="rope_width", like="q", doc="(..., width): the rope columns of the key."),
    Weight(name="q_weight", of="q"),
    Weight(name="kv_weight", of="kv"),
    Epsilon(name="q_epsilon"),
    Epsilon(name="kv_epsilon"),
    *_tables("k_rope"),
    _index("slots", "kv", "where in the cache each token's entry goes; below 0: nowhere."),
    Cache(
        name="cache",
        parts=("kv", "k_rope"),
        doc="written to: (slots, entry) or (pages, page size, entry), see `ops.cache_layout`.",
    ),
    StaticScale(
        name="cache_scale",
        doc="one float32 element on the device of the rows: values of an fp8 cache are divided by it; others ignore it.",
    ),
    WeightOffset(name="q_weight_offset"),
    WeightOffset(name="kv_weight_offset"),
    _PAIRS,
)
BEFORE_OPTIONS = len(_LATENTS)
"""Arguments of `mla_norm_rope_cache`; those of a quantisation come behind them."""


def _norm_rope_cache(name: str, said: str, quant: Quant | None) -> Op:
    return Op(
        name=name,
        doc="RMSNorm of the query latent and of the key/value latent; the latter goes with the turned rope columns of the key "
        f"to its slot of the cache{said} (DeepSeek-V2, arXiv 2405.04434, section 2.1).",
        args=(*_LATENTS, *(() if quant is None else quant.arguments())),
        results=(Like(name="q", of="q", doc="the query latent normed, rounded once."),)
        if quant is None
        else quant.results("q"),
        reference=_reference(quant),
    )


def _reference(quant: Quant | None) -> Callable[..., Any]:
    def reference(*args: Any) -> Any:
        q, kv, k_rope, q_weight, kv_weight, q_epsilon, kv_epsilon, cos, sin, positions, slots, cache, scale = args[:13]
        q_offset, kv_offset, pairs = args[13:BEFORE_OPTIONS]
        normed = normalise_wide(q, q_weight, q_epsilon, q_offset)
        latent = normalise_wide(kv, kv_weight, kv_epsilon, kv_offset).reshape(-1, kv.shape[-1])
        layout = layout_of(cache, kv.shape[-1], k_rope.shape[-1], kv.dtype)
        used = slots_used(slots, layout.slots)
        rope = turn(k_rope.reshape(-1, k_rope.shape[-1]), cos, sin, positions, pairs, used)
        write_entries(cache, latent, rope, slots, scale, kv.dtype)
        return _given(normed, q, quant, args[BEFORE_OPTIONS:])

    return reference


def _given(normed: Tensor, q: Tensor, quant: Quant | None, options: tuple[Any, ...]) -> Any:
    if quant is None:
        return normed.to(q.dtype).contiguous()
    if quant.per == "static":
        return quantise_static(normed, *options)
    if quant.per == "token":
        dtype, ue8m0 = options
        return quantise(normed, dtype, None, False, ue8m0)
    dtype, group, column_major, aligned, ue8m0 = options
    return quantise(normed, dtype, group, column_major, ue8m0, aligned)


# ---- the query -------------------------------------------------------------------------------------------------------

_QUERY = (
    Rows(
        name="q_latent",
        width="kv_width",
        heads=True,
        doc="(tokens, heads, width): the query, absorbed into the latent's columns; a view of (heads, tokens, width) goes in as "
        "it is.",
    ),
    Rows(
        name="q_rope",
        width="rope_width",
        like="q_latent",
        heads=True,
        doc="(tokens, heads, width): the rope columns of the query; a view of columns goes in as it is.",
    ),
    *_tables("q_rope"),
)


def _query_concat(name: str, said: str, quantised: bool) -> Op:
    scale = (StaticScale(name="scale"), _PAIRS, QuantDtype()) if quantised else (_PAIRS,)
    return Op(
        name=name,
        doc=f"The absorbed query latent and the turned rope columns of the query beside each other{said}.",
        args=(*_QUERY, *scale),
        results=(
            Joined(
                name="query",
                of="q_latent",
                beside="q_rope",
                doc="(tokens, heads, both widths)" + (", in fp8, quantised before any rounding." if quantised else "."),
            ),
        ),
        reference=_concat_static if quantised else _concat,
    )


def _beside(
    q_latent: Tensor, q_rope: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, pairs: str
) -> Iterator[Tensor]:
    yield q_latent
    yield turn(q_rope.reshape(-1, *q_rope.shape[-2:]), cos, sin, positions, pairs).view(q_rope.shape)


def _concat(q_latent: Tensor, q_rope: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, pairs: str) -> Tensor:
    parts = _beside(q_latent, q_rope, cos, sin, positions, pairs)
    return _joined([part.to(q_latent.dtype) for part in parts])


def _concat_static(
    q_latent: Tensor, q_rope: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, scale: Tensor, pairs: str, dtype: Any
) -> Tensor:
    parts = _beside(q_latent, q_rope, cos, sin, positions, pairs)
    return quantise_static(_joined([part.float() for part in parts]), scale, dtype)


def _joined(parts: list[Tensor]) -> Tensor:
    import torch

    return torch.cat(parts, -1)


def _rope_alone(q_rope: Tensor, query: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, pairs: str) -> None:
    turned = turn(q_rope.reshape(-1, *q_rope.shape[-2:]), cos, sin, positions, pairs).view(q_rope.shape)
    query[..., query.shape[-1] - q_rope.shape[-1] :] = turned.to(query.dtype)


MLA_NORM_ROPE_CACHE = _norm_rope_cache("mla_norm_rope_cache", "", None)
MLA_NORM_ROPE_CACHE_STATIC_QUANT = _norm_rope_cache(
    "mla_norm_rope_cache_static_quant",
    ", the query latent quantised to fp8 by a given scale",
    Quant(per="static", out="q"),
)
MLA_NORM_ROPE_CACHE_PER_TOKEN_QUANT = _norm_rope_cache(
    "mla_norm_rope_cache_per_token_quant",
    ", the query latent quantised to fp8 with one scale per token",
    Quant(per="token", out="q"),
)
MLA_NORM_ROPE_CACHE_GROUP_QUANT = _norm_rope_cache(
    "mla_norm_rope_cache_group_quant",
    ", the query latent quantised to fp8 with one scale per `group_size` columns",
    Quant(per="group", out="q"),
)
MLA_QUERY_CONCAT = _query_concat("mla_query_concat", "", False)
MLA_QUERY_CONCAT_STATIC_QUANT = _query_concat("mla_query_concat_static_quant", ", in fp8 by a given scale", True)
MLA_QUERY_ROPE = Op(
    name="mla_query_rope",
    doc="The turned rope columns of the query, written to the last columns of a buffer that holds the absorbed latent already.",
    args=(
        Rows(
            name="q_rope",
            width="rope_width",
            heads=True,
            doc="(tokens, heads, width): the rope columns of the query, no view of the buffer.",
        ),
        Rows(
            name="query",
            width="query_width",
            like="q_rope",
            heads=True,
            mutated=True,
            wider_than="q_rope",
            doc="written to: (tokens, heads, wider). Its first columns are left as they are.",
        ),
        *_tables("q_rope"),
        _PAIRS,
    ),
    results=(),
    reference=_rope_alone,
)

_LATENT_KERNEL = Kernel(
    backend="triton",
    made_by="layerfuse.fusion.backends.triton.latents:function_of",
    refuses="layerfuse.fusion.backends.triton.latents:refuses",
)
_QUERY_KERNEL = Kernel(backend="triton", made_by="layerfuse.fusion.backends.triton.queries:function_of")
_AITER = Kernel(backend="aiter")
MLA = {
    MLA_NORM_ROPE_CACHE: (_LATENT_KERNEL, _AITER),
    MLA_NORM_ROPE_CACHE_STATIC_QUANT: (_LATENT_KERNEL, _AITER),
    MLA_NORM_ROPE_CACHE_PER_TOKEN_QUANT: (_LATENT_KERNEL, _AITER),
    MLA_NORM_ROPE_CACHE_GROUP_QUANT: (_LATENT_KERNEL, _AITER),
    MLA_QUERY_CONCAT: (_QUERY_KERNEL, _AITER),
    MLA_QUERY_CONCAT_STATIC_QUANT: (_QUERY_KERNEL, _AITER),
    MLA_QUERY_ROPE: (_QUERY_KERNEL, _AITER),
}
"""The ops, with their kernels beside the reference. AITER's come second: it needs more launches, or has none to call."""
