"""AITER as a backend of the fused ops: on ROCm GPUs, for the cases in which the installed functions are correct."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs

from .. import Backend
from .calls import Call


def backend(op: str) -> Backend:
    """AITER as a backend of an op that has a binding of the same name. Imports nothing and looks at nothing yet."""
    return Backend(
        name="aiter",
        op=op,
        load=functools.partial(_load, op),
        runs_on=functools.partial(_runs_on, op),
        refuses=functools.partial(_refuses, op),
    )


def _load(op: str) -> Callable[..., Any]:
    from .binding import bound

    return bound(op).call


def _runs_on(op: str, device: str) -> tuple[bool, str]:
    """Whether the installed source has what is needed. Imports nothing of AITER."""
    if device != "cuda":
        return False, f"AITER's kernels run on AMD GPUs, not on {device}"
    import torch

    if torch.version.hip is None:
        return False, "AITER's kernels run on AMD GPUs, and this torch is not built for ROCm"
    from .binding import Refused, probe

    found = probe(op)
    return (False, found.reason) if isinstance(found, Refused) else (True, found.convention)


def _refuses(op: str, case: Any) -> str | None:
    """From the ops' cases. Binds the function, so that an AITER that cannot be imported is refused with its reason."""
    from .binding import Refused, bind

    found = bind(op)
    if isinstance(found, Refused):
        return found.reason
    return found.refuses(call_of(case))


def call_of(case: Any) -> Call:
    """An op's case in the words of the restrictions: of what `Call` does not know, nothing follows."""
    said = case._asdict()
    weights = [value for name, value in said.items() if name.endswith("weight_dtype")]
    other = next((dtype for dtype in weights if dtype != case.dtype), case.dtype if weights else None)
    width = next(value for name, value in said.items() if name == "width" or name.endswith("_width"))
    known = {name: said[name] for name in _OF_CALL if name in said}
    return Call(**{**known, "width": width, "weight_dtype": other, "arch": _arch()})


_OF_CALL = tuple(attribute.name for attribute in attrs.fields(Call))


@functools.cache
def _arch() -> str | None:
    """As gfx950, or None without an AMD GPU."""
    import torch

    if torch.version.hip is None or not torch.cuda.is_available():
        return None
    name: str = torch.cuda.get_device_properties(torch.cuda.current_device()).gcnArchName
    return name.partition(":")[0]
