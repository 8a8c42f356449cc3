"""What `layerfuse plan --engine vllm` says beforehand, without vLLM: what vLLM fuses itself, where, and what takes its place."""

import json
import re

import attrs
import pytest
import torch

from layerfuse import registry
from layerfuse.adapters import ActivationQuant
from layerfuse.cli import planning
from layerfuse.cli.planning import config_for, plan_data
from layerfuse.engines.vllm.native_fusions import Place, by_passes
from layerfuse.fusion import Engine, FusionConfig, Target, plan
from layerfuse.registry.published import LINEARS as EVERY
from layerfuse.registry.published import QuantKind

ADD, GROUP, DUAL = "add_rms_norm", "add_rms_norm_group_quant", "mla_dual_rms_norm"


def test_sequence_parallelism_is_vllms_own_way_of_an_all_reduce():
    """It is off unless asked for, and takes the all-reduces that are fused by default otherwise."""
    place, forms = Place(vendor="nvidia", arch="sm90", ranks=2), {f"all_reduce_{ADD}", f"all_reduce_{GROUP}"}
    for on in (True, False):
        does = by_passes(place, {"enable_sp": on})
        assert (forms <= set(does)) == on
        specs = registry.model("deepseek-v3").specs(tp=2)
        found = plan(
            specs,
            Target.named("sm90"),
            FusionConfig(quant=ActivationQuant.parse("group128")),
            Engine(name="vllm", does=does),
        )
        assert bool(found.expected(f"all_reduce_{GROUP}")) != on


def test_what_is_to_be_named_is_all_that_was_measured_together(run):
    answer = " ".join(run("plan", "deepseek-v3.2", "--engine", "vllm", "--target", "sm90", "--tp", "8").out.split())
    names = f"{GROUP},rms_norm_group_quant,silu_mul_group_quant,few_token_linear_group_quant"
    assert f"LAYERFUSE_FUSIONS={names} switches on what was measured together: 1.16" in answer
    assert "fused ops can stand in its modules only, and none is on." in answer


def test_a_model_that_is_not_compiled_calls_vllms_own_modules_in_long_steps(run, monkeypatch):
    monkeypatch.setenv("LAYERFUSE_FUSIONS", GROUP)
    for model, what in (("deepseek-v3.2", "calls vLLM's own modules"), ("deepseek-v3", "runs vLLM's own graph")):
        data = json.loads(run("plan", model, "--engine", "vllm", "--target", "sm90", "--json").out)
        assert [
            each.partition("It ")[2].partition(",")[0] for each in data["notes"] if "waits for the host" in each
        ] == [what]
    eager = json.loads(
        run("plan", "deepseek-v3", "--engine", "vllm", "--target", "sm90", "--enforce-eager", "--json").out
    )
    assert not any("waits for the host" in each for each in eager["notes"])


def test_figures_of_cuda_graphs_are_not_those_of_an_engine_that_captures_none(run):
    decided = of_layers(run, "deepseek-v3", "--engine", "vllm", "--target", "sm90", "--enforce-eager")
    whys = {why for (_, _, fusion, _), (_, why) in decided.items() if fusion == GROUP}
    assert any(why.endswith("it was measured in CUDA graphs, and vLLM captures none here") for why in whys), whys


