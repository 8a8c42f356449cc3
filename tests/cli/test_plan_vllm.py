"""What `layerfuse plan --engine vllm` says beforehand, without vLLM: what vLLM fuses itself, where, and what takes its place."""

import json
import re
from collections import Counter

import attrs
import pytest
import torch

from layerfuse import registry
from layerfuse.adapters import ActivationQuant
from layerfuse.cli import planning
from layerfuse.cli.planning import config_for, plan_data
from layerfuse.engines.vllm.native_fusions import NEEDS_FLASHINFER, Place, by_passes
from layerfuse.engines.vllm.switches import BLOCKS_INSIDE, DEEP_GEMM
from layerfuse.fusion import Engine, FusionConfig, Target, plan
from layerfuse.fusion.policy import shipped
from layerfuse.registry.published import LINEARS as EVERY
from layerfuse.registry.published import QuantKind

ALONE = "mla_decode is asked for, and has no site in this model: there is a place for it in MLA layers of vLLM and SGLang alone."


def decisions(run, *arguments):
    """(role, fusion) -> decision and reason, where there is one for all layers of the first kind that has it."""
    data = json.loads(run("plan", *arguments, "--engine", "vllm", "--json").out)
    rows = [(role, d) for kind in data["kinds"] for role, several in kind["sites"].items() for d in several]
    return {(role, d["fusion"]): (d["decision"], d["reason"]) for role, d in reversed(rows)}


ADD, GROUP, DUAL = "add_rms_norm", "add_rms_norm_group_quant", "mla_dual_rms_norm"
LINEARS = "few_token_linear_group_quant"
NAMED = "; naming the fusion takes it instead"


@pytest.mark.parametrize(
    ("arguments", "role", "fusion", "does"),
    [
        # A pass of vLLM's compiler, by its name.
        (
            ["deepseek-v3", "--target", "sm100", "--quant", "group128"],
            "post_attention",
            GROUP,
            "its pass RMSNormQuantFusionPass (fuse_norm_quant)" + NAMED,
        ),
        (
            ["deepseek-v3", "--target", "sm90", "--tp", 8],
            "final",
            f"all_reduce_{ADD}",
            f"its pass AllReduceFusionPass (fuse_allreduce_rms){NEEDS_FLASHINFER}" + NAMED,
        ),
        # The code of a model that is not compiled, which nothing takes from it.
        (["deepseek-v3.2", "--target", "sm90"], "latents", DUAL, "fused_norm_rope in the code of the model"),
        (
            ["glm-5", "--target", "sm90", "--tp", 8],
            "post_attention",
            ADD,
            f"fused_allreduce_rms_norm in the code of the model{NEEDS_FLASHINFER}, and else an all-reduce and a norm with its add",
        ),
        (["kimi-k3", "--target", "sm90"], "post_attention", ADD, "attn_res in the code of the model"),
        # Its own ops, which the plugin's stand in the place of where they are asked for.
        (["kimi-k3", "--target", "sm90"], "latents", DUAL, "fused_q_kv_rmsnorm in the code of the model" + NAMED),
        (
            ["kimi-linear-48b-a3b", "--target", "sm90"],
            "output",
            "gated_rms_norm",
            "its own kernel for the gated norm (rms_norm_gated)" + NAMED,
        ),
        (
            ["deepseek-v3", "--target", "sm90", "--enforce-eager"],
            "post_attention",
            ADD,
            "its own op for the add and the norm (fused_add_rms_norm)" + NAMED,
        ),
    ],
)
def test_what_vllm_does_itself_is_not_applicable_and_the_place_is_named(run, arguments, role, fusion, does):
    kind, reason = decisions(run, *arguments)[role, fusion]
    gained = shipped().why_nothing_gained(fusion, Engine(name="vllm"))
    figure = gained if gained is not None and "its pass" in does else ""
    assert (kind, reason) == ("not_applicable", f"vLLM does it: {does}{figure and '; '}{figure}")
    assert f"vLLM does it: {does}"[:60] in " ".join(run("plan", *arguments, "--engine", "vllm").out.split())


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


