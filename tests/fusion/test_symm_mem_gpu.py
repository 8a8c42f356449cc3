"""The kernel of fused all-reduces on GPUs, with their order of stores: ranks as streams of one process, and real processes.

Streams take any number of GPUs, so that four ranks are tried on one; each rank's programs are few, as all ranks' must be on
a GPU at once. Processes take a GPU each and everything that users take: NCCL groups, rendezvous, the functions of the ops.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from itertools import permutations
from random import Random
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from family_support import GPU, REDUCED, Options, problems
from ranks import run_on_ranks
from reduced_support import FORMS as JOINED
from reduced_support import Joined, Over
from stream_support import EPSILON, WIDTH
from symm_mem_ranks import NAMES, Case, normed, parts, summed
from torch.distributed.device_mesh import init_device_mesh

from layerfuse.adapters.specs import FinalNormSpec, NormSpec, Parallel
from layerfuse.fusion import compile  # noqa: A004
from layerfuse.fusion.chain import Form

pytestmark = pytest.mark.skipif(not GPU, reason="needs a GPU")

MOST, TOKENS = 32, 40
"""Rows of a launch, and tokens of a call: the last are two launches."""


WIDTHS = (2880, 7168, 96, 8200)


def forms(only: int | None = None) -> Iterator[Case]:
    """Every form with changing numbers of rows, widths, dtypes and options."""
    random = Random(1)
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for turn, width in enumerate(WIDTHS):
        if only not in (None, width):
            continue
        for place, name in enumerate(NAMES):
            options = Options(
                dtype=dtypes[(turn + place) % 3 if width < 8000 else 0],
                offset=float(turn == 1),
                weight_dtype=torch.float32 if turn == 2 else None,
                group_size=(64, 128, 32, 128)[turn],
                column_major=turn == 1,
                use_ue8m0=turn == 2,
            )
            yield Case(name, random.choice([1, 2, 7, MOST, TOKENS]), options, width=width)


class Streams:
    """Ranks of one process: each has a stream, and the GPU of its number where there are so many."""

    def __init__(self, world_size: int, shots: int) -> None:
        self.world_size, self.shots = world_size, shots
        self.devices = [torch.device("cuda", rank % torch.cuda.device_count()) for rank in range(world_size)]
        for device, other in permutations(
            set(self.devices), 2
        ):  # torch lets a GPU reach another's memory once it has copied
            torch.ones(1, device=device).to(other)
        self.streams = [torch.cuda.Stream(device) for device in self.devices]
        self.random = Random(0)
        self.known: dict[tuple[int, torch.dtype], list[Any]] = {}

    def workspaces(self, case: Case) -> list[Any]:
        """One for each rank, of rows like the case's."""
        from layerfuse.fusion.backends.symm_mem.launch import Layout, Workspace

        dtype = case.options.dtype
        if (case.width, dtype) not in self.known:
            pitch, item = -(-case.width * dtype.itemsize // 16) * 16, dtype.itemsize
            resident = self.random.choice([MOST, 3])  # with three, tickets say which row is next
            made = [
                Layout(rank, self.world_size, self.shots, MOST, pitch, item, resident)
                for rank in range(self.world_size)
            ]
            buffers = [
                torch.full((each.size,), 255, dtype=torch.uint8, device=device)
                for each, device in zip(made, self.devices, strict=True)
            ]
            starts = [buffer.data_ptr() for buffer in buffers]
            self.known[case.width, dtype] = [
                Workspace(
                    layout, TOKENS, torch.tensor(starts, device=device), torch.zeros(MOST, dtype=torch.int32, device=device),
                    torch.zeros(1, dtype=torch.int32, device=device), buffers[rank], {},
                )
                for rank, (layout, device) in enumerate(zip(made, self.devices, strict=True))
            ]  # fmt: skip
        return self.known[case.width, dtype]

    def run(self, case: Case, given: list[list[Any]]) -> list[Any]:
        """One call of all ranks."""
        from functools import partial

        from layerfuse.fusion.backends.symm_mem.launch import launch
        from layerfuse.fusion.backends.triton import family

        workspaces = self.workspaces(case)
        functions = [family.function_of(case.local.op, partial(launch, workspace)) for workspace in workspaces]
        moved = [
            [each.to(device) if isinstance(each, torch.Tensor) else each for each in arguments]
            for arguments, device in zip(given, self.devices, strict=True)
        ]

        def call(rank: int) -> Any:
            with torch.cuda.device(self.devices[rank]), torch.cuda.stream(self.streams[rank]):
                return functions[rank](*moved[rank])

        phase = self.random.randrange(2)
        # A kernel that is loaded waits for others of its GPU: once each alone, with buffers in which everything has arrived.
        for rank, workspace in enumerate(workspaces):
            workspace.owned.zero_()
            torch.cuda.synchronize(self.devices[rank])
            call(rank)
            torch.cuda.synchronize(self.devices[rank])
        for workspace in workspaces:
            workspace.owned.fill_(255)
            workspace.phases.fill_(phase)
        for device in set(self.devices):
            torch.cuda.synchronize(device)
        order = list(range(self.world_size))
        for _ in range(4):
            self.random.shuffle(order)
            results: dict[int, Any] = {}
            for rank in order:
                time.sleep(self.random.choice([0, 0, 0.001]))
                results[rank] = call(rank)
        for device in set(self.devices):
            torch.cuda.synchronize(device)
        for workspace in workspaces:
            assert bool((workspace.owned == 255).all()), "a buffer is not empty again"
            assert not int(workspace.ticket)
            assert workspace.phases.tolist() == [phase] * MOST  # four calls, or eight launches for some rows
        return [results[rank] for rank in range(self.world_size)]


def several(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def check(form: Form, given: list[list[Any]], results: list[Any], shots: int) -> None:
    """Against float64 from the float32 sum in the order of ranks, and the same bits on all ranks."""
    ours = [[each.cpu().contiguous().view(torch.uint8) for each in several(result)] for result in results]
    assert all(all(map(torch.equal, ours[0], other)) for other in ours[1:]), "ranks have different bits"
    assert wrong(form, given, several(results[0]), shots) == []


def wrong(form: Form, given: list[list[Any]], results: tuple[torch.Tensor, ...], shots: int) -> list[str]:
    """What is wrong with one rank's results. The first row holds a NaN and an infinity: of it, what the residual becomes counts."""
    home = results[0].device
    right = [each.to(home) if isinstance(each, torch.Tensor) else each for each in summed(given)]
    summed_up = (right[0] + right[1].float()).to(results[-1].dtype)
    found = (
        [] if torch.equal(results[-1].nan_to_num(), summed_up.nan_to_num()) else ["the residual is not the exact sum"]
    )
    if not torch.equal(results[-1].isnan(), summed_up.isnan()):
        found.append("the residual has other NaN")
    right = normed(right, results[-1], shots)
    whole = [right[0][1:], right[1][1:], *right[2:]]
    return found + problems(form, whole, tuple(each[1:] for each in results))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("world_size", "shots"), [(2, 1), (4, 1), (2, 2), (4, 2), (3, 2)])
def test_ranks_as_streams(world_size: int, shots: int, width: int) -> None:
    """Every form, in one shot and in two."""
    ranks = Streams(world_size, shots)
    for number, case in enumerate(forms(width)):
        given = parts(number, case, world_size)
        check(case.local, given, ranks.run(case, given), shots)


# ---- real processes


def late(rank: int) -> None:
    """Called before each call: some ranks come late, on the host or on the GPU."""
    time.sleep(RANDOM[rank].choice([0, 0, 0.001, 0.01]))
    if RANDOM[rank].random() < 0.3:
        torch.cuda._sleep(RANDOM[rank].choice([10_000, 1_000_000]))


RANDOM = [Random(rank) for rank in range(8)]
ROWS = (1, 3, 32, 128, 129, 400)


def many(rank: int, world_size: int) -> list[str]:
    """Eager calls of every form in two groups, with changing rows; some of them then again as graphs, between eager ones."""
    from layerfuse.fusion.backends.symm_mem import workspaces
    from layerfuse.fusion.backends.symm_mem.crossovers import shots_of
    from layerfuse.fusion.backends.symm_mem.functions import function_of

    groups = [dist.group.WORLD.group_name, dist.new_group().group_name]
    functions = {name: function_of(REDUCED[name].op) for name in NAMES}
    found: list[str] = []
    graphs: list[tuple[Any, Any, Case, list[list[Any]]]] = []

    def checked(what: str, case: Case, given: list[list[Any]], result: Any) -> None:
        torch.cuda.synchronize()
        bits = [each.cpu().contiguous().view(torch.uint8) for each in several(result)]
        every: list[Any] = [None] * world_size
        dist.all_gather_object(every, bits)
        if not all(all(map(torch.equal, every[0], other)) for other in every[1:]):
            found.append(f"{what}: ranks have different bits")
        forms = shots_of(case.width, case.options.dtype.itemsize, world_size)
        shots = next(shots for shots, tokens in forms if case.rows <= tokens)
        found.extend(f"{what}: {said}" for said in wrong(case.local, given, several(result), shots))

    for number, case in enumerate(forms()):
        case = attrs.evolve(case, rows=ROWS[number % len(ROWS)], second=number % 3 == 0)
        given = parts(number, case, world_size)
        mine = given[rank]
        call = lambda case=case, mine=mine: functions[case.name](*mine[:4], groups[case.second], *mine[4:])  # noqa: E731
        late(rank)
        checked(f"{number} {case.name} {case.rows} x {case.width}", case, given, call())
        if not workspaces.workspaces_of(groups[case.second], mine[0]):
            found.append(f"{case}: {workspaces.why_not(groups[case.second])}")
        if number % 3 == 0:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
                result = call()
            graphs.append((graph, result, case, given))
    order = Random(5)
    for turn in range(60):
        graph, result, case, given = order.choice(graphs)
        late(rank)
        if turn % 3:
            graph.replay()
        else:
            mine = given[rank]
            result = functions[case.name](*mine[:4], groups[case.second], *mine[4:])
        checked(f"turn {turn} {case.name} {case.rows} x {case.width}", case, given, result)
    return found


def part_of(rank: int) -> torch.Tensor:
    return torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(rank)).bfloat16().cuda()


