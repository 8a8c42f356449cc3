"""Replays of a CUDA graph of fused all-reduces, every result of every replay compared, while ranks come late at random.

    python tests/fusion/symm_mem_replays.py --ranks 2 --replays 100000 [--shots 1] [--save]

A rank is a process with a GPU. The graph holds pairs of calls with changing numbers of rows. Before each pair, a kernel waits for a
time of its own on each rank and replay; the second call adds to what the first gave, with nothing between them. Inputs take
turns, so that what an earlier call left behind is no right answer.
Between replays come eager calls with other numbers of rows. The residual is compared bit by bit with the float32 sum in the
order of ranks, the norm within one step of bfloat16. The comparison is part of the graph: it counts what is wrong.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import symm_mem_replays  # by its name: ranks import what they call
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from layerfuse.bench.files import save
from layerfuse.bench.ranks import Ranks
from layerfuse.fusion import FUSIONS
from layerfuse.fusion.backends.symm_mem import workspaces
from layerfuse.fusion.backends.symm_mem.crossovers import rows_at_once
from layerfuse.fusion.backends.symm_mem.functions import function_of
from layerfuse.fusion.backends.symm_mem.launch import Layout

ROWS, EAGER = (1, 33, 128, 200), (2, 64, 300)
SETS = 7
"""Of inputs. Not a multiple of the kernel's two phases."""
DELAYS = 4096
STRIDE = 50
"""Replays between two looks at the host, and between two eager calls 20 times that."""
EPSILON = 1e-6


@triton.jit
def wait(delays, turn, CALL: tl.constexpr, CALLS: tl.constexpr, MASK: tl.constexpr):
    """Spins for as long as the table says for this call of this replay."""
    left = tl.load(delays + ((tl.load(turn) * CALLS + CALL) & MASK))
    while left > 0:
        left -= 1 + 0 * tl.load(delays, volatile=True)