def test_what_is_asked_for_by_name_is_taken_from_vllm_unless_it_has_no_place_for_it(run, monkeypatch):
    monkeypatch.setenv("LAYERFUSE_FUSIONS", f"{ADD},{DUAL},{GROUP}")
    block = decisions(run, "deepseek-v3", "--target", "sm90", "--quant", "group128")
    assert block["post_attention", GROUP][0] == "expected"
    eager = decisions(run, "deepseek-v3", "--target", "sm90", "--enforce-eager", "--quant", "group128")
    assert (eager["post_attention", ADD][0], eager["latents", DUAL][0]) == ("fallback", "expected")
    assert eager["post_attention", GROUP][0] == "expected"
    assert decisions(run, "kimi-k3", "--target", "sm90")["post_attention", ADD][0] == "not_applicable"
    # 0.26 has no switch for both latent norms.
    older = decisions(run, "deepseek-v3", "--target", "sm90", "--enforce-eager", "--engine-version", "0.26")
    why = "enforce_eager is set: vLLM compiles nothing; at module level there is no place for it"
    assert (older["final", ADD][0], older["latents", DUAL]) == ("expected", ("refused", why))


def test_a_plan_says_with_which_other_release_its_figures_were_measured(run):
    asked = "plan", "deepseek-v3", "--tp", 8, "--target", "h100", "--engine", "vllm"
    said = "The figures of mla_decode were measured with vLLM 0.33.0; this is 0.26."
    assert said in run(*asked, "--engine-version", "0.26").out.splitlines()
    for same in ([], ["--engine-version", "0.33.4"]):
        assert " were measured with " not in run(*asked, *same).out


def test_vllms_own_variables_are_read_as_vllm_reads_them(run, monkeypatch):
    asked = ["deepseek-v3", "--target", "gfx950"]
    assert decisions(run, *asked)["latents", DUAL][0] == "refused"
    monkeypatch.setenv("VLLM_ROCM_USE_AITER", "1")
    does = "vLLM does it: its pass MLADualRMSNormFusionPass (fuse_mla_dual_rms_norm)" + NAMED
    kind, reason = decisions(run, *asked)["latents", DUAL]
    assert kind == "not_applicable" and reason.startswith(does)
    monkeypatch.setenv("LAYERFUSE_FUSIONS", "all")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    for more in ([], ["--enforce-eager"]):
        kind, reason = decisions(run, *asked, *more)["latents", DUAL]
        assert kind == "refused" and reason.startswith("VLLM_BATCH_INVARIANT is set")
    said = "At 306 sites nothing is fused in vLLM: VLLM_BATCH_INVARIANT is set: vLLM keeps to kernels whose results do not depend on the batch."
    assert said in " ".join(run("plan", *asked, "--engine", "vllm").out.split())


def test_what_vllms_mla_layers_take_at_module_level_is_decided_as_every_fusion_is(run, monkeypatch):
    def decided(model, *more, target="sm90"):
        return decisions(run, model, "--target", target, *more)["decode", "mla_decode"]

    kind, reason = decided("kimi-k2.5")
    assert kind == "expected" and "1.11, 1.10, 1.04 and 1.01 times faster" in reason
    assert decided("kimi-k2.5", "--enforce-eager")[0] == "refused", "where nothing is compiled it was not timed"
    kind, reason = decided("kimi-k2.5", target="mi355x")
    assert (kind, reason) == ("refused", "mla_decode is off in vllm unless switched on: it was measured faster on sm90")
    monkeypatch.setenv("LAYERFUSE_FUSIONS", "mla_decode,add_rms_norm")
    on = "the query's absorption and rope, behind a launch of both norms, the key's rope and the cache write, is one launch on sm90"
    kind, reason = decided("kimi-k2.5")
    assert kind == "expected" and reason.startswith(on)
    assert decided("kimi-k2.5", "--quant", "group128") == (kind, reason), "the projection quantises behind the ops"
    assert decided("deepseek-v2-lite") == ("not_applicable", "q_lora_rank is None: there is no query latent")
    assert "add_rms_norm" in run("plan", "kimi-k2.5", "--engine", "vllm", "--target", "mi355x").out
    others = run("plan", "gpt-oss-20b", "--engine", "vllm", "--target", "H200").out
    assert ALONE in " ".join(others.split())
    for variable, why in (
        ("VLLM_USE_BREAKABLE_CUDAGRAPH", "vLLM captures its CUDA graphs in pieces"),
        ("VLLM_BATCH_INVARIANT", "VLLM_BATCH_INVARIANT is set: "),
        ("VLLM_MLA_DISABLE", "VLLM_MLA_DISABLE is set: vLLM runs these layers without MLA"),
    ):
        monkeypatch.setenv(variable, "1")
        kind, reason = decided("kimi-k2.5")
        assert kind == "refused" and reason.startswith(why)
        monkeypatch.delenv(variable)
    assert "vLLM's code of this model is not known to hold" in decided("minicpm3-4b")[1]
    assert decided("deepseek-v3.2") == (
        "refused",
        "its attention is sparse: an indexer reads the query latent in between",
    )


