"""What vLLM's own config means for fusions: what it does not compile, and what it fuses by itself. Reads configs only."""

from __future__ import annotations

import os
from typing import Any

import attrs

from ...fusion.catalog import FUSIONS
from ...fusion.engine import Engine
from ...fusion.target import Target
from . import inside, native_fusions
from .native import why_not_all_reduce, why_not_ops
from .seams import usable
from .switches import BATCH_INVARIANT, INVARIANT, is_set

BREAKABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"


def why_not_compiled(vllm_config: Any) -> str | None:
    """Why vLLM's compiler does not see the model, as a sentence, or None where it does."""
    compilation = vllm_config.compilation_config
    mode = compilation.mode
    name = "NONE" if mode is None else mode.name
    if name == "VLLM_COMPILE" and compilation.backend in ("", "inductor"):
        return None
    if vllm_config.model_config.enforce_eager:
        return "enforce_eager is set: vLLM compiles nothing"
    if name == "VLLM_COMPILE":
        return f"vLLM's compilation backend is {compilation.backend!r}, which runs no pass; it needs 'inductor'"
    if name == "NONE" and _breakable_by_default(vllm_config):
        return f"vLLM runs {_model(vllm_config)} in breakable CUDA graphs by default, and does not compile it"
    if name == "NONE" and os.environ.get(BREAKABLE) == "1":
        return f"vLLM runs {_model(vllm_config)} in breakable CUDA graphs ({BREAKABLE}=1), and does not compile it"
    return f"vLLM's compilation mode is {name} here; fusions need VLLM_COMPILE"


def _model(vllm_config: Any) -> str:
    return str(vllm_config.model_config.architectures[0])


def _breakable_by_default(vllm_config: Any) -> bool:
    from vllm.config import vllm as module

    # A function of the platform in 0.33; 0.26 lists names in the code, and sets the variable.
    listed: Any = getattr(module, "default_breakable_cudagraph_architectures", frozenset)
    return not listed().isdisjoint(vllm_config.model_config.architectures)


def runs_modules(vllm_config: Any) -> bool:
    """Whether vLLM runs the model's modules as they are: nothing of it is compiled, by vLLM or by torch alone."""
    mode = vllm_config.compilation_config.mode
    return mode is None or bool(mode.name == "NONE")


def draft_of(vllm_config: Any) -> Any:
    """The config of the model that drafts for this one and is loaded beside it; None: there is none."""
    speculative = vllm_config.speculative_config
    # Where drafts come from the prompt alone, vLLM names the model itself.
    if speculative is None or speculative.draft_model_config is speculative.target_model_config:
        return None
    return speculative.draft_model_config


def engine_for(vllm_config: Any, target: Target, at_modules: str | None = None, model: str = "") -> Engine:
    """What a plan needs to know of the vLLM that runs here, as this config has it.

    Args:
        vllm_config: vLLM's own.
        target: where it runs.
        at_modules: why vLLM does not compile the model, where fused ops are to go in at module level; None: it does.
        model: its class. A draft is loaded with the config of the model that it drafts for.
    """
    if is_set(BATCH_INVARIANT):
        return Engine(name="vllm", refuses={"*": INVARIANT})
    place = native_fusions.Place(
        vendor=target.vendor,
        arch=target.arch,
        ranks=vllm_config.parallel_config.tensor_parallel_size,
        aiter=target.vendor == "amd" and _uses_aiter(),
    )
    if at_modules is not None:
        architectures = (*vllm_config.model_config.architectures, model)
        return attrs.evolve(
            native_fusions.uncompiled(at_modules, architectures, place, usable()),
            inside=inside.why_not(),
            captures=_captures(vllm_config),
        )
    foreign = why_not_ops()
    if foreign is not None:
        return Engine(name="vllm", refuses={"*": foreign})
    passes = vllm_config.compilation_config.pass_config
    switched = {each.switch: getattr(passes, each.switch, None) is True for each in native_fusions.PASSES}
    engine = attrs.evolve(native_fusions.compiled(place, switched), inside=inside.why_not())
    refused: dict[str, str] = {}
    if vllm_config.lora_config is not None:
        # Nothing in a graph gives the plain product beside what is quantised of it.
        products = [name for name, each in FUSIONS.items() if each.format is not None and not each.forms[-1].in_graphs]
        refused |= dict.fromkeys(products, "LoRA may read the product too, unquantised")
    foreign = why_not_all_reduce() if place.ranks > 1 else None
    if foreign is not None:
        refused |= dict.fromkeys((name for name, each in FUSIONS.items() if each.across_ranks), foreign)
    return attrs.evolve(engine, refuses={**engine.refuses, **refused})


def _captures(vllm_config: Any) -> bool:
    from vllm.platforms import current_platform

    if vllm_config.model_config.enforce_eager:
        return False
    # On a CPU there are no CUDA graphs to switch off.
    return not current_platform.is_cuda_alike() or bool(vllm_config.compilation_config.max_cudagraph_capture_size)


def _uses_aiter() -> bool:
    from vllm._aiter_ops import rocm_aiter_ops

    return bool(rocm_aiter_ops.is_enabled())
