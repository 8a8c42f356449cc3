import json
import sys

import attrs
import pytest
import torch

from layerfuse import doctor
from layerfuse.adapters.variables import VARIABLES
from layerfuse.engines import defaults
from layerfuse.fusion import FUSIONS, Target, policy
from layerfuse.fusion.backends import aiter as amd


def test_no_aiter_is_no_problem():
    assert doctor.find_aiter().state == "absent"


def test_of_aiter_every_function_that_is_called_has_a_row(packages, run):
    newest = "ops/triton/quant/fused_mxfp8_quant.py"
    folder = packages("aiter", "amd-aiter", "0.1.16", files=["ops/__init__.py", "jit/core.py", newest])
    (folder / newest).write_text(
        "def fused_rms_mxfp8_quant(x, weight, eps, y=None, scale=None): ...\n", encoding="utf-8"
    )
    assert list(json.loads(run("doctor", "--json").out)["aiter"]) == [binding.name for binding in amd.BINDINGS]


def test_without_aiter_its_part_is_one_line(run):
    answer = run("doctor")
    assert sum("aiter" in line.lower() for line in answer.out.splitlines()) == 1


def test_a_package_whose_entry_points_cannot_be_read_is_named_and_hides_no_other(packages, run, monkeypatch):
    good = packages("good_plugin", "good-plugin", "1", "[layerfuse.adapters] good = good_plugin:A")
    (good / "__init__.py").write_text("A = []\n", encoding="utf-8")
    packages("malformed", "malformed", "1", "[console_scripts] no equals sign")
    with pytest.warns(RuntimeWarning, match="entry points of malformed in .* cannot be read, and its plugins"):
        answer = run("doctor", "--json")
    assert answer.code == 1
    data = json.loads(answer.out)
    assert [line.partition(" in ")[0] for line in data["problems"]] == [
        "entry points of malformed: the entry points of malformed"
    ]
    assert data["findings"]["plugin good"]["state"] == "found"
    assert any("fusions on c" in sentence for sentence in data["enables"])


SOURCES = {
    "platforms/interface.py": "class Platform:\n    def check_and_update_config(cls, vllm_config): ...\n",
    "model_executor/model_loader/base_loader.py": "class BaseModelLoader:\n"
    "    def load_model(self, vllm_config, model_config, prefix=''): ...\n",
    "compilation/backends.py": "class CompilerManager:\n    def compile(self, graph, compile_range, graph_index=0): ...\n"
    "class VllmBackend:\n    def configure_post_pass(self): ...\n",
    "compilation/decorators.py": "def _try_load_aot_compiled_fn(model, aot_compilation_path): ...\n",
}


@pytest.fixture
def vllm(packages, monkeypatch):
    """Of this release, whose places have some word no more."""
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.delenv("LAYERFUSE_FUSIONS", raising=False)

    def make(version="0.33.0", gone=""):
        folder = packages("vllm", "vllm", version, files=SOURCES)
        for name, text in SOURCES.items():
            (folder / name).write_text(text.replace(gone, "other") if gone else text, encoding="utf-8")
        return folder

    return make


@pytest.mark.parametrize(
    ("version", "gone", "state", "detail"),
    [
        (
            "0.33.0",
            "",
            "found",
            "vLLM 0.33.0 is tested; 5 of 5 hooks found; on by default on sm90, where `layerfuse plan` says so: add_rms_norm_group_quant, "
            "add_rms_norm_per_token_quant, all_reduce_add_rms_norm, all_reduce_add_rms_norm_group_quant, few_token_experts_group_quant, few_token_linear_group_quant, ",
        ),
        (
            "0.34.1",
            "",
            "found",
            "vLLM 0.34.1 is not tested (0.26.0, 0.33.0 are), and has what is expected; 5 of 5 hooks found; ",
        ),
        ("0.33.1", "", "found", ", as measured with vLLM 0.26.0 and 0.33.0"),
        ("0.34.1", "", "found", ", as measured with vLLM 0.26.0 and 0.33.0, and this is 0.34.1"),
        ("0.40.0", "graph_index", "broken", "vLLM 0.40.0 would be left alone (tested with 0.26.0, 0.33.0): "),
        ("0.40.0", "configure_post_pass", "broken", "there is no 'configure_post_pass' in vllm.compilation.backends"),
    ],
)
def test_an_installed_vllm_is_read_for_the_hooks_and_not_imported(version, gone, state, detail, vllm):
    vllm(version, gone)
    (found,) = doctor.inside("vllm")
    assert found.state == state
    assert detail in found.detail and ("and this is" in found.detail) == (version == "0.34.1")
    assert "vllm" not in sys.modules


