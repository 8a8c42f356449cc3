"""FlashInfer's fused all-reduce, called from its compiled library alone: FlashInfer's Python is neither imported nor needed.

The library is FlashInfer's trtllm_allreduce_fusion.cu, built alone or as the trtllm_comm.so that FlashInfer compiles on first
use; tvm_ffi loads it. Ranks exchange rows through memory that is set up here as its kernels read it, without multicast.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LIBRARIES = ("trtllm_allreduce_fusion*.so", "trtllm_comm.so")
"""What a folder may hold, the first choice first."""
ONE_SHOT_MIB = {2: 512, 4: 64, 8: 42}
"""FlashInfer's own rule (0.6.14, comm/trtllm_ar.py): ranks -> the most MiB of tokens * hidden * 2 * ranks * itemsize in one shot."""
FLAGS = 256
"""Barrier flags of each rank, kBarrierFlagCount in comm/trtllm_allreduce_fusion.cuh."""
LARGEST_SLOT = (1 << 30) - (1 << 21)
"""Bytes of a one-shot slot: the kernels keep the place of the third in an int. FlashInfer allows twice this, and its rule no half."""
NEGATIVE_ZERO = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
"""The integers whose smallest value has the bits of -0.0, which marks in a slot what has not come yet."""
PATTERNS = {
    (False, False, True): 1, (True, False, False): 2, (True, False, True): 4, (False, True, False): 8, (False, True, True): 9,
}  # fmt: skip
"""Whether a scale is given, groups have theirs, and the norm is wanted -> FlashInfer's AllReduceFusionPattern."""


def library(path: Path) -> Path | None:
    """The library at a path or in a folder, or None."""
    if path.is_file():
        return path
    return next((file for pattern in LIBRARIES for file in sorted(path.glob(pattern))), None)


def why_not(path: Path | None) -> str | None:
    """Why the library cannot be called, or None; loads it, and asks no other rank."""
    found = None if path is None else library(path)
    if found is None:
        where = "no library is given" if path is None else f"{path.name} holds none of them"
        return f"FlashInfer's all-reduce is compiled code ({' or '.join(LIBRARIES)}), and {where}"
    if importlib.util.find_spec("tvm_ffi") is None:
        return "tvm_ffi is not installed (pip install apache-tvm-ffi)"
    try:
        _function(found)
    except Exception as error:  # the loader's own words: no libcudart, another tvm_ffi, no such function
        return f"{found.name} cannot be loaded: {str(error).partition(chr(10))[0]}"[:300]
    return None


def refuses(world_size: int, hidden: int, dtype: torch.dtype) -> str | None:
    """Why its kernels do not take such rows, or None."""
    if dtype not in NEGATIVE_ZERO:
        return f"its kernels take bf16, fp16 and fp32, not {dtype}"
    if world_size not in ONE_SHOT_MIB:
        return f"it says for {', '.join(map(str, ONE_SHOT_MIB))} ranks when it takes one shot, not for {world_size}"
    return f"a row of {hidden} {dtype} is no multiple of 16 bytes" if hidden * dtype.itemsize % 16 else None


@functools.cache
def _function(found: Path) -> Any:
    return importlib.import_module("tvm_ffi").load_module(str(found)).trtllm_allreduce_fusion


