"""The plan: pure, quick, without torch, and a sentence for every decision."""

from __future__ import annotations

import json
import os
import re
import time
from typing import Any

import attrs
import pytest
from fusion_support import FUSION, gqa_spec, mla_spec
from helpers import run_python

from layerfuse import registry
from layerfuse.adapters import ActivationQuant
from layerfuse.adapters.errors import SpecError
from layerfuse.adapters.specs import WHOLE, GatedNormSpec, MLAKernelSpec, NormSpec, ResidualSpec
from layerfuse.fusion import FUSIONS, Engine, FusionConfig, FusionConfigError, Target, UnknownTargetError, plan
from layerfuse.fusion.chain import Fusion, Norm
from layerfuse.fusion.config import ENVIRONMENT
from layerfuse.fusion.legality import legality
from layerfuse.fusion.rewrite.identity import plan_hash
from layerfuse.fusion.sites import LATENTS, OwnSites, Site, sites_of
from layerfuse.fusion.steps import At, Legality

CPU = Target.named("cpu")
GATED = GatedNormSpec(width=1536, epsilon=1e-6, activation="silu", norm_before_gate=True, group_size=None)
MLA_FUSIONS = [fusion for fusion in FUSIONS.values() if LATENTS in fusion.roles]


def kernel_spec() -> MLAKernelSpec:
    return MLAKernelSpec(
        layer_index=0, outer="the DeepseekV2MLAAttention around it", num_local_heads=2, q_lora_rank=1536,
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, softmax_scale=0.1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "kind", "reason"),
    [
        (mla_spec(), "expected", "rms_norm(1536, epsilon 1e-06) and rms_norm(512, epsilon 1e-06) are one launch on cpu"),
        (mla_spec(q_norm=GATED), "refused", "q norm is gated, and the fused op takes plain norms only"),
        (mla_spec(q_lora_rank=None), "not_applicable", "q_lora_rank is None: there is no query latent norm to pair"),
        (kernel_spec(), "refused", "an inner kernel layer knows no norms; ask the DeepseekV2MLAAttention around it"),
        (mla_spec(kv_norm=NormSpec(width=512, epsilon=1e-6, weight_offset=1.0)), "expected", "rms_norm(1536, epsilon 1e-06) and rms_norm(512, epsilon 1e-06) are one launch on cpu"),
    ],
)  # fmt: skip
def test_decisions(spec: object, kind: str, reason: str) -> None:
    made = plan([("path", spec)], CPU)  # type: ignore[list-item]
    (decision,) = [decision for decision in made.decisions if decision.fusion == FUSION]
    assert (decision.site, decision.kind, decision.reason) == ("path:latents", kind, reason)
    assert decision.applies is (kind == "expected")


def test_an_op_that_knows_no_zero_centred_norms_is_not_taken_for_them() -> None:
    fusion = Fusion(
        name="plain_only", doc="", level=1, roles=(LATENTS,), chain=(Norm.of("q"), Norm(x="kv", weight_offset=None))
    )
    spec = mla_spec(kv_norm=NormSpec(width=512, epsilon=1e-6, weight_offset=1.0))
    (site,) = sites_of("", spec)
    assert legality(fusion, site, CPU, None) == (
        "refused",
        "kv norm is zero-centred (gemma style, weight_offset 1.0), and the fused op multiplies by the stored weight",
    )


@pytest.mark.parametrize(
    ("index", "said", "adds"), [(0, None, False), (3, None, True), (3, True, False), (0, False, True)]
)
@pytest.mark.parametrize("blocks", [1, 2])
def test_only_the_first_norm_of_a_stream_has_nothing_to_add(
    index: int, said: bool | None, adds: bool, blocks: int
) -> None:
    norms = (NormSpec(width=64, epsilon=1e-6),) * blocks
    stream = ResidualSpec(
        hidden_size=64,
        layer_index=index,
        parallel=WHOLE,
        input_norms=norms,
        post_attention_norms=norms,
        starts_stream=said,
    )
    assert [site.adds for site in sites_of("layer", stream)] == [adds, *[True] * (2 * blocks - 1)]