def test_what_mla_decode_takes_no_fusion_of_graphs_does(run, monkeypatch):
    monkeypatch.setenv("LAYERFUSE_FUSIONS", "mla_decode,mla_dual_rms_norm")
    found = decisions(run, "kimi-k2.5", "--target", "sm90")
    assert found["latents", DUAL] == ("not_applicable", "mla_decode takes what stands there")
    # Where it cannot stand, they are fused.
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    assert decisions(run, "kimi-k2.5", "--target", "sm90")["latents", DUAL][0] == "expected"
    monkeypatch.delenv("VLLM_MLA_DISABLE")
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    assert decisions(run, "kimi-k2.5", "--target", "sm90")["latents", DUAL][0] == "expected"


def test_without_mla_nothing_at_module_level_takes_the_latent_norms(run, monkeypatch):
    """Of the models whose code asks vLLM for the class of their layers; others have MLA whatever it says."""
    monkeypatch.setenv("LAYERFUSE_FUSIONS", DUAL)
    for model, switched in (("deepseek-v3", True), ("glm-4.7-flash", True), ("kimi-k3", False)):
        asked = (model, "--target", "sm90", "--enforce-eager")
        monkeypatch.delenv("VLLM_MLA_DISABLE", raising=False)
        assert decisions(run, *asked)["latents", DUAL][0] == "expected"
        monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
        kind, reason = decisions(run, *asked)["latents", DUAL]
        assert (kind == "refused" and reason.startswith("VLLM_MLA_DISABLE is set")) == switched


def test_latent_norms_that_vllms_code_calls_by_themselves_have_no_place_at_module_level(run, monkeypatch):
    monkeypatch.setenv("LAYERFUSE_FUSIONS", DUAL)
    kind, reason = decisions(run, "minicpm3-4b", "--target", "sm90", "--enforce-eager")["latents", DUAL]
    assert kind == "refused" and reason.startswith("vLLM's code of this model has no MultiHeadLatentAttentionWrapper")
    assert decisions(run, "minicpm3-4b", "--target", "sm90")["latents", DUAL][0] == "expected"


def test_a_model_that_vllm_runs_by_transformers_code_has_no_fusion(run, monkeypatch):
    """Whatever is switched on: its layers are transformers', with linears of vLLM's in them."""
    monkeypatch.setenv("LAYERFUSE_FUSIONS", "all")
    for model, version, runs in (
        ("smollm3-3b", "0.33", False),
        ("seed-oss-36b", "0.33", False),
        ("seed-oss-36b", "0.26", True),
        ("smollm3-3b", "0.26", False),
        ("olmo-2-7b", "0.26", False),
        ("kimi-k3", "0.26", False),
    ):
        found = decisions(run, model, "--target", "sm90", "--engine-version", version)
        assert ("expected" in {kind for kind, _ in found.values()}) == runs, (model, version)
        why = f"vLLM {version} has no code of its own for"
        assert any(kind == "refused" and why in reason for kind, reason in found.values()) != runs, (model, version)


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


def test_what_a_fused_all_reduce_depends_on_is_said(run):
    given = "where FlashInfer is there and has a workspace for as many tokens"
    for model, target in (("deepseek-v3.2", "sm90"), ("glm-5", "sm100"), ("deepseek-v3", "sm90")):
        asked = [model, "--target", target, "--tp", 8]
        for role in ("post_attention", "final"):
            kind, reason = decisions(run, *asked)[role, f"all_reduce_{ADD}"]
            assert (kind, given in reason) == ("not_applicable", True), reason
    # FlashInfer is NVIDIA's: elsewhere that function is an all-reduce, and a norm that is called as any other.
    amd = decisions(run, "deepseek-v3.2", "--target", "gfx950", "--tp", 8, "--enforce-eager")
    assert amd["final", f"all_reduce_{ADD}"][0] == "refused"
    assert "fused_add_rms_norm" in amd["final", ADD][1]


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


def test_in_an_engine_without_a_plugin_every_decision_says_so(run, monkeypatch):
    """Whatever is switched on."""
    for switches in ("", "add_rms_norm", "all"):
        monkeypatch.setenv("LAYERFUSE_FUSIONS", switches)
        found = of_layers(run, "deepseek-v3", "--engine", "atom", "--target", "sm90", "--quant", "group128")
        assert not {key for key in found if key[3] in ("expected", "fallback")}
        said = {reason for key, (_, reason) in found.items() if key[3] == "refused" and key[2] in (ADD, GROUP, DUAL)}
        assert said == {"nothing of layerfuse runs inside ATOM yet: it has no plugin for it"}
    assert not any("unless switched on" in reason for _, reason in found.values())


