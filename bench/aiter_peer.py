"""AITER's Triton ops as a peer, from an installed AITER or from a checkout (`aiter_checkout`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import aiter_checkout
from .aiter_checkout import Functions
from .inputs import Work
from .peers import Peer, Setting, needs_triton
from .thirdparty import Function, Offer, Results, why_not_offered


def _dual(functions: Functions, work: Work) -> Function:
    rms_norm: Any = functions.rms_norm
    weights, epsilons = work.weights, work.case.epsilons

    def call(q: Tensor, kv: Tensor) -> Results:
        return (
            rms_norm(q, weights["q_weight"], epsilons["q_epsilon"]),
            rms_norm(kv, weights["kv_weight"], epsilons["kv_epsilon"]),
        )

    return call


def _group(functions: Functions, work: Work) -> Function:
    weights, epsilons = work.weights, work.case.epsilons

    def call(q: Tensor, kv: Tensor) -> Results:
        (quantised, scales), _, kv_normed, _ = functions.fused_rms_fp8_group_quant(
            q, weights["q_weight"], epsilons["q_epsilon"], kv, weights["kv_weight"], epsilons["kv_epsilon"],
            group_size=work.case.group_size, dtype_quant=work.fp8,
        )  # fmt: skip
        return quantised, scales, kv_normed

    return call


def _per_token(functions: Functions, work: Work) -> Function:
    weights, epsilons = work.weights, work.case.epsilons

    def call(q: Tensor, kv: Tensor) -> Results:
        quantised = torch.empty(q.shape, dtype=work.fp8, device=q.device)
        scales = torch.empty(q.shape[0], dtype=torch.float32, device=q.device)
        functions.rmsnorm2d_fwd_with_dynamicquant(quantised, q, scales, weights["q_weight"], epsilons["q_epsilon"])
        return quantised, scales.unsqueeze(-1), functions.rms_norm(kv, weights["kv_weight"], epsilons["kv_epsilon"])

    return call


def _add(functions: Functions, work: Work) -> Function:
    weight, epsilon = work.weights["weight"], work.case.epsilons["epsilon"]

    def call(x: Tensor, residual: Tensor) -> Results:
        out, residual_out = torch.empty_like(x), torch.empty_like(x)
        functions.rmsnorm2d_fwd_with_add(out, x, residual, residual_out, weight, epsilon)
        return out, residual_out

    return call


_Make = Callable[[Functions, Work], Function]

_OFFERS: dict[str, tuple[str, _Make]] = {
    "mla_dual_rms_norm": ("rms_norm twice", _dual),
    "mla_dual_rms_norm_group_quant": ("fused_rms_fp8_group_quant with two inputs", _group),
    "mla_dual_rms_norm_per_token_quant": ("rmsnorm2d_fwd_with_dynamicquant and rms_norm", _per_token),
    "add_rms_norm": ("rmsnorm2d_fwd_with_add", _add),
}
"""By op: what is called, and how."""


def aiter_peer(setting: Setting) -> Peer:
    """AITER as a peer for what is measured."""
    offers = {
        op: Offer(about=f"AITER's Triton ops: {called}", make=functools.partial(_from, setting.aiter, make))
        for op, (called, make) in _OFFERS.items()
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
    return make(aiter_checkout.load(checkout, work.fp8), work)


def _why_not(offers: dict[str, Offer], setting: Setting) -> str | None:
    said = why_not_offered(offers, "AITER's Triton library", setting)
    said = said or needs_triton(setting) or aiter_checkout.why_not(setting.aiter)
    return said or ("its Triton ops have no power-of-two scales" if setting.case.ue8m0 else None)
