"""The peers that need nothing but torch: its own operations, its compiler, and the copy that nothing can beat."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .arithmetic import EAGER, Results, compose, fusable
from .cases import Case
from .inputs import Work
from .peers import Call, Peer, Setting, missing, over_sets


def _here(_: Setting) -> str | None:
    return None


# ---- eager


def _eager_calls(work: Work, _: Setting) -> list[Call]:
    function = compose(work.case.form, EAGER)
    return [functools.partial(function, *work.arguments(rows)) for rows in work.sets]


EAGER_TORCH = Peer(
    name="eager",
    about="the chain one operation after another: additions, torch.nn.functional.rms_norm, plain arithmetic where it "
    "quantises",
    why_not=_here,
    build=_eager_calls,
)


# ---- torch.compile


def why_no_inductor(setting: Setting) -> str | None:
    """Why torch.compile cannot compile here, or None."""
    if setting.device == "cuda":
        return "torch.compile needs Triton on a GPU (pip install triton)" if missing("triton") else None
    from torch._inductor import cpp_builder

    try:
        cpp_builder.get_cpp_compiler()
    except Exception as error:
        return f"torch.compile finds no C++ compiler ({type(error).__name__})"
    return None


def _why_no_combo_kernels(setting: Setting) -> str | None:
    if setting.device != "cuda":
        return f"Inductor combines kernels on GPUs only: on {setting.device} this would be `inductor` once more"
    return why_no_inductor(setting)


def compiled(mode: str | None, options: dict[str, Any] | None, work: Work) -> Callable[..., Results]:
    """One function of the rows of any set of `work`."""
    function = fusable(work.case.form, work.arguments(work.sets[0]))
    made: Any = torch.compile(function, fullgraph=True, dynamic=False, mode=mode, options=options)

    def call(*rows: Tensor) -> Results:
        results = made(*filter(_is_tensor, work.arguments(rows)))
        return (results,) if isinstance(results, Tensor) else tuple(results)

    return call


def _compiled(mode: str | None, options: dict[str, Any] | None, work: Work, _: Setting) -> Sequence[Call]:
    return over_sets(compiled(mode, options, work), work)


def _is_tensor(argument: Any) -> bool:
    return isinstance(argument, Tensor)


INDUCTOR = Peer(
    name="inductor",
    about="torch.compile of the plain arithmetic, compiled for the exact shapes",
    why_not=why_no_inductor,
    build=functools.partial(_compiled, None, None),
)
COMBO_KERNELS = Peer(
    name="inductor combo_kernels",
    about='torch.compile of the plain arithmetic, options={"combo_kernels": True}, which vLLM sets',
    why_not=_why_no_combo_kernels,
    build=functools.partial(_compiled, None, {"combo_kernels": True}),
)
MAX_AUTOTUNE = Peer(
    name="inductor max-autotune",
    about='torch.compile of the plain arithmetic, mode="max-autotune-no-cudagraphs"',
    why_not=why_no_inductor,
    build=functools.partial(_compiled, "max-autotune-no-cudagraphs", None),
    slow=True,
)


# ---- the floor


def copied_bytes(case: Case, tokens: int) -> int:
    """Length of a copy that reads and writes, together, what the op must read and write, to within half a percent.

    It is rounded down to a round number: CUDA's copy of 2^28 + 16 bytes takes half as long again as one of 2^28 (seen on
    an H200), and would be no floor.
    """
    length = case.bytes_moved(tokens) // 2
    step = min(65536, 1 << max(4, (length // 256).bit_length() - 1))
    return max(length // step * step, 16)


def _copies(work: Work, _: Setting) -> list[Call]:
    length = copied_bytes(work.case, work.tokens)
    calls: list[Call] = []
    for _set in work.sets:
        source = torch.randint(1, 256, (length,), dtype=torch.uint8, device=work.device)
        calls.append(functools.partial(_copy, source, torch.empty_like(source)))
    return calls


def _copy(source: Tensor, to: Tensor) -> tuple[Tensor, ...]:
    return to.copy_(source), source


COPY = Peer(
    name="copy",
    about="a contiguous copy on the device that reads and writes as many bytes as the op must",
    why_not=_here,
    build=_copies,
    is_copy=True,
)
