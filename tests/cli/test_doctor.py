import json
import sys

import attrs
import pytest
import torch

from layerfuse import doctor
from layerfuse.adapters.variables import VARIABLES
from layerfuse.engines import defaults
from layerfuse.engines.vllm.switches import BATCH_INVARIANT, BLOCKS_INSIDE, DEEP_GEMM
from layerfuse.fusion import FUSIONS, policy
from layerfuse.fusion.backends import aiter as amd


@pytest.fixture(autouse=True)
def _nothing_remembered_of_aiter():
    amd.forget()
    yield
    amd.forget()


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Packages that look installed: `packages("aiter", dist="amd-aiter", version="0.1.15", files=[...])`."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    def make(module, *, dist, version, files=("__init__.py",), entry_points=""):
        made.append(module)
        for file in files:
            path = tmp_path / module / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("raise RuntimeError('this package must not be imported')\n", encoding="utf-8")
        info = tmp_path / f"{dist.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n", encoding="utf-8")
        if entry_points:
            (info / "entry_points.txt").write_text(entry_points, encoding="utf-8")
        amd.forget()
        return tmp_path / module

    yield make
    # Tests name their packages alike.
    for module in made:
        sys.modules.pop(module, None)


def test_no_aiter_is_no_problem():
    assert doctor.find_aiter().state == "absent"


def test_the_asyncio_helper_is_told_for_what_it_is(packages, run):
    packages("aiter", dist="aiter", version="0.13.20191203", files=["__init__.py", "join_aiters.py"])
    found = doctor.find_aiter()
    assert found.state == "broken"
    assert found.detail.startswith("this is PyPI's `aiter` 0.13.20191203, an unrelated asyncio helper, not AMD's AITER")
    answer = run("doctor")
    assert answer.code == 1
    assert "unrelated asyncio helper" in answer.out
    assert "aiter" not in sys.modules


FILES = ["__init__.py", "ops/__init__.py", "ops/rmsnorm.py", "ops/triton/quant/fused_mxfp8_quant.py", "jit/core.py"]


MXFP8 = "def fused_rms_mxfp8_quant(x, weight, eps, y=None, scale=None): ...\n"


NORM = """
def rmsnorm2d_fwd_with_add(out, input, residual_in, residual_out, weight, epsilon, use_model_sensitive_rmsnorm=0): ...
def rmsnorm_quant(out, input, scale, weight, eps): ...
"""


def test_every_function_called_of_aiter_is_listed_with_its_convention_or_the_reason(packages, run):
    folder = packages("aiter", dist="amd-aiter", version="0.1.16", files=FILES)
    (folder / "ops" / "rmsnorm.py").write_text(NORM, encoding="utf-8")
    (folder / "ops" / "triton" / "quant" / "fused_mxfp8_quant.py").write_text(MXFP8, encoding="utf-8")
    answer = run("doctor")
    assert answer.code == 0
    assert "aiter.ops.rmsnorm:rmsnorm2d_fwd_with_add, as recorded" in answer.out
    data = json.loads(run("doctor", "--json").out)["aiter"]
    assert list(data) == [binding.name for binding in amd.BINDINGS]
    assert data["add_rms_norm"] == {
        "state": "found",
        "detail": "aiter.ops.rmsnorm:rmsnorm2d_fwd_with_add, as recorded",
        "convention": "aiter.ops.rmsnorm:rmsnorm2d_fwd_with_add(out, input, residual_in, residual_out, weight, epsilon, "
        "use_model_sensitive_rmsnorm=), as recorded",
    }
    assert data["rms_norm_group_quant"]["detail"].startswith(
        "aiter.ops.rmsnorm:rmsnorm_quant has an unknown signature: (out, input, scale, weight, eps). Known: ("
    )
    assert data["rms_norm_group_quant"]["convention"] is None
    assert "this build has no such function" in data["mla_dual_rms_norm"]["detail"]
    assert "aiter" not in sys.modules


