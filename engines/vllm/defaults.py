"""Whether anything that is on in vLLM by default can find a site, by vLLM's own config of a model and of the machine."""

from __future__ import annotations

from typing import Any

from .. import defaults


def may_find_a_site(vllm_config: Any, arch: str) -> bool:
    """Whether anything that is on by default can find a site in a model, by vLLM's config of it alone.

    Args:
        vllm_config: vLLM's own.
        arch: as `Target.arch`.
    """
    model = vllm_config.model_config
    return defaults.may_find_a_site(
        "vllm",
        arch,
        ranks=vllm_config.parallel_config.tensor_parallel_size,
        quantised=vllm_config.quant_config is not None,
        state=getattr(model, "has_inner_state", True),
        latents=getattr(model, "use_mla", True),
    )


def arch_here() -> str:
    """The architecture that vLLM runs on, as `Target.arch` has it; `cpu` for what is no GPU."""
    from vllm.platforms import current_platform

    if current_platform.is_rocm():
        import torch

        return str(torch.cuda.get_device_properties(0).gcnArchName.split(":")[0])
    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
    return "cpu" if capability is None else f"sm{capability.major}{capability.minor}"
