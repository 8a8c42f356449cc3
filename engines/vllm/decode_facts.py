"""What is known of `mla_decode` without vLLM and without torch: its name, where it may stand, and what vLLM's code may read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Literal

import attrs

from ...fusion.engine import Engine
from ...fusion.planning import Plan, plan
from ...fusion.sites import DECODE, LATENTS
from ...fusion.steps.decode import WHY as OF_SPECS
from ..hooks import Hook
from ..mla import HELD, NAME, QUANTISED, SPARSE, SPARSE_MODELS
from ..seams import Seam
from .switches import BATCH_INVARIANT, INVARIANT, MLA_DISABLE, is_set

TAKES: dict[tuple[str, ...], str] = {
    forms: f"{' or '.join(forms)} fuses what stands there with what follows"
    for forms in ((NAME,), (QUANTISED,), (NAME, QUANTISED))
}
"""Its forms that a plan expects -> the reason in the plan of what is taken at the same sites."""

LEFT = f"layerfuse: {NAME} leaves vLLM's MLA layers alone: %s"
"""What is said where it does not stand."""

CHANGED = "layerfuse: mla_decode: vLLM's own way is taken from now on: %s"
"""What is said when something else was put in the place of vLLM's code after ours."""

CLASS = ("vllm.model_executor.layers.mla", "MultiHeadLatentAttentionWrapper")
"""Module and class of what it stands in."""

WRITE = ("vllm.v1.attention.backend", "MLAAttentionImpl", "do_kv_cache_update")
"""Module, class and name of the cache write that every backend has that does not write in a way of its own."""

SWITCHED = HELD - {"KimiLinearForCausalLM", "LongcatFlashForCausalLM"}
"""Those of `HELD` whose layers are of another class where VLLM_MLA_DISABLE is set."""

ATTENTION = ("vllm.model_executor.layers.attention.mla_attention", "MLAAttention")
"""Module and class of its attention, and of no other."""

READS = {
    method: frozenset(names.split())
    for method, names in {
        "MultiHeadLatentAttentionWrapper.forward": (
            "dcp_q_replicate fuse_qkv_rmsnorm fused_qkv_a_proj g_proj indexer indexer_rope_emb is_sparse kv_a_layernorm kv_a_proj_with_mqa "
            "kv_lora_rank mla_attn num_heads o_proj q_a_layernorm q_b_proj q_lora_rank q_proj qk_head_dim qk_nope_head_dim qk_rope_head_dim "
            "rotary_emb skip_topk v_head_dim"
        ),
        "MLAAttention.forward": (
            "_k_scale calculate_kv_scales forward_impl hisparse_cache impl kv_cache kv_cache_dtype layer_name prepare_kv_cache_update "
            "update_kv_cache use_direct_call use_pcp"
        ),
        "MLAAttention.forward_impl": (
            "W_K W_K_scale W_UK_T W_UK_T_dcp_qrep _aiter_output_quant _decode_concat_quant_fp8_op _k_scale _q_scale _quant_fp8_op "
            "_use_sparse_mha _v_up_proj _vllm_config chunked_prefill_workspace_size dcp_a2a dcp_manager impl is_aiter_triton_fp4_bmm_enabled "
            "is_aiter_triton_fp8_bmm_enabled is_amx_bmm_enabled kv_cache_dtype kv_lora_rank num_heads prefill_backend q_pad_num_heads "
            "qk_nope_head_dim qk_rope_head_dim use_pcp v_head_dim"
        ),
        f"{WRITE[1]}.{WRITE[2]}": "",
    }.items()
}
"""Method of vLLM's -> the attributes of itself that it reads in 0.26.0 and 0.33.0."""


def _hook(written: str, others: Literal["optional", "none"] = "optional") -> Hook:
    """A function or method, with what it reads."""
    hook = Hook.of(written, others=others)
    return attrs.evolve(hook, reads=READS.get(hook.path))


SEAM = Seam(
    fusion=NAME,
    hook=_hook(f"{CLASS[0]}:{CLASS[1]}.forward(self, positions, hidden_states, llama_4_scaling)", others="none"),
    callers=tuple(
        map(
            _hook,
            (
                f"{ATTENTION[0]}:MLAAttention.forward(self, q, kv_c_normed, k_pe, output_shape)",
                f"{ATTENTION[0]}:MLAAttention.forward_impl(self, q, k_c_normed, k_pe, kv_cache, attn_metadata, output)",
                f"{ATTENTION[0]}:MLAAttention._v_up_proj(self, x, out)",
                f"{ATTENTION[0]}:unified_mla_kv_cache_update(kv_c_normed, k_pe, layer_name, kv_cache_dtype, k_scale)",
                f"{WRITE[0]}:{WRITE[1]}.{WRITE[2]}(self, kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale)",
            ),
        )
    ),
)
"""What of vLLM is called, or done in its place."""

