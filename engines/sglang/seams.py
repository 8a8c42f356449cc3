"""The places of SGLang where a fused op can go in, as data. Each is held to the released code when it is used."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ..hooks import Hook
from ..seams import Consumer, Seam
from .facts import CHAINS, GATED, LATENTS, PRODUCT, SCHEMES

if TYPE_CHECKING:
    from ...adapters.activation_quant import ActivationQuant
    from ..handover import Reader

_NORMS = "sglang.srt.layers.layernorm"
_FLA = "sglang.kernels.ops.attention.fla"
_ACTIVATIONS = "sglang.srt.layers.activation"
_MLA = "sglang.srt.models.deepseek_v2"
_PREPARES = ("positions", "hidden_states", "forward_batch", "zero_allocator")
_TAKES = ("self", "x", "residual", "post_residual_addition")
_APPLY = Hook(
    name="seam",
    module="sglang.srt.layers.quantization.fp8",
    path="Fp8LinearMethod.apply",
    takes=("self", "layer", "x", "bias"),
    others="optional",
)


def _reader(linear: Any, quant: ActivationQuant) -> Reader | None:
    from .readers import reader_of  # which needs torch

    return reader_of(linear, quant, _APPLY)


LINEARS = Consumer(hook=_APPLY, reader=_reader)
"""The fp8 linears of SGLang's: in blocks and not."""


def _norm(
    fusion: str, name: str, module: str = _NORMS, path: str = "forward_native", takes: Any = _TAKES, **more: Any
) -> Seam:
    hook = Hook(name="seam", module=module, path=f"{name}.{path}", takes=takes, others="optional")
    return Seam(fusion=fusion, hook=hook, **more)


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
    return (type(norm).__module__, type(norm).__qualname__) == (_NORMS, "RMSNorm") and _plain(norm)


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


def _with_quantised(chains: tuple[str, ...], *place: Any, **more: Any) -> tuple[Seam, ...]:
    """A norm, or a product, for chains with the quantisation of the linears behind it."""
    names = (f"{chain}_{scheme}_quant" for chain in chains for scheme in SCHEMES)
    return tuple(_norm(name, *place, consumer=LINEARS, **more) for name in names)


def _stream(name: str, plain: Any) -> tuple[Seam, ...]:
    """A norm of the residual stream."""
    return _norm("add_rms_norm", name, plain=plain), *_with_quantised(CHAINS, name, plain=plain)


def _gated(name: str, file: str, gate: str) -> tuple[Seam, ...]:
    """A delta net's norm."""
    place = (name, f"{_FLA}.{file}", "forward", ("self", "x", gate))
    return _norm(GATED, *place, plain=_unbiased), *_with_quantised((GATED,), *place, plain=_unbiased)


def _prepare(name: str, file: str, mixin: str) -> Hook:
    """A method of MLA's layer that calls the norms of its two latents one after the other, under CUDA-graph capture on two streams."""
    path = f"sglang.srt.models.deepseek_common.attention_forward_methods.{file}:{mixin}.{name}"
    return Hook(
        name="seam", module=_MLA, path=f"DeepseekV2AttentionMLA.{name}", takes=("self", *_PREPARES), source=path
    )


_CALLERS = (
    _prepare("forward_absorb_prepare", "forward_mla", "DeepseekMLAForwardMixin"),
    _prepare("forward_normal_prepare", "forward_mha", "DeepseekMHAForwardMixin"),
)


def _both(fusion: str, **more: Any) -> Seam:
    return Seam(fusion=fusion, hook=_CALLERS[0], callers=_CALLERS, plain=is_plain_latent, **more)


SEAMS = (
    *_stream("RMSNorm", _plain),
    *_stream("GemmaRMSNorm", _alone),
    *_gated("RMSNorm", "layernorm_gated", "z"),
    *_gated("FusedRMSNormGated", "fused_norm_gate", "g"),
    _both(LATENTS),
    *(_both(f"{LATENTS}_{scheme}_quant", consumer=LINEARS) for scheme in SCHEMES),
    *_with_quantised((PRODUCT,), "SiluAndMul", _ACTIVATIONS, "forward_native", ("self", "x"), plain=_alone),
)
"""Every place. The fused op of a site is that of the plan; a norm is the site's own module, and a product is in the MLP."""
