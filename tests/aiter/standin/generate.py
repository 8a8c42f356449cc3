"""Writes a package `aiter` that looks, to whoever imports or parses it, like one recorded release of AMD's AITER."""

from __future__ import annotations

import functools
import tempfile
from importlib.util import cache_from_source
from pathlib import Path
from typing import Literal

from . import texts
from .mutation import Mutated, Mutation, mutated
from .recorded import Definition, aliases, definitions, version

Fault = Literal["rocm", "gfx", "library", "module"]

STAR_MODULES = (
    "activation",
    "attention",
    "quick_all_reduce",
    "moe_op",
    "rmsnorm",
    "fused_qk_norm_rope_cache_quant",
    "fused_qk_rmsnorm_group_quant",
)
"""The modules under `aiter.ops` that `import aiter` re-exports, in AITER's order: the later one wins."""

HEADER = '''"""Generated: the recorded signatures of AITER {release}, with bodies in plain torch."""

from __future__ import annotations

import contextlib
from typing import Literal, Optional, Union

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import aiter
from aiter._standin import behave
'''

COMPILED = "from aiter.jit.core import compile_ops\n"
GUARDED = "from aiter.jit.utils.torch_guard import torch_compile_guard\n"
ENUMS = "from aiter.ops.enum import MlaVersion, QuantType\n"
FP8 = "\nfp8_dtype = aiter.dtypes.fp8\n"

RANKS = '''
class CustomAllreduce:
    """All-reduce over the ranks of a group."""
{methods}
    @contextlib.contextmanager
    def capture(self):
        """Around the capture of a graph."""
        self._IS_CAPTURING = True
        try:
            yield
        finally:
            self._IS_CAPTURING = False

    def close(self):
        """Gives the buffers back."""
        return behave("CustomAllreduce.close", {{"self": self}})

    def should_custom_ar(self, inp, prefill_support: bool = False):
        """Whether the communicator takes this tensor."""
        given = {{"self": self, "inp": inp, "prefill_support": prefill_support}}
        return behave("CustomAllreduce.should_custom_ar", given)
'''


def _function(recorded: Definition, new: Mutated) -> str:
    """The source of one function: its signature, and a body that hands its arguments to the stand-in's."""
    definition = new.definition
    decorator = {
        "compile_ops": f'@compile_ops("module_standin"{", develop=True" if definition.torch_free else ""})\n',
        "torch_compile_guard": "@torch_compile_guard(mutates_args=[])\n",
        None: "",
    }[definition.hidden_by]
    returns = "" if definition.returns is None else f" -> {definition.returns}"
    values = ", ".join(f'"{name}": {source}' for name, source in new.values.items())
    return (
        f"\n\n{decorator}def {new.name}({', '.join(definition.parameters)}){returns}:\n"
        f'    return behave("{recorded.key}", {{{values}}})\n'
    )


def _module(path: str, functions: dict[Definition, Mutated], release: str) -> str:
    text = HEADER.format(release=release)
    hidden = {definition.hidden_by for definition in functions}
    text += COMPILED if "compile_ops" in hidden else ""
    text += GUARDED if "torch_compile_guard" in hidden else ""
    text += ENUMS if not path.startswith("aiter.ops.triton") else ""
    text += FP8 if "fp8_dtype" in str([*functions]) else ""
    methods = {definition: new for definition, new in functions.items() if definition.owner}
    for definition, new in functions.items():
        if definition not in methods:
            text += _function(definition, new)
    if methods:
        body = "".join(_function(definition, new) for definition, new in methods.items())
        text += "\n" + RANKS.format(methods="\n".join(f"    {line}".rstrip() for line in body.splitlines()))
    return text


_WRITTEN: dict[Path, str] = {}
"""What this process wrote last."""


def _write(root: Path, path: str, text: str) -> None:
    """Writes a file unless it was written so before, and an empty `__init__.py` into each new folder above it."""
    target = root / path
    if _WRITTEN.get(target) == text and target.exists():
        return
    # Two texts of one length, written within a second, look alike to Python's cache.
    Path(cache_from_source(target)).unlink(missing_ok=True)
    _WRITTEN[target] = text
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    folder = target.parent
    while folder != root:
        init = folder / "__init__.py"
        if not init.exists():
            init.write_text("")
        folder = folder.parent


