"""What `strict` promises in vLLM: an engine that starts has what was asked for. Without it the same is one warning.

Run by `make test-engines` in an environment of its own.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import in_turn
from torch import Tensor, nn

pytest.importorskip("vllm_started")
from reports import FIRST, Said, told
from test_vllm_modules import GATED
from test_vllm_plugin import ADD, DUAL, SHORT, OwnLoader
from vllm import forward_context
from vllm.model_executor import model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.models.deepseek_v2 import DeepseekV2ForCausalLM, DeepseekV2Model
from vllm_host import import_model
from vllm_started import TINY, Started, engine_config, in_engine, load, started

from layerfuse import registry
from layerfuse.engines.loading import NotFusedError
from layerfuse.engines.options import Options
from layerfuse.engines.plugins import NotHereError
from layerfuse.engines.vllm import plugin
from layerfuse.engines.vllm.loading import compiled_modules_of
from layerfuse.fusion import FusionMissedError

HOW = "vLLM loaded the model in a way that layerfuse does not know (load_format 'dummy')"


def test_a_second_engine_of_a_process_says_again_why_nothing_is_fused(tmp_path: Path, said: Said) -> None:
    options = {"fusions": [ADD], "eager": False}
    for name in ("first", "second"):
        said.clear()
        with started("deepseek-v3", tmp_path / name, layerfuse=options, mode="NONE", **SHORT) as engine:
            engine()
        assert len([line for line in said() if line.startswith("layerfuse: nothing is fused in")]) == 1, name


@pytest.mark.parametrize("mode", [pytest.param("VLLM_COMPILE", marks=pytest.mark.thorough), "NONE"])
def test_a_second_engine_that_another_loader_brought_is_not_taken_for_read(
    mode: str, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(
        "deepseek-v3", tmp_path / "first", layerfuse={"fusions": [ADD], "strict": True}, mode=mode, **SHORT
    ) as engine:
        engine()
    monkeypatch.setitem(model_loader._LOAD_FORMAT_TO_MODEL_LOADER, "dummy", OwnLoader)
    said.clear()
    with started("deepseek-v3", tmp_path / "second", layerfuse={"fusions": [ADD]}, mode=mode, **SHORT) as engine:
        engine()
    assert said() == [f"layerfuse: nothing is fused: {HOW}"]
    with (
        pytest.raises(NotHereError, match=re.escape(HOW)),
        started("deepseek-v3", tmp_path / "second", layerfuse={"fusions": [ADD], "strict": True}, mode=mode, **SHORT),
    ):
        pass


@pytest.mark.parametrize("mode", ["VLLM_COMPILE", "NONE"])
def test_a_loader_that_nobody_asked_vllm_for_is_known_by_the_first_step(mode: str, tmp_path: Path, said: Said) -> None:
    def made(cache: str, **strict: bool) -> contextlib.AbstractContextManager[None]:
        config.append(engine_config("deepseek-v3", layerfuse={"fusions": [ADD], **strict}, mode=mode, **SHORT))
        return in_engine(config[-1], tmp_path / cache)

    def brought(loader: type[DummyModelLoader]) -> Started:
        model = loader(config[-1].load_config).load_model(config[-1], config[-1].model_config)
        return Started(config=config[-1], model=model)

    config: list[Any] = []
    # vLLM's own, made by somebody, is one that is read.
    with made("first", strict=True):
        brought(DummyModelLoader)()
    assert any(line.startswith(f"{ADD}: 2 expected, 2 fused") for line in said())
    said.clear()
    with made("second"):
        engine = brought(OwnLoader)
        engine()
        engine()
    assert said() == [f"layerfuse: nothing is fused: {HOW}"]
    with made("second", strict=True):
        engine = brought(OwnLoader)
        for _ in range(2):  # a step that was refused is none
            with pytest.raises(NotHereError, match=re.escape(HOW)):
                engine()


@pytest.mark.parametrize("start", ["cold", "warm", "without a cache"])
def test_without_a_hook_at_vllms_steps_a_strict_engine_stops_where_its_model_is_compiled_or_read(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = inspect.unwrap(forward_context.create_forward_context)
    monkeypatch.setattr(forward_context, "create_forward_context", step)
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", str(int(start == "without a cache")))

    def run() -> None:
        made = engine_config("deepseek-v3", layerfuse={"fusions": [ADD], "strict": True}, **SHORT)
        with in_engine(made, tmp_path):
            Started(config=made, model=OwnLoader(made.load_config).load_model(made, made.model_config))()

    if start == "warm":  # what a start without layerfuse has left
        with mock.patch.object(plugin, "_check_that_one_was_read"):
            run()
    with pytest.raises(Exception, match=re.escape(f"layerfuse is strict, and {HOW}")):
        run()


def test_a_loader_that_calls_vllms_and_wraps_the_model_is_one_that_is_read(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Around(OwnLoader):
        def load_model(self, *args: Any, **kwargs: Any) -> Any:
            return super(OwnLoader, self).load_model(*args, **kwargs)

    monkeypatch.setitem(model_loader._LOAD_FORMAT_TO_MODEL_LOADER, "dummy", Around)
    with started("deepseek-v3", tmp_path, layerfuse={"fusions": [ADD], "strict": True}, mode="NONE") as engine:
        engine()
    assert told(ADD, 6, FIRST) in said()


NAMED = [
    ([ADD, GATED], GATED, ": none of its layers has such a chain"),
    ([f"+{ADD}", f"+{GATED}", f"-{DUAL}"], GATED, ": none of its layers has such a chain"),
    ([ADD, "all_reduce_add_rms_norm"], "all_reduce_add_rms_norm", ""),
]


@pytest.mark.parametrize(("named", "mode"), in_turn(NAMED, ["VLLM_COMPILE", "NONE"]))
def test_a_fusion_that_is_named_and_has_no_site_is_told_and_stops_a_strict_engine(
    named: tuple[list[str], str, str], mode: str, tmp_path: Path, said: Said
) -> None:
    names, unfound, why = named
    with started("deepseek-v3", tmp_path, layerfuse={"fusions": names}, mode=mode, **SHORT) as engine:
        engine()
    told = f"{unfound} is asked for, and has no site in DeepseekV3ForCausalLM{why}"
    assert sum(line.startswith(f"layerfuse: {told}") for line in said()) == 1
    (path,) = tmp_path.rglob("layerfuse-report.json")
    (module,) = json.loads(path.read_text())["modules"].values()
    assert list(module["unfound"]) == [unfound]
    with (
        pytest.raises(NotFusedError, match=f"layerfuse is strict, and {told}"),
        started("deepseek-v3", tmp_path, layerfuse={"fusions": names, "strict": True}, mode=mode, **SHORT),
    ):
        pass


def test_mla_decode_in_a_model_without_mla_is_such_a_name(tmp_path: Path, said: Said) -> None:
    names = [ADD, "mla_decode"]
    told = "mla_decode is asked for, and has no site in GptOssForCausalLM: there is a place for it in MLA layers of vLLM and SGLang alone"
    with started("gpt-oss-20b", tmp_path, layerfuse={"fusions": names}):
        pass
    assert said() == [f"layerfuse: {told}"]
    with (
        pytest.raises(NotFusedError, match=told),
        started("gpt-oss-20b", tmp_path, layerfuse={"fusions": names, "strict": True}),
    ):
        pass


def test_what_is_asked_for_without_a_name_may_have_no_site(tmp_path: Path) -> None:
    for fusions in ({"fusions": "all"}, {"level": 2}, {"fusions": f"-{DUAL}"}):
        with started("gpt-oss-20b", tmp_path, layerfuse={**fusions, "strict": True}):
            pass


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ([GATED], "none of its layers has such a chain"),
        ([f"{ADD}_group_quant"], "the linears that read the post_attention site are not known to quantise"),
        (["rms_norm_group_quant", GATED], "none of its layers has such a chain"),
    ],
)
def test_where_nothing_named_has_a_site_a_model_that_is_not_compiled_says_why_each_has_none(
    names: list[str], why: str, tmp_path: Path, said: Said
) -> None:
    with started("deepseek-v3", tmp_path, layerfuse={"fusions": names}, mode="NONE") as engine:
        engine()
    told = f"{names[-1]} is asked for, and has no site in DeepseekV3ForCausalLM: {why}"
    lines = said()
    assert lines[-1].startswith(f"layerfuse: {told}")
    assert len(lines) == len(names)
    with (
        pytest.raises(NotFusedError, match=f"layerfuse is strict, and {told}"),
        started("deepseek-v3", tmp_path, layerfuse={"fusions": names, "strict": True}, mode="NONE"),
    ):
        pass


@pytest.mark.parametrize("beside", [[], [f"-{DUAL}"]])
def test_what_is_on_beside_a_name_without_a_site_is_told_too_where_nothing_can_stand(
    beside: list[str], tmp_path: Path, said: Said
) -> None:
    with started("deepseek-v3", tmp_path, layerfuse={"fusions": [f"+{GATED}", *beside]}, mode="NONE"):
        pass
    assert said() == [
        f"layerfuse: {GATED} is asked for, and has no site in DeepseekV3ForCausalLM: none of its layers has such a chain",
        "layerfuse: nothing is fused in DeepseekV3ForCausalLM: "
        "vLLM's compilation mode is NONE here; fusions need VLLM_COMPILE",
    ]


@pytest.mark.parametrize(
    ("asks", "mode"),
    in_turn(
        [{"fusions": f"-{DUAL}"}, {"level": 0}, {"fusions": "-mla_decode"}],
        ["VLLM_COMPILE", "NONE", "DYNAMO_TRACE_ONCE"],
    ),
)
def test_what_is_switched_off_asks_for_nothing(asks: dict[str, Any], mode: str, tmp_path: Path) -> None:
    with started("deepseek-v3", tmp_path, layerfuse={**asks, "strict": True}, mode=mode) as engine:
        if mode == "NONE":
            engine()


def test_all_asks_for_what_can_stand_where_nothing_is_compiled(tmp_path: Path, said: Said) -> None:
    with started("deepseek-v3", tmp_path, layerfuse={"fusions": "all", "strict": True}, mode="NONE") as engine:
        engine()
    assert told(ADD, 6, FIRST) in said()


@pytest.mark.parametrize("asks", [{"fusions": "all"}, {"level": 2}])
def test_a_mode_in_which_nothing_of_all_can_stand_stops_a_strict_engine(asks: dict[str, Any], tmp_path: Path) -> None:
    with (
        pytest.raises(NotFusedError, match=r"nothing is fused in DeepseekV3ForCausalLM: .* mode is DYNAMO_TRACE_ONCE"),
        started("deepseek-v3", tmp_path, layerfuse={**asks, "strict": True}, mode="DYNAMO_TRACE_ONCE"),
    ):
        pass


@pytest.mark.parametrize("where", ["a stage of a pipeline", "beside a draft", "a draft"])
def test_where_another_model_may_have_the_site_a_strict_engine_starts(where: str, tmp_path: Path, said: Said) -> None:
    made = engine_config("gpt-oss-20b", layerfuse=False)
    options = Options(fusions=f"{ADD},{GATED}", strict=True)
    with in_engine(made, tmp_path):
        model = load(made).model
        speculative = mock.Mock(draft_model_config=made.model_config)
        with (
            mock.patch.dict(vars(made), speculative_config=speculative if where == "beside a draft" else None),
            mock.patch.object(made.parallel_config, "pipeline_parallel_size", 2 if "stage" in where else 1),
        ):
            ((_, compiled),) = compiled_modules_of(made, model, options, draft=where == "a draft")
        # Where drafts come from the prompt alone, no other model is loaded.
        same = mock.Mock(draft_model_config=made.model_config, target_model_config=made.model_config)
        with mock.patch.dict(vars(made), speculative_config=same), pytest.raises(NotFusedError, match=GATED):
            list(compiled_modules_of(made, model, options))
    assert list(compiled.unfound) == [GATED]
    assert any(f"{GATED} is asked for, and has no site in GptOssForCausalLM" in line for line in said())


def adding(cls: Any, extra: Callable[[], torch.nn.Module]) -> Callable[..., None]:
    """The `__init__` of a class, and one module more."""
    init = cls.__init__

    @functools.wraps(init)
    def with_extra(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.extra = extra()

    return with_extra


@pytest.mark.parametrize(
    ("mode", "tower"),
    [("VLLM_COMPILE", True), ("NONE", False), pytest.param("VLLM_COMPILE", False, marks=pytest.mark.thorough)],
)
def test_a_tower_that_no_text_runs_is_not_expected_and_is_named_once(
    mode: str, tower: bool, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"fusions": [ADD], "strict": True}
    vision = import_model("vllm.model_executor.models.qwen3_vl:Qwen3_VisionTransformer")
    known = import_model("vllm.model_executor.models.qwen2_moe:Qwen2MoeMLP")
    monkeypatch.setattr(vision, "__init__", adding(vision, lambda: known(64, 64, "silu")))
    short = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    given = {"layerfuse": options, "overrides": {"text_config": {**TINY["qwen3.5-27b"]["text_config"], **short}}}
    with started("qwen3.5-27b", tmp_path, mode=mode, compile_mm_encoder=tower, **given) as engine:
        engine()
    lines = [line for line in said() if "Attention" in line]
    attention = "vllm.model_executor.models.qwen2_5_vl:Qwen2_5_VisionAttention"
    assert lines == [f"not read, as no text runs it: {attention} (visual.blocks.0.attn and 1 more)"]
    assert any(line.startswith(f"{ADD}: 4 expected, 4 fused, 0 missed") for line in said())
    assert not any("visual.extra" in line for line in said())  # vLLM may compile it, and runs it for no text
    (path,) = tmp_path.rglob("layerfuse-report.json")
    (module,) = json.loads(path.read_text())["modules"].values()
    assert module["unread"] == {f"visual.blocks.{layer}.attn": attention for layer in range(2)}
    assert module["unknown"] == {}

    class SomeAttention(torch.nn.Module):
        """What looks like attention, and is known to nobody."""

    model = import_model("vllm.model_executor.models.qwen3_5:Qwen3_5Model")
    monkeypatch.setattr(model, "__init__", adding(model, SomeAttention))
    with (
        # What is unknown in a compiled model is below.
        started("qwen3.5-27b", tmp_path / "unknown", mode="NONE", **given) as engine,
        pytest.raises(FusionMissedError) as raised,
    ):
        engine()
    assert [layer.rpartition(".")[2] for layer in raised.value.unknown] == ["extra"]


class Scale(nn.Module):
    """An RMS norm by no name, as somebody's model has it."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = weight, 1e-6

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x = x + residual
        variance = x.float().pow(2).mean(-1, keepdim=True)
        return (x.float() * torch.rsqrt(variance + self.variance_epsilon)).to(x.dtype) * self.weight, x


