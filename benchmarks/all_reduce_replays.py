# ruff: noqa: N803 (constants of a kernel are written in capitals)
"""Replays of a CUDA graph of fused all-reduces, every result of every replay compared, while ranks come late at random.

    python benchmarks/all_reduce_replays.py --ranks 2 --replays 100000 [--shots 1] [--save]

A rank is a process with a GPU. The graph holds calls with changing numbers of rows. Before each call, a kernel waits for a
time of its own on each rank and replay. Inputs take turns, so that what an earlier call left behind is no right answer.
Between replays come eager calls with other numbers of rows. The residual is compared bit by bit with the float32 sum in the
order of ranks, the norm within one step of bfloat16. The comparison is part of the graph: it counts what is wrong.
"""

from __future__ import annotations

import argparse
import os
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from environment import save
from torch import Tensor

from layerfuse.fusion import FUSIONS
from layerfuse.fusion.backends.symm_mem import function_of, workspaces
from layerfuse.fusion.backends.symm_mem.crossovers import PIECE_BYTES
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
        total = every[0].float()
        for part in every[1:]:
            total += part.float()
        wide = total + self.residual.float()
        self.summed = wide.bfloat16()
        scale = torch.rsqrt(wide.double().square().mean(-1, keepdim=True) + EPSILON)
        self.normed = (wide.double() * scale * self.weight.double()).float()

    def wrong(self, results: tuple[Tensor, Tensor], place: Tensor) -> Tensor:
        """How many elements are wrong, as a tensor of one number."""
        normed, summed = results
        right = self.normed.index_select(0, place)[0]
        off = (normed.float() - right).abs() > right.abs() * 2**-8 + 1e-30
        return (off | (summed != self.summed.index_select(0, place)[0]) | normed.isnan()).sum()


def run(rank: int, ranks: int, given: argparse.Namespace, folder: str) -> None:
    """One rank."""
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=ranks)
    device, group = torch.device("cuda", rank), dist.group.WORLD.group_name
    function = function_of(FUSIONS["all_reduce_add_rms_norm"].op)
    found = []
    for width in given.widths:
        row_bytes = width * 2
        like = torch.empty(1, width, dtype=torch.bfloat16, device=device)
        cores = torch.cuda.get_device_properties(device).multi_processor_count
        rows = PIECE_BYTES // row_bytes // 16 * 16
        layout = Layout(rank, ranks, given.shots, rows, row_bytes, 2, cores)
        workspace = workspaces._joined(dist.group.WORLD, layout, rows, workspaces._buffer(layout, device))
        workspaces.keep(group, like, workspace)
        dist.barrier()
        calls = {rows: Calls(rows, width, rank, ranks) for rows in (*ROWS, *EAGER)}
        delays = _delays(given.seed * 100 + rank, device)
        turn = torch.zeros(1, dtype=torch.int64, device=device)
        wrong = torch.zeros(len(calls), dtype=torch.int64, device=device)

        def step(number: int, rows: int, calls: Any = calls, wrong: Tensor = wrong, turn: Tensor = turn) -> None:
            each, place = calls[rows], (turn + number) % SETS
            x, residual = each.x.index_select(0, place)[0], each.residual.index_select(0, place)[0]
            wait[(1,)](delays, turn, number % len(ROWS), len(ROWS), DELAYS - 1, num_warps=1)  # noqa: B023
            wrong[number] += each.wrong(function(x, residual, each.weight, EPSILON, group, 0.0), place)

        def whole() -> None:
            turn.add_(1)  # noqa: B023
            for number, rows in enumerate(ROWS):
                step(number, rows)

        whole()
        for number, rows in enumerate(EAGER, len(ROWS)):
            step(number, rows)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            whole()
        begun, eager = time.perf_counter(), 0
        for number in range(given.replays):
            graph.replay()
            if number % STRIDE == STRIDE - 1:
                torch.cuda.synchronize()
            if number % (STRIDE * 20) == 0:
                eager += 1
                for place, rows in enumerate(EAGER, len(ROWS)):
                    step(place, rows)
        torch.cuda.synchronize()
        told: list[Any] = [None] * ranks
        whole_buffer = bool((workspace.owned[0] == 255).all())
        dist.all_gather_object(told, (wrong.tolist(), whole_buffer))
        found.append(
            {
                "width": width, "replays": given.replays, "calls_per_replay": len(ROWS), "rows": [*ROWS, *EAGER],
                "eager_calls": eager * len(EAGER), "wrong_elements": [each for each, _ in told],
                "buffers_empty_at_the_end": [each for _, each in told], "seconds": time.perf_counter() - begun,
            }
        )  # fmt: skip
        if rank == 0:
            print(found[-1], flush=True)
    if rank == 0:
        failed = any(
            any(map(any, each["wrong_elements"])) or not all(each["buffers_empty_at_the_end"]) for each in found
        )
        print("WRONG" if failed else "nothing wrong", flush=True)
        if given.save:
            name = f"all_reduce_replays-{ranks}-ranks-{given.shots}-shots"
            print(f"written to {save(name, {'gpu': torch.cuda.get_device_name(), 'cases': found})}")
    dist.barrier()
    dist.destroy_process_group()


def _delays(seed: int, device: torch.device) -> Tensor:
    """Most are short, some long: turns of a loop that reads memory."""
    generator = torch.Generator().manual_seed(seed)
    short = torch.randint(0, 10, (DELAYS,), generator=generator)
    long = torch.randint(0, 300, (DELAYS,), generator=generator)
    return torch.where(torch.rand(DELAYS, generator=generator) < 0.1, long, short).int().to(device)


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--replays", type=int, default=100_000)
    parser.add_argument("--shots", type=int, choices=(1, 2), default=1)
    parser.add_argument("--widths", type=lambda said: [int(each) for each in said.split(",")], default=[2880, 7168])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/all_reduce_replays-*.json")
    given = parser.parse_args()
    if torch.cuda.device_count() < given.ranks:
        print(
            f"nothing replayed: this needs {given.ranks} GPUs that torch can see, and there are {torch.cuda.device_count()}"
        )
        return
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    with TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (given.ranks, given, str(Path(folder))), nprocs=given.ranks)


if __name__ == "__main__":
    main()
