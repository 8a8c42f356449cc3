"""The Triton backend: kernels for NVIDIA and AMD GPUs. Triton itself is imported when the backend is first chosen."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
from attrs import frozen

from ...declare import QuantisedRows
from ..backend import Backend
from .tuning import STEPS, WIDEST

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@frozen(kw_only=True, eq=False)
class Triton(Backend):
    """Triton's kernels: they refuse what Triton or the GPUs here cannot do, then what is the kernel's own."""

    only_by_name = frozenset({"cpu"})

    def runs_on(self, device: str) -> tuple[bool, str]:
        """On GPUs; on a CPU by Triton's interpreter."""
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

    def refuses(self, case: Any) -> str | None:
        """A dtype, a width or an fp8 format, see `refuses_case`."""
        return refuses_case(case, isinstance(self.op.rows[0], QuantisedRows)) or super().refuses(case)

    def steps(self, case: Any) -> tuple[int, ...]:
        """By the kernel's rule, or those of `steps_of`."""
        return super().steps(case) or steps_of(case)


def steps_of(case: Any) -> tuple[int, ...]:
    """The numbers of tokens above which a case is launched by another step of `tuning`: those of gated norms count heads."""
    return tuple(rows // case._asdict().get("heads", 1) for rows in STEPS)


def refuses_case(case: Any, quantised: bool = False) -> str | None:
    """From an op's case: a dtype, a width or an fp8 format that these kernels cannot have here. quantised: whether rows come in fp8."""
    said = case._asdict()
    if case.dtype not in _FLOATS and not quantised:
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
