"""Buffers as data: name, shape, dtype and bytes; and their shapes as the installed AITER computes them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from attrs import frozen

from ...adapters.arguments import check_whole
from .dtypes import ITEM_SIZE
from .sizes import BUFFER_DTYPE, BUFFERS, Case, Shapes

if TYPE_CHECKING:
    from ..backends.aiter import Bound


@frozen(kw_only=True)
class BufferSpec:
    """A tensor that is or will be allocated."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    "bf16, fp8, fp32, int32 or uint64."

    @property
    def bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * ITEM_SIZE[self.dtype]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"name": self.name, "shape": list(self.shape), "dtype": self.dtype, "bytes": self.bytes}


def total_bytes(buffers: Iterable[BufferSpec]) -> int:
    """The bytes of several buffers."""
    return sum(buffer.bytes for buffer in buffers)


def specs_of(shapes: Shapes) -> tuple[BufferSpec, ...]:
    """The six buffers, in AITER's order."""
    return tuple(BufferSpec(name=name, shape=shapes[name], dtype=BUFFER_DTYPE[name]) for name in BUFFERS)


def largest(several: Iterable[Shapes]) -> Shapes:
    """The smallest shapes that hold each of several."""
    every = tuple(several)
    return {
        name: tuple(max(sides) for sides in zip(*(shapes[name] for shapes in every), strict=True)) for name in BUFFERS
    }


def installed_shapes(build: Bound, case: Case) -> Shapes:
    """What the installed function says, for the GPU of this process.

    Raises:
        AiterCallError: it must not be asked for such a case.
    """
    import torch

    from ..backends.aiter.calls import Call

    build.check(Call(num_heads=case.heads))
    dtypes = {"bf16": torch.bfloat16, "fp8": build.fp8}
    sizes = build.call(
        *(case.batch, case.queries, case.heads, dtypes[case.q], dtypes[case.kv], case.sparse),
        fast_mode=case.fast,
        num_kv_splits=case.num_kv_splits,
        intra_batch_mode=case.intra_batch,
        max_split_per_batch=case.max_split_per_batch,
    )
    return {name: tuple(shape) for name, (shape, _) in sizes.items()}


MOST_BYTES = 1 << 80
"""Shown for everything above it."""


def byte_text(count: int) -> str:
    """Bytes as a person reads them: 34.0 MiB."""
    check_whole(count=count)
    value = float(min(count, MOST_BYTES))
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