def test_a_model_is_planned_as_it_was_published(run):
    """Without a word about it: the quantised fusions of DeepSeek-V3, and with `--quant none` those of its bfloat16."""
    asked = ["deepseek-v3", "--target", "sm90"]
    published = decisions(run, *asked)
    assert published["post_attention", GROUP][0] == published["decode", "mla_decode"][0] == "expected"
    assert published["latents", f"{DUAL}_group_quant"] == ("not_applicable", "mla_decode takes what stands there")
    assert "as published (see --quant): all linears in float8_e4m3fn" in run("plan", *asked, "--engine", "vllm").out
    plain = decisions(run, *asked, "--quant", "none")
    assert plain["post_attention", GROUP][0] == "not_applicable"
    assert "as published" not in run("plan", *asked, "--quant", "none").out
    one = decisions(run, *asked, "--quant", "latents=none")
    assert one["post_attention", GROUP][0] == "expected"
    assert one["latents", f"{DUAL}_group_quant"][0] == "not_applicable"


def test_routed_experts_stay_as_published_where_quant_does_not_name_them(run):
    """`--quant HOW` is of what reads norms and products; the experts' weights are known all the same."""
    asked = ["deepseek-v3", "--target", "sm90", "--tp", "8", "--engine", "vllm"]

    def experts(*quant):
        found = run("plan", *asked, *quant, "--json")
        data = json.loads(found.out)
        (said,) = {
            (each["decision"], each["reason"])
            for kind in data["kinds"]
            for each in kind["sites"].get("experts", ())
            if each["fusion"] == "few_token_experts_group_quant" and not str(each["tokens"]).startswith("from ")
        }
        return data["published"], *said

    (published,), decision, reason = experts("--quant", "group128")
    assert published == "experts in float8_e4m3fn, blocks of 128 x 128; activations group128"
    assert decision == "expected"
    one = experts("--quant", "group128", "--quant", "latents=none")
    assert one == ([published], decision, reason)
    # Of a quantisation that is not theirs they take nothing either: they are off as the linears beside them are.
    assert experts("--quant", "per_token")[:2] == ([published], "refused")
    takes = "its experts take what they read as it is; block_scaled_experts reads float8_e4m3fn, one scale per block of 128 x 128"
    assert experts("--quant", "none") == ([], "not_applicable", takes)
    for named in (["--quant", "experts=none"], ["--quant", "group128", "--quant", "experts=none"]):
        assert experts(*named)[1:] == ("not_applicable", takes)
    line = next(line for line in run("plan", *asked, "--quant", "group128").out.splitlines() if "published" in line)
    assert line == f"as published (see --quant): {published}"
    asked[0] = "kimi-k2.5"
    (published,), decision, reason = experts("--quant", "group128")
    assert published.startswith("experts in int4") and decision == "not_applicable"
    assert reason.startswith("an expert's weight is int4, one scale per group of 1 x 32; ")


