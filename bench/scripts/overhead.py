"""What layerfuse itself costs the host: `python bench/scripts/overhead.py [registry] [metadata] [passes]`.

Each writes a file of its name below `results`. A number is the least of several repeats, in microseconds unless its name says else.
`passes` compiles DeepSeek-V3 of 4, 16 and 61 layers, which takes minutes; `--layers 4` is quick.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import attrs
import torch

from layerfuse import fusion, registry
from layerfuse.bench.files import save
from layerfuse.bench.timing import least

MODEL = "deepseek-v3"


# ---- reading specs and planning


def of_registry() -> dict[str, Any]:
    """Specs of real transformers layers at full size on the meta device, by the number of layers; a plan; imports."""
    layer = _model_of(1).get_submodule("model.layers.0.self_attn")
    found: dict[str, Any] = {"spec_for": least(lambda: registry.spec_for(layer), 2000), "specs_in": {}}
    for layers in (4, 16, 61):
        model = _model_of(layers)
        took = least(lambda model=model: registry.specs_in(model), 5)
        found["specs_in"][layers] = {"us": took, "per_layer": took / layers}
    specs, target = registry.model(MODEL).specs(8), fusion.Target.named("gfx950")
    return {
        **found,
        "plan": {"us": least(lambda: fusion.plan(specs, target), 20), "specs": len(specs)},
        "import_registry_ms": _importing("import layerfuse.registry, sys; sys.exit('torch' in sys.modules)"),
        "import_its_names_ms": _importing("from layerfuse.registry import spec_for, specs_in"),
        "and_load_models_toml_ms": _importing("from layerfuse.registry import models; models()"),
    }


def _model_of(layers: int) -> torch.nn.Module:
    from layerfuse.testing.models import full_model

    entry = registry.model(MODEL)
    at = entry.mlp_at()[:layers]
    mlps = {
        name: attrs.evolve(kind, at=[i for i, found in enumerate(at) if found == name])
        for name, kind in entry.mlps.items()
        if name in at
    }
    return full_model(attrs.evolve(entry, num_hidden_layers=layers, mlps=mlps))


def _importing(code: str) -> float:
    """Milliseconds of a new interpreter above one that imports nothing."""
    ours, bare = (
        least(lambda code=code: subprocess.run([sys.executable, "-c", code], check=True), 1) for code in (code, "pass")
    )
    return (ours - bare) / 1000


# ---- attention metadata


def of_metadata() -> dict[str, Any]:
    """One model, every layer of it grouped and planned; one layer; its buffers."""
    from layerfuse.fusion.metadata import LayerGroup, allocate, group_layers, plan_metadata, plan_state

    target, release = fusion.Target.named("gfx950"), "v0.1.18"

    def planned(group: LayerGroup) -> Any:
        if not group.is_mla:
            return plan_state(group.spec, batch=256)
        fp8 = {"q_dtype": "fp8", "kv_dtype": "fp8"}
        return plan_metadata(group.spec, target, release, batch=256, prefill_length=8192, **fp8)

    models = {name: registry.model(name).specs(8, 0) for name in ("kimi-k2.5", "kimi-linear-48b-a3b", MODEL, "kimi-k3")}
    spec = next(group.spec for group in group_layers(models["kimi-k2.5"]) if group.is_mla)
    plan = plan_metadata(spec, target, release, batch=256)
    return {
        "plan_model_us": {
            name: least(lambda specs=specs: [*map(planned, group_layers(specs))], 20) for name, specs in models.items()
        },
        "plan_layer_us": least(lambda: plan_metadata(spec, target, release, batch=256), 200),
        "allocate_us": least(lambda: allocate(plan, "cpu"), 200),
        "import_ms": _importing("from layerfuse.fusion import metadata; metadata.plan_metadata"),
    }


# ---- rewriting graphs


def of_passes(several: list[int]) -> dict[str, Any]:
    """The share of rewriting in torch.compile's own time. The target: under 2 %, and linear in layers."""
    _compiled(1)  # pays for imports and tables that are not the model's
    return {"rows": [_compiled(layers) for layers in several]}


def _compiled(layers: int) -> dict[str, Any]:
    """DeepSeek-V3 with the true split dims and everything else small, compiled once with empty caches."""
    import transformers
    from torch._inductor import config as inductor_config

    from layerfuse.fusion.compiler import inductor_with

    torch._dynamo.reset()
    config = transformers.DeepseekV3Config(
        vocab_size=64, hidden_size=64, intermediate_size=64, max_position_embeddings=64, num_attention_heads=2,
        num_key_value_heads=2, num_hidden_layers=layers, first_k_dense_replace=layers, q_lora_rank=1536, kv_lora_rank=512,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    )  # fmt: skip
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    pipeline = fusion.Pipeline(fusion.plan(registry.specs_in(model), fusion.Target.named("cpu")))
    spent = []

    def timed(graph: torch.fx.Graph) -> None:
        # Processor time: other processes on the machine must not count against a few milliseconds.
        begun = time.thread_time()
        pipeline(graph)
        spent.append(time.thread_time() - begun)

    compiled = torch.compile(model, backend=inductor_with(timed, model))
    with torch.no_grad(), inductor_config.patch(force_disable_caches=True):
        begun = time.perf_counter()
        compiled(torch.arange(8)[None], use_cache=False)
        total = time.perf_counter() - begun
    return {
        "layers": layers, "matched": sum(len(pipeline.report.of(name).matched) for name in fusion.FUSIONS), "compile_s": total,
        "passes_s": sum(spent), "passes_ms_per_layer": sum(spent) / layers * 1e3, "share_percent": 100 * sum(spent) / total,
    }  # fmt: skip


def main() -> None:
    """Take the measurements that are named, or all."""
    every = {"registry": of_registry, "metadata": of_metadata, "passes": of_passes}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(every))
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 16, 61], help="of passes")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.names or every:
        found = of_passes(given.layers) if name == "passes" else every[name]()  # type: ignore[operator]
        print(name, *(f"  {key}: {value}" for key, value in found.items()), sep="\n", flush=True)
        save(given.out / f"{name}.json", found)


if __name__ == "__main__":
    main()
