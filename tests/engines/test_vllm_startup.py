"""What layerfuse adds to vLLM's start, in seconds of CPU."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm_started")

import vllm_startup as startup


@pytest.mark.parametrize(
    "options",
    [
        None,
        pytest.param(False, marks=pytest.mark.thorough),
        pytest.param({"fusions": "none"}, marks=pytest.mark.thorough),
    ],
)
def test_a_start_with_nothing_to_do_costs_less_than_50_ms(options: Any) -> None:
    """Qwen3 in float32: on Hopper, as here, models with MLA, delta nets or quantised linears have fusions that are on by default."""
    seconds = [startup.in_a_process(call) for call in ("registering()", f"with_nothing_to_do({options!r}, 'sm90')")]
    assert sum(seconds) < 0.05, seconds


def test_fusions_cost_less_than_3_percent_of_vllms_compile_time() -> None:
    """Of a compile time without generated code: what a GPU's takes is several times as long. DeepSeek-V3 has four times the layers."""
    found = startup.in_a_process("with_fusions(16)")
    assert found["share"] < 0.03, found
    # Every part of layerfuse was timed.
    assert {"_at_specs", "_at_pass", "_at_piece", "FusionPass.__call__", "_finish"} <= {*found["by function"]}