HIDDEN = "shared experts are done before routed ones of more than 768 columns"
LARGE = "from 70,000,000 numbers on the engine's own product is as fast"
INSTALLED, ELSEWHERE = "FlashInfer is taken to be installed", "--quant group128,inside plans that"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["deepseek-v3", "--target", "h100"], INSTALLED),
        (["deepseek-v3", "--target", "h100", "--engine-version", "v0.33"], INSTALLED),
        (["deepseek-v3", "--target", "h100", "--quant", "latents=none"], INSTALLED),
        (["deepseek-v3", "--target", "h100", "--engine-version", "0.26"], ELSEWHERE),
        (["deepseek-v3", "--target", "h100", "--quant", "group128"], ELSEWHERE),
        (["deepseek-v3", "--target", "h100", "--quant", "group128,inside"], None),
        (["deepseek-v3", "--target", "b200"], None),
        (["deepseek-v3", "--target", "mi300x"], None),
        (["qwen3-32b", "--target", "h100"], None),
    ],
    ids=str,
)
def test_a_plan_says_that_linears_may_quantise_inside(run, arguments, says):
    notes = json.loads(run("plan", *arguments, "--engine", "vllm", "--json").out)["notes"]
    found = [said for said in (INSTALLED, ELSEWHERE) if any(said in note for note in notes)]
    assert found == [said for said in (says,) if said is not None]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        # 61 layers of attention with 3 each, one of which is large, 3 dense MLPs with 2 large ones, and 58 mixtures with 2 of shared experts.
        ([], {"expected": 61 * 2, HIDDEN: 58 * 2, LARGE: 61 + 3 * 2}),
        (["--tp", "8"], {"expected": 61 * 3 + 61 * 2}),
        (["--quant", "group128"], {"expected": 61 * 2, LARGE: 61 + 3 * 2, HIDDEN: 58 * 2}),
        (["--tp", "8", "--quant", "group128"], {"expected": 61 * 3 + 3 * 2, "ops of its own (vllm::moe_forward_shared)": 58 * 2}),
        (["--quant", "per_token"], {"it quantises with one scale per token, which group_quant_linear does not": 305}),
        (["--quant", "linear=per_token"], {"it quantises with one scale per token, which group_quant_linear does not": 305}),
        (["--enforce-eager"], {"at module level there is a place for it behind a chain": 61 * 2, LARGE: 61 + 3 * 2, HIDDEN: 58 * 2}),
        (["--target", "sm100"], {"its kernel was timed on sm90 alone, so that it may be slower than the engine's elsewhere": 61 * 2 + 58 * 2, LARGE: 61 + 3 * 2}),
    ],
)  # fmt: skip
def test_a_plan_lists_each_linear_and_says_why_it_is_left(run, asked, says):
    answer = run("plan", "deepseek-v3", "--engine", "vllm", "--target", "sm90", "--json", *asked)
    found = Counter()
    for kind in json.loads(answer.out)["kinds"]:
        for row in kind["sites"].get("linear", ()):
            if row["fusion"] == LINEARS and not row["tokens"].startswith("from"):
                assert row["tokens"] == ("up to 16 tokens" if row["decision"] == "expected" else "any number of tokens")
                words = [each for each in says if each in row["reason"]]
                found["expected" if row["decision"] == "expected" else (words or [row["reason"]])[0]] += row["sites"]
    assert found == says


@pytest.mark.parametrize(
    ("fusions", "reason"),
    [
        ("none", "it goes with fusions that quantise in the same way, and none is on here"),
        ("add_rms_norm_group_quant", "switched off by LAYERFUSE_FUSIONS=add_rms_norm_group_quant"),
        ("-few_token_linear_group_quant", "switched off by LAYERFUSE_FUSIONS=-few_token_linear_group_quant"),
    ],
)
def test_products_go_with_quantised_fusions_unless_they_are_switched(run, monkeypatch, fusions, reason):
    monkeypatch.setenv("LAYERFUSE_FUSIONS", fusions)
    decision, why = decisions(run, "deepseek-v3", "--target", "sm90")["linear", LINEARS]
    assert decision == "refused"
    assert why.endswith(reason)


def test_linears_of_16_bits_are_asked_for_by_name_alone(run, monkeypatch):
    monkeypatch.setenv("LAYERFUSE_FUSIONS", "all")
    assert decisions(run, "deepseek-v3", "--target", "sm90")["linear", LINEARS][0] == "expected"
    assert decisions(run, "qwen3-8b", "--target", "sm90")["linear", "few_token_linear"][0] == "refused"


@pytest.mark.parametrize(
    ("model", "tp", "measured"),
    [
        ("qwen3-32b-fp8", 4, "Qwen3-32B-FP8, a rank of four"),
        ("deepseek-v3", 8, "DeepSeek-V3 in fp8, a rank of eight, dense layers"),
    ],
)
def test_the_measurement_of_a_like_model_is_the_one_that_is_said(run, model, tp, measured):
    found = decisions(run, model, "--tp", str(tp), "--target", "sm90")
    assert f"({measured}, FlashInfer linears, vLLM 0.33.0" in found["post_attention", GROUP][1]


def test_linears_in_blocks_quantise_as_in_vllm_as_it_is_installed(run, monkeypatch):
    """On Hopper in 0.33: what was measured beside FlashInfer counts, and vLLM's switch takes that back."""
    asked = ["deepseek-v3", "--target", "sm90"]
    decision, reason = decisions(run, *asked)["post_attention", GROUP]
    assert decision == "expected"
    assert "powers of two inside of the product; measured" in reason
    assert "FlashInfer linears" in reason
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM_E8M0", "0")
    assert "TMA-aligned inside of the product" in decisions(run, *asked)["post_attention", GROUP][1]
    monkeypatch.setenv(BLOCKS_INSIDE, "0")
    decision, reason = decisions(run, *asked)["post_attention", GROUP]
    assert decision == "expected"
    assert "inside" not in reason
    notes = json.loads(run("plan", *asked, "--engine", "vllm", "--json").out)["notes"]
    assert not [note for note in notes if "FlashInfer" in note and not note.startswith("mla_decode")]


