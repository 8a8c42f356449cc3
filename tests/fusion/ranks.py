"""Real ranks for tests: one process each, joined by gloo, whose failures all come back with their tracebacks."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = 300.0
"""Seconds that the ranks have in all."""

GRACE = 3.0
"""Seconds that the other ranks have once one has failed: most of them wait for it in a collective."""


class RanksFailedError(AssertionError):
    """What went wrong on which rank."""


def run_on_ranks(
    function: Callable[..., Any], size: int, *args: Any, timeout: float = TIMEOUT, backend: str = "gloo"
) -> list[Any]:
    """Call `function(rank, *args)` in `size` new processes that are a process group, each on one thread.

    Args:
        function: at the top of a module, since the processes import it.
        size: how many ranks.
        args: passed on; they are pickled, as is what the function returns.
        backend: of the group. With NCCL, each rank has the GPU of its number.
        timeout: seconds that all have together; whoever is not done then is killed.

    Returns:
        What each rank returned, in their order.

    Raises:
        RanksFailedError: a rank raised, died or did not come to an end; with what is known of every one that failed.
    """
    on_gpus = "nccl" in backend
    # What has been imported where no GPU is seen may have noted that there is none.
    context: Any = multiprocessing.get_context("spawn" if on_gpus else "forkserver")
    with tempfile.TemporaryDirectory() as folder:
        processes, ends = [], {}
        for rank in range(size):
            mine, theirs = context.Pipe(duplex=False)
            with nullcontext() if on_gpus else _hidden_gpus():
                given = (function, rank, size, Path(folder) / "store", theirs, args, backend, dict(os.environ))
                process = context.Process(target=_rank, args=given, daemon=True)
                process.start()
            theirs.close()
            processes.append(process)
            ends[mine] = rank
        problems: dict[int, str] = {0: "was not awaited"}
        try:
            answers, problems = _collect(ends, processes, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.join(0 if problems else GRACE)
                process.kill()
                process.join()
    if problems:
        raise RanksFailedError("\n".join(f"rank {rank} of {size}: {said}" for rank, said in sorted(problems.items())))
    return [answers[rank] for rank in range(size)]


@contextmanager
def _hidden_gpus() -> Iterator[None]:
    """What starts meanwhile sees no GPU: gloo's ranks are on the CPU."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def _collect(ends: dict[Any, int], processes: list[Any], until: float) -> tuple[dict[int, Any], dict[int, str]]:
    """What the ranks return, and what went wrong."""
    answers: dict[int, Any] = {}
    problems: dict[int, str] = {}
    while ends:
        ready = wait(list(ends), timeout=max(0.0, until - time.monotonic()))
        if not ready:
            problems |= dict.fromkeys(ends.values(), "did not come to an end in time, and was killed")
            break
        for end in ready:
            said: Any
            rank = ends.pop(end)
            try:
                done, said = end.recv()
            except EOFError:
                processes[rank].join()
                done, said = False, f"died with exit code {processes[rank].exitcode}"
            (answers if done else problems)[rank] = said
        if problems:
            until = min(until, time.monotonic() + GRACE)
    return answers, problems


def _rank(
    function: Callable[..., Any], rank: int, size: int, store: Path, end: Connection, args: tuple[Any, ...],
    backend: str, environment: dict[str, str],
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # As torchrun sets them: transformers makes its mesh from these.
    os.environ.clear()
    os.environ |= environment | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    try:
        if "nccl" in backend:
            torch.cuda.set_device(rank)
        dist.init_process_group(
            backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=180)
        )
        end.send((True, function(rank, *args)))
        if dist.is_initialized():
            # Others may still be in a collective with this one.
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        end.send((False, traceback.format_exc()))
        os._exit(1)