def test_without_aiter_its_part_is_one_line(run):
    answer = run("doctor")
    assert sum("aiter" in line.lower() for line in answer.out.splitlines()) == 1
    assert json.loads(run("doctor", "--json").out)["aiter"] == {}


def test_a_plugin_that_cannot_be_imported_is_named(packages, run):
    packages(
        "broken_plugin",
        dist="broken-plugin",
        version="1",
        entry_points="[layerfuse.adapters]\nbroken = broken_plugin\n",
    )
    answer = run("doctor", "--json")
    assert answer.code == 1
    found = json.loads(answer.out)["findings"]["plugin broken"]
    assert found["state"] == "broken"
    assert found["detail"] == (
        "the plugin broken of broken-plugin (broken_plugin) cannot be imported: RuntimeError: this package must not be imported"
    )


def test_a_plugin_that_works_is_counted(packages):
    folder = packages(
        "good_plugin", dist="good-plugin", version="1", entry_points="[layerfuse.adapters]\ngood = good_plugin:A\n"
    )
    (folder / "__init__.py").write_text(
        "from layerfuse.adapters import DEEPSEEK_V3, Adapter\n"
        "A = Adapter('good', {'good:Attention': DEEPSEEK_V3.layers['transformers:DeepseekV3Attention']})\n",
        encoding="utf-8",
    )
    (found,) = [f for f in doctor.plugins() if f.name == "plugin good"]
    assert (found.state, found.detail) == ("found", "good_plugin:A adds 0 models and 1 layer classes")


def test_a_package_whose_entry_points_cannot_be_read_is_named_and_hides_no_other(packages, run, monkeypatch):
    good = packages(
        "good_plugin", dist="good-plugin", version="1", entry_points="[layerfuse.adapters]\ngood = good_plugin:A\n"
    )
    (good / "__init__.py").write_text("A = []\n", encoding="utf-8")
    packages("malformed", dist="malformed", version="1", entry_points="[console_scripts]\nno equals sign\n")
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
def test_an_installed_vllm_is_read_for_the_hooks_and_not_imported(version, gone, state, detail, packages, monkeypatch):
    for name in ("VLLM_PLUGINS", "LAYERFUSE_FUSIONS"):
        monkeypatch.delenv(name, raising=False)
    folder = packages("vllm", dist="vllm", version=version, files=["__init__.py", *SOURCES])
    for name, text in SOURCES.items():
        (folder / name).write_text(text.replace(gone, "other") if gone else text, encoding="utf-8")
    (found,) = doctor.inside("vllm")
    assert found.state == state
    assert detail in found.detail and ("and this is" in found.detail) == (version == "0.34.1")
    assert "vllm" not in sys.modules


def test_a_switch_of_vllms_that_leaves_every_fusion_to_it_is_named(packages, monkeypatch):
    folder = packages("vllm", dist="vllm", version="0.33.0", files=["__init__.py", *SOURCES])
    for name, text in SOURCES.items():
        (folder / name).write_text(text, encoding="utf-8")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    (found,) = doctor.inside("vllm")
    said = "VLLM_BATCH_INVARIANT is set: vLLM keeps to kernels whose results do not depend on the batch"
    assert (found.state, found.detail) == ("absent", f"every fusion is left to vLLM 0.33.0: {said}")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "2")  # vLLM reads it as a number
    assert doctor.inside("vllm")[0].state == "absent"
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    assert doctor.inside("vllm")[0].state == "found"
    assert "linears in fp8 blocks" not in doctor.inside("vllm")[0].detail
    for switch, linears, release in (
        ("VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER", "DeepGEMM", "0.26.0 and 0.33.0"),
        ("VLLM_USE_DEEP_GEMM", "CUTLASS", "0.26.0"),
    ):
        monkeypatch.setenv(switch, "0")
        said = f"{switch}=0 gives linears in fp8 blocks to {linears}, beside which quantised groups were measured with vLLM {release}"
        assert doctor.inside("vllm")[0].detail.endswith(f"; {said}")


