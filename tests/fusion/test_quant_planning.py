"""Planning with a declared quantisation, and the report that holds a miss and its fallback."""

from __future__ import annotations

import json
import pickle
from typing import Any

import attrs
import pytest
import torch
from fusion_support import HIDDEN, gqa_spec, mla_spec
from quant_support import CPU_FP8, GROUP, PER_TOKEN, PLAIN, STATIC, Quantised, config, trace_quantised, vllm_group
from torch import nn

from layerfuse import fusion
from layerfuse.adapters.activation_quant import GROUP_SIZES
from layerfuse.adapters.specs import GatedNormSpec, NormSpec
from layerfuse.fusion import (
    FUSIONS,
    ActivationQuant,
    ActivationQuantError,
    FusionConfig,
    FusionConfigError,
    FusionMissedError,
    Target,
    plan,
)
from layerfuse.fusion.formats import FORMATS, FP8_FORMATS
from layerfuse.fusion.ops import quantisation
from layerfuse.fusion.rewrite import Pipeline

GFX950 = Target.named("gfx950")
NORMS = "rms_norm(1536, epsilon 1e-06) and rms_norm(512, epsilon 1e-06) are one launch on"


def decided(config: FusionConfig, spec: Any = None, target: Target = GFX950) -> dict[str, tuple[str, str]]:
    made = plan([("path", spec or mla_spec())], target, config)
    return {decision.fusion: (decision.kind, decision.reason) for decision in made.decisions}


def test_nobody_quantises_unless_somebody_says_so() -> None:
    undeclared = (
        "not_applicable",
        "the linears that read the latents site are not known to quantise their activations, so that they may not take what this fusion gives",
    )
    for given in (FusionConfig(), FusionConfig(level=2), FusionConfig.parse("all")):
        found = decided(given)
        assert found[PLAIN] == ("expected", f"{NORMS} gfx950")
        assert found[PER_TOKEN] == found[GROUP] == undeclared


def test_linears_that_do_not_agree_are_a_reason_of_their_own() -> None:
    """Two sites that differ in nothing else are not decided as one."""
    differ = (
        "self_attn.q_proj: quantises them with one scale per token; self_attn.k_proj: takes its activations as they are"
    )
    spec = mla_spec()
    odd = attrs.evolve(spec, q_norm=attrs.evolve(spec.q_norm, unquantised=differ))
    made = plan([("a", spec), ("b", odd)], GFX950, FusionConfig(level=2))
    reasons = {d.site: d.reason for d in made.decisions if d.fusion == PER_TOKEN}
    assert reasons["a:latents"].endswith(
        "are not known to quantise their activations, so that they may not take what this fusion gives"
    )
    assert reasons["b:latents"] == (
        f"the linears that read the latents site agree on no quantisation that a fusion knows: {differ}"
    )


@pytest.mark.parametrize(
    ("quant", "taken", "other", "what"),
    [
        ("per_token", PER_TOKEN, GROUP, "one scale per token"),
        ("group128", GROUP, PER_TOKEN, "one scale per 128 columns"),
        ("group64,column_major,ue8m0", GROUP, PER_TOKEN, "one scale per 64 columns, column-major, powers of two"),
        ("group128,tma_aligned", GROUP, STATIC, "one scale per 128 columns, column-major and TMA-aligned"),
        ("static", STATIC, GROUP, "a static scale"),
    ],
)
def test_what_is_declared_is_expected_and_the_others_name_it(quant: str, taken: str, other: str, what: str) -> None:
    found = decided(config(quant))
    assert found[taken] == ("expected", f"{NORMS} gfx950, the first in e4m3fn with {what}")
    why = f"the linears that read the latents site quantise with {what}, which is another format than this fusion's"
    assert found[other] == ("not_applicable", why)
    assert found[PLAIN] == (
        "fallback",
        f"{taken} is tried first at the same operations; this stands where it is missed",
    )