WHY = {
    **OF_SPECS,
    "no table": "its rope has no table of cos and sin",
    "sparse": SPARSE,
    "gate": "it has an output gate",
    "attention": "{kind} is not vLLM's {known}",
    "write": "{backend} has a cache write of its own",
    "padded": "{backend} takes {few} heads as {many}, and the query in {dtype}",
    "aiter": "AITER's quantised GEMM absorbs its query",
    "amx": "its query is absorbed by an AMX kernel",
    "cache": "its cache is {dtype}, a form that the fused op does not write",
    "scales": "vLLM computes the scales of its cache from its first step",
    "tiers": "its cache is one of several tiers",
    "prompts split": "prefill_context_parallel_size is {size}: each rank has a part of a prompt",
    "own ranks": "the cache is split over ranks in a way that this version of layerfuse does not know",
    "all queries": "each rank makes the queries of all ranks that share its cache (dcp_q_replicate)",
    "output": "vLLM's pass for attention and quantisation (fuse_attn_quant) looks for its own ops",
    "pieces": "vLLM decodes in CUDA graphs of pieces alone (cudagraph_mode is PIECEWISE), which hold the same in every step",
    "breakable": "vLLM captures its CUDA graphs in pieces around its own ops (VLLM_USE_BREAKABLE_CUDAGRAPH=1)",
    "mode": "vLLM's compilation mode is {mode}",
    "disabled": f"{MLA_DISABLE} is set: vLLM runs these layers without MLA",
    "invariant": INVARIANT,
}
"""What a model has or asks for -> why its layers are left to vLLM. docs/mla-decode.md has each of them with what would have to be done."""


def why_not_here(vllm_config: Any) -> str | None:
    """Why vLLM's config leaves no place for it, as a sentence; None where it does."""
    problem = _why_not_environment() or why_no_mla(vllm_config.model_config.architectures)
    if problem is not None:
        return problem
    parallel, compilation = vllm_config.parallel_config, vllm_config.compilation_config
    size = getattr(parallel, "prefill_context_parallel_size", 1)
    if size > 1:
        return WHY["prompts split"].format(size=size)
    if getattr(compilation.pass_config, "fuse_attn_quant", False):
        return WHY["output"]
    if getattr(compilation.cudagraph_mode, "name", None) == "PIECEWISE":
        return WHY["pieces"]
    if compilation.mode is not None and compilation.mode.name not in ("NONE", "VLLM_COMPILE"):
        return WHY["mode"].format(mode=compilation.mode.name)
    return None


def _why_not_environment() -> str | None:
    if is_set(BATCH_INVARIANT):
        return WHY["invariant"]
    return WHY["breakable"] if os.environ.get("VLLM_USE_BREAKABLE_CUDAGRAPH") == "1" else None


def why_no_mla(architectures: Iterable[str]) -> str | None:
    """Why vLLM runs the MLA layers of these models in code without MLA, as a sentence; None where it does not."""
    disabled = is_set(MLA_DISABLE) and not SWITCHED.isdisjoint(architectures)
    return WHY["disabled"] if disabled else None


def planned(engine: Engine, architectures: Iterable[str]) -> Engine:
    """An engine of whose models only the names are known, with a place for it in their MLA layers, or with the reason why there is none."""
    given = frozenset(architectures)
    why = WHY["sparse"] if SPARSE_MODELS & given else _why_not_environment() or why_no_mla(given)
    if why is None and not HELD & given:
        why = f"vLLM's code of this model is not known to hold a {CLASS[1]}"
    return attrs.evolve(
        engine, decodes=True, refuses=engine.refuses if why is None else {**engine.refuses, DECODE: why}
    )


def taking(decided: Plan) -> Plan:
    """A plan in which both latent norms of all MLA layers are taken already, where it expects that."""
    forms = tuple(filter(decided.expected, (NAME, QUANTISED)))
    if decided.engine is None or not forms:
        return decided
    engine = attrs.evolve(decided.engine, keeps={**decided.engine.keeps, LATENTS: TAKES[forms]})
    return plan(decided.specs, decided.target, decided.config, engine)
