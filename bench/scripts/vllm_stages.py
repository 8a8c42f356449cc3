"""What `vllm_engine` measures: stages, each a model on so many GPUs, ways of vLLM's own to run it, and arms with layerfuse."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen

DEFAULT = ("default",)
"""Of an arm: layerfuse without an option."""


@frozen
class Way:
    """vLLM without layerfuse, computing the same in one of its own ways; without a field set, as it is installed."""

    variables: dict[str, str] = field(factory=dict)
    "Of its environment."
    passes: dict[str, bool] = field(factory=dict)
    "Of its compiler, on or off."
    engine: dict[str, Any] = field(factory=dict)
    "Arguments of its engine."
    custom_ops: tuple[str, ...] = ()
    "Its layers that run their own kernels in place of what Inductor makes of them."


@frozen
class Arm:
    """layerfuse in vLLM."""

    fusions: tuple[str, ...] = DEFAULT
    way: str = "vllm"
    "Of the stage's, that vLLM runs besides."
    options: dict[str, Any] = field(factory=dict)
    "Of layerfuse's, beside its fusions."


@frozen
class Stage:
    """One model on so many GPUs. The first way, `vllm`, is what all are compared with."""

    shape: str
    arms: dict[str, Arm] = field(factory=lambda: {"default": Arm()})
    ways: dict[str, Way] = field(factory=lambda: {"vllm": Way()})
    tp: int = 1
    variables: dict[str, str] = field(factory=dict)
    engine: dict[str, Any] = field(factory=dict)
    "Arguments of vLLM's engine."
    cache: int = 4 << 30
    "Bytes for keys and values."
    needs: int = 150
    "Seconds that it takes about."

    @property
    def together(self) -> int:
        """Tokens of a sequence in a decode step: one, and those that are drafted."""
        drafts: int = self.engine.get("speculative_config", {}).get("num_speculative_tokens", 0)
        return 1 + drafts


_PASSES = {"fuse_norm_quant": False, "fuse_act_quant": False}
_FLASHINFER_OFF, _DEEP_GEMM_OFF = {"VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0"}, {"VLLM_USE_DEEP_GEMM": "0"}
_WAYS = {
    "vllm": Way(),
    "unfused": Way(passes=_PASSES),
    "deep_gemm": Way(variables=_FLASHINFER_OFF),
    "deep_gemm_unfused": Way(variables=_FLASHINFER_OFF, passes=_PASSES),
    "cutlass": Way(variables=_DEEP_GEMM_OFF | _FLASHINFER_OFF),
    "cutlass_unfused": Way(variables=_DEEP_GEMM_OFF | _FLASHINFER_OFF, passes=_PASSES),
}
_BLOCKS = {
    "default": Arm(),
    "default_deep_gemm": Arm(way="deep_gemm"),
    "default_cutlass": Arm(way="cutlass"),
}
# What only makes a start longer: DeepGEMM's kernels for sizes that are not timed, which nvcc compiles, and trials of FlashInfer's kernels that
# these models do not call.
_SKIP = {"VLLM_DEEP_GEMM_WARMUP": "skip"}
_UNTRIED: dict[str, Any] = {"kernel_config": {"enable_flashinfer_autotune": False}}
_KERNELS = {"vllm": Way(), "kernels": Way(custom_ops=("all",))}  # rounds where they write, Inductor does not
_NCCL = {"vllm": Way(), "nccl": Way(engine={"disable_custom_all_reduce": True})}  # sums in another order
_UNFUSED = {"vllm": Way(), "unfused": Way(passes=_PASSES)}
_REDUCED = {
    "default": Arm(),
    "all_reduce": Arm(("all_reduce_add_rms_norm",)),
    "all": Arm(("all_reduce_add_rms_norm", "add_rms_norm", "mla_dual_rms_norm")),
}
_REDUCED_QUANTISED = {
    "default": Arm(),
    "all_reduce": Arm(("all_reduce_add_rms_norm", "all_reduce_add_rms_norm_group_quant")),
}
_REDUCED_INSTALLED = {
    "default": Arm(),
    "all_reduce": Arm(("+all_reduce_add_rms_norm", "+all_reduce_add_rms_norm_group_quant")),
}
_OWN_REDUCE = {"vllm": Way(), "unreduced": Way(passes={"fuse_allreduce_rms": False})}
_GATED = Arm(("+gated_rms_norm_group_quant",))
_PER_TOKEN = Arm(("add_rms_norm_per_token_quant", "rms_norm_per_token_quant", "silu_mul_per_token_quant"))
_LINEARS = Arm(options={"few_token_linears": True})
_DECODE, _FP8_CACHE = {"decode": Arm(("mla_decode",))}, {"kv_cache_dtype": "fp8"}
# By the layer that DeepSeek-V3 has for it, which drafts one for each sequence in every step.
_DRAFT = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
_QUANTISED_DECODE = {"quantised_decode": Arm(("+mla_decode_group_quant",))}
_BLOCKS_MLA = {
    **_BLOCKS,
    "without_decode": Arm(("-mla_decode",)),
    "without_decode_deep_gemm": Arm(("-mla_decode",), way="deep_gemm"),
}
_INSTALLED_MLA = {"default": Arm(), "without_decode": Arm(("-mla_decode",))}
# Which fusion it is that moves numbers.
_WITHOUT = {
    f"without_{name}": Arm((f"-{name}_group_quant",)) for name in ("silu_mul", "mla_dual_rms_norm", "add_rms_norm")
}
_WITHOUT_GATED = {
    "without_gated": Arm(("-gated_rms_norm",)),
    "without_silu_mul": Arm(("-silu_mul_group_quant",)),
    "without_norms": Arm(("-add_rms_norm_group_quant", "-rms_norm_group_quant")),
    "without_products": Arm(("-few_token_linear_group_quant",)),
}
# As vLLM runs the architectures of its own that it does not compile: CUDA graphs that are broken around the attention.
_BREAKABLE = {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}
_UNCOMPILED = {
    "vllm": Way(),
    "deep_gemm": Way(variables=_FLASHINFER_OFF),
    "compiled": Way(variables={"VLLM_USE_BREAKABLE_CUDAGRAPH": "0"}),
}
_NORMS = ("add_rms_norm_group_quant", "rms_norm_group_quant")
_INNER = ("mla_dual_rms_norm_group_quant", "silu_mul_group_quant")
_FEW = "few_token_linear_group_quant", "few_token_experts_group_quant"
_SEAMS = {
    "norms": Arm(_NORMS),
    "seams": Arm((*_NORMS, *_INNER)),
    "linears": Arm((*_NORMS, *_INNER, *_FEW)),
    "seams_deep_gemm": Arm((*_NORMS, *_INNER), way="deep_gemm"),
}
# Models of its own that vLLM does not compile by default: its ways to run them, and ours.
_OWN_WAYS = {"vllm": Way(), "deep_gemm": Way(variables=_FLASHINFER_OFF)}
_V32_SEAMS = {
    "norms": Arm(_NORMS),
    "seams": Arm((*_NORMS, "silu_mul_group_quant", "add_rms_norm")),
    "linears": Arm((*_NORMS, "silu_mul_group_quant", "add_rms_norm", *_FEW)),
}
_REDUCED_PLAINLY = ("all_reduce_add_rms_norm",)
_V32_REDUCED = {
    "all_reduce": Arm(_REDUCED_PLAINLY),
    "quantised": Arm((*_REDUCED_PLAINLY, "all_reduce_add_rms_norm_group_quant")),
    "linears": Arm((*_REDUCED_PLAINLY, "all_reduce_add_rms_norm_group_quant", "silu_mul_group_quant", *_FEW)),
}
_M3_SEAMS = {
    "norms": Arm((*_NORMS, "add_rms_norm")),
    "linears": Arm((*_NORMS, "add_rms_norm", *_FEW)),
}
_K3_SEAMS = {"norms": Arm(("gated_rms_norm",)), "seams": Arm(("gated_rms_norm", "mla_dual_rms_norm"))}
STAGES = {
    # The shapes that are served: what one rank holds, with random weights, on one GPU.
    "deepseek-v3-rank8-dense": Stage("deepseek-v3-rank8-dense", _BLOCKS_MLA | _QUANTISED_DECODE, _WAYS, variables=_SKIP, engine=_UNTRIED, needs=230),
    "deepseek-v3-rank8-mixture": Stage("deepseek-v3-rank8-mixture", _BLOCKS_MLA | _WITHOUT, _WAYS, variables=_SKIP, engine=_UNTRIED, cache=2 << 30, needs=230),
    "deepseek-v3-dp-dense": Stage("deepseek-v3-dp-dense", _BLOCKS_MLA, _WAYS, variables=_SKIP, engine=_UNTRIED, needs=230),
    "deepseek-v3-dp-mixture": Stage("deepseek-v3-dp-mixture", _BLOCKS_MLA, _WAYS, variables=_SKIP, engine=_UNTRIED, cache=2 << 30, needs=230),
    "qwen3-32b-fp8": Stage("qwen3-32b-fp8", _BLOCKS, _WAYS, variables=_SKIP, engine=_UNTRIED, cache=6 << 30),
    "qwen3-32b-fp8-rank4": Stage("qwen3-32b-fp8-rank4", _BLOCKS, _WAYS, variables=_SKIP, engine=_UNTRIED),
    "kimi-k2.5-rank8-mixture": Stage("kimi-k2.5-rank8-mixture", _INSTALLED_MLA, engine=_UNTRIED, needs=100),
    "llama-70b-w8a8-rank4": Stage("llama-70b-w8a8-rank4", {"default": Arm(), "quantised": _PER_TOKEN, "linears": _LINEARS}, _UNFUSED | _KERNELS, engine=_UNTRIED, needs=100),
    "gpt-oss-120b": Stage("gpt-oss-120b", {"default": Arm(), "add_norm": Arm(("add_rms_norm",))}, _KERNELS),
    "qwen3-4b": Stage("qwen3-4b", {"default": Arm(), "add_norm": Arm(("add_rms_norm",)), "linears": _LINEARS}, _KERNELS, cache=8 << 30),
    # On Hopper vLLM takes FlashInfer for a delta net's prefill, which is not measured here: its kernel is compiled by nvcc.
    "qwen3-next": Stage("qwen3-next", {"default": Arm(), "all": Arm(("gated_rms_norm", "add_rms_norm"))},
                        engine={"gdn_prefill_backend": "triton"}),
    "qwen3-next-fp8": Stage("qwen3-next-fp8", _BLOCKS | _WITHOUT_GATED | {"gated": _GATED}, _WAYS | _KERNELS, variables=_SKIP, engine=_UNTRIED | {"gdn_prefill_backend": "triton"}, cache=3 << 30, needs=230),
    # The same where vLLM compiles nothing.
    "deepseek-v3-rank8-dense-uncompiled": Stage("deepseek-v3-rank8-dense", _SEAMS, _UNCOMPILED, variables=_SKIP | _BREAKABLE, engine=_UNTRIED, needs=230),
    **{
        shape: Stage(shape, _V32_SEAMS, _OWN_WAYS, variables=_SKIP, engine=_UNTRIED, cache=cache, needs=230)
        for shape, cache in {
            "deepseek-v3.2-rank8-dense": 4 << 30, "deepseek-v3.2-rank8-mixture": 2 << 30, "glm-5-rank8-dense": 4 << 30, "glm-5-rank8-mixture": 2 << 30,
        }.items()
    },
    # Linears of bfloat16, of which no op stands at module level, and whose latents and gated norms alone are not vLLM's already.
    "kimi-k3-rank8-dense": Stage("kimi-k3-rank8-dense", _K3_SEAMS, engine=_UNTRIED, needs=200),
    "minimax-m3-rank8-dense": Stage("minimax-m3-rank8-dense", {"norms": Arm(("add_rms_norm",))}, engine=_UNTRIED, needs=200),
    "minimax-m3-rank8-mixture": Stage("minimax-m3-rank8-mixture", {"norms": Arm(("add_rms_norm",))}, engine=_UNTRIED, needs=200),
    "minimax-m3-rank8-dense-fp8": Stage("minimax-m3-rank8-dense-fp8", _M3_SEAMS, _OWN_WAYS, variables=_SKIP, engine=_UNTRIED, needs=230),
    "minimax-m3-rank8-mixture-fp8": Stage("minimax-m3-rank8-mixture-fp8", _M3_SEAMS, _OWN_WAYS, variables=_SKIP, engine=_UNTRIED, needs=230),
    # The same with a token drafted, and with caches in fp8.
    "deepseek-v3-rank8-dense-draft": Stage("deepseek-v3-rank8-dense", _INSTALLED_MLA | _QUANTISED_DECODE, variables=_SKIP, engine=_UNTRIED | _DRAFT, needs=230),
    "deepseek-v3-rank8-dense-fp8-cache": Stage("deepseek-v3-rank8-dense", _INSTALLED_MLA | _QUANTISED_DECODE, variables=_SKIP, engine=_UNTRIED | _FP8_CACHE, needs=230),
    "kimi-k2.5-rank8-mixture-fp8-cache": Stage("kimi-k2.5-rank8-mixture", _INSTALLED_MLA, engine=_UNTRIED | _FP8_CACHE, needs=100),
    # Attention alone.
    "mla16": Stage("mla-16", _DECODE, _KERNELS),
    "mla128": Stage("mla-128", _DECODE, _KERNELS),
    "mla16-fp8-cache": Stage("mla-16", _DECODE, _KERNELS, engine=_FP8_CACHE),
    "mla128-fp8-cache": Stage("mla-128", _DECODE, _KERNELS, engine=_FP8_CACHE),
    # Several GPUs.
    "gpt-oss-tp2": Stage("gpt-oss-120b", _REDUCED, _NCCL, tp=2),
    # Two ranks as installed: FlashInfer's fused all-reduce is vLLM's own then, by its kernels that need no multicast (`QUIET` in `vllm_engine`).
    "deepseek-v3-rank8-dense-tp2": Stage("deepseek-v3-rank8-dense-tp2", _REDUCED_INSTALLED, _OWN_REDUCE, tp=2, variables=_SKIP, engine=_UNTRIED, needs=230),
    # At vLLM's function for a norm behind an all-reduce: FlashInfer's kernel stands there where it runs, and else NCCL's or vLLM's own and a norm.
    "deepseek-v3.2-rank8-dense-tp2": Stage("deepseek-v3.2-rank8-dense-tp2", _V32_REDUCED, tp=2, variables=_SKIP, engine=_UNTRIED, needs=230),
    "gpt-oss-120b-tp2": Stage("gpt-oss-120b", {"default": Arm(), "all_reduce": Arm(("+all_reduce_add_rms_norm",))}, _OWN_REDUCE, tp=2, engine=_UNTRIED, needs=150),
    "fp8-tp2": Stage("deepseek-v3-fp8", _REDUCED_QUANTISED, _UNFUSED | _NCCL, tp=2, needs=190),
    "bf16-tp2": Stage("deepseek-v3", _REDUCED, _NCCL, tp=2),
    "gpt-oss-tp4": Stage("gpt-oss-120b", _REDUCED, _NCCL, tp=4),
    "fp8-tp4": Stage("deepseek-v3-fp8", _REDUCED_QUANTISED, _UNFUSED | _NCCL, tp=4, needs=190),
    "bf16-tp4": Stage("deepseek-v3", _REDUCED, _NCCL, tp=4),
    # For trying this script.
    "tiny": Stage("tiny", {"default": Arm(), "add_norm": Arm(("add_rms_norm",))}, cache=1 << 30),
    "tiny-mla": Stage("tiny", _DECODE, cache=1 << 30),
    "tiny-mla-draft": Stage("tiny", _DECODE, engine=_DRAFT, cache=1 << 30),
    "tiny-tp2": Stage("tiny", {"all_reduce": Arm(("all_reduce_add_rms_norm",))}, _NCCL, tp=2, cache=1 << 30),
}  # fmt: skip
"""By name, in the order of what they are worth."""

WHOLE = {
    "DeepSeek-V3 in fp8, a rank of eight": {"deepseek-v3-rank8-dense": 3, "deepseek-v3-rank8-mixture": 58},
    "DeepSeek-V3 in fp8, attention unsharded, experts over eight": {
        "deepseek-v3-dp-dense": 3,
        "deepseek-v3-dp-mixture": 58,
    },
}
"""A whole model: how many of a stage's layers it has."""
