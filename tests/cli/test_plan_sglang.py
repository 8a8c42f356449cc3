"""What `layerfuse plan --engine sglang` and the doctor say beforehand, without SGLang."""

import json
import re
import sys
from pathlib import Path

import attrs
import pytest
from test_doctor import packages  # noqa: F401 (a fixture)

from layerfuse import doctor
from layerfuse.cli.models import find_model
from layerfuse.engines.defaults import in_words
from layerfuse.engines.sglang.facts import SEAMS as RECORDED
from layerfuse.engines.sglang.facts import engine_of
from layerfuse.engines.sglang.seams import SEAMS
from layerfuse.fusion import FusionConfig, Target, plan
from layerfuse.fusion.policy import Policy, shipped

CHECKPOINTS = Path(__file__).parents[1] / "engines" / "checkpoints"
ADD, GROUP = "add_rms_norm", "add_rms_norm_group_quant"
INSIDE = {
    "latents": "mla_dual_rms_norm_group_quant",
    "activation": "silu_mul_group_quant",
    "linear": "few_token_linear_group_quant",
}
REDUCED = "all_reduce_add_rms_norm"
HERE = ["plan", "deepseek-v3", "--engine", "sglang", "--target", "sm90"]
RUNNER = "class ModelRunner:\n    def load_model(self): ...\n"
NORMS = """
class RMSNorm:
    def forward_native(self, x, residual=None, post_residual_addition=None, quant_linear=None): ...
class GemmaRMSNorm:
    def forward_native(self, x, residual=None): ...
"""
LINEARS = "class Fp8LinearMethod:\n    def apply(self, layer, x, bias=None): ...\n"


def decisions(run, *more):
    """(role, fusion) -> decision and reason, of the first kind of layers that has it."""
    kinds = json.loads(run(*HERE, *more, "--json").out)["kinds"]
    rows = [(role, each) for kind in kinds for role, several in kind["sites"].items() for each in several]
    return {(role, each["fusion"]): (each["decision"], each["reason"]) for role, each in reversed(rows)}


def with_rows(monkeypatch, **changed):
    """Two rows of SGLang, of norms alone and of all, on the model of the one that the library has for dense layers, changed."""
    of = next(each for each in shipped().measurement if each.engine == "sglang" and each.mixtures is False)
    norms = {"1": (1.0168, 1.0139, 1.0202), "8": (1.0432, 1.0397, 1.0514)}
    every = {"1": (1.2473, 1.2446, 1.2507), "8": (1.1831, 1.178, 1.1922)}
    rows = (
        {"fusions": (ADD, GROUP, "rms_norm_group_quant"), "decode": norms},
        {"fusions": (*INSIDE.values(), ADD, GROUP, "rms_norm_group_quant"), "decode": every},
    )
    given = Policy(measurement=tuple(attrs.evolve(of, **each, **changed) for each in rows))
    for place in ("config", "planning"):
        monkeypatch.setattr(f"layerfuse.fusion.{place}.shipped", lambda: given)
    monkeypatch.delenv("LAYERFUSE_FUSIONS", raising=False)


def test_nothing_is_on_where_what_is_faster_costs_something_else(run, monkeypatch):
    with_rows(monkeypatch, but="it is far off")
    found = decisions(run)
    assert {kind for kind, _ in found.values()} <= {"refused", "not_applicable"}
    does = "SGLang does it: its own kernel for the add and the norm (fused_add_rmsnorm); naming the fusion takes it instead"
    kind, reason = found["post_attention", ADD]
    assert kind == "not_applicable" and reason.startswith(f"{does}; it is far off: 1.02")
    for role, name, ratios in (
        ("post_attention", GROUP, "1.02 and 1.04"),
        ("latents", INSIDE["latents"], "1.25 and 1.18"),
    ):
        assert f"unless switched on: it is far off: {ratios} times" in found[role, name][1]


def test_what_was_measured_faster_is_on_and_quoted_with_its_model(run, monkeypatch):
    with_rows(monkeypatch, but=None)
    found = decisions(run)
    assert found["post_attention", ADD][0] == "fallback"
    for role, name, ratios in (
        ("post_attention", GROUP, "1.02 and 1.04"),
        *((each, fusion, "1.25 and 1.18") for each, fusion in INSIDE.items()),
    ):
        kind, reason = found[role, name]
        assert kind == "expected" and f"measured {ratios} times" in reason and "SGLang 0.5.23, NVIDIA H100" in reason


