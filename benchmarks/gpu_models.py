"""Small real models compiled with their fusions on this machine's GPU: what matched, and how far the result is off.

    python benchmarks/gpu_models.py

Writes `benchmarks/results/gpu_models.json`. It says nothing of speed; `mla_attention.py` does, with full sizes.
"""

from __future__ import annotations

from typing import Any

import torch
from environment import save
from rich.console import Console
from rich.progress import track

from layerfuse import fusion, registry
from layerfuse.testing import small_model

MODELS = ("deepseek-v3", "kimi-k2-instruct", "gpt-oss-20b")


def compiled(name: str) -> dict[str, Any]:
    """One model of two layers in bfloat16, fused against eager and against plain torch.compile."""
    model = small_model(registry.model(name), layers=2, dtype=torch.bfloat16).cuda()
    ids = torch.randint(0, 100, (2, 16), device="cuda")
    fused = fusion.compile(model)
    with torch.no_grad():
        result = fused(input_ids=ids, use_cache=False).logits.float()
        eager = model(input_ids=ids, use_cache=False).logits.float()
        plain = torch.compile(model)(input_ids=ids, use_cache=False).logits.float()
    reports = [fused.report.of(name) for name in fusion.FUSIONS]
    chosen = fusion.backends.chosen()
    return {
        "fusions": {
            report.fusion: {
                "expected": len(report.expected),
                "matched": len(report.matched),
                "last_call": report.last_call,
                "backend": chosen.get((fusion.FUSIONS[report.fusion].op.name, "cuda")),
            }
            for report in reports
            if report.expected
        },
        "largest_logit": eager.abs().max().item(),
        "fused_to_eager": (result - eager).abs().max().item(),
        "fused_to_compiled": (result - plain).abs().max().item(),
    }


def main() -> None:
    """Compile every model and write down what came of it."""
    if not torch.cuda.is_available():
        Console().print("nothing measured: this needs a GPU that torch can see")
        return
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "target": str(fusion.Target.detect())}
    results |= {name: compiled(name) for name in track(MODELS, description="compiling")}
    Console().print(results)
    Console().print(f"written to {save('gpu_models', results)}")


if __name__ == "__main__":
    main()