def test_the_answer_for_people_and_for_programs_agree(run):
    answer = run("doctor")
    data = json.loads(run("doctor", "--json").out)
    assert set(data) == {"findings", "enables", "problems", "aiter", "vllm", "sglang"}
    for name in ("python", "layerfuse", "torch", "triton", "gpu", "c++ compiler", "vllm", "sglang", "aiter"):
        assert name in data["findings"]
        assert name in answer.out
    assert data["findings"]["torch"]["state"] == "found"
    assert any(f"all {len(FUSIONS)} fusions on c" in sentence for sentence in data["enables"])
    assert "vllm" not in sys.modules


def test_every_place_in_vllm_that_is_not_as_expected_is_named(vllm, run):
    vllm(gone="graph_index")
    places = json.loads(run("doctor", "--json").out)["vllm"]
    part = run("doctor").out.partition("Where layerfuse stands in vLLM, by its source\n")[2].partition("\n\n")[0]
    named = {line.split()[0] for line in part.splitlines()[1:] if not line.startswith(" ")}
    assert named == {name for name, place in places.items() if place["state"] != "found"}


def test_a_plan_names_a_variable_that_nothing_reads_and_help_those_that_exist(run, monkeypatch):
    assert not run("plan", "qwen3-8b").err
    monkeypatch.setenv("LAYERFUSE_FUSION", "none")
    said = "layerfuse: LAYERFUSE_FUSION is set, and no variable is called that; did you mean 'LAYERFUSE_FUSIONS'"
    assert run("plan", "qwen3-8b").err.startswith(said)
    out = run("--help").out
    assert all(f"  {name}=" in out for name in VARIABLES)


def test_what_the_environment_forces_is_shown(run_python):
    found = {"LAYERFUSE_FUSIONS": "none", "LAYERFUSE_BACKEND": "reference"}
    data = json.loads(run_python("-m", "layerfuse", "doctor", "--json", env=found).out)["findings"]
    assert data["LAYERFUSE_FUSIONS"]["state"] == "found"
    # Linears and decode steps have no place in fusion.compile.
    engines = ("linear",), ("decode",)
    level_1 = ", ".join(name for name, fusion in FUSIONS.items() if fusion.level == 1 and fusion.roles not in engines)
    assert data["LAYERFUSE_FUSIONS"]["detail"].startswith(f"none, turns off: {level_1} in fusion.compile; ")
    assert data["LAYERFUSE_BACKEND"] == {"state": "found", "detail": "reference, for every op that has it"}
    typos = {"LAYERFUSE_FUSIONS": "nome", "LAYERFUSE_BACKEND": "referense"}
    answer = run_python("-m", "layerfuse", "doctor", "--json", env=typos)
    data = json.loads(answer.out)["findings"]
    assert answer.code == 1
    assert "no fusion is called 'nome'" in data["LAYERFUSE_FUSIONS"]["detail"]
    assert "no op has a backend called 'referense'" in data["LAYERFUSE_BACKEND"]["detail"]


