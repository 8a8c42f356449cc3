"""What `layerfuse plan --engine vllm` says beforehand, without vLLM: what vLLM fuses itself, where, and what takes its place."""

import json

import pytest

from layerfuse import registry
from layerfuse.adapters import ActivationQuant
from layerfuse.engines.vllm.own import Place, by_passes
from layerfuse.fusion import FUSIONS, Engine, FusionConfig, Target, plan


def decisions(run, *arguments):
    """(role, fusion) -> decision and reason, where there is one for all layers of the first kind that has it."""
    data = json.loads(run("plan", *arguments, "--engine", "vllm", "--json").out)
    rows = [(role, d) for kind in data["kinds"] for role, several in kind["sites"].items() for d in several]
    return {(role, d["fusion"]): (d["decision"], d["reason"]) for role, d in reversed(rows)}


ADD, GROUP, DUAL = "add_rms_norm", "add_rms_norm_group_quant", "mla_dual_rms_norm"
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
            "its pass AllReduceFusionPass (fuse_allreduce_rms)" + NAMED,
        ),
        # The code of a model that is not compiled, which nothing takes from it.
        (["deepseek-v3.2", "--target", "sm90"], "latents", DUAL, "fused_norm_rope in the code of the model"),
        (
            ["glm-5", "--target", "sm90", "--tp", 8],
            "post_attention",
            ADD,
            "fused_allreduce_rms_norm in the code of the model",
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
    figure = FUSIONS[fusion].off_in.get("vllm", "") if "its pass" in does else ""
    assert (kind, reason) == ("not_applicable", f"vLLM does it: {does}{figure and '; '}{figure}")
    assert f"vLLM does it: {does}"[:60] in run("plan", *arguments, "--engine", "vllm").out


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
    assert (eager["post_attention", ADD][0], eager["latents", DUAL][0]) == ("expected", "expected")
    assert eager["post_attention", GROUP] == (
        "refused",
        "enforce_eager is set: vLLM compiles nothing; at module level there is no place for it",
    )
    assert decisions(run, "kimi-k3", "--target", "sm90")["post_attention", ADD][0] == "not_applicable"
    # 0.26 has no switch for both latent norms.
    older = decisions(run, "deepseek-v3", "--target", "sm90", "--enforce-eager", "--engine-version", "0.26")
    assert (older["post_attention", ADD][0], older["latents", DUAL][0]) == ("expected", "refused")


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


def test_what_vllms_mla_layers_take_at_module_level_is_said(run, monkeypatch):
    def last(model):
        return run("plan", model, "--engine", "vllm").out.splitlines()[-1]

    off = "mla_decode at 61 MLA layers: off in vllm unless switched on: measured 1.06 to 1.12 times faster per decode step with 16 heads, 1.02 to 1.06 with 128; steps of more prompt tokens than CUDA graphs hold keep the host about 0.1 ms longer per layer (vLLM 0.26, H200)."
    assert " ".join(run("plan", "kimi-k2.5", "--engine", "vllm").out.split()).endswith(off)
    monkeypatch.setenv("LAYERFUSE_FUSIONS", "mla_decode,add_rms_norm")
    on = "mla_decode at 61 MLA layers: both norms, the ropes and the cache write of a decode step are two launches or three, in vLLM's "
    assert last("kimi-k2.5") == f"{on}MultiHeadLatentAttentionWrapper."
    assert last("deepseek-v2-lite").endswith("not possible: q_lora_rank is None: there is no query latent.")
    assert "add_rms_norm" in run("plan", "kimi-k2.5", "--engine", "vllm").out
    assert not any(
        line.startswith("mla_decode") for line in run("plan", "gpt-oss-20b", "--engine", "vllm").out.splitlines()
    )
    for variable, why in (
        ("VLLM_USE_BREAKABLE_CUDAGRAPH", "vLLM captures its CUDA graphs in pieces"),
        ("VLLM_BATCH_INVARIANT", "VLLM_BATCH_INVARIANT is set: "),
    ):
        monkeypatch.setenv(variable, "1")
        assert last("kimi-k2.5").startswith(f"mla_decode at 61 MLA layers: not done: {why}")
        monkeypatch.delenv(variable)
    assert "vLLM's code of this model is not known to hold" in last("minicpm3-4b")
    assert last("deepseek-v3.2").endswith("not possible: its attention is sparse.")
    quantised = run("plan", "kimi-k2.5", "--engine", "vllm", "--quant", "group128").out
    assert "mla_decode at 61 MLA layers: not possible: the projection behind its query norm quantises with" in quantised
    refused = run("plan", "kimi-k2.5", "--engine", "sglang")
    assert refused.code == 2 and "no fusion is called 'mla_decode'" in refused.err


def test_what_mla_decode_takes_no_fusion_of_graphs_does(run, monkeypatch):
    monkeypatch.setenv("LAYERFUSE_FUSIONS", "mla_decode,mla_dual_rms_norm")
    found = decisions(run, "kimi-k2.5", "--target", "sm90")
    assert found["latents", DUAL] == ("not_applicable", "mla_decode takes what stands there")
    # Where it cannot stand, they are fused.
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    assert decisions(run, "kimi-k2.5", "--target", "sm90")["latents", DUAL][0] == "expected"


def test_shared_experts_are_in_no_graph_of_vllms(run):
    asked = ["plan", "deepseek-v3", "--engine", "vllm", "--target", "sm90", "--quant", "group128"]
    said = run(*asked).out
    assert "58 layers have experts behind one op of vLLM's" in said
    assert "silu_mul_group_quant" not in said[said.index("shared") :].split("\n\n")[0]
    assert "have experts behind" not in run(*asked[:-2]).out
    assert "have experts behind" not in run("plan", "deepseek-v3", "--quant", "group128").out
