"""A layer of which nothing can be expected is said to be one: it never just drops out of the plan."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from layerfuse import fusion, registry
from layerfuse.fusion import FusionMissedError
from layerfuse.fusion.report import Report
from layerfuse.testing import small_model

IDS = torch.arange(5)[None]


class FooAttention(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.projection = inner.o_proj

    def forward(self, hidden_states: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
        return hidden_states, None


@pytest.fixture
def model() -> torch.nn.Module:
    made = small_model(registry.model("deepseek-v3"), layers=2)
    layers = made.get_submodule("model.layers")
    layers[1].self_attn = FooAttention(layers[1].self_attn)
    return made


def test_unknown_attention_is_in_the_report(model: torch.nn.Module) -> None:
    # Its decoder layer cannot say by how many ranks it was sharded either, so only the other layer's is read.
    known = registry.Registry.specs_in(registry.default, model.get_submodule("model.layers.0"))
    assert len(known) == 3

    compiled = fusion.compile(model.get_submodule("model.layers"), strict=True, registry=_Tolerant())

    assert compiled.report.unknown == {"1.self_attn": f"{__name__}:FooAttention"}
    assert "unknown: 1.self_attn: no adapter knows" in str(compiled.report)
    with pytest.raises(
        FusionMissedError, match=r"No adapter knows the class of these.*:\n  - 1.self_attn: .*FooAttention"
    ):
        compiled.report.check()


def test_classes_that_differ_by_a_number_are_each_named() -> None:
    unknown = {"layers.0.attn": "m:Attention_1", "layers.1.attn": "m:Attention_2", "layers.2.attn": "m:Attention_2"}
    report = Report(fusion.plan([], fusion.Target.named("cpu")))
    report.unknown = unknown
    for text in (str(FusionMissedError({}, unknown)), str(report)):
        assert "layers.0.attn: " in text and "m:Attention_1" in text
        assert "layers.1.attn and 1 more: " in text and "m:Attention_2" in text


class _Tolerant(registry.Registry):
    """The default registry, asked only for attention: what is under test is what becomes of the unknown."""

    def specs_in(self, model: torch.nn.Module, parallel: object) -> list[object]:
        from layerfuse import MLASpec

        return registry.specs_in(model, of=MLASpec)

    def unknown_in(self, model: torch.nn.Module) -> list[tuple[str, str]]:
        return registry.unknown_in(model)


def test_specs_that_are_given_leave_a_layer_out_on_purpose(model: torch.nn.Module) -> None:
    compiled = fusion.compile(model, specs=[], strict=True)

    assert compiled.report.unknown == {}
    Report.check(compiled.report)


@pytest.mark.usefixtures("_op_by_op")
def test_what_is_named_and_has_no_site_is_in_the_report_and_stops_a_strict_call() -> None:
    config = fusion.FusionConfig.parse("+gated_rms_norm,+few_token_linear,+add_rms_norm")
    model = small_model(registry.model("qwen3-8b"), layers=1, hidden_size=64, heads=2)
    fused = fusion.compile(model, config=config)
    with torch.no_grad():
        fused(input_ids=IDS, use_cache=False)
    told = "gated_rms_norm is asked for, and has no site in this model: none of its layers has such a chain"
    assert told in str(fused.report) and [*fused.report.unfound] == ["few_token_linear", "gated_rms_norm"]
    assert "engine_of(model)" in fused.report.to_dict()["unfound"]["few_token_linear"]
    strict = fusion.compile(model, config=config, strict=True)
    with torch.no_grad(), pytest.raises(FusionMissedError, match=told) as caught:
        strict(input_ids=IDS, use_cache=False)
    assert caught.value.unfound == fused.report.unfound and not caught.value.missed
    by_backend = torch.compile(model, backend="layerfuse", options={"config": config, "strict": True})
    with torch.no_grad(), pytest.raises(BackendCompilerFailed, match=told):
        by_backend(input_ids=IDS, use_cache=False)


@pytest.mark.usefixtures("_op_by_op")
@pytest.mark.parametrize("line", ["all", "none", "-gated_rms_norm", "+few_token_linear"])
def test_what_nobody_names_and_what_is_refused_at_its_sites_stops_no_call(line: str) -> None:
    model = small_model(registry.model("qwen3-8b"), layers=1, hidden_size=64, heads=2, dtype=torch.bfloat16)
    engine = fusion.Engine(name="transformers", linears={}, refuses={"few_token_linear": "not here"})
    fused = fusion.compile(model, config=fusion.FusionConfig.parse(line), engine=engine, strict=True)
    with torch.no_grad():
        fused(input_ids=IDS, use_cache=False)
    assert not fused.report.unfound and "not here" in str(fused.report)
