"""Processes that measure together, one per GPU, started once for any number of measurements.

A rank that fails, dies or falls silent ends all of them, and what is known of it is the error: nothing waits for ever.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import wait
from types import NoneType
from typing import Any

from ..adapters.arguments import check_counts, expect
from ..adapters.errors import LayerfuseError, shown
from .errors import BenchError, CannotMeasureError
from .rank_group import RankError

SILENCE = 300.0
"""Seconds that a rank may say nothing for: every step that it begins is a word."""
GRACE = 5.0
"""Seconds that the other ranks have once one has failed: most of them wait for it."""
MOST = 8
"""Ranks, unless more are asked for: the GPUs of one host."""

_UNSAID = {
    # Multicast is off: not every machine has it, and where it half works it ends in errors.
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    # One kernel at a time is compiled; a pool of compilers for each rank takes longer to start.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}
"""Environment variables of the processes, where they are not set already."""


class Ranks:
    """Processes that are one process group: NCCL's over GPUs, gloo's on a CPU. `with` starts them, else their first call.

    with bench.Ranks(2) as ranks:
        for width in (2880, 7168):
            result = bench.run("all_reduce_add_rms_norm", widths=[width], ranks=ranks)
    """

    def __init__(self, size: int | None = None, device: str | None = None) -> None:
        """Choose how many and where.

        Args:
            size: how many; all GPUs of this machine (8 at most) if not given, and two on a CPU.
            device: cuda or cpu; the GPUs if there are any.

        Raises:
            BenchError: fewer than two, or more than this machine has GPUs.
            CannotMeasureError: torch is missing, or was built without torch.distributed.
        """
        self.size, self.device = ranks_for(size, device)
        self.started = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ends: list[Any] = []

    def _start(self) -> None:
        import torch.distributed as dist

        self.started = True
        # The ranks meet here; it outlives them, so that none loses what another has said.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        paths = os.pathsep.join(filter(None, [os.getcwd() if path == "" else path for path in sys.path]))
        environment = {**_UNSAID, **os.environ, "PYTHONPATH": paths}
        try:
            for rank in range(self.size):
                mine, theirs = Pipe()
                given = [theirs.fileno(), rank, self.size, self.device, self._store.port]
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", f"{__package__}.rank", *map(str, given)],
                        env=environment,
                        pass_fds=[theirs.fileno()],
                        stdin=subprocess.DEVNULL,
                        stdout=2,
                    )
                )
                theirs.close()
                self._ends.append(mine)
            self._collect("starting", lambda _doing, _total: None)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Ranks:
        if not self.started:
            self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether they can still be asked."""
        return bool(self._ends)

    def close(self) -> None:
        """End them."""
        for end in self._ends:
            end.close()
        self._ends = []
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes = []

    def call(
        self, function: Callable[..., Any], *arguments: Any, step: Callable[[str, int], None] | None = None
    ) -> list[Any]:
        """Call a function on every rank.

        Args:
            function: at the top of a module that the ranks can import; with `step`, it takes that too.
            arguments: passed on; they are pickled, as is what the function returns.
            step: told of what the first rank tells its own.

        Returns:
            What each rank returned, in their order.

        Raises:
            LayerfuseError: as a rank raised it, if all did.
            RankError: a rank could not join, raised something else, died, or said nothing for `SILENCE`; all of them are
                ended.
        """
        if not self.started:
            self._start()
        if not self.alive:
            raise RankError("these ranks have ended")
        work = pickle.dumps((function, arguments, step is not None))
        try:
            for end in self._ends:
                end.send_bytes(work)
            return self._collect("working", step or (lambda _doing, _total: None))
        except _SameOnAllError as error:
            raise error.error from None
        except BaseException:
            self.close()
            raise

    def _collect(self, begun: str, step: Callable[[str, int], None]) -> list[Any]:
        waiting = dict(enumerate(self._ends))
        ranks = {end: rank for rank, end in waiting.items()}
        answers: dict[int, Any] = {}
        problems: dict[int, str] = {}
        errors: list[LayerfuseError | None] = []
        doing = [begun] * self.size
        until = [time.monotonic() + SILENCE] * self.size
        last = float("inf")
        while waiting:
            ready = wait(
                list(waiting.values()),
                timeout=max(0.0, min(last, *(until[rank] for rank in waiting)) - time.monotonic()),
            )
            for end in ready:
                rank = ranks[end]
                word, *said = self._heard(rank)
                until[rank] = time.monotonic() + SILENCE
                if word == "step":
                    doing[rank] = said[0]
                    if rank == 0:
                        step(*said)
                    continue
                del waiting[rank]
                if word == "done":
                    answers[rank] = said[0]
                else:
                    problems[rank] = f"{doing[rank]}: {said[0]}"
                    errors.append(said[1])
            if problems:
                last = min(last, time.monotonic() + GRACE)
            late = [rank for rank in waiting if time.monotonic() >= min(last, until[rank])]
            for rank in late:
                more = "once another rank had failed" if problems else f"for {SILENCE:.0f} s"
                problems[rank] = f"{doing[rank]}: nothing was heard {more}; ended"
                del waiting[rank]
        if len(errors) == self.size and errors[0] is not None and len({(type(one), str(one)) for one in errors}) == 1:
            raise _SameOnAllError(errors[0])
        if problems:
            raise RankError("\n".join(f"rank {rank} of {self.size}, {said}" for rank, said in sorted(problems.items())))
        return [answers[rank] for rank in range(self.size)]

    def _heard(self, rank: int) -> tuple[Any, ...]:
        try:
            heard: tuple[Any, ...] = self._ends[rank].recv()
        except (EOFError, OSError):
            try:
                code: int | None = self._processes[rank].wait(GRACE)
            except subprocess.TimeoutExpired:
                code = None
            heard = ("failed", f"it died with exit code {code}", None)
        return heard


class _SameOnAllError(Exception):
    """All ranks say that the question is wrong, and are ready for another."""

    def __init__(self, error: LayerfuseError) -> None:
        self.error = error
        super().__init__(error)


def need_torch() -> Any:
    """The module torch.

    Raises:
        CannotMeasureError: it is missing, or something that it needs.
    """
    try:
        import torch
        import torch._dynamo
    except ModuleNotFoundError as error:
        raise CannotMeasureError(
            f"{error.name} is not installed; pip install torch, or pip install '.[torch]' in a checkout of layerfuse"
        ) from None
    return torch


def ranks_for(size: int | None, device: str | None) -> tuple[int, str]:
    """How many ranks there are to be, and on which kind of device.

    Raises:
        BenchError: fewer than two, or more than this machine has GPUs.
        CannotMeasureError: torch is missing, or was built without torch.distributed.
    """
    expect("device", device, (str, NoneType), "cuda or cpu")
    if size is not None:
        check_counts(size=size)
    torch = need_torch()
    if not torch.distributed.is_available():
        raise CannotMeasureError("this torch was built without torch.distributed")
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = device or ("cuda" if there else "cpu")
    if device not in ("cpu", "cuda"):
        raise BenchError(f"device must be cuda or cpu, got {shown(device)}")
    asked, size = size, size or (min(there, MOST) if device == "cuda" else 2)
    if device == "cuda" and not 2 <= size <= there:
        wanted = "" if asked is None else f": {asked} are asked for"
        raise BenchError(
            f"an all-reduce is measured on 2 or more GPUs, one rank each{wanted}, and torch finds {there}; device cpu takes "
            "processes instead"
        )
    if size < 2:
        raise BenchError(f"an all-reduce is measured on 2 or more ranks, got {size}")
    return size, device