def test_places_in_vllm_that_are_as_expected_are_one_line_and_others_are_named(packages, run):
    folder = packages("vllm", dist="vllm", version="0.33.0", files=["__init__.py", *SOURCES, "layernorm.py"])
    for name, text in SOURCES.items():
        (folder / name).write_text(text.replace("graph_index", "other"), encoding="utf-8")
    layers = folder / "model_executor" / "layers"
    layers.mkdir()
    (layers / "layernorm.py").write_text(
        "class RMSNorm:\n    def forward_native(self, x, residual=None): ...\nclass GemmaRMSNorm(RMSNorm): ...\n",
        encoding="utf-8",
    )
    answer = run("doctor", "--json")
    found = json.loads(answer.out)["vllm"]
    assert found["vllm.compilation.backends:VllmBackend.configure_post_pass"] == {
        "state": "found",
        "detail": "puts its pass ahead of vLLM's",
    }
    compile_ = found["vllm.compilation.backends:CompilerManager.compile"]
    assert compile_["state"] == "absent"
    assert compile_["detail"].endswith(
        "is expected to take self, graph, compile_range, graph_index, and takes self, graph, compile_range, other"
    )
    norms = "vllm.model_executor.layers.layernorm"
    assert found[f"{norms}:RMSNorm"]["state"] == "found"
    assert found[f"{norms}:RMSNormGated"]["detail"] == (
        f"{norms}:RMSNormGated.forward_native is expected, and there is no 'RMSNormGated' in {norms}"
    )
    assert found["vllm.models.kimi_k3.nvidia.mla:MultiHeadLatentAttention"]["detail"].endswith(
        "and there is no vllm.models.kimi_k3.nvidia.mla"
    )
    out = run("doctor").out
    shown = out[out.index("Where layerfuse stands in vLLM, by its source\n") :].partition("\n\n")[0].splitlines()[1:]
    fine = sum(place.state == "found" for place in doctor.places_in("vllm"))
    assert shown[0].split(maxsplit=3) == [str(fine), "places", "yes", "as expected; --json lists them"]
    others = [name for name, place in found.items() if place["state"] != "found"]
    assert {line.split()[0] for line in shown[1:] if not line.startswith(" ")} == set(others)
    assert "vllm" not in sys.modules


def test_what_keeps_vllm_from_loading_the_plugin_is_said(packages, monkeypatch):
    folder = packages("vllm", dist="vllm", version="0.33.0", files=["__init__.py", *SOURCES])
    for name, text in SOURCES.items():
        (folder / name).write_text(text, encoding="utf-8")
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    (found,) = doctor.inside("vllm")
    assert (found.state, found.detail) == ("absent", "VLLM_PLUGINS=other keeps vLLM from loading it")


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


@pytest.mark.parametrize(
    ("calls", "state", "detail"),
    [
        ("3", "found", "3 calls of each fused op are compared with its reference, in fusion.compile alone"),
        ("0", "found", "nothing is compared, in fusion.compile alone"),
        ("abc", "broken", "LAYERFUSE_SHADOW=abc: expected how many calls are compared at each site, as 3"),
        ("-1", "broken", "LAYERFUSE_SHADOW=-1: expected how many calls are compared at each site, as 3"),
        ("9" * 5000, "broken", "expected how many calls are compared at each site, as 3"),
    ],
    ids=lambda each: each[:10],
)
def test_how_many_calls_are_compared_is_checked(run, monkeypatch, calls, state, detail):
    monkeypatch.setenv("LAYERFUSE_SHADOW", calls)
    answer = run("doctor", "--json")
    found = json.loads(answer.out)["findings"]["LAYERFUSE_SHADOW"]
    assert found["state"] == state
    assert detail in found["detail"]
    assert answer.code == (state == "broken")


