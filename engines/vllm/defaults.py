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
