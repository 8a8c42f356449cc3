"""Which fusions are on in vLLM by default, and whether one of them can find a site: from the measurements, without the catalog.

To import the catalog takes longer than a start-up with nothing to do may.
"""

from __future__ import annotations

from typing import Any

from ...fusion.policy import Measurement, shipped


def on_by_default(arch: str | None = None) -> dict[str, tuple[str, ...]]:
    """Fusion -> the architectures that it is on by default on in vLLM, perhaps under further conditions.

    Args:
        arch: as `Target.arch`; only what is on there. None: everywhere.
    """
    found: dict[str, dict[str, None]] = {}
    for each in _faster():
        if arch in (None, each.arch):
            for name in each.fusions:
                found.setdefault(name, {})[each.arch] = None
    return {name: tuple(archs) for name, archs in sorted(found.items())}


def may_find_a_site(vllm_config: Any, arch: str) -> bool:
    """Whether anything that is on by default can find a site in a model, by vLLM's config of it alone.

    A fused quantisation wants a model that is quantised, an all-reduce its ranks, a gated norm stands behind a layer that has a state of
    its own, and MLA's chains in MLA layers. What a config does not say counts as there.

    Args:
        vllm_config: vLLM's own.
        arch: as `Target.arch`.
    """
    ranks = vllm_config.parallel_config.tensor_parallel_size
    quantised = vllm_config.quant_config is not None
    state = getattr(vllm_config.model_config, "has_inner_state", True)
    latents = getattr(vllm_config.model_config, "use_mla", True)
    return any(
        (quantised or not name.endswith("_quant"))
        and (state or not name.startswith("gated_"))
        and (latents or not name.startswith("mla_"))
        for each in _faster()
        if each.arch == arch and each.ranks <= ranks
        for name in each.fusions
    )


def measured_elsewhere(arch: str, device: str, release: str) -> str | None:
    """Where what is on by default was measured, as a sentence, if not on such a GPU with such a vLLM; None where it was, or nothing is on.

    Args:
        arch: as `Target.arch`.
        device: as the driver names it.
        release: of vLLM.
    """
    there = {(each.release, each.device): None for each in _faster() if each.arch == arch}
    if not there or (release.partition("+")[0], device) in there:
        return None
    where = " and ".join(f"vLLM {known} on {gpu}" for known, gpu in there)
    return f"what is on by default here is what was measured faster with {where}; vLLM {release} on {device} was not measured"


def _faster() -> list[Measurement]:
    return [each for each in shipped().measurement if each.engine == "vllm" and each.faster]


def arch_here() -> str:
    """The architecture that vLLM runs on, as `Target.arch` has it; `cpu` for what is no GPU."""
    from vllm.platforms import current_platform

    if current_platform.is_rocm():
        import torch

        return str(torch.cuda.get_device_properties(0).gcnArchName.split(":")[0])
    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
    return "cpu" if capability is None else f"sm{capability.major}{capability.minor}"