class Calls:
    """Inputs and right results of calls with so many rows, of each set."""

    def __init__(self, rows: int, width: int, rank: int, ranks: int) -> None:
        device = torch.device("cuda", rank)
        generator = torch.Generator(device).manual_seed(rows * 1000 + width)
        normal = partial(torch.randn, generator=generator, device=device)
        every = normal(ranks, SETS, rows, width).bfloat16()
        self.residual = normal(SETS, rows, width).bfloat16()
        self.weight = (normal(width) * 0.2 + 1).bfloat16()
        self.x = every[rank].clone()
        self.total = every[0].float()
        for part in every[1:]:
            self.total += part.float()

    def given(self, place: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's part and the residual of a set; `place` is its number, as a tensor of one."""
        return self.x.index_select(0, place)[0], self.residual.index_select(0, place)[0]

    def wrong(self, results: tuple[Tensor, Tensor], residual: Tensor, place: Tensor, shots: int) -> Tensor:
        """How many elements are wrong, as a tensor of one number. In two shots the norm reads the stream as it was stored."""
        normed, summed = results
        wide = self.total.index_select(0, place)[0] + residual.float()
        read = wide if shots == 1 else summed.float()
        scale = torch.rsqrt(read.double().square().mean(-1, keepdim=True) + EPSILON)
        right = (read.double() * scale * self.weight.double()).float()
        off = (normed.float() - right).abs() > right.abs() * 2**-8 + 1e-30
        return (off | (summed != wide.bfloat16()) | normed.isnan()).sum()


def run(given: argparse.Namespace, width: int) -> dict[str, Any]:
    """One rank."""
    group: dist.ProcessGroup = dist.group.WORLD
    rank, ranks = group.rank(), group.size()
    device, row_bytes = torch.device("cuda", rank), width * 2
    cores = torch.cuda.get_device_properties(device).multi_processor_count
    most = rows_at_once(1 << 20, row_bytes)
    layout = Layout(rank, ranks, given.shots, most, row_bytes, 2, cores)
    buffer = workspaces._buffer(layout, device)
    dist.barrier()
    workspace, like = (
        workspaces._joined(group, layout, most, buffer),
        torch.empty(1, width, dtype=torch.bfloat16, device=device),
    )
    workspaces._ready[group] = {workspaces._key(like): (workspace,)}
    dist.barrier()
    function = function_of(FUSIONS["all_reduce_add_rms_norm"].op)
    calls = {rows: Calls(rows, width, rank, ranks) for rows in (*ROWS, *EAGER)}
    delays = _delays(given.seed * 100 + rank, device)
    turn = torch.zeros(1, dtype=torch.int64, device=device)
    wrong = torch.zeros(len(calls), dtype=torch.int64, device=device)

    def pair(number: int, rows: int) -> None:
        each, places = calls[rows], [(turn + number + i) % SETS for i in range(2)]
        (x, residual), (next_x, _) = (each.given(place) for place in places)
        wait[(1,)](delays, turn, number % len(ROWS), len(ROWS), DELAYS - 1, num_warps=1)
        first = function(x, residual, each.weight, EPSILON, group.group_name, 0.0)
        second = function(next_x, first[1], each.weight, EPSILON, group.group_name, 0.0)
        wrong[number] += each.wrong(first, residual, places[0], given.shots)
        wrong[number] += each.wrong(second, first[1], places[1], given.shots)

    def whole() -> None:
        turn.add_(1)
        for number, rows in enumerate(ROWS):
            pair(number, rows)

    def between() -> None:
        for number, rows in enumerate(EAGER, len(ROWS)):
            pair(number, rows)

    whole()
    between()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        whole()
    begun, eager = time.perf_counter(), 0
    for number in range(given.replays):
        graph.replay()
        if number % STRIDE == STRIDE - 1:
            torch.cuda.synchronize()
        if number % (STRIDE * 20) == 0:
            eager += 2 * len(EAGER)
            between()
    torch.cuda.synchronize()
    return {
        "width": width, "replays": given.replays, "calls_per_replay": 2 * len(ROWS), "rows": [*ROWS, *EAGER],
        "eager_calls": eager, "wrong_elements": wrong.tolist(), "seconds": time.perf_counter() - begun,
        "buffer_empty_at_the_end": bool((workspace.owned[0] == 255).all()),
    }  # fmt: skip


def _delays(seed: int, device: torch.device) -> Tensor:
    """Most are short, some long: turns of a loop that reads memory."""
    generator = torch.Generator().manual_seed(seed)
    short = torch.randint(0, 10, (DELAYS,), generator=generator)
    long = torch.randint(0, 300, (DELAYS,), generator=generator)
    return torch.where(torch.rand(DELAYS, generator=generator) < 0.1, long, short).int().to(device)


def main() -> int:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--replays", type=int, default=100_000)
    parser.add_argument("--shots", type=int, choices=(1, 2), default=1)
    parser.add_argument("--widths", type=lambda said: [int(each) for each in said.split(",")], default=[2880, 7168])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="write its result beside the others")
    given = parser.parse_args()
    if torch.cuda.device_count() < given.ranks:
        print(
            f"nothing replayed: this needs {given.ranks} GPUs that torch can see, and there are {torch.cuda.device_count()}"
        )
        return 0
    cases, failed = [], False
    with Ranks(given.ranks) as ranks:
        for width in given.widths:
            every = ranks.call(symm_mem_replays.run, given, width)
            cases.append(
                every[0]
                | {name: [each[name] for each in every] for name in ("wrong_elements", "buffer_empty_at_the_end")}
            )
            print(cases[-1], flush=True)
            failed |= any(any(each["wrong_elements"]) or not each["buffer_empty_at_the_end"] for each in every)
    print("WRONG" if failed else "nothing wrong")
    if given.save:
        name = f"all_reduce_replays-{given.ranks}-ranks-{given.shots}-shots"
        save(
            Path(__file__).parents[2] / "bench" / "results" / f"{name}.json",
            {"gpu": torch.cuda.get_device_name(), "cases": cases},
        )
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
