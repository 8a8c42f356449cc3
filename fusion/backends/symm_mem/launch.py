"""Launching the kernel of fused all-reduces on a workspace: one program per row."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..triton import launcher, tuning
from ..triton.family import Given, as_rows
from .kernel import all_reduce_row_norm

_CHUNK_BYTES = 16384
_NARROW_BYTES = 8192
_MANY_WARPS, _MANY_WIDE_WARPS = 8, 4


class Layout(NamedTuple):
    """How a rank's buffer is divided, and for what kernels on it are compiled."""

    rank: int
    world_size: int
    shots: int
    "1: every rank sums every row. 2: a row's owner sums it, adds the residual and sends the row of the stream."
    most: int
    "Rows of a launch; a multiple of 16 where calls may have more, so that each launch starts on the 16-byte grid."
    row_bytes: int
    "Of a row in a buffer, a multiple of 16."
    item: int
    "Bytes of an element."
    resident: int
    "Programs that the GPU surely holds at once."

    @property
    def size(self) -> int:
        """Bytes of the buffer. All its bits are ones before the first call."""
        if self.shots == 1:
            return 2 * self.world_size * self.most * self.row_bytes
        parts = self.world_size * -(-self.most // self.world_size) * self.row_bytes
        return 2 * parts + 2 * self.most * self.row_bytes


class Workspace(NamedTuple):
    """What the ranks of a group exchange rows of one size through: this rank's side of it."""

    layout: Layout
    tokens: int
    "Of a call, at most."
    buffers: Tensor
    "(world_size,) int64: where each rank's buffer lies in this process, on the 16-byte grid."
    phases: Tensor
    "(most,) int32, zeros at first: the phase of each row's next call. Only this rank's kernels touch it."
    ticket: Tensor
    "(1,) int32, zero between calls: which row the next program takes."
    owned: Any
    "What keeps the memory mapped."
    functions: dict[str, Any]
    "By op, what launches on it: kept here, so that both go with the group."


def launch(
    workspace: Workspace,
    name: str,
    mode: int,
    kept: bool,
    adds: bool,
    padded: int,
    tensors: tuple[Tensor, ...],
    epsilon: float,
    offset: float,
    given: Given,
) -> None:
    """As `family.launch_row`, for rows that are summed over the ranks of a workspace first; several launches where they are many."""
    x, residual, weight, normed, residual_out = tensors
    x, residual = as_rows(x), as_rows(residual)
    rows, width = x.shape
    layout = workspace.layout
    if rows > layout.most:
        for start in range(0, rows, layout.most):
            piece = [
                each[start : start + layout.most] for each in (x, residual, as_rows(normed), as_rows(residual_out))
            ]
            rest = given._replace(
                out=as_rows(given.out)[start:],
                scales=given.scales.as_strided((1,), (1,), given.scales.storage_offset() + start * given.strides[0]),
            )
            these = (piece[0], piece[1], weight, piece[2], piece[3])
            launch(workspace, name, mode, kept, adds, padded, these, epsilon, offset, rest)
        return
    if rows == 0:
        return
    x_stride, residual_stride = x.stride(0), residual.stride(0)
    x_unit, residual_unit = x_stride & -x_stride & 15 or 16, residual_stride & -residual_stride & 15 or 16
    numbers = (rows, x_stride // x_unit, residual_stride // residual_unit, *given.strides)
    every = (
        x, residual, weight, given.scale_in, given.out, given.scales, normed, residual_out,
        workspace.buffers, workspace.phases, workspace.ticket,
    )  # fmt: skip
    addresses = tuple(tensor.data_ptr() for tensor in every)
    reads, high = addresses[:4], rows | x_stride | residual_stride | given.strides[1]
    bits = reads[0] | reads[1] | reads[2] | reads[3]
    special = launcher.special(high, reads, every) if bits & 15 or high >> 31 else None
    device = x.get_device()
    in_order = rows > layout.resident
    key = (
        name, layout, in_order, device, x.dtype, weight.dtype,
        given.out.dtype, width, padded, epsilon, offset, x_unit, residual_unit, given.group, given.scaling, special,
    )  # fmt: skip
    if launcher.again(key, device, addresses, numbers):
        return
    item = x.element_size()
    chunk, warps = shape(width, item, given.group, layout.world_size, in_order)
    zeros = tuning.power_of_two(padded - width) if padded > width else 0
    constants = (
        layout.world_size, layout.rank, layout.shots, layout.most, layout.row_bytes // item, in_order,
        width, epsilon, offset, x_unit, residual_unit, mode, given.group, given.largest, given.scaling,
        kept, padded, zeros, chunk,
    )  # fmt: skip
    launcher.first(all_reduce_row_norm, key, every, numbers, constants, rows=1, sides=1, warps=warps)


def shape(width: int, item: int, group: int, world_size: int, many: bool) -> tuple[int, int]:
    """Columns of a chunk and warps of a program, found on two and four H200s (bench/results/all_reduce_tuning-*-ranks.json).

    A row comes in one chunk up to 16 KiB, as every chunk waits for its peers anew. A thread makes one 16-byte access per rank
    and chunk, or four where rows are narrow and there is one peer. Where there are more rows than programs at once, several
    programs of fewer threads share a multiprocessor: of fewer yet where a wide row comes from several peers.

    Args:
        width: of a row.
        item: bytes of an element.
        group: columns per scale, 0 without groups.
        world_size: ranks.
        many: more rows than programs at once.
    """
    chunk = max(min(tuning.power_of_two(width), _CHUNK_BYTES // item), group)
    size = chunk * item
    narrow = size <= _NARROW_BYTES
    warps = max(1, size // (32 * 16) // (4 if narrow and world_size == 2 else 1))
    if many:
        warps = min(warps, _MANY_WARPS if narrow or world_size == 2 else _MANY_WIDE_WARPS)
    return chunk, warps
