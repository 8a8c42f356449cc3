"""The job itself is run by `make verify`; here one model runs through it, and what can go wrong is provoked."""

import json

import pytest

from layerfuse import registry, verify
from layerfuse.fusion.backends import BackendError
from layerfuse.fusion.config import FusionConfigError


def test_one_of_each_kind_and_at_least_two_layers():
    few = verify.one_of_each(registry.model("kimi-linear-48b-a3b"))
    assert few.kind_at() == ["kda", "mla"]
    assert verify.one_of_each(registry.model("deepseek-v3")).kind_at() == ["mla", "mla"]


@pytest.mark.usefixtures("op_by_op")
def test_a_model_is_verified_and_the_result_written(run, tmp_path):
    answer = run("verify", "deepseek-v3", "--json", tmp_path / "out.json")
    assert answer.code == 0, answer.out + answer.err
    assert "mla_dual_rms_norm: 2 expected, 2 matched" in answer.out
    assert "add_rms_norm: 4 expected, 4 matched" in answer.out
    assert "4 ran fused in one call, by the backend reference" in answer.out
    assert "1 of 1 models verified: specs as declared, 6 of 6 expected fusions matched" in answer.out
    assert answer.err.count("deepseek-v3: ") == verify.steps_per_model()
    (result,) = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert result["ok"] is True
    assert [c["dtype"] for c in result["comparisons"]] == ["float32", "bfloat16"]


@pytest.mark.usefixtures("op_by_op")
def test_a_delta_net_is_compiled_but_for_its_recurrence(run, monkeypatch):
    monkeypatch.setattr(verify, "TOLERANCES", {"float32": 1e-5})
    answer = run("verify", "kimi-linear-48b-a3b")
    assert answer.code == 0, answer.out + answer.err
    assert "gated_rms_norm: 1 expected, 1 matched" in answer.out
    assert "add_rms_norm: 4 expected, 4 matched" in answer.out
    assert (
        "kept out of compilation, as one op each: chunk_kimi_delta_attention, recurrent_kimi_delta_attention"
        in answer.out
    )


@pytest.mark.usefixtures("op_by_op")
def test_a_fusion_that_does_not_happen_is_a_problem(run, monkeypatch):
    from layerfuse.fusion.rewrite import Pipeline

    monkeypatch.setattr(Pipeline, "rewrite", lambda self, graph: None)
    monkeypatch.setattr(verify, "TOLERANCES", {"float32": 1e-5})
    answer = run("verify", "deepseek-v3")
    assert answer.code == 1
    assert "not verified" in answer.out
    assert "0 of 1 models verified: 0 of 6 expected fusions matched" in answer.out


def test_a_gpu_that_is_not_there_is_said_before_anything_runs(run):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    answer = run("verify", "deepseek-v3", "--device", "cuda")
    assert answer.code == 1
    assert "torch finds no GPU" in answer.err


def test_no_compiler_is_said_with_the_remedy(run, monkeypatch):
    import torch._inductor.cpp_builder as builder

    def none():
        raise RuntimeError("no compiler")

    monkeypatch.setattr(builder, "get_cpp_compiler", none)
    answer = run("verify", "deepseek-v3")
    assert answer.code == 1
    assert "finds no C++ compiler" in answer.err


@pytest.mark.parametrize(
    ("variable", "typo", "meant", "error"),
    [
        ("LAYERFUSE_FUSIONS", "mla_dual_rmsnorm", "mla_dual_rms_norm", FusionConfigError),
        ("LAYERFUSE_BACKEND", "trition", "triton", BackendError),
    ],
)
def test_a_typo_in_the_environment_is_told_before_anything_runs(run, monkeypatch, variable, typo, meant, error):
    monkeypatch.setenv(variable, typo)
    monkeypatch.setattr(verify, "require", lambda *_: pytest.fail("work has started"))
    monkeypatch.setattr(verify, "one_of_each", lambda *_: pytest.fail("a model is built"))
    answer = run("verify", "deepseek-v3")
    assert answer.code == 2
    assert f"did you mean '{meant}'" in answer.err
    with pytest.raises(error):
        verify.verify(registry.model("deepseek-v3"))
