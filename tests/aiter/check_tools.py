"""Tools of the AITER tests: an installation for a while, tensors to call with, and results to compare."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from standin import on_path
from torch import Tensor

from layerfuse.fusion.backends import aiter as amd
from layerfuse.fusion.ops.quantisation import quantise, scale_strides

EPSILON = 1e-5
FP8 = torch.float8_e4m3fn
"""The stand-ins' flavour where nothing else is said: gfx950's."""

LEADING = ((5,), (2, 3), (1,), (2, 0), ())
"""Leading dimensions of every call: flat, more of them, one row, none, and a vector."""


@contextlib.contextmanager
def installed(*folders: Path) -> Iterator[None]:
    """With these packages installed, and nothing remembered of others, before or after."""
    with on_path(*folders):
        amd.forget()
        try:
            yield
        finally:
            amd.forget()


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def pair(*leading: int, q: int = 256, kv: int = 128) -> tuple[Tensor, Tensor]:
    """Two column ranges of one projection's output: rows are further apart than they are wide."""
    whole = random(*leading, q + kv + 64)
    return whole[..., :q], whole[..., q : q + kv]


def weight(width: int) -> Tensor:
    return (1 + 0.2 * random(width, dtype=torch.float32, seed=1)).to(torch.bfloat16)


def same(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected)


def same_quantised(
    found: tuple[Tensor, Tensor], values: Tensor, group: int | None, columns: bool = False, ue8m0: bool = False
) -> None:
    """The same scales, laid out as said, and the same values but for a rounding."""
    expected, scales = quantise(values, FP8, group, columns, ue8m0)
    assert found[0].shape == expected.shape
    assert found[0].dtype == FP8
    assert found[1].shape == scales.shape
    assert found[1].stride() == scale_strides(tuple(scales.shape), columns) or 1 in scales.shape
    torch.testing.assert_close(found[1], scales, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(found[0].float(), expected.float(), rtol=0.07, atol=1e-6)
