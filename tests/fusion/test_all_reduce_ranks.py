"""Fused all-reduces on real ranks: the numbers, the same bits everywhere, and ranks that decide differently."""

from __future__ import annotations

import os

import attrs
import pytest
import torch
import torch.distributed as dist
from family_support import REDUCED, Options, arguments, problems
from ranks import run_on_ranks
from torch import Tensor, nn

from layerfuse import fusion
from layerfuse.fusion import backends, ops
from layerfuse.fusion.ops.agreement import RankDisagreementError, agree

CASES = [
    Options(),
    Options(dtype=torch.float16, offset=1.0, weight_dtype=torch.float32, column_major=True, use_ue8m0=True),
    # A sum of float32 that cancels has no relative precision; the order of summation is tested below.
    Options(gap=0, column_major=True, tma_aligned=True, group_size=32),
]


def _bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.new_empty(tensor.numel()).copy_(tensor.reshape(-1)).view(torch.uint8).numpy())


def _every_form(rank: int) -> dict[str, list[bytes]]:
    found: dict[str, list[bytes]] = {}
    for name, form in REDUCED.items():
        for number, case in enumerate(CASES):
            for leading in ((5,), (2, 3), (0,)):
                options = attrs.evolve(case, group=dist.group.WORLD.group_name)
                args = arguments(form, leading, 192, options)
                args[0] = arguments(form, leading, 192, options, seed=rank + 1)[0]
                with torch.no_grad():
                    results = getattr(ops, name)(*args)
                assert problems(form, args, results) == [], (name, number, leading)
                results = results if isinstance(results, tuple) else (results,)
                found[f"{name} {number} {leading}"] = [_bytes(each) for each in results]
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_every_form_is_right_and_the_same_bits_on_all_ranks(size: int) -> None:
    first, *others = run_on_ranks(_every_form, size)
    assert len(first) == len(REDUCED) * len(CASES) * 3
    assert all(other == first for other in others)


def _in_the_order_of_the_ranks(rank: int) -> bool:
    """Parts whose sum depends on the order: 2^24, then ones, then -2^24."""
    x = torch.ones(1, 64) if 0 < rank < 7 else torch.full((1, 64), 2.0**24 * (1 if rank == 0 else -1))
    with torch.no_grad():
        _, total = ops.all_reduce_add_rms_norm(x, torch.zeros(1, 64), torch.ones(64), 1e-6, dist.group.WORLD.group_name)
    wanted = torch.tensor(2.0**24)
    for part in (*[1.0] * 6, -(2.0**24)):
        wanted = wanted + part
    return bool((total == wanted).all()) and float(wanted) == 0.0


def test_eight_ranks_sum_in_their_order() -> None:
    assert run_on_ranks(_in_the_order_of_the_ranks, 8) == [True] * 8


def _two_groups(rank: int) -> list[float]:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups = [pairs[rank // 2].group_name, dist.group.WORLD.group_name]
    x, zeros, ones = torch.full((1, 32), float(rank)), torch.zeros(1, 32), torch.ones(32)
    with torch.no_grad():
        totals = [ops.all_reduce_add_rms_norm(x, zeros, ones, 1e-6, group)[1] for group in (*groups, groups[0])]
    return [float(total[0, 0]) for total in totals]


def test_two_groups_at_once() -> None:
    assert run_on_ranks(_two_groups, 4) == [[1.0, 6.0, 1.0]] * 2 + [[5.0, 6.0, 5.0]] * 2


# ---- ranks that decide differently


def _other_backend(rank: int) -> str:
    if rank == 1:
        backends.register(
            backends.Backend(
                name="only_here",
                op="all_reduce_add_rms_norm",
                load=lambda: ops.add_rms_norm,
                runs_on=backends.anywhere,
            )
        )
    x = torch.ones(1, 32)
    with torch.no_grad(), pytest.raises(RankDisagreementError) as caught:
        ops.all_reduce_add_rms_norm(x, x, torch.ones(32), 1e-6, dist.group.WORLD.group_name)
    return str(caught.value)


def test_different_backends_are_an_error_on_all_ranks_that_names_them() -> None:
    first, second = run_on_ranks(_other_backend, 2)
    assert first == second
    assert "decided differently on layerfuse::all_reduce_add_rms_norm, and would hang:" in first
    assert "  - rank 0: backend reference\n  - rank 1: backend only_here\n" in first


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(32, eps=1e-6)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        part = x * 2
        dist.all_reduce(part)
        total = residual + part
        return self.norm(total), total


def _compiled(rank: int, switched_off: bool) -> str:
    from reduced_support import sharded_spec

    if switched_off and rank == 1:
        os.environ["LAYERFUSE_FUSIONS"] = "-all_reduce_add_rms_norm"
    fused = fusion.compile(_Layer(), specs=[("", sharded_spec(2, rank, width=32))])
    x = torch.full((3, 32), 1.0 + rank)
    with torch.no_grad():
        if not switched_off:
            _, total = fused(x, torch.zeros(3, 32))
            assert float(total[0, 0]) == 6.0
            return str(fused.report.of("all_reduce_add_rms_norm").last_call)
        with pytest.raises(RankDisagreementError, match="decided differently") as caught:
            fused(x, torch.zeros(3, 32))
    return str(caught.value)


def test_graphs_that_were_fused_differently_are_an_error_on_all_ranks() -> None:
    assert run_on_ranks(_compiled, 2, False) == ["1", "1"]
    for said in run_on_ranks(_compiled, 2, True):
        assert "rank 0: input: all_reduce_add_rms_norm" in said
        assert "rank 1: input: its all-reduce is left as it is" in said
        assert "LAYERFUSE_FUSIONS" in said


def _asked_once(rank: int) -> int:
    group, store = dist.group.WORLD.group_name, dist.distributed_c10d._get_default_store()
    before = store.num_keys()
    dist.barrier()
    for _ in range(3):
        agree(group, "a thing", "one way")
    agree(group, "a thing", "another way")
    dist.barrier()
    return int(store.num_keys() - before)


def test_what_was_agreed_on_is_not_asked_again() -> None:
    assert run_on_ranks(_asked_once, 2) == [2 * 2] * 2


def _never_comes(rank: int) -> str:
    from datetime import timedelta

    from layerfuse.fusion.ops import agreement

    said = ""
    if rank == 0:
        agreement.TIMEOUT = timedelta(seconds=1)
        with pytest.raises(RankDisagreementError) as caught:
            agree(dist.group.WORLD.group_name, "a thing", "mine")
        said = str(caught.value)
    dist.barrier()
    return said


def test_a_rank_that_never_comes_is_an_error_and_no_hang() -> None:
    said, _ = run_on_ranks(_never_comes, 2)
    assert "  - rank 0: mine\n  - rank 1: has decided nothing for 0:00:01: it runs another graph, or none" in said