def compiled(rank: int, world_size: int) -> list[int]:
    """Layers by `fusion.compile`, strict and by default, against themselves; how often which kernel ran."""
    mesh = init_device_mesh("cuda", (world_size,))
    over = Over(dist.group.WORLD.group_name, mesh, dist.new_group().group_name)
    counts = []
    for name in ("functional", "in_place", "routed_and_shared"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = Joined(JOINED[name], over, reads=torch.neg).to(torch.bfloat16).cuda()
        parts_of = [part_of(number) for number in (rank, 99)]
        norm = NormSpec(width=WIDTH, epsilon=EPSILON, module="norm")
        parallel = Parallel(size=world_size, rank=rank)  # a spec with one site, so that strict means this one
        final = FinalNormSpec(hidden_size=WIDTH, layer_index=2, parallel=parallel, final_norm=norm)
        fused = compile(module, specs=[("", final)], strict=True, fullgraph=True)
        with torch.no_grad():
            wanted = module(parts_of[0], parts_of[1].clone())
            fused(parts_of[0], parts_of[1].clone())
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                given = fused(parts_of[0], parts_of[1].clone())
                torch.cuda.synchronize()
        for got, want in zip(given, wanted, strict=True):
            torch.testing.assert_close(got.double(), want.double(), rtol=3e-2, atol=6e-2)
        kernels = [event.name for event in profile.events()]
        counts.append(sum("all_reduce_row_norm" in kernel for kernel in kernels))
        counts.append(sum("nccl" in kernel.lower() for kernel in kernels))
    return counts


def failing(rank: int, world_size: int) -> tuple[str, list[str], bool]:
    """An op where one rank has no memory left: the reason, what was warned of, and whether its sum is right."""
    import torch.distributed._symmetric_memory as symmetric_memory

    from layerfuse.fusion.backends.symm_mem import workspaces
    from layerfuse.fusion.backends.symm_mem.functions import function_of

    if rank == 1:
        symmetric_memory.empty = lambda *_, **__: (_ for _ in ()).throw(torch.OutOfMemoryError("no memory left"))
    group = dist.group.WORLD.group_name
    x, residual, weight = (torch.full(shape, 1.0, device="cuda") for shape in ((2, 64), (2, 64), (64,)))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        _, total = function_of(REDUCED["all_reduce_add_rms_norm"].op)(x, residual, weight, 1e-6, group, 0.0)
    messages = [str(each.message) for each in said if "all_reduce_add_rms_norm" in str(each.message)]
    return workspaces.why_not(group) or "", messages, bool((total == world_size + 1).all())


needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def on_gpus(function: Any) -> list[Any]:
    size = torch.cuda.device_count()
    return run_on_ranks(function, size, size, backend="cpu:gloo,cuda:nccl")


@needs_two
def test_ranks_as_processes() -> None:
    assert on_gpus(many) == [[]] * torch.cuda.device_count()


@needs_two
def test_compiled_layers_take_it_and_nothing_of_nccl() -> None:
    """Two all-reduces that are added become one."""
    assert on_gpus(compiled) == [[1, 0] * 3] * torch.cuda.device_count()


@needs_two
def test_a_rank_without_memory_is_everybodys_reason() -> None:
    reason = "symmetric memory could not be set up: rank 1: OutOfMemoryError: no memory left"
    for said, messages, right in on_gpus(failing):
        assert said == reason
        assert messages == [f"all_reduce_add_rms_norm runs as an all-reduce and a kernel behind it: {reason}"]
        assert right