@pytest.mark.parametrize(
    ("name", "value", "state", "detail"),
    [
        (DEEP_GEMM, "0", "found", "0, CUTLASS multiplies linears in fp8 blocks on Hopper"),
        (BLOCKS_INSIDE, "0", "found", "0, DeepGEMM multiplies linears in fp8 blocks on Hopper"),
        (DEEP_GEMM, "1", "found", "1, as by default"),
        (DEEP_GEMM, "false", "broken", "'false' is no number, which vLLM expects there"),
        (BATCH_INVARIANT, "2", "found", "2, no fusion stands in vLLM"),
        ("VLLM_ROCM_USE_AITER", "True", "found", "True, vLLM takes AITER's kernels"),
        ("SGLANG_USE_AITER", "false", "found", "false, as by default"),
    ],
)
def test_an_engines_switch_that_is_set_is_listed_without_the_engine(run, monkeypatch, name, value, state, detail):
    monkeypatch.setenv(name, value)
    answer = run("doctor", "--json")
    found = json.loads(answer.out)["findings"][name]
    assert found["state"] == state and found["detail"].startswith(detail) and answer.code == (state == "broken")


@pytest.mark.parametrize(
    ("name", "value", "state", "detail"),
    [
        ("LAYERFUSE_STRICT", "true", "found", "an expected fusion that is missed stops SGLang"),
        ("LAYERFUSE_STRICT", "yes", "broken", "LAYERFUSE_STRICT: expected 0 or 1, got 'yes'"),
        ("LAYERFUSE_REPORT", "report.json", "found", "report.json, where SGLang's report goes"),
        ("LAYERFUSE_REPORT", "..", "broken", ".. is a folder, and the report a file"),
        ("LAYERFUSE_PDL", "0", "found", "0, no kernel starts while the one before it ends"),
        ("LAYERFUSE_PDL", "off", "broken", "expected 0 or 1, got off, which is as 1"),
        ("LAYERFUSE_FUSION", "none", "broken", "no variable is called that; did you mean 'LAYERFUSE_FUSIONS'"),
    ],
)
def test_every_variable_is_checked(run, monkeypatch, name, value, state, detail):
    monkeypatch.setenv(name, value)
    answer = run("doctor", "--json")
    found = json.loads(answer.out)["findings"][name]
    assert found["state"] == state and found["detail"].startswith(detail) and answer.code == (state == "broken")


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
    assert data["LAYERFUSE_FUSIONS"]["detail"] == f"none, turns off: {level_1}"
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
    ],
)
def test_what_is_really_switched_off_is_said_of_each_place(monkeypatch, fusions, compiled, off, there):
    monkeypatch.setenv("LAYERFUSE_FUSIONS", fusions)
    (found,) = doctor.environment(on="cpu", has_torch=True, engines=["vllm"])
    assert found.detail == f"{fusions}, turns off: {compiled} in fusion.compile; {off} in vLLM"
    (alone,) = doctor.environment(on="cpu", has_torch=True)
    assert alone.detail == f"{fusions}, turns off: {compiled}"
    of_vllm = [each for each in policy.shipped().measurement if each.engine == "vllm"]
    same = policy.Policy(measurement=tuple(attrs.evolve(each, engine="sglang") for each in of_vllm))
    for module in (policy, defaults):
        monkeypatch.setattr(module, "shipped", lambda: same)
    (found,) = doctor.environment(on="cpu", has_torch=True, engines=["vllm", "sglang"])
    assert found.detail == f"{fusions}, turns off: {compiled} in fusion.compile; nothing in vLLM; {there} in SGLang"


def test_linears_in_blocks_go_with_the_last_fusion_that_quantises_for_them(monkeypatch):
    monkeypatch.setenv("LAYERFUSE_FUSIONS", "none")
    (found,) = doctor.environment(on="cpu", has_torch=True, engines=["vllm"])
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


