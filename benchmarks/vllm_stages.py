"""What `vllm_engine` measures: stages, each a model on so many GPUs and the fusions of its arms."""

from __future__ import annotations

from attrs import field, frozen

DEFAULT = ("default",)
"""Of an arm: layerfuse without an option."""
BEHIND = tuple(f"{name}_group_quant" for name in ("mla_dual_rms_norm", "add_rms_norm", "rms_norm", "silu_mul"))


@frozen
class Alone:
    """vLLM without layerfuse that computes the same in another of its own ways."""

    passes: dict[str, bool] = field(factory=dict)
    "Of its compiler, on or off."
    engine: dict[str, str | bool] = field(factory=dict)
    "Arguments of its engine."
    custom_ops: tuple[str, ...] = ()
    "Its layers that run their own kernels in place of what Inductor makes of them."


@frozen
class Stage:
    """One model on so many GPUs, and the fusions of each arm; the first arm is vLLM alone."""

    shape: str
    arms: dict[str, tuple[str, ...]]
    tp: int = 1
    variables: dict[str, str] = field(factory=dict)
    alone: dict[str, Alone] = field(factory=dict)
    "Arms that say how far vLLM's own ways to compute the same are apart."
    engine: dict[str, str | bool] = field(factory=dict)
    "Arguments of vLLM's engine."
    needs: int = 100
    "Seconds that it takes about."


_QUANTISED = {
    "default": DEFAULT,
    "all": (*BEHIND, "add_rms_norm"),
    "add_norm": ("add_rms_norm_group_quant", "rms_norm_group_quant"),
    "silu": ("silu_mul_group_quant",),
    "dual": ("mla_dual_rms_norm_group_quant",),
}
_REDUCED = {
    "all_reduce": ("all_reduce_add_rms_norm",),
    "all": ("all_reduce_add_rms_norm", "add_rms_norm", "mla_dual_rms_norm"),
}
_REDUCED_QUANTISED = {
    "default": DEFAULT,
    "all_reduce": ("all_reduce_add_rms_norm", "all_reduce_add_rms_norm_group_quant"),
}
_ONE_SHAPE = {
    "dual": ("mla_dual_rms_norm",),
    "add_norm": ("add_rms_norm",),
    "all": ("mla_dual_rms_norm", "add_rms_norm"),
}
_DECODE, _FP8_CACHE = {"decode": ("mla_decode",)}, {"kv_cache_dtype": "fp8"}
_FLASH = {"attention_backend": "FLASH_ATTN_MLA"}  # what vLLM picks on Hopper for caches that are not fp8
_UNFUSED = {"unfused": Alone(passes={"fuse_norm_quant": False, "fuse_act_quant": False})}
_NCCL = {"nccl": Alone(engine={"disable_custom_all_reduce": True})}  # sums in another order
_KERNELS = {"kernels": Alone(custom_ops=("all",))}  # rounds where they write, Inductor does not
_NO_DEEP_GEMM, _DEEP_GEMM = {"VLLM_USE_DEEP_GEMM": "0"}, {"VLLM_USE_DEEP_GEMM": "1", "VLLM_DEEP_GEMM_WARMUP": "skip"}
STAGES = {
    "fp8": Stage("deepseek-v3-fp8", _QUANTISED, alone=_UNFUSED, variables=_NO_DEEP_GEMM, needs=150),
    "gpt-oss-tp2": Stage("gpt-oss-120b", _REDUCED, tp=2, alone=_NCCL | _KERNELS),
    "fp8-tp2": Stage("deepseek-v3-fp8", _REDUCED_QUANTISED, tp=2, alone=_UNFUSED | _NCCL, variables=_NO_DEEP_GEMM, needs=190),
    "bf16-tp2": Stage("deepseek-v3", _REDUCED, tp=2, alone=_NCCL | _KERNELS),
    "gpt-oss-tp4": Stage("gpt-oss-120b", _REDUCED, tp=4, alone=_NCCL | _KERNELS),
    "fp8-tp4": Stage("deepseek-v3-fp8", _REDUCED_QUANTISED, tp=4, alone=_UNFUSED | _NCCL, variables=_NO_DEEP_GEMM, needs=190),
    "bf16-tp4": Stage("deepseek-v3", _REDUCED, tp=4, alone=_NCCL | _KERNELS),
    # On Hopper vLLM takes FlashInfer for a delta net's prefill, which is not measured here: its kernel is compiled by nvcc.
    # With its own kernels (`_KERNELS`) vLLM 0.26 does not compile this model: Dynamo will not trace their Triton launch.
    "qwen3-next": Stage("qwen3-next", {"gated": ("gated_rms_norm",), "all": ("gated_rms_norm", "add_rms_norm")},
                        engine={"gdn_prefill_backend": "triton"}, needs=170),
    "bf16": Stage("deepseek-v3", _ONE_SHAPE, alone=_KERNELS),
    # What vLLM takes for this model by default; it compiles its kernels as they are called, by nvcc or NVRTC.
    "fp8-deep-gemm": Stage(
        "deepseek-v3-fp8", {name: _QUANTISED[name] for name in ("default", "all", "silu")}, alone=_UNFUSED, variables=_DEEP_GEMM,
        needs=240,
    ),
    "gpt-oss": Stage("gpt-oss-120b", {"add_norm": ("add_rms_norm",)}, alone=_KERNELS),
    "gpt-oss-bf16-tp2": Stage("gpt-oss-120b-bf16", _REDUCED, tp=2, alone=_NCCL | _KERNELS),
    "moe-fp8": Stage("deepseek-v3-moe-fp8", {"all": _QUANTISED["all"]}, alone=_UNFUSED, variables=_NO_DEEP_GEMM, needs=150),
    "moe": Stage("deepseek-v3-moe", {"all": _ONE_SHAPE["all"]}, alone=_KERNELS, needs=150),
    "mla16": Stage("mla-16", _DECODE, alone=_KERNELS, engine=_FLASH),
    "mla128": Stage("mla-128", _DECODE, alone=_KERNELS, engine=_FLASH),
    "mla16-fp8-cache": Stage("mla-16", _DECODE, alone=_KERNELS, engine=_FP8_CACHE),
    "mla128-fp8-cache": Stage("mla-128", _DECODE, alone=_KERNELS, engine=_FP8_CACHE),
    "tiny": Stage("tiny", {"add_norm": ("add_rms_norm",)}),
    "tiny-mla": Stage("tiny", _DECODE),
    "tiny-tp2": Stage("tiny", {"all_reduce": ("all_reduce_add_rms_norm",)}, tp=2, alone=_NCCL),
}  # fmt: skip
"""By name, in the order of what they are worth; `tiny` ones are for trying this script."""
