import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from helpers import ROOT

from layerfuse import registry
from layerfuse.cli import planning
from layerfuse.engines.transformers_facts import KEPT
from layerfuse.fusion import FUSIONS
from layerfuse.fusion.sites import ROLES
from layerfuse.registry.toml import written

KIMI_CONFIG = Path(__file__).parent.parent / "engines" / "checkpoints" / "kimi-k2.5" / "config.json"

KIMI, LAYERS = (
    (ROOT / "tests" / "data" / f"plan_kimi_k25{part}.txt").read_text(encoding="utf-8") for part in ("", "_layers")
)


def said(answer):
    """Words only: footnotes are wrapped."""
    return " ".join(answer.out.split())


def test_the_whole_answer_for_kimi_k25(run):
    answer = run("plan", "kimi-k2.5", "--tp", 8)
    assert answer.code == 0
    assert answer.out == KIMI
    assert answer.err == ""
    assert run("plan", "kimi-k2.5", "--tp", 8, "-v").out == KIMI + LAYERS


def test_what_one_gets_is_in_the_first_twelve_lines_and_each_reason_once(run):
    asked = ["deepseek-v3", "--tp", 8, "--target", "sm90", "--engine", "vllm", "--quant", "none"]
    head, notes = re.split(r"\n\n +\[1\] ", run("plan", *asked).out)
    assert len(head.splitlines()) <= 12
    assert notes.count("unless switched on. vLLM's compiler merges the add") == 1
    assert notes.count("do not quantise what they read, as was said") == 2, "of two sites"
    assert all(len(line) <= 100 for line in notes.splitlines())


def test_the_sites_of_a_row_are_those_of_the_json(run):
    """Ranges of tokens are of the same sites, so a site is counted once whatever the ranges are."""
    asked = ["plan", "kimi-k2.5", "--tp", 8, "--quant", "group128"]
    rows = re.findall(r"^(\w+) +(\d+)   (.*)$", run(*asked).out, re.MULTILINE)
    found = {name: int(sites) for name, sites, _ in rows}
    for name, sites, answers in rows:
        assert int(sites) == sum(map(int, re.findall(r"(\d+) \[", answers))), name
    wanted: dict[str, int] = {}
    for kind in json.loads(run(*asked, "--json").out)["kinds"]:
        for decisions in kind["sites"].values():
            for name in {d["fusion"] for d in decisions if d["decision"] != "not_applicable"}:
                of = [d for d in decisions if d["fusion"] == name]
                wanted[name] = wanted.get(name, 0) + sum(d["sites"] for d in of if not d["tokens"].startswith("from "))
    assert {name: found[name] for name in wanted} == wanted


def test_a_fusion_whose_answer_hangs_on_something_depends(run, silent_models):
    asked = ["--models", silent_models, "--target", "sm90", "--quant", "per_token"]
    out = run("plan", "silent-gpt-oss", *asked).out
    row = re.search(r"^add_rms_norm_per_token_quant +72 +35 \[(\d+)\] +1 \[\d+\] +36 \[(\d+)\]$", out, re.MULTILINE)
    assert row, out
    assert f"[{row[2]}] 36 sites: not known: the model's entry declares no MLP" in out


def test_a_hugging_face_id_is_a_name_too(run):
    assert run("plan", "moonshotai/Kimi-K2.5", "--tp", 8).out == KIMI


@pytest.mark.parametrize("name", ["k2.5", "K2.5"])
def test_a_short_name_is_a_name_too(run, name):
    assert run("plan", name, "--tp", 8).out == KIMI


def imported(run_python, *arguments, before="") -> list[str]:
    """Of what a plan can do without, the modules that it has imported."""
    code = (
        f"import sys\n{before}\n"
        "from layerfuse.cli import main\n"
        f"try: main({['plan', *arguments]!r})\n"
        "except SystemExit: pass\n"
        "print(*[m for m in ('torch', 'transformers', 'vllm', 'numpy', 'pydantic', 'layerfuse.engines', 'importlib.metadata') if m in sys.modules])"
    )
    return run_python("-c", code).out.splitlines()[-1].split()


def test_no_torch_and_no_engine_is_imported(run_python):
    assert imported(run_python, "kimi-k2.5", "--tp", "8") == []


