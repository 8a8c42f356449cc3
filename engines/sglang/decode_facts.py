"""What is known of `mla_decode` in SGLang without SGLang and without torch: where it may stand, and what it stands in for.

Read in SGLang 0.5.23. On an H100 (fa3) it launches for an MLA layer's decode step, between the projection of both latents and the attention: two norms
(on two streams in CUDA graphs), the quantisation for `q_b_proj` and that product, the absorbing GEMM, one rope of query and key, and the cache write.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs

from ...fusion.engine import Engine
from ...fusion.sites import DECODE
from ..hooks import Hook
from ..mla import HELD, NAME, QUANTISED, SPARSE, SPARSE_MODELS

BY_ITSELF = (
    f"SGLang has no place for such a form: there {NAME} quantises the query latent itself where q_b_proj takes it so"
)
"""Why its quantised form has no place."""

CLASS = ("sglang.srt.models.deepseek_v2", "DeepseekV2AttentionMLA")
"""Module and class of what it stands in, and of no class derived from it."""

PLACE = "forward_absorb_prepare"
"""The method of that class in whose place ours is called: all that a decode step does in front of its attention."""

_MIXIN = "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla:DeepseekMLAForwardMixin"
_READS = {
    PLACE: (
        "_can_fuse_bmm_into_attention _fuse_rope_for_trtllm_mla _make_mla_bmm_fusion_plan _q8kv8_born_fp8_q_backend _q8kv8_qprep_overlap_pending"
        " _split_q_nope_pe alt_stream attn_mqa dcp_size indexer is_dcp_mla_decode_phase is_dcp_q_replicate_phase k_b_qweight k_b_qweight_type"
        " kv_a_layernorm kv_a_proj_with_mqa kv_lora_rank layer_id num_local_heads prepare_attention_output_gate q_a_layernorm q_b_proj_forward"
        " q_b_proj_replicated_forward q_lora_rank q_proj qk_head_dim qk_rope_head_dim rotary_emb should_run_indexer use_deep_gemm_bmm use_dsa w_kc"
        " w_kc_qrep w_scale w_scale_k"
    ),
    "forward_absorb_core": (
        "_eager_bmm_attention _fuse_rope_for_trtllm_mla attn_mqa attn_mqa_for_dcp_decode current_attention_backend dcp_size is_dcp_mla_decode_phase"
        " kv_lora_rank learnable_sink_param next_skip_topk num_local_heads o_proj rotary_emb use_deep_gemm_bmm v_b_qweight v_b_qweight_type v_head_dim"
        " w_kc w_scale w_scale_v w_vc"
    ),
}
"""Method of SGLang's -> the attributes of itself that it reads in 0.5.23."""


def _of_layer(name: str, takes: str, does: str) -> Hook:
    return Hook.of(
        f"{CLASS[0]}:{CLASS[1]}.{name}(self, {takes})",
        does=does,
        others="none",
        source=f"{_MIXIN}.{name}",
        reads=frozenset(_READS[name].split()),
    )


LAYER = (
    _of_layer(
        PLACE,
        "positions, hidden_states, forward_batch, zero_allocator, llama_4_scaling, prev_topk_indices",
        f"{NAME} can stand there",
    ),
    _of_layer(
        "forward_absorb_core",
        "q_pe, k_pe, q_nope_out, k_nope, forward_batch, zero_allocator, positions, topk_indices, llama_4_scaling, "
        "fusion_plan, attention_output_gate",
        f"{NAME}'s results go there",
    ),
)
"""What of a layer is replaced, and what then reads its results."""


def _attention(cls: str, *names: str) -> tuple[Hook, ...]:
    takes, does = (
        "self, q, k, v, layer, forward_batch, save_kv_cache, q_rope, k_rope",
        f"attends to what {NAME} has written",
    )
    places = (f"sglang.srt.layers.attention.{cls}.{name}({takes})" for name in names)
    return tuple(Hook.of(place, does=does, others="optional") for place in places)


BACKENDS = {
    "fa3": _attention("flashattention_backend:FlashAttentionBackend", "forward_decode", "forward_extend"),
    "flashinfer": _attention("flashinfer_mla_backend:FlashInferMLAAttnBackend", "forward_decode"),
}
"""Attention backend -> its methods that, given no key, write none to the cache, and take both parts of a query as they lie."""

VERIFIES = "fa3"
"""The one whose way for prompts does too: by that it verifies drafted tokens."""

POOL = ("sglang.srt.mem_cache.memory_pool", "MLATokenToKVPool")
WRITE = "_write_mla_kv_buffer"
WRITES = tuple(
    Hook.of(f"{POOL[0]}:{POOL[1]}.{written}", does=f"{NAME} writes in its place", others="optional")
    for written in (
        "set_mla_kv_buffer(self, layer, loc_info, cache_k_nope, cache_k_rope)",
        f"{WRITE}(self, dst_buffer, loc, cache_k_nope, cache_k_rope)",
    )
)
"""The cache write."""

HOOKS = (*LAYER, *(hook for hooks in BACKENDS.values() for hook in hooks), *WRITES)

WHY = {
    "sparse": SPARSE,
    "class": f"SGLang's code of this model is not known to hold a {CLASS[1]}",
    "layer": "{kind} is not SGLang's {known}",
    "trtllm": "{backend} writes the cache and joins the query in a launch of its own",
    "backend": "{backend} takes the query joined, which SGLang does in front of it",
    "lora": "LoRA may add to its linears",
    "overlap": "SGLang runs two parts of a batch in turns (enable_two_batch_overlap)",
    "split": "decode context parallelism splits its cache over ranks",
    "gate": "it has an output gate",
    "weight": "its query is absorbed in {dtype}",
    "cache": "its cache is {dtype}, and the query {wanted}",
    "pool": "{kind} is not SGLang's {known}",
    "verify": "{backend} verifies drafted tokens by its way for prompts",
    "draft": "it is a draft's",
    "scaled": "its query is scaled, or it carries what other attention has chosen",
    "slots": "it has not one slot for each token",
    "captured": "it was captured before what SGLang runs was tried out",
    "norm": "its norm, a {kind}, does more than its spec says",
}
"""What a model has or asks for -> why its layers are left to SGLang."""


def why_not_here(backend: str | None, arguments: Any) -> str | None:
    """Why an SGLang that is started so leaves no place for it, as a sentence; None where it does.

    Args:
        backend: what attends in decode steps; None: not known.
        arguments: SGLang's `ServerArgs`.
    """
    if backend not in (None, *BACKENDS):
        trtllm = backend in ("trtllm_mla", "cutedsl_mla")
        return WHY["trtllm" if trtllm else "backend"].format(backend=backend)
    if arguments.enable_lora or (arguments.enable_lora is None and arguments.lora_paths):
        return WHY["lora"]
    return WHY["overlap"] if getattr(arguments, "enable_two_batch_overlap", False) else None


def planned(engine: Engine, architectures: Iterable[str]) -> Engine:
    """An engine with a place for it in the MLA layers of a model of which only the names are known, or with the reason why there is none."""
    given = frozenset(architectures)
    why = WHY["sparse"] if SPARSE_MODELS & given else WHY["class"] if given and not HELD & given else None
    refuses = {**engine.refuses, QUANTISED: BY_ITSELF}
    if why is not None and "*" not in engine.refuses:
        refuses[DECODE] = why
    return attrs.evolve(engine, decodes=True, refuses=refuses)