@pytest.mark.parametrize("architecture", ["MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration"])
def test_an_architecture_that_no_model_declares_is_known_not_to_be_compiled(run, tmp_path, architecture):
    config = {
        "architectures": [architecture], "model_type": "new", "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "num_hidden_layers": 2, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    answer = run("plan", str(tmp_path), "--engine", "vllm", "--target", "sm90")
    assert f"runs {architecture} in breakable CUDA graphs" in " ".join(answer.out.split())


MIXTURES = {
    "deepseek-v2-lite": 26,
    "deepseek-v3": 58,
    "deepseek-v3.2": 58,
    "glm-4.7-flash": 46,
    "glm-5": 75,
    "kimi-k2.5": 60,
    "kimi-k3": 92,
    "kimi-linear-48b-a3b": 26,
    "mistral-small-4-119b": 36,
    "qwen3-next-80b-a3b": 48,
    "qwen3.5-35b-a3b": 40,
    "longcat-flash": 0,  # two dense MLPs per layer read the norms, beside the experts
    "qwen3.5-27b": 0,
}
"""How many of a model's layers have experts behind their post-attention norm."""


def of_layers(run, *arguments):
    """(kind, role, fusion, decision) -> sites, and the reasons."""
    data = json.loads(run("plan", *arguments, "--json").out)
    found = [
        (kind["kind"], role, d["fusion"], d["decision"], d["sites"], d["reason"])
        for kind in data["kinds"]
        for role, several in kind["sites"].items()
        for d in several
    ]
    return {row[:4]: row[4:] for row in found}


@pytest.mark.parametrize(("model", "mixtures"), MIXTURES.items())
def test_in_front_of_vllms_experts_and_in_them_nothing_quantised_is_promised(run, model, mixtures, monkeypatch):
    """Whatever is switched on: its op for experts takes what it reads as it is."""
    for switches in ("", "all"):
        monkeypatch.setenv("LAYERFUSE_FUSIONS", switches)
        found = of_layers(run, model, "--engine", "vllm", "--target", "sm90", "--quant", "per_token")
        quantised = f"{ADD}_per_token_quant"
        sites, reason = found.get(
            ("residual", "post_attention", quantised, "not_applicable"), (0, "moe_forward_shared")
        )
        assert (sites, "moe_forward_shared" in reason) == (mixtures, True)
        others = [
            found.get(("residual", "post_attention", quantised, kind), (0,))[0] for kind in ("expected", "refused")
        ]
        # In front of Kimi-K3's norms stands attn_res, which vLLM's code computes together with them.
        each = {"longcat-flash": 2, "kimi-k3": 0}.get(model, 1)
        assert sum(others) == (registry.model(model).num_hidden_layers - mixtures) * each
        kinds = {key[3] for key in found if key[:2] == ("shared_experts", "activation")}
        assert kinds == ({"not_applicable"} if mixtures else set())
        why = found.get(("shared_experts", "activation", "silu_mul_per_token_quant", "not_applicable"))
        assert why is None if not mixtures else "no graph shows" in why[1]


@pytest.mark.parametrize("engine", [None, "vllm", "transformers"])
@pytest.mark.parametrize("silent", [False, True])
def test_what_reads_the_norm_of_routed_experts_alone(run, engine, silent, silent_models):
    """gpt-oss has no others, and their kernels quantise by themselves; an entry may say nothing of them."""
    model = ["silent-gpt-oss", "--models", silent_models] if silent else ["gpt-oss-120b"]
    asked = [*model, "--target", "sm90", "--quant", "per_token", *(["--engine", engine] if engine else [])]
    found = of_layers(run, *asked)
    sites, reason = found["residual", "post_attention", f"{ADD}_per_token_quant", "not_applicable"]
    alone = "vLLM runs a mixture's experts" if engine == "vllm" else "routed experts alone read the norm"
    said = "not known: the model's entry declares no MLP of this layer" if silent else alone
    assert sites == 36 and reason.startswith(said)
    assert ("residual", "input", f"{ADD}_per_token_quant", "not_applicable") in found  # the first layer's
    assert found["residual", "input", "rms_norm_per_token_quant", "fallback"][0] >= 35


@pytest.mark.parametrize("engine", [None, "transformers", "vllm", Engine(name="mine")], ids=str)
def test_a_plan_in_python_says_the_same_of_experts(engine):
    """By an engine's name alone nothing is known of its experts; torch.compile sees transformers' shared ones."""
    config = FusionConfig(quant=ActivationQuant.parse("group128"), level=2, switches={GROUP: True})
    found = plan(registry.model("deepseek-v3").specs(), Target.named("sm90"), config, engine)
    behind = [d for d in found.decisions if d.fusion == GROUP and d.site.startswith("layers.9:post")]
    name = "" if engine in (None, "transformers") else "vllm" if engine == "vllm" else engine.name
    assert [d.kind for d in behind] == ["not_applicable" if name else "expected"]
    assert not name or behind[0].reason.startswith(f"not known: how {name} runs a mixture's experts")


@pytest.mark.parametrize("engine", ["transformers", "vllm", "sglang"])
def test_without_a_target_a_plan_for_an_engine_is_made_for_the_gpu_that_is_there_or_for_hopper(
    engine, run, monkeypatch
):
    def planned(*more):
        data = json.loads(run("plan", "kimi-k2.5", *more, "--json").out)
        return data["target"]["arch"], [note for note in data["notes"] if note.startswith("Planned for")]

    said = (
        "Planned for sm90 (H100, H200), as no --target was given and torch can use no GPU here; --target names another."
    )
    assert planned("--engine", engine) == ("sm90", [said])
    monkeypatch.setattr(planning, "_may_have_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert planned("--engine", engine) == ("sm100", [])
    assert planned() == ("gfx950", [])


def test_linears_of_fewer_bits_are_none_of_those(monkeypatch):
    """The checkpoint of an entry whose linears are in int4, and take what they read as it is."""
    kind = QuantKind(
        linears=[*EVERY], weight="int4", scheme="group", block=[1, 128], activation="none", source="a test"
    )
    entry = attrs.evolve(registry.model("llama-3.3-70b"), quant={"packed": kind})
    monkeypatch.setenv("LAYERFUSE_FUSIONS", "+few_token_linear")
    data = plan_data(entry, tp=1, rank=0, target="sm90", engine="vllm", config=config_for(()), published=True)
    rows = {row["fusion"]: row for row in data["fusions"]}
    sites, (reason,) = rows["any at linear"]["no"]
    assert "few_token_linear" not in rows and sites == 320 and reason.startswith("their weights are int4")


def test_a_measurement_of_several_fusions_is_one_footnote(run):
    said = " ".join(run("plan", "deepseek-v3", "--tp", 8, "--target", "sm90", "--engine", "vllm").out.split())
    notes = re.split(r"\[\d+\] (?=[^\[\]]{12})", said)[1:]
    measured = [note for note in notes if "silu_mul_group_quant together" in note]
    assert measured and all(re.match(r"\d+ sites: measured ", note) for note in measured)
    assert len(measured) == len(set(measured)) <= 2  # of this model, and of its other kind of layers


@pytest.mark.parametrize(
    ("model", "target", "said"),
    [("kimi-k3", "sm90", True), ("kimi-k3", "gfx950", False), ("kimi-linear-48b-a3b", "sm90", False)],
)
def test_what_k3s_own_code_does_of_its_delta_nets_is_said_of_it_alone(run, model, target, said):
    assert ("fused_kda_decode" in run("plan", model, "--engine", "vllm", "--target", target, "-v").out) == said