@pytest.mark.parametrize(
    ("name", "may"),
    [("nvme0", False), *((name, True) for name in ("nvidia0", "nvgpu", "nvmap", "nvhost-gpu", "kfd", "dxg"))],
)
def test_where_there_may_be_a_gpu_its_driver_has_a_file(monkeypatch, name, may):
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("os.listdir", lambda _: ["null", name])
    assert planning._may_have_gpu() is may
    monkeypatch.setattr("sys.platform", "win32")
    assert planning._may_have_gpu()


@pytest.mark.parametrize(("files", "asked"), [(["null", "nvme0"], []), (["null", "nvidia0"], ["torch"])])
def test_torch_is_asked_for_the_gpu_where_there_may_be_one(run_python, files, asked):
    before = f"import os; sys.platform, os.listdir = 'linux', lambda _: {files!r}"
    got = imported(run_python, "kimi-k2.5", "--engine", "vllm", before=before)
    assert [name for name in got if name == "torch"] == asked
    assert "vllm" not in got


def test_each_kind_is_counted_once(run):
    out = run("plan", "kimi-linear-48b-a3b", "--tp", 8, "-v").out
    assert "kda: 20 layers (0-2, 4-6, 8-10, 12-14, 16-18, 20-22, 24-25)" in out
    assert "mla: 7 layers (3, 7, 11, 15, 19, 23, 26)" in out
    number = re.search(r"latents: any fusion +not applicable \[(\d)\]\n", out)[1]
    assert f"[{number}] 7 sites: q_lora_rank is None: there is no query latent norm" in out


def test_kv_heads_are_replicated_where_ranks_outnumber_them(run):
    out = run("plan", "qwen3-next-80b-a3b", "--tp", 8, "-v").out
    assert re.search(r"key/value heads +2 total, 1 local, each on 4 ranks", out)


def test_two_attentions_per_layer_are_counted_as_56(run):
    out = run("plan", "longcat-flash", "-v").out
    assert "mla: 56 layers (0-55)" in out
    assert re.search(r"input norm +2 x RMSNorm over 6144", out)
    assert "input: add_rms_norm           yes at 55 of 56 [" in out


def test_an_engine_s_own_epsilon(run):
    out = run("plan", "kimi-k2.5", "--engine", "transformers", "-v").out
    assert re.search(r"key/value norm +RMSNorm over 512, epsilon 1e-06", out)
    assert re.search(r"input norm +RMSNorm over 7168, epsilon 1e-05", out)


@pytest.mark.parametrize("engine", ["vllm", "VLLM"])
def test_an_engine_without_epsilons_of_its_own(run, engine):
    out = run("plan", "kimi-k2.5", "--tp", 8, "--target", "mi355x", "--engine", engine, "-v").out
    assert "\n\nvllm builds the norms with the published epsilons.\n" in out
    same = [line for line in LAYERS.splitlines() if "RMSNorm over" in line]
    assert [line for line in out.splitlines() if "RMSNorm over" in line] == same


def test_what_its_level_alone_leaves_off_is_said_with_the_variable_that_switches_it_on(run, monkeypatch):
    def notes(fusions):
        monkeypatch.setenv("LAYERFUSE_FUSIONS", fusions)
        data = json.loads(run("plan", "deepseek-v3", "--target", "gfx950", "--json").out)
        return [note for note in data["notes"] if note.startswith("LAYERFUSE_FUSIONS=")]

    (said,) = notes("")
    named = said.partition(" ")[0].removeprefix("LAYERFUSE_FUSIONS=")
    assert "+silu_mul_group_quant" in named and "LAYERFUSE_FUSIONS=all" in said
    assert notes(named) == notes("all") == notes("none") == []


def test_targets_and_engines_in_any_case(run):
    small = run("plan", "kimi-k2.5", "--target", "gfx942", "--engine", "transformers").out
    assert run("plan", "kimi-k2.5", "--target", "GFX942", "--engine", "Transformers").out == small


def test_heads_that_cannot_be_shared_are_refused_with_what_can_be_done(run):
    answer = run("plan", "glm-4.7-flash", "--tp", 8)
    assert answer.code == 1
    assert answer.out == ""
    assert answer.err == (
        "layerfuse: glm-4.7-flash cannot be sharded over 8 ranks: 20 heads cannot be shared equally by 8 ranks. "
        "Sizes up to 64 that work: 1, 2, 4.\n"
    )


