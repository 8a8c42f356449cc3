"""Time of the graph rewriting on DeepSeek-V3 of 4, 16 and 61 layers, as a share of torch.compile's own time.

Run `python benchmarks/passes.py`; it writes figures and environment to benchmarks/results/passes.json. The target:
under 2% of the compilation (wall clock), and linear in layers. 61 layers take minutes; `--layers 4 16` is quick.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from torch._inductor import config as inductor_config

from layerfuse import registry
from layerfuse.fusion import FUSIONS, Pipeline, Target, plan
from layerfuse.fusion.compiler import inductor_with

DIMS = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def model_of(layers: int) -> torch.nn.Module:
    """A real DeepSeek-V3 with the true split dims and everything else small."""
    config = transformers.DeepseekV3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        max_position_embeddings=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=layers,
        first_k_dense_replace=layers,
        **DIMS,
    )
    return transformers.DeepseekV3ForCausalLM(config).eval()


def measure(layers: int) -> dict[str, Any]:
    """Compile once with empty caches; time the whole first call, and the rewriting within it."""
    torch._dynamo.reset()
    model = model_of(layers)
    pipeline = Pipeline(plan(registry.specs_in(model), Target.named("cpu")))
    spent = []
    nodes = []

    def timed(graph: torch.fx.Graph) -> None:
        nodes.append(len(graph.nodes))
        # Processor time: other processes on the machine must not count against a few milliseconds.
        start = time.thread_time()
        pipeline(graph)
        spent.append(time.thread_time() - start)

    compiled = torch.compile(model, backend=inductor_with(timed, model))
    with torch.no_grad(), inductor_config.patch(force_disable_caches=True):
        start = time.perf_counter()
        compiled(torch.arange(8)[None], use_cache=False)
        total = time.perf_counter() - start
    matched = {name: len(pipeline.report.of(name).matched) for name in FUSIONS}
    return {
        "layers": layers,
        "nodes": sum(nodes),
        "matched": {name: sites for name, sites in matched.items() if sites},
        "compile_s": round(total, 3),
        "passes_s": round(sum(spent), 4),
        "passes_ms_per_layer": round(sum(spent) / layers * 1e3, 3),
        "share_percent": round(100 * sum(spent) / total, 3),
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 16, 61])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "passes.json")
    arguments = parser.parse_args()
    # The first compilation of a process pays for imports and tables that are not the model's.
    measure(1)
    rows = []
    for layers in arguments.layers:
        rows.append(measure(layers))
        print(rows[-1], flush=True)
    result = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "threads": torch.get_num_threads(),
        },
        "target": "rewriting under 2% of torch.compile's own time, linear in layers",
        "rows": rows,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
