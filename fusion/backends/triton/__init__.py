"""The Triton backend: kernels for NVIDIA and AMD GPUs. Triton itself is imported when the backend is first chosen."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

from .. import Backend
from .. import register as register_backend
from .tuning import WIDEST

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def _runs_on(device: str) -> tuple[bool, str]:
    if importlib.util.find_spec("triton") is None:
        return False, "Triton is not installed (pip install triton)"
    if device == "cuda":
        return True, "Triton compiles for this GPU"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return True, "Triton's interpreter runs the kernels, slowly"
    return (
        False,
        f"Triton compiles for GPUs, not for {device} (with TRITON_INTERPRET=1 set before it is imported, its interpreter runs them on the CPU)",
    )


def _refuses(case: Any) -> str | None:
    if case.dtype not in _FLOATS:
        return f"q is {case.dtype}; the kernel takes {', '.join(map(str, _FLOATS))}"
    if max(case.q_width, case.kv_width) > WIDEST:
        return f"a row of {max(case.q_width, case.kv_width)} columns is wider than the {WIDEST} that a program holds"
    return None


def _refuses_quant(case: Any) -> str | None:
    if not torch.version.hip:
        if case.quant_dtype == torch.float8_e4m3fnuz:
            return "float8_e4m3fnuz is AMD's (gfx942); Triton converts to it on ROCm only"
        oldest = min(map(torch.cuda.get_device_capability, range(torch.cuda.device_count())), default=(9, 0))
        if oldest < (8, 9):
            return f"Triton converts to float8_e4m3fn from sm89 on, and a GPU here is sm{oldest[0]}{oldest[1]}"
    return _refuses(case)


def _load() -> Callable[..., Any]:
    from .launch import mla_dual_rms_norm

    return mla_dual_rms_norm


def _load_per_token() -> Callable[..., Any]:
    from .launch import mla_dual_rms_norm_per_token_quant

    return mla_dual_rms_norm_per_token_quant


def _load_group() -> Callable[..., Any]:
    from .launch import mla_dual_rms_norm_group_quant

    return mla_dual_rms_norm_group_quant


def register() -> None:
    """Register the kernels of this backend."""
    for op, load, refuses in (
        ("mla_dual_rms_norm", _load, _refuses),
        ("mla_dual_rms_norm_per_token_quant", _load_per_token, _refuses_quant),
        ("mla_dual_rms_norm_group_quant", _load_group, _refuses_quant),
    ):
        register_backend(
            Backend(name="triton", op=op, load=load, runs_on=_runs_on, refuses=refuses, only_by_name=frozenset({"cpu"}))
        )
