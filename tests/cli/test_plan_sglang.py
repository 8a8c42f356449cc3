"""What `layerfuse plan --engine sglang` and the doctor say beforehand, without SGLang."""

import json
import sys
from pathlib import Path

import attrs
import pytest

from layerfuse import doctor
from layerfuse.cli.models import find_model
from layerfuse.engines.defaults import in_words
from layerfuse.engines.sglang.facts import SEAMS as RECORDED
from layerfuse.engines.sglang.facts import engine_of
from layerfuse.engines.sglang.seams import SEAMS
from layerfuse.engines.switches import switched
from layerfuse.fusion import FusionConfig, Target, plan
from layerfuse.fusion.policy import Policy, shipped

CHECKPOINTS = Path(__file__).parents[1] / "engines" / "checkpoints"
ADD, GROUP = "add_rms_norm", "add_rms_norm_group_quant"
INSIDE = {
    "latents": "mla_dual_rms_norm_group_quant",
    "activation": "silu_mul_group_quant",
    "linear": "few_token_linear_group_quant",
}
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
def test_an_installed_sglang_is_read_and_not_imported(version, runner, state, detail, packages, run, monkeypatch):
    for name in ("SGLANG_PLUGINS", "LAYERFUSE_FUSIONS"):
        monkeypatch.delenv(name, raising=False)
    files = {
        "srt/model_executor/model_runner.py": runner,
        "srt/layers/layernorm.py": NORMS,
        "srt/layers/quantization/fp8.py": LINEARS,
    }
    folder = packages("sglang", "sglang", version)
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


def test_what_is_off_quotes_the_figure_of_such_layers_and_says_where_it_was_measured(run, monkeypatch):
    monkeypatch.delenv("LAYERFUSE_FUSIONS", raising=False)

    def reasons(model, target):
        asked = ["plan", model, "--tp", "4", "--target", target, "--engine", "sglang", "--json"]
        kinds = json.loads(run(*asked).out)["kinds"]
        rows = [each for kind in kinds for several in kind["sites"].values() for each in several]
        return {each["reason"].split(" on: ", 1)[1] for each in rows if f"{each['fusion']} is off" in each["reason"]}

    plain = "it was not benchmarked in sglang without compilation"
    decode = next(row for row in shipped().measurement if row.engine == "sglang" and row.but)
    elsewhere = decode.figure.replace(f"{decode.but}: ", f"{decode.but}; on other layers: ")
    assert reasons("deepseek-v3", "sm90") == {decode.figure, elsewhere, plain} and decode.fusions == ("mla_decode",)
    assert "it was measured faster on sm90, where nothing is compiled" in reasons("deepseek-v3", "gfx942")
    assert reasons("qwen3-32b-fp8", "sm90") == set()


def test_a_quant_method_that_says_nothing_of_the_class_leaves_it_open():
    (kind,) = find_model("deepseek-v3").quant.values()
    for method, of in ((None, "nothing says the checkpoint's quant_method"), ("torchao", "is torchao")):
        refuses = engine_of(kinds=[attrs.evolve(kind, method=method)]).refuses
        assert refuses[GROUP].startswith("not known: ") and of in refuses[GROUP] and ADD not in refuses
    assert GROUP not in engine_of(kinds=[kind]).refuses


def test_where_nothing_is_on_the_names_of_what_was_measured_come_last_with_their_figures(run, monkeypatch):
    monkeypatch.delenv("LAYERFUSE_FUSIONS", raising=False)
    kimi = ("plan", "kimi-k2.5", "--tp", 8, "--target", "h100", "--engine", "sglang")
    together = " ".join(run(*kimi).out.split())
    decode = next(row for row in shipped().measurement if row.engine == "sglang" and row.but)
    assert decode.against is not None  # so a name without a sign, which switches the rest off, is not what was measured
    last = together.rpartition("LAYERFUSE_FUSIONS=+mla_decode switches on what was measured: ")[2]
    assert last.startswith(f"{attrs.evolve(decode, but=None).figure}; for 60 sites that was on other layers")
    monkeypatch.setenv("LAYERFUSE_FUSIONS", "+mla_decode")
    assert "switches on what" not in run(*kimi).out


def test_a_word_that_sglang_does_not_know_leaves_its_switch_as_by_default(monkeypatch):
    monkeypatch.setenv("SGLANG_ENABLE_JIT_DEEPGEMM", "off")
    assert engine_of(target=Target.named("sm90")).block_linears is None
    assert ("SGLANG_ENABLE_JIT_DEEPGEMM", "found", "off, as by default") in list(switched())