def test_what_is_read_off_the_model_is_expected_unless_something_else_is_declared() -> None:
    read = mla_spec(q_norm=NormSpec(width=1536, epsilon=1e-6, quant=ActivationQuant.parse("group128")))
    assert decided(FusionConfig(level=2), read)[GROUP][0] == "expected"
    assert decided(config("per_token"), read)[PER_TOKEN][0] == "expected"
    per_role = FusionConfig(level=2, quant={"latents": ActivationQuant.parse("per_token")})
    assert decided(per_role, read)[PER_TOKEN][0] == "expected"
    assert decided(FusionConfig(level=2, quant={"latents": None}), read)[GROUP][0] == "not_applicable"
    # What is declared for other sites says nothing of these.
    elsewhere = FusionConfig(level=2, quant={"input": ActivationQuant.parse("per_token")})
    assert decided(elsewhere, read)[GROUP][0] == "expected"
    assert decided(elsewhere)[PER_TOKEN][0] == "not_applicable"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (config("per_token", level=1), f"{PER_TOKEN} needs optimisation level 2, and FusionConfig sets level 1"),
        (config("per_token", switches={PER_TOKEN: False}), f"{PER_TOKEN} is switched off by FusionConfig"),
    ],
)  # fmt: skip
def test_where_it_is_off_the_plain_one_is_expected(given: FusionConfig, reason: str) -> None:
    found = decided(given)
    assert found[PER_TOKEN] == ("refused", reason)
    assert found[PLAIN][0] == "expected"


def test_a_switch_turns_it_on_at_level_1() -> None:
    found = decided(config("group128", level=1, switches={GROUP: True}))
    assert found[GROUP][0] == "expected"
    assert found[PLAIN][0] == "fallback"


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (Target.named("cpu"), "cpu has no fp8 format, and the fused op writes e4m3fn or e4m3fnuz"),
        (Target(arch="x", vendor="amd", fp8="e5m2"), "x has fp8 e5m2, and the fused op writes e4m3fn or e4m3fnuz"),
    ],
)
def test_a_target_without_the_format(target: Target, reason: str) -> None:
    found = decided(config("per_token"), target=target)
    assert found[PER_TOKEN] == ("refused", reason)
    assert found[PLAIN][0] == "expected"


def test_layers_that_have_no_pair_say_what_they_say_of_the_plain_one() -> None:
    assert decided(config("group128"), gqa_spec()) == {}
    gated = GatedNormSpec(width=512, epsilon=1e-6, activation="silu", norm_before_gate=True, group_size=None)
    for spec in (
        mla_spec(q_lora_rank=None),
        mla_spec(kv_norm=gated),
    ):
        every = decided(config("group128"), spec)
        found = {name: said for name, said in every.items() if name.startswith(PLAIN)}
        assert len(set(found.values())) == 1
        assert found[PLAIN][0] != "expected"


def test_a_latent_that_is_no_multiple_of_the_group() -> None:
    found = decided(config("group128"), mla_spec(q_lora_rank=1600))
    assert found[GROUP] == (
        "refused",
        "the quantised tensor is 1600 wide, which is no multiple of the 128 columns that share a scale, and kernels take whole groups alone",
    )
    assert found[PLAIN][0] == "expected"


def test_plans_in_words_list_what_can_come_about() -> None:
    assert "quant" not in str(plan([mla_spec()], GFX950))
    text = str(plan([mla_spec()], GFX950, config("group128")))
    assert GROUP in text and PER_TOKEN not in text
    decisions = plan([mla_spec()], GFX950).to_dict()["decisions"]
    assert {decision["fusion"] for decision in decisions} == {PLAIN, PER_TOKEN, GROUP, STATIC}


@pytest.mark.parametrize(
    "text", ["per_token", "group32", "group64,ue8m0", "group128, column_major, ue8m0", "per_token,ue8m0"]
)
def test_words(text: str) -> None:
    words = text.replace(" ", "").split(",")
    quant = ActivationQuant.parse(text)
    assert quant.scheme == words[0].rstrip("0123456789")
    assert quant.group_size == (int(words[0].removeprefix("group")) if "group" in words[0] else None)
    assert (quant.column_major, quant.use_ue8m0) == ("column_major" in words, "ue8m0" in words)
    assert (quant.tma_aligned, quant.fixed) == (False, None)


