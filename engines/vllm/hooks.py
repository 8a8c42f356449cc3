"""The places of vLLM that layerfuse stands at, as data."""

from __future__ import annotations

from ..hooks import Hook

_LOADERS = "vllm.model_executor.model_loader"
_COMPILES = "vllm.compilation"

HOOKS = (
    Hook.of(
        "vllm.platforms:current_platform.check_and_update_config(vllm_config)",
        name="options",
        does="reads its options as vLLM's config is made",
        source="vllm.platforms.interface:Platform.check_and_update_config",
    ),
    Hook.of(
        f"{_LOADERS}.base_loader:BaseModelLoader.load_model(self, vllm_config)",
        name="specs",
        does="plans as a model is loaded",
    ),
    Hook.of(
        f"{_LOADERS}.tensorizer_loader:TensorizerLoader.load_model(self, vllm_config)",
        name="specs",
        does="plans as a model is loaded by tensorizer",
        needed=False,
    ),
    Hook.of(
        f"{_LOADERS}:get_model_loader(load_config)",
        name="loader",
        does="looks whether a loader is one that it stands at",
        source=f"{_LOADERS}.__init__:get_model_loader",
        needed=False,
    ),
    Hook.of(
        f"{_COMPILES}.backends:VllmBackend.configure_post_pass(self)",
        name="pass",
        does="puts its pass ahead of vLLM's",
    ),
    Hook.of(
        f"{_COMPILES}.backends:CompilerManager.compile(self, graph, compile_range, graph_index)",
        name="piece",
        does="takes down what became of a piece of the graph",
    ),
    Hook.of(
        f"{_COMPILES}.decorators:_try_load_aot_compiled_fn(model, aot_compilation_path)",
        name="artefact",
        does="reads the report that was kept with a compiled model",
    ),
    Hook.of(
        "vllm.forward_context:create_forward_context(attn_metadata, vllm_config)",
        name="step",
        does="looks whether the model of a step was read",
        needed=False,
    ),
    Hook.of(
        "vllm.v1.attention.backends.mla.rocm_aiter_mla:AiterMLAMetadataBuilder.__init__(self, kv_cache_spec, layer_names, vllm_config)",
        name="metadata",
        does="compares AITER's metadata for MLA decode with the plan",
        needed=False,
        on_rocm=True,
    ),
)
"""Everything that layerfuse wraps."""

_PRODUCTS = "vllm.model_executor.kernels.linear.scaled_mm"
_FEW = "few tokens can be multiplied by layerfuse"

INSIDE = Hook.of(
    f"{_PRODUCTS}.flashinfer:_dynamic_flashinfer_deepgemm_blockscale_gemm_impl(input, weight, weight_scale, group_size, use_deep_gemm_e8m0)",
    does=f"its quantisation is taken out where a fused op does it, and {_FEW}",
    others="none",
)
"""FlashInfer's op for fp8 in blocks, which quantises inside."""

SHARED = Hook.of(
    f"{_PRODUCTS}.flashinfer:FlashInferFp8DeepGEMMDynamicBlockScaledKernel.apply_block_scaled_mm(self, A, B, As, Bs)",
    does=f"{_FEW} in shared experts, and in models that vLLM does not compile",
    others="none",
)
"""What calls it where no graph shows the linear."""

DEEP_GEMM = Hook.of(
    f"{_PRODUCTS}.deep_gemm:_fp8_gemm_nt_op(q_input, input_scale, weight, weight_scale, output, use_deep_gemm_e8m0)",
    does=_FEW,
    others="none",
)

EXPERTS = Hook.of(
    "vllm.model_executor.layers.fused_moe.experts.triton_moe:TritonExperts.apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, "
    "activation, global_num_experts, expert_map, a1q_scale, a2_scale, workspace13, workspace2, expert_tokens_meta, "
    "apply_router_weight_on_input)",
    does=f"{_FEW} in routed experts",
    others="none",
)

PRODUCTS = INSIDE, SHARED, DEEP_GEMM, EXPERTS
"""What multiplies fp8 in blocks, each looked at again where something of layerfuse's is to stand in its place."""