@pytest.mark.parametrize(
    ("fusions", "compiled", "off", "there"),
    [
        ("-add_rms_norm", "add_rms_norm", "nothing", "nothing"),  # which is off in vLLM by default
        ("-add_rms_norm_group_quant", "nothing", "add_rms_norm_group_quant", "add_rms_norm_group_quant"),
        ("-few_token_experts_group_quant", "nothing", "few_token_experts_group_quant", "nothing"),  # no place in SGLang
        (
            "-few_token_linear_group_quant",
            "nothing",
            "few_token_experts_group_quant, few_token_linear_group_quant",
            "few_token_linear_group_quant",
        ),
        ("+few_token_linear", "nothing", "nothing", "nothing"),
        ("-mla_decode", "nothing", *["mla_decode, mla_decode_group_quant"] * 2),
    ],
)
def test_what_is_really_switched_off_is_said_of_each_place(monkeypatch, fusions, compiled, off, there):
    monkeypatch.setenv("LAYERFUSE_FUSIONS", fusions)
    (found,) = doctor.environment(on="cpu", has_torch=True)  # no engine is installed here, and no GPU
    said = f"{fusions}, turns off: {compiled} in fusion.compile; {off} in vLLM on sm90"
    assert found.detail.startswith(f"{said}; ") and found.detail.count("; ") == 2
    of_vllm = [each for each in policy.shipped().measurement if each.engine == "vllm"]
    same = policy.Policy(measurement=tuple(attrs.evolve(each, engine="sglang") for each in of_vllm))
    for module in (policy, defaults):
        monkeypatch.setattr(module, "shipped", lambda: same)
    (found,) = doctor.environment(on="cpu", has_torch=True)
    assert found.detail == f"{fusions}, turns off: {compiled} in fusion.compile; {there} in SGLang on sm90"


@pytest.mark.parametrize(("here", "on"), [("sm90", ["sm90"]), ("sm80", ["sm100", "sm90"])])
def test_what_is_switched_off_is_said_of_this_gpu_or_of_those_where_something_is_on(monkeypatch, here, on):
    monkeypatch.setenv("LAYERFUSE_FUSIONS", "-mla_decode")
    rows = policy.shipped().measurement
    more = policy.Policy(measurement=(*rows, *(attrs.evolve(each, arch="sm100") for each in rows)))
    for module in (policy, defaults):
        monkeypatch.setattr(module, "shipped", lambda: more)
    monkeypatch.setattr(Target, "detect", lambda: Target.named(here))
    (found,) = doctor.environment(on="cuda", has_torch=True)
    vllm = [said for said in found.detail.split("; ") if "in vLLM" in said]
    assert vllm == [f"mla_decode, mla_decode_group_quant in vLLM on {arch}" for arch in on]


def test_linears_in_blocks_go_with_the_last_fusion_that_quantises_for_them(monkeypatch):
    monkeypatch.setenv("LAYERFUSE_FUSIONS", "none")
    (found,) = doctor.environment(on="cpu", has_torch=True)
    there = found.detail.partition("; ")[2]
    assert "few_token_linear_group_quant, " in there and "few_token_linear_row_quant" not in there


def test_equal_answers_are_one_line_and_others_name_their_fusions(run, monkeypatch):
    lines = run("doctor").out.splitlines()
    assert [line for line in lines if "`reference`" in line] == [
        f"  all {len(FUSIONS)} fusions on cpu: yes, by the backend `reference`"
    ]
    one, (others, said) = "silu_mul_static_quant", doctor._fusions_on("cpu")[0].split(" fusions on cpu: ")
    monkeypatch.setattr(doctor, "_backend", lambda op, _: "no: made up" if op == one else said)
    first, second = doctor._fusions_on("cpu")
    assert second == f"{one} on cpu: no: made up" and others == f"all {len(FUSIONS)}"
    assert first == f"{', '.join(name for name in FUSIONS if name != one)} on cpu: {said}"


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("referense", "plans and fusions: no, LAYERFUSE_BACKEND names no backend (above)"),
        ("aiter", "`verify`: no, the backend that LAYERFUSE_BACKEND forces does not run here (above)"),
    ],
)
def test_what_a_forced_backend_leaves_is_no_yes(run, monkeypatch, backend, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("LAYERFUSE_BACKEND", backend)
    enables = json.loads(run("doctor", "--json").out)["enables"]
    assert said in enables
    assert not any("yes" in sentence and ("`verify`" in sentence or "fusions on" in sentence) for sentence in enables)
    plans = run("plan", "deepseek-v3").code == 0
    assert any("`plan`" in sentence and "yes" in sentence for sentence in enables) is plans is (backend == "aiter")