def test_words_that_say_more_or_all() -> None:
    aligned = ActivationQuant(group_size=64, column_major=True, tma_aligned=True)
    assert ActivationQuant.parse("group64,tma_aligned") == aligned
    for word in FORMATS.keys() - {"token", "group"}:
        assert ActivationQuant.parse(word) == ActivationQuant(fixed=word)
        assert ActivationQuant.parse(word).scheme == word


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("group", "expected per_token, group32|64|128 or a format's name, as static or mxfp8, then column_major, tma_aligned, ue8m0, swizzled or inside, separated by commas, got 'group'"),
        ("per_tensor", "got 'per_tensor'"),
        ("group128,row_major", "got 'group128,row_major'"),
        ("group100", "group_size: expected None or one of 32, 64, 128, got 100"),
        ("per_token,column_major", "one scale per token is one column"),
        ("static,ue8m0", "static has no group size and no ue8m0 to choose"),
        ("", "got ''"),
    ],
)  # fmt: skip
def test_wrong_words(text: str, says: str) -> None:
    with pytest.raises(ActivationQuantError, match=says.replace("|", r"\|")):
        ActivationQuant.parse(text)


def test_wrong_types() -> None:
    with pytest.raises(FusionConfigError, match="quant: expected an ActivationQuant, or a mapping"):
        FusionConfig(quant="per_token")  # type: ignore[arg-type]
    with pytest.raises(FusionConfigError, match=r"quant\['latents'\]: expected an ActivationQuant or None, got 'per_"):
        FusionConfig(quant={"latents": "per_token"})  # type: ignore[dict-item]
    with pytest.raises(FusionConfigError, match="quant: no role is called 'latent'; did you mean 'latents'"):
        FusionConfig(quant={"latent": None})
    with pytest.raises(ActivationQuantError):
        ActivationQuant(group_size=True)


def test_plans_know_what_the_ops_take() -> None:
    assert GROUP_SIZES == quantisation.GROUP_SIZES
    assert {f"torch.float8_{name}" for name in FP8_FORMATS} == set(map(str, quantisation.LARGEST))
    assert all(hasattr(torch.ops.layerfuse, fusion.op.name) for fusion in FUSIONS.values())


# ---- reports and caches --------------------------------------------------------------------------------------------


class Two(nn.Module):
    """One layer whose quantisation is the plan's, and one whose is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Quantised(vllm_group), Quantised(lambda x: vllm_group(x, 64))])

    def forward(self, x: torch.Tensor) -> Any:
        return tuple(part for layer in self.layers for part in layer(x))


SPECS = [(f"layers.{i}", mla_spec(i)) for i in range(2)]


def test_the_report_says_both() -> None:
    traced = trace_quantised(Two(), torch.randn(5, HIDDEN), "group128", specs=SPECS)
    assert str(traced.report) == (
        "fusion report: 1 graph compiled for cpu, 1 call\n"
        "  mla_dual_rms_norm_group_quant: 2 expected, 1 matched, 1 refused, 0 not applicable; "
        "1 use ran fused in the last call\n"
        "    refused: layers.1:latents: the graph quantises groups of 64, the plan says 128; "
        "mla_dual_rms_norm was fused there instead\n"
        "  mla_dual_rms_norm: 0 expected, 0 matched, 0 refused, 0 not applicable, 1 as a fallback; "
        "1 use ran fused in the last call"
    )
    data = json.loads(json.dumps(traced.report.to_dict(), default=str))["fusions"]
    assert data[PLAIN]["fallback"] == ["layers.1:latents"]
    assert data[GROUP]["matched"] == ["layers.0:latents"]
    assert set(data) == set(FUSIONS)


@pytest.mark.usefixtures("_op_by_op")
def test_a_fallback_is_still_a_miss_when_strict() -> None:
    compiled = fusion.compile(Two(), specs=SPECS, target=CPU_FP8, config=config("group128"), strict=True)
    with torch.no_grad(), pytest.raises(FusionMissedError) as caught:
        compiled(torch.randn(5, HIDDEN))
    assert list(caught.value.missed) == [GROUP]
    assert "layers.1:latents: the graph quantises groups of 64, the plan says 128; mla" in str(caught.value)


def test_the_cache_key_covers_the_quantisation() -> None:
    pipelines = [
        Pipeline(plan([mla_spec()], CPU_FP8, given))
        for given in (
            FusionConfig(),
            config("per_token"),
            config("group128"),
            config("group64"),
            config("group64,ue8m0"),
        )
    ]
    assert len({repr(pipeline.uuid()) for pipeline in pipelines}) == len(pipelines)
    copy = pickle.loads(pickle.dumps(pipelines[2]))
    assert copy.uuid() == pipelines[2].uuid()
    # A copy shares the report: whoever made the pipeline sees what an engine's copy did.
    assert copy.plan == pipelines[2].plan
    assert copy.report is pipelines[2].report
