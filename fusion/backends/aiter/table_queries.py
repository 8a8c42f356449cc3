"""What AITER has around the rope of an MLA layer: what serves an op of ours, and why the rest serves none.

Its functions with the absorbing GEMM (`fusions.fused_bmm_rope_kv_cache`) take fp8 or fp4 weights: `mla_query_absorb` takes those
of the layer, so none is bound for it.

AITER turns the key and the query in one launch, behind the GEMM that makes the query, and norms nothing there. Ours norm and write
the key before that GEMM, and turn the query after it.
"""

from __future__ import annotations

from collections.abc import Iterator

from .conventions import Binding, Function
from .conventions import Convention as C  # noqa: N817 - it stands in front of every line below

_TRITON = "aiter.ops.triton"
_CAT = "q1, q2, k1, k2"
_ROPE_CAT = "q_nope, q_pe, k_nope, k_pe, pos, cos, sin, is_neox"
_HIP_CACHE = (
    "q_nope, q_pe, kv_c, k_pe, kv_cache, q_out, slot_mapping, k_scale, q_scale, positions, cos_cache, sin_cache, is_neox, "
    "is_nope_first"
)
_TRITON_CACHE = (
    "q_nope, q_pe, k_nope, k_pe, kv_cache, slot_mapping, pos, cos, sin, k_scale, is_neox, num_decode_toks_for_zeros=, "
    "apply_scale=, q_out=, decode_q_pe_out=, k_pe_out=, q_out_dtype="
)

_BEFORE_THE_QUERY = (
    "it norms nothing, and turns a query in the same launch, which is only made from the norm; for a slot behind the end of the cache "
    "it writes outside of it"
)
_NO_SCALE = "it converts the query to fp8 without a scale, and writes a cache beside it"
_NEEDS_SLOTS = (
    "it writes a cache beside the query, and reads cos and sin as of the query's dtype; a token whose slot is below 0 gets no query "
    "without compute_all_q_rope, which came with v0.1.19.post1, not for all widths and pages"
)
_OWN_BUFFER = "it allocates the query that it gives: it cannot write to the last columns of one that is there"


def _concat(name: str, parameters: str, refused: str | None = None) -> tuple[Function, ...]:
    """The Triton functions that write no cache; they moved at v0.1.10."""
    return (
        Function(f"{_TRITON}.fusions.fused_qk_concat:{name}", (C("v0.1.10", parameters, refused=refused),)),
        Function(f"{_TRITON}.fused_qk_concat:{name}", (C("v0.1.5", parameters, refused=refused),), gone="v0.1.10"),
    )


def _hip_cache(refused: str) -> tuple[Function, ...]:
    return (
        Function(
            "aiter.ops.cache:fused_qk_rope_concat_and_cache_mla",
            (
                C("v0.1.8", _HIP_CACHE, refused=refused),
                C("v0.1.19.post1", f"{_HIP_CACHE}, compute_all_q_rope=", refused=refused),
            ),
        ),
    )


def _triton_cache(refused: str) -> tuple[Function, ...]:
    name = "fused_kv_cache:fused_qk_rope_cat_and_cache_mla"
    return (
        Function(
            f"{_TRITON}.fusions.{name}",
            (
                C("v0.1.10", _TRITON_CACHE, refused=refused),
                C("v0.1.15-rc0", f"{_TRITON_CACHE}, shuffled_kv_cache=", refused=refused),
                C("v0.1.15.post1", f"{_TRITON_CACHE}, shuffled_kv_cache=, upcast_operand=", refused=refused),
            ),
        ),
        Function(f"{_TRITON}.{name}", (C("v0.1.6.post2", _TRITON_CACHE, refused=refused),), gone="v0.1.10"),
    )


def _bindings() -> Iterator[Binding]:
    yield Binding(
        name="mla_query_concat",
        calls="queries.turned",
        functions=_concat("fused_qk_rope_cat", _ROPE_CAT),
        kind="triton",
    )
    yield Binding(
        name="mla_query_concat.cat", calls="queries.unturned", functions=_concat("fused_qk_cat", _CAT), kind="triton"
    )
    yield Binding(
        name="mla_query_rope",
        calls="queries.turned",
        functions=_concat("fused_qk_rope_cat", _ROPE_CAT, _OWN_BUFFER),
        kind="triton",
    )
    refused = {"mla_query_concat_static_quant": (_NEEDS_SLOTS, _NO_SCALE)}
    for form in ("", "_into", "_static_quant", "_per_token_quant", "_group_quant"):
        refused[f"mla_norm_rope_cache{form}"] = _BEFORE_THE_QUERY, _BEFORE_THE_QUERY
    for name, (hip, triton) in refused.items():
        yield Binding(name=name, calls="queries.turned", functions=_hip_cache(hip))
        yield Binding(name=f"{name}.triton", calls="queries.turned", functions=_triton_cache(triton), kind="triton")


QUERY_BINDINGS: tuple[Binding, ...] = tuple(_bindings())
