"""The failure of a stand-in, and the conditions that the bodies share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SIXTEEN_BIT = (torch.float16, torch.bfloat16)


class StandInMisuse(AssertionError):
    """An argument that the real function would silently misread, ignore, or read and write out of bounds with."""


def expect(holds: bool, sentence: str) -> None:
    """Misuse, in a sentence, unless the condition holds."""
    if not holds:
        raise StandInMisuse(sentence)


def check(holds: bool, sentence: str, error: type[Exception] = RuntimeError) -> None:
    """What the real function checks itself: its C++ checks are RuntimeErrors."""
    if not holds:
        raise error(sentence)


def expect_bool(value: Any, name: str) -> None:
    """A number where a flag stands, or the reverse, is an argument on the wrong position."""
    expect(isinstance(value, bool), f"{name} is {value!r}, no bool: an argument of another release on its position?")


def expect_int(value: Any, name: str) -> None:
    """A flag, a float or a tensor where a count stands is an argument on the wrong position."""
    expect(
        isinstance(value, int) and not isinstance(value, bool),
        f"{name} is {value!r}, no int: an argument of another release on its position?",
    )


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def expect_rows(tensor: Tensor, name: str) -> None:
    """A launch over no rows has an empty grid, which HIP refuses or ignores."""
    expect(tensor.shape[0] > 0, f"{name} has no rows: the grid would be empty")


def expect_unit_stride(**tensors: Tensor | None) -> None:
    """The last dimension's stride is never read: it is taken to be 1."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dim() and tensor.shape[-1] > 1:
            expect(tensor.stride(-1) == 1, f"{name} has last stride {tensor.stride(-1)}, but 1 is assumed unchecked")


def expect_even(**tensors: Tensor) -> None:
    """Loads are 16 bytes wide and bounded to 4: an odd width or row stride of 2-byte elements is not guarded."""
    for name, tensor in tensors.items():
        whole = tensor.shape[-1] % 2 == 0 and (tensor.shape[0] < 2 or tensor.stride(0) % 2 == 0)
        expect(whole, f"{name} {tuple(tensor.shape)} has an odd width or row stride: loads cross its end")


def expect_weight(weight: Tensor, x: Tensor, name: str) -> None:
    """A weight's length and dtype are not checked: its pointer is read as x's dtype, over x's width."""
    expect(
        weight.dim() == 1 and weight.numel() == x.shape[-1],
        f"{name} {tuple(weight.shape)} does not fit a width of {x.shape[-1]}: it would be read past its end",
    )
    expect(weight.dtype == x.dtype, f"{name} is {weight.dtype}, but would be read as {x.dtype}")
    expect(weight.is_contiguous(), f"{name} is not contiguous, but would be read as if it were")


def expect_like(out: Tensor | None, x: Tensor, name: str) -> None:
    """An output that the kernel writes as if it had x's shape and dtype."""
    if out is None:
        raise StandInMisuse(f"{name} is None: the result would be lost")
    expect(out.shape == x.shape, f"{name} has shape {tuple(out.shape)}, but {tuple(x.shape)} is written")
    expect(out.dtype == x.dtype, f"{name} is {out.dtype}, but {x.dtype} is written")
    expect_unit_stride(**{name: out})