def test_what_is_asked_for_stands_where_there_is_a_place_for_it(run, monkeypatch):
    monkeypatch.setenv("LAYERFUSE_FUSIONS", ",".join((ADD, GROUP, REDUCED, *INSIDE.values())))
    found = decisions(run, "--tp", "8")
    assert found["post_attention", GROUP][0] == found["final", ADD][0] == "expected"
    assert found["post_attention", ADD][0] == "fallback"
    none = "SGLang compiles no model, and layerfuse knows no place for it in SGLang's code yet"
    assert {found[place][0] for place in INSIDE.items()} == {"expected"}
    assert found["final", REDUCED] == ("refused", none)
    assert "fused ops can stand in its modules only" in " ".join(run(*HERE).out.split())


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("gemma-3-27b", "layerfuse knows no place in SGLang's Gemma3RMSNorm, which Gemma3ForConditionalGeneration has"),
        ("smollm3-3b", "has no code of its own for SmolLM3ForCausalLM: it can run transformers' alone"),
        ("minicpm3-4b", "SGLang's code of MiniCPM3ForCausalLM adds by itself in front of its norms"),
    ],
)
def test_where_a_model_has_no_place_for_a_fused_op_none_is_promised(model, why, run, monkeypatch):
    monkeypatch.setenv("LAYERFUSE_FUSIONS", ADD)
    kinds = json.loads(run("plan", model, "--engine", "sglang", "--target", "sm90", "--json").out)["kinds"]
    found = [each for kind in kinds for several in kind["sites"].values() for each in several if each["fusion"] == ADD]
    assert {each["decision"] for each in found} <= {"refused", "not_applicable"}
    assert any(why in each["reason"] for each in found)


def test_a_model_that_sglang_has_loaded_by_transformers_code_is_named():
    said = engine_of(["TransformersForCausalLM"]).refuses["*"]
    assert said == "SGLang has no code of its own for the model, and runs transformers' (TransformersForCausalLM)"


def test_a_plan_by_the_engines_name_alone_expects_nothing():
    specs = list(find_model("deepseek-v3", ()).specs(1, 0))
    found = plan(specs, Target.named("sm90"), FusionConfig.parse(ADD), "sglang")
    assert not found.expected()
    assert "engine_of()" in found.refused(ADD)[0].reason


def test_plans_know_the_places_that_there_are():
    assert {seam.fusion for seam in SEAMS} == RECORDED


@pytest.mark.parametrize(
    ("version", "runner", "state", "detail"),
    [
        (
            "0.5.23",
            RUNNER,
            "found",
            f"SGLang 0.5.23 is tested; {in_words('sglang', '0.5.23') or 'no fusion is on by default'}",
        ),
        ("0.6.0", RUNNER, "found", "SGLang 0.6.0 is not tested (0.5.23 is), and has what is expected"),
        ("0.6.0", RUNNER.replace("self", "self, config"), "broken", "would be left alone (tested with 0.5.23): "),
    ],
)
def test_an_installed_sglang_is_read_and_not_imported(version, runner, state, detail, packages, run, monkeypatch):  # noqa: F811
    for name in ("SGLANG_PLUGINS", "LAYERFUSE_FUSIONS"):
        monkeypatch.delenv(name, raising=False)
    files = {
        "srt/model_executor/model_runner.py": runner,
        "srt/layers/layernorm.py": NORMS,
        "srt/layers/quantization/fp8.py": LINEARS,
    }
    folder = packages("sglang", dist="sglang", version=version, files=["__init__.py"])
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    (found,) = doctor.inside("sglang")
    assert found.state == state
    assert detail in found.detail
    places = json.loads(run("doctor", "--json").out)["sglang"]
    norms = "sglang.srt.layers.layernorm"
    assert (places[f"{norms}:RMSNorm"]["state"], GROUP in places[f"{norms}:RMSNorm"]["detail"]) == ("found", True)
    assert places["sglang.srt.layers.quantization.fp8:Fp8LinearMethod.apply"]["state"] == "found"
    assert "is expected to take self, x, residual, post_residual_addition" in places[f"{norms}:GemmaRMSNorm"]["detail"]
    assert "Where layerfuse stands in SGLang, by its source" in run("doctor").out
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    (found,) = doctor.inside("sglang")
    assert found.state == ("broken" if state == "broken" else "absent")
    assert "sglang" not in sys.modules


