"""AITER's Triton ops, from an installed AITER or from a source checkout, on AMD GPUs and elsewhere.

Its Triton kernels are plain Triton and run on other GPUs too, but two of its modules ask for a ROCm machine when they
are imported: the one that asks for the architecture, and the one that names the fp8 dtype. Off ROCm, stand-ins for these
two answer instead. Kernels and launch code are AITER's own.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .._version import commit_of
from ..fusion.backends.aiter.detect import Absent, find_build

_ARCH_INFO = "aiter.ops.triton.utils._triton.arch_info"
_DTYPES = "aiter.utility.dtypes"
_TRITON_ONLY = "AITER_TRITON_ONLY"
_ARCHES = {torch.float8_e4m3fn: "gfx950", torch.float8_e4m3fnuz: "gfx942"}
"""An architecture that has each fp8 format: AITER derives the one from the other."""


def why_not(checkout: Path | None) -> str | None:
    """Why there are no Triton ops to load, or None."""
    if checkout is not None:
        if not (checkout / "aiter" / "ops" / "triton").is_dir():
            return f"{checkout.name or checkout} holds no aiter/ops/triton: give the root of a checkout of ROCm/aiter"
        return None
    found = find_build()
    if isinstance(found, Absent):
        return f"AITER: {found.reason}; --aiter takes a checkout of ROCm/aiter"
    if torch.version.hip is None:
        return "AITER is installed, but this torch is not built for ROCm; --aiter takes a checkout of ROCm/aiter"
    return None


def load(checkout: Path | None, fp8: torch.dtype, path: str) -> Any:
    """One function of AITER's Triton ops, as `module:function` below aiter.ops.triton. In one process, all from one place.

    Raises:
        ImportError: AITER cannot be imported.
    """
    module, _, name = path.partition(":")
    off_rocm = checkout is not None and torch.version.hip is None
    with _importing(checkout, off_rocm):
        if checkout is not None and off_rocm and "aiter" not in sys.modules:
            dtypes = _dtypes(fp8)
            sys.modules[_ARCH_INFO] = _arch_info(checkout, fp8)
            sys.modules[_DTYPES] = dtypes
            package: Any = importlib.import_module("aiter")
            package.dtypes = dtypes
        importlib.import_module("aiter")
        return getattr(importlib.import_module(f"aiter.ops.triton.{module}"), name)


def version(checkout: Path | None) -> str | None:
    """The commit of a checkout, or what the installed one says of itself."""
    if checkout is None:
        found = find_build()
        return None if isinstance(found, Absent) else found.version
    commit = commit_of(checkout)
    return None if commit is None else f"commit {commit}"


def _dtypes(fp8: torch.dtype) -> types.ModuleType:
    """Stands in for the module of dtype names: torch's own dtypes under AITER's names."""
    module = types.ModuleType(_DTYPES)
    module.__dict__.update(
        fp8=fp8, fp8_e8m0=torch.float8_e8m0fnu, fp16=torch.float16, bf16=torch.bfloat16, fp32=torch.float32, u32=torch.uint32,
        u64=torch.uint64, **dict.fromkeys(("fp4x2", "i4x2", "u8"), torch.uint8),
        **{f"i{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    )  # fmt: skip
    return module


def _arch_info(checkout: Path, fp8: torch.dtype) -> types.ModuleType:
    """Stands in for the module that asks for the architecture: every feature it can be asked for is absent."""
    module = types.ModuleType(_ARCH_INFO)
    source = checkout.joinpath(*_ARCH_INFO.split(".")).with_suffix(".py")
    for name in re.findall(r"^def (\w+)\(", source.read_text(encoding="utf-8"), re.MULTILINE):
        module.__dict__[name] = lambda *_, **__: False
    module.__dict__["get_arch"] = lambda: _ARCHES[fp8]
    return module


@contextlib.contextmanager
def _importing(checkout: Path | None, off_rocm: bool) -> Iterator[None]:
    """A checkout comes first in the path; off ROCm AITER is told to build nothing."""
    before = os.environ.get(_TRITON_ONLY)
    sys.path[:0] = [] if checkout is None else [str(checkout)]
    if off_rocm:
        os.environ[_TRITON_ONLY] = "1"
    try:
        yield
    finally:
        if checkout is not None:
            sys.path.remove(str(checkout))
        os.environ.pop(_TRITON_ONLY, None)
        os.environ.update({} if before is None else {_TRITON_ONLY: before})
