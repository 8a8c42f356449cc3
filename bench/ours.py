"""Our ops as peers, one per backend: the chosen one as users call it, the others by their functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor

from ..fusion import backends, ops
from ..fusion.ops.mla_dual_rms_norm import DualNormCase
from ..fusion.ops.mla_dual_rms_norm_quant import DualNormQuantCase
from .inputs import DTYPES, FP8_DTYPES, Work
from .peers import OURS, Call, Peer, Setting, over_sets

_PUBLIC: dict[str, Callable[..., Any]] = {
    "mla_dual_rms_norm": ops.mla_dual_rms_norm,
    "mla_dual_rms_norm_group_quant": ops.mla_dual_rms_norm_group_quant,
    "mla_dual_rms_norm_per_token_quant": ops.mla_dual_rms_norm_per_token_quant,
}


def our_peers(setting: Setting) -> list[Peer]:
    """Every backend of the op, the preferred one first."""
    op, case = setting.case.op, _case(setting)
    chosen = backends.choose(op, setting.device, case).name
    return [
        Peer(
            name=f"{OURS} ({name})",
            about=f"layerfuse.fusion.ops.{op}" if name == chosen else f"layerfuse's {name} backend, called directly",
            why_not=functools.partial(_why_not, reason),
            build=functools.partial(_build, name, name == chosen),
        )
        for name, reason in backends.survey(op, setting.device, case)
    ]


def chosen_name(setting: Setting) -> str:
    """The peer that users of the op get."""
    return f"{OURS} ({backends.choose(setting.case.op, setting.device, _case(setting)).name})"


def _why_not(reason: str | None, _: Setting) -> str | None:
    return reason


def _case(setting: Setting) -> Hashable:
    case = setting.case
    dtype = DTYPES[case.dtype]
    if case.fp8 is None:
        return DualNormCase(dtype, case.q_width, case.kv_width, dtype, dtype)
    return DualNormQuantCase(
        dtype, case.q_width, case.kv_width, dtype, dtype, FP8_DTYPES[case.fp8], case.group_size, False, case.ue8m0
    )


def _build(name: str, chosen: bool, work: Work, setting: Setting) -> Sequence[Call]:
    case = work.case
    function = _PUBLIC[case.op] if chosen else _function(name, setting)
    weights = (work.q_weight, work.kv_weight, case.q_epsilon, case.kv_epsilon)
    options: tuple[Any, ...] = ()
    if case.quant == "group":
        options = (work.fp8, case.group_size, False, case.ue8m0)
    elif case.quant == "per_token":
        options = (work.fp8, case.ue8m0)

    def call(q: Tensor, kv: Tensor) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = function(q, kv, *weights, *options)
        return results

    return over_sets(call, work)


def _function(name: str, setting: Setting) -> Callable[..., Any]:
    """The plain callable of a backend that is not the chosen one."""
    forced = backends._forced[:]
    backends.force(name)
    try:
        return backends.choose(setting.case.op, setting.device, _case(setting)).function
    finally:
        backends.force(forced[0] if forced else None)