@pytest.mark.parametrize(("switch", "linears"), [(BLOCKS_INSIDE, "DeepGEMM"), (DEEP_GEMM, "CUTLASS")])
def test_figures_are_of_the_linears_that_vllms_switches_leave(run, monkeypatch, switch, linears):
    asked = ["deepseek-v3", "--target", "sm90", "--tp", "8"]
    monkeypatch.setenv(switch, "0")
    found = decisions(run, *asked)
    release = {"DeepGEMM": "0.33.0", "CUTLASS": "0.26.0"}[linears]
    for role, name in (("post_attention", GROUP), ("activation", "silu_mul_group_quant")):
        decision, reason = found[role, name]
        assert decision == "expected" and f", {linears} linears, vLLM {release}" in reason
    decision, reason = found["decode", "mla_decode"]
    assert decision == "expected" and f"; measured with other linears, as none was with {linears}'s: 1.11, " in reason
    notes = json.loads(run("plan", *asked, "--engine", "vllm", "--json").out)["notes"]
    assert not [note for note in notes if "Where FlashInfer is installed" in note]
    others = [note for note in notes if note.endswith(" were measured with vLLM 0.26.0; this is 0.33.")]
    assert len(others) == (linears == "CUTLASS") and not [note for note in others if "mla_decode" in note]
    assert [note for note in notes if note.startswith(f"{switch} is off: {linears} multiplies in 305 linears")]
    # Models without such linears are the same with it.
    plain = ["kimi-k2.5", "--target", "sm90", "--tp", "8"]
    with_it = decisions(run, *plain)
    assert switch not in run("plan", *plain, "--engine", "vllm").out
    monkeypatch.delenv(switch)
    assert decisions(run, *plain) == with_it


@pytest.mark.parametrize(
    ("release", "note"),
    [
        *[(same, None) for same in ("0.33", "v0.33", "0.33.0", " v0.33.0 ")],
        *[
            (other, f"Planned as vLLM 0.33, by which layerfuse records it; {other.lstrip('v')} may")
            for other in ("0.33.1", "v0.33.2rc1", "0.33.0+cu130")
        ],
    ],
)
def test_a_release_is_known_by_its_first_two_numbers(run, release, note):
    asked = ["plan", "qwen3-8b", "--target", "sm90", "--engine", "vllm", "--json"]
    told, plain = (json.loads(run(*asked, *more).out) for more in (("--engine-version", release), ()))
    said = [each for each in told.pop("notes") if each not in plain["notes"]]
    assert [each[: len(note)] for each in said] == [note] if note else said == []
    assert told == {key: value for key, value in plain.items() if key != "notes"}


@pytest.mark.parametrize(
    ("release", "says"),
    [
        ("0.34", "nothing is recorded of vLLM 0.34; known: 0.26, 0.33"),
        ("v0.11.2", "nothing is recorded of vLLM 0.11; known: 0.26, 0.33"),
        ("", "expected a release of vLLM, as 0.33 or 0.33.1, got ''; known: 0.26, 0.33"),
        ("33", "expected a release of vLLM, as 0.33 or 0.33.1, got '33'; known: 0.26, 0.33"),
        ("0.33x", "expected a release of vLLM, as 0.33 or 0.33.1, got '0.33x'; known: 0.26, 0.33"),
    ],
)
def test_what_is_no_known_release_is_refused(run, release, says):
    answer = run("plan", "qwen3-8b", "--target", "sm90", "--engine", "vllm", "--engine-version", release)
    assert (answer.code, answer.err) == (2, f"layerfuse: {says}\n")


def test_what_stands_in_two_engines_alone_is_said_to(run, monkeypatch):
    """However it is asked for without them."""
    option = run("plan", "deepseek-v3", "--fusions", "mla_decode")
    assert option.code == 2
    assert "LAYERFUSE_FUSIONS=mla_decode layerfuse plan" in option.err
    monkeypatch.setenv("LAYERFUSE_FUSIONS", "add_rms_norm,mla_decode")
    assert ALONE in " ".join(run("plan", "deepseek-v3").out.split())
    for engine in ("vllm", "sglang"):
        assert ALONE not in " ".join(run("plan", "deepseek-v3", "--engine", engine, "--target", "sm90").out.split())


ROWS, PLAIN = "few_token_linear_row_quant", "few_token_linear"


