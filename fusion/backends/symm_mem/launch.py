"""Launching the kernel of fused all-reduces on a workspace: one program per row, all of them on the GPU at once."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..triton import launcher, tuning
from ..triton.family import Given, as_rows
from .kernel import all_reduce_row_norm

_CHUNK_BYTES = 16384


class Workspace(NamedTuple):
    """What the ranks of a group exchange rows of one size through: this rank's side of it."""

    buffers: Tensor
    "(world_size,) int64: where each rank's buffer lies in this process, on the 16-byte grid."
    phases: Tensor
    "(most,) int32, zeros at first: the phase of each row's next call. Only this rank's kernels touch it."
    rank: int
    world_size: int
    most: int
    "Rows of a call, at most."
    row_bytes: int
    "Of a row in a buffer, a multiple of 16."
    owned: Any
    "What keeps the memory mapped."


def buffer_bytes(world_size: int, most: int, row_bytes: int) -> int:
    """The size of a rank's buffer. All its bits are ones before the first call."""
    return 2 * world_size * most * row_bytes


def launch(
    workspace: Workspace,
    name: str,
    mode: int,
    kept: bool,
    adds: bool,  # noqa: ARG001 (always: the sum over the ranks goes into an add)
    padded: int,
    tensors: tuple[Tensor, ...],
    epsilon: float,
    offset: float,
    given: Given,
) -> None:
    """As `family.launch_row`, for rows that are summed over the ranks of a workspace first."""
    x, residual, weight, normed, residual_out = tensors
    x, residual = as_rows(x), as_rows(residual)
    rows, width = x.shape
    if rows == 0:
        return
    x_stride, residual_stride = x.stride(0), residual.stride(0)
    x_unit, residual_unit = x_stride & -x_stride & 15 or 16, residual_stride & -residual_stride & 15 or 16
    numbers = (rows, x_stride // x_unit, residual_stride // residual_unit, *given.strides)
    every = (
        x, residual, weight, given.scale_in, given.out, given.scales, normed, residual_out,
        workspace.buffers, workspace.phases,
    )  # fmt: skip
    addresses = tuple(tensor.data_ptr() for tensor in every)
    reads, high = addresses[:4], rows | x_stride | residual_stride | given.strides[1]
    bits = reads[0] | reads[1] | reads[2] | reads[3]
    special = launcher.special(high, reads, every) if bits & 15 or high >> 31 else None
    device = x.get_device()
    key = (
        name, "all_reduce", device, workspace.rank, workspace.world_size, workspace.most, x.dtype, weight.dtype,
        given.out.dtype, width, padded, epsilon, offset, x_unit, residual_unit, given.group, given.ue8m0, special,
    )  # fmt: skip
    if launcher.again(key, device, addresses, numbers):
        return
    item = x.element_size()
    chunk, warps = shape(width, item, given.group)
    zeros = tuning.power_of_two(padded - width) if padded > width else 0
    constants = (
        workspace.world_size, workspace.rank, workspace.most, workspace.row_bytes // item,
        width, epsilon, offset, x_unit, residual_unit, mode, given.group, given.largest, given.ue8m0,
        kept, padded, zeros, chunk,
    )  # fmt: skip
    launcher.first(all_reduce_row_norm, key, every, numbers, constants, rows=1, sides=1, warps=warps)


def shape(width: int, item: int, group: int) -> tuple[int, int]:
    """Columns of a chunk and warps of a program: a thread makes one 16-byte access per rank and chunk. Nobody has tuned it.

    A row comes in one chunk up to 16 KiB, as every chunk waits for its peers anew. Compiled for sm90, nothing spills for
    4 ranks and 7168 columns of 16 bits; for 8 ranks, 45 registers do, which hold what is not needed while waiting.

    Args:
        width: of a row.
        item: bytes of an element.
        group: columns per scale, 0 without groups.
    """
    chunk = max(min(tuning.power_of_two(width), _CHUNK_BYTES // item), group)
    return chunk, max(1, chunk * item // (32 * 16))
