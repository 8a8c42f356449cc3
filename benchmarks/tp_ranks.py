"""The processes of a benchmark over several GPUs: the script starts itself once per rank, and nothing waits for ever.

What ranks say to each other goes through torch.distributed's store and no GPU, so that a rank can say that its GPU has failed.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = timedelta(seconds=120)
"""How long a rank waits for what the others say, and a collective for the ranks that it needs."""
GRACE = 8.0
"""Seconds that the other ranks have once one has failed."""
_RANK, _SIZE, _PORT = "RANK", "WORLD_SIZE", "LAYERFUSE_BENCHMARK_PORT"
_UNSAID = {
    # Not every machine has multicast, and where it half works it ends in errors.
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
}


def start(size: int, seconds: float) -> int:
    """Run this script, as it was called, once per rank. Returns the exit code: 0 if every rank's is.

    Args:
        size: how many ranks.
        seconds: whoever has not ended by then is killed.
    """
    # The ranks meet here; it outlives them, so that none loses what another has said.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes: list[subprocess.Popen[bytes]] = []
    until, failed = time.monotonic() + seconds, 0
    try:
        for rank in range(size):
            said = {
                _RANK: str(rank),
                _SIZE: str(size),
                _PORT: str(store.port),
                "LAYERFUSE_BENCHMARK_SECONDS": str(int(seconds)),
            }
            processes.append(subprocess.Popen([sys.executable, *sys.argv], env={**_UNSAID, **os.environ, **said}))
        while any(process.poll() is None for process in processes):
            if not failed:
                failed = next((process.returncode for process in processes if process.returncode), 0)
                until = min(until, time.monotonic() + GRACE) if failed else until
            if time.monotonic() > until:
                late = [str(rank) for rank, process in enumerate(processes) if process.poll() is None]
                print(f"rank {', '.join(late)} did not end in time, and is killed", flush=True)
                return failed or 124
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return next((process.returncode for process in processes if process.returncode), 0)


def is_rank() -> bool:
    """Whether this process is one that `start` started."""
    return _PORT in os.environ


class PartlyFailedError(RuntimeError):
    """Something failed on some ranks and not on others, which may now wait for them on their GPUs: nothing can go on."""


class Ranks:
    """The ranks, seen from one of them.

    Args:
        device: cuda (NCCL, one GPU each) or cpu (gloo).
    """

    def __init__(self, device: str) -> None:
        self.rank, self.size = int(os.environ[_RANK]), int(os.environ[_SIZE])
        # Should the process that started this one be gone.
        signal.alarm(int(os.environ["LAYERFUSE_BENCHMARK_SECONDS"]) + 30)
        self.device = torch.device(device, self.rank) if device == "cuda" else torch.device(device)
        if device == "cuda":
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)
        self.store = dist.TCPStore("127.0.0.1", int(os.environ[_PORT]), is_master=False, timeout=PATIENCE)
        library = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(library, store=self.store, rank=self.rank, world_size=self.size, timeout=PATIENCE)
        # A group of its own: what is captured in graphs and what is not share no communicator.
        self._lines = dist.new_group(timeout=PATIENCE)
        self._token = torch.zeros(1, device=self.device)
        self._asked = 0
        self.group = str(dist.group.WORLD.group_name)

    def say(self, text: str) -> None:
        """Print, on one rank."""
        if self.rank == 0:
            print(text, flush=True)

    def gather(self, value: Any, patience: timedelta = PATIENCE) -> list[Any]:
        """What each rank says, in their order. All ranks make this call."""
        keys = [f"layerfuse/benchmark/{self._asked}/{rank}" for rank in range(self.size)]
        self._asked += 1
        self.store.set(keys[self.rank], pickle.dumps(value))
        self.store.wait(keys, patience)
        return [pickle.loads(self.store.get(key)) for key in keys]

    def line_up(self) -> None:
        """On a GPU, queue what ends at about the same time on all ranks, late enough for the host to queue more behind it."""
        if self.device.type == "cuda":
            torch.cuda._sleep(400_000)
        dist.all_reduce(self._token, group=self._lines)

    def attempt(self, what: str, function: Callable[[], Any]) -> tuple[Any, str | None]:
        """A call's result, or why it failed: on all ranks.

        Raises:
            PartlyFailedError: it failed on some only.
        """
        result, problem = None, None
        try:
            result = function()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        except Exception as error:  # what is tried may fail in any way, and the others wait to hear of it
            traceback.print_exc()
            lines = str(error).strip().splitlines() or [""]
            problem = f"{type(error).__name__}: {lines[0][:300]}"
        # The others may wait for this rank on their GPUs, or still compile.
        problems = self.gather(problem, PATIENCE if problem is None else PATIENCE / 3)
        failed = [f"rank {rank}: {said}" for rank, said in enumerate(problems) if said]
        if len(failed) == self.size:
            return None, problems[0]
        if failed:
            raise PartlyFailedError(f"{what}: {'; '.join(failed)}")
        return result, None

    def end(self, code: int) -> None:
        """Leave together. No group is destroyed: NCCL waits for graphs that hold its kernels."""
        self.gather(None)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
