"""The places of vLLM where a fused op can go in without a compiler, as data: what runs there, and which fusion that is.

Each is checked when it is used, as hooks are: where it is not what this version knows, that place is left alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from attrs import field, frozen

from .hooks import Hook, HookError, check, owner_of

_NORMS = "vllm.model_executor.layers.layernorm"
_MLA = "vllm.model_executor.layers.mla"
_KDA = "vllm.third_party.flash_linear_attention.ops.kda"
_K3 = "vllm.models.kimi_k3.nvidia.mla"
_FUNCTION = "fused_q_kv_rmsnorm"
_QUANTISER = Hook(
    name="seam",
    module="vllm.model_executor.layers.quantization.input_quant_fp8",
    path="QuantFP8.forward_native",
    takes=("self", "x", "scale", "scale_ub"),
    others="optional",
)
_TAKES = ("qr", "kv", "q_weight", "kv_weight", "eps")


def _always(_module: Any) -> bool:
    return True


@frozen(kw_only=True)
class Seam:
    """One class of vLLM's in whose instances a fused op can stand.

    For a norm the instance's call with a second tensor (the residual, the gate) becomes one call of the fused op. Where there is
    a `function`, that is what becomes the op, while the instance runs.
    """

    fusion: str
    hook: Hook
    "A method of the class, with what it takes."
    function: Hook | None = None
    "What the instance calls of its module for the same chain."
    switch: str | None = None
    "The attribute that makes the instance call it."
    reader: Hook | None = None
    "What linears behind a norm quantise by, where they do not inside of their product: it is given what the op has quantised."
    plain: Callable[[Any], bool] = field(default=_always, repr=False)
    "Whether an instance computes what the spec says and nothing else."

    @property
    def key(self) -> tuple[str, str]:
        """The module and the name of the class."""
        return self.hook.module, self.hook.path.partition(".")[0]

    @property
    def second(self) -> str:
        """The name of a norm's second tensor."""
        return self.hook.takes[2]

    @property
    def hooks(self) -> tuple[Hook, ...]:
        """What has to be as expected."""
        return tuple(hook for hook in (self.hook, self.function, self.reader) if hook is not None)

    def is_there(self) -> bool:
        """Whether this vLLM has something of these names. Imports nothing."""
        try:
            for hook in self.hooks:
                owner_of(hook, sys.modules[hook.module])
        except (KeyError, HookError):
            return False
        return True

    def why_not(self) -> str | None:
        """Why this vLLM is not what is expected here, or None where it is. Imports nothing."""
        for hook in self.hooks:
            module = sys.modules.get(hook.module)
            if module is None:
                return f"{hook.module} is not loaded"
            try:
                check(hook, module)
            except HookError as error:
                return str(error)
        return None


def _norm(fusion: str, module: str, name: str, second: str, **more: Any) -> Seam:
    takes = ("self", "x", second)
    hook = Hook(name="seam", module=module, path=f"{name}.forward_native", takes=takes, others="optional")
    return Seam(fusion=fusion, hook=hook, **more)


def _quantised(name: str, **more: Any) -> tuple[Seam, ...]:
    """The same norm with the quantisation of the linears behind it, with an add in front and without."""
    chains = (f"{chain}_{scheme}_quant" for chain in ("add_rms_norm", "rms_norm") for scheme in ("group", "per_token"))
    return tuple(_norm(chain, _NORMS, name, "residual", reader=_QUANTISER, **more) for chain in chains)


def _latents(module: str, name: str, **more: Any) -> Seam:
    return Seam(
        fusion="mla_dual_rms_norm",
        hook=Hook(name="seam", module=module, path=f"{name}.forward", takes=("self", "positions", "hidden_states")),
        function=Hook(
            name="seam",
            module=module,
            path=_FUNCTION,
            takes=_TAKES,
            others="none",
            source=f"vllm.models.common.ops.fused_qk_rmsnorm:{_FUNCTION}",
        ),
        **more,
    )


def _plain(norm: Any) -> bool:
    return bool(norm.has_weight and norm.variance_size_override is None)


SEAMS = (
    _norm("add_rms_norm", _NORMS, "RMSNorm", "residual", plain=_plain),
    _norm("add_rms_norm", _NORMS, "GemmaRMSNorm", "residual"),
    *_quantised("RMSNorm", plain=_plain),
    *_quantised("GemmaRMSNorm"),
    _norm("gated_rms_norm", _NORMS, "RMSNormGated", "z", plain=lambda norm: norm.bias is None),
    _norm("gated_rms_norm", _KDA, "FusedRMSNormGated", "g", plain=lambda norm: norm.weight is not None),
    _latents(_MLA, "MultiHeadLatentAttentionWrapper", switch="fuse_qkv_rmsnorm"),
    _latents(_K3, "MultiHeadLatentAttention"),
)
"""Every place. The fused op of a site is that of the plan; a norm is the site's own module."""


def seam_of(cls: type, fusion: str) -> Seam | None:
    """The place that a class is for a fusion. A class derived from one that is known may do something else, and is none."""
    return next((s for s in SEAMS if s.fusion == fusion and s.key == (cls.__module__, cls.__qualname__)), None)


def usable() -> frozenset[str]:
    """The fusions for which this vLLM has such a place, as far as its modules are loaded; whose code is there is asked at each site."""
    return frozenset(seam.fusion for seam in SEAMS if seam.is_there())
