"""`mla_decode` in a real vLLM engine that serves prompts, chunks of them, decodes, preempted, resumed and given-up requests, against vLLM alone.

Run by `make test-engines` in an environment of its own; the long run with -m "".
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

pytest.importorskip("vllm_layers")
from vllm_layers import RELEASE

from layerfuse.engines.vllm.releases import NEWEST

if RELEASE != NEWEST:
    pytest.skip("its worker for CPUs asks for other ops", allow_module_level=True)
from vllm_mixed import in_a_process, parted

ON = {"fusions": ["mla_decode"], "strict": True}
TIES = {"float32": 1e-4, "bfloat16": 0.03125}
"""How far the best two log probabilities are apart at most where rounding may choose the other: a step of bfloat16 is that between 4 and 8."""


@cache
def alone(steps: int, dtype: str) -> dict[str, Any]:
    """vLLM without layerfuse."""
    return in_a_process(False, steps, steps, dtype)


@pytest.mark.parametrize(
    ("steps", "dtype", "mode"),
    [
        (300, "float32", "VLLM_COMPILE"),
        (300, "bfloat16", "NONE"),
        pytest.param(10_000, "float32", "NONE", marks=pytest.mark.thorough),
        pytest.param(10_000, "bfloat16", "VLLM_COMPILE", marks=pytest.mark.thorough),
    ],
)
def test_mixed_steps_give_vllms_tokens_up_to_ties(steps: int, dtype: str, mode: str) -> None:
    own, ours = alone(steps, dtype), in_a_process(ON, steps, steps, dtype, mode)
    # What is served when does not depend on who computes it.
    assert {key: own[key] for key in ("kinds", "preempted", "requests")} == {
        key: ours[key] for key in ("kinds", "preempted", "requests")
    }
    assert list(own["texts"]) == list(ours["texts"])
    kinds = own["kinds"]
    assert kinds["decodes alone"] > steps / 3 and kinds["both"] > steps / 10 and kinds["behind a chunk"] > steps / 10
    assert own["preempted"] > steps / 100
    assert ours["calls"]["mla_query_absorb"] == 2 * kinds["decodes alone"] and not own["calls"]
    compared, gaps = parted(own, ours)
    assert compared > steps, "too few tokens were compared"
    assert max(gaps, default=0.0) <= TIES[dtype], gaps