def test_what_only_one_engine_cannot_build_is_refused_for_that_engine(run):
    answer = run("plan", "gpt-oss-20b", "--tp", 16, "--target", "h200", "--engine", "vllm")
    assert answer.code == 1
    assert answer.err.startswith(
        "layerfuse: gpt-oss-20b cannot be sharded over 16 ranks: vllm shares out the 8 KV heads"
    )
    assert answer.err.endswith("Sizes up to 64 that work: 1, 2, 4, 8.\n")
    assert run("plan", "gpt-oss-20b", "--tp", 16, "--engine", "sglang").code == 0
    assert "published epsilons" in run("plan", "gpt-oss-20b", "--tp", 8, "--target", "h200", "--engine", "vllm").out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["plan", "deepsek-v3"], 2, "no model is called 'deepsek-v3'; did you mean deepseek-v3"),
        (["plan", "kimi-k2.5", "--target", "gfx95"], 2, "no target is called 'gfx95'; did you mean 'gfx950'"),
        (["plan", "kimi-k2.5", "--engine", "vlm"], 2, "no engine is called 'vlm'; did you mean 'vllm'"),
        (["plan", "kimi-k2.5", "--engine", "foo"], 2, "known: transformers, vllm, sglang, atom"),
        (
            ["plan", "kimi-k2.5", "--quant", "per_tensor"],
            2,
            "expected per_token, group32|64|128 or a format's name, as static or mxfp8, then column_major",
        ),
        (
            ["plan", "kimi-k2.5", "--quant", "w8a8"],
            2,
            "none is of linears that quantise nothing; w8a8 in fp8 with a scale per token is per_token",
        ),
        (["plan", "kimi-k2.5", "--quant", "latents=fp8"], 2, "--quant latents=fp8: no format is called 'fp8'"),
        (
            ["plan", "kimi-k2.5", "--quant", "mxfp6"],
            2,
            "no format is called 'mxfp6'; did you mean 'mxfp8' or 'mxfp4'?",
        ),
        (
            ["plan", "kimi-k2.5", "--quant", "FP8"],
            2,
            "fp8 with a scale per token is per_token, in DeepSeek's blocks of 128 it is group128",
        ),
        (["plan", "kimi-k2.5", "--quant", "bf16"], 2, "linears of 16 bits are none"),
        (["plan", "kimi-k2.5", "--quant", "group100"], 2, "expected None or one of 32, 64, 128, got 100"),
        (["plan", "kimi-k2.5", "--tp", "0"], 2, "--tp"),
        (["plan", "kimi-k2.5", "--tp", "2", "--rank", "2"], 2, "ranks are 0 to 1 at --tp 2, got 2"),
        (["plan", "kimi-k2.5", "--json", "--svg", "x.svg"], 2, "give either --json or --svg"),
        (["plan"], 2, "give a model, or --all-tp for all of them"),
        (["plan", "kimi-k2.5", "--svg", "no/such/folder/plan.svg"], 1, "cannot be written: there is no folder"),
        (["plan", "kimi-k2.5", "--models", "no-such-file.toml"], 2, "does not exist"),
    ],
)
def test_wrong_questions_exit_with_2_and_no_traceback(run, arguments, code, said):
    answer = run(*arguments)
    assert answer.code == code
    assert said in answer.err
    assert "Traceback" not in answer.err


def test_the_traceback_on_request(run_python):
    answer = run_python("-m", "layerfuse", "plan", "glm-4.7-flash", "--tp", "8", env={"LAYERFUSE_TRACEBACK": "1"})
    assert answer.code == 1
    assert "Traceback" in answer.err


def test_the_json_holds_what_its_help_promises(run):
    data = json.loads(run("plan", "kimi-linear-48b-a3b", "--tp", 4, "--rank", 3, "--json").out)
    assert set(data) == {
        *("model", "hf_id", "adapter", "tp", "rank", "engine"),
        *("target", "config", "published", "num_hidden_layers", "notes", "kinds", "engine_does"),
    }
    kinds = ["residual", "kda", "dense", "shared_experts", "mla", "final", "experts"]
    assert [kind["kind"] for kind in data["kinds"]] == kinds
    for kind in data["kinds"]:
        assert set(kind) == {"kind", "family", "count", "layers", "spec", "sites"}
        assert kind["count"] == len(kind["layers"])
        for decisions in kind["sites"].values():
            for decision in decisions:
                assert set(decision) == {"fusion", "decision", "reason", "tokens", "sites"}
    mla = data["kinds"][kinds.index("mla")]
    assert mla["spec"]["num_heads"] == 32
    assert mla["spec"]["num_local_heads"] == 8
    assert mla["spec"]["q_norm"] is None
    assert mla["spec"]["derived"]["split_sizes"] == [512, 64]
    assert data["kinds"][1]["spec"]["output_norm"]["activation"] == "sigmoid"
    help_text = run("plan", "--help").out
    assert all(key in help_text for key in data)


