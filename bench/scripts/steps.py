"""How long a step of an engine takes and which kernels it runs, for the probes that live inside of engines."""

from __future__ import annotations

import cProfile
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ON_GPU = torch.cuda.is_available()


def timed(step: Callable[[], Any], warm: int, rounds: int, each: int) -> list[float]:
    """Microseconds of one step, once for each round: a GPU's, or by the clock where there is none."""
    for _ in range(warm):
        step()
    found = []
    for _ in range(rounds):
        if not ON_GPU:
            began = time.perf_counter()
            for _ in range(each):
                step()
            found.append((time.perf_counter() - began) * 1e6 / each)
            continue
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(each):
            step()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1000 / each)
    return found


def kernels(seen: Any, times: int) -> dict[str, list[float]]:
    """Kernel -> launches and microseconds that torch's profiler saw, divided by so many times; torch's ops where there is no GPU."""
    kind = torch.autograd.DeviceType.CUDA if ON_GPU else torch.autograd.DeviceType.CPU
    counts: Counter[str] = Counter()
    took: Counter[str] = Counter()
    for event in seen.events():
        if event.device_type == kind and not event.name.startswith(("Memcpy", "Memset")):
            counts[event.name[:160]] += 1
            took[event.name[:160]] += event.time_range.elapsed_us()
    return {name: [count / times, round(took[name] / times, 2)] for name, count in counts.items()}


def calls(counts: cProfile.Profile, times: int) -> dict[str, list[float]]:
    """Function -> calls and microseconds in itself, with what the profiler adds, divided by so many times."""
    found: dict[str, list[float]] = {}
    for each in counts.getstats():
        what = each.code
        name = what[-60:] if isinstance(what, str) else f"{Path(what.co_filename).name}:{what.co_qualname}"
        known = found.setdefault(name, [0.0, 0.0])
        known[0] += each.callcount / times
        known[1] += each.inlinetime * 1e6 / times
    return found


def one_configuration(package: str) -> None:
    """Leave the kernels of a delta net's prefill no choice.

    Each engine would compile some 90 configurations first, and two engines could choose two, which add in different orders.
    """
    import triton

    for name, module in list(sys.modules.items()):
        for each in list(vars(module).values()) if name.startswith(package) else ():
            kernel = each
            while isinstance(kernel, (triton.runtime.Heuristics, triton.runtime.Autotuner)):
                if isinstance(kernel, triton.runtime.Autotuner):
                    kernel.configs = kernel.configs[:1]
                kernel = kernel.fn
