"""What reading a spec costs, beside the bare attribute reads that it replaces.

    python benchmarks/registry.py

Ratios are of numbers taken in one run. Each number is the least of several repeats, in microseconds unless it says so.
"""

from __future__ import annotations

import operator
import subprocess
import sys
import timeit
from typing import Any

import attrs
import torch
from environment import save
from rich.console import Console
from rich.progress import track
from rich.table import Table

from layerfuse import fusion, registry
from layerfuse.adapters.base import Facts
from layerfuse.adapters.sources import NormSource, Path
from layerfuse.testing.models import full_model

MODEL = "deepseek-v3"


def least(call: Any, number: int, repeats: int = 7) -> float:
    """Microseconds per call, the least of some repeats."""
    return min(timeit.repeat(call, number=number, repeat=repeats)) / number * 1e6


def of_layers(count: int) -> torch.nn.Module:
    """The real transformers model with so many layers, its attention at full size, on the meta device."""
    entry = registry.model(MODEL)
    at = entry.mlp_at()[:count]
    mlps = {
        name: attrs.evolve(kind, at=[i for i, found in enumerate(at) if found == name])
        for name, kind in entry.mlps.items()
        if name in at
    }
    return full_model(attrs.evolve(entry, num_hidden_layers=count, mlps=mlps))


def bare_paths(facts: Facts) -> list[str]:
    """The attribute paths that the facts name, as somebody without a spec would read them."""
    paths: list[str] = []
    for name, parsed in facts.parsed.items():
        if isinstance(parsed, NormSource):
            for part, sources in parsed.fields:
                if isinstance(sources[0], Path):
                    last = "weight.shape" if part == "width" else str(sources[0])
                    paths.append(f"{parsed.module}.{last}")
        elif name == "tp_weight":
            linear = ".".join(parsed[0].steps)
            paths += [f"{linear}.{last}" for last in ("weight.shape", "out_features", "in_features")]
        elif isinstance(parsed, tuple) and isinstance(parsed[0], Path):
            paths.append(str(parsed[0]))
    return paths


def spec_for() -> dict[str, float]:
    """One real MLA layer: the spec against an attrgetter over the same paths."""
    layer = of_layers(1).get_submodule("model.layers.0.self_attn")
    paths = bare_paths(registry.default.readers_for(type(layer))[0].facts)
    bare = operator.attrgetter(*paths)
    read, plain = least(lambda: registry.spec_for(layer), 20_000), least(lambda: bare(layer), 20_000)
    return {"spec_for": read, "attrgetter": plain, "ratio": read / plain, "paths": len(paths)}


def specs_in() -> dict[str, dict[str, float]]:
    """A whole model, by its number of layers."""
    found = {}
    for layers in (4, 16, 61):
        model = of_layers(layers)
        modules = sum(1 for _ in model.modules())
        took = least(lambda model=model: registry.specs_in(model), 20)
        walk = least(lambda model=model: sum(1 for _ in model.named_modules()), 20)
        found[str(layers)] = {"us": took, "per_layer": took / layers, "bare_walk": walk, "modules": modules}
    return found


def plan() -> dict[str, float]:
    """Planning 61 layers and their decoder layers, from specs."""
    specs = registry.model(MODEL).specs(8)
    target = fusion.Target.named("gfx950")
    return {"us": least(lambda: fusion.plan(specs, target), 20), "specs": len(specs)}


def imports() -> dict[str, float]:
    """Milliseconds of a new interpreter above a bare one, and whether torch was loaded."""

    def start(code: str) -> float:
        command = [sys.executable, "-c", code]
        return least(lambda: subprocess.run(command, check=True), 1, 9) / 1000

    bare = start("pass")
    torch_free = "import layerfuse.registry, sys; sys.exit('torch' in sys.modules)"
    names = "from layerfuse.registry import spec_for, specs_in; import sys; sys.exit('torch' in sys.modules)"
    models = "from layerfuse.registry import models; models()"
    return {
        "bare_python_ms": bare,
        "import_registry_ms": start(torch_free) - bare,
        "import_its_names_ms": start(names) - bare,
        "and_load_models_toml_ms": start(models) - bare,
    }


def main() -> None:
    """Take every measurement and write it down."""
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for measure in track((spec_for, specs_in, plan, imports), description="measuring"):
        results[measure.__name__] = measure()
    table = Table("measure", "value")
    for name, values in results.items():
        for key, value in values.items():
            table.add_row(f"{name}.{key}", f"{value}" if isinstance(value, dict) else f"{value:.2f}")
    Console().print(table)
    Console().print(f"written to {save('registry', results)}")


if __name__ == "__main__":
    main()
