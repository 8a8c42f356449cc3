"""What is expected of every binding in every release, written down from the record of AITER's sources by hand.

Nothing here is computed by the code that is tested.
"""

from __future__ import annotations

from attrs import frozen


@frozen
class Works:
    """It binds, follows the convention known since this release, and gives the right numbers."""

    since: str


@frozen
class No:
    """It is refused; the reason has these words."""

    words: str


ABSENT = No("has no such function")
LAST = "v0.1.20.post1"

Spans = tuple[tuple[str, str, Works | No], ...]

HIP_QUANT: Spans = (
    ("v0.1.5", "v0.1.10", ABSENT),
    ("v0.1.10.post1", "v0.1.16.post6", Works("v0.1.10.post1")),
    ("v0.1.17-rc0", LAST, Works("v0.1.17-rc0")),
)
HIP_BYTES: Spans = (
    ("v0.1.5", "v0.1.10", ABSENT),
    ("v0.1.10.post1", "v0.1.17", No("floats into a buffer of bytes")),
    ("v0.1.17-longctx", LAST, Works("v0.1.17-rc0")),
)
LATENTS_TOKEN: Spans = (
    ("v0.1.5", "v0.1.13.post1", ABSENT),
    ("v0.1.14-rc0", LAST, Works("v0.1.14-rc0")),
)
LATENTS_GROUP: Spans = (
    ("v0.1.5", "v0.1.11.post1", ABSENT),
    ("v0.1.12", "v0.1.12.post2", Works("v0.1.12")),
    ("v0.1.13.dev0", "v0.1.13.post1", Works("v0.1.13.dev0")),
    ("v0.1.14-rc0", LAST, Works("v0.1.14-rc0")),
)
TRITON_GROUP: Spans = (
    ("v0.1.5", "v0.1.6.post1", ABSENT),
    ("v0.1.6.post2", "v0.1.9.post1", Works("v0.1.6.post2")),
    ("v0.1.10", "v0.1.19", Works("v0.1.10")),
    ("v0.1.19.post1", LAST, Works("v0.1.19.post1")),
)
TRITON_STATIC: Spans = (
    ("v0.1.5", "v0.1.6.post1", ABSENT),
    ("v0.1.6.post2", "v0.1.9", Works("v0.1.6.post2")),
    ("v0.1.9.post1", "v0.1.9.post1", Works("v0.1.9.post1")),
    ("v0.1.10", LAST, Works("v0.1.10")),
)
TRITON_STATIC_KEPT: Spans = (
    ("v0.1.5", "v0.1.6.post1", ABSENT),
    ("v0.1.6.post2", "v0.1.9", No("asks the missing second input")),
    *TRITON_STATIC[2:],
)
TRITON_PAD: Spans = (
    ("v0.1.5", "v0.1.6.post1", ABSENT),
    ("v0.1.6.post2", "v0.1.9.post1", Works("v0.1.6.post2")),
    ("v0.1.10", LAST, Works("v0.1.10")),
)
TRITON_MXFP4: Spans = (
    ("v0.1.5", "v0.1.6.post1", No("its scales lie column by column")),
    ("v0.1.6.post2", "v0.1.7.post2", Works("v0.1.6.post2")),
    ("v0.1.7.post3", "v0.1.9.post1", Works("v0.1.7.post3")),
    ("v0.1.10", "v0.1.19.post2", Works("v0.1.10")),
    ("v0.1.20", LAST, Works("v0.1.20")),
)
TRITON_MXFP4_KEPT: Spans = (
    ("v0.1.5", "v0.1.6.post1", No("its scales lie column by column")),
    ("v0.1.6.post2", "v0.1.7.post2", No("does not return the plain norm")),
    *TRITON_MXFP4[2:],
)
TRITON_ACT: Spans = (
    ("v0.1.5", "v0.1.6.post1", ABSENT),
    ("v0.1.6.post2", LAST, Works("v0.1.6.post2")),
)

QUERY: Spans = (("v0.1.5", "v0.1.9.post1", Works("v0.1.5")), ("v0.1.10", LAST, Works("v0.1.10")))