def test_switching_a_fusion_off_shows_as_the_reason(run, monkeypatch):
    monkeypatch.setenv("LAYERFUSE_FUSIONS", "-mla_dual_rms_norm")
    out = run("plan", "deepseek-v3").out
    number = re.search(r"^mla_dual_rms_norm +61 +61 \[(\d)\]$", out, re.MULTILINE)[1]
    assert f"[{number}] 61 sites: mla_dual_rms_norm is switched off by LAYERFUSE_FUSIONS=-mla_dual_rms_norm\n" in out
    monkeypatch.setenv("LAYERFUSE_FUSIONS", "-mla_dual_rms")
    assert run("plan", "deepseek-v3").code == 2


@pytest.mark.parametrize("asked", [("deepseek-v3",), ("deepseek-v3", "--engine", "sglang"), ("kimi-k2.5", "--all-tp")])
def test_a_backend_that_does_not_exist_has_no_plan(run, run_python, monkeypatch, asked):
    monkeypatch.setenv("LAYERFUSE_BACKEND", "trition")
    said = "LAYERFUSE_BACKEND=trition: no op has a backend called 'trition'; did you mean 'triton'? Known: aiter, reference, symm_mem, triton."
    assert run("plan", *asked).code == 2
    alone = run_python("-m", "layerfuse", "plan", *asked)  # no torch, and so no op, was imported there
    assert (alone.code, alone.out, alone.err) == (2, "", f"layerfuse: {said}\n")
    for name in ("reference", "symm_mem", ""):
        monkeypatch.setenv("LAYERFUSE_BACKEND", name)
        assert run("plan", *asked).code == 0


ALL_BUT_FINAL = [role for role in ROLES if role not in ("final", "qk", "decode", "experts")]
"""What one quantisation for all is for, in a model whose experts are as published: a language-model head is rarely quantised."""
QUANTISED = """\
  softmax scale                           0.1446796
  latents: mla_dual_rms_norm_group_quant  yes [3]
  latents: mla_dual_rms_norm              fallback [16]
"""


def test_an_engine_that_quantises(run):
    answer = run("plan", "kimi-k2.5", "--tp", 8, "--quant", "group128", "-v")
    assert QUANTISED in answer.out
    latents = "rms_norm(1536, epsilon 1e-05) and rms_norm(512, epsilon 1e-05) are one launch on gfx950"
    assert f"[3] 61 sites: {latents}, the first in e4m3fn with one scale per 128 columns [" in said(answer)
    assert (
        "[16] 61 sites: mla_dual_rms_norm_group_quant takes the same nodes; this is taken where it is missed "
        in said(answer)
    )
    data = json.loads(run("plan", "kimi-k2.5", "--quant", "per_token,ue8m0", "--json").out)
    quant = {
        "group_size": None,
        "column_major": False,
        "use_ue8m0": True,
        "tma_aligned": False,
        "inside": False,
        "fixed": None,
        "swizzled": False,
    }
    assert data["config"]["quant"] == dict.fromkeys(ALL_BUT_FINAL, quant)
    decisions = {found["fusion"]: found["decision"] for found in data["kinds"][1]["sites"]["latents"]}
    assert decisions == {
        "mla_dual_rms_norm": "fallback",
        "mla_dual_rms_norm_per_token_quant": "expected",
        "mla_dual_rms_norm_group_quant": "not_applicable",
        "mla_dual_rms_norm_static_quant": "not_applicable",
    }


