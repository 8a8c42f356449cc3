"""The places of vLLM where a fused op can go in without a compiler, as data. A release has those whose code is as it says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from ..hooks import Hook
from ..seams import Consumer, Seam

if TYPE_CHECKING:
    from ...adapters.activation_quant import ActivationQuant
    from ..handover import Reader

_NORMS = "vllm.model_executor.layers.layernorm"
_MLA = "vllm.model_executor.layers.mla"
_KDA = "vllm.third_party.flash_linear_attention.ops.kda"
_PRODUCT = "vllm.model_executor.layers.activation"
_K3 = "vllm.models.kimi_k3.nvidia.mla"
_M3 = "vllm.models.minimax_m3.nvidia.model"
_V32 = "vllm.models.deepseek_v32.nvidia.model"
_FUNCTION = "fused_q_kv_rmsnorm"
_TAKES = ("qr", "kv", "q_weight", "kv_weight", "eps")
_QUANTISER = Hook(
    name="seam",
    module="vllm.model_executor.layers.quantization.input_quant_fp8",
    path="QuantFP8.forward_native",
    takes=("self", "x", "scale", "scale_ub"),
    others="optional",
)
_SCHEMES = ("static", "per_token", "group")


def _reader(linear: Any, quant: ActivationQuant) -> Reader | None:
    from .readers import reader_of  # which needs torch

    return reader_of(linear, quant, _QUANTISER)


LINEARS = Consumer(hook=_QUANTISER, reader=_reader)
"""The fp8 linears of vLLM's: in blocks and not."""


def _norm(fusion: str, module: str, name: str, second: str, method: str = "forward_native", **more: Any) -> Seam:
    takes = ("self", "x", second)
    hook = Hook(name="seam", module=module, path=f"{name}.{method}", takes=takes, others="optional")
    return Seam(fusion=fusion, hook=hook, **more)


def _quantised(fusion: str, make: Any, *args: Any, **more: Any) -> tuple[Seam, ...]:
    """The same place for a chain with the quantisation of the linears behind it."""
    return tuple(make(f"{fusion}_{scheme}_quant", *args, consumer=LINEARS, **more) for scheme in _SCHEMES)


def _product(fusion: str, name: str, *takes: str, **more: Any) -> Seam:
    hook = Hook(name="seam", module=_PRODUCT, path=f"{name}.forward_native", takes=(*takes, "x"), others="none")
    return Seam(fusion=fusion, hook=hook, **more)


def _stream(name: str, module: str = _NORMS, **more: Any) -> tuple[Seam, ...]:
    chains = ("add_rms_norm", "rms_norm")
    several = (seam for chain in chains for seam in _quantised(chain, _norm, module, name, "residual", **more))
    return _norm("add_rms_norm", module, name, "residual", **more), *several


def _latents(fusion: str, module: str, name: str, **more: Any) -> Seam:
    return Seam(
        fusion=fusion,
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


def _both(module: str, name: str, **more: Any) -> tuple[Seam, ...]:
    return _latents("mla_dual_rms_norm", module, name, **more), *_quantised(
        "mla_dual_rms_norm", _latents, module, name, **more
    )


def _reduced(
    fusion: str, module: str, name: str, norms: str, norm: str, source: str, method: str = "forward_native", **more: Any
) -> Seam:
    """A function that is given what one rank has of a sum, the residual, and a norm."""
    function = Hook(
        name="seam",
        module=module,
        path=name,
        takes=("hidden_states", "residual", "norm"),
        others="none",
        source=f"{source}.{name}:{name}",
    )
    return attrs.evolve(_norm(fusion, norms, norm, "residual", method), function=function, reduces=True, **more)


def _reductions(*args: Any, **more: Any) -> tuple[Seam, ...]:
    name = "all_reduce_add_rms_norm"
    return _reduced(name, *args, **more), *_quantised(name, _reduced, *args, **more)


def _plain(norm: Any) -> bool:
    return bool(norm.has_weight and norm.variance_size_override is None)


def _unbiased(norm: Any) -> bool:
    return norm.bias is None


def _silu(product: Any) -> bool:
    return (product.alpha, product.beta) == (1.0, 0.0)


SEAMS = (
    *_stream("RMSNorm", plain=_plain),
    *_stream("GemmaRMSNorm"),
    *_stream("MiniMAXGemmaRMSNorm", _M3, method="forward"),
    _norm("gated_rms_norm", _NORMS, "RMSNormGated", "z", plain=_unbiased),
    *_quantised("gated_rms_norm", _norm, _NORMS, "RMSNormGated", "z", plain=_unbiased),
    # In Kimi's delta nets vLLM copies what the norm gives before a linear reads it: nothing can be handed over.
    _norm("gated_rms_norm", _KDA, "FusedRMSNormGated", "g", plain=lambda norm: norm.weight is not None),
    *_quantised("silu_mul", _product, "SiluAndMul"),  # in 0.26 and 0.33 a static method
    *_quantised("silu_mul", _product, "SiluAndMulWithClamp", "self", plain=_silu),
    *_both(_MLA, "MultiHeadLatentAttentionWrapper", switch="fuse_qkv_rmsnorm"),
    *_both(_K3, "MultiHeadLatentAttention"),
    *_reductions(_V32, "fused_allreduce_rms_norm", _NORMS, "RMSNorm", "vllm.models.common.ops", plain=_plain),
    *_reductions(
        _M3,
        "fused_allreduce_gemma_rms_norm",
        _M3,
        "MiniMAXGemmaRMSNorm",
        "vllm.model_executor.layers",
        method="forward",
    ),
)
"""Every place. The fused op of a site is that of the plan; a norm is the site's own module."""


def usable() -> frozenset[str]:
    """The fusions for which this vLLM has such a place, as far as its modules are loaded; whose code is there is asked at each site."""
    return frozenset(seam.fusion for seam in SEAMS if seam.is_there())
