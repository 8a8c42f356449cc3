"""Which fusions the catalog says are faster in vLLM, and are on there by default: read off its source, not imported.

To import the catalog takes longer than a start-up with nothing to do may. A test holds this to the catalog itself.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CATALOG = Path(__file__).parents[2] / "fusion" / "catalog"


def on_by_default(arch: str | None = None) -> dict[str, tuple[str, ...]]:
    """Fusion -> the architectures that it is on by default on in vLLM, perhaps under further conditions.

    Args:
        arch: as `Target.arch`; only what is on there. None: everywhere.
    """
    found: dict[str, tuple[str, ...]] = {}
    for path in sorted(CATALOG.glob("*.py")):
        for fields in _measurements(path.read_text(encoding="utf-8")):
            if fields["engine"] == "vllm" and arch in (None, *fields["archs"]):
                found[path.stem] = (*found.get(path.stem, ()), *fields["archs"])
    return found


def may_find_a_site(vllm_config: Any, arch: str) -> bool:
    """Whether anything that is on by default can find a site in a model, by vLLM's config of it alone.

    A fused quantisation wants a model that is quantised, an all-reduce its ranks, and a gated norm stands behind a layer that has a
    state of its own. What a config does not say counts as there.

    Args:
        vllm_config: vLLM's own.
        arch: as `Target.arch`.
    """
    ranks = vllm_config.parallel_config.tensor_parallel_size
    state = getattr(vllm_config.model_config, "has_inner_state", True)
    for path in CATALOG.glob("*.py"):
        source = path.read_text(encoding="utf-8")
        wanted = {"Quant": vllm_config.quant_config is not None, "GatedNorm": state}
        found = all(there for step, there in wanted.items() if f"{step}(" in source or f"({step}," in source)
        if found and any(
            fields["engine"] == "vllm" and arch in fields["archs"] and fields.get("ranks", 1) <= ranks
            for fields in _measurements(source)
        ):
            return True
    return False


def _measurements(source: str) -> Iterator[dict[str, Any]]:
    """The fields of every `Faster(...)` in a source."""
    if "Faster(" not in source:
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Faster":
            yield {str(each.arg): ast.literal_eval(each.value) for each in node.keywords}


def arch_here() -> str:
    """The architecture that vLLM runs on, as `Target.arch` has it; `cpu` for what is no GPU."""
    from vllm.platforms import current_platform

    if current_platform.is_rocm():
        import torch

        return str(torch.cuda.get_device_properties(0).gcnArchName.split(":")[0])
    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
    return "cpu" if capability is None else f"sm{capability.major}{capability.minor}"
