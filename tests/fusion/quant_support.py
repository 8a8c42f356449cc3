"""What the tests of the quantised norms share: the ways in which engines write a quantisation, and what it must give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fusion_support import FUSION, HIDDEN, FusedProjection, Layer, LlamaNorm, Traced, TwoProjections, mla_spec, trace
from torch import Tensor, nn

from layerfuse.fusion import ActivationQuant, FusionConfig, Target

FP8 = torch.float8_e4m3fn
MAX = 448.0
PLAIN = "mla_dual_rms_norm"
PER_TOKEN = f"{PLAIN}_per_token_quant"
STATIC = f"{PLAIN}_static_quant"
GROUP = f"{PLAIN}_group_quant"
CPU_FP8 = Target(arch="cpu", vendor="cpu", fp8="e4m3fn")
CPU_FNUZ = Target(arch="cpu", vendor="cpu", fp8="e4m3fnuz")
Quantise = Callable[[Tensor], tuple[Tensor, ...]]


def fusion_of(quant: str) -> str:
    return PER_TOKEN if quant.startswith("per_token") else GROUP


def config(quant: str, **changes: Any) -> FusionConfig:
    return FusionConfig(**{"level": 2, "quant": ActivationQuant.parse(quant), **changes})


# ---- as engines write it: their arithmetic, step by step ---------------------------------------------------------


def vllm_per_token(x: Tensor, largest: float = MAX, dtype: torch.dtype = FP8) -> tuple[Tensor, Tensor]:
    amax, _ = x.abs().max(dim=-1)
    scale = (amax.unsqueeze(-1).to(torch.float32) / largest).clamp(min=1.0 / (largest * 512.0))
    return (x.to(torch.float32) * scale.reciprocal()).clamp(-largest, largest).to(dtype), scale


def vllm_group(x: Tensor, size: int = 128, ue8m0: bool = False, column_major: bool = False) -> tuple[Tensor, Tensor]:
    shape, groups = x.shape, x.shape[-1] // size
    grouped = x.view(-1, groups, size)
    raw = grouped.abs().max(dim=-1, keepdim=True)[0].float() / MAX
    if ue8m0:
        raw = torch.exp2(torch.ceil(torch.log2(raw)))
    scale = raw.clamp(min=1.0 / (MAX * 512.0))
    values = (grouped / scale).clamp(-MAX, MAX).to(FP8)
    scales = scale.squeeze(-1).reshape(*shape[:-1], groups)
    if column_major:
        scales = scales.transpose(-2, -1).contiguous().transpose(-1, -2)
    return values.view(shape), scales


def sglang_group(x: Tensor, size: int = 128) -> tuple[Tensor, Tensor]:
    rows = x.reshape(x.numel() // size, size)
    amax = rows.abs().max(dim=-1, keepdim=True)[0].clamp(min=1e-10).to(torch.float32)
    scale = amax / MAX
    values = (rows / scale).clamp(min=-MAX, max=MAX).to(FP8)
    return values.reshape(x.shape), scale.reshape((*x.shape[:-1], x.shape[-1] // size))


def torchao_row(x: Tensor, floor: float | None = 1e-12) -> tuple[Tensor, Tensor]:
    amax = x.abs().amax(dim=-1, keepdim=True)
    if floor is not None:
        amax = amax.clamp(min=floor)
    scale = (amax / MAX).to(torch.float32)
    return (x.to(torch.float32) / scale).clamp(-MAX, MAX).to(FP8), scale


def deepseek_group(x: Tensor, size: int = 128) -> tuple[Tensor, Tensor]:
    """No floor and no clamp: nothing exceeds the largest by more than a rounding."""
    blocks = x.unflatten(-1, (-1, size)).float()
    scale = blocks.abs().amax(-1) / MAX
    return (blocks / scale.unsqueeze(-1)).to(FP8).flatten(-2), scale


def widened_first(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp(min=1e-10) * (1 / MAX)
    return torch.clamp(wide / scale, -MAX, MAX).to(FP8), scale


def deepgemm_group(x: Tensor, size: int = 128) -> tuple[Tensor, Tensor]:
    """Multiplied by largest / amax, with the scale beside it."""
    blocks = x.view(-1, x.shape[-1] // size, size)
    amax = blocks.abs().float().amax(dim=2).view(-1, x.shape[-1] // size).clamp(1e-4)
    values = (blocks * (MAX / amax.unsqueeze(2))).to(FP8).view(x.shape)
    return values, (amax / MAX).view(*x.shape[:-1], -1)


def deepgemm_group_ue8m0(x: Tensor, size: int = 128) -> tuple[Tensor, Tensor]:
    blocks = x.view(-1, x.shape[-1] // size, size)
    scale = blocks.abs().float().amax(dim=2).clamp(1e-4) / MAX
    scale = torch.pow(2.0, torch.ceil(torch.log2(scale)))
    values = (blocks * (1.0 / scale.unsqueeze(2))).to(FP8)
    return values.view(x.shape), scale.view(*x.shape[:-1], -1)


def canonical_per_token(x: Tensor, ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    return torch.ops.layerfuse.quantise_per_token(x, FP8, ue8m0)


def canonical_group(x: Tensor, size: int = 128, column: bool = False, ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    return torch.ops.layerfuse.quantise_group(x, FP8, size, column, False, ue8m0)


FORMS: dict[str, tuple[Quantise, str]] = {
    "vllm, per token": (vllm_per_token, "per_token"),
    "vllm, groups": (vllm_group, "group128"),
    "vllm, groups of 64": (lambda x: vllm_group(x, 64), "group64"),
    "vllm, ue8m0": (lambda x: vllm_group(x, ue8m0=True), "group128,ue8m0"),
    "vllm, column-major": (lambda x: vllm_group(x, column_major=True), "group128,column_major"),
    "vllm, both": (lambda x: vllm_group(x, 128, True, True), "group128,column_major,ue8m0"),
    "sglang, groups": (sglang_group, "group128"),
    "sglang, groups of 32": (lambda x: sglang_group(x, 32), "group32"),
    "torchao, per token": (torchao_row, "per_token"),
    "torchao, no floor": (lambda x: torchao_row(x, None), "per_token"),
    "widened first": (widened_first, "per_token"),
    "deepseek, groups": (deepseek_group, "group128"),
    "deepgemm, groups": (deepgemm_group, "group128"),
    "deepgemm, ue8m0": (deepgemm_group_ue8m0, "group128,ue8m0"),
    "canonical, per token": (canonical_per_token, "per_token"),
    "canonical, per token, ue8m0": (lambda x: canonical_per_token(x, True), "per_token,ue8m0"),
    "canonical, groups": (canonical_group, "group128"),
    "canonical, both": (lambda x: canonical_group(x, 128, True, True), "group128,column_major,ue8m0"),
}
"""A way to quantise, and what the config says of it."""


class Quantised(FusedProjection):
    """vLLM's shape, the normed query quantised and handed on with its scales."""

    def __init__(self, quantise: Quantise, norm: Any = LlamaNorm, **kwargs: Any) -> None:
        super().__init__(norm, **kwargs)
        self.quantise = quantise

    def forward(self, x: Tensor) -> Any:
        q, kv, k_pe = self.split(x)
        values, scales = self.quantise(self.q_norm(q))
        return values, scales, self.kv_norm(kv), k_pe.exp()