@pytest.mark.parametrize("model", ["qwen3-next-80b-a3b", "mixtral-8x7b"])
def test_what_has_no_place_in_sglang_depends_on_nothing_that_is_not_known(model, run, monkeypatch):
    """How these models' experts hold their weights is not declared."""
    monkeypatch.delenv("LAYERFUSE_FUSIONS", raising=False)
    for engine, why in (("sglang", "layerfuse knows no place for it in SGLang's code yet"), ("vllm", "not known: how")):
        kinds = json.loads(run("plan", model, "--engine", engine, "--target", "sm90", "--json").out)["kinds"]
        rows = [each for kind in kinds for several in kind["sites"].values() for each in several]
        found = [each for each in rows if each["fusion"] == "few_token_experts_group_quant"]
        assert found and all(why in each["reason"] and each["decision"] == "not_applicable" for each in found), found


def test_what_is_off_in_sglang_is_told_from_what_has_no_place_there(run):
    out = run("plan", "deepseek-v3", "--tp", 8, "--target", "h100", "--engine", "sglang", "-v").out
    assert re.search(r"^fusion +sites +off +no$", out, re.MULTILINE)
    rows = dict(re.findall(r"^(\w+) +\d+ +(\d+ \[.*)$", out, re.MULTILINE))
    assert re.fullmatch(r"63 \[\d+, \d+\] +59 \[\d+, \d+\]", rows["add_rms_norm_group_quant"])
    assert re.fullmatch(r"3 \[\d+\]", rows["silu_mul_group_quant"])
    experts = rows["few_token_experts_group_quant"].removeprefix("58 ")
    assert f"{experts} 180 sites: SGLang compiles no model, and layerfuse knows no place" in out
    assert re.search(r"activation: silu_mul_group_quant +off \[", out)
    assert re.search(r"all_reduce_add_rms_norm +no \[", out)


def test_what_is_off_quotes_the_figure_of_such_layers_and_says_where_it_was_measured(run, monkeypatch):
    monkeypatch.delenv("LAYERFUSE_FUSIONS", raising=False)

    def reasons(model, target):
        asked = ["plan", model, "--tp", "4", "--target", target, "--engine", "sglang", "--json"]
        kinds = json.loads(run(*asked).out)["kinds"]
        rows = [each for kind in kinds for several in kind["sites"].values() for each in several]
        return {each["reason"].split(" on: ", 1)[1] for each in rows if f"{each['fusion']} is off" in each["reason"]}

    longer = next(row.but for row in shipped().measurement if row.engine == "sglang")
    plain = "it was not benchmarked in sglang where that compiles nothing"
    dense, mixtures = (
        next(row.figure for row in shipped().measurement if row.engine == "sglang" and row.mixtures == kind)
        for kind in (False, True)
    )
    # few_token_linear_group_quant gives the same cause, as the docs do.
    assert reasons("deepseek-v3", "sm90") == {dense, mixtures, plain} and dense.startswith(f"{longer}: 1.25")
    assert reasons("deepseek-v3", "gfx942") == {"it was benchmarked only on sm90, where nothing is compiled", plain}
    assert reasons("qwen3-32b-fp8", "sm90") == {dense.replace(f"{longer}: ", f"{longer}; on another model: ")}


ROUTED = "SGLang makes this model's shared expert one of the routed ones"


@pytest.mark.parametrize(
    ("model", "target", "kind", "why"),
    [
        (
            "deepseek-v3",
            "sm90",
            "not_applicable",
            f"by default {ROUTED} on sm90, and runs no MLP for it; with "
            "--disable-shared-experts-fusion or expert parallelism it does",
        ),
        (
            "deepseek-v3",
            "gfx942",
            "not_applicable",
            "on gfx942, and runs no MLP for it; with --disable-shared-experts-fusion it does",
        ),
        ("glm-5-fp8", "sm120", "not_applicable", f"by default {ROUTED} on sm120"),
        ("qwen3-next-80b-a3b", "gfx942", "refused", f"not known: with SGLANG_USE_AITER {ROUTED}"),
        # FlashInfer's TRTLLM kernels keep it apart, and so does each of these by what it is.
        ("deepseek-v3", "sm100", None, ""),
        ("glm-4.7-flash", "gfx942", None, ""),
        ("kimi-k2-instruct", "sm90", None, ""),
        ("deepseek-v3.2", "sm90", None, ""),
        ("deepseek-v2-lite", "sm90", None, ""),
        ("qwen3.5-35b-a3b", "sm90", None, ""),
    ],
)
def test_nothing_is_promised_in_shared_experts_that_sglang_runs_as_routed_ones(
    model, target, kind, why, run, monkeypatch
):
    monkeypatch.setenv("LAYERFUSE_FUSIONS", ",".join((*INSIDE.values(), "rms_norm_group_quant")))
    given = ["plan", model, "--engine", "sglang", "--target", target, "--quant", "group128", "--json"]
    kinds = {each["kind"]: each["sites"] for each in json.loads(run(*given).out)["kinds"]}
    product, linear = (
        next(each for each in kinds["shared_experts"][role] if each["fusion"] == INSIDE[role])
        for role in ("activation", "linear")
    )
    front = {each["reason"] for each in kinds["residual"]["post_attention"] if each["fusion"] == "rms_norm_group_quant"}
    routed = any("routed experts alone read the norm" in each for each in front)
    if kind is None:
        assert product["decision"] == "expected" and ROUTED not in linear["reason"] and not routed
        return
    assert product["decision"] == kind and why in product["reason"]
    assert linear["decision"] != "expected" and (routed or kind == "refused")
    assert target != "sm90" or linear["reason"] == product["reason"]


