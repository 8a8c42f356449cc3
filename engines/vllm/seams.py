"""The places of vLLM where a fused op can go in without a compiler, as data. A release has those whose code is as it says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..hooks import Hook
from ..seams import Consumer, Seam, quantised, seams_at

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
_QUANTISER = Hook.of(
    "vllm.model_executor.layers.quantization.input_quant_fp8:QuantFP8.forward_native(self, x, scale, scale_ub)",
    others="optional",
)


def _reader(linear: Any, quant: ActivationQuant) -> Reader | None:
    from .readers import reader_of  # which needs torch

    return reader_of(linear, quant, _QUANTISER)


LINEARS = Consumer(hook=_QUANTISER, reader=_reader)
"""The fp8 linears of vLLM's: in blocks and not."""


def _at(fusions: tuple[str, ...], written: str, others: str = "optional", **more: Any) -> tuple[Seam, ...]:
    return seams_at(Hook.of(written, others=others), fusions, LINEARS, **more)


def _latents(cls: str, **more: Any) -> tuple[Seam, ...]:
    """A layer that gives both of its norms to one function."""
    takes = "fused_q_kv_rmsnorm(qr, kv, q_weight, kv_weight, eps)"
    source = "vllm.models.common.ops.fused_qk_rmsnorm:fused_q_kv_rmsnorm"
    function = Hook.of(f"{cls.partition(':')[0]}:{takes}", others="none", source=source)
    names = "mla_dual_rms_norm", *quantised("mla_dual_rms_norm")
    return _at(names, f"{cls}.forward(self, positions, hidden_states)", "any", function=function, **more)


def _reduced(norm: str, module: str, name: str, source: str, **more: Any) -> tuple[Seam, ...]:
    """A function that is given what one rank has of a sum, the residual, and a norm."""
    takes = f"{module}:{name}(hidden_states, residual, norm)"
    function = Hook.of(takes, others="none", source=f"{source}.{name}:{name}")
    names = "all_reduce_add_rms_norm", *quantised("all_reduce_add_rms_norm")
    return _at(names, f"{norm}(self, x, residual)", function=function, reduces=True, **more)


def _plain(norm: Any) -> bool:
    return bool(norm.has_weight and norm.variance_size_override is None)


def _unbiased(norm: Any) -> bool:
    return norm.bias is None


def _silu(product: Any) -> bool:
    return (product.alpha, product.beta) == (1.0, 0.0)


_STREAM = "add_rms_norm", *quantised("add_rms_norm", "rms_norm")
_GATED = "gated_rms_norm", *quantised("gated_rms_norm")

SEAMS = (
    *_at(_STREAM, f"{_NORMS}:RMSNorm.forward_native(self, x, residual)", plain=_plain),
    *_at(_STREAM, f"{_NORMS}:GemmaRMSNorm.forward_native(self, x, residual)"),
    *_at(_STREAM, f"{_M3}:MiniMAXGemmaRMSNorm.forward(self, x, residual)"),
    *_at(_GATED, f"{_NORMS}:RMSNormGated.forward_native(self, x, z)", plain=_unbiased),
    # In Kimi's delta nets vLLM copies what the norm gives before a linear reads it: nothing can be handed over.
    *_at(
        _GATED[:1], f"{_KDA}:FusedRMSNormGated.forward_native(self, x, g)", plain=lambda norm: norm.weight is not None
    ),
    # In 0.26 and 0.33 a static method.
    *_at(quantised("silu_mul"), f"{_PRODUCT}:SiluAndMul.forward_native(x)", "none"),
    *_at(quantised("silu_mul"), f"{_PRODUCT}:SiluAndMulWithClamp.forward_native(self, x)", "none", plain=_silu),
    *_latents(f"{_MLA}:MultiHeadLatentAttentionWrapper", switch="fuse_qkv_rmsnorm"),
    *_latents(f"{_K3}:MultiHeadLatentAttention"),
    *_reduced(
        f"{_NORMS}:RMSNorm.forward_native", _V32, "fused_allreduce_rms_norm", "vllm.models.common.ops", plain=_plain
    ),
    *_reduced(
        f"{_M3}:MiniMAXGemmaRMSNorm.forward", _M3, "fused_allreduce_gemma_rms_norm", "vllm.model_executor.layers"
    ),
)
"""Every place. The fused op of a site is that of the plan; a norm is the site's own module."""


def usable() -> frozenset[str]:
    """The fusions for which this vLLM has such a place, as far as its modules are loaded; whose code is there is asked at each site."""
    return frozenset(seam.fusion for seam in SEAMS if seam.is_there())
