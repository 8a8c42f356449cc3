"""layerfuse inside vLLM on two real tensor-parallel ranks: two processes, vLLM's own groups over gloo, one cache."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm_started")
from helpers import run_copy, shown
from vllm_layers import MODELS, RELEASE
from vllm_started import ROUNDING

from layerfuse.adapters.errors import counted
from layerfuse.engines.vllm.releases import NEWEST, RELEASES

ADD, DUAL, GATED, REDUCED = "add_rms_norm", "mla_dual_rms_norm", "gated_rms_norm", "all_reduce_add_rms_norm"
GROUPS = {
    f"{REDUCED}_group_quant": 2,
    REDUCED: 2,  # the final norm, and the one in front of the experts
    f"{DUAL}_group_quant": 2,
    "rms_norm_group_quant": 1,
    "silu_mul_group_quant": 1,
}
FP8 = {"dtype": "bfloat16", "kernel": "cutlass:CutlassFp8BlockScaledMMKernel"}
BY_DEFAULT = {"layerfuse": None, "arch": "sm90"}
RUNS: dict[str, tuple[dict[str, Any], dict[str, int], *tuple[str, ...]]] = {
    "deepseek-v3": ({"model": "deepseek-v3", "steps": [1, 3]}, {REDUCED: 4, DUAL: 2}),
    "deepseek-v3-fp8-by-default": (
        {"model": "deepseek-v3", **FP8, **BY_DEFAULT},
        {f"{REDUCED}_group_quant": 2, f"{ADD}_group_quant": 2, **GROUPS},
        # Beyond the 4096 tokens up to which the all-reduce is fused; the profiling run has six.
        f"{ADD}_group_quant",
    ),
    "gpt-oss-by-default": ({"model": "gpt-oss-20b", "dtype": "bfloat16", **BY_DEFAULT}, {REDUCED: 4}),
    "deepseek-v3-modules": ({"model": "deepseek-v3", "mode": "NONE"}, {ADD: 4, DUAL: 2}),
    "kimi-linear": ({"model": "kimi-linear", "mode": "NONE"}, {ADD: 7, GATED: 3}),
    "qwen3-next": ({"model": "qwen3-next"}, {REDUCED: 8, GATED: 3}),
}
"""Name -> what `vllm_rank.run` is given, the sites of each fusion, and the fusions that its profiling run does not come to."""
DECODE = {
    name: {"layerfuse": {"fusions": ["mla_decode"]}, "broken": name.endswith("broken")}
    for name in ("mla_decode", "mla_decode-broken")
}
HERE = {name: each for name, each in RUNS.items() if each[0]["model"] in MODELS}
AGAIN = ("deepseek-v3", "deepseek-v3-fp8-by-default")
"""Those that start warm too: for all tokens, and for two ranges of them."""
STARTS = [(name, when) for name in HERE for when in ("cold", "warm") if when == "cold" or name in AGAIN]


def _there(given: dict[str, Any], fused: dict[str, int]) -> list[str]:
    """The fusions that have a site: 0.26 has no switch for both latent norms in a model that it does not compile."""
    return [name for name in fused if given.get("mode") != "NONE" or name in RELEASES[RELEASE].seams]


GIVEN = {
    name: {"layerfuse": {"fusions": _there(given, fused), "strict": True}, **given}
    for name, (given, fused, *_) in HERE.items()
} | DECODE
"""Name -> what a rank is given."""


def start(folder: Path, names: Collection[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What each of two ranks says of these models, and the reports."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    given = {name: GIVEN[name] for name in names}

    def rank(number: int) -> subprocess.CompletedProcess[str]:
        code = f"import vllm_rank; vllm_rank.main({number}, 2, {port!r}, {str(folder)!r}, {given!r})"
        return run_copy(code)

    with ThreadPoolExecutor(2) as both:
        ranks = list(both.map(rank, range(2)))
    assert all(rank.returncode == 0 for rank in ranks), "\n\n".join(rank.stdout + rank.stderr for rank in ranks)
    reports = {}
    for name in HERE.keys() & names:
        (path,) = (folder / name).rglob("layerfuse-report.json")
        (reports[name],) = json.loads(path.read_text())["modules"].values()
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)], reports


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two starts. In the second, rank 1 does not have its compiled DeepSeek-V3, and gets the pieces from Inductor's cache."""
    folder = tmp_path_factory.mktemp("ranks")
    cold = start(folder, GIVEN)
    (compiled,) = (folder / "deepseek-v3").rglob("rank_1_0/model")
    shutil.rmtree(compiled.parent)
    return {"cold": cold, "warm": start(folder, AGAIN)}