def test_a_layer_without_sites_is_in_no_decision() -> None:
    made = plan([("path", gqa_spec())], CPU)
    assert made.sites == made.decisions == made.of("path") == ()


NORM = NormSpec(width=32, epsilon=1e-6, weight_offset=0.0, module="norm")
A_SITE = object()


def odd(said: Any = A_SITE, **changes: Any) -> OwnSites:
    """A layer of a kind of its own that says a site at the input role, with changes; or something else."""

    @attrs.frozen(kw_only=True)
    class OddSpec(OwnSites):
        def sites(self, layer: str) -> Any:
            fields: dict[str, Any] = {"layer": layer, "role": "input", "norms": (NORM,), "spec": self}
            return (Site(**fields | changes),) if said is A_SITE else said

    return OddSpec(hidden_size=64, layer_index=0, parallel=WHOLE)


@pytest.mark.parametrize("engine", [None, "vllm"])
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"role": "inptu"}, "no role is called 'inptu'; did you mean 'input'? Known: input, post_attention, final, "),
        ({"role": "nosuch"}, "no role is called 'nosuch'. Known: input, post_attention, final, "),
        ({"role": ["input"]}, "no role is called ['input']. Known: input"),
        ({"spec": None}, "the site input says the spec of its layer, as spec=self, got None"),
        ({"norms": ()}, "a site of the role input has 1 of NormSpec in a tuple, got ()"),
        ({"norms": NORM}, "a site of the role input has 1 of NormSpec in a tuple, got NormSpec(width=32"),
        ({"norms": (None,), "absent": "it has none"}, "a site of the role input has 1 of NormSpec in a tuple, got (None,)"),
        ({"role": "latents"}, "a site of the role latents has 2 of NormSpec in a tuple, got (NormSpec(width=32"),
        ({"role": "linear", "norms": ()}, "a site of the role linear says what multiplies there, as linear=LinearSpec(...), got None"),
        ({"role": "experts", "norms": (), "unknown": "its engine keeps it"}, "a site of the role experts says what multiplies there, as experts=ExpertsSpec(...), got None"),
    ],
)  # fmt: skip
def test_a_site_that_a_spec_says_wrongly_is_refused(changes: dict[str, Any], says: str, engine: str | None) -> None:
    with pytest.raises(SpecError, match=re.escape(f"OddSpec.sites('layers.0'): {says}")):
        plan([("layers.0", odd(**changes))], CPU, engine=engine)


@pytest.mark.parametrize("said", [None, "input", ["input"]])
def test_sites_that_are_none_are_refused(said: object) -> None:
    with pytest.raises(SpecError, match=r"expected its sites in a tuple, as \(Site\(...\),\), got "):
        sites_of("layers.0", odd(said))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norms": (), "absent": "it has none"},
        {"norms": (), "unknown": "nobody says which"},
        {"role": "linear", "norms": (), "absent": "nothing multiplies"},
    ],
)
def test_a_site_that_a_spec_says_rightly_is_planned(changes: dict[str, Any]) -> None:
    made = plan([("layers.0", odd(**changes))], CPU)
    assert [site.name for site in made.sites] == [f"layers.0:{changes.get('role', 'input')}"]
    assert made.decisions and all(each.site == made.sites[0].name for each in made.decisions)


def test_sixty_one_layers() -> None:
    specs = [(f"model.layers.{i}.self_attn", mla_spec(i)) for i in range(61)]
    start = time.process_time()
    made = plan(specs, Target.named("gfx950"))
    assert time.process_time() - start < 0.02
    assert len(made.expected(FUSION)) == 61
    assert made.refused() == made.not_applicable(FUSION) == ()
    assert [decision.site for decision in made.expected(FUSION)] == [f"{path}:latents" for path, _ in specs]
    decisions = {decision.fusion: decision for decision in made.of("model.layers.60.self_attn")}
    assert decisions[FUSION].applies
    assert tuple(decisions.values()) == made.at("model.layers.60.self_attn:latents")
    assert "61 x expected" in str(made)
    assert len(json.loads(json.dumps(made.to_dict()))["decisions"]) == 61 * len(MLA_FUSIONS)


