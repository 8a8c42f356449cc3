"""SGLang's own engine with and without layerfuse: GPU time of its decode graph, greedy tokens, kernels of a step.

    python bench/scripts/sglang_engine.py [STAGE ...] --out results.json --logs FOLDER [--limit 540] [--turns 6] [--arms sglang named]

What `vllm_engine` says of stages, arms, turns and files holds here too. A time is that of SGLang's CUDA graph for a decode step, replayed inside
of the scheduler behind some 1024 tokens of context, with all that it reads as a real step left it (`sglang_probe`).

The first arm is SGLang as it is installed, `default` the same with layerfuse and no option, `none` with all its fusions off, which is to change nothing.
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
from workloads import DEFAULT, STAGES, Way


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
    vllm_engine.main(__doc__, Engine, STAGES["sglang"])
