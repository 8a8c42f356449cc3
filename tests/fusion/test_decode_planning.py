"""Where decode chains are planned: from specs alone, off until they are measured or asked for."""

from __future__ import annotations

import attrs
import pytest
from fusion_support import mla_spec

from layerfuse.adapters import NO_ROPE, MLASpec, RopeSpec
from layerfuse.fusion import FUSIONS, Fusion, FusionConfig, Target, plan
from layerfuse.fusion.chain import Concat, Faster, FusionError, Norm, Rope
from layerfuse.fusion.sites import LATENTS, QUERY

WRITE, CONCAT, DUAL = "mla_norm_rope_cache", "mla_query_concat", "mla_dual_rms_norm"
ON = FusionConfig(switches={WRITE: True, CONCAT: True})
SM90 = Target.named("sm90")
ROPE = RopeSpec(width=64, interleaved=True, attention_scaling=1.0, table="cos_sin")


def decided(spec: MLASpec, config: FusionConfig | None = None, target: Target = SM90) -> dict[str, tuple[str, str]]:
    """Fusion -> kind and reason."""
    return {d.fusion: (d.kind, d.reason) for d in plan([("a", spec)], target, config).decisions}


@pytest.mark.parametrize("rope", [ROPE, NO_ROPE], ids=["rope", "none"])
def test_the_longer_chain_comes_first_where_it_is_asked_for(rope: RopeSpec) -> None:
    found = decided(mla_spec(rope=rope), ON)
    assert found[WRITE][0] == found[CONCAT][0] == "expected"
    assert found[WRITE][1].endswith(", the rope of the key and the cache write are one launch on sm90")
    assert found[DUAL] == (
        "fallback", f"{WRITE} takes the same nodes; this is taken where it is missed",
    )  # fmt: skip
    assert found[f"{WRITE}_group_quant"][0] == "not_applicable"


def test_without_a_query_latent_there_is_the_query_alone() -> None:
    found = decided(mla_spec(q_lora_rank=None, rope=ROPE), ON)
    assert found[WRITE] == ("not_applicable", "q_lora_rank is None: there is no query latent norm to pair")
    assert found[CONCAT][0] == "expected"


def test_values_of_cos_and_sin_are_no_table() -> None:
    """Layers that are equal but for where cos and sin come from are told apart."""
    values = attrs.evolve(ROPE, table="values")
    made = plan([("a", mla_spec(0, rope=ROPE)), ("b", mla_spec(1, rope=values))], SM90, ON)
    assert [d.site for name in (WRITE, CONCAT) for d in made.expected(name)] == ["a:latents", "a:query"]
    (why,) = {d.reason for name in (WRITE, CONCAT) for d in made.not_applicable(name)}
    assert why.startswith("cos and sin come to this layer as values, and not by a table and positions")


def test_a_spec_without_a_rope_is_refused_where_the_chain_is_asked_for() -> None:
    reason = "the spec does not say how the layer's rope turns; give it a RopeSpec"
    assert decided(mla_spec(), ON)[WRITE] == decided(mla_spec(), ON)[CONCAT] == ("refused", reason)
    assert decided(mla_spec())[WRITE] == ("not_applicable", reason)


def test_off_until_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = mla_spec(rope=ROPE)
    off = f"{WRITE} is off unless switched on: it was not benchmarked in torch.compile"
    assert decided(spec)[WRITE] == ("not_applicable", off)
    assert decided(spec)[DUAL][0] == "expected"
    figure = Faster(engine="torch.compile", archs=("sm90",), figure="1.2 times faster")
    fusions = {**FUSIONS, WRITE: attrs.evolve(FUSIONS[WRITE], faster_in=(figure,))}
    monkeypatch.setattr(FUSIONS, "_fusions", fusions)
    kind, reason = decided(spec)[WRITE]
    assert kind == "expected"
    assert reason.endswith("; measured 1.2 times faster")
    assert decided(spec)[DUAL][0] == "fallback"
    assert decided(spec, target=Target.named("gfx950"))[WRITE] == (
        "not_applicable", f"{WRITE} is off unless switched on: it was measured faster on sm90",
    )  # fmt: skip
    assert decided(spec, FusionConfig(switches={WRITE: False}))[WRITE][0] == "refused"
    in_vllm = plan([("a", spec)], SM90, engine="vllm")
    assert not in_vllm.expected(WRITE), "a measurement in torch.compile is none in an engine"


def test_an_fp8_query_is_planned_where_it_is_declared() -> None:
    from layerfuse.adapters import ActivationQuant

    config = FusionConfig(
        switches={f"{CONCAT}_static_quant": True, CONCAT: True}, quant={"query": ActivationQuant(fixed="static")}
    )
    found = decided(mla_spec(rope=ROPE), config)
    assert found[f"{CONCAT}_static_quant"][0] == "expected"
    assert found[CONCAT][0] == "fallback"
    everywhere = FusionConfig(quant=ActivationQuant(fixed="static"))
    assert "query" not in dict(everywhere.quant), "no linear reads a query"


def test_chains_with_a_rope_are_given_their_op() -> None:
    with pytest.raises(FusionError, match="no op is composed of a chain with Rope: give it its op"):
        Fusion(name="one", doc="", level=1, roles=(QUERY,), chain=(Rope(x="q_rope"), Concat))
    with pytest.raises(FusionError, match="the role latents has no Concat"):
        attrs.evolve(FUSIONS[WRITE], chain=(Norm.of("q"), Norm.of("kv"), Rope(x="k_rope"), Concat), roles=(LATENTS,))