class QuantisedTwo(TwoProjections):
    """transformers' shape: the quantised query is multiplied before the keys are projected at all."""

    def __init__(self, quantise: Quantise, norm: Any = LlamaNorm) -> None:
        super().__init__(norm)
        self.quantise = quantise

    def forward(self, x: Tensor) -> Any:
        values, scales = self.quantise(self.q_norm(self.down(x)))
        kv = self.kv_down(x)[..., :512]
        return values, scales, self.kv_norm(kv), self.up(dequantise(values, scales).to(x.dtype))


def dequantise(values: Tensor, scales: Tensor) -> Tensor:
    groups = scales.shape[-1]
    return (values.float().unflatten(-1, (groups, -1)) * scales.unsqueeze(-1)).flatten(-2)


def trace_quantised(module: Any, x: Tensor, quant: str, **kwargs: Any) -> Traced:
    given = {"specs": [mla_spec()], "config": config(quant), "target": CPU_FP8, **kwargs}
    return trace(module, x, **given)


# ---- what it must give ---------------------------------------------------------------------------------------------


def exact_query(module: Any, x: Tensor) -> Tensor:
    """The normed query in float64, from the latent as the module computes it."""
    with torch.no_grad():
        q = module.down(x) if isinstance(module, TwoProjections) else module.split(x)[0]
    wide = q.double()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + module.q_norm.epsilon)
    return normed * module.q_norm.weight.detach().double()


def exact_scales(normed: Tensor, groups: int, largest: float = MAX, ue8m0: bool = False) -> Tensor:
    """The stated scales in float64."""
    scales = normed.unflatten(-1, (groups, -1)).abs().amax(-1).clamp(min=1e-10) / largest
    return torch.exp2(torch.ceil(torch.log2(scales))) if ue8m0 else scales


def assert_quantised(values: Tensor, scales: Tensor, normed: Tensor, *, rounding: float) -> None:
    """Values that dequantise to `normed` within half a step of e4m3 (3 bits of mantissa), and `rounding` before it."""
    error = (dequantise(values, scales).double() - normed).abs()
    step = scales.double().repeat_interleave(normed.shape[-1] // scales.shape[-1], -1) * 2**-9
    allowed = normed.abs() * (2**-4 + rounding) + step / 2 * (1 + rounding)
    assert (error <= allowed).all(), (error / allowed).max()


# ---- what is left alone ----------------------------------------------------------------------------------------------


def assert_left(module: nn.Module, quant: str, reason: str, **kwargs: Any) -> None:
    """What quantises stays, the norms in front of it are fused, and both say so."""
    x = kwargs.pop("x", None)
    given = {"specs": [("layer", mla_spec())], **kwargs}
    traced = trace_quantised(Layer(module), torch.randn(5, HIDDEN) if x is None else x, quant, **given)
    verdict, fallback = traced.report.of(fusion_of(quant)), traced.report.of(FUSION)
    assert not any("_quant(" in text for text in traced.after)
    assert verdict.matched == fallback.expected == fallback.matched == ()
    assert traced.fused == len(fallback.fallback) == 1
    assert (fallback.compiled, fallback.executed, verdict.executed) == (1, 1, 0)
    assert fallback.complete and not verdict.complete
    (said,) = verdict.missed.values()
    assert reason in said and said.endswith("; mla_dual_rms_norm was fused there instead"), said