def row_of(name, *asked):
    """The answers of a fusion's row, as sites by answer, and the reasons of each."""
    named, tp, *quant = asked
    entry = registry.model(named)
    data = plan_data(
        entry,
        tp=tp,
        rank=0,
        target="sm90",
        engine="vllm",
        config=config_for(quant),
        published=bool(entry.quant) and not quant,
    )
    (row,) = [each for each in data["fusions"] if each["fusion"] == name]
    return {answer: (row[answer][0], " ".join(row[answer][1])) for answer in row if answer != "fusion"}


def test_weights_so_large_that_another_product_is_as_fast_are_a_no(monkeypatch):
    """Of Llama-3.3-70B at TP 4 gate and up are 14336 x 8192 and down 8192 x 7168; query, key and value 2560 x 8192."""
    monkeypatch.setenv("LAYERFUSE_FUSIONS", f"+{ROWS}")
    found = row_of(ROWS, "llama-3.3-70b", 4, "per_token")
    assert {answer: sites for answer, (sites, _) in found.items()} == {"yes": 160, "no": 160}
    assert "its weight is 14336 x 8192" in found["no"][1] and "its weight is 8192 x 7168" in found["no"][1]
    assert "up to 16 tokens" in found["yes"][1] and "from 17 tokens" in found["yes"][1]
    # Beside delta nets an attention may have a gate, and no spec says so.
    found = row_of(ROWS, "qwen3.5-27b", 1, "per_token")
    assert "not known: how large its weight is" in found["depends"][1] and found["depends"][0] == 16


@pytest.mark.parametrize(
    ("fusions", "asked", "expected"),
    [
        ("", ("llama-3.3-70b", 1, "none"), {"off": (320, "a decode step took longer")}),
        ("", ("llama-3.3-70b", 1), {"off": (320, "a decode step took longer")}),
        ("", ("kimi-k2.5", 8), {"off": (185, "a decode step took longer"), "no": (120, "experts")}),
        ("", ("kimi-linear", 1), {"no": (115, "at module level")}),
        (f"+{PLAIN}", ("kimi-linear", 1), {"no": (115, "at module level")}),
        (
            f"+{PLAIN}",
            ("llama-3.3-70b", 1),
            {
                "depends": (
                    320,
                    "not known: how the linear holds its weight; few_token_linear reads bfloat16 or float16",
                )
            },
        ),
        (f"+{PLAIN}", ("llama-3.3-70b", 1, "none"), {"yes": (320, "up to 16 tokens")}),
        (f"+{PLAIN}", ("kimi-k2.5", 8), {"yes": (185, "up to 16 tokens"), "no": (120, "experts")}),
    ],
)
def test_linears_of_16_bits_are_off_unless_named(monkeypatch, fusions, asked, expected):
    monkeypatch.setenv("LAYERFUSE_FUSIONS", fusions)
    found = row_of(PLAIN, *asked)
    assert {answer: sites for answer, (sites, _) in found.items()} == {answer: n for answer, (n, _) in expected.items()}
    assert all(why in found[answer][1] for answer, (_, why) in expected.items())


def test_linears_of_fewer_bits_are_none_of_those(monkeypatch):
    """The checkpoint of an entry whose linears are in int4, and take what they read as it is."""
    kind = QuantKind(
        linears=[*EVERY], weight="int4", scheme="group", block=[1, 128], activation="none", source="a test"
    )
    entry = attrs.evolve(registry.model("llama-3.3-70b"), quant={"packed": kind})
    monkeypatch.setenv("LAYERFUSE_FUSIONS", f"+{PLAIN}")
    data = plan_data(entry, tp=1, rank=0, target="sm90", engine="vllm", config=config_for(()), published=True)
    rows = {row["fusion"]: row for row in data["fusions"]}
    sites, (reason,) = rows["any at linear"]["no"]
    assert PLAIN not in rows and sites == 320 and reason.startswith("their weights are int4")


def test_what_is_not_known_is_one_word_in_both_tables(run, monkeypatch):
    monkeypatch.setenv("LAYERFUSE_FUSIONS", f"+{PLAIN}")
    out = run("plan", "qwen3-4b", "--engine", "vllm", "--target", "sm90", "-v").out
    assert re.search(rf"^{PLAIN} +144 +144 \[(\d)\]$", out, re.MULTILINE)
    assert re.search(rf"linear: {PLAIN} +depends \[", out) and re.search(r"activation: any fusion +depends \[", out)
    assert "--quant none plans for 16 bits" in out


