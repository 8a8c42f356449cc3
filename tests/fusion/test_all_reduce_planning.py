"""Where fused all-reduces are planned, and up to how many tokens: from specs, targets, releases and engines alone."""

from __future__ import annotations

from itertools import pairwise

import attrs
import pytest
from reduced_support import sharded_spec
from stream_support import stream_spec

from layerfuse import registry
from layerfuse.adapters.specs import FinalNormSpec, NormSpec, Parallel
from layerfuse.fusion import ActivationQuant, Decision, FusionConfig, Plan, Target, plan
from layerfuse.fusion.planning import ANY, Tokens
from layerfuse.fusion.rewrite.driver import _takes_stream

NAME = "all_reduce_add_rms_norm"
GFX950 = attrs.evolve(Target.named("gfx950"), aiter="v0.1.20")


def of(made: Plan, site: str, fusion: str = NAME) -> list[Decision]:
    return [decision for decision in made.at(site) if decision.fusion == fusion]


def kinds(decisions: list[Decision]) -> list[tuple[str, Tokens]]:
    return [(decision.kind, decision.tokens) for decision in decisions]


def model(name: str, tp: int, target: Target, **given: object) -> Plan:
    return plan(registry.model(name).specs(tp=tp, rank=0), target, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "tp", "engine", "stages", "most"),
    [
        ("gpt-oss-120b", 2, None, "one stage to 159 tokens, two stages to 11650 tokens", 11650),
        ("gpt-oss-120b", 8, None, "one stage to 39 tokens, two stages to 11650 tokens", 11650),
        ("deepseek-v3", 8, None, "one stage to 16 tokens, two stages to 4681 tokens", 4681),
        # vLLM 0.33: 80 tokens, under 256 KiB up to four ranks, under 128 KiB up to eight.
        ("deepseek-v3", 2, "vllm", "one stage to 64 tokens, two stages to 4681 tokens", 4681),
        ("deepseek-v3", 4, "vllm", "one stage to 32 tokens, two stages to 4681 tokens", 4681),
        ("deepseek-v3", 8, "vllm", "one stage to 16 tokens, two stages to 4681 tokens", 4681),
        ("gpt-oss-120b", 8, "vllm", "one stage to 39 tokens, two stages to 11650 tokens", 11650),
    ],
)
def test_a_decision_says_up_to_how_many_tokens(name: str, tp: int, engine: str | None, stages: str, most: int) -> None:
    config = FusionConfig(switches={NAME: True, "add_rms_norm": True})
    made = model(name, tp, GFX950, engine=engine, config=config)
    decisions = of(made, "layers.3:post_attention")
    assert kinds(decisions) == [("expected", Tokens(1, most)), ("not_applicable", Tokens(most + 1))]
    assert decisions[0].reason.endswith(stages), decisions[0].reason
    assert "the plain all-reduce, then the fused add and norm" in decisions[1].reason
    shorter = of(made, "layers.3:post_attention", "add_rms_norm")
    assert kinds(shorter) == [("fallback", Tokens(1, most)), ("expected", Tokens(most + 1))]


def test_a_release_that_is_not_supported_any_more_is_named() -> None:
    with pytest.raises(ValueError, match=r"a release 'v0.1.11' of AITER; give one from v0.1.16.post3 to v0.1.20.post1"):
        model("gpt-oss-20b", 8, attrs.evolve(GFX950, aiter="v0.1.11"))


def test_world_sizes_that_no_kernel_takes() -> None:
    specs = [("layer", sharded_spec(6, 0, width=2880))]
    (decision,) = of(plan(specs, GFX950), "layer:post_attention")
    assert decision.kind == "refused" and "take 2, 4 and 8 ranks, not 6" in decision.reason
    wide = [("layer", sharded_spec(16, 0))]
    config = FusionConfig(switches={NAME: True})
    (decision,) = of(plan(wide, Target.named("sm90"), config), "layer:post_attention")
    assert decision.kind == "refused" and "2 to 8 GPUs of one host, not for 16" in decision.reason
    long = [("layer", sharded_spec(2, 0, width=20000))]
    (decision,) = of(plan(long, Target.named("sm90"), config), "layer:post_attention")
    assert "a row of 20000 columns has 40000 bytes, and the kernel takes rows of up to 32768" in decision.reason


def test_widths_that_are_no_whole_packs() -> None:
    (decision,) = of(plan([("layer", sharded_spec(4, 0, width=2881))], GFX950), "layer:post_attention")
    assert decision.kind == "refused" and "no whole packs of 16 bytes" in decision.reason


def test_on_nvidia_by_default_where_it_was_measured() -> None:
    sm90 = Target.named("sm90")
    fused, beyond = of(model("gpt-oss-20b", 2, sm90), "layers.1:input")
    assert fused.applies and "one shot to 10194 tokens" in fused.reason
    on_four, _ = of(model("gpt-oss-20b", 4, sm90), "layers.1:input")
    assert on_four.applies and "one shot to 48 tokens, two shots to 10194 tokens" in on_four.reason
    assert (beyond.kind, beyond.tokens.first) == ("not_applicable", 10195)


@pytest.mark.parametrize("arch", ["sm80", "sm89", "sm100"])
def test_on_other_architectures_when_switched_on(arch: str) -> None:
    (decision,) = of(model("gpt-oss-20b", 2, Target.named(arch)), "layers.1:input")
    assert decision.kind == "refused" and f"and not on 2 of {arch}" in decision.reason


