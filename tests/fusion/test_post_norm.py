"""Decoder layers whose norms stand on what attention and MLP give (OLMo-2, OLMo-3): nothing is planned there, and nothing missed.

OLMo-hybrid has both: its linear layers norm the stream as usual, and every fourth layer does not.
"""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from torch import nn

from layerfuse import fusion, registry
from layerfuse.adapters import ActivationQuant, Adapter, Facts, FinalNormSpec, ResidualSpec, SpecError, const
from layerfuse.fusion.sites import STREAM, sites_of
from layerfuse.registry import files
from layerfuse.testing import small_model

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("_op_by_op")

IDS = torch.arange(9)[None]
BOTH = ("input", "post_attention")


def olmo(which: str) -> Any:
    config = getattr(transformers, f"{which}Config")(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{which}ForCausalLM")(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def known(which: str, **words: Any) -> registry.Registry:
    made = registry.Registry()
    decoder = registry.adapters()["deepseek_v3"].layers["transformers:DeepseekV3DecoderLayer"][0]
    around = registry.adapters()["deepseek_v3"].layers["transformers:DeepseekV3Model"][0]
    facts = decoder.but(**{"input_norms": [], "post_attention_norms": [], "added_as_given": const(False), **words})
    made.register_adapter(
        Adapter("olmo", {f"transformers:{which}DecoderLayer": facts, f"transformers:{which}Model": around})
    )
    return made


@pytest.mark.parametrize("which", ["Olmo2", "Olmo3"])
def test_what_runs_is_what_the_plan_says(which: str) -> None:
    model = olmo(which)
    specs = known(which).specs_in(model)
    streams = [spec for _, spec in specs if isinstance(spec, ResidualSpec)]
    assert [(spec.input_norms, spec.input_norm, spec.post_attention_norm) for spec in streams] == [((), None, None)] * 2
    planned = fusion.plan(specs, fusion.Target.named("cpu"))
    assert [decision.site for decision in planned.expected()] == ["model:final"]
    fused = fusion.compile(model, specs=specs, strict=True)
    with torch.no_grad():
        eager = model(input_ids=IDS, use_cache=False).logits
        logits = fused(input_ids=IDS, use_cache=False).logits
        audit = fused.audit(input_ids=IDS, use_cache=False)
    assert audit.ok, str(audit)
    found = audit.fusions["add_rms_norm"]
    assert (found.expected, found.counted, found.profiled) == (1, 1, 1)
    torch.testing.assert_close(logits, eager, atol=1e-5, rtol=1e-5)


def test_each_site_of_such_a_layer_has_the_reason() -> None:
    specs = known("Olmo2").specs_in(olmo("Olmo2"))
    planned = fusion.plan(specs, fusion.Target.named("gfx950"))
    for role in BOTH:
        decisions = planned.at(f"model.layers.1:{role}")
        assert {(d.kind, d.reason) for d in decisions} == {
            (
                "not_applicable",
                "no norm reads the residual stream in this layer: its norms stand on what attention and MLP give",
            )
        }
        assert "add_rms_norm" in {d.fusion for d in decisions}


def test_a_hybrid_has_sites_where_its_layers_norm_the_stream() -> None:
    entry = registry.model("olmo-hybrid-7b")
    planned = fusion.plan(entry.specs(), fusion.Target.named("gfx950"))
    usual = [index for index in range(32) if index % 4 != 3]
    sites = [f"layers.{index}:{role}" for index in usual for role in BOTH][1:]
    assert [d.site for d in planned.expected("add_rms_norm")] == [*sites, "final:final"]


def test_a_compiled_hybrid_runs_what_its_plan_says() -> None:
    model = small_model(registry.model("olmo-hybrid-7b"), layers=(0, 3), hidden_size=64)
    fusion.keep_recurrences(model)
    fused = fusion.compile(model, strict=True)
    with torch.no_grad():
        eager = model(input_ids=IDS, use_cache=False).logits
        logits = fused(input_ids=IDS, use_cache=False).logits
        audit = fused.audit(input_ids=IDS, use_cache=False)
    assert audit.ok, str(audit)
    # The first layer norms the stream behind its attention, the second nowhere, and the model at its end.
    assert audit.fusions["add_rms_norm"].profiled == audit.fusions["add_rms_norm"].expected == 2
    assert audit.fusions["gated_rms_norm"].profiled == 1
    assert (logits - eager).abs().max() < 1e-5 * eager.abs().max()


TABLE = """
[models.mine]
adapter = "gpt_oss"
source = "made up"
num_hidden_layers = 2
hidden_size = 64
rms_norm_eps = 1e-6
layers.full = {{ family = "gqa", num_heads = 4, num_kv_heads = 4, head_dim = 16, sliding_window = "off", has_sinks = false{more} }}
"""


def test_over_ranks_no_all_reduce_is_promised_behind_such_a_layer() -> None:
    def at_the_end(more: str) -> set[str]:
        (entry,) = files.parse(TABLE.format(more=more).replace("hidden_size = 64", "hidden_size = 4096")).values()
        planned = fusion.plan(entry.specs(2), fusion.Target.named("gfx950"))
        return {d.fusion for d in planned.at("final:final") if d.applies}

    assert at_the_end("") == {"all_reduce_add_rms_norm", "add_rms_norm"}
    assert at_the_end(', stream_norms = "none"') == {"add_rms_norm"}


def test_facts_that_forget_where_the_norms_stand_are_refused() -> None:
    """Else the next add would be planned as fused with an all-reduce that a norm stands behind."""
    facts = known("Olmo2").adapters()["olmo"].layers["transformers:Olmo2DecoderLayer"][0]
    made = registry.Registry()
    forgetful = Facts(ResidualSpec, {k: v for k, v in facts.words.items() if k != "added_as_given"})
    made.register_adapter(Adapter("olmo", {"transformers:Olmo2DecoderLayer": forgetful}))
    with pytest.raises(ValueError, match="added_as_given: expected false where no norm reads the stream"):
        made.specs_in(olmo("Olmo2"))


MIXED = "hyper-connections mix four streams in front of it"


@pytest.mark.parametrize("called", [True, False], ids=["norms that are called", "norms in a kernel"])
def test_in_front_of_a_norm_of_several_streams_no_add_is_expected(called: bool) -> None:
    """Of norms that the layer calls a fusion with the quantisation behind them is; the layer lists no others."""
    specs = registry.model("llama-3.1-8b").specs()
    norms = {} if called else {"input_norms": (), "post_attention_norms": ()}
    mixed = [
        (path, attrs.evolve(spec, no_sum=MIXED, added_as_given=False, **norms))
        if isinstance(spec, ResidualSpec)
        else (path, attrs.evolve(spec, no_sum=MIXED) if isinstance(spec, FinalNormSpec) else spec)
        for path, spec in specs
    ]
    streams = [site for path, spec in mixed for site in sites_of(path, spec) if site.role in STREAM]
    assert {(site.adds, site.reduced) for site in streams} == {(False, 1)}
    assert {site.absent for site in streams} == ({None} if called else {MIXED, None})
    asked = fusion.FusionConfig.parse("add_rms_norm,rms_norm_group_quant", origin="the test")
    planned = fusion.plan(
        mixed, fusion.Target.named("sm90"), attrs.evolve(asked, quant=ActivationQuant(group_size=128))
    )
    expected = [decision for decision in planned.expected() if planned.site[decision.site].role in STREAM]
    assert {decision.fusion for decision in expected} == ({"rms_norm_group_quant"} if called else set())
    assert {planned.site[decision.site].role for decision in expected} == (set(BOTH) if called else set())
    reasons = {d.reason for d in planned.decisions if d.fusion == "add_rms_norm"}
    assert reasons == {MIXED}


def test_who_says_that_there_is_no_sum_adds_nothing_as_given() -> None:
    spec = registry.model("llama-3.1-8b").specs()[0][1]
    with pytest.raises(SpecError, match="added_as_given: expected false where no sum stands in front of the norms"):
        attrs.evolve(spec, no_sum=MIXED)
