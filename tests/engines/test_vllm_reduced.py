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
from vllm_started import ROUNDING

from layerfuse.engines.vllm.native_fusions import REDUCES, Place, uncompiled
from layerfuse.engines.vllm.seams import SEAMS

FUSION = "all_reduce_add_rms_norm"
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
        assert (FUSION in engine.does) == calls, architecture
        assert (FUSION in engine.refuses) == (not calls), architecture
        amd = uncompiled("", [architecture], Place(vendor="amd", arch="gfx950", ranks=2), known)
        assert FUSION in amd.refuses
