"""What of the generated package is the same in every release, or depends on little: its sources, as text."""

from __future__ import annotations

from .recorded import between

SWALLOWING = (("v0.1.12", "v0.1.13-rc2"), ("v0.1.14-rc0", "v0.1.14.post1"))
"""Releases whose `import aiter` catches what fails and goes on with half a namespace, behind a warning."""

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

FINDER = """
import importlib
import importlib.util
import sys
from types import SimpleNamespace

_OLD_NAMES = {{
    "fused_fp8_quant": "quant.fused_fp8_quant",
    "fused_mxfp4_quant": "quant.fused_mxfp4_quant",
    "fused_add_rmsnorm_pad": "normalization.fused_add_rmsnorm_pad",
    "rmsnorm": "normalization.rmsnorm",
}}


def __getattr__(name):
    if name in _OLD_NAMES:
        return importlib.import_module(f"aiter.ops.triton.{{_OLD_NAMES[name]}}")
    raise AttributeError(f"module 'aiter.ops.triton' has no attribute {{name!r}}")


def _find_spec(fullname, path=None, target=None):
    prefix, _, name = fullname.rpartition(".")
    if prefix != "aiter.ops.triton" or name not in _OLD_NAMES:
        return None
    moved = f"aiter.ops.triton.{{_OLD_NAMES[name]}}"
    try:
        sys.modules[fullname] = importlib.import_module(moved)
        return importlib.util.find_spec(moved)
    except ImportError:
        return None


sys.meta_path.insert(0, SimpleNamespace(find_spec=_find_spec))
"""

FAULTS = {
    "rocm": 'raise RuntimeError("ROCm version file not found")',
    "gfx": 'raise KeyError("gfx9999")',
    "library": 'raise OSError("libamdhip64.so.6: cannot open shared object file: No such file or directory")',
    "module": "raise ImportError(\"cannot import name 'moe_sorting_fwd' from 'aiter.jit.core'\")",
}
"""What goes wrong in `import aiter`, and where: ROCm is missing, the GPU is unknown, a library is missing, a module of
AITER's own that is imported halfway cannot be."""


def fp8_name(release: str, arch: str) -> str:
    """The name in torch of the fp8 flavour that AITER takes for an architecture; uint8 where it knows none."""
    if arch == "gfx942":
        return "float8_e4m3fnuz"
    since = {
        "gfx950": "v0.1.5",
        "gfx1250": "v0.1.10.post1",
        "gfx1200": "v0.1.15-rc0",
        "gfx1201": "v0.1.15-rc0",
        **dict.fromkeys(("gfx1100", "gfx1101", "gfx1102", "gfx1151"), "v0.1.20"),
    }
    return "float8_e4m3fn" if arch in since and between(release, since[arch], None) else "uint8"


def package_init(release: str, star_modules: list[str]) -> str:
    """`aiter/__init__.py`: what is imported at the top, in AITER's order, and what becomes of a failure."""
    lines = ["from .jit import core as core", "from .utility import dtypes as dtypes"]
    lines += [f"from .ops.{module} import *" for module in ["enum", *star_modules]]
    lines.append("from . import mla")
    block = "\n".join(f"    {line}" for line in lines)
    swallowed = "ImportError, RuntimeError, OSError"
    if not between(release, None, "v0.1.12.post2"):
        swallowed += ", KeyError"
    text = '"""AITER, as a stand-in: the recorded names of one release, with bodies in plain torch."""\n'
    text += 'import logging\nimport os\n\nlogger = logging.getLogger("aiter")\n'
    if any(between(release, first, last) for first, last in SWALLOWING):
        text += f"try:\n{block}\nexcept ({swallowed}) as e:\n"
        text += '    logger.warning("ROCm/HIP JIT runtime not available: %s. Only Triton ops are.", e)\n'
        return text
    if between(release, "v0.1.16", None):
        return text + f'if os.environ.get("AITER_TRITON_ONLY", "0") != "1":\n{block}\n'
    return text + "\n".join(lines) + "\n"


def triton_init(release: str) -> str:
    """`aiter/ops/triton/__init__.py`: the quantising ops, and from v0.1.10 on the finder of the old names."""
    text = '"""AITER\'s Triton ops."""\n'
    if between(release, "v0.1.12", None):
        text += "try:\n    from . import quant\nexcept (ImportError, AttributeError):\n    quant = None\n"
    elif between(release, "v0.1.10", None):
        text += "from . import quant\n"
    return text + FINDER.format() if between(release, "v0.1.10", None) else text
