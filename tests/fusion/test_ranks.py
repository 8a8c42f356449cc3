"""The processes that tests run ranks in: whatever goes wrong on one of them comes back, and nobody waits for ever."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import RanksFailedError, run_on_ranks


def a_mistake(rank: int, what: str) -> None:
    dist.barrier()  # both are connected
    if rank == 1 and what == "raises":
        raise ValueError("this one fails")
    if rank == 1:
        os._exit(7)
    if what == "dies":
        time.sleep(60)
    dist.all_reduce(torch.ones(1))


def test_a_rank_that_fails_is_named_with_its_traceback() -> None:
    with pytest.raises(RanksFailedError, match=r"rank 1 of 2: Traceback(.|\n)*ValueError: this one fails"):
        run_on_ranks(a_mistake, 2, "raises")


def test_a_rank_that_dies_is_named_and_one_that_is_stuck_is_killed() -> None:
    with pytest.raises(
        RanksFailedError, match=r"rank 0 of 2: did not come to an end(.|\n)*rank 1 of 2: died with .* 7"
    ):
        run_on_ranks(a_mistake, 2, "dies")
