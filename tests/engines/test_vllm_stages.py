"""Stages of a pipeline: what vLLM builds on each, what is planned there, and a start of each.

Run by `make test-engines` in an environment of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import in_turn

pytest.importorskip("vllm_started")
from reports import Said, told
from test_vllm_plugin import ADD
from vllm_layers import MODELS, build_model
from vllm_started import ROUNDING, apart, started
from whole_models import check_stages

REDUCED = "all_reduce_add_rms_norm"


@pytest.mark.parametrize(("name", "shared"), in_turn(MODELS, [(1, 2), (1, 4), (2, 2)]))
def test_the_stages_together_are_the_whole_model(name: str, shared: tuple[int, int]) -> None:
    tp, stages = shared
    rank = tp - 1
    models = [build_model(name, tp=tp, rank=stage * tp + rank, pp=stages) for stage in range(stages)]
    check_stages(build_model(name, tp=tp, rank=rank), models)


@pytest.mark.parametrize(("name", "stage"), in_turn(["gpt-oss-20b", "qwen3-next"], [0, 1]))
def test_every_stage_starts_in_strict(name: str, stage: int, tmp_path: Path, said: Said) -> None:
    """vLLM's gpt-oss builds the final norm on every rank, and runs it on the last."""
    sites = (3, 5)[stage]
    place = {"pp": 2, "rank": stage}
    with started(name, tmp_path, layerfuse={"fusions": [ADD], "strict": True}, **place) as engine:
        found = engine()
    with started(name, tmp_path, layerfuse=False, mode="NONE", **place) as engine:
        assert apart(found, engine()) < ROUNDING
    assert told(ADD, sites) in said()


def test_a_stage_that_holds_all_layers_and_is_not_the_last_has_no_final_norm(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "4,0")
    with started("gpt-oss-20b", tmp_path, layerfuse={"fusions": [ADD], "strict": True}, pp=2, rank=0) as engine:
        engine()
    assert told(ADD, 7) in said()


@pytest.mark.parametrize(("stage", "partition"), [(0, "0,4"), (1, "4,0")])
def test_a_stage_without_layers_is_told_and_stops_nobody(
    stage: int, partition: str, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", partition)
    options = {"fusions": "all", "strict": True}
    with started("gpt-oss-20b", tmp_path, layerfuse=options, pp=2, rank=stage, mode="NONE"):
        pass
    why = "this stage of the pipeline holds none of its layers"
    assert said() == [f"layerfuse: nothing is fused in GptOssForCausalLM: {why}"]


@pytest.mark.parametrize(("stage", "sites"), [pytest.param(0, 3, marks=pytest.mark.thorough), (1, 4)])
def test_what_another_stage_has_summed_is_not_expected_to_be_summed_here(
    stage: int, sites: int, tmp_path: Path, said: Said
) -> None:
    options = {"fusions": [REDUCED], "strict": True}
    with started("gpt-oss-20b", tmp_path, layerfuse=options, tp=2, pp=2, rank=2 * stage) as engine:
        engine()
    assert told(REDUCED, sites) in said()
