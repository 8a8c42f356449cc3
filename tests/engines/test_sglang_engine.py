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


def started(folder: Path, *arguments: str, fusions: str, **more: str) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """What the engine and transformers say, the engine's log, and the report."""
    report = folder / "report.json"
    environment = {
        **os.environ,
        "PYTHONPATH": str(HERE / "sglang_site"),
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "LAYERFUSE_FUSIONS": fusions,
        "LAYERFUSE_STRICT": "1",
        "LAYERFUSE_REPORT": str(report),
        **more,
    }
    command = [sys.executable, str(HERE / "sglang_started.py"), str(folder / "model"), *arguments]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, cwd=folder)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    return json.loads(ran.stdout.splitlines()[-1]), ran.stderr + ran.stdout, json.loads(report.read_text())


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, dict[str, Any]]:
    # Of each rank, which else takes a NUMA node of its own.
    return started(tmp_path_factory.mktemp("sglang"), fusions="add_rms_norm", SGLANG_CPU_OMP_THREADS_BIND="0|0")


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


def test_decode_steps_of_mla_layers_say_what_transformers_says(tmp_path: Path) -> None:
    """By fa3's own methods (`fa3_on_cpu`), behind prompts in chunks and behind what the radix cache holds."""
    more = {"SGLANG_CPU_OMP_THREADS_BIND": "0", "LAYERFUSE_TEST_FA3_ON_CPU": "1"}
    tokens, log, report = started(tmp_path, "mla", fusions="mla_decode", **more)
    assert tokens["found"] == tokens["cached"] == tokens["expected"]
    assert tokens["held"][0] == [0, 0] and min(tokens["held"][1]) > 0
    page = shown("docs/sglang.md", "none of 2 layers had decoded")
    assert [line for line in page if line not in "\n".join(each.strip() for each in log.splitlines())] == []
    assert "a decode step is done as SGLang does it" not in log and "leaves an MLA layer alone" not in log
    (module,) = report["modules"].values()
    assert (module["missed"], module["problems"], module["unknown"]) == ({}, [], {})
    assert len(module["ranks"][0]["fused"]["mla_decode"]) == 2
