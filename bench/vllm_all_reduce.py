"""vLLM's custom all-reduce from its compiled library alone: CUDA IPC between the GPUs of one host, without multicast.

As vLLM uses it: buffers of a captured graph are registered with all ranks after the capture, so nothing is copied before it. What is
called outside of a graph is copied into a registered buffer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .against import VLLM
from .inputs import Work
from .peers import RefusedError, Setting, needs_gpu
from .rank_group import RankError, team
from .reducers import Reducer, Reduction, copies_in, parts_of, pitch_of
from .vllm_peer import library_of, version_of, why_not_loaded

LARGEST = 8 << 20
"""Bytes from which vLLM takes NCCL instead (`CustomAllreduce.max_size`)."""
WORLD_SIZES = (2, 4, 6, 8)
_ARENA_BYTES = 192 << 20
"""Of all sets together: `FEWEST_SETS` of the largest, or many small ones."""
_RANK_DATA_BYTES = 64 << 20
"""For the addresses of every call in every graph of a process: 128 bytes each."""


def _ops() -> Any:
    return torch.ops._C_custom_ar


class _Communicator:
    """This rank's side of it. One for a process, as what ranks have mapped is never unmapped."""

    def __init__(self) -> None:
        me = team()
        device = torch.device("cuda", torch.cuda.current_device())
        self._meta = self._shared(_ops().meta_size() + LARGEST)
        self._buffers = self._shared(LARGEST)
        self._rank_data = torch.empty(_RANK_DATA_BYTES, dtype=torch.uint8, device=device)
        # Freed memory may not come back at an address that others have mapped: what is reduced stays here.
        self.arena = torch.empty(_ARENA_BYTES, dtype=torch.uint8, device=device)
        peers = [rank for rank in range(me.size) if rank != me.rank]
        near = all(torch.cuda.can_device_access_peer(me.rank, rank) for rank in peers)
        connected = all(me.gather(near))

        def start() -> int:
            made: int = _ops().init_custom_ar(self._meta, self._rank_data, me.rank, connected)
            _ops().register_buffer(made, self._buffers)
            return made

        self._pointer = me.together(start)[me.rank]

    @staticmethod
    def _shared(size: int) -> list[int]:
        """Memory of every rank, by its address in this process."""
        me = team()

        def allocate() -> tuple[int, list[int]]:
            pointer, handle = _ops().allocate_shared_buffer_and_handle(size)
            return pointer, handle.tolist()

        every = me.together(allocate)

        def opened() -> list[int]:
            return [
                pointer if rank == me.rank else _ops().open_mem_handle(torch.tensor(handle, dtype=torch.uint8))
                for rank, (pointer, handle) in enumerate(every)
            ]

        return me.together(opened)[me.rank]

    def reduce(self, part: Tensor, total: Tensor) -> None:
        if torch.cuda.is_current_stream_capturing():
            _ops().all_reduce(self._pointer, part, total, 0, 0)
        else:
            _ops().all_reduce(self._pointer, part, total, self._buffers[team().rank], LARGEST)

    def register_captured(self) -> None:
        """Tell each other where the inputs of the graph lie that was captured last."""
        every = team().together(lambda: tuple(map(list, _ops().get_graph_buffer_ipc_meta(self._pointer))))
        handles, offsets = [handle for handle, _ in every], [offset for _, offset in every]
        team().together(lambda: _ops().register_graph_buffers(self._pointer, handles, offsets))


_made: list[_Communicator | str] = []
"""The communicator, or why there is none."""


def _communicator() -> _Communicator:
    """Set up on the first call, by all ranks together."""
    if not _made:
        try:
            with torch.inference_mode(False):
                _made.append(_Communicator())
        except RankError as error:
            _made.append(str(error))
    (found,) = _made
    if isinstance(found, str):
        raise RefusedError(f"its communicator could not be set up: {found}")
    return found


def _reductions(work: Work, _: Setting) -> Sequence[Reduction]:
    parts = parts_of(work)
    size = parts[0].numel() * parts[0].element_size()
    if size >= LARGEST:
        raise RefusedError(f"vLLM takes its custom all-reduce for less than {LARGEST >> 20} MiB, not for {size} bytes")
    if pitch_of(parts[0]) * parts[0].element_size() * len(parts) > _ARENA_BYTES:
        raise RefusedError(f"{len(parts)} sets of {size} bytes are more than what is kept for it")
    found = _communicator()
    return [_reduction(found.reduce, part) for part in copies_in(found.arena.view(work.dtype), parts)]


def _reduction(reduce: Callable[[Tensor, Tensor], None], part: Tensor) -> Reduction:
    total = torch.empty_like(part)
    return Reduction(part=part, total=total, run=functools.partial(reduce, part, total))


def _why_not(setting: Setting) -> str | None:
    said = needs_gpu(setting)
    if said is None and team().size not in WORLD_SIZES:
        said = f"vLLM's custom all-reduce is for {', '.join(map(str, WORLD_SIZES))} ranks, not for {team().size}"
    if said is None and setting.case.width_of(setting.case.form.op.rows[0].name) % 8:
        said = "vLLM's custom all-reduce takes whole vectors of 16 bytes"
    said = said or why_not_loaded(setting)
    if said is None and not hasattr(torch.ops._C_custom_ar, "init_custom_ar"):
        said = "the library holds no custom all-reduce"
    return said


def vllm_reducer() -> Reducer:
    """The all-reduce of vLLM."""
    return Reducer(
        name=VLLM,
        about="vLLM's custom all-reduce, on buffers that are registered once the graph is captured, as vLLM has it",
        why_not=_why_not,
        make=_reductions,
        captured=lambda: _communicator().register_captured(),
        version=lambda setting: version_of(library_of(setting.vllm)),
    )
