"""`mla_decode` in a real vLLM engine that serves prompts, chunks of them, decodes, preempted, resumed and given-up requests, against vLLM alone.

Run by `make test-engines` in an environment of its own; the long run with -m "".
"""

from __future__ import annotations

import pytest

pytest.importorskip("vllm_layers")
from vllm_layers import RELEASE

from layerfuse.engines.vllm.releases import NEWEST

if RELEASE != NEWEST:
    pytest.skip("its worker for CPUs asks for other ops", allow_module_level=True)
from vllm_mixed import in_a_process, parted

ON = {"fusions": ["mla_decode"], "strict": True}
TIES = {("float32", "auto"): 1e-4, ("float32", "fp8"): 0.01, ("bfloat16", "auto"): 0.0625}
"""Dtype of the model and form of its cache -> how far the best two log probabilities are apart at most where rounding may choose the other: each of them
by a step of bfloat16, which is 0.03125 between 4 and 8; and an entry in fp8 on the edge of two values may become the other one."""


@pytest.mark.parametrize(
    ("steps", "dtype", "mode", "stored"),
    [
        (120, "float32", "VLLM_COMPILE", "auto"),
        (120, "float32", "NONE", "fp8"),
        pytest.param(120, "bfloat16", "NONE", "auto", marks=pytest.mark.thorough),  # test_vllm_decode holds its numbers
        pytest.param(10_000, "float32", "NONE", "auto", marks=pytest.mark.thorough),
        pytest.param(10_000, "bfloat16", "VLLM_COMPILE", "auto", marks=pytest.mark.thorough),
    ],
)
def test_mixed_steps_give_vllms_tokens_up_to_ties(steps: int, dtype: str, mode: str, stored: str) -> None:
    narrow = dtype == "bfloat16"
    alone = [(False, steps, steps, kind, "NONE", stored, narrow) for kind in dict.fromkeys((dtype, "float32"))]
    ours, own, *others = in_a_process([(ON, steps, steps, dtype, mode, stored, narrow), *alone])
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
    assert max(gaps, default=0.0) <= TIES[dtype, stored], gaps
    if narrow:  # no more texts part from those in float32 than vLLM's do, but for chance
        (truth,) = others
        (_, theirs), (_, ours_too) = parted(truth, own), parted(truth, ours)
        assert len(ours_too) <= len(theirs) + 2 * len(theirs) ** 0.5, (len(ours_too), len(theirs))
