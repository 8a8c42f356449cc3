"""What a generated function does: its body, found by the key of its definition and given its arguments by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .misuse import expect, expect_bool, expect_int
from .recorded import Definition, between, definitions, parts

FP8 = {"gfx942": torch.float8_e4m3fnuz}
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0}


@dataclass(frozen=True)
class Call:
    """One call of a generated function.

    Attributes:
        key: the key of the definition.
        release: the release that the package stands in for.
        arch: the architecture that it believes to run on.
        values: the arguments by their recorded names, defaults filled in.
    """

    key: str
    release: str
    arch: str
    values: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def get(self, name: str, otherwise: Any = None) -> Any:
        """An argument that only some releases have."""
        return self.values.get(name, otherwise)

    def since(self, first: str) -> bool:
        """Whether the release is this one or a later one."""
        return between(self.release, first, None)

    def until(self, last: str) -> bool:
        """Whether the release is this one or an earlier one."""
        return between(self.release, None, last)

    @property
    def name(self) -> str:
        """The function's own name, for messages."""
        return self.key.split(":")[-1]

    @property
    def fp8(self) -> torch.dtype:
        """The fp8 flavour of the architecture."""
        return FP8.get(self.arch, torch.float8_e4m3fn)

    @property
    def definition(self) -> Definition | None:
        """What was recorded of the function; None for what only the stand-in has."""
        return definitions(self.release).get(self.key)

    def check_fp8(self, tensor: Tensor) -> None:
        """The running architecture's fp8 is the only one there is.

        Raises:
            AssertionError: in releases that look dtypes up in a table.
            RuntimeError: in those that ask torch.
        """
        if tensor.dtype in LARGEST and tensor.dtype != self.fp8:
            definition = self.definition
            if definition is not None and definition.hidden_by and not definition.torch_free:
                raise RuntimeError(f"{self.name} not support output type: {tensor.dtype}")
            raise AssertionError(f"Unsupported dtype: {tensor.dtype}")

    def triton_fp8(self, dtype: torch.dtype) -> torch.dtype:
        """A dtype that a Triton kernel is to write."""
        if dtype not in LARGEST:
            raise NotImplementedError(f"the stand-in does not quantise to {dtype}")
        expect(dtype == self.fp8, f"{dtype} is not the fp8 of {self.arch}: Triton has no such store there")
        return dtype


def by_given_scale(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """fp8 by a scale of one element."""
    expect(isinstance(scale, Tensor) and scale.numel() == 1, "a scale that is given is a tensor of one element")
    return (values * scale.float().reciprocal().reshape(())).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


Body = Callable[[Call], Any]

BODIES: dict[str, Body] = {}
"""Key of a definition -> its body; filled by the modules of `MODULES` when they are imported."""


MODULES = ("allreduce", "decode", "gated", "mla", "mx", "norms", "qk", "silu", "triton")
"""The modules `behaviour_*` that hold the bodies."""


def body(*keys: str) -> Callable[[Body], Body]:
    """Makes a function the body of these definitions.

    Raises:
        ValueError: a definition has a body already.
    """

    def register(function: Body) -> Body:
        for key in keys:
            if key in BODIES:
                raise ValueError(f"{key} has two bodies")
            BODIES[key] = function
        return function

    return register


def _check_types(call: Call) -> None:
    """Arguments declared as tensors are tensors, as pybind11 and torch's schemas demand; and flags are flags, and counts are counts."""
    definition = call.definition
    for name, annotation, default in map(parts, definition.parameters if definition else ()):
        annotation, value = (annotation or "").replace("torch.", ""), call.get(name)
        optional = "None" in annotation or "Optional" in annotation or default == "None"
        if annotation.removesuffix(" | None") in ("Tensor", "Optional[Tensor]"):
            if not (isinstance(value, Tensor) or (value is None and optional)):
                raise TypeError(f"{call.name}() argument '{name}' must be Tensor, not {type(value).__name__}")
        elif annotation in ("int", "float") and isinstance(value, Tensor):
            raise TypeError(f"{call.name}() argument '{name}' must be {annotation}, not Tensor")
        elif annotation == "bool" or default in ("True", "False"):
            expect_bool(value, name)
        elif annotation == "int" or (not annotation and (default or "").removeprefix("-").isdigit()):
            expect_int(value, name)


def perform(key: str, release: str, arch: str, values: dict[str, Any]) -> Any:
    """Runs the body of a definition; the generated packages call this.

    Raises:
        TypeError: an argument is no tensor where one is declared, or the reverse.
        StandInMisuse: the real function would go wrong in silence.
        NotImplementedError: the stand-in has no body for this.
    """
    for name in MODULES:
        importlib.import_module(f"{__package__}.behaviour_{name}")  # each registers its bodies
    if key not in BODIES:
        raise NotImplementedError(f"the stand-in has the signature of {key}, but no body")
    call = Call(key, release, arch, values)
    _check_types(call)
    return BODIES[key](call)