def hip_cache(words: str) -> Spans:
    """The C++ function that turns query and key and writes the cache, which serves no op of ours."""
    return ("v0.1.5", "v0.1.7.post5", ABSENT), ("v0.1.8", LAST, No(words))


def triton_cache(words: str) -> Spans:
    """The same on Triton."""
    return ("v0.1.5", "v0.1.6.post1", ABSENT), ("v0.1.6.post2", LAST, No(words))


FUSED_AR: Spans = (
    ("v0.1.16", "v0.1.16.post6", Works("v0.1.16")),
    ("v0.1.17-rc0", "v0.1.17", Works("v0.1.17-rc0")),
    ("v0.1.17-longctx", LAST, Works("v0.1.17-longctx")),
)
FUSED_AR_GROUP: Spans = (
    ("v0.1.5", "v0.1.13.post1", ABSENT),
    ("v0.1.14-rc0", "v0.1.16.post6", Works("v0.1.14-rc0")),
    ("v0.1.17-rc0", "v0.1.17", Works("v0.1.17-rc0")),
    ("v0.1.17-longctx", "v0.1.19.post1", Works("v0.1.14-rc0")),
    ("v0.1.19.post2", LAST, Works("v0.1.17-rc0")),
)

EXPECTED: dict[str, Spans] = {
    "add_rms_norm": (
        ("v0.1.5", "v0.1.16.post6", Works("v0.1.5")),
        ("v0.1.17-rc0", LAST, Works("v0.1.17-rc0")),
    ),
    "add_rms_norm.triton": TRITON_PAD,
    "add_rms_norm_pad": TRITON_PAD,
    "rms_norm_mxfp8_quant": HIP_BYTES,
    "rms_norm_mxfp8_quant.triton": (("v0.1.5", "v0.1.15.post3", ABSENT), ("v0.1.16", LAST, Works("v0.1.16"))),
    "add_rms_norm_mxfp8_quant": HIP_BYTES,
    "rms_norm_mxfp4_quant": TRITON_MXFP4,
    "rms_norm_mxfp4_quant_with_norm": TRITON_MXFP4_KEPT,
    "add_rms_norm_mxfp4_quant": TRITON_MXFP4,
    "add_rms_norm_mxfp4_quant_with_norm": TRITON_MXFP4_KEPT,
    "rms_norm_per_token_quant": HIP_QUANT,
    "rms_norm_per_token_quant.latents": LATENTS_TOKEN,
    "rms_norm_per_token_quant.triton": TRITON_GROUP,
    "rms_norm_group_quant": HIP_QUANT,
    "rms_norm_group_quant.latents": LATENTS_GROUP,
    "rms_norm_group_quant.triton": TRITON_GROUP,
    "rms_norm_static_quant": TRITON_STATIC,
    "rms_norm_per_token_quant_with_norm.latents": LATENTS_TOKEN,
    "rms_norm_per_token_quant_with_norm.triton": TRITON_GROUP,
    "rms_norm_group_quant_with_norm.latents": LATENTS_GROUP,
    "rms_norm_group_quant_with_norm.triton": TRITON_GROUP,
    "rms_norm_static_quant_with_norm": TRITON_STATIC_KEPT,
    "add_rms_norm_per_token_quant": HIP_QUANT,
    "add_rms_norm_per_token_quant.latents": LATENTS_TOKEN,
    "add_rms_norm_per_token_quant.triton": TRITON_GROUP,
    "add_rms_norm_group_quant": HIP_QUANT,
    "add_rms_norm_group_quant.latents": LATENTS_GROUP,
    "add_rms_norm_group_quant.triton": TRITON_GROUP,
    "add_rms_norm_static_quant": TRITON_STATIC,
    "add_rms_norm_per_token_quant_with_norm.latents": LATENTS_TOKEN,
    "add_rms_norm_per_token_quant_with_norm.triton": TRITON_GROUP,
    "add_rms_norm_group_quant_with_norm.latents": LATENTS_GROUP,
    "add_rms_norm_group_quant_with_norm.triton": TRITON_GROUP,
    "add_rms_norm_static_quant_with_norm": TRITON_STATIC_KEPT,
    "mla_dual_rms_norm": (
        ("v0.1.5", "v0.1.11.post1", ABSENT),
        ("v0.1.12", "v0.1.13.post1", Works("v0.1.12")),
        ("v0.1.14-rc0", LAST, Works("v0.1.14-rc0")),
    ),
    "mla_dual_rms_norm_per_token_quant": LATENTS_TOKEN,
    "mla_dual_rms_norm_per_token_quant.triton": TRITON_GROUP,
    "mla_dual_rms_norm_group_quant": LATENTS_GROUP,
    "mla_dual_rms_norm_group_quant.triton": TRITON_GROUP,
    "mla_dual_rms_norm_static_quant": TRITON_STATIC,
    "mla_dual_rms_norm_per_token_quant_with_norm": LATENTS_TOKEN,
    "mla_dual_rms_norm_per_token_quant_with_norm.triton": TRITON_GROUP,
    "mla_dual_rms_norm_group_quant_with_norm": LATENTS_GROUP,
    "mla_dual_rms_norm_group_quant_with_norm.triton": TRITON_GROUP,
    "mla_dual_rms_norm_static_quant_with_norm": TRITON_STATIC,
    "mla_query_concat": QUERY,
    "mla_query_concat.cat": QUERY,
    "mla_query_rope": (("v0.1.5", LAST, No("it allocates the query that it gives")),),
    "mla_query_concat_static_quant": hip_cache("a token whose slot is below 0 gets no query"),
    "mla_query_concat_static_quant.triton": triton_cache("converts the query to fp8 without a scale"),
    "mla_norm_rope_cache": hip_cache("it norms nothing, and turns a query"),
    "mla_norm_rope_cache.triton": triton_cache("behind the end of the cache it writes outside"),
    "mla_norm_rope_cache_into": hip_cache("it norms nothing"),
    "mla_norm_rope_cache_into.triton": triton_cache("it norms nothing"),
    "mla_norm_rope_cache_static_quant": hip_cache("it norms nothing"),
    "mla_norm_rope_cache_static_quant.triton": triton_cache("it norms nothing"),
    "mla_norm_rope_cache_per_token_quant": hip_cache("it norms nothing"),
    "mla_norm_rope_cache_per_token_quant.triton": triton_cache("it norms nothing"),
    "mla_norm_rope_cache_group_quant": hip_cache("it norms nothing"),
    "mla_norm_rope_cache_group_quant.triton": triton_cache("it norms nothing"),
    "gated_rms_norm_per_token_quant": (
        ("v0.1.5", "v0.1.17", ABSENT),
        ("v0.1.17-longctx", LAST, Works("v0.1.17-longctx")),
    ),
    "gated_rms_norm_group_quant": (
        ("v0.1.5", "v0.1.12", ABSENT),
        ("v0.1.12.post1", LAST, Works("v0.1.12.post1")),
    ),
    "gated_rms_norm_group_quant.triton": (
        ("v0.1.5", "v0.1.13-rc1", ABSENT),
        ("v0.1.13-rc2", LAST, Works("v0.1.13-rc2")),
    ),
    "silu_mul_static_quant": (
        ("v0.1.5", "v0.1.9", ABSENT),
        ("v0.1.9.post1", "v0.1.9.post1", Works("v0.1.9.post1")),
        ("v0.1.10", LAST, Works("v0.1.10")),
    ),
    "silu_mul_per_token_quant.clamp": (
        ("v0.1.5", "v0.1.13.post1", ABSENT),
        ("v0.1.14-rc0", "v0.1.15.post3", No("quant_block_size came with v0.1.16")),
        ("v0.1.16", LAST, Works("v0.1.16")),
    ),
    "silu_mul_per_token_quant.triton": TRITON_ACT,
    "silu_mul_group_quant": (
        ("v0.1.5", "v0.1.14.post1", ABSENT),
        ("v0.1.15-rc0", LAST, Works("v0.1.15-rc0")),
    ),
    "silu_mul_group_quant.clamp": (
        ("v0.1.5", "v0.1.13.post1", ABSENT),
        ("v0.1.14-rc0", "v0.1.15.post3", Works("v0.1.14-rc0")),
        ("v0.1.16", LAST, Works("v0.1.16")),
    ),
    "silu_mul_group_quant.triton": TRITON_ACT,
    "mla_metadata_info": (
        ("v0.1.5", "v0.1.6.post1", ABSENT),
        ("v0.1.6.post2", "v0.1.7.post4", Works("v0.1.6.post2")),
        ("v0.1.7.post5", "v0.1.15.post3", Works("v0.1.7.post5")),
        ("v0.1.16", LAST, Works("v0.1.16")),
    ),
    "mla_metadata": (
        ("v0.1.5", "v0.1.6.post1", ABSENT),
        ("v0.1.6.post2", "v0.1.7.post5", No("disagree about the order of work_indptr and work_info")),
        ("v0.1.8", "v0.1.10.post1", Works("v0.1.8")),
        ("v0.1.10.post2", "v0.1.16.post6", Works("v0.1.10.post2")),
        ("v0.1.17-rc0", "v0.1.17", Works("v0.1.17-rc0")),
        ("v0.1.17-longctx", LAST, Works("v0.1.17-longctx")),
    ),
    "ps_metadata_info": (
        ("v0.1.5", "v0.1.10", ABSENT),
        ("v0.1.10.post1", LAST, Works("v0.1.10.post1")),
    ),
    "mla_decode": (
        ("v0.1.5", "v0.1.6.post1", Works("v0.1.5")),
        ("v0.1.6.post2", "v0.1.7.post4", Works("v0.1.6.post2")),
        ("v0.1.7.post5", "v0.1.8", Works("v0.1.7.post5")),
        ("v0.1.9", "v0.1.10.post1", Works("v0.1.9")),
        ("v0.1.10.post2", "v0.1.16.post6", Works("v0.1.10.post2")),
        ("v0.1.17-rc0", "v0.1.19.post2", Works("v0.1.17-rc0")),
        ("v0.1.20", LAST, Works("v0.1.20")),
    ),
    "all_reduce_add_rms_norm": (
        ("v0.1.5", "v0.1.6.post1", ABSENT),
        ("v0.1.6.post2", "v0.1.7.post1", No("it takes no residual")),
        ("v0.1.7.post2", "v0.1.11.post1", No("epsilon for an integer")),
        ("v0.1.12", "v0.1.15.post3", Works("v0.1.10.post3")),
        *FUSED_AR,
    ),
    "all_reduce_add_rms_norm_pad": (
        ("v0.1.5", "v0.1.6.post1", ABSENT),
        ("v0.1.6.post2", "v0.1.15.post3", No("out_hidden_dim came with v0.1.16")),
        *FUSED_AR,
    ),
    "all_reduce_add_rms_norm_per_token_quant": (
        ("v0.1.5", "v0.1.6.post1", ABSENT),
        ("v0.1.6.post2", "v0.1.10.post2", No("post_per_token_quant came with v0.1.10.post3")),
        ("v0.1.10.post3", "v0.1.11.post1", No("epsilon for an integer")),
        ("v0.1.12", "v0.1.15.post3", Works("v0.1.10.post3")),
        *FUSED_AR,
    ),
    "all_reduce_add_rms_norm_per_token_quant_with_norm": (
        ("v0.1.5", "v0.1.6.post1", ABSENT),
        ("v0.1.6.post2", "v0.1.17", No("emit_bf16 came with v0.1.17-longctx")),
        FUSED_AR[-1],
    ),
    "all_reduce_add_rms_norm_group_quant": FUSED_AR_GROUP,
    "all_reduce_add_rms_norm_group_quant_with_norm": FUSED_AR_GROUP,
}
"""Binding -> (first release, last release, what is expected), without gaps from v0.1.5 to v0.1.20.post1."""

REPRESENTATIVE = (
    *("v0.1.5", "v0.1.7.post5", "v0.1.10.post1", "v0.1.12", "v0.1.13.post1", "v0.1.15.post3"),
    *("v0.1.16.post6", "v0.1.17", "v0.1.17-longctx", "v0.1.19.post1", "v0.1.20.post1"),
)
"""At least one release of every generation."""