class Elsewhere(DeepseekV2Model):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.norm = Scale(self.norm.weight)


def test_where_nothing_is_compiled_it_is_named_too(tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeepseekV2Model, "__module__", "elsewhere")
    monkeypatch.setattr(DeepseekV2ForCausalLM, "model_cls", Elsewhere)
    for strict in (False, True):
        said.clear()
        with started("deepseek-v3", tmp_path, layerfuse={"fusions": [ADD], "strict": strict}, mode="NONE") as engine:
            if strict:
                with pytest.raises(FusionMissedError) as raised:
                    engine()
                assert raised.value.unknown == {"model": "RMS norms of its residual stream: norm"}
            else:
                engine()
            assert not engine.model.model.norm._forward_pre_hooks
        assert "unknown: no adapter knows RMS norms of its residual stream: norm (model)" in said()
        assert told(ADD, 5, FIRST) in said()


@pytest.mark.parametrize(("split", "dense"), [(True, 1), (False, 2)])
def test_a_final_norm_that_no_adapter_reads_is_named_whatever_it_is_called(
    split: bool, dense: int, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cold, and from vLLM's cache. Behind a dense layer Inductor puts the last sum into the product."""
    short = {"split": split, "overrides": {"num_hidden_layers": 2, "first_k_dense_replace": dense}}
    # A model of somebody's own, whose decoder layers are vLLM's.
    monkeypatch.setattr(DeepseekV2Model, "__module__", "elsewhere")
    monkeypatch.setattr(DeepseekV2ForCausalLM, "model_cls", Elsewhere)
    for strict in (False, True):
        options = {"fusions": [ADD], "strict": strict}
        with started("deepseek-v3", tmp_path, layerfuse=options, **short) as engine:
            if strict:
                with pytest.raises(FusionMissedError) as raised:
                    engine()
                assert raised.value.unknown == {"": "RMS norms of its residual stream: norm"}
            else:
                engine()
        assert "unknown: no adapter knows RMS norms of its residual stream: norm (the model itself)" in said()
    said.clear()
    # Once it is left unread on purpose, no report of before is served.
    monkeypatch.setattr(type(registry.default), "ignored_in", lambda *_: ["model.norm"])
    with started("deepseek-v3", tmp_path, layerfuse={"fusions": [ADD], "strict": True}, **short) as engine:
        engine()
    assert told(ADD, 3) in said()
