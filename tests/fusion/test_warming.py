"""Every launch variant that fewer rows than recorded have is launched, and no more than once."""

from __future__ import annotations

from collections import Counter, namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from family_support import DEVICE, FORMS, Options, arguments
from ranks import run_on_ranks

from layerfuse.fusion import FUSIONS, backends, ops
from layerfuse.fusion.backends.symm_mem import workspaces
from layerfuse.fusion.backends.symm_mem.backend import SymmMem
from layerfuse.fusion.backends.symm_mem.launch import Layout, Workspace
from layerfuse.fusion.backends.triton import launcher
from layerfuse.fusion.backends.triton.tuning import STEPS
from layerfuse.fusion.ops import warming
from layerfuse.fusion.ops.agreement import RankDisagreementError
from layerfuse.fusion.ops.warming import recording, warm_up
from layerfuse.testing.op_inputs import HEADS

MOST = 9000
"""Rows of the recorded call: more than the last step."""

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="launches are taken down in the place of Triton's interpreter")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[Any]]:
    """The keys under which kernels are compiled -> how often that was asked for. Nothing is launched."""
    pytest.importorskip("triton")
    keys: Counter[Any] = Counter()
    monkeypatch.setattr(launcher, "first", lambda kernel, key, *_, **__: keys.update((key,)))
    backends.force("triton")
    yield keys
    backends.force(None)


def call(name: str, rows: int, options: Options) -> None:
    with torch.no_grad():
        getattr(torch.ops.layerfuse, name)(*arguments(FORMS[name], (rows,), 128, options))


@pytest.mark.parametrize("name", FORMS)
def test_every_variant_for_fewer_rows_is_launched_once(name: str, launched: Counter[Any]) -> None:
    if not any(backend == "triton" for backend, _ in backends.survey(name, "cpu")):
        pytest.skip("it has no kernel in Triton")
    # A gap of 8 columns: the rows are views, as latents are.
    options = Options(gap=8, column_major="group_quant" in name, tma_aligned="group_quant" in name)
    with recording() as calls:
        call(name, MOST, options)
        call(name, MOST, options)
    launched.clear()
    made = warm_up(calls)
    warmed = Counter(launched)
    assert made == warmed.total() > 1
    assert set(warmed.values()) == {1}
    launched.clear()
    heads = HEADS if FORMS[name].op.rows[0].heads else 1
    edges = {step // heads + beside for step in STEPS for beside in (0, 1)}
    for rows in sorted({1, 2, 16, 17, 500, 2500, MOST} | edges):
        call(name, rows, options)
    assert set(launched) == set(warmed)


@pytest.mark.parametrize("name", ["add_rms_norm", "rms_norm_group_quant", "gated_rms_norm"])
def test_rows_are_as_many_times_more_as_steps_are_longer_than_the_one_that_was_recorded(
    name: str, launched: Counter[Any]
) -> None:
    made = []
    for rows in (MOST, MOST // 10):
        with recording() as calls:
            call(name, rows, Options(gap=8, column_major="group_quant" in name, tma_aligned="group_quant" in name))
        launched.clear()
        made.append((warm_up(calls, tokens=rows // 3, most=MOST // 3), set(launched)))
    assert made[0] == made[1]
    assert warm_up(calls, tokens=7, most=MOST) < made[0][0]  # no whole number of rows a token


def test_what_is_warmed_up_has_no_more_rows_than_what_was_recorded(launched: Counter[Any]) -> None:
    with recording() as calls:
        call("add_rms_norm", 500, Options())
    launched.clear()
    assert warm_up(calls) == 3  # to 128 rows, to 384, to 640
    with recording() as calls:
        call("add_rms_norm", 0, Options())
    assert warm_up(calls) == 0


def test_off_the_grid_is_a_variant_of_its_own(launched: Counter[Any]) -> None:
    """Kernels are compiled for whether inputs start on 16 bytes."""
    memory, weight = torch.ones(501 * 64), torch.ones(64)
    keys = []
    for beyond in (0, 1):
        x = memory[beyond : beyond + 500 * 64].view(500, 64)
        with recording() as calls:
            ops.add_rms_norm(x, x, weight, 1e-6)
        assert warm_up(calls) == 3
        keys.append(set(launched))
        launched.clear()
    assert not keys[0] & keys[1]


def test_nothing_is_called_where_a_backend_has_one_launch_for_all() -> None:
    backends.force("reference")
    try:
        with recording() as calls, torch.no_grad():
            ops.add_rms_norm(torch.ones(500, 64), torch.ones(500, 64), torch.ones(64), 1e-6)
        assert len(calls) == 1
        with backends.counting() as counted:
            assert warm_up(calls) == 0
        assert not counted
    finally:
        backends.force(None)


def test_a_fused_all_reduce_is_launched_in_each_form_and_beyond(tmp_path: Path) -> None:
    """Its forms end at numbers of tokens of their own; from as many rows as a GPU holds programs on, they take turns."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group = dist.group.WORLD.group_name
        none = torch.empty(0)
        forms = [
            Workspace(Layout(0, 2, shots, most, 256, 2, 132), most, none, none, none, None, {})
            for shots, most in ((1, 26), (2, 292))
        ]
        like = torch.empty(1, 128, dtype=torch.bfloat16)
        workspaces._ready[dist.group.WORLD] = {workspaces._key(like): tuple(forms)}
        case = namedtuple("Case", "group")(group)
        assert {26, 132, 292, *STEPS} == set(SymmMem(op=FUSIONS["all_reduce_add_rms_norm"].op).steps(case))
    finally:
        dist.destroy_process_group()


def _on_a_rank(rank: int, differently: str) -> tuple[list[int], str]:
    """The rows of the all-reduces that were called, and the error."""
    group, called, said = dist.group.WORLD.group_name, [], ""
    x = torch.ones(9, 32)
    with torch.no_grad(), recording() as calls:
        ops.all_reduce_add_rms_norm(x, x, torch.ones(32), 1e-6, group)
        ops.add_rms_norm(x, x, torch.ones(32), 1e-6)
    steps = (2,) if differently == "steps" and rank else (2, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "steps", lambda *_: steps)
        if differently == "memory" and rank:
            patch.setattr(warming, "_tensors", Mock(side_effect=torch.OutOfMemoryError("no memory")))
        with backends.listening(lambda _, given: called.append(given[0].shape[0])):
            try:
                warm_up(calls)
            except RankDisagreementError as error:
                said = str(error)
    # Nobody is left in a collective that the others are not in.
    total = torch.ones(1)
    dist.all_reduce(total)
    assert float(total) == 2.0
    return called, said


def test_ranks_launch_the_same_together() -> None:
    assert run_on_ranks(_on_a_rank, 2, "") == [([1, 3, 5, 1, 3, 5], "")] * 2


@pytest.mark.parametrize(
    ("differently", "named"),
    [
        ("steps", "rank 0: all_reduce_add_rms_norm of (5, 32)\n  - rank 1: none of what the others have beside"),
        ("memory", "rank 1: OutOfMemoryError: no memory"),
    ],
)
def test_ranks_that_would_launch_differently_launch_nothing(differently: str, named: str) -> None:
    first, second = run_on_ranks(_on_a_rank, 2, differently)
    assert first == second
    assert first[0] == []
    assert "decided differently on the launches at load" in first[1]
    assert named in first[1]
