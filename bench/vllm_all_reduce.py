"""vLLM's custom all-reduce: CUDA IPC between the GPUs of one host, without multicast.

As vLLM uses it: buffers of a captured graph are registered with all ranks after the capture, so nothing is copied before it. What is
called outside of a graph is copied into a registered buffer.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .against import VLLM
from .environment import version_of
from .inputs import Work
from .peers import RefusedError, Setting, needs_gpu
from .rank_group import rank_group
from .reducers import Reducer, Reduction, copies_in, parts_of, pitch_of
from .thirdparty import why_not_imported
from .vllm_peer import VLLM_OPS

LARGEST = 8 << 20
"""Bytes from which vLLM takes NCCL instead (`CustomAllreduce.max_size`)."""
WORLD_SIZES = (2, 4, 6, 8)
_ARENA_BYTES = 192 << 20
"""Of all sets together: `FEWEST_SETS` of the largest, or many small ones."""


@functools.cache
def _arena() -> Tensor:
    """Freed memory may not come back at an address that others have mapped: what is reduced stays here."""
    return torch.empty(_ARENA_BYTES, dtype=torch.uint8, device="cuda")


_group: list[Any] = []
"""A process group of gloo, as vLLM wants one."""
_latest: list[Any] = []
"""vLLM's communicator of the latest work. It has room for the addresses of some ten thousand captured calls, so each work gets its own."""


def _communicator() -> Any:
    from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce

    with torch.inference_mode(False):
        if not _group:
            _group.append(dist.new_group(backend="gloo"))
        made = CustomAllreduce(_group[0], torch.device("cuda", torch.cuda.current_device()))
    if any(rank_group().gather(made.disabled)):
        raise RefusedError("vLLM turns its custom all-reduce off here; its log says why")
    _latest[:] = [made]
    return made


def _reductions(work: Work, _: Setting) -> Sequence[Reduction]:
    parts = parts_of(work)
    size = parts[0].numel() * parts[0].element_size()
    if size >= LARGEST:
        raise RefusedError(f"vLLM takes its custom all-reduce for less than {LARGEST >> 20} MiB, not for {size} bytes")
    if pitch_of(parts[0]) * parts[0].element_size() * len(parts) > _ARENA_BYTES:
        raise RefusedError(f"{len(parts)} sets of {size} bytes are more than what is kept for it")
    made = _communicator()

    def reduce(part: Tensor, total: Tensor) -> None:
        made.all_reduce(part, out=total, registered=torch.cuda.is_current_stream_capturing())

    copies = copies_in(_arena().view(work.dtype), parts)
    totals = [torch.empty_like(part) for part in copies]
    return [
        Reduction(part=part, total=total, run=functools.partial(reduce, part, total))
        for part, total in zip(copies, totals, strict=True)
    ]


def _registered() -> None:
    """Tell all ranks where the inputs of the graph lie that was captured last."""
    _latest[0].register_graph_buffers()


def _why_not(setting: Setting) -> str | None:
    said = needs_gpu(setting)
    if said is None and rank_group().size not in WORLD_SIZES:
        said = f"vLLM's custom all-reduce is for {', '.join(map(str, WORLD_SIZES))} ranks, not for {rank_group().size}"
    if said is None and setting.case.width_of(setting.case.form.op.rows[0].name) % 8:
        said = "vLLM's custom all-reduce takes whole vectors of 16 bytes"
    return said or why_not_imported(VLLM_OPS)


def vllm_reducer() -> Reducer:
    """The all-reduce of vLLM."""
    return Reducer(
        name=VLLM,
        about="vLLM's custom all-reduce, on buffers that are registered once the graph is captured, as vLLM has it",
        why_not=_why_not,
        make=_reductions,
        captured=_registered,
        version=lambda _: version_of("vllm"),
    )
