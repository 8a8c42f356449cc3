"""SGLang's own engine with and without layerfuse: GPU time of its decode graph, greedy tokens, kernels of a step.

    python bench/scripts/sglang_engine.py [STAGE ...] --out results.json --logs FOLDER [--limit 540] [--turns 6] [--arms sglang named]

What `vllm_engine` says of stages, arms, turns and files holds here too. A time is that of SGLang's CUDA graph for a decode step, replayed inside
of the scheduler behind some 1024 tokens of context, with all that it reads as a real step left it (`sglang_probe`).

The first arm is SGLang as it is installed, `default` the same with layerfuse installed and no fusion named, which is to change nothing.
Greedy tokens are decoded in SGLang's graphs. The log probabilities of given tokens are those of steps of prompts: SGLang's scheduler
gives those of its own logits only where it is not told what to draw.

`--prompts` times the forward of a step of prompts by the host's clock, held and run again as decode steps are: what SGLang's scheduler does around it is
not in it.

Without a GPU: `tiny --batches 1 8 --context 32`, with `tests/engines/sglang_site` on PYTHONPATH; steps are then timed by the clock.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import vllm_engine
from vllm_stages import DEFAULT, Arm, Stage, Way

QUANTISED = ("add_rms_norm_group_quant", "rms_norm_group_quant")
NAMED = ("add_rms_norm", *QUANTISED)
"""The norms of a model in fp8 blocks."""
PRODUCTS = ("few_token_linear_group_quant",)
FUSED = (*QUANTISED, "silu_mul_group_quant", *PRODUCTS)
"""All that stands at a linear in fp8 blocks: what a row of `policy.toml` can turn on without a word of other models."""
ALL = ("add_rms_norm", *FUSED)
_ARMS = {
    "default": Arm(way="sglang"), "quantised": Arm(QUANTISED, "sglang"), "named": Arm(NAMED, "sglang"),
    "named_breakable": Arm(NAMED, "breakable"), "products": Arm(PRODUCTS, "sglang"), "fused": Arm(FUSED, "sglang"), "all": Arm(ALL, "sglang"),
}  # fmt: skip


def _with(fusion: str) -> dict[str, Arm]:
    several = (*FUSED, fusion)
    graphed = {"fused_prompt_graphs": Arm(several, "prompt_graphs")}
    return {**_ARMS, "fused": Arm(several, "sglang"), "all": Arm((*ALL, fusion), "sglang"), **graphed}


_DUAL = "mla_dual_rms_norm_group_quant"
_MLA, _GATED = (
    {**_with(_DUAL), "mla_decode": Arm((*FUSED, _DUAL, "mla_decode"), "sglang")},
    _with("gated_rms_norm_group_quant"),
)
_WAYS = {
    "sglang": Way(),
    "triton": Way(engine={"fp8_gemm_runner_backend": "triton"}),
    # What vLLM takes where it is installed, and SGLang where it is asked.
    "flashinfer": Way(engine={"fp8_gemm_runner_backend": "flashinfer_deepgemm"}),
    "breakable": Way(engine={"cuda_graph_backend_decode": "breakable"}),
    # As SGLang is installed: steps of prompts in CUDA graphs, which take long to capture. The other ways have none.
    "prompt_graphs": Way(engine={"disable_prefill_cuda_graph": False}),
}
_CACHE = 340_000
"""Tokens of the cache: 256 sequences, and those that they draw."""
CPU: dict[str, dict[str, Any]] = {
    "engine": {
        "device": "cpu", "attention_backend": "torch_native", "disable_cuda_graph": True, "max_total_tokens": 10_000, "cuda_graph_bs_decode": None,
        "disable_prefill_cuda_graph": False, "mem_fraction_static": None,
    },
    "variables": {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0", "OMP_NUM_THREADS": "1"},
}  # fmt: skip
"""What an engine without a GPU is told."""
STAGES = {
    "deepseek-v3-rank8-dense": Stage("deepseek-v3-rank8-dense", _MLA, _WAYS, cache=_CACHE, needs=240),
    "deepseek-v3-rank8-mixture": Stage("deepseek-v3-rank8-mixture", _MLA, _WAYS, cache=_CACHE, needs=240),
    "qwen3-32b-fp8-rank4": Stage("qwen3-32b-fp8-rank4", _ARMS, _WAYS, cache=_CACHE, needs=240),
    # Triton's attention, as not every build of fa3 has heads of 256 columns.
    "qwen3-next-fp8": Stage("qwen3-next-fp8", _GATED, _WAYS, engine={"attention_backend": "triton"}, cache=_CACHE, needs=240),
    # Two GPUs, and no NVLink multicast (`vllm_engine.QUIET`): SGLang's all-reduces are its own, and layerfuse has no place for them there.
    "deepseek-v3-rank8-dense-tp2": Stage(
        "deepseek-v3-rank8-dense-tp2", _MLA, {**_WAYS, "nccl": Way(engine={"disable_custom_all_reduce": True})}, cache=_CACHE, tp=2, needs=240,
    ),
    # For trying this script.
    "tiny": Stage(
        "tiny-qwen3", {"default": Arm(way="sglang"), "named": Arm(("add_rms_norm",), "sglang")}, {"sglang": Way()}, cache=4096, needs=300, **CPU,
    ),
    "tiny-tp2": Stage(
        "tiny-qwen3", {"named": Arm(("add_rms_norm",), "sglang")}, {"sglang": Way()}, cache=4096, tp=2, needs=300,
        engine=CPU["engine"], variables={**CPU["variables"], "SGLANG_CPU_OMP_THREADS_BIND": "0|0"},
    ),
    "tiny-gpu": Stage("tiny", {"default": Arm(way="sglang"), "named": Arm(("add_rms_norm",), "sglang")}, {"sglang": Way()}, cache=_CACHE, needs=100),
}  # fmt: skip


class Engine(vllm_engine.Engine):
    """The process of an arm."""

    script, first, prompts = "sglang_arm.py", "sglang", False

    def asked(self, _way: Way, _fusions: tuple[str, ...] | None, _options: dict[str, Any]) -> dict[str, Any]:
        """Nothing more: layerfuse is told by variables."""
        return {}

    def variables(self, fusions: tuple[str, ...] | None, work: Path) -> dict[str, str]:
        """Of its environment. What nvcc compiles is shared by all arms."""
        found = {
            "SGLANG_PLUGINS": "sglang_probe" + (",layerfuse" if fusions else ""),
            "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0",
            "LAYERFUSE_FUSIONS": "" if fusions in (None, DEFAULT) else ",".join(fusions or ()),
            "LAYERFUSE_REPORT": str(self.report),
        }
        return {"SGLANG_CACHE_DIR": str(work / "cache"), **found}


if __name__ == "__main__":
    vllm_engine.main(__doc__, Engine, STAGES)