class FusedAllReduce:
    """One rank's side, for rows of one width and dtype. Every rank makes it together, and makes the same calls in the same order.

    With `pdl`, residual and weight are read before the kernel just ahead in the stream has ended, if that one too lets others
    start early: it must not be the one that writes them.

    Args:
        path: the library, or a folder that holds it.
        group: the ranks, GPUs of one host.
        most: tokens of the largest call.
        hidden: columns of a row.
        dtype: of rows and weights.
        device: this rank's.
        pdl: programmatic dependent launch, as vLLM uses it; completion is signalled at the kernel's end.
        fp32_acc: whether the ranks' rows are added up in float32; FlashInfer's default is not to.
        one_shot: True or False, or None for FlashInfer's own choice by size.

    Raises:
        ValueError: why_not or refuses has a reason.
    """

    def __init__(
        self, path: Path, group: dist.ProcessGroup, most: int, hidden: int, dtype: torch.dtype, device: torch.device, *,
        pdl: bool = True, fp32_acc: bool = False, one_shot: bool | None = None,
    ) -> None:  # fmt: skip
        found = library(path)
        reason = why_not(path) or refuses(group.size(), hidden, dtype)
        if found is None or reason is not None:
            raise ValueError(reason)
        self._function, self._ranks, self._rank = _function(found), group.size(), group.rank()
        self._shape, self._dtype, self._choice = (most, hidden), dtype, one_shot
        self._pdl, self._fp32 = pdl, fp32_acc and dtype != torch.float32
        self._set_up(group, device)

    def __call__(
        self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, weight_offset: float = 0.0, *,
        scale: Tensor | None = None, group_size: int | None = None, with_norm: bool = False,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Add up x over the ranks, add the residual, and norm the rounded sum. A CUDA graph may capture it.

        Args:
            x: (tokens, hidden), contiguous, this rank's part; not written.
            residual: like x, the same on all ranks; not written.
            weight: (hidden,).
            epsilon: added to the mean square.
            weight_offset: added to the weight.
            scale: float32 (1,): quantise the rounded norm by it.
            group_size: quantise each so many columns of the rounded norm by a power of two of their own.
            with_norm: return the norm where it is quantised too.

        Returns:
            New tensors: the norm and the sum. Quantised: fp8 e4m3fn, with groups their scales (see `unpacked`), the norm where
            it is asked for, the sum.

        Raises:
            ValueError: it was set up for other rows, or the forced number of shots cannot take them.
        """
        (tokens, hidden), (most, own) = x.shape, self._shape
        if tokens > most or hidden != own or residual.shape != x.shape or weight.shape != (own,):
            raise ValueError(
                f"set up for {most} rows of {own}, not for {[*x.shape]}, {[*residual.shape]}, {[*weight.shape]}"
            )
        if {x.dtype, residual.dtype, weight.dtype} != {self._dtype} or not x.is_contiguous() & residual.is_contiguous():
            raise ValueError(f"x, residual and weight should be contiguous {self._dtype}")
        quantised = scale is not None or group_size is not None
        norm = torch.empty_like(x) if with_norm or not quantised else None
        values = torch.empty_like(x, dtype=torch.float8_e4m3fn) if quantised else None
        scales, total = None, torch.empty_like(x)
        if group_size is not None:
            packs = -(-hidden // (4 * group_size))
            scales = torch.empty_strided((tokens, packs), (1, -(-tokens // 4) * 4), dtype=torch.int32, device=x.device)
        if tokens:
            self._function(
                x, self._ranks, self._rank, tokens, hidden, self._pointers, self._pdl, self._one_shot(tokens), True,
                self._fp32, PATTERNS[scale is not None, group_size is not None, norm is not None], None, residual, total,
                norm, values, scales, weight, epsilon, scale, None, group_size, weight_offset,
            )  # fmt: skip
        return tuple(each for each in (values, scales, norm, total) if each is not None)

    def _one_shot(self, tokens: int) -> bool:
        pushed = tokens * self._shape[1] * self._ranks * self._dtype.itemsize
        choice = self._choice
        if choice is None:
            choice = 2 * pushed <= ONE_SHOT_MIB[self._ranks] << 20 and pushed <= LARGEST_SLOT
        if (choice and pushed > LARGEST_SLOT) or (not choice and tokens <= self._ranks):
            raise ValueError(f"{tokens} tokens are too {'many for one shot' if choice else 'few for two shots'}")
        return choice

    def _set_up(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Two-shot buffers, flags and three one-shot slots in symmetric memory, and the kernel's own counters. Collective."""
        import torch.distributed._symmetric_memory as symmetric_memory

        (most, hidden), ranks = self._shape, self._ranks
        whole = ranks * most * hidden * self._dtype.itemsize
        slot = min(whole, LARGEST_SLOT)
        sizes = [whole, ranks * FLAGS * 4, 3 * slot]
        # torch reads it during the rendezvous; FlashInfer's kernels use unicast addresses alone.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        with torch.cuda.device(device):
            memory = symmetric_memory.empty(sum(sizes), dtype=torch.uint8, device=device)
            _, flags, slots = memory.split(sizes)
            integers = NEGATIVE_ZERO[self._dtype]
            flags.zero_()
            slots.view(integers).fill_(torch.iinfo(integers).min)
            # No rank leaves the rendezvous before all have come to it, and so have filled theirs.
            torch.cuda.synchronize()
            handle = symmetric_memory.rendezvous(memory, group.group_name)
            starts = list(handle.buffer_ptrs)
            offset = memory.data_ptr() - starts[self._rank]
            # Blocks that have come, the two-shot flag, the one-shot slot in turn, the bytes of a slot, what is to be cleared.
            counters = torch.tensor([0, 0, 0, slot, 0], dtype=torch.int32, device=device)
            places = [start + offset + at for at in (0, sizes[0], sizes[0] + sizes[1]) for start in starts]
            self._pointers = torch.tensor([*places, counters.data_ptr()], dtype=torch.int64, device=device)
            torch.cuda.synchronize()
        self._kept = (memory, handle, counters)


def unpacked(scales: Tensor, groups: int) -> Tensor:
    """Float32 (tokens, groups) from int32 (tokens, ceil(groups / 4)), which hold four exponents of two each, the first lowest."""
    exponents = (scales.unsqueeze(-1) >> torch.arange(0, 32, 8, dtype=torch.int32, device=scales.device)) & 255
    return (exponents.flatten(1)[:, :groups] << 23).contiguous().view(torch.float32)
