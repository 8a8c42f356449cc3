"""The places of SGLang where a fused op can go in, as data. Each is held to the released code when it is used."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ..hooks import Hook
from ..seams import Consumer, Seam, quantised, seams_at
from ..whose import kind_of
from .facts import GATED, LATENTS, PRODUCT

if TYPE_CHECKING:
    from ...adapters.activation_quant import ActivationQuant
    from ..handover import Reader

_NORMS = "sglang.srt.layers.layernorm"
_FLA = "sglang.kernels.ops.attention.fla"
_APPLY = Hook.of("sglang.srt.layers.quantization.fp8:Fp8LinearMethod.apply(self, layer, x, bias)", others="optional")


def _reader(linear: Any, quant: ActivationQuant) -> Reader | None:
    from .readers import reader_of  # which needs torch

    return reader_of(linear, quant, _APPLY)


LINEARS = Consumer(hook=_APPLY, reader=_reader)
"""The fp8 linears of SGLang's: in blocks and not."""


def chosen(op: Any) -> None:
    """Let SGLang choose the method that an op's `forward` calls, as it would at its first call, so that it can be looked at."""
    if op._forward_method is None:
        op._forward_method = op._resolve_forward_method()


def _plain(norm: Any) -> bool:
    chosen(norm)
    return bool(
        norm.has_weight
        and norm.variance_size_override is None
        and norm.override_orig_dtype is None
        and not norm.fp32_residual
        and not norm.cast_x_before_out_mul
        # AITER's kernel pads what it gives; elsewhere there is no such attribute.
        and not vars(norm).get("x_pad_to_multiple")
        and not _quantises(norm)
    )


def is_plain_latent(norm: Any) -> bool:
    """Whether a norm of MLA's computes what its spec says and nothing else."""
    return kind_of(norm) == (_NORMS, "RMSNorm") and _plain(norm)


def _quantises(norm: Any) -> bool:
    """Whether SGLang's own kernel quantises for the linear behind the norm, by a static scale."""
    module: Any = sys.modules[_NORMS]
    available = module._flashinfer_rmsnorm_quant_available
    return bool(available and module._fp8_static_input_scale(norm._quant_linear) is not None)


def _alone(op: Any) -> bool:
    chosen(op)
    return True


def _unbiased(norm: Any) -> bool:
    return norm.weight is not None and norm.bias is None


def _at(fusions: tuple[str, ...], written: str, plain: Any) -> tuple[Seam, ...]:
    return seams_at(Hook.of(written, others="optional"), fusions, LINEARS, plain=plain)


def _prepare(name: str, mixin: str) -> Hook:
    """A method of MLA's layer that calls the norms of its two latents one after the other, under CUDA-graph capture on two streams."""
    takes = "self, positions, hidden_states, forward_batch, zero_allocator"
    source = f"sglang.srt.models.deepseek_common.attention_forward_methods.{mixin}.{name}"
    return Hook.of(f"sglang.srt.models.deepseek_v2:DeepseekV2AttentionMLA.{name}({takes})", source=source)


_CALLERS = (
    _prepare("forward_absorb_prepare", "forward_mla:DeepseekMLAForwardMixin"),
    _prepare("forward_normal_prepare", "forward_mha:DeepseekMHAForwardMixin"),
)
_STREAM = "add_rms_norm", *quantised("add_rms_norm", "rms_norm")
_GATED, _LATENTS = ((chain, *quantised(chain)) for chain in (GATED, LATENTS))
_TAKES = "forward_native(self, x, residual, post_residual_addition)"

SEAMS = (
    *_at(_STREAM, f"{_NORMS}:RMSNorm.{_TAKES}", _plain),
    *_at(_STREAM, f"{_NORMS}:GemmaRMSNorm.{_TAKES}", _alone),
    *_at(_GATED, f"{_FLA}.layernorm_gated:RMSNorm.forward(self, x, z)", _unbiased),
    *_at(_GATED, f"{_FLA}.fused_norm_gate:FusedRMSNormGated.forward(self, x, g)", _unbiased),
    *seams_at(_CALLERS[0], _LATENTS, LINEARS, callers=_CALLERS, plain=is_plain_latent),
    *_at(quantised(PRODUCT), "sglang.srt.layers.activation:SiluAndMul.forward_native(self, x)", _alone),
)
"""Every place. The fused op of a site is that of the plan; a norm is the site's own module, and a product is in the MLP."""
