"""The kernels of others, where they are installed: AITER's Triton ops, Liger-Kernel, flash-linear-attention."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from . import aiter_checkout
from .inputs import Work
from .peers import Call, Peer, Setting, missing, needs_triton, over_sets

# ---- AITER


def _why_no_aiter(setting: Setting) -> str | None:
    reason = needs_triton(setting) or aiter_checkout.why_not(setting.aiter)
    if reason is not None:
        return reason
    return "its Triton ops have no power-of-two scales" if setting.case.ue8m0 else None


def _aiter_calls(work: Work, setting: Setting) -> Sequence[Call]:
    case = work.case
    functions = aiter_checkout.load(setting.aiter, work.fp8)
    rms_norm: Any = functions.rms_norm

    def plain(q: Tensor, kv: Tensor) -> tuple[Tensor, ...]:
        return rms_norm(q, work.q_weight, case.q_epsilon), rms_norm(kv, work.kv_weight, case.kv_epsilon)

    def group(q: Tensor, kv: Tensor) -> tuple[Tensor, ...]:
        (quantised, scales), _, kv_normed, _ = functions.fused_rms_fp8_group_quant(
            q, work.q_weight, case.q_epsilon, kv, work.kv_weight, case.kv_epsilon,
            group_size=case.group_size, dtype_quant=work.fp8,
        )  # fmt: skip
        return quantised, scales, kv_normed

    def per_token(q: Tensor, kv: Tensor) -> tuple[Tensor, ...]:
        quantised = torch.empty(q.shape, dtype=work.fp8, device=q.device)
        scales = torch.empty(q.shape[0], dtype=torch.float32, device=q.device)
        functions.rmsnorm2d_fwd_with_dynamicquant(quantised, q, scales, work.q_weight, case.q_epsilon)
        return quantised, scales.unsqueeze(-1), rms_norm(kv, work.kv_weight, case.kv_epsilon)

    return over_sets({None: plain, "group": group, "per_token": per_token}[case.quant], work)


AITER = Peer(
    name="aiter triton",
    about="AITER's Triton ops: rms_norm twice, fused_rms_fp8_group_quant, or rmsnorm2d_fwd_with_dynamicquant and rms_norm",
    why_not=_why_no_aiter,
    build=_aiter_calls,
    version=lambda setting: aiter_checkout.version(setting.aiter),
)


# ---- Liger-Kernel and flash-linear-attention: norms without quantisation


def _why_no_plain(module: str, package: str, setting: Setting) -> str | None:
    if missing(module):
        return f"{package} is not installed (pip install {package})"
    if setting.case.quant is not None:
        return f"{package} has no quantised norm"
    return needs_triton(setting)


def _version_of(package: str, _: Setting) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _liger_calls(work: Work, _: Setting) -> Sequence[Call]:
    from liger_kernel.transformers.functional import liger_rms_norm

    case = work.case

    def call(q: Tensor, kv: Tensor) -> tuple[Tensor, ...]:
        return (
            liger_rms_norm(q, work.q_weight, case.q_epsilon, in_place=False),
            liger_rms_norm(kv, work.kv_weight, case.kv_epsilon, in_place=False),
        )

    return over_sets(call, work)


def _fla_calls(work: Work, _: Setting) -> Sequence[Call]:
    from fla.modules import RMSNorm

    case = work.case
    norms = []
    for weight, epsilon in ((work.q_weight, case.q_epsilon), (work.kv_weight, case.kv_epsilon)):
        norm = RMSNorm(weight.shape[0], eps=epsilon).to(work.device, work.dtype).requires_grad_(False)
        norm.weight.copy_(weight)
        norms.append(norm)
    q_norm, kv_norm = norms

    def call(q: Tensor, kv: Tensor) -> tuple[Tensor, ...]:
        return q_norm(q), kv_norm(kv)

    return over_sets(call, work)


LIGER = Peer(
    name="liger",
    about="Liger-Kernel's liger_rms_norm twice",
    why_not=functools.partial(_why_no_plain, "liger_kernel", "liger-kernel"),
    build=_liger_calls,
    version=functools.partial(_version_of, "liger-kernel"),
)
FLA = Peer(
    name="fla",
    about="flash-linear-attention's RMSNorm module twice",
    why_not=functools.partial(_why_no_plain, "fla", "flash-linear-attention"),
    build=_fla_calls,
    version=functools.partial(_version_of, "flash-linear-attention"),
)

PEERS = (AITER, LIGER, FLA)