def test_on_nvidia_elsewhere_when_switched_on() -> None:
    sm90 = Target.named("sm90")
    (decision,) = of(model("gpt-oss-20b", 8, sm90), "layers.1:input")
    says = "it was measured on 2 GPUs of sm90 and 4 GPUs of sm90 and not on 8 of sm90; LAYERFUSE_FUSIONS=+all_reduce_add_rms_norm,"
    assert decision.kind == "refused" and says in decision.reason
    assert kinds(of(model("gpt-oss-20b", 8, sm90), "layers.1:input", "add_rms_norm")) == [("expected", ANY)]
    on = model("gpt-oss-20b", 8, sm90, config=FusionConfig(switches={NAME: True, "add_rms_norm": True}))
    (fused, _) = of(on, "layers.1:input")
    assert fused.applies and "one shot to 22 tokens" in fused.reason


def test_the_reference_takes_any_number() -> None:
    assert kinds(of(model("gpt-oss-20b", 4, Target.named("cpu")), "layers.1:input")) == [("expected", ANY)]


def test_nothing_to_reduce() -> None:
    made = model("gpt-oss-20b", 1, GFX950)
    (decision,) = of(made, "layers.1:input")
    assert decision.kind == "not_applicable" and "whole on every rank" in decision.reason
    (first,) = of(model("gpt-oss-20b", 8, GFX950), "layers.0:input")
    assert first.reason == "the first layer's input norm has no residual to add"


def test_quantised_forms_come_first_and_the_others_are_said_to_wait() -> None:
    quant = ActivationQuant(group_size=128)
    made = model("deepseek-v3", 8, GFX950, config=FusionConfig(level=2, quant={"input": quant}))
    site = "layers.3:input"
    longest = f"{NAME}_group_quant"
    first, beyond = of(made, site, longest)
    assert first.applies and beyond.kind == "not_applicable" and first.tokens.last is not None
    waits, _ = of(made, site)
    assert (waits.kind, waits.tokens) == ("fallback", Tokens(1, first.tokens.last))
    holders = f"{longest} and add_rms_norm_group_quant"
    assert waits.reason == f"{holders} are tried first at the same operations; this stands where they are missed"
    every = [decision for decision in made.at(site) if decision.applies]
    assert [decision.fusion for decision in every] == [longest, "add_rms_norm_group_quant"]
    assert every[0].tokens.first == 1 and every[-1].tokens.last is None
    for one, other in pairwise(every):
        assert one.tokens.last is not None and other.tokens.first == one.tokens.last + 1


@pytest.mark.parametrize("name", ["gemma-3-1b", "minicpm3-4b"])
def test_what_is_changed_before_it_is_added(name: str) -> None:
    """A norm in Gemma 3 and a factor in MiniCPM3 stand between each all-reduce and its add; the last in front of the final norm."""
    made = plan(registry.model(name).specs(tp=2), Target.named("sm90"))
    sites = [site for site in made.sites if site.adds]
    assert {site.role for site in sites} == {"input", "post_attention", "final"}
    for site in sites:
        (decision,) = of(made, site.name)
        assert decision.kind == "not_applicable" and "it is not added as it is" in decision.reason
        assert of(made, site.name, "add_rms_norm")[0].applies
    alone = plan(registry.model(name).specs(tp=1), Target.named("sm90"))
    assert "whole on every rank" in of(alone, "layers.1:input")[0].reason


def test_the_mlp_before_says_what_is_reduced_at_the_input() -> None:
    """As transformers shards DeepSeek-V3: attention whole, MLPs cut."""
    layers = [
        (f"layers.{i}", attrs.evolve(stream_spec(), layer_index=i, mlp_ranks=ranks))
        for i, ranks in enumerate((2, 1, 4))
    ]
    final = FinalNormSpec(
        hidden_size=256, layer_index=3, parallel=Parallel(size=1, rank=0), final_norm=NormSpec(width=256, epsilon=1e-6)
    )
    made = plan([*layers, ("", final)], Target.named("cpu"))
    assert [site.reduced for site in made.sites] == [1, 1, 2, 1, 1, 1, 4]


def test_attention_that_is_cut_where_the_mlp_is_whole() -> None:
    layers = [(f"layers.{i}", attrs.evolve(sharded_spec(2), layer_index=i, mlp_ranks=1)) for i in range(2)]
    made = plan(layers, Target.named("cpu"))
    assert [site.reduced for site in made.sites] == [1, 2, 1, 2]


def test_what_another_stage_of_a_pipeline_hands_over_is_summed() -> None:
    """Whatever else the plan holds: a draft model's layer may have the number before."""
    handed = attrs.evolve(sharded_spec(2), layer_index=4, starts_stream=False, handed_over=True)
    draft = attrs.evolve(sharded_spec(2), layer_index=3, starts_stream=True, mlp_ranks=2)
    made = plan([("layers.4", handed), ("draft", draft)], Target.named("cpu"))
    assert [site.reduced for site in made.sites] == [1, 2, 1, 2]
    assert [site.adds for site in made.sites] == [True, True, False, True]
    (reduced,) = of(made, "layers.4:input")
    assert (reduced.kind, of(made, "layers.4:input", "add_rms_norm")[0].kind) == ("not_applicable", "expected")


@pytest.mark.parametrize(("ranks", "takes"), [(1, False), (2, True)])
def test_norms_of_any_name_are_looked_for_where_the_models_ranks_have_a_fusion_of_theirs(
    ranks: int, takes: bool
) -> None:
    assert _takes_stream(model("llama-3.3-70b", ranks, Target.named("sm90"), config=FusionConfig.parse(NAME))) is takes
