"""What planning attention metadata costs: one model, every layer of it grouped and planned.

    python benchmarks/metadata.py

Each number is the least of several repeats, in microseconds.
"""

from __future__ import annotations

import subprocess
import sys
import timeit
from typing import Any

import torch
from environment import save

from layerfuse import registry
from layerfuse.fusion import Target
from layerfuse.fusion.metadata import (
    LayerGroup,
    MLAMetadataPlan,
    allocate,
    group_layers,
    plan_metadata,
    plan_state,
)

GFX950 = Target.named("gfx950")
MODELS = ("kimi-k2.5", "kimi-linear-48b-a3b", "deepseek-v3", "kimi-k3")


def least(call: Any, number: int, repeats: int = 9) -> float:
    """Microseconds per call, the least of some repeats."""
    return min(timeit.repeat(call, number=number, repeat=repeats)) / number * 1e6


def planned(specs: Any) -> list[Any]:
    """Every group of a model, planned."""
    return [plan_of(group) for group in group_layers(specs)]


def plan_of(group: LayerGroup) -> Any:
    """One group."""
    if not group.is_mla:
        return plan_state(group.spec, batch=256)
    return plan_metadata(group.spec, GFX950, "v0.1.18", batch=256, q_dtype="fp8", kv_dtype="fp8", prefill_length=8192)


def padded(plan: MLAMetadataPlan) -> dict[str, float]:
    """Padding the query of one step on the CPU, beside the copy that a contiguous query of the kernel's width costs."""
    q = torch.randn(256, plan.heads.num_heads, plan.latent_width, dtype=torch.bfloat16)
    out = torch.empty(256, plan.heads.kernel_heads, plan.latent_width, dtype=torch.bfloat16)
    wide = plan.heads.pad_query(q)
    return {
        "pad_query": least(lambda: plan.heads.pad_query(q), 200),
        "pad_query_into": least(lambda: plan.heads.pad_query(q, out), 200),
        "copy_of_that_width": least(lambda: out.copy_(wide), 200),
        "cut_output": least(lambda: plan.heads.cut_output(out), 2000),
    }


def importing() -> float:
    """Milliseconds of a new interpreter that plans, above one that imports nothing."""
    code = "from layerfuse.fusion import metadata; metadata.plan_metadata; import sys; sys.exit('torch' in sys.modules)"
    ours, bare = (
        least(lambda code=code: subprocess.run([sys.executable, "-c", code], check=True), 1) for code in (code, "pass")
    )
    return (ours - bare) / 1000


def main() -> None:
    """Take every measurement and write it down."""
    torch.set_num_threads(1)
    results: dict[str, Any] = {"plan_model_us": {}, "buffers_bytes": {}, "import_ms": importing()}
    for name in MODELS:
        specs = registry.model(name).specs(8, 0)
        results["plan_model_us"][name] = least(lambda specs=specs: planned(specs), 20)
        (mla,) = [plan for plan in planned(specs) if isinstance(plan, MLAMetadataPlan)]
        results["buffers_bytes"][name] = {"buffers": mla.buffer_bytes, "scratch": mla.scratch_bytes}
        if name in ("kimi-k2.5", "kimi-k3"):
            results[f"{name}: {mla.heads}, 256 tokens, us"] = padded(mla)
    spec = next(group.spec for group in group_layers(registry.model("kimi-k2.5").specs(8, 0)) if group.is_mla)
    results["plan_layer_us"] = least(lambda: plan_metadata(spec, GFX950, "v0.1.18", batch=256), 200)
    plan = plan_metadata(spec, GFX950, "v0.1.18", batch=256)
    results["allocate_us"] = least(lambda: allocate(plan, "cpu"), 200)
    print(results)
    print(f"written to {save('metadata', results)}")


if __name__ == "__main__":
    main()
