"""AITER's communicators over real gloo processes: made by all ranks or by none, for one reason, and given back."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from binding_checks import all_reduce_case, group_of_one, holding
from check_tools import installed
from norm_checks import OPS, same_results
from standin import RELEASES, between, imported, shared_standin
from test_bindings import refused

from layerfuse.fusion import backends
from layerfuse.fusion.backends import aiter as amd
from layerfuse.fusion.backends.aiter import communicators
from layerfuse.fusion.backends.aiter.backend import Aiter, call_of
from layerfuse.fusion.backends.aiter.communicators import CommunicatorError
from layerfuse.fusion.ops.groups import GroupError
from layerfuse.fusion.ops.library import case_maker, declared

CPU = torch.device("cpu")
OP = "all_reduce_add_rms_norm"
FORMS = [name for name in OPS if name.startswith(OP) and "static" not in name]


# ---- on two ranks


def together(part: Callable[..., None], folder: Path, *args: Any) -> None:
    """Run a part on two gloo processes; what one of them raises is raised here."""
    given = (part, str(folder / "store"), args)
    torch.multiprocessing.start_processes(_rank, given, nprocs=2, start_method="forkserver")


def _rank(rank: int, part: Callable[..., None], store: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(240, exit=True)  # ranks that part wait for one another
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    part(rank, *args)
    communicators.close()
    dist.destroy_process_group()


def world() -> str:
    return dist.group.WORLD.group_name


def same_on_all(value: Any) -> Any:
    """The value, which every rank must have."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    assert all(each == everyone[0] for each in everyone), everyone
    return value


def parted(op: str, rank: int, tokens: int, **options: Any) -> list[Any]:
    """An op's arguments: x differs from rank to rank, and a sum over ranks of sixteenths is exact, since AITER rounds it."""
    given = all_reduce_case(op, world(), (tokens,), **options)
    given[0] = ((given[0] * 16).round().clamp(-63, 63) / 16).roll(rank, -1)
    return given


def run(op: str, rank: int, tokens: int = 5, **options: Any) -> None:
    """One call on all ranks: what the reference gives, and the same bits everywhere."""
    given = parted(op, rank, tokens, **options)
    found = amd.bound(op).call(*given)
    same_results(found, OPS[op], given)
    same_on_all([each.contiguous().view(torch.uint8).numpy().tobytes() for each in found])


def numbers(rank: int, releases: list[str], folders: list[Path]) -> None:
    for release, folder in zip(releases, folders, strict=True):
        with installed(folder):
            communicators.close()
            for op in (op for op in FORMS if not refused(op, release)):
                run(op, rank)
                launches = communicators.communicator(world(), CPU).launches
                one_stage = between(release, "v0.1.19.post1", None)
                assert launches == [(one_stage, False)], (release, op)
                launches.clear()
            run(OP, rank, tokens=1000)  # 2 MB: in two stages in every release
            assert launches == [(False, False)]


def test_every_form_over_two_ranks(tmp_path):
    releases = ["v0.1.16.post3", "v0.1.17", "v0.1.18", "v0.1.19.post1", "v0.1.20.post1"]
    assert set(releases) <= set(RELEASES)
    together(numbers, tmp_path, releases, [shared_standin(release) for release in releases])


