"""What vLLM's own config means for fusions: what it does not compile, and what it fuses by itself. Reads configs only."""

from __future__ import annotations

import os
from typing import Any

from ...fusion.catalog import FUSIONS
from ...fusion.chain import Fusion
from ...fusion.config import FusionConfig
from ...fusion.engine import Engine

BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
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


def engine_for(vllm_config: Any, config: FusionConfig) -> Engine:
    """VLLM as this config has it: what it refuses, and why. A fusion that is switched on by name is taken from vLLM."""
    reason = why_not_compiled(vllm_config)
    if reason is None and os.environ.get(BATCH_INVARIANT) == "1":
        reason = f"{BATCH_INVARIANT} is set: vLLM keeps to kernels whose results do not depend on the batch"
    if reason is not None:
        return Engine(name="vllm", refuses={"*": reason})
    return Engine(name="vllm", refuses=dict(_done_by_vllm(vllm_config.compilation_config.pass_config, config)))


def _done_by_vllm(passes: Any, config: FusionConfig) -> list[tuple[str, str]]:
    asked = {name for name, on in config.switches if on}
    found = []
    for fusion in FUSIONS.values():
        switch = _switch_of(fusion)
        if switch is not None and fusion.name not in asked and getattr(passes, switch, None) is True:
            found.append(
                (fusion.name, f"vLLM does it: its pass_config has {switch} on; naming the fusion takes it instead")
            )
    return found


def _switch_of(fusion: Fusion) -> str | None:
    """The switch of vLLM's own pass that fuses a chain of this kind."""
    kinds = {type(step).__name__ for step in fusion.chain}
    if "AllReduce" in kinds:
        return "fuse_allreduce_rms"
    if "SiluMul" in kinds:
        return "fuse_act_quant"
    if "GatedNorm" in kinds:
        return None
    if len(fusion.norms) > 1:
        return "fuse_mla_dual_rms_norm" if fusion.quant is None else None
    return "fuse_norm_quant" if fusion.quant is not None else None
