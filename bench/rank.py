"""One process of `ranks.Ranks`: joins the others, then does what it is told until its pipe closes.

`python -m layerfuse.bench.rank PIPE RANK SIZE DEVICE PORT`, started by `Ranks` alone.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import sys
import threading
import traceback
import warnings
from multiprocessing.connection import Connection
from typing import Any

from ..adapters.errors import LayerfuseError


def main() -> None:
    """Answer each `(function, arguments)` with `("done", value)`, or with `("failed", traceback, error)`."""
    pipe, rank, size, device, port = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this one ends it
    end = Connection(int(pipe))
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(end, told), daemon=True).start()
    try:
        _join(int(rank), int(size), device, int(port))
    except BaseException:
        _fail(end)
        os._exit(1)
    end.send(("done", None))
    while True:
        work = told.get()
        try:
            function, arguments, wants_steps = pickle.loads(work)
            more = {"step": lambda doing, total: end.send(("step", doing, total))} if wants_steps else {}
            end.send(("done", function(*arguments, **more)))
        except BaseException:
            _fail(end)


def _listen(end: Connection, told: queue.SimpleQueue[Any]) -> None:
    """A process whose starter is gone ends at once, whatever it is waiting for."""
    while True:
        try:
            told.put(end.recv_bytes())
        except (EOFError, OSError):
            os._exit(1)


def _fail(end: Connection) -> None:
    error = sys.exc_info()[1]
    try:
        end.send(("failed", traceback.format_exc(), error if isinstance(error, LayerfuseError) else None))
    except Exception:  # an error that cannot be pickled
        end.send(("failed", traceback.format_exc(), None))


def _join(rank: int, size: int, device: str, port: int) -> None:
    import torch
    import torch.distributed as dist

    from .rank_group import PATIENCE, RankGroup, join

    warnings.filterwarnings("ignore", module=r"(torch|triton)\b")
    here = torch.device(device, rank) if device == "cuda" else torch.device(device)
    more: dict[str, Any] = {}
    if device == "cuda":
        torch.cuda.set_device(here)
        more["device_id"] = here
    else:
        torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=PATIENCE)
    library = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(library, store=store, rank=rank, world_size=size, timeout=PATIENCE, **more)
    join(RankGroup(store, rank, size, here))


if __name__ == "__main__":
    main()
