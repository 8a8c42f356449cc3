"""Launching a compiled kernel with little work on the host: it is kept, and called directly.

What a kernel was compiled for is its key: everything that is constant for a layer, the step of the number of rows, and
to what the inputs are aligned. Only what is launched for the first time goes through Triton's own search.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.knobs import HookChain

OVERLAP = "LAYERFUSE_PDL"
"""Environment variable: 0 turns off programmatic dependent launch, with which a kernel starts while the one before ends.
It is read when a kernel is first launched."""

KNOWN = ("3.6", "3.7", "3.8", "3.9")
"""Releases of Triton that call a compiled kernel as `again` does, in `triton/runtime/jit.py` (`JITFunction.run`)."""

try:
    from triton import AsyncCompileMode
except ImportError:  # an older release
    AsyncCompileMode = None

_hooks = triton.knobs.runtime
HIP = torch.version.hip is not None

# What torch.cuda's functions of these names call, without asking first whether CUDA is initialised.
_current_device: Any = torch._C._cuda_getDevice if torch.cuda._is_compiled() else None
_current_stream: Any = torch._C._cuda_getCurrentRawStream if torch.cuda._is_compiled() else None


def is_known(release: str) -> bool:
    """Whether compiled kernels of this release are called directly. Those of another one take Triton's own launch each time."""
    return ".".join(release.split(".")[:2]) in KNOWN


_direct = is_known(triton.__version__)
_ahead: ContextVar[bool] = ContextVar("layerfuse_compiles_ahead", default=False)
"""Whether kernels are compiled ahead, and not launched: here, as Triton's mode is, and not on other threads."""
THREADS = 8
"""The most kernels that are compiled at once; more would wait for Python's lock."""


class Compiled(NamedTuple):
    """A kernel and how it is launched."""

    run: Any
    function: Any
    metadata: Any
    rows: int
    "Of a program."
    sides: int
    "Programs that share these rows."
    beside: int
    "Programs for all rows together."
    constants: tuple[Any, ...]


_compiled: dict[tuple[Any, ...], Compiled] = {}


def special(numbers: int, addresses: tuple[int, ...], tensors: tuple[Tensor, ...]) -> Any:
    """What a kernel is compiled for besides its constants, where `unusual` says so. A part of the key.

    Args:
        numbers: all numbers, by `|`. Beyond 32 bits they are of another type.
        addresses: of the inputs. Triton compiles for those on the 16-byte grid.
        tensors: all of them. On ROCm Triton compiles for storages below 2 GiB.
    """
    return tuple(address & 15 != 0 for address in addresses), numbers >> 31 == 0, HIP and _has_large_storage(tensors)


class Launch(NamedTuple):
    """A launch that was made; with tensors that lie elsewhere it is `again` with their addresses."""

    key: tuple[Any, ...]
    device: int
    numbers: tuple[int, ...]


def repeated(launch: Callable[..., Launch | None], tensors: Callable[..., tuple[Tensor, ...]]) -> Callable[..., None]:
    """A function for calls that are alike in everything but where their tensors lie.

    Args:
        launch: from a call's arguments to the launch that it makes; None where it makes none, or one that depends on more.
        tensors: from a call's arguments to the kernel's, in their order.
    """
    made: list[Launch] = []

    def call(*args: Any) -> None:
        if made:
            addresses = tuple([tensor.data_ptr() for tensor in tensors(*args)])
            joined = 0
            for address in addresses:
                joined |= address
            if joined & 15 == 0 and again(made[0].key, made[0].device, addresses, made[0].numbers):
                return
        found = launch(*args)
        if found is not None and not made and not HIP:
            made.append(found)

    return call


