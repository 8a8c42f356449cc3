"""A whole real SGLang engine on a CPU, started once by its own entry point, with layerfuse in its wheel: two ranks, prefill and decode."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from helpers import shown

pytestmark = pytest.mark.skipif(
    not all(map(find_spec, ("sglang", "xgrammar"))), reason="a whole engine takes SGLang and xgrammar"
)
HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """What the engine and transformers say, the engine's log, and the report."""
    folder = tmp_path_factory.mktemp("sglang")
    report = folder / "report.json"
    environment = {
        **os.environ,
        "PYTHONPATH": str(HERE / "sglang_site"),
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "0|0",  # of each rank, which else takes a NUMA node of its own
        "HF_HUB_OFFLINE": "1",
        "LAYERFUSE_FUSIONS": "add_rms_norm",
        "LAYERFUSE_STRICT": "1",
        "LAYERFUSE_REPORT": str(report),
    }
    command = [sys.executable, str(HERE / "sglang_started.py"), str(folder / "model")]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, cwd=folder)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    return json.loads(ran.stdout.splitlines()[-1]), ran.stderr + ran.stdout, json.loads(report.read_text())


def test_it_says_what_transformers_says(engine: Any) -> None:
    tokens, _, _ = engine
    assert tokens["found"] == tokens["expected"]


def test_chunks_of_prompts_and_what_the_radix_cache_holds_say_the_same(engine: Any) -> None:
    """The first prompt is longer than a step of prompts; the second time SGLang computes what it does not hold."""
    tokens, log, _ = engine
    assert tokens["held"][0] == [0, 0] and min(tokens["held"][1]) > 0
    assert tokens["cached"] == tokens["expected"]
    assert any("#new-token: 4," in line and "#cached-token: 0" in line for line in log.splitlines()), "a chunk of four"


def test_its_log_says_that_every_norm_with_an_add_was_one_call_on_every_rank(engine: Any) -> None:
    _, log, _ = engine
    lines, page = [line.strip() for line in log.splitlines()], shown("docs/sglang.md", "2 ranks")
    assert "add_rms_norm: 4 expected, 4 fused, 0 missed; called 4 times in the first run of every rank" in page
    assert [line for line in page if not any(line in said for said in lines)] == []
    assert log.count("in SGLang 0.") == 1, "one rank speaks for all, once"


def test_the_report_has_each_site_and_each_rank(engine: Any) -> None:
    _, _, report = engine
    (module,) = report["modules"].values()
    assert (module["missed"], module["problems"], module["unknown"]) == ({}, [], {})
    assert [rank["called"]["add_rms_norm"] for rank in module["ranks"]] == [4, 4]
    fused = [row["site"] for row in module["sites"] if row["outcome"] == "fused"]
    assert len(fused) == 4
