"""Where fused all-reduces over symmetric memory run, what they refuse with which reason, and up to how many tokens they are taken."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import run_python
from reduced_support import sharded_spec

from layerfuse.fusion import FUSIONS, FusionConfig, Pipeline, Target, backends, plan
from layerfuse.fusion.backends.backend import backend_of
from layerfuse.fusion.backends.symm_mem.crossovers import PIECE_BYTES, rows_at_once, shots_of
from layerfuse.fusion.ops.library import case_type
from layerfuse.fusion.rewrite.ranks import kernels_here

OP = FUSIONS["all_reduce_add_rms_norm"].op


def refusal(group: str, width: int = 2880, dtype: torch.dtype = torch.bfloat16) -> str | None:
    kernel = next(kernel for kernel in FUSIONS[OP.name].backends if kernel.backend == "symm_mem")
    case = case_type(OP)(dtype=dtype, width=width, weight_dtype=dtype, group=group, weight_offset=0.0)
    return backend_of(OP, kernel).refuses(case)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[str]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("hidden", "itemsize", "world_size", "forms"),
    [
        (7168, 2, 2, [(1, 4096)]),
        (7168, 2, 4, [(1, 19), (2, 4096)]),
        (7168, 2, 8, [(1, 9)]),
        (2880, 2, 4, [(1, 48), (2, 10194)]),
        (2880, 2, 8, [(1, 22)]),
        (7168, 2, 3, [(1, 19), (2, 4096)]),
        (7168, 2, 5, [(1, 9)]),
        (7168, 4, 8, [(1, 4)]),
        (16384, 2, 8, [(1, 4)]),
        (16385, 2, 2, []),
        (7168, 2, 1, []),
        (7168, 2, 9, []),
    ],
)
def test_shots_and_their_tokens(hidden: int, itemsize: int, world_size: int, forms: list[tuple[int, int]]) -> None:
    assert list(shots_of(hidden, itemsize, world_size)) == forms


@pytest.mark.parametrize("row_bytes", [16, 5760, 14336, 32768])
def test_launches_start_on_the_grid_and_buffers_stay_small(row_bytes: int) -> None:
    rows = rows_at_once(1 << 20, row_bytes)
    assert rows % 16 == 0
    assert PIECE_BYTES - 16 * row_bytes < rows * row_bytes <= PIECE_BYTES
    assert rows_at_once(5, row_bytes) == 5


def test_plans_read_crossovers_without_torch() -> None:
    done = run_python(
        "import sys\nimport layerfuse.fusion.backends.symm_mem.crossovers\nassert 'torch' not in sys.modules"
    )
    assert done.returncode == 0, done.stderr


def test_it_stands_between_aiter_and_the_reference() -> None:
    assert [name for name, _ in backends.survey(OP.name, "cuda")] == ["aiter", "symm_mem", "reference"]
    assert dict(backends.survey(OP.name, "cpu"))["symm_mem"] == "symmetric memory is taken on NVIDIA GPUs, not on cpu"


def test_what_is_refused(group: str) -> None:
    assert refusal(group) == "the kernel is for 2 to 8 GPUs of one host, not for 1"
    assert "no process group of this process is called 'nobody'" in str(refusal("nobody"))
    assert "torch.float64" in str(refusal(group, dtype=torch.float64))
    assert "wider than the 65536" in str(refusal(group, width=70000))


def test_without_process_groups() -> None:
    assert "call torch.distributed.init_process_group" in str(refusal("0"))


def test_workspaces_go_with_their_group(group: str) -> None:
    """And with them the functions that launch on them."""
    pytest.importorskip("triton")
    from layerfuse.fusion.backends.symm_mem import workspaces
    from layerfuse.fusion.backends.symm_mem.functions import function_of
    from layerfuse.fusion.backends.symm_mem.launch import Layout, Workspace

    def used() -> weakref.ref[torch.Tensor]:
        own = dist.new_group()
        x, buffer = torch.ones(0, 64), torch.zeros(64, dtype=torch.uint8)
        addresses, phases = torch.zeros(2, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)
        layout = Layout(rank=0, world_size=2, shots=1, most=4, row_bytes=256, item=4, resident=4)
        side = Workspace(layout, 4, addresses, phases, phases[:1], buffer, {})
        workspaces._ready[own] = {workspaces._key(x): (side,)}
        function_of(OP)(x, x, torch.ones(64), 1e-6, own.group_name, 0.0)
        assert own.group_name != group
        dist.destroy_process_group(own)
        return weakref.ref(buffer)

    left = used()
    gc.collect()
    assert left() is None


def test_what_ranks_find_out_together_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start whose rendezvous failed compiles the shorter chain: another start must not be served with that."""

    def found(problem: str | None) -> tuple[str, ...]:
        class Own(backends.Backend):
            name = "of the tests"

            def runs_on(self, device: str) -> tuple[bool, str]:
                return device == "cuda", "of the tests"

            def prepare(self, case: object, device: object) -> str | None:
                return problem

        monkeypatch.setitem(backends._backends, OP.name, [Own(op=OP), *before])
        backends.decide_again()
        return kernels_here(made, "0", torch.bfloat16, torch.device("cuda", 0))

    before = backends._backends[OP.name]
    made = plan([("", sharded_spec(2, 0, width=32))], Target.named("sm90"), FusionConfig(switches={OP.name: True}))
    try:
        assert found(None) == ("32 columns: of the tests",)
        assert found("rank 1: no memory") == ("32 columns: None",)
        assert kernels_here(made, "0", torch.bfloat16, torch.device("cpu")) == ()
    finally:
        monkeypatch.undo()
        backends.decide_again()
    # Inductor alone asks before the ranks have met, and keeps nothing then.
    assert Pipeline(made).uuid() is None
    alone = plan([("", sharded_spec(1, 0, width=32))], Target.named("sm90"))
    assert Pipeline(alone).uuid() is not None


def test_the_forced_backend_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Pipeline(plan([("", sharded_spec(2, 0, width=32))], Target.named("cpu")))
    keys = set()
    for name in ("", "reference", "triton"):
        monkeypatch.setenv(backends.ENVIRONMENT, name)
        keys.add(made.uuid())
    monkeypatch.delenv(backends.ENVIRONMENT)
    assert len(keys) == 3
    assert made.uuid() in keys