def test_linears_that_quantise_inside_of_their_op(run, monkeypatch):
    """As vLLM's do where FlashInfer is: only an engine that takes it out has such a site, by itself where that was measured faster."""
    asked = ["plan", "deepseek-v3", "--tp", 8, "--quant", "group128,tma_aligned,inside", "--target", "sm90"]
    data = json.loads(run(*asked, "--json").out)
    reasons = {
        each["reason"]
        for kind in data["kinds"]
        for each in kind["sites"].get("latents", ())
        if each["fusion"].endswith("group_quant")
    }
    assert reasons == {
        "the linears that read the latents site quantise inside of the op that multiplies, and nothing takes that out here"
    }

    def silu(*more):
        kinds = json.loads(run(*asked, *more, "--engine", "vllm", "--json").out)["kinds"]
        dense = next(kind for kind in kinds if kind["layers"] == [0, 1, 2])
        return {each["fusion"]: each for each in dense["sites"]["activation"]}["silu_mul_group_quant"]

    assert silu()["decision"] == "expected"
    assert "measured faster on sm90, where linears quantise inside of their op" in silu("--target", "sm100")["reason"]
    monkeypatch.setenv("LAYERFUSE_FUSIONS", "silu_mul_group_quant")
    assert silu("--target", "sm100")["decision"] == "expected"


@pytest.mark.parametrize("model", ["qwen3-32b-fp8", "deepseek-v3"])
def test_in_front_of_transformers_fp8_linears_nothing_quantises(run, monkeypatch, model):
    monkeypatch.setenv("LAYERFUSE_FUSIONS", "all")

    def decided(*asked):
        data = json.loads(run("plan", model, *asked, "--engine", "transformers", "--target", "h100", "--json").out)
        rows = [row for kind in data["kinds"] for several in kind["sites"].values() for row in several]
        return {(row["decision"], row["reason"]) for row in rows if row["fusion"] == "add_rms_norm_group_quant"}

    assert ("not_applicable", KEPT) in decided() and "expected" not in dict(decided())
    assert "expected" in dict(decided("--quant", "group128")), "of somebody else's linears"


def test_linears_of_transformers_models_have_a_place_by_the_engine_that_is_made_of_them(run, monkeypatch):
    monkeypatch.setenv("LAYERFUSE_FUSIONS", "+few_token_linear,+mla_decode")
    for engine in (["--engine", "transformers"], []):
        out = said(run("plan", "qwen3-8b", *engine, "--target", "h100"))
        assert "few_token_linear is asked for, and has no site in this model: there is a place for it in " in out
        assert "fusion.compile(model, engine=engines.transformers.engine_of(model))." in out
        assert "there is a place for it in MLA layers of vLLM and SGLang alone" in out


def test_every_scheme_can_be_asked_for(run):
    def shown(*quant):
        return said(run("plan", "kimi-k2.5", "--tp", 8, "-v", *(word for how in quant for word in ("--quant", how))))

    static = shown("activation=static")
    assert "activation: silu_mul_static_quant yes [" in static and ": silu(gate) * up of 2304 columns" in static
    assert re.search(r" in mxfp4 \[.*post_attention: add_rms_norm_mxfp4_quant yes \[", shown("post_attention=mxfp4"))
    aligned = shown("input=group128,tma_aligned")
    assert "input: rms_norm_group_quant yes at 1 of 61 [" in aligned and "column-major and TMA-aligned [" in aligned
    both = shown("group128", "input=mxfp8")
    assert "input: add_rms_norm_mxfp8_quant yes at 60 of 61 [" in both
    assert "input: add_rms_norm_group_quant" not in both


def test_an_engine_that_quantises_on_a_target_without_fp8(run):
    out = run("plan", "kimi-k2.5", "--target", "cpu", "--quant", "per_token", "-v").out
    number = re.search(r"latents: mla_dual_rms_norm_per_token_quant  no \[(\d)\]", out)[1]
    assert re.search(rf"\[{number}\] \d+ sites: cpu has no fp8 format", out)
    assert "latents: mla_dual_rms_norm                  yes [" in out


def test_a_quantisation_of_one_role(run):
    out = run("plan", "kimi-k2.5", "--quant", "latents=group128,ue8m0", "-v").out
    assert "latents: mla_dual_rms_norm_group_quant  yes" in out
    data = json.loads(
        run("plan", "kimi-k2.5", "--quant", "latents=group128", "--quant", "input=per_token", "--json").out
    )
    assert {role: found["group_size"] for role, found in data["config"]["quant"].items()} == {
        "latents": 128,
        "input": None,
    }
    both = ["--quant", "latents=group64", "--quant", "per_token"]
    data = json.loads(run("plan", "kimi-k2.5", *both, "--json").out)
    sizes = {role: found["group_size"] for role, found in data["config"]["quant"].items()}
    assert sizes == {**dict.fromkeys(ALL_BUT_FINAL), "latents": 64}
    answer = run("plan", "kimi-k2.5", "--quant", "latent=group128")
    assert answer.code == 2
    assert "no role is called 'latent'; did you mean 'latents'" in answer.err


