"""What of the generated package is the same in every release: its sources, as text."""

from __future__ import annotations

CORE = '''"""Where AITER builds and binds its kernels; the stand-in has none."""
{fault}

def compile_ops(module, fc_name=None, gen_fake=None, develop=False):
    """Bind a declaration to its kernel: what comes back hides the signature, as AITER's closure does."""

    def decorator(func):
        def wrapper(*args, **kwargs):
            return func(*args, **kwargs)

        return wrapper

    return decorator
'''

TORCH_GUARD = '''"""How AITER registers Python functions as custom ops."""


def torch_compile_guard(mutates_args="unknown", gen_fake=None):
    """Register and wrap: what comes back hides the signature."""

    def decorator(func):
        def wrapper_custom(*args, **kwargs):
            return func(*args, **kwargs)

        return wrapper_custom

    return decorator
'''

ENUM = '''"""The enumerations that AITER's kernels take."""
{fault}
import enum

from ..jit.core import compile_ops


class QuantType(enum.Enum):
    No = 0
    per_Tensor = 1
    per_Token = 2
    per_1x32 = 3
    per_1x128 = 4
    per_128x128 = 5
    per_256x128 = 6
    per_1024x128 = 7


class ActivationType(enum.Enum):
    No = -1
    Silu = 0
    Gelu = 1


class MlaVersion(enum.Enum):
    V32 = 0
    V40 = 1
'''

DTYPES = '''"""The dtypes of the running architecture."""
{fault}
import torch

fp8 = torch.{fp8}
fp8_e8m0 = getattr(torch, "float8_e8m0fnu", torch.uint8)
fp4x2 = getattr(torch, "float4_e2m1fn_x2", torch.uint8)
fp16 = torch.float16
bf16 = torch.bfloat16
fp32 = torch.float32
i32 = torch.int32
i8 = torch.int8
u8 = torch.uint8
i64 = torch.int64
u64 = torch.uint64
'''

SUPPORT = '''"""How this generated package reaches the bodies of its functions."""

import sys

RELEASE = {release!r}
ARCH = {arch!r}


def behave(key, values):
    """What the function does: its arguments by their recorded names."""
    if {tests!r} not in sys.path:
        sys.path.append({tests!r})
    from standin.behaviour import perform

    return perform(key, RELEASE, ARCH, values)
'''

TRITON = """'''AITER's Triton ops.'''

try:
    from . import quant
except (ImportError, AttributeError):
    quant = None
"""

FAULTS = {
    "rocm": 'raise RuntimeError("ROCm version file not found")',
    "gfx": 'raise KeyError("gfx9999")',
    "library": 'raise OSError("libamdhip64.so.6: cannot open shared object file: No such file or directory")',
    "module": "raise ImportError(\"cannot import name 'moe_sorting_fwd' from 'aiter.jit.core'\")",
}
"""What goes wrong in `import aiter`, and where: ROCm is missing, the GPU is unknown, a library is missing, a module of
AITER's own that is imported halfway cannot be."""


def package_init(star_modules: list[str]) -> str:
    """`aiter/__init__.py`: what is imported at the top, in AITER's order, unless only Triton is to be used."""
    lines = ["from .jit import core as core", "from .utility import dtypes as dtypes"]
    lines += [f"from .ops.{module} import *" for module in ["enum", *star_modules]]
    lines.append("from . import mla")
    block = "\n".join(f"    {line}" for line in lines)
    return f'''"""AITER, as a stand-in: the recorded names of one release, with bodies in plain torch."""
import os

if os.environ.get("AITER_TRITON_ONLY", "0") != "1":
{block}
'''