def test_it_is_pure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "none")
    assert plan([mla_spec()], CPU) == plan([mla_spec()], CPU)
    assert len(plan([mla_spec()], CPU).expected()) == 1


def test_bare_specs_are_named_by_index_and_never_twice() -> None:
    made = plan([mla_spec(3), kernel_spec()], CPU)
    assert [d.site for d in made.decisions if d.fusion == FUSION] == ["layer 3:latents", "layer 0 kernel:latents"]
    with pytest.raises(ValueError, match=r"more than one spec of a type \('layer 3' has several MLASpec"):
        plan([mla_spec(3), mla_spec(3)], CPU)


@pytest.mark.parametrize(
    ("text", "expected", "reason"),
    [
        ("", 1, ""),
        ("all", 1, ""),
        (FUSION, 1, ""),
        ("none", 0, f"{FUSION} is switched off by {ENVIRONMENT}=none"),
        (f"-{FUSION}", 0, f"{FUSION} is switched off by {ENVIRONMENT}=-{FUSION}"),
    ],
)
def test_the_environment(text: str, expected: int, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, text)
    made = plan([mla_spec()], CPU, FusionConfig.from_environment())
    assert len(made.expected()) == expected
    assert [d.reason for d in made.refused(FUSION)] == ([reason] if reason else [])


def test_off_is_not_said_of_what_never_applied() -> None:
    decisions = plan([mla_spec(q_lora_rank=None)], CPU, FusionConfig(level=0)).decisions
    assert {decision.kind for decision in decisions} == {"not_applicable"}
    assert len(decisions) == len(MLA_FUSIONS)


def test_names_alone_are_all_that_is_on_and_signs_change_the_default() -> None:
    add, gated = "add_rms_norm", "gated_rms_norm"
    assert {name for name, on in FusionConfig.parse(add).switches if on} == {add}
    assert dict(FusionConfig.parse(f"+{add}, -{gated}").switches) == {add: True, gated: False}
    named = dict(FusionConfig.parse(f"{gated},{add}").switches)
    assert {name for name, on in named.items() if on} == {add, gated} and len(named) > 10


def test_typos() -> None:
    with pytest.raises(
        FusionConfigError, match="LAYERFUSE_FUSIONS=x: no fusion is called 'mla_dual_rmsnorm'; did you "
    ):
        FusionConfig.parse("-mla_dual_rmsnorm", origin="LAYERFUSE_FUSIONS=x")
    with pytest.raises(FusionConfigError, match="did you mean 'mla_dual_rms_norm'"):
        FusionConfig(switches={"mla_dual_norm": True})
    with pytest.raises(FusionConfigError, match="level: expected one of 0, 1, 2, got 3"):
        FusionConfig(level=3)
    with pytest.raises(UnknownTargetError, match="no target is called 'gfx95O'; did you mean 'gfx950'"):
        Target.named("gfx95O")


@pytest.mark.parametrize(
    ("gpu", "arch"),
    [
        *(("h100", "sm90"), ("H200", "sm90"), ("H20", "sm90"), ("a100", "sm80"), ("B200", "sm100"), ("L40S", "sm89")),
        *(("MI300X", "gfx942"), ("mi325x", "gfx942"), ("MI355X", "gfx950"), ("SM90", "sm90"), ("GFX950", "gfx950")),
    ],
)
def test_a_target_may_be_the_name_of_a_gpu(gpu: str, arch: str) -> None:
    assert Target.named(gpu) == Target.named(arch)


@pytest.mark.parametrize(
    "name",
    ["h100x", "hopper", "mi300", "h1000", "", "sm", "sm9", "gfx", "gfx95", "h10", "rocm", None, 90, "gfx9500000000"],
)
def test_a_name_that_is_like_a_gpu_is_no_target(name: object) -> None:
    with pytest.raises(UnknownTargetError, match="and the GPUs a100") as caught:
        Target.named(name)
    assert str(caught.value).startswith(f"no target is called {name!r}")