@pytest.mark.parametrize(
    ("quant", "says"),
    [
        (
            ["none", "group128"],
            "--quant none and --quant group128 are both of all roles: give one of them, and others as ROLE=HOW",
        ),
        (["per_token", "latents=none", "group128"], "--quant per_token and --quant group128 are both of all roles"),
        (["latents="], "--quant latents=: expected how, as --quant latents=group128, or --quant latents=none"),
        ([""], "--quant '': expected how, as --quant group128, or --quant none"),
        (
            ["qk="],
            "no role is called 'qk'. Known: input, post_attention, final, latents, output, activation, linear, experts.",
        ),
        (["=none"], "no role is called ''. Known: input"),
    ],
)
def test_quantisations_that_say_nothing_or_too_much_are_refused(run, quant, says):
    answer = run("plan", "kimi-k2.5", *(word for how in quant for word in ("--quant", how)))
    assert (answer.code, answer.out) == (2, "")
    assert says in answer.err


def test_none_is_said_of_all_roles_beside_others_of_some(run):
    def said(*quant):
        data = json.loads(
            run("plan", "deepseek-v3", *(word for how in quant for word in ("--quant", how)), "--json").out
        )
        return data["published"], data["config"]["quant"]

    published, quant = said("none", "latents=group128")
    assert published == []
    assert {role: found["group_size"] for role, found in quant.items() if found} == {"latents": 128}
    assert said("none", "none") == said("none") == ([], dict.fromkeys([*ALL_BUT_FINAL, "final", "experts"]))


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("path", ["nothing", "folder", "nothing/config.json", "nothing.json"])
def test_a_path_that_leads_to_no_config_is_refused_as_one(run, tmp_path, monkeypatch, path, there):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    name = str(tmp_path / path) if there or path == "nothing" else path
    answer = run("plan", name)
    assert (answer.code, answer.out) == (2, "")
    where = "in" if path == "folder" else "at"
    assert answer.err.startswith(
        f"layerfuse: there is no config.json {where} '{name}': expected the path of a config.json or of the folder"
    )


def test_a_config_may_be_called_otherwise(run, tmp_path):
    config = json.loads((KIMI_CONFIG.parents[1] / "deepseek-v3" / "config.json").read_text())
    (tmp_path / "mine.json").write_text(json.dumps(config))
    assert run("plan", tmp_path / "mine.json").out.startswith("deepseek-v3 (deepseek-ai/DeepSeek-V3")


