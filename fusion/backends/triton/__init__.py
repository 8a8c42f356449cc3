"""The Triton backend: kernels for NVIDIA and AMD GPUs. Triton itself is imported when the backend is first chosen."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

from ...declare import Kernel, Op
from .. import Backend, imported, loaded, refusal_of
from .tuning import STEPS, WIDEST

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def backend(op: Op, kernel: Kernel) -> Backend:
    """A Triton kernel as a backend of an op: what Triton and these GPUs can do, then what the kernel itself refuses."""
    own = refusal_of(kernel)

    def refuses(case: Any) -> str | None:
        return refuses_case(case) or own(case)

    return Backend(
        name="triton",
        op=op.name,
        load=functools.partial(loaded, op, kernel),
        runs_on=_runs_on,
        refuses=refuses,
        steps=_steps_of(kernel),
        only_by_name=frozenset({"cpu"}),
    )


def _steps_of(kernel: Kernel) -> Callable[[Any], tuple[int, ...]]:
    path = kernel.steps
    if path is None:
        return steps_of

    def own(case: Any) -> tuple[int, ...]:
        found: tuple[int, ...] = imported(path)(case)  # what imports Triton
        return found

    return own


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


def steps_of(case: Any) -> tuple[int, ...]:
    """The numbers of tokens above which a case is launched by another step of `tuning`: those of gated norms count heads."""
    return tuple(rows // case._asdict().get("heads", 1) for rows in STEPS)


def refuses_case(case: Any) -> str | None:
    """From an op's case: a dtype, a width or an fp8 format that these kernels cannot have here."""
    said = case._asdict()
    if case.dtype not in _FLOATS:
        return f"the rows are {case.dtype}; the kernel takes {', '.join(map(str, _FLOATS))}"
    widest = max(value for name, value in said.items() if name == "width" or name.endswith("_width"))
    if "heads" in said and "use_ue8m0" in said and "group_size" not in said:
        heads, width = (1 << (size - 1).bit_length() for size in (said["heads"], said["width"]))
        if heads * width > WIDEST:
            return f"a token of {said['heads']} heads of {said['width']} columns is wider than the {WIDEST} that a program holds"
    if widest > WIDEST:
        return f"a row of {widest} columns is wider than the {WIDEST} that a program holds"
    return refuses_fp8(said["quant_dtype"]) if "quant_dtype" in said else None


def refuses_fp8(dtype: torch.dtype) -> str | None:
    """Why Triton cannot convert to an fp8 format on the GPUs here, or None where it can."""
    if torch.version.hip:
        return None
    if dtype == torch.float8_e4m3fnuz:
        return "float8_e4m3fnuz is AMD's (gfx942); Triton converts to it on ROCm only"
    oldest = min(map(torch.cuda.get_device_capability, range(torch.cuda.device_count())), default=(9, 0))
    if oldest < (8, 9):
        return f"Triton converts to float8_e4m3fn from sm89 on, and a GPU here is sm{oldest[0]}{oldest[1]}"
    return None
