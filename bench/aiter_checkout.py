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
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..fusion.backends.aiter.detect import Absent, find_build

_ARCH_INFO = "aiter.ops.triton.utils._triton.arch_info"
_DTYPES = "aiter.utility.dtypes"
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
    with _on_path(checkout), _triton_only() if off_rocm else contextlib.nullcontext():
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
    done = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    top = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "--show-toplevel"], capture_output=True, text=True, check=False
    )
    # A folder inside some other repository has a HEAD too, but not its own.
    own = top.returncode == 0 and Path(top.stdout.strip()).resolve() == checkout.resolve()
    return f"commit {done.stdout.strip()}" if done.returncode == 0 and own else None


def _dtypes(fp8: torch.dtype) -> types.ModuleType:
    """Stands in for the module of dtype names: torch's own dtypes under AITER's names."""
    module = types.ModuleType(_DTYPES)
    byte = torch.uint8
    module.__dict__.update(
        {
            "fp8": fp8,
            "fp8_e8m0": torch.float8_e8m0fnu,
            "fp4x2": byte,
            "i4x2": byte,
            "fp16": torch.float16,
            "bf16": torch.bfloat16,
            "fp32": torch.float32,
            "i8": torch.int8,
            "i16": torch.int16,
            "i32": torch.int32,
            "i64": torch.int64,
            "u8": byte,
            "u32": torch.uint32,
            "u64": torch.uint64,
        }
    )
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
def _on_path(folder: Path | None) -> Iterator[None]:
    if folder is None:
        yield
        return
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


@contextlib.contextmanager
def _triton_only() -> Iterator[None]:
    before = os.environ.get("AITER_TRITON_ONLY")
    os.environ["AITER_TRITON_ONLY"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["AITER_TRITON_ONLY"]
        else:
            os.environ["AITER_TRITON_ONLY"] = before
