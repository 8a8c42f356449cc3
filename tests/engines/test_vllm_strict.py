"""What `strict` promises in vLLM: an engine that starts has what was asked for. Without it the same is one warning.

Run by `make test-engines` in an environment of its own.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("vllm_started")
from test_vllm_modules import GATED
from test_vllm_plugin import ADD, DUAL, OwnLoader, fresh, said  # noqa: F401 (`fresh` is a fixture)
from vllm.model_executor import model_loader
from vllm_started import engine_config, in_engine, load, started

from layerfuse.engines.vllm.loading import NotFusedError, units_of
from layerfuse.engines.vllm.options import Options
from layerfuse.engines.vllm.plugin import NotHereError

HOW = "vLLM loaded the model in a way that layerfuse does not know (load_format 'dummy')"


@pytest.mark.parametrize("mode", ["VLLM_COMPILE", "NONE"])
def test_a_second_engine_that_another_loader_brought_is_not_taken_for_read(
    mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started("deepseek-v3", tmp_path / "first", layerfuse={"fusions": [ADD], "strict": True}, mode=mode) as engine:
        engine()
    monkeypatch.setitem(model_loader._LOAD_FORMAT_TO_MODEL_LOADER, "dummy", OwnLoader)
    caplog.clear()
    with started("deepseek-v3", tmp_path / "second", layerfuse={"fusions": [ADD]}, mode=mode) as engine:
        engine()
    assert said(caplog) == [f"layerfuse: nothing is fused: {HOW}"]
    with (
        pytest.raises(NotHereError, match=re.escape(HOW)),
        started("deepseek-v3", tmp_path / "second", layerfuse={"fusions": [ADD], "strict": True}, mode=mode),
    ):
        pass


def test_a_loader_that_calls_vllms_and_wraps_the_model_is_one_that_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Around(OwnLoader):
        def load_model(self, *args: Any, **kwargs: Any) -> Any:
            return super(OwnLoader, self).load_model(*args, **kwargs)

    monkeypatch.setitem(model_loader._LOAD_FORMAT_TO_MODEL_LOADER, "dummy", Around)
    with started("deepseek-v3", tmp_path, layerfuse={"fusions": [ADD], "strict": True}, mode="NONE") as engine:
        engine()
    assert f"{ADD}: 6 expected, 6 fused, 0 missed; called 6 times in the first run" in said(caplog)


@pytest.mark.parametrize("mode", ["VLLM_COMPILE", "NONE"])
@pytest.mark.parametrize(
    ("names", "unfound", "why"),
    [
        ([ADD, GATED], GATED, ": none of its layers has such a chain"),
        ([f"+{ADD}", f"+{GATED}", f"-{DUAL}"], GATED, ": none of its layers has such a chain"),
        ([ADD, "all_reduce_add_rms_norm"], "all_reduce_add_rms_norm", ""),
    ],
)
def test_a_fusion_that_is_named_and_has_no_site_is_told_and_stops_a_strict_engine(
    names: list[str], unfound: str, why: str, mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with started("deepseek-v3", tmp_path, layerfuse={"fusions": names}, mode=mode) as engine:
        engine()
    told = f"{unfound} is asked for, and has no site in DeepseekV3ForCausalLM{why}"
    assert sum(line.startswith(f"layerfuse: {told}") for line in said(caplog)) == 1
    (path,) = tmp_path.rglob("layerfuse-report.json")
    (module,) = json.loads(path.read_text())["modules"].values()
    assert list(module["unfound"]) == [unfound]
    with (
        pytest.raises(NotFusedError, match=f"layerfuse is strict, and {told}"),
        started("deepseek-v3", tmp_path, layerfuse={"fusions": names, "strict": True}, mode=mode),
    ):
        pass


def test_mla_decode_in_a_model_without_mla_is_such_a_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = [ADD, "mla_decode"]
    told = "mla_decode is asked for, and has no site in GptOssForCausalLM: it has no MLA layer"
    with started("gpt-oss-20b", tmp_path, layerfuse={"fusions": names}):
        pass
    assert said(caplog) == [f"layerfuse: {told}"]
    with (
        pytest.raises(NotFusedError, match=told),
        started("gpt-oss-20b", tmp_path, layerfuse={"fusions": names, "strict": True}),
    ):
        pass


def test_what_is_asked_for_without_a_name_may_have_no_site(tmp_path: Path) -> None:
    for fusions in ({"fusions": "all"}, {"level": 2}, {"fusions": f"-{DUAL}"}):
        with started("gpt-oss-20b", tmp_path, layerfuse={**fusions, "strict": True}):
            pass


@pytest.mark.parametrize("where", ["a stage of a pipeline", "beside a draft", "a draft"])
def test_where_another_model_may_have_the_site_a_strict_engine_starts(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = engine_config("gpt-oss-20b", layerfuse=False)
    options = Options(fusions=f"{ADD},{GATED}", strict=True)
    with in_engine(made, tmp_path):
        model = load(made).model
        speculative = mock.Mock(draft_model_config=made.model_config)
        with (
            mock.patch.dict(vars(made), speculative_config=speculative if where == "beside a draft" else None),
            mock.patch.object(made.parallel_config, "pipeline_parallel_size", 2 if "stage" in where else 1),
        ):
            ((_, unit),) = units_of(made, model, options, draft=where == "a draft")
        # Where drafts come from the prompt alone, no other model is loaded.
        same = mock.Mock(draft_model_config=made.model_config, target_model_config=made.model_config)
        with mock.patch.dict(vars(made), speculative_config=same), pytest.raises(NotFusedError, match=GATED):
            list(units_of(made, model, options))
    assert list(unit.unfound) == [GATED]
    assert any(f"{GATED} is asked for, and has no site in GptOssForCausalLM" in line for line in said(caplog))
