"""AITER's Triton ops as a peer, from an installed AITER or from a checkout (`aiter_checkout`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import aiter_checkout
from .cases import Case
from .inputs import Work
from .peers import Peer, Setting, needs_triton
from .thirdparty import Function, Offer, Results, halves_joined, norms_of, why_not_offered

_Load = Callable[[str], Any]
"""From `module:function` below aiter.ops.triton to the function."""

_NORM = "normalization.rmsnorm:rms_norm"
_ADD = "normalization.rmsnorm:rmsnorm2d_fwd_with_add"
_DYNAMIC = "normalization.rmsnorm:rmsnorm2d_fwd_with_dynamicquant"
_ADD_DYNAMIC = "normalization.rmsnorm:rmsnorm2d_fwd_with_add_dynamicquant"
_PAD = "normalization.fused_add_rmsnorm_pad:fused_add_rmsnorm_pad"
_GROUP = "quant.fused_fp8_quant:fused_rms_fp8_group_quant"
_STATIC = "quant.fused_fp8_quant:fused_rms_fp8_per_tensor_static_quant"
_GATED = "quant.fused_fp8_quant:fused_rms_gated_fp8_group_quant"
_SILU_STATIC = "quant.fused_fp8_quant:fused_silu_mul_fp8_per_tensor_static_quant"
_SILU_GROUP = "activation:act_mul_and_fp8_group_quant"
_MXFP8 = "quant.fused_mxfp8_quant:fused_rms_mxfp8_quant"
_MXFP4 = "quant.fused_mxfp4_quant:fused_rms_mxfp4_quant"


def _kept(work: Work) -> bool:
    """Whether the norm itself is asked for too."""
    return any(step.is_kept for step in work.case.form.chain)


def _dual(load: _Load, work: Work) -> Function:
    rms_norm, ((q_weight, q_epsilon), (kv_weight, kv_epsilon)) = load(_NORM), norms_of(work)
    return lambda q, kv: (rms_norm(q, q_weight, q_epsilon), rms_norm(kv, kv_weight, kv_epsilon))


def _group(load: _Load, work: Work) -> Function:
    function, kept, turned = load(_GROUP), _kept(work), work.case.column_major
    (weight, epsilon), *second = norms_of(work)

    def call(x: Tensor, *other: Tensor) -> Results:
        """`other`: the second latent, or the residual."""
        more = (other[0], *second[0]) if second else (None, None, None)
        (values, scales), normed, kv_normed, total = function(
            x, weight, epsilon, *more, group_size=work.case.group_size, dtype_quant=work.fp8,
            res1=None if second or not other else other[0], output_unquantized_inp1=kept, transpose_scale=turned,
            is_x_scale_strided=turned,
        )  # fmt: skip
        return _there(values, scales, normed, kv_normed, total)

    return call


def _static(load: _Load, work: Work) -> Function:
    """With two latents its block is that of the second one alone, so the second is normed by itself."""
    function, kept, rms_norm, scale = load(_STATIC), _kept(work), load(_NORM), work.weights["scale"]
    (weight, epsilon), *second = norms_of(work)

    def call(x: Tensor, *other: Tensor) -> Results:
        values, normed, _, total = function(
            x, weight, epsilon, scale, dtype_quant=work.fp8, res1=None if second or not other else other[0],
            output_unquantized_inp1=kept,
        )  # fmt: skip
        return _there(values, normed, rms_norm(other[0], *second[0]) if second else None, total)

    return call


def _per_token(load: _Load, work: Work) -> Function:
    function, kept, rms_norm = load(_DYNAMIC), _kept(work), load(_NORM)
    (weight, epsilon), *second = norms_of(work)

    def call(x: Tensor, *other: Tensor) -> Results:
        values = torch.empty(x.shape, dtype=work.fp8, device=x.device)
        scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
        normed = function(values, x, scales, weight, epsilon, dump_rms_norm=kept)
        return _there(values, scales.unsqueeze(-1), normed, rms_norm(other[0], *second[0]) if second else None)

    return call


def _add_per_token(load: _Load, work: Work) -> Function:
    function, ((weight, epsilon),) = load(_ADD_DYNAMIC), norms_of(work)

    def call(x: Tensor, residual: Tensor) -> Results:
        values, total = torch.empty(x.shape, dtype=work.fp8, device=x.device), torch.empty_like(x)
        scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
        function(values, x, residual, total, scales, weight, epsilon)
        return values, scales.unsqueeze(-1), total

    return call


def _add(load: _Load, work: Work) -> Function:
    function, ((weight, epsilon),) = load(_ADD), norms_of(work)

    def call(x: Tensor, residual: Tensor) -> Results:
        out, residual_out = torch.empty_like(x), torch.empty_like(x)
        function(out, x, residual, residual_out, weight, epsilon)
        return out, residual_out

    return call


def _pad(load: _Load, work: Work) -> Function:
    function, ((weight, epsilon),) = load(_PAD), norms_of(work)
    multiple = work.case.padded_width or 0
    return lambda x, residual: tuple(function(x, weight, epsilon, residual, multiple))


def _gated(load: _Load, work: Work) -> Function:
    """Heads are rows of their own there; its floor of scales is set to ours."""
    function, ((weight, epsilon),), case = load(_GATED), norms_of(work), work.case

    def call(x: Tensor, gate: Tensor) -> Results:
        tokens, _, width = x.shape
        values, scales = function(
            x.view(-1, width), weight, None, gate.view(-1, width), epsilon, norm_before_gate=case.norm_before_gate,
            use_ue8m0=case.ue8m0, activation=case.activation, out_dtype=work.fp8, group_size=case.group_size,
            fp8_min_scaling_factor=1e-10 / 448,
        )  # fmt: skip
        return values.view(tokens, -1), scales.view(tokens, -1)

    return call


def _silu_group(load: _Load, work: Work) -> Function:
    function = load(_SILU_GROUP)
    return lambda gate, up: tuple(function(halves_joined(gate, up), "silu", work.case.group_size, work.fp8))


def _silu_static(load: _Load, work: Work) -> Function:
    function, scale = load(_SILU_STATIC), work.weights["scale"]
    return lambda gate, up: (function(halves_joined(gate, up), scale, work.fp8),)


def _mxfp8(load: _Load, work: Work) -> Function:
    function, ((weight, epsilon),) = load(_MXFP8), norms_of(work)
    return lambda x: tuple(function(x, weight, epsilon))


def _mxfp4(load: _Load, work: Work) -> Function:
    function, ((weight, epsilon),), kept = load(_MXFP4), norms_of(work), _kept(work)

    def call(x: Tensor, residual: Tensor | None = None) -> Results:
        (values, scales), normed, _, total = function(
            x, weight, epsilon, res1=residual, output_unquantized_inp1=kept, inargs="triton"
        )
        return _there(values, scales, normed, total)

    return call


def _there(*several: Tensor | None) -> Results:
    return tuple(each for each in several if each is not None)


def _whole_heads(case: Case) -> str | None:
    (width,) = case.widths.values()
    return None if case.group_size and width % case.group_size == 0 else "its groups lie within a head"


def _whole_pads(case: Case) -> str | None:
    width, padded = case.width_of("x"), case.padded_width or 0
    return None if padded < 2 * width else "it pads to the next multiple of a number"


_Make = Callable[[_Load, Work], Function]
_TURNED = {"takes": frozenset({"column_major"})}
_KEPT = ", the norm too"

_OFFERS: dict[str, tuple[str, _Make, dict[str, Any]]] = {
    "mla_dual_rms_norm": ("rms_norm twice", _dual, {}),
    "mla_dual_rms_norm_group_quant": ("fused_rms_fp8_group_quant with two inputs", _group, _TURNED),
    "mla_dual_rms_norm_group_quant_with_norm": (
        f"fused_rms_fp8_group_quant with two inputs{_KEPT}", _group, _TURNED
    ),
    "mla_dual_rms_norm_per_token_quant": ("rmsnorm2d_fwd_with_dynamicquant and rms_norm", _per_token, {}),
    "mla_dual_rms_norm_per_token_quant_with_norm": (
        f"rmsnorm2d_fwd_with_dynamicquant{_KEPT}, and rms_norm", _per_token, {}
    ),
    "mla_dual_rms_norm_static_quant": ("fused_rms_fp8_per_tensor_static_quant and rms_norm", _static, {}),
    "mla_dual_rms_norm_static_quant_with_norm": (
        f"fused_rms_fp8_per_tensor_static_quant{_KEPT}, and rms_norm", _static, {}
    ),
    "add_rms_norm": ("rmsnorm2d_fwd_with_add", _add, {}),
    "add_rms_norm_pad": ("fused_add_rmsnorm_pad", _pad, {"refuses": _whole_pads}),
    "gated_rms_norm_group_quant": (
        "fused_rms_gated_fp8_group_quant", _gated, {"takes": frozenset({"ue8m0", "gate_first"}), "refuses": _whole_heads}
    ),
    "silu_mul_group_quant": ("act_mul_and_fp8_group_quant", _silu_group, {}),
    "silu_mul_static_quant": ("fused_silu_mul_fp8_per_tensor_static_quant", _silu_static, {}),
    "rms_norm_mxfp8_quant": ("fused_rms_mxfp8_quant", _mxfp8, {}),
    "add_rms_norm_per_token_quant": ("rmsnorm2d_fwd_with_add_dynamicquant", _add_per_token, {}),
    "rms_norm_per_token_quant": ("rmsnorm2d_fwd_with_dynamicquant", _per_token, {}),
    "rms_norm_per_token_quant_with_norm": (f"rmsnorm2d_fwd_with_dynamicquant{_KEPT}", _per_token, {}),
}  # fmt: skip
"""By op: what is called, how, and what of `Offer` differs."""

for _added, _how in (("", ""), ("add_", " with a residual")):
    for _scheme, _called, _make, _more in (
        ("group_quant", "fused_rms_fp8_group_quant", _group, _TURNED),
        ("static_quant", "fused_rms_fp8_per_tensor_static_quant", _static, {}),
        ("mxfp4_quant", "fused_rms_mxfp4_quant", _mxfp4, {}),
    ):
        _OFFERS[f"{_added}rms_norm_{_scheme}"] = (f"{_called}{_how}", _make, _more)
        _OFFERS[f"{_added}rms_norm_{_scheme}_with_norm"] = (f"{_called}{_how}{_KEPT}", _make, _more)


def aiter_peer(setting: Setting) -> Peer:
    """AITER as a peer for what is measured."""
    offers = {
        op: Offer(about=f"AITER's Triton ops: {called}", make=functools.partial(_from, setting.aiter, make), **more)
        for op, (called, make, more) in _OFFERS.items()
    }
    offer = offers.get(setting.case.op)
    return Peer(
        name="aiter triton",
        about="AITER's Triton ops" if offer is None else offer.about,
        why_not=functools.partial(_why_not, offers),
        build=lambda work, _: offers[setting.case.op].calls(work),
        version=lambda setting: aiter_checkout.version(setting.aiter),
    )


def _from(checkout: Path | None, make: _Make, work: Work) -> Function:
    return make(functools.partial(aiter_checkout.load, checkout, work.fp8), work)


def _why_not(offers: dict[str, Offer], setting: Setting) -> str | None:
    said = why_not_offered(offers, "AITER's Triton library", setting)
    return said or needs_triton(setting) or aiter_checkout.why_not(setting.aiter)
