"""Fused all-reduces on real ranks: the numbers, the same bits everywhere, and ranks that decide differently."""

from __future__ import annotations

import gc
import os
import signal
import socket
import time
from datetime import timedelta
from threading import Timer

import attrs
import pytest
import torch
import torch.distributed as dist
from family_support import REDUCED, Options, arguments, made_by_reference, problems
from ranks import run_on_ranks
from torch import Tensor, nn

from layerfuse import fusion
from layerfuse.fusion import FUSIONS, backends, ops
from layerfuse.fusion.declare import Kernel
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
                assert problems(form, args, results, made_by=made_by_reference) == [], (name, number, leading)
                results = results if isinstance(results, tuple) else (results,)
                found[f"{name} {number} {leading}"] = [_bytes(each) for each in results]
    return found


def test_of_many_decisions_that_differ_some_are_shown() -> None:
    sites = "\n".join(f"layers.{i}:input: all_reduce_add_rms_norm" for i in range(61))
    said = str(RankDisagreementError("0", "the all-reduces of a graph", (sites, "none of them is fused")))
    assert "layers.7:input: all_reduce_add_rms_norm; and 53 more\n" in said and "layers.8" not in said


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.thorough), 3])
def test_every_form_is_right_and_the_same_bits_on_all_ranks(size: int) -> None:
    first, *others = run_on_ranks(_every_form, size)
    assert len(first) == len(REDUCED) * len(CASES) * 3
    assert all(other == first for other in others)


def _in_the_order_of_the_ranks(rank: int) -> bool:
    """Parts whose sum depends on the order: 2^24, then ones, then -2^24. In float64 the ones are not lost."""
    x = torch.ones(1, 64) if 0 < rank < 7 else torch.full((1, 64), 2.0**24 * (1 if rank == 0 else -1))
    group, weight = dist.group.WORLD.group_name, torch.ones(64)
    with torch.no_grad():
        _, total = ops.all_reduce_add_rms_norm(x, torch.zeros(1, 64), weight, 1e-6, group)
        _, wide = ops.all_reduce_add_rms_norm(x.double(), torch.zeros(1, 64).double(), weight, 1e-6, group)
    wanted = torch.tensor(2.0**24)
    for part in (*[1.0] * 6, -(2.0**24)):
        wanted = wanted + part
    return bool((total == wanted).all()) and float(wanted) == 0.0 and bool((wide == 6.0).all())


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
        kernel = Kernel(backend="only_here", function="layerfuse.fusion.ops:add_rms_norm")
        backends.register(backends.Backend(op=FUSIONS["all_reduce_add_rms_norm"].op, kernel=kernel))
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
    import torch._inductor.compile_fx as inductor
    from reduced_support import sharded_spec

    if switched_off:  # else with code generated by Inductor
        inductor.compile_fx_inner = lambda gm, _inputs, **_: gm
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
    assert run_on_ranks(_asked_once, 2) == [2 * 2 * 2] * 2  # of each rank what it decided, and that it has read


def _said(group: str, decision: str) -> tuple[str, float]:
    """What the disagreement says, and after how many seconds."""
    started = time.monotonic()
    with pytest.raises(RankDisagreementError) as caught:
        agree(group, "a thing", decision)
    return str(caught.value), time.monotonic() - started


def _comes_late(rank: int, after: tuple[float, ...], seconds: float) -> tuple[str, float]:
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    dist.barrier()
    time.sleep(after[rank])
    return _said(group.group_name, "mine")


def test_a_rank_that_does_not_come_in_the_groups_own_timeout_is_told_to_all_alike() -> None:
    """Those that came later do not wait longer, and the one that comes at last hears the same."""
    told = run_on_ranks(_comes_late, 3, (0.0, 1.0, 4.0), 2.0)
    said = {text for text, _ in told}
    assert len(said) == 1
    assert (
        "  - rank 0, 1: mine\n  - rank 2: has decided nothing for 0:00:02: it runs another graph, or none" in said.pop()
    )
    first, second, late = (seconds for _, seconds in told)
    assert 1.5 < first < 3.5
    assert second < first and late < 1.5


def _over_tcp(rank: int, port: int) -> None:
    """A world of its own, whose store is in the process of rank 0, as `init_process_group("env://")` makes it."""
    size = dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size, timeout=timedelta(seconds=30))


def _leaves_first(rank: int, port: int) -> str:
    """Rank 1 has said what it decided, and is stopped before it could read the answer."""
    _over_tcp(rank, port)
    group = dist.group.WORLD.group_name
    pids: list[object] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    if rank == 0:
        time.sleep(1)
        os.kill(pids[1], signal.SIGSTOP)
        Timer(1.0, os.kill, (pids[1], signal.SIGCONT)).start()
    said, _ = _said(group, f"what {rank} does")
    dist.destroy_process_group()
    gc.collect()  # the error's frames hold the store, which goes with rank 0
    return said


def _is_gone(rank: int, port: int) -> str:
    _over_tcp(rank, port)
    group = dist.group.WORLD.group_name
    if rank == 0:
        time.sleep(1)
        dist.destroy_process_group()
        return ""
    said, seconds = _said(group, "mine")
    dist.destroy_process_group()
    assert seconds < 10
    return said


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_the_answer_is_read_by_all_before_the_rank_that_keeps_the_store_leaves(port: int) -> None:
    first, second = run_on_ranks(_leaves_first, 2, port)
    assert first == second
    assert "  - rank 0: what 0 does\n  - rank 1: what 1 does\n" in first


def test_a_store_that_is_gone_is_a_disagreement_that_says_so(port: int) -> None:
    _, said = run_on_ranks(_is_gone, 2, port)
    assert "  - rank 0: cannot be asked: the store is gone, with the process that holds it (DistNetworkError)" in said
    assert "  - rank 1: mine" in said
