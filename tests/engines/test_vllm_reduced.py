"""Fused all-reduces in models that vLLM does not compile, at its functions for a norm behind one: two real ranks on gloo, on a CPU.

Run by `make test-engines` in an environment of its own.
"""

from __future__ import annotations

import json
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("vllm_started")
from helpers import run_copy
from test_vllm_modules import HERE
from test_vllm_uncompiled_runs import EDGES
from vllm_started import ROUNDING

from layerfuse.adapters.errors import counted
from layerfuse.engines.vllm.native_fusions import REDUCES, Place, uncompiled
from layerfuse.engines.vllm.seams import SEAMS

FUSION = "all_reduce_add_rms_norm"
QUANTISED = f"{FUSION}_group_quant"
pytestmark = pytest.mark.skipif(FUSION not in HERE, reason="this vLLM has no such function")
LEFT = f"{FUSION}: 6 expected, 0 fused, 6 missed; called 0 times in the first run of every rank"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("reduced")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])

    def rank(number: int) -> subprocess.CompletedProcess[str]:
        return run_copy(f"import vllm_reduced_rank; vllm_reduced_rank.main({number}, {port!r}, {str(folder)!r})")

    with ThreadPoolExecutor(2) as both:
        done = list(both.map(rank, range(2)))
    assert all(rank.returncode == 0 for rank in done), "\n\n".join(rank.stdout + rank.stderr for rank in done)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("architecture", ["MiniMaxM3SparseForCausalLM", "Dots3NoteForCausalLM"])
def test_every_norm_behind_an_all_reduce_is_one_op_and_gives_vllms_numbers(
    architecture: str, ranks: list[dict[str, Any]]
) -> None:
    """Two norms of each of three layers but for the first, and the final one."""
    said = ranks[0][architecture]["said"]
    assert f"{FUSION}: 6 expected, 6 fused, 0 missed; called 6 times in the first run of every rank" in said
    assert "all ranks say the same" in said
    assert all(rank[architecture]["apart"] < ROUNDING for rank in ranks)


@pytest.mark.parametrize(
    ("architecture", "sites"), [("MiniMaxM3SparseForCausalLM", (4, 2)), ("Dots3NoteForCausalLM", (5, 1))]
)
def test_linears_behind_an_all_reduce_take_what_its_op_has_quantised(
    architecture: str, sites: tuple[int, int], ranks: list[dict[str, Any]]
) -> None:
    """Of MiniMax-M3's three layers the last is a mixture, whose norm is not quantised; nor is the final one."""
    said = ranks[0]["quantised"][architecture]["said"]
    for fusion, count in zip((QUANTISED, FUSION), sites, strict=True):
        assert (
            f"{fusion}: {count} expected, {count} fused, 0 missed; called {counted(count, 'time')} in the first run of every rank"
            in said
        )
    assert "all ranks say the same" in said
    assert all(rank["quantised"][architecture]["apart"] < EDGES for rank in ranks)


def test_where_one_rank_quantises_otherwise_all_sum_by_the_op_still(ranks: list[dict[str, Any]]) -> None:
    said = ranks[0]["otherwise"]["said"]
    assert f"{QUANTISED}: 5 expected, 0 fused, 5 missed; called 5 times in the first run of every rank" in said
    assert any(line.startswith("missed: ") and line.endswith("rank 1: it quantises otherwise") for line in said)
    assert "ranks that differ from rank 0: [1]" in said
    assert all(rank["otherwise"]["apart"] < EDGES for rank in ranks)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("wrapped", "rank 1: vllm.models.minimax_m3.nvidia.model:fused_allreduce_gemma_rms_norm is not vLLM's own: it is from vllm_reduced_rank"),
        ("louder", "rank 1: what runs there computes something else: its results are off by "),
    ],
)  # fmt: skip
def test_where_one_rank_finds_something_else_none_runs_it(change: str, why: str, ranks: list[dict[str, Any]]) -> None:
    said = ranks[0][change]["said"]
    assert LEFT in said
    assert any(line.startswith("missed: ") and why in line for line in said)
    assert "all ranks say the same" in said
    assert all(rank[change]["same"] for rank in ranks)


def test_it_is_asked_for_where_a_model_calls_such_a_function() -> None:
    """By name: FlashInfer's kernel is the peer where it runs. On AMD's GPUs those models are of other classes."""
    known = {seam.fusion for seam in SEAMS}
    for architecture in (*sorted(frozenset().union(*REDUCES.values())), "DeepseekV3ForCausalLM"):
        calls = architecture != "DeepseekV3ForCausalLM"
        engine = uncompiled("", [architecture], Place(vendor="nvidia", arch="sm90", ranks=2), known)
        amd = uncompiled("", [architecture], Place(vendor="amd", arch="gfx950", ranks=2), known)
        for fusion in (FUSION, QUANTISED):
            assert (fusion in engine.does) == calls, architecture
            assert (fusion in engine.refuses) == (not calls), architecture
            assert fusion in amd.refuses
