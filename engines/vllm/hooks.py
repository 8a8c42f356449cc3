"""The places of vLLM that layerfuse stands at, as data."""

from __future__ import annotations

from ..hooks import Hook

HOOKS = (
    Hook(
        name="options",
        does="reads its options as vLLM's config is made",
        module="vllm.platforms",
        path="current_platform.check_and_update_config",
        takes=("vllm_config",),
        source="vllm.platforms.interface:Platform.check_and_update_config",
    ),
    Hook(
        name="specs",
        does="plans as a model is loaded",
        module="vllm.model_executor.model_loader.base_loader",
        path="BaseModelLoader.load_model",
        takes=("self", "vllm_config"),
    ),
    Hook(
        name="specs",
        does="plans as a model is loaded by tensorizer",
        module="vllm.model_executor.model_loader.tensorizer_loader",
        path="TensorizerLoader.load_model",
        takes=("self", "vllm_config"),
        needed=False,
    ),
    Hook(
        name="loader",
        does="looks whether a loader is one that it stands at",
        module="vllm.model_executor.model_loader",
        path="get_model_loader",
        takes=("load_config",),
        source="vllm.model_executor.model_loader.__init__:get_model_loader",
        needed=False,
    ),
    Hook(
        name="pass",
        does="puts its pass ahead of vLLM's",
        module="vllm.compilation.backends",
        path="VllmBackend.configure_post_pass",
        takes=("self",),
    ),
    Hook(
        name="piece",
        does="takes down what became of a piece of the graph",
        module="vllm.compilation.backends",
        path="CompilerManager.compile",
        takes=("self", "graph", "compile_range", "graph_index"),
    ),
    Hook(
        name="artefact",
        does="reads the report that was kept with a compiled model",
        module="vllm.compilation.decorators",
        path="_try_load_aot_compiled_fn",
        takes=("model", "aot_compilation_path"),
    ),
    Hook(
        name="step",
        does="looks whether the model of a step was read",
        module="vllm.forward_context",
        path="create_forward_context",
        takes=("attn_metadata", "vllm_config"),
        needed=False,
    ),
    Hook(
        name="metadata",
        does="compares AITER's metadata for MLA decode with the plan",
        module="vllm.v1.attention.backends.mla.rocm_aiter_mla",
        path="AiterMLAMetadataBuilder.__init__",
        takes=("self", "kv_cache_spec", "layer_names", "vllm_config"),
        needed=False,
        on_rocm=True,
    ),
)
"""Everything that layerfuse wraps."""