def agreement(rank: int) -> None:
    """One release, and one thing after the other that goes wrong on rank 1 alone."""
    module = sys.modules["aiter.dist.device_communicators.custom_all_reduce"]
    plain = module.CustomAllreduce

    def after(make: Callable[..., Any], words: str) -> None:
        """The set-up with another class on rank 1: alike refused, and the op right all the same."""
        communicators.close()
        module.CustomAllreduce = make if rank == 1 else plain
        before = backends._choices[0]
        run(OP, rank)
        assert backends._choices[0] > before, "the backends are asked again"
        assert words in same_on_all(communicators.why_not(world())), communicators.why_not(world())
        with pytest.raises(CommunicatorError, match=words) as caught:
            communicators.communicator(world(), CPU)
        assert caught.value.reason == communicators.why_not(world())
        case = case_maker(OPS[OP])(*parted(OP, rank, 5))
        assert words in same_on_all(Aiter(op=declared(OP)).refuses(case))
        module.CustomAllreduce = plain

    class Broken(plain):
        def __init__(self, *_: Any) -> None:
            raise MemoryError("no room for 384 MiB")

    class Off(plain):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.disabled = True

    class Smaller(plain):
        def __init__(self, group: Any, device: Any, max_size: int) -> None:
            super().__init__(group, device, max_size // 2)

    after(Broken, "rank 1: MemoryError: no room for 384 MiB")
    after(Off, "rank 1: AITER has switched its communicator off")
    after(Smaller, "ranks differ in max_size: rank 0 has 134217728, rank 1 67108864")
    after(None, "rank 1: aiter.dist.device_communicators.custom_all_reduce has no CustomAllreduce")

    # Whatever failed: after `close` it can be tried again.
    communicators.close(world())
    assert communicators.why_not(world()) is None
    made = communicators.communicator(world(), CPU)
    assert made is communicators.communicator(world(), CPU)
    assert (made.world_size, made.rank, made.max_size) == (2, rank, 128 * 1024 * 1024)
    assert dist.get_backend(made.group) == "gloo"
    communicators.close()
    assert made._ptr == 0


def renewed(rank: int, store: Path) -> None:
    group = world()
    # A group of the same name, later: the communicator of the first one is not used for it.
    first = communicators.communicator(group, CPU)
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    assert world() == group
    run(OP, rank)
    assert not first.launches
    assert communicators.communicator(group, CPU) is not first


def life(rank: int, folder: Path, store: Path) -> None:
    with imported(folder), installed(folder):
        sys.modules.get("aiter") or amd.bound(OP)
        amd.bound(OP)
        agreement(rank)
        renewed(rank, store)


def test_all_ranks_use_one_or_none_does(tmp_path):
    together(life, tmp_path, shared_standin("v0.1.20"), tmp_path / "second")


# ---- on one


def test_without_a_group_or_with_one_that_is_too_small():
    with installed(shared_standin("v0.1.20")):
        with pytest.raises(GroupError, match="init_process_group"):
            communicators.communicator("0", CPU)
        with group_of_one() as group:
            assert communicators.why_not(group) is None, "nothing is known before it was asked for"
            with pytest.raises(CommunicatorError, match="1 ranks: AITER's fused all-reduce takes 2, 4 and 8"):
                communicators.communicator(group, CPU)
            given = all_reduce_case(OP, group, (3,))
            same_results(amd.bound(OP).call(*given), OPS[OP], given)


def test_none_is_made_while_a_graph_is_captured(monkeypatch):
    with installed(shared_standin("v0.1.20")), group_of_one() as group:
        call = amd.bound(OP).call
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(CommunicatorError, match="while a CUDA graph is captured; call the op once before"):
            call(*all_reduce_case(OP, group, (3,)))
        assert not communicators._held


def test_what_is_too_large_or_outside_of_aiters_window_is_done_by_the_pieces():
    with installed(shared_standin("v0.1.20")):
        calls = {op: amd.bound(op).call for op in FORMS}
        with holding() as (group, ranks):
            given = all_reduce_case(OP, group, (2050,), width=16384)  # 64 MiB are 2048 rows
            same_results(calls[OP](*given), OPS[OP], given)
            given = all_reduce_case(OP, group, (5,))
            ranks.should_custom_ar = lambda _: False
            for op, call in calls.items():
                given = all_reduce_case(op, group, (5,))
                same_results(call(*given), OPS[op], given)
            assert not ranks.launches


def test_the_stages_of_a_call():
    with installed(shared_standin("v0.1.20")):
        call = amd.bound(OP).call
        with holding() as (group, ranks):
            for tokens, one_stage in ((1, True), (448, True), (449, False)):  # 128 * 7168 * 2 bytes among two ranks
                call(*all_reduce_case(OP, group, (tokens,)))
                assert ranks.launches.pop() == (one_stage, False), tokens


def test_a_case_knows_how_many_ranks_its_group_has():
    with installed(shared_standin("v0.1.20")), group_of_one() as group:
        case = case_maker(OPS[OP])(*all_reduce_case(OP, group, (5,)))
        assert call_of(case).world_size == 1
        assert "a world size other than 2, 4 and 8" in str(Aiter(op=declared(OP)).refuses(case))
        assert "0.1.20" in Aiter(op=declared(OP)).settings(case)
