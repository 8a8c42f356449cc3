"""How long a call takes: on a GPU by replaying CUDA graphs, on a CPU by the clock; peers take turns in every round.

A graph holds one call for each set of inputs, over and over until it is long, so that launching it does not count.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from attrs import frozen
from torch import Tensor

from .peers import Call, InPlace
from .rank_group import rank_group

Results = tuple[Tensor, ...]

SHORTEST_GRAPH_US = 400.0
"""A graph should last this long at least: its own launch takes some microseconds."""
MOST_CALLS = 384
"""In one graph."""
_FASTEST_CALL_US, _FASTEST_ALL_REDUCE_US = 1.3, 4.0
_FASTEST_BYTES_PER_US = 8e6
"""More than any GPU of 2026 moves; it only decides how often a graph repeats its sets."""

CPU_SECONDS = 6.0
"""Rounds on a CPU end after this long, once there are a few."""
FEWEST_ROUNDS = 5


@frozen(kw_only=True)
class Timing:
    """Microseconds per call over all rounds."""

    us: float
    "The median."
    low: float
    "The first quartile."
    high: float
    "The third quartile."
    rounds: int
    calls: int
    "In one round."


def summary(samples: Sequence[float], calls: int) -> Timing:
    """Of one sample of microseconds per call for each round."""
    several = samples if len(samples) > 1 else [*samples] * 2
    low, middle, high = statistics.quantiles(several, n=4, method="inclusive")
    return Timing(us=middle, low=low, high=high, rounds=len(samples), calls=calls)


def repeats_for(sets: int, moved: int) -> int:
    """How often a graph goes through all sets of inputs; `moved` is the bytes that one call moves."""
    fastest = _FASTEST_CALL_US if rank_group().size == 1 else _FASTEST_ALL_REDUCE_US
    once = sets * max(fastest, moved / _FASTEST_BYTES_PER_US)
    return max(1, min(round(SHORTEST_GRAPH_US / once + 0.5), MOST_CALLS // sets))


def least(call: Callable[[], object], number: int, repeats: int = 9) -> float:
    """Microseconds of the host per call, the least of some repeats: what else runs on the machine only adds."""
    return min(timeit.repeat(call, number=number, repeat=repeats)) / number * 1e6


@contextmanager
def _uncollected() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Graph:
    """A peer's calls as a CUDA graph.

    `results` holds, for every set, what the latest replay wrote. `checked` is the graph whose results are checked: this
    one, but for calls in place.
    """

    def __init__(self, calls: Sequence[Call], repeats: int) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compilation and tuning, which must not happen during the capture
            for _ in range(3):
                for call in calls:
                    call()
        stream.synchronize()
        self.calls = len(calls) * repeats
        self._in_place = [call for call in calls if isinstance(call, InPlace)]
        self._graph = torch.cuda.CUDAGraph()
        # Other threads go on while this one captures, as NCCL's do, and the compiler's; what is collected may unload a kernel.
        gc.collect()
        with _uncollected(), torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            # Kept, so that each set has results of its own; those of the repetitions take turns in freed memory.
            self.results: list[Results] = [call() for call in calls]
            for _ in range(repeats - 1):
                for call in calls:
                    call()
        # Calls that write over their inputs are right once, not when repeated.
        self.checked: Graph = Graph(calls, 1) if self._in_place and repeats > 1 else self

    def start(self) -> None:
        """Replay it for the first time. Ranks come here once all of them have captured theirs."""
        for graph in dict.fromkeys((self, self.checked)):  # in the same order on all ranks
            graph.replay()
        torch.cuda.synchronize()

    def write_anew(self) -> None:
        """Queue what fills all results from the inputs as they were made."""
        for call in self._in_place:
            call.restore()
        self.replay()

    def replay(self) -> None:
        """Queue all calls once more."""
        self._graph.replay()


def time_graphs(graphs: Mapping[str, Graph], rounds: int) -> dict[str, Timing]:
    """All graphs in every round, in an order of its own, so that what drifts hits all alike.

    Several ranks replay them in the same order and line up before each; the slowest rank's time counts.
    """
    order, shuffle = list(graphs), random.Random(0).shuffle
    if not order:
        return {}
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in order}
    for _ in range(rounds):
        shuffle(order)
        # Untimed: while this one runs, the host gets ahead, and no graph waits for its launch.
        graphs[order[-1]].replay()
        for name in order:
            rank_group().line_up()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graphs[name].replay()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    samples = {
        name: [start.elapsed_time(end) * 1e3 / graphs[name].calls for start, end in pairs]
        for name, pairs in events.items()
    }
    return {name: summary(taken, graphs[name].calls) for name, taken in rank_group().slowest(samples).items()}


def time_calls(peers: Mapping[str, Sequence[Call]], rounds: int, seconds: float = CPU_SECONDS) -> dict[str, Timing]:
    """On a CPU: all sets of every peer in each round, by the clock; on several ranks as `time_graphs`."""
    order, shuffle = list(peers), random.Random(0).shuffle
    samples: dict[str, list[float]] = {name: [] for name in order}
    begun = time.perf_counter()
    for done in range(rounds):
        if done >= min(FEWEST_ROUNDS, rounds) and any(rank_group().gather(time.perf_counter() - begun > seconds)):
            break
        shuffle(order)
        for name in order:
            calls = peers[name]
            rank_group().line_up()
            start = time.perf_counter()
            for call in calls:
                call()
            samples[name].append((time.perf_counter() - start) * 1e6 / len(calls))
    return {name: summary(taken, len(peers[name])) for name, taken in rank_group().slowest(samples).items()}


def time_host(
    peers: Mapping[str, Call], synchronize: Callable[[], None], rounds: int = 20, calls: int = 50
) -> dict[str, Timing]:
    """What one call costs the host, launches included, while the device has less to do than the host."""
    samples: dict[str, list[float]] = {name: [] for name in peers}
    for call in peers.values():
        for _ in range(calls):
            call()
        synchronize()
    for _ in range(rounds):
        for name, call in peers.items():
            start = time.perf_counter()
            for _ in range(calls):
                call()
            samples[name].append((time.perf_counter() - start) * 1e6 / calls)
            synchronize()
    return {name: summary(taken, calls) for name, taken in samples.items()}
