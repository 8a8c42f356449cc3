"""The ops of an MLA decode layer beside its GEMMs and its attention kernel, declared. Nothing here needs torch.

What they compute is in `ops.mla`, by the rules of `ops.rope` and `ops.cache_layout`, in one launch each.

- `mla_norm_rope_cache`: both latent norms, the rope of the key, and the write of both to the token's slot. Also with the
  query latent quantised, and with the query latent written to a given buffer (`mla_norm_rope_cache_into`).
- `mla_query_concat`: the rope of the query beside the absorbed latent query, in one buffer. Also in fp8.
- `mla_query_absorb`: the same with the absorbing GEMM in it, for the few tokens of a decode step. Also in fp8.
- `mla_query_rope`: the rope alone, into the last columns of a buffer whose first ones the absorbing GEMM has written.
"""

from __future__ import annotations

from functools import partial

from .declare import (
    PAIRS,
    Argument,
    Cache,
    Choice,
    Epsilon,
    Flag,
    HeadWeight,
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
from .kernel_source import later
from .steps import Quant

_OPS = f"{__package__}.ops.mla"

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
        doc="written to: (slots, entry) or (pages, page size, entry), see `ops.cache_layout`; fp8 is of what a plain cache would hold.",
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
        reference=partial(later(f"{_OPS}:norm_rope_cache"), None if quant is None else quant.format),
    )


# ---- the query -------------------------------------------------------------------------------------------------------


def _rope_of(query: str) -> Rows:
    return Rows(
        name="q_rope",
        width="rope_width",
        like=query,
        heads=True,
        doc="(tokens, heads, width): the rope columns of the query; a view of columns goes in as it is.",
    )


def _query(
    name: str, doc: str, args: tuple[Argument, ...], result: Joined, quantised: bool, steady: tuple[Flag, ...] = ()
) -> Op:
    scale = (StaticScale(name="scale"), _PAIRS, QuantDtype()) if quantised else (_PAIRS,)
    reference = name.removeprefix("mla_").removesuffix("_quant")
    return Op(
        name=name, doc=doc, args=(*args, *scale, *steady), results=(result,), reference=later(f"{_OPS}:{reference}")
    )


_QUERY = (
    Rows(
        name="q_latent",
        width="kv_width",
        heads=True,
        doc="(tokens, heads, width): the query, absorbed into the latent's columns; a view of (heads, tokens, width) goes in as "
        "it is.",
    ),
    _rope_of("q_latent"),
    *_tables("q_rope"),
)


def _query_concat(name: str, said: str, quantised: bool) -> Op:
    more = ", in fp8, of what the op without the quantisation gives." if quantised else "."
    return _query(
        name,
        f"The absorbed query latent and the turned rope columns of the query beside each other{said}.",
        _QUERY,
        Joined(name="query", of="q_latent", beside="q_rope", doc=f"(tokens, heads, both widths){more}"),
        quantised,
    )


def _query_absorb(name: str, said: str, quantised: bool) -> Op:
    more = ", in fp8; the product is rounded to the dtype of the query first." if quantised else "."
    return _query(
        name,
        f"The query absorbed into the latent's columns, and its turned rope columns beside them{said}: the GEMM of each head "
        "and all behind it in one launch for up to 64 tokens (32 of more than 32 heads), in two for more (DeepSeek-V2, arXiv 2405.04434, appendix C).",
        (
            Rows(
                name="q_nope",
                width="nope_width",
                heads=True,
                doc="(tokens, heads, width): the query's columns without rope; a view of columns goes in as it is.",
            ),
            _rope_of("q_nope"),
            HeadWeight(
                name="weight",
                of="q_nope",
                doc="(heads, width, latent): what absorbs each head, the key's half of `kv_b_proj`; one of the last two strides is 1.",
            ),
            *_tables("q_rope"),
        ),
        Joined(
            name="query", of="q_nope", through="weight", beside="q_rope", doc=f"(tokens, heads, latent + rope){more}"
        ),
        quantised,
        (
            Flag(
                name="steady",
                doc="nothing on the stream writes to the weight, as to a parameter: it may be read while the kernel in front still runs.",
            ),
        ),
    )


MLA_NORM_ROPE_CACHE = _norm_rope_cache("mla_norm_rope_cache", "", None)
MLA_NORM_ROPE_CACHE_STATIC_QUANT, MLA_NORM_ROPE_CACHE_PER_TOKEN_QUANT, MLA_NORM_ROPE_CACHE_GROUP_QUANT = _QUANTISED = [
    _norm_rope_cache(
        f"mla_norm_rope_cache_{name}_quant",
        f", the query latent quantised to fp8 {how}",
        Quant(per=per, out="q"),
    )
    for name, per, how in (
        ("static", "static", "by a given scale"),
        ("per_token", "token", "with one scale per token"),
        ("group", "group", "with one scale per `group_size` columns"),
    )
]
MLA_NORM_ROPE_CACHE_INTO = Op(
    name="mla_norm_rope_cache_into",
    doc=MLA_NORM_ROPE_CACHE.doc.replace(" (DeepSeek", ", and the former to a buffer (DeepSeek"),
    args=(
        *_LATENTS,
        Rows(
            name="q_out",
            width="q_width",
            like="q",
            mutated=True,
            doc="written to, of the shape of q, no view of it: the query latent normed, rounded once.",
        ),
    ),
    results=(),
    reference=later(f"{_OPS}:norm_rope_cache_into"),
)
MLA_QUERY_CONCAT = _query_concat("mla_query_concat", "", False)
MLA_QUERY_CONCAT_STATIC_QUANT = _query_concat("mla_query_concat_static_quant", ", in fp8 by a given scale", True)
MLA_QUERY_ABSORB = _query_absorb("mla_query_absorb", "", False)
MLA_QUERY_ABSORB_STATIC_QUANT = _query_absorb("mla_query_absorb_static_quant", ", in fp8 by a given scale", True)
MLA_QUERY_ROPE = Op(
    name="mla_query_rope",
    doc="The turned rope columns of the query, written to the last columns of a buffer that holds the absorbed latent already.",
    args=(
        Rows(
            name="q_rope",
            width="rope_width",
            heads=True,
            doc="(tokens, heads, width): the rope columns of the query. The last columns of the buffer itself are turned in place; no other "
            "view of it.",
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
    reference=later(f"{_OPS}:query_rope"),
)

_LATENT_KERNEL = Kernel(
    backend="triton",
    made_by="layerfuse.fusion.backends.triton.latents:function_of",
    refuses="layerfuse.fusion.backends.triton.latents:refuses",
)
_QUERY_KERNEL = Kernel(backend="triton", made_by="layerfuse.fusion.backends.triton.queries:function_of")
_ABSORB_KERNEL = Kernel(
    backend="triton",
    made_by="layerfuse.fusion.backends.triton.absorb:function_of",
    steps="layerfuse.fusion.backends.triton.absorb:steps_of",
)
MLA = {
    **dict.fromkeys((MLA_NORM_ROPE_CACHE, MLA_NORM_ROPE_CACHE_INTO, *_QUANTISED), (_LATENT_KERNEL,)),
    **dict.fromkeys((MLA_QUERY_CONCAT, MLA_QUERY_CONCAT_STATIC_QUANT), (_QUERY_KERNEL,)),
    **dict.fromkeys((MLA_QUERY_ABSORB, MLA_QUERY_ABSORB_STATIC_QUANT), (_ABSORB_KERNEL,)),
    MLA_QUERY_ROPE: (_QUERY_KERNEL,),
}
"""The ops, with their kernels beside the reference."""
