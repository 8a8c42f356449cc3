"""The kernel of fused all-reduces between real processes, in Triton's interpreter over shared memory of the host.

That shows the protocol as it is written for Triton, the indexing and the arithmetic. It does not show what GPUs make of the order
of stores, nor rounding (the interpreter truncates to bfloat16): test_symm_mem_gpu does.
"""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from family_support import GPU, exact, problems
from symm_mem_ranks import MOST, NAMES, TOKENS, WIDE, WIDTH, cases, normed, parts, rank_main, shared, summed

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(GPU, reason="the kernel runs in Triton's interpreter here, which is off where there is a GPU"),
]


class Ran:
    """What came out on each rank."""

    def __init__(self, world_size: int, shots: int, folder: Path) -> None:
        self.world_size, self.shots = world_size, shots
        sizes = [(WIDTH * 2, 2), (WIDTH * 4, 4), (WIDE * 2, 2)]
        buffers = {
            (size, item, second): shared(world_size, size, item, shots)
            for size, item in sizes
            for second in (False, True)
        }
        given = (world_size, str(folder), buffers, shots)
        started = torch.multiprocessing.start_processes(rank_main, given, world_size, False, start_method="forkserver")
        until = time.monotonic() + 300
        while not started.join(timeout=10):
            if time.monotonic() > until:
                for process in started.processes:
                    process.kill()
                pytest.fail("ranks wait for one another")
        ranks = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]
        self.results, self.tried, self.empty, self.reasons, self.phases = (
            [each[i] for each in ranks] for i in range(5)
        )


@pytest.fixture(scope="module", params=[(2, 1), pytest.param((3, 1), marks=pytest.mark.thorough), (3, 2)])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Of so many ranks, in so many shots."""
    return Ran(*request.param, tmp_path_factory.mktemp("ranks"))


def bits(result: Any) -> list[list[int]]:
    several = result if isinstance(result, tuple) else (result,)
    return [each.contiguous().view(torch.uint8).flatten().tolist() for each in several]


def test_every_form_is_called() -> None:
    assert {case.name for case in cases()} == set(NAMES)
    assert len(NAMES) == 8


def test_all_ranks_get_the_same_bits(ran: Ran) -> None:
    for number, case in enumerate(cases()):
        first, *others = (bits(results[number]) for results in ran.results)
        assert all(other == first for other in others), (number, case)


def test_sums_are_in_the_order_of_ranks_and_unrounded(ran: Ran) -> None:
    """What the op says, in float64 from the float32 sum; in two shots the norm from the stream that was stored. The first row holds a NaN, an infinity and -0.0 each."""
    for number, case in enumerate(cases()):
        right = summed(parts(number, case, ran.world_size))
        result = ran.results[0][number]
        several = result if isinstance(result, tuple) else (result,)
        residual_out = several[-1]
        wide = right[0] + right[1].float()
        if case.rows > TOKENS:  # gloo sums, in an order of its own
            for got, wanted in zip(several, exact(case.local, right), strict=True):
                torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5, equal_nan=True)
            continue
        if case.options.dtype != torch.bfloat16:
            torch.testing.assert_close(residual_out, wide.to(residual_out.dtype), rtol=0, atol=0, equal_nan=True)
        if case.rows:
            assert residual_out[0, 3].isnan()
            assert residual_out[0, 4] == float("-inf")
            assert not residual_out[0, 5].any()
        right = normed(right, residual_out, ran.shots)
        whole = [right[0][1:], right[1][1:], *right[2:]]
        assert problems(case.local, whole, tuple(each[1:] for each in several), interpreted=True) == [], (number, case)


def test_buffers_are_empty_again(ran: Ran) -> None:
    assert all(all(each) for each in ran.empty)


def test_phases_take_turns_row_by_row(ran: Ran) -> None:
    """Seldom would a test meet the order of steps in which a single phase goes wrong; the search of the protocol does."""
    uses: dict[tuple[int, int, bool], list[int]] = {}
    for case in cases():
        item = case.options.dtype.itemsize
        known = uses.setdefault((case.width * item, item, case.second), [0] * MOST)
        for row in range(case.rows if case.rows <= TOKENS else 0):
            known[row % MOST] += 1
    right = {key: [number % 2 for number in rows] for key, rows in uses.items()}
    assert any(any(rows) for rows in right.values())
    for phases in ran.phases:
        assert {key: phases[key] for key in right} == right


def test_ranks_without_symmetric_memory_agree_and_say_so_once(ran: Ran) -> None:
    reason = "symmetric memory could not be set up: rank 0: symmetric memory is for NVIDIA GPUs here, and the rows are on cpu"
    assert ran.reasons == [reason] * ran.world_size
    for (_, said), (_, again) in ran.tried:
        assert said == [f"all_reduce_add_rms_norm runs as an all-reduce and a kernel behind it: {reason}"]
        assert again == []
    assert len({str([bits(result) for result, _ in tried]) for tried in ran.tried}) == 1