def test_a_name_with_which_vllm_would_not_start_is_no_yes(packages, run, monkeypatch):
    folder = packages("vllm", dist="vllm", version="0.33.0", files=["__init__.py", *SOURCES])
    for name, text in SOURCES.items():
        (folder / name).write_text(text, encoding="utf-8")
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    for wrong, close in (
        ("add_rmsnorm", "'add_rms_norm'"),
        ("mla_decod", "did you mean 'mla_decode'"),
        ("+rms_nrm_static_quant", "'rms_norm_static_quant'"),
    ):
        monkeypatch.setenv("LAYERFUSE_FUSIONS", wrong)
        answer = run("doctor", "--json")
        data = json.loads(answer.out)
        assert answer.code == 1
        inside = data["findings"]["inside vllm"]
        assert inside["state"] == "broken" and f"would not start with LAYERFUSE_FUSIONS={wrong}" in inside["detail"]
        assert close in data["findings"]["LAYERFUSE_FUSIONS"]["detail"]
        assert "plans and fusions: no, LAYERFUSE_FUSIONS cannot be read (above)" in data["enables"]
        assert not any(
            "yes" in sentence and ("fusions on" in sentence or "`plan`" in sentence) for sentence in data["enables"]
        )
    monkeypatch.setenv("LAYERFUSE_FUSIONS", "mla_decode,add_rms_norm")
    monkeypatch.setenv("LAYERFUSE_BACKEND", "referense")
    answer = run("doctor", "--json")
    inside = json.loads(answer.out)["findings"]["inside vllm"]
    assert (answer.code, inside["state"]) == (1, "broken")
    assert "would not start with LAYERFUSE_BACKEND=referense" in inside["detail"]
    monkeypatch.delenv("LAYERFUSE_BACKEND")
    answer = run("doctor", "--json")
    found = json.loads(answer.out)["findings"]
    assert (answer.code, found["inside vllm"]["state"]) == (0, "found")
    assert found["LAYERFUSE_FUSIONS"]["state"] == "found"


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


def test_an_environment_that_forces_nothing_is_not_mentioned(run, monkeypatch):
    monkeypatch.setenv("LAYERFUSE_BACKEND", "")
    monkeypatch.delenv("LAYERFUSE_FUSIONS", raising=False)
    assert "LAYERFUSE_" not in run("doctor").out


CLASHING = """
from layerfuse.adapters import DEEPSEEK_V3, Adapter, const
FACTS = DEEPSEEK_V3.layers['transformers:DeepseekV3Attention'][0]
A = Adapter('{name}', {{'shared:Attention': FACTS.but(v_head_dim=const({width}))}})
"""


def test_two_plugins_that_clash_are_both_broken(packages, run):
    for name, width in (("one", 64), ("two", 128)):
        points = f"[layerfuse.adapters]\nmine = {name}_plugin:A\n"
        folder = packages(f"{name}_plugin", dist=f"{name}-plugin", version="1", entry_points=points)
        (folder / "__init__.py").write_text(CLASHING.format(name=name, width=width), encoding="utf-8")
    answer = run("doctor", "--json")
    assert answer.code == 1
    found = {n: f for n, f in json.loads(answer.out)["findings"].items() if n.startswith("plugin ")}
    assert {f["state"] for f in found.values()} == {"broken"}
    assert len(found) == 2
    for each in found.values():
        assert "the plugin mine of one-plugin (one_plugin:A)" in each["detail"]
        assert "the plugin mine of two-plugin (two_plugin:A)" in each["detail"]


def test_a_plugin_that_ends_python_does_not_end_the_doctor(packages, run):
    folder = packages("rough", dist="rough", version="1", entry_points="[layerfuse.adapters]\nrough = rough:A\n")
    (folder / "__init__.py").write_text("import sys\nsys.exit(0)\n", encoding="utf-8")
    answer = run("doctor")
    assert answer.code == 1
    assert "cannot be imported: SystemExit: 0" in answer.out


def test_fusions_that_cannot_be_used_are_named_and_the_rest_is_said(packages, run):
    packages("odd_fusions", dist="odd-fusions", version="1", entry_points="[layerfuse.fusions]\nodd = odd_fusions:F\n")
    FUSIONS.forget()
    try:
        answer = run("doctor")
        assert answer.code == 1
        assert "entry point 'odd' of odd-fusions: importing raised" in " ".join(answer.out.split())
        assert "fusions on cpu: yes" in answer.out or "fusions on cuda: yes" in answer.out
    finally:
        FUSIONS.forget()