PER_TENSOR = {"num_bits": 8, "type": "float", "strategy": "tensor"}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**PER_TENSOR, "dynamic": False},
            "input_activations": {**PER_TENSOR, "dynamic": False},
        }
    },
    "ignore": ["lm_head"],
}


@pytest.mark.parametrize(
    ("said", "word", "why"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, "no", "by ModelOptFp8LinearMethod"),
        (COMPRESSED, "no", "by CompressedTensorsLinearMethod"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "yes", None),
    ],
)
def test_nothing_is_promised_to_linears_of_a_class_that_takes_nothing_quantised(
    said, word, why, run, tmp_path, monkeypatch
):
    monkeypatch.setenv("LAYERFUSE_FUSIONS", "add_rms_norm_static_quant,silu_mul_static_quant")
    config = json.loads((CHECKPOINTS / "qwen3-4b" / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": said}), encoding="utf-8")
    out = run("plan", tmp_path, "--engine", "sglang", "--target", "sm90").out
    head, *rows = re.findall(r"^(fusion|add_rms_norm_static_quant|silu_mul_static_quant) (.*)$", out, re.MULTILINE)
    assert len(rows) == 2 and word in head[1].split() and ("yes" in head[1].split()) == (why is None)
    together = " ".join(out.split())
    assert why is None or f"SGLang multiplies these {why}, and layerfuse stands at Fp8LinearMethod's alone" in together


def test_a_quant_method_that_says_nothing_of_the_class_leaves_it_open():
    for methods, of in (([None], "nothing says the checkpoint's quant_method"), (["torchao"], "is torchao")):
        refuses = engine_of(methods=methods).refuses
        assert refuses[GROUP].startswith("not known: ") and of in refuses[GROUP] and ADD not in refuses
    assert GROUP not in engine_of(methods=["fp8"]).refuses


def test_what_is_off_is_one_reason_and_the_names_to_write_come_last_with_their_figures(run, monkeypatch):
    monkeypatch.delenv("LAYERFUSE_FUSIONS", raising=False)
    out = run("plan", "deepseek-v3", "--tp", 8, "--target", "h100", "--engine", "sglang").out
    together = " ".join(out.split())
    dense, mixtures = (
        next(row for row in shipped().measurement if row.engine == "sglang" and row.mixtures == kind)
        for kind in (False, True)
    )
    assert together.count("unless switched on. Steps of prompts") == 2  # of dense layers, and of mixtures
    names = dense.fusions
    assert f"LAYERFUSE_FUSIONS={','.join(names)} switches on" in re.sub(r",\s+", ",", out)
    for row in (dense, mixtures):
        step = attrs.evolve(row, but=None, note=None, fusions=names[:1]).figure
        assert together.rpartition("switches on what was measured together")[2].count(step) == 1
    monkeypatch.setenv("LAYERFUSE_FUSIONS", ",".join(names))
    assert "switches on" not in run(*HERE).out


def test_a_plan_for_vllm_where_nothing_is_on_says_how_to_switch_on(run, monkeypatch):
    monkeypatch.delenv("LAYERFUSE_FUSIONS", raising=False)
    last = "No fusion is on here: LAYERFUSE_FUSIONS=+NAME switches on one that is off"
    for model, off in (("qwen3-4b", True), ("deepseek-v3", False)):
        notes = json.loads(run("plan", model, "--target", "h100", "--engine", "vllm", "--json").out)["notes"]
        assert notes[-1].startswith(last) is off
