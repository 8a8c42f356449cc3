"""How long a step of an engine takes and which kernels it runs, for the probes that live inside of engines."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
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
