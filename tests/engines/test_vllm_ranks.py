"""layerfuse inside vLLM on two real tensor-parallel ranks: two processes, vLLM's own groups over gloo, one cache."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm_layers")

RANK = Path(__file__).with_name("vllm_rank.py")
OPTIONS = {"fusions": ["mla_dual_rms_norm", "all_reduce_add_rms_norm"], "strict": True}


def start(
    cache: Path,
    options: dict[str, Any] = OPTIONS,
    mode: str = "VLLM_COMPILE",
    steps: Sequence[int] = (),
) -> list[str]:
    """What each of two ranks prints; steps: numbers of tokens above which kernels are launched in another way."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                RANK,
                str(rank),
                "2",
                port,
                str(cache),
                json.dumps(options),
                mode,
                json.dumps(steps),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n\n".join(said)
    return said


def test_two_ranks_fuse_alike_share_a_cache_and_give_one_report(tmp_path: Path) -> None:
    hashes = set()
    # Then rank 0 reads its compiled model, and rank 1 has none and gets the pieces from Inductor's cache.
    for second_start in (False, True):
        first, second = start(tmp_path)
        assert "layerfuse" not in second
        lines = [line.strip() for line in first.splitlines()]
        for fusion, sites in (("all_reduce_add_rms_norm", 6), ("mla_dual_rms_norm", 3)):
            called = f"called {sites} times in the profiling run of every rank"
            assert f"{fusion}: {sites} expected, {sites} fused, 0 missed; {called}" in lines
        assert "all ranks say the same" in lines

        (path,) = tmp_path.rglob("layerfuse-report.json")
        (module,) = json.loads(path.read_text())["modules"].values()
        assert [verdict["rank"] for verdict in module["ranks"]] == [0, 1]
        found = tuple(verdict["sources"] for verdict in module["ranks"])
        assert sum(found[0].values()) == sum(found[1].values()) == 4
        # In the first start either may be the quicker one, whose pieces the other gets.
        assert second_start is False or found == ({"kept": 4}, {"cache": 4})
        assert module["ranks"][0]["fused"] == module["ranks"][1]["fused"]
        for rank, said in enumerate((first, second)):
            words = said.splitlines()[-1].split()
            assert words[:2] == ["RANK", str(rank)] and float(words[3]) < 1e-4, said
            hashes.add(words[5])
        (compiled,) = tmp_path.rglob("rank_1_0/model")
        shutil.rmtree(compiled.parent)
    assert len(hashes) == 1


def test_two_ranks_launch_all_reduces_for_fewer_tokens_together(tmp_path: Path) -> None:
    for said in start(tmp_path, steps=[1, 3]):
        # Two chains, each for 1, 2 and 4 tokens of the profiling run's 6.
        assert "layerfuse: 6 launches for fewer tokens than the profiling run's" in said


def test_two_ranks_that_compile_nothing_report_together(tmp_path: Path) -> None:
    first, second = start(tmp_path, {"fusions": ["add_rms_norm"], "strict": True}, "NONE")
    assert "layerfuse" not in second
    lines = [line.strip() for line in first.splitlines()]
    called = "called 6 times in the profiling run of every rank"
    assert f"add_rms_norm: 6 expected, 6 fused, 0 missed; {called}" in lines
    assert "all ranks say the same" in lines


def test_all_ranks_take_the_decode_chain_or_none(tmp_path: Path) -> None:
    """In the second start an op does not run on the second rank."""
    first, second = start(tmp_path, {"fusions": ["mla_decode"]}, "NONE")
    alone = "layerfuse: mla_decode leaves vLLM's MLA layers alone: rank 1: RuntimeError: no such kernel"
    both, none = (part.splitlines() for part in first.split("start 0"))
    called = "called 3 times in the profiling run of every rank, none of them to decode"
    assert f"  mla_decode: stands in 3 of 3 MLA layers; {called}" in both
    assert "  all ranks say the same" in both
    assert "  mla_decode: stands in 0 of 3 MLA layers; called 0 times in the profiling run of every rank" in none
    assert alone in none and alone in second.splitlines()
    assert "  all ranks say the same" in none


def test_another_tensor_parallel_group_takes_no_piece_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused all-reduce holds torch's name of its group, and pipeline stages and replicas share a cache."""
    from types import SimpleNamespace

    from vllm.distributed import parallel_state

    from layerfuse.engines.vllm.passes import FusionPass

    pipeline: Any = SimpleNamespace(uuid=lambda: "one plan")

    def uuid_in(group: str) -> str:
        there = SimpleNamespace(device_group=SimpleNamespace(group_name=group))
        monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: True)
        monkeypatch.setattr(parallel_state, "get_tp_group", lambda: there)
        return FusionPass(pipeline).uuid()

    assert uuid_in("3") == uuid_in("3") != uuid_in("4")
    monkeypatch.undo()
    assert FusionPass(pipeline).uuid() == "one plan over no group"