@pytest.mark.parametrize(("name", "when"), STARTS)
def test_two_ranks_fuse_every_site_alike_and_give_vllms_numbers(name: str, when: str, starts: dict[str, Any]) -> None:
    given, fused, *uncalled = HERE[name]
    ranks, reports = starts[when]
    first, second = (rank[name] for rank in ranks)
    compiled = given.get("mode") != "NONE"
    fused = {fusion: fused[fusion] for fusion in _there(given, fused)}
    run = "profiling run" if compiled else "first run"
    calls = {fusion: 0 if fusion in uncalled else sites for fusion, sites in fused.items()}
    alone = [line for line in first["said"] if "mla_decode leaves vLLM's MLA layers alone" in line]
    assert len(alone) == (name == "deepseek-v3-fp8-by-default"), (
        "on by default, and this attention's forward is a stand-in's"
    )
    said = [line for line in first["said"] if line not in alone]
    assert [line for line in said if "expected" in line] == [
        f"{fusion}: {sites} expected, {sites} fused, 0 missed; called {counted(calls[fusion], 'time')} in the {run} of every rank"
        for fusion, sites in fused.items()
    ]
    assert "all ranks say the same" in first["said"]
    assert not any("launches" not in line for line in second["said"])
    assert first["warm"] == (compiled and when == "warm")
    assert {rank[name]["key"] for ranks, _ in starts.values() for rank in ranks if name in rank} == {first["key"]}
    assert [verdict["rank"] for verdict in reports[name]["ranks"]] == [0, 1]
    assert reports[name]["ranks"][0]["fused"] == reports[name]["ranks"][1]["fused"]
    for rank in (first, second):
        assert rank["near"] if "dtype" in given else rank["apart"] < ROUNDING


@pytest.mark.skipif(RELEASE != NEWEST, reason="the README shows the newest release's")
def test_the_readme_shows_the_log_of_two_ranks(starts: dict[str, Any]) -> None:
    first, second = (rank["qwen3-next"]["said"] for rank in starts["cold"][0])
    page = shown("README.md", "2 ranks")
    told = iter(first)
    assert all(line in told for line in page if line != "...") and second == []


def test_ranks_that_start_apart_take_what_the_cache_has_for_each(starts: dict[str, Any]) -> None:
    sources = {
        when: [verdict["sources"] for verdict in reports["deepseek-v3"]["ranks"]]
        for when, (_, reports) in starts.items()
    }
    # In the first start either may be the quicker one, whose pieces the other gets.
    assert [sum(found.values()) for found in sources["cold"]] == [3, 3]
    assert sources["warm"] == [{"kept": 3}, {"cache": 3}]


def test_two_ranks_launch_all_reduces_for_fewer_tokens_together(starts: dict[str, Any]) -> None:
    ranks, _ = starts["cold"]
    for rank in ranks:
        # Two chains, each for 1, 2 and 4 tokens of the profiling run's 6.
        (line,) = (line for line in rank["deepseek-v3"]["said"] if "launches" in line)
        assert line.startswith("layerfuse: 6 launches for other numbers of tokens than the first run's")


def test_all_ranks_take_the_decode_chain_or_none(starts: dict[str, Any]) -> None:
    ranks, _ = starts["cold"]
    for rank in ranks:
        alone = "layerfuse: mla_decode leaves vLLM's MLA layers alone: rank 1: RuntimeError: no such kernel"
        assert alone in rank["mla_decode-broken"]["said"]
        assert alone not in rank["mla_decode"]["said"]
    both, none = (ranks[0][name]["said"] for name in DECODE)
    called = "called 3 times in the first run of every rank"
    assert f"mla_decode: 3 expected, 3 fused, 0 missed; {called}" in both
    assert "mla_decode: 3 expected, 0 fused, 3 missed; called 0 times in the first run of every rank" in none
    assert "all ranks say the same" in both
    assert "all ranks say the same" in none


def test_another_tensor_parallel_group_takes_no_piece_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused all-reduce holds torch's name of its group, and pipeline stages and replicas share a cache."""
    from types import SimpleNamespace

    from vllm.distributed import parallel_state

    from layerfuse.engines.vllm.passes import FusionPass

    pipeline: Any = SimpleNamespace()

    def uuid_in(group: str) -> str:
        there = SimpleNamespace(device_group=SimpleNamespace(group_name=group))
        monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: True)
        monkeypatch.setattr(parallel_state, "get_tp_group", lambda: there)
        return FusionPass(pipeline, "one plan").uuid()

    assert uuid_in("3") == uuid_in("3") != uuid_in("4")
    monkeypatch.undo()
    assert FusionPass(pipeline, "one plan").uuid() == "one plan over no group"
