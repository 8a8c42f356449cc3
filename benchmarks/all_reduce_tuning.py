"""Ways to launch the all-reduce over symmetric memory, against each other: what its rules and crossovers come from.

    python benchmarks/all_reduce_tuning.py --ranks 2 [--tokens 1,8,32,80,256,1024,4096] [--save]

For each number of tokens: what is chosen (one shot or two, pushed), one and two shots whatever is chosen, with fewer warps per program and
without overlapping launches, and rows that are read behind a barrier instead (`all_reduce_pull`). Every variant's residual is compared bit by
bit with the first one's. CUDA graphs take turns, the ranks line up, the slowest rank's time counts.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import all_reduce_tuning  # by its name: ranks import what they call
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
import triton
from all_reduce_pull import pull_row_norm
from environment import save, too_few_gpus
from torch import Tensor

from layerfuse.bench.ranks import Ranks
from layerfuse.bench.timing import Graph, time_graphs
from layerfuse.fusion import FUSIONS
from layerfuse.fusion.backends.symm_mem import launch, workspaces
from layerfuse.fusion.backends.symm_mem.crossovers import rows_at_once
from layerfuse.fusion.backends.triton import family, launcher

EPSILON, SETS = 1e-6, 4
ADD_NORM = FUSIONS["add_rms_norm"].op
_Results = tuple[Tensor, Tensor]


@contextmanager
def shaped(share: int, overlaps: bool) -> Iterator[None]:
    """Programs of so many times fewer warps; launches that overlap or not."""
    chosen, before = launch.shape, os.environ.get(launcher.OVERLAP)

    def shape(*given: Any) -> tuple[int, int]:
        chunk, warps = chosen(*given)
        return chunk, max(1, warps // share)

    launch.shape, os.environ[launcher.OVERLAP] = (chosen if share == 1 else shape), str(int(overlaps))
    launcher._compiled.clear()
    try:
        yield
    finally:
        launch.shape = chosen
        os.environ.pop(launcher.OVERLAP)
        if before is not None:
            os.environ[launcher.OVERLAP] = before
        launcher._compiled.clear()


class Pulls:
    """The pulling kernel's side of a rank."""

    def __init__(self, group: dist.ProcessGroup, width: int, most: int) -> None:
        device = torch.device("cuda", group.rank())
        self.most, self.rank, self.world_size = most, group.rank(), group.size()
        self.rows, self.rows_of = self._shared(group, torch.bfloat16, 2 * most * width)
        self.flags, self.flags_of = self._shared(group, torch.int32, self.world_size * most)
        self.epochs = torch.zeros(most, dtype=torch.int32, device=device)

    @staticmethod
    def _shared(group: dist.ProcessGroup, dtype: torch.dtype, size: int) -> tuple[Tensor, Tensor]:
        buffer = symmetric_memory.empty(size, dtype=dtype, device=torch.device("cuda", group.rank())).zero_()
        handle = symmetric_memory.rendezvous(buffer, group.group_name)
        offset = buffer.data_ptr() - handle.buffer_ptrs[group.rank()]
        return buffer, torch.tensor([start + offset for start in handle.buffer_ptrs], device=buffer.device)

    def __call__(self, x: Tensor, residual: Tensor, weight: Tensor) -> _Results:
        """As the op without options."""
        rows, width = x.shape
        out, residual_out = torch.empty_like(x), torch.empty_like(x)
        chunk = triton.next_power_of_2(width)
        pull_row_norm[(rows,)](
            x, residual, weight, out, residual_out, self.rows_of, self.flags_of, self.epochs,
            self.world_size, self.rank, self.most, width, chunk, EPSILON, num_warps=max(1, chunk // 256),
        )  # fmt: skip
        return out, residual_out


def measured(width: int, counts: list[int]) -> list[dict[str, Any]]:
    """Microseconds of every variant, on each rank."""
    with torch.inference_mode():
        return list(_measured(width, counts))


def _measured(width: int, counts: list[int]) -> Iterator[dict[str, Any]]:
    group: dist.ProcessGroup = dist.group.WORLD
    device = torch.device("cuda", group.rank())
    cores, row_bytes = torch.cuda.get_device_properties(device).multi_processor_count, width * 2
    rows = rows_at_once(max(counts), row_bytes)
    pulls = Pulls(group, width, cores)
    pushes = {}
    for shots in (1, 2):
        layout = launch.Layout(group.rank(), group.size(), shots, rows, row_bytes, 2, cores)
        workspace = workspaces.made_for(group, device, layout, max(counts))
        pushes[shots] = family.function_of(ADD_NORM, partial(launch.launch, workspace))
    torch.cuda.synchronize()
    dist.barrier()
    for tokens in counts:
        made = torch.Generator(device).manual_seed(tokens)
        weight = torch.rand(width, device=device, generator=made).bfloat16() + 0.5
        residuals = [torch.randn(tokens, width, device=device, generator=made).bfloat16() for _ in range(SETS)]
        made.manual_seed(tokens + group.rank() + 1)
        xs = [torch.randn(tokens, width, device=device, generator=made).bfloat16() for _ in range(SETS)]

        def calls(function: Callable[..., _Results], *more: Any, xs: Any = xs, weight: Any = weight,
                  residuals: Any = residuals) -> list[Any]:  # fmt: skip
            return [partial(function, x, residual, weight, *more) for x, residual in zip(xs, residuals, strict=True)]

        variants: dict[str, tuple[list[Any], int, bool]] = {}
        for shots, function in pushes.items():
            name = ("one shot", "two shots")[shots - 1]
            pushed = calls(function, EPSILON, 0.0)
            variants |= {name: (pushed, 1, True), f"{name}, launches apart": (pushed, 1, False)}
            variants |= {f"{name}, warps / {share}": (pushed, share, True) for share in (2, 4)}
        if tokens <= cores:
            variants["pulled"] = calls(pulls), 1, False
        graphs: dict[str, Graph] = {}
        for name, (several, share, overlaps) in variants.items():
            with shaped(share, overlaps):
                graphs[name] = Graph(several, max(1, 64 // max(1, tokens // 64) // SETS))
        for graph in graphs.values():
            graph.start()
        first = graphs["one shot"].results
        right = {
            name: all(torch.equal(one[1], other[1]) for one, other in zip(graph.results, first, strict=True))
            for name, graph in graphs.items()
        }
        us = {name: timing.us for name, timing in time_graphs(graphs, 12).items()}
        yield {"width": width, "tokens": tokens, "us": us, "same_bits": right}


def main() -> int:
    """Measure, print and save; 1 where a variant's bits are others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--widths", default="2880,7168")
    parser.add_argument("--tokens", default="1,8,32,80,256,1024,4096")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/all_reduce_tuning-N-ranks.json")
    given = parser.parse_args()
    reason = too_few_gpus(given.ranks)
    if reason is not None:
        print(f"nothing measured: {reason}")
        return 0
    found: list[dict[str, Any]] = []
    with Ranks(given.ranks) as ranks:
        for width in map(int, given.widths.split(",")):
            every = ranks.call(all_reduce_tuning.measured, width, [int(each) for each in given.tokens.split(",")])
            for row, *others in zip(*every, strict=True):
                row["same_bits"] = {n: all(other["same_bits"][n] for other in (row, *others)) for n in row["us"]}
                found.append(row)
                print(width, row["tokens"], {name: round(us, 2) for name, us in row["us"].items()}, flush=True)
    wrong = [
        (row["width"], row["tokens"], name) for row in found for name, same in row["same_bits"].items() if not same
    ]
    print("WRONG" if wrong else "the same bits everywhere", *wrong)
    if given.save:
        name = f"all_reduce_tuning-{given.ranks}-ranks"
        print(f"written to {save(name, {'gpu': torch.cuda.get_device_name(), 'cases': found})}")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