@pytest.mark.parametrize("width", [40, 60, 100])
def test_the_line_that_switches_on_breaks_behind_commas_alone(run, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    out = run("plan", "deepseek-v3", "--target", "sm90").out
    names = out.split("LAYERFUSE_FUSIONS=", 1)[1].split(" switches", 1)[0]
    assert "\n" in names and all(line.startswith("+") for line in names.split("\n"))
    assert {each[1:] for each in names.replace("\n", "").split(",")} <= set(FUSIONS)
    assert all(len(line) <= width for line in names.split("\n"))


@pytest.mark.parametrize(
    ("asked", "engine"),
    [
        ([], ""),
        (["--engine", "vllm"], ", engine vllm 0.33"),
        (["--engine", "vllm", "--engine-version", "0.26"], ", engine vllm 0.26"),
        (["--engine", "sglang"], ", engine sglang 0.5.23"),
        (["--engine", "transformers"], ", engine transformers"),
    ],
)
def test_the_head_names_the_engine_and_its_release(run, asked, engine):
    head = run("plan", "kimi-k2.5", "--target", "sm90", *asked).out.split("\n")[1]
    assert head == f"rank 0 of 1, 61 decoder layers, target sm90 (nvidia, fp8 e4m3fn){engine}"


def test_an_engine_says_what_is_off_there_and_why(run):
    out = said(run("plan", "kimi-k2.5", "--target", "gfx950", "--engine", "vllm"))
    assert "] 61 sites: off in vllm unless switched on. vLLM's compiler merges the two plain norms" in out
    assert "sites: off in vllm unless switched on. vLLM's compiler merges the add into the norm by itself" in out


def test_what_vllm_does_not_compile_is_refused_beforehand_with_the_reason(run):
    asked = ["plan", "kimi-linear-48b-a3b", "--engine", "vllm", "--target", "sm90"]
    why = "runs KimiLinearForCausalLM in breakable CUDA graphs by default, and does not compile it"
    where = "fused ops can stand in its modules only"
    assert f" vLLM 0.33 {why}: {where}" in said(run(*asked))
    assert f"vLLM 0.33 {why}" in said(run(*asked, "--engine-version", "0.33.0"))
    for other in (["--engine-version", "0.26"], ["--target", "gfx950"]):
        assert "breakable" not in said(run(*asked, *other)) and where not in said(run(*asked, *other))
    assert f"enforce_eager is set: vLLM compiles nothing: {where}" in said(run(*asked, "--enforce-eager"))
    refused = "off in vllm unless switched on. It was not benchmarked in vllm where that compiles nothing"
    assert refused in said(run(*asked, "--enforce-eager", "--quant", "per_token"))


def test_releases_and_options_of_vllm_that_are_unknown_or_of_no_use(run):
    answer = run("plan", "kimi-k2.5", "--target", "gfx950", "--engine", "vllm", "--engine-version", "0.11")
    assert answer.code == 2 and "nothing is recorded of vLLM 0.11; known: 0.26, 0.33" in answer.err
    answer = run("plan", "kimi-k2.5", "--enforce-eager")
    assert answer.code == 2 and "go with --engine vllm" in answer.err


def test_the_environment_still_counts_where_the_engine_quantises(run, monkeypatch):
    monkeypatch.setenv("LAYERFUSE_FUSIONS", "none")
    asked = ("plan", "kimi-k2.5", "--quant", "per_token", "-v")
    said_of_levels = (
        "mla_dual_rms_norm_per_token_quant needs optimisation level 2, and LAYERFUSE_FUSIONS=none sets level 0"
    )
    assert said_of_levels in said(run(*asked))
    monkeypatch.setenv("LAYERFUSE_FUSIONS", "mla_dual_rms_norm")
    out = said(run(*asked))
    assert "] 61 sites: mla_dual_rms_norm_per_token_quant is switched off by LAYERFUSE_FUSIONS=mla_dual_rms_norm" in out
    assert "latents: mla_dual_rms_norm yes [" in out


def test_the_picture_is_svg_and_always_the_same(run, tmp_path):
    file = tmp_path / "plan.svg"
    assert run("plan", "kimi-k2.5", "--tp", 8, "--svg", file).out == f"wrote {file}\n"
    first = file.read_text(encoding="utf-8")
    assert ElementTree.fromstring(first).tag.endswith("svg")
    assert "1536" in first
    run("plan", "kimi-k2.5", "--tp", 8, "--svg", file)
    assert file.read_text(encoding="utf-8") == first


def test_a_pipe_gets_no_escape_codes_and_footnotes_of_100_columns(run_python):
    answer = run_python("-m", "layerfuse", "plan", "kimi-k2.5", "--tp", "8")
    assert answer.out == KIMI


def test_no_color_and_narrow_terminals(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    out = run("plan", "kimi-k2.5", "--tp", 8, "-v").out
    assert "\x1b[1m" in out  # bold is no colour
    assert not re.search("\x1b\\[[0-9;]*3[0-9]m", out)
    assert max(len(line) for line in re.sub("\x1b\\[[0-9;]*m", "", out).splitlines()) <= 60


def test_every_declared_model_can_be_planned(run):
    for name in registry.models():
        assert run("plan", name).code == 0


def test_models_of_a_file_are_known(run, tmp_path):
    entry = json.loads(run("inspect", "--json", "--name", "mine", str(KIMI_CONFIG)).out)["entry"]
    file = tmp_path / "mine.toml"
    file.write_text(written(entry), encoding="utf-8")
    assert "mla: 61 layers" in run("plan", "mine", "--models", file, "-v").out
    assert "mine" in run("models", "--models", file).out


# ---- terminals, numbers, files


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_terminal_without_arrows_gets_others(run_python, encoding):
    answer = run_python("-m", "layerfuse", "plan", "kimi-k2.5", "--all-tp", env={"PYTHONIOENCODING": encoding})
    assert (answer.code, answer.err) == (0, "")
    assert "heads of a rank -> heads of the kernel" in answer.out
    assert "4->16 75%" in answer.out


def test_a_name_that_a_terminal_cannot_show_is_no_error(run_python, tmp_path):
    file = tmp_path / "\u4e2d.toml"
    file.write_text("", encoding="utf-8")
    answer = run_python("-m", "layerfuse", "check", str(file), env={"PYTHONIOENCODING": "ascii"})
    assert (answer.code, answer.err) == (1, "")
    assert r"\u4e2d.toml: declares no models" in answer.out


@pytest.mark.parametrize("option", ["--batch", "--queries", "--context"])
def test_a_count_beyond_every_kernel_is_a_usage_error(run, option):
    answer = run("plan", "deepseek-v3", option, "99999999999999999999")
    assert answer.code == 2
    assert f"Invalid value for '{option}'" in answer.err


def test_an_empty_release_is_named(run):
    answer = run("plan", "deepseek-v3", "--aiter", "")
    assert answer.code == 2
    assert "--aiter: expected a release, as v0.1.18, got an empty text" in answer.err


def test_all_sizes_take_no_rank(run):
    answer = run("plan", "--all-tp", "--rank", "1")
    assert answer.code == 2
    assert "--all-tp shows every size" in answer.err
    assert "ranks are" not in answer.err


@pytest.mark.parametrize("arguments", [["deepseek-v3"], ["--all-tp"]])
def test_a_picture_in_no_folder_is_refused_before_any_work(run, tmp_path, arguments):
    answer = run("plan", *arguments, "--svg", tmp_path / "nowhere" / "plan.svg")
    assert answer.code == 1
    assert f"cannot be written: there is no folder {tmp_path / 'nowhere'}" in answer.err


def test_the_table_that_the_docs_show_is_the_one_that_is_printed(run):
    page = (Path(__file__).parent.parent.parent / "docs" / "fusions.md").read_text(encoding="utf-8")
    shown = re.search(r"```text\n(fusion +sites .*?)```", page, re.DOTALL)[1]
    assert run("plan", "deepseek-v3", "--target", "gfx950", "--quant", "none").out.endswith(shown)


def test_a_config_is_a_model_too(run, tmp_path, monkeypatch):
    """One of a declared model is that model, quantised as it says itself; another is read alone, and what that leaves unchecked is said."""
    unquantised = run("plan", "kimi-k2.5", "--tp", 8, "--quant", "none").out
    declared = run("plan", KIMI_CONFIG, "--tp", 8)
    # All but what no one has said of it: whether its linears quantise.
    lines, others = (
        {re.sub(r" +|─+", " ", line) for line in re.sub(r"\n {4,}", " ", each).splitlines()}
        for each in (declared.out, unquantised)
    )
    assert lines ^ others and all("activation" in line or line.startswith("rank ") for line in lines ^ others)
    assert declared.err == ""
    assert run("plan", KIMI_CONFIG.parent, "--tp", 8).out == declared.out
    config = json.loads(KIMI_CONFIG.read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    text["num_hidden_layers"] = 7
    folder = tmp_path / "short-kimi"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    answer = run("plan", folder)
    assert answer.code == 0 and re.search(r"^mla_dual_rms_norm +7 ", answer.out, re.MULTILINE)
    assert "was read alone; `layerfuse inspect` holds" in answer.err
    monkeypatch.chdir(tmp_path)
    assert run("plan", "short-kimi").out == answer.out
    del text["kv_lora_rank"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    wrong = run("plan", folder)
    assert wrong.code == 1 and "kv_lora_rank" in wrong.err
    assert run("plan", folder / "none" / "config.json").code == 2


def test_the_head_names_the_file_that_was_read_and_what_quant_made_of_it(run, tmp_path):
    folder = Path(__file__).parents[1] / "engines" / "checkpoints" / "qwen3-4b"
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    held = {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    beside = tmp_path / "hf_quant_config.json"
    beside.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": held}), encoding="utf-8")
    head = "".join(run("plan", tmp_path).out.split("\n\n")[0].split())
    assert f"as{beside}says(see--quant):" in head
    out = said(run("plan", "deepseek-v3", "--target", "b200", "--quant", "nvfp4", "--quant", "latents=none"))
    assert "as --quant nvfp4 says: activations of every role nvfp4" in out
    assert "as --quant latents=none says: activations at latents as they are" in out
    assert "as --quant" not in said(run("plan", "deepseek-v3"))


def test_an_id_is_held_to_the_names_that_its_last_part_begins_with(run):
    answer = run("plan", "deepseek-ai/DeepSeek-V3-0324")
    assert answer.code == 2 and "did you mean deepseek-v3?" in answer.err
    assert "did you mean" not in run("plan", "nobody/nothing-like-it").err