def test_sites_that_differ_in_their_place_only_are_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def counted(fusion: Fusion, site: Site, *rest: Any) -> Legality:
        asked.append(site.name)
        return legality(fusion, site, *rest)

    monkeypatch.setattr("layerfuse.fusion.planning.legality", counted)
    plan(registry.model("deepseek-v3").specs(8), Target.named("gfx950"))
    # The first input norm and another, the norm before dense MLPs and the one before experts, latents, two MLPs, the final norm;
    # and the input norm behind the last dense MLP, as what stands in front of it is known.
    assert len(set(asked)) <= 9


@pytest.mark.parametrize(
    ("name", "why"), [("kimi-k3", "none of its columns is roped"), ("kimi-linear-48b-a3b", "there is no query latent")]
)
@pytest.mark.parametrize("fusion", ["mla_decode", "mla_decode_group_quant"])
def test_a_decode_step_needs_a_query_latent_and_a_rope(fusion: str, name: str, why: str) -> None:
    engine = Engine(name="vllm", linears={}, decodes=True)
    made = plan(registry.model(name).specs(published=True), Target.named("sm90"), FusionConfig.parse("all"), engine)
    (decided,) = {(each.kind, each.reason) for each in made.decisions if each.fusion == fusion}
    assert decided[0] == "not_applicable" and why in decided[1]


def test_what_equality_leaves_out_is_decided_on() -> None:
    """Equal specs may differ in who reads their norms: each is decided for itself."""
    read, other = (
        NormSpec(width=256, epsilon=1e-6, quant=quant) for quant in (ActivationQuant(group_size=128), ActivationQuant())
    )
    common: dict[str, Any] = {"hidden_size": 256, "parallel": WHOLE}
    streams = [
        ResidualSpec(**common, layer_index=index, input_norms=(norm,), post_attention_norms=(norm,))
        for index, norm in ((1, read), (2, other))
    ]
    made = plan(
        [(f"layers.{i}", stream) for i, stream in enumerate(streams)], Target.named("gfx950"), FusionConfig(level=2)
    )
    assert made.sites[0].norms == made.sites[2].norms
    fused = [{d.fusion for d in made.at(site.name) if d.applies} for site in made.sites if site.role == "input"]
    assert fused == [{"add_rms_norm_group_quant"}, {"add_rms_norm_per_token_quant"}]


class Elsewhere(Norm):
    """A step of this module, which looks at the place of its site."""

    def why_not(self, at: At) -> Legality | None:
        return None if at.site.spec.layer_index == 1 else Legality("refused", "not the second layer")


def test_steps_of_other_packages_may_look_at_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = Fusion(
        name="theirs", doc="of another package", level=1, roles=("post_attention",), chain=(Elsewhere,), owner="another"
    )
    known = {**FUSIONS, "theirs": theirs}
    monkeypatch.setattr("layerfuse.fusion.planning.FUSIONS", known)
    specs = [pair for pair in registry.model("qwen3-4b").specs()[:6] if isinstance(pair[1], ResidualSpec)]
    made = plan(specs, Target.named("gfx950"))
    kinds = [d.kind for d in made.decisions if d.fusion == "theirs"]
    assert [kind == "refused" for kind in kinds] == [True, False]


def test_the_key_is_the_same_in_every_process() -> None:
    """It is the key of a cache on disk: nothing in it may be one process's own, such as the order of a set."""
    code = """
from layerfuse import registry
from layerfuse.fusion import Target, plan
from layerfuse.fusion.rewrite.identity import plan_hash
print(plan_hash(plan(registry.model("kimi-linear-48b-a3b").specs(8), Target.named("gfx950"))))
"""
    here = plan_hash(plan(registry.model("kimi-linear-48b-a3b").specs(8), Target.named("gfx950")))
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    said = run_python(code, PYTHONHASHSEED=seed)
    assert said.stdout.split() == [here], said.stderr


def test_the_key_is_the_same_on_every_rank() -> None:
    """Which share a graph of theirs, and its cache, also where one has an expert more."""

    def key(rank: int) -> str:
        specs = [
            (layer, attrs.evolve(spec, experts=attrs.evolve(spec.experts, num_local_experts=32 + rank)))
            for layer, spec in registry.model("deepseek-v3").specs(8, rank, published=True)
            if isinstance(spec, ResidualSpec) and spec.experts is not None
        ]
        return plan_hash(plan(specs, Target.named("gfx950")))

    assert key(0) == key(1)