def _quant_package(exported: dict[str, list[str]]) -> str:
    """`aiter/ops/triton/quant/__init__.py`, which re-exports names of each of its modules."""
    lines = [f"from .{module} import {', '.join(names)}\n" for module, names in exported.items() if names]
    return '"""AITER\'s quantising Triton ops."""\n' + "".join(lines)


def write_metadata(folder: Path, name: str, its_version: str) -> None:
    """A `dist-info` that importlib.metadata finds when `folder` is on the path."""
    info = folder / f"{name.replace('-', '_')}-{its_version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {its_version}\n")
    (info / "top_level.txt").write_text("aiter\n")
    (info / "RECORD").write_text("aiter/__init__.py,,\n")


def make_standin(
    folder: Path,
    release: str,
    *,
    arch: str = "gfx950",
    mutate: Mutation | None = None,
    fault: Fault | None = None,
    metadata: bool = True,
) -> Path:
    """Writes the package `aiter` of a release under `folder`, which the caller puts on the path.

    Args:
        folder: an empty folder of its own, created if need be; or one with a stand-in of the same release and options
            but for `mutate`, of which only what differs is written.
        release: a recorded tag, or HEAD.
        arch: the architecture the package believes to run on.
        mutate: one change to one function.
        fault: what goes wrong in `import aiter`, see `texts.FAULTS`.
        metadata: whether it was installed; a source checkout has neither a `dist-info` nor `aiter/_version.py`.

    Returns:
        `folder`.

    Raises:
        KeyError: no such release, or no such function in it.
    """
    known = definitions(release)
    if mutate and mutate.function not in known:
        raise KeyError(f"{release} defines no {mutate.function}")
    modules: dict[str, dict[Definition, Mutated]] = {}
    for definition in known.values():
        modules.setdefault(definition.module, {})[definition] = mutated(definition, mutate)
    root = folder / "aiter"
    root.mkdir(parents=True, exist_ok=True)
    faults = {name: text if name == fault else "" for name, text in texts.FAULTS.items()}
    for path, functions in modules.items():
        _write(folder, path.replace(".", "/") + ".py", _module(path, functions, release))
    _write(folder, "aiter/ops/moe_op.py", f'"""Mixture of experts."""\n{faults["module"]}\n')
    _write(folder, "aiter/ops/enum.py", texts.ENUM.format(fault=faults["library"]))
    _write(folder, "aiter/jit/core.py", texts.CORE.format(fault=faults["rocm"]))
    _write(folder, "aiter/jit/utils/torch_guard.py", texts.TORCH_GUARD)
    fp8 = {"gfx942": "float8_e4m3fnuz", "gfx950": "float8_e4m3fn"}[arch]
    _write(folder, "aiter/utility/dtypes.py", texts.DTYPES.format(fault=faults["gfx"], fp8=fp8))
    tests = str(Path(__file__).resolve().parents[1])
    _write(folder, "aiter/_standin.py", texts.SUPPORT.format(release=release, arch=arch, tests=tests))
    _write_triton(folder, release, modules)
    stars = [name for name in STAR_MODULES if name == "moe_op" or f"aiter.ops.{name}" in modules]
    _write(folder, "aiter/__init__.py", texts.package_init(stars))
    if metadata:
        its_version = version(release)
        _write(folder, "aiter/_version.py", f"__version__ = version = {its_version!r}\n")
        (root / "install_mode").write_text("install")
        write_metadata(folder, "amd-aiter", its_version)
    return folder


@functools.cache
def _shared_folder() -> tempfile.TemporaryDirectory[str]:
    """Removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="aiter-standins-")


@functools.cache
def shared_standin(release: str, arch: str = "gfx950") -> Path:
    """The stand-in of a release as it is, written once per process, for tests that change none of its files."""
    return make_standin(Path(_shared_folder().name) / f"{release}-{arch}", release, arch=arch)


def _write_triton(folder: Path, release: str, modules: dict[str, dict[Definition, Mutated]]) -> None:
    """The package around the Triton ops; the functions themselves are already written."""
    addresses = aliases(release)
    exported = {
        module: [
            new.name
            for definition, new in modules.get(f"aiter.ops.triton.quant.{module}", {}).items()
            if f"aiter.ops.triton.quant:{definition.name}" in addresses
        ]
        for module in ("fused_fp8_quant", "fused_mxfp4_quant", "fused_mxfp8_quant")
    }
    _write(folder, "aiter/ops/triton/quant/__init__.py", _quant_package(exported))
    _write(folder, "aiter/ops/triton/__init__.py", texts.TRITON)