def again(key: tuple[Any, ...], device: int, addresses: tuple[int, ...], numbers: tuple[int, ...]) -> bool:
    """Launch the kernel that was compiled for this key, if there is one that can be called directly.

    It does what the compiled kernel's own launcher does, without its detours; addresses stand for tensors, as Triton would
    ask the driver about each tensor again. A profiler's hooks take the long way.

    Args:
        key: what the kernel was compiled for.
        device: index of the inputs' device.
        addresses: of all tensors, in their order.
        numbers: the arguments for which it was not compiled, the number of rows first.
    """
    known = _compiled.get(key)
    if known is None or device != _current_device() or _profiled():
        return False
    run, function, metadata, rows, sides, beside, constants = known
    run(
        -(-numbers[0] // rows) * sides + beside, 1, 1, _current_stream(device), function, metadata, None, None, None,
        *addresses, *numbers, *constants,
    )  # fmt: skip
    return True


@contextmanager
def compiling_ahead() -> Iterator[bool]:
    """What would be launched for the first time is only compiled while this lasts, several kernels at once; all are ready at its end.

    Yields:
        False where this release of Triton cannot do it: calls would launch as ever.
    """
    if AsyncCompileMode is None:
        yield False
        return
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as threads, AsyncCompileMode(threads):
        before = _ahead.set(True)
        try:
            yield True
        finally:
            _ahead.reset(before)


def first(
    kernel: Any,
    key: tuple[Any, ...],
    tensors: tuple[Tensor, ...],
    numbers: tuple[int, ...],
    constants: tuple[Any, ...],
    *,
    rows: int,
    sides: int,
    warps: int,
    beside: int = 0,
    registers: int = 0,
) -> None:
    """Compile a kernel, launch it, and keep it where it can be called directly. In `compiling_ahead` it is only compiled.

    Args:
        kernel: the Triton kernel. Its arguments are the tensors, the numbers, the constants and then whether launches overlap.
        key: under which it is kept.
        tensors: of which the first decides on the device.
        numbers: arguments for which it is not compiled, the number of rows first.
        constants: arguments for which it is compiled.
        rows: that a program takes.
        sides: programs that share these rows.
        warps: of a program.
        beside: programs for all rows together.
        registers: the most of a thread where launches overlap; 0: as the compiler likes.
    """
    device = tensors[0].device
    early = _overlaps(device)
    constants = (*constants, early)
    options: dict[str, Any] = {"num_warps": warps} | ({"launch_pdl": True} | limited(registers) if early else {})
    grid = (-(-numbers[0] // rows) * sides + beside, 1, 1)
    if interpreted(device):
        kernel[grid](*tensors, *numbers, *constants, **options)
        return
    with torch.cuda.device(device):
        if _ahead.get():
            kernel.warmup(*tensors, *numbers, *constants, grid=grid, **options)
            return
        built = kernel[grid](*tensors, *numbers, *constants, **options)
    if _direct and not (HIP and _has_large_storage(tensors)) and max(numbers) < 2**31:
        _compiled[key] = Compiled(built.run, built.function, built.packed_metadata, rows, sides, beside, constants)


def limited(registers: int) -> dict[str, int]:
    """What limits a thread's registers, as an option of Triton's for NVIDIA."""
    return {"maxnreg": registers} if registers else {}


def interpreted(device: torch.device) -> bool:
    """Whether Triton's interpreter runs what is launched there."""
    return bool(device.type != "cuda")


def wave(device: torch.device) -> int:
    """Threads of a warp."""
    return int(torch.cuda.get_device_properties(device).warp_size) if device.type == "cuda" else 32


def _has_large_storage(tensors: tuple[Tensor, ...]) -> bool:
    return any(tensor.untyped_storage().nbytes() > 2**31 - 1 for tensor in tensors)


def _profiled() -> bool:
    """Whether somebody has hooks on Triton's launches: a chain that is not empty, or a function in place of the chain."""
    enter, leave = _hooks.launch_enter_hook, _hooks.launch_exit_hook
    return bool(
        (enter.calls if isinstance(enter, HookChain) else enter is not None)
        or (leave.calls if isinstance(leave, HookChain) else leave is not None)
    )


def _overlaps(device: torch.device) -> bool:
    """Whether kernels may start while the one before ends: NVIDIA from sm90 on, unless turned off."""
    if device.type != "cuda" or torch.version.hip or os.environ.get(OVERLAP) == "0":
        return False
    return bool(torch.cuda.get_device_capability(device) >= (9, 0))