def test_linears_said_not_to_quantise_are_a_no_to_every_quantised_form(run):
    out = run("plan", "llama-3.3-70b", "--engine", "vllm", "--target", "sm90", "--quant", "none", "-v").out
    assert "not known" not in out and "depends [" not in out
    assert "the linears that read the activation site do not quantise what they read" in out
    # Of the roles that are not named, the published checkpoint says it.
    latents = run("plan", "deepseek-v3", "--target", "sm90", "--quant", "latents=none").out
    assert "the linears that read the latents site do not quantise" not in latents
    latents = json.loads(run("plan", "deepseek-v3", "--target", "sm90", "--quant", "latents=none", "--json").out)
    reasons = {
        row["reason"]
        for kind in latents["kinds"]
        for row in kind["sites"].get("latents", ())
        if "quant" in row["fusion"]
    }
    assert reasons == {"the linears that read the latents site do not quantise what they read, as was said"}


def test_what_was_measured_of_fp8_linears_with_scales_of_tokens_is_said(run):
    reason = decisions(run, "llama-3.3-70b", "--tp", "4", "--target", "sm90", "--quant", "per_token")["linear", ROWS][1]
    assert (
        "0.991, 0.991, 0.999 and 1.002 times faster per decode step at batch 1, 8, 64 and 256, beside what is on by default"
        in reason
    )


@pytest.mark.parametrize(
    ("fusions", "on"),
    [("", True), ("-few_token_linear_group_quant", False), ("add_rms_norm_group_quant", False), ("none", False)],
)
def test_routed_experts_are_left_where_their_linears_are(run, monkeypatch, fusions, on):
    monkeypatch.setenv("LAYERFUSE_FUSIONS", fusions)
    out = run("plan", "deepseek-v3", "--tp", 8, "--target", "sm90", "--engine", "vllm", "--json").out
    rows = [row for kind in json.loads(out)["kinds"] for row in kind["sites"].get("experts", ())]
    expected = sum(row["sites"] for row in rows if row["decision"] == "expected")
    assert expected == (58 if on else 0) and {row["fusion"] for row in rows} == {"few_token_experts_group_quant"}


def test_what_is_asked_for_by_name_and_has_no_site_is_said(run, monkeypatch):
    def said(*asked):
        return " ".join(run("plan", *asked, "--engine", "vllm", "--target", "sm90").out.split())

    monkeypatch.setenv("LAYERFUSE_FUSIONS", "+mla_decode,+mla_dual_rms_norm,+add_rms_norm")
    out = said("gpt-oss-20b")
    assert ALONE in out
    assert "mla_dual_rms_norm is asked for, and has no site in this model: none of its layers has such a chain." in out
    assert "add_rms_norm is asked for" not in out and "is asked for" not in said("deepseek-v3", "--tp", "8")
    monkeypatch.setenv("LAYERFUSE_FUSIONS", f"+{PLAIN}")
    why = f"it quantises with one scale per token, which {PLAIN} does not"
    assert f"{PLAIN} is asked for, and has no site in this model: {why}." in said(
        "llama-3.3-70b", "--quant", "per_token"
    )


def test_a_name_that_is_nearly_mla_decode_is_told(run, monkeypatch):
    monkeypatch.setenv("LAYERFUSE_FUSIONS", "+mla_deocde")
    answer = run("plan", "deepseek-v3", "--engine", "vllm", "--target", "sm90")
    assert answer.code == 2 and answer.err.endswith("no fusion is called 'mla_deocde'; did you mean 'mla_decode'?\n")


def test_a_measurement_of_several_fusions_is_one_footnote(run):
    said = " ".join(run("plan", "deepseek-v3", "--tp", 8, "--target", "sm90", "--engine", "vllm").out.split())
    notes = re.split(r"\[\d+\] (?=[^\[\]]{12})", said)[1:]
    measured = [note for note in notes if "silu_mul_group_quant together" in note]
    assert measured and all(re.match(r"\d+ sites: measured ", note) for note in measured)
    assert len(measured) == len(set(measured)) <= 2  # of this model, and of its other kind of layers


def test_a_measurement_of_linears_that_quantise_nothing_is_told_of_such_layers(run):
    """Kimi-K2.5's attention is bfloat16: its mixtures are told what Kimi-K2.5's gained, and not DeepSeek-V3's in fp8."""
    said = " ".join(run("plan", "kimi-k2.5", "--target", "sm90", "--engine", "vllm").out.split())
    assert "measured 1.04, 1.03, 1.02 and 1.01 times faster" in said and "(Kimi-K2.5, a rank of eight, mixtures" in said
