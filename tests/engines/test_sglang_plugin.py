"""layerfuse inside SGLang: norms of real models, built on a CPU, with fused ops in them; what is not SGLang's own is left alone.

Run by `make test-engines` in an environment of its own. A whole engine is in `test_sglang_engine.py`.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("sglang_layers")
from reports import Said

from sglang_layers import build_model, build_of  # isort: skip  (before sglang)
import torch
from helpers import outside_package
from sglang.kernels import fused_op
from sglang.kernels.ops.attention.fla.fused_norm_gate import FusedRMSNormGated
from sglang.kernels.ops.quantization import fp8_kernel
from sglang.srt.layers import layernorm
from sglang.srt.layers.layernorm import GemmaRMSNorm, RMSNorm
from sglang.srt.model_executor import model_runner
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch import nn

from layerfuse import registry
from layerfuse.adapters.errors import ArgumentError
from layerfuse.engines import process
from layerfuse.engines.compiled_module import CompiledModule
from layerfuse.engines.loading import NotFusedError
from layerfuse.engines.native import NotNativeError, native
from layerfuse.engines.options import OptionsError
from layerfuse.engines.plugins import NotHereError
from layerfuse.engines.sglang import facts, plugin
from layerfuse.engines.sglang.hooks import LOADED
from layerfuse.engines.sglang.host import SGLANG
from layerfuse.engines.sglang.loading import compiled_module_of
from layerfuse.engines.sglang.seams import SEAMS
from layerfuse.engines.standing import Standing, at_first_call
from layerfuse.fusion.backends import counting
from layerfuse.fusion.catalog import FUSIONS
from layerfuse.fusion.config import FusionConfigError
from layerfuse.fusion.ops.quantisation import Scaling, scaling
from layerfuse.fusion.policy import Measurement, Policy

ADD = "add_rms_norm"
FIRST, SECOND = "model.layers.1.input_layernorm", "model.layers.0.post_attention_layernorm"
SITES = {"model.layers.0:post_attention", "model.layers.1:input", "model.layers.1:post_attention", "model:final"}
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip


def llama() -> nn.Module:
    model, _ = build_of(LLAMA, tp=1, rank=0, patch={}, device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.rand(parameter.shape, generator=generator).to(parameter.dtype)
    return model


def runner_of(model: nn.Module, **arguments: Any) -> Any:
    """What is asked of SGLang's `ModelRunner`."""
    given = {
        "pp_size": 1,
        "tp_size": 1,
        "enable_torch_compile": False,
        "enable_deterministic_inference": False,
        "enable_lora": None,
        "lora_paths": None,
        "fp8_gemm_runner_backend": "auto",
        **arguments,
    }
    config = SimpleNamespace(quantization=None, model_path="a/model")
    return SimpleNamespace(
        model=model, is_draft_worker=False, server_args=SimpleNamespace(**given), model_config=config
    )


def standing_in(model: nn.Module) -> Standing:
    compiled = compiled_module_of(runner_of(model), plugin.options_here())
    assert isinstance(compiled, CompiledModule)
    standing = Standing(compiled=compiled, model=model, seams=SEAMS)
    standing.put_in()
    return standing


def called(norm: nn.Module, *args: Any) -> tuple[Any, int]:
    """What a norm gives, and how often the fused op was called."""
    with counting() as calls, torch.inference_mode():
        return norm(*(each.clone() if isinstance(each, torch.Tensor) else each for each in args)), calls[ADD]


def rows(width: int = 64, tokens: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, residual = torch.randn(2, tokens, width, generator=generator).bfloat16()
    return x, residual


def test_every_norm_that_adds_is_one_call_of_the_op() -> None:
    model, own = llama(), llama()
    standing = standing_in(model)
    assert (set(standing.stands), standing.missed) == (SITES, {})
    for path in (FIRST, SECOND, "model.norm"):
        found, times = called(model.get_submodule(path), *rows())
        expected, none = called(own.get_submodule(path), *rows())
        assert (times, none) == (1, 0)
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_the_options_of_a_norm_are_sglangs() -> None:
    """The boundary of a layer passes its third argument, which is None for most models."""
    model, own = llama(), llama()
    standing_in(model)
    norm, theirs = model.get_submodule(FIRST), own.get_submodule(FIRST)
    assert called(norm, *rows(), None)[1] == 1
    x, residual = rows()
    found, times = called(norm, x, residual, torch.ones_like(x))
    assert times == 0
    torch.testing.assert_close(found, called(theirs, x, residual, torch.ones_like(x))[0])
    assert called(norm, x)[1] == called(norm, x, None)[1] == 0
    torch.testing.assert_close(called(norm, x)[0], called(theirs, x)[0])


def test_the_norms_of_qwen3_next_have_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYERFUSE_FUSIONS", f"{ADD},gated_rms_norm")
    model = build_model("qwen3-next", num_hidden_layers=4)
    standing = standing_in(model)
    assert not standing.missed
    assert {site.rpartition(":")[2] for site in standing.stands} == {"input", "post_attention", "final", "output"}
    assert {type(module) for module in standing.inside.values()} == {GemmaRMSNorm, FusedRMSNormGated}


def norms_alone(self: Any, ids: torch.Tensor, *_: Any) -> Any:
    """All that adds in a forward of a Llama, without attention and MLPs."""
    first, second = self.model.layers
    x, residual = rows(tokens=len(ids))
    for norm in (
        first.post_attention_layernorm,
        second.input_layernorm,
        second.post_attention_layernorm,
        self.model.norm,
    ):
        x, residual = norm(x, residual) if len(ids) else (x, residual)
    return x


def test_a_batch_without_tokens_is_no_first_run(said: Said) -> None:
    """Under data-parallel attention a rank without requests runs along, and its norms are skipped."""
    model, done = llama(), []
    with mock.patch.object(type(model), "forward", norms_alone), torch.inference_mode():
        compiled = compiled_module_of(runner_of(model), plugin.options_here())
        at_first_call(model, compiled, SEAMS, lambda _: None, done.append)
        held = model.forward  # as where SGLang makes its CUDA graphs
        model.forward(torch.arange(0))
        assert not done
        model.forward(torch.arange(3), torch.empty(0))  # what else is empty, of no pictures say, tells of no tokens
        assert done == [compiled]
        model.forward(torch.arange(3))
        held(torch.arange(3))
    assert done == [compiled]
    assert (compiled.counted[ADD], len(compiled.report().of(ADD).missed)) == (4, 0)


def test_a_wrong_kernel_is_named_with_its_site(
    tmp_path: Path, said: Said, standing: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights: list[int] = []
    standing(ADD, 1.5, at=lambda *given: given[2].data_ptr() in weights)
    monkeypatch.setenv("LAYERFUSE_SHADOW", "1")
    with mock.patch("sglang.srt.models.llama.LlamaForCausalLM.forward", norms_alone), torch.inference_mode():
        model = loaded()
        weights.append(model.get_submodule(FIRST).weight.data_ptr())
        with alone():
            model.forward(torch.arange(3))
    ((_, module),) = json.loads((tmp_path / "report.json").read_text())["modules"].items()
    found = {each["site"]: each for each in module["shadow"]}
    assert found.keys() == SITES and {each["calls"] for each in found.values()} == {1}
    assert [site for site, each in found.items() if each["beyond"]] == ["model.layers.1:input"]
    assert any(
        line.startswith(f"layerfuse: {ADD} at model.layers.1:input (at_hand): call 1: normed") for line in said()
    )
    for wrong in ("some", "-1"):
        monkeypatch.setenv("LAYERFUSE_SHADOW", wrong)
        with pytest.raises(ArgumentError, match=f"LAYERFUSE_SHADOW={wrong}: expected how many calls"):
            plugin.options_here()


def test_a_site_at_which_something_else_runs_is_left_to_the_engine_with_its_fallback() -> None:
    standing = standing_in(llama())
    assert standing.left_to_engine() == set()
    first, second, *_ = sorted(SITES)
    standing.stands[first] = "rms_norm"  # in the place of what is expected
    standing.missed[first] = "no place for it"
    assert standing.left_to_engine() == set()
    for site in (first, second):
        standing._refuse(site, "it computes something else")
    assert standing.left_to_engine() == {first, second}


def test_another_module_in_the_place_of_one_with_an_op_is_said(said: Said) -> None:
    """SGLang calls the model's forward past its hooks, and what is inside of it by them."""
    model = llama()
    standing_in(model).watch()
    model.model.layers[1].input_layernorm = RMSNorm(64)
    with contextlib.suppress(AttributeError, TypeError):
        model.model(None)
    assert said.messages() == [f"layerfuse: a fused op is not called any more: another module stands at {FIRST}"]


# ---- what is not SGLang's own


def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
    return torch.zeros_like(args[0])


def patched_method(model: nn.Module) -> Any:
    return mock.patch.object(RMSNorm, "forward_native", functools.wraps(RMSNorm.forward_native)(theirs))


def patched_dispatch(model: nn.Module) -> Any:
    return mock.patch.object(fused_op.BaseFusedOp, "forward", functools.wraps(fused_op.BaseFusedOp.forward)(theirs))


def platform(model: nn.Module) -> Any:
    """An out-of-tree platform with a norm of its own."""
    return mock.patch.multiple(
        fused_op.BaseFusedOp, _resolve_forward_method=lambda self: theirs.__get__(self), create=False
    )


def pinned(model: nn.Module) -> Any:
    norm = model.get_submodule(FIRST)
    norm._forward_method = functools.partial(theirs, norm)
    return mock.MagicMock()


def derived(model: nn.Module) -> Any:
    model.get_submodule(FIRST).__class__ = type("RMSNorm", (RMSNorm,), {"__module__": "neighbour"})
    return mock.MagicMock()


def instead(model: nn.Module) -> Any:
    norm = model.get_submodule(FIRST)
    norm.forward = functools.partial(theirs, norm)
    return mock.MagicMock()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (patched_method, "forward_native is not SGLang's own: it is from test_sglang_plugin"),
        (patched_dispatch, "forward is not SGLang's own: it is from test_sglang_plugin"),
        (platform, "is not SGLang's own: it is from test_sglang_plugin"),
        (pinned, "_forward_method of this RMSNorm is not SGLang's own: it is from test_sglang_plugin"),
        (derived, "neighbour.RMSNorm is no class of SGLang's that layerfuse knows a place in"),
        (instead, "the forward of this RMSNorm is not SGLang's own: it is from test_sglang_plugin"),
    ],
)
def test_a_neighbours_norm_is_left_alone_and_named(change: Callable[[nn.Module], Any], why: str) -> None:
    model = llama()
    with change(model):
        standing = standing_in(model)
        norm = model.get_submodule(FIRST)
        assert why in standing.missed["model.layers.1:input"]
        assert "model.layers.1:input" not in standing.stands
        assert called(norm, *rows())[1] == 0


def test_a_norm_that_is_patched_later_is_the_neighbours_from_then_on(said: Said) -> None:
    model = llama()
    standing_in(model)
    norm = model.get_submodule(FIRST)
    assert called(norm, *rows())[1] == 1
    with patched_method(model):
        norm._forward_method = None  # as in an engine that has not run yet
        found, times = called(norm, *rows())
    assert (times, found.count_nonzero()) == (0, 0)
    (line,) = said.messages()
    assert line.startswith("layerfuse: a fused op is not called any more: ")


@pytest.mark.parametrize(
    "changed",
    [
        {"fp32_residual": True},
        {"cast_x_before_out_mul": True},
        {"override_orig_dtype": torch.float32},
        {"variance_size_override": 32},
        {"has_weight": False},
        {"x_pad_to_multiple": 256},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_norm_that_does_more_is_left_alone(changed: dict[str, Any]) -> None:
    model = llama()
    vars(model.get_submodule(FIRST)).update(changed)
    assert standing_in(model).missed == {"model.layers.1:input": "this RMSNorm does more than its spec says"}


def test_a_norm_with_which_sglangs_kernel_quantises_is_left_alone() -> None:
    """FlashInfer's, by the static scale of the linear behind it: what that gives is no plain tensor."""
    with (
        mock.patch.object(layernorm, "_flashinfer_rmsnorm_quant_available", True),
        mock.patch.object(layernorm, "_fp8_static_input_scale", side_effect=lambda linear: linear and torch.ones(1)),
    ):
        assert set(standing_in(llama()).missed) == SITES - {"model:final"}


@pytest.mark.parametrize(
    ("answer", "why"),
    [(lambda _: 1 / 0, "raises an error"), (lambda _: torch.ones(2), "is tensor"), (lambda _: True, "is True")],
)
def test_a_value_that_a_class_comes_to_answer_for_is_another(answer: Callable[..., Any], why: str) -> None:
    """Whatever it answers: an engine's step is not ended by the question."""
    norm = llama().get_submodule(FIRST)
    norm.variance_epsilon = 1.0
    stood = native(norm)
    assert stood.changed() is None
    with mock.patch.object(RMSNorm, "variance_epsilon", property(answer), create=True):
        assert f"variance_epsilon of this RMSNorm was 1.0, and {why}" in str(stood.changed())


def test_kernels_of_sglangs_packages_are_its_own() -> None:
    """On a GPU its norms call functions of sgl_kernel, which cannot be run here: they are looked at only."""
    kernels, other = ModuleType("sgl_kernel"), ModuleType("neighbour")
    for module in (kernels, other):
        exec("def fused_add_rmsnorm(*args): ...", vars(module))
    norm = llama().get_submodule(FIRST)
    norm._forward_method = norm.forward_cuda
    with mock.patch.object(layernorm, "fused_add_rmsnorm", kernels.fused_add_rmsnorm, create=True):
        native(norm)
    with (
        mock.patch.object(layernorm, "fused_add_rmsnorm", other.fused_add_rmsnorm, create=True),
        pytest.raises(NotNativeError, match="layernorm:fused_add_rmsnorm is not SGLang's own: it is from neighbour"),
    ):
        native(norm)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [({"enable_torch_compile": True}, "enable_torch_compile"), ({"enable_deterministic_inference": True}, "the batch")],
)
def test_where_sglang_compiles_or_is_deterministic_nothing_is_fused(
    arguments: dict[str, Any], why: str, said: Said, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runner = runner_of(llama(), **arguments)
    at_load(runner)
    line, report = said.messages()
    assert line.startswith("layerfuse: nothing is fused in LlamaForCausalLM: ") and why in line
    assert re.search(rf"{ADD}, .*: cannot stand at \d+ sites: .*{why}", report)
    (module,) = json.loads((tmp_path / "report.json").read_text())["modules"].values()
    reasons = {each["reason"] for each in module["sites"] if (each["fusion"], each["decision"]) == (ADD, "refused")}
    assert len(reasons) == 1 and why in reasons.pop()
    called_ops = called(runner.model.get_submodule(FIRST), *rows())[1]
    assert called_ops == 0
    monkeypatch.setenv("LAYERFUSE_STRICT", "1")
    with pytest.raises(NotFusedError, match=why):
        compiled_module_of(runner, plugin.options_here())


def test_a_fusion_that_has_no_place_is_named(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYERFUSE_FUSIONS", f"{ADD},silu_mul_group_quant,mla_decode")
    model = llama()
    compiled = compiled_module_of(runner_of(model), plugin.options_here())
    assert compiled is not None and list(compiled.unfound) == ["silu_mul_group_quant", "mla_decode"]
    assert [line.partition(":")[2].partition(":")[0] for line in said.messages()] == [
        " silu_mul_group_quant is asked for, and has no site in LlamaForCausalLM",
        " mla_decode is asked for, and has no site in LlamaForCausalLM",
    ]
    monkeypatch.setenv("LAYERFUSE_STRICT", "true")
    with pytest.raises(NotFusedError, match="silu_mul_group_quant is asked for, and has no site"):
        compiled_module_of(runner_of(model), plugin.options_here())


# ---- what is on by default


def measured(*fusions: str, **said: Any) -> Measurement:
    row = {
        "release": "0.5.23",
        "device": "a CPU",
        "arch": "cpu",
        "model": "a model",
        "decode": {"8": (1.06, 1.05, 1.07)},
        **said,
    }
    given = {"date": datetime.date(2026, 1, 1), "commit": "", "file": "", "stage": "", "arm": "", "compiled": False}
    return Measurement(fusions=fusions, engine="sglang", **row, **given)


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Takes rows for those of the library; nothing is asked for."""
    monkeypatch.delenv("LAYERFUSE_FUSIONS")

    def take(*rows: Measurement) -> None:
        for place in ("engines.defaults", "fusion.config", "fusion.planning"):
            monkeypatch.setattr(f"layerfuse.{place}.shipped", lambda: Policy(measurement=rows))

    return take


def loaded(quantization: str | None = None, **arguments: Any) -> nn.Module:
    """A model as it is after layerfuse's hook."""
    runner = runner_of(llama(), **arguments)
    runner.model_config.quantization = quantization
    at_load(runner)
    return runner.model


@pytest.mark.parametrize(
    ("kernel", "how"),
    [("sglang_per_token_group_quant_fp8", Scaling.OF_AMAX), ("_per_token_group_quant_8bit_raw", Scaling.OF_SCALE)],
)
def test_groups_are_quantised_as_sglang_does_where_it_runs(
    kernel: str, how: Scaling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8_kernel, "per_token_group_quant_fp8", getattr(fp8_kernel, kernel))
    loaded()
    assert scaling(False) == how
    assert scaling(False, groups=False) == Scaling.OF_SCALE and scaling(True) == Scaling.POWER_OF_TWO


def at_load(runner: Any) -> None:
    """With what SGLang says of its ranks once they are there."""
    with alone():
        plugin._at_load(lambda runner: None, runner)


def alone() -> Any:
    """What SGLang says of one rank."""
    said = SimpleNamespace(pp_size=1, attn_dp_size=1)
    return mock.patch("sglang.srt.runtime_context.get_parallel", return_value=said)


def test_what_was_measured_faster_is_on_without_a_word(policy: Any, said: Said) -> None:
    policy(measured(ADD))
    model = loaded()
    assert [called(model.get_submodule(path), *rows())[1] for path in (FIRST, SECOND)] == [1, 1]
    assert said.messages() == []


@pytest.mark.parametrize(
    ("row", "quantization"),
    [
        (measured(ADD, decode={"8": (1.06, 0.99, 1.07)}), None),
        (measured(ADD, but="it costs something else"), None),
        (measured(ADD, arch="sm90"), None),
        (measured(ADD, ranks=2), None),
        (measured(f"{ADD}_group_quant"), None),
        (measured(f"{ADD}_group_quant", arch="sm90"), "fp8"),
    ],
    ids=["slower in a cell", "costs", "another GPU", "more ranks", "not quantised", "another GPU, quantised"],
)
def test_where_no_measurement_holds_nothing_is_on_and_one_line_says_so(
    row: Measurement, quantization: str | None, policy: Any, said: Said
) -> None:
    policy(row)
    with mock.patch("layerfuse.engines.sglang.loading.compiled_module_of", side_effect=AssertionError("it planned")):
        model = loaded(quantization)
    assert called(model.get_submodule(FIRST), *rows())[1] == 0
    (line,) = said.messages()
    assert line == f"layerfuse: {plugin.NOTHING_ON}"


def test_where_it_was_measured_is_said_where_that_was_elsewhere(policy: Any, said: Said) -> None:
    policy(measured(ADD, device="another CPU"))
    loaded()
    assert said.messages() == [
        "layerfuse: what is on by default here is what was measured faster with SGLang 0.5.23 on another CPU; SGLang "
        f"{SGLANG.version()} on a CPU was not measured"
    ]


def test_a_gpu_is_said_by_its_name(policy: Any, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    policy(measured(ADD, arch="sm90", device="a GPU"))
    monkeypatch.setattr(plugin, "_arch_of", lambda _: "sm90")
    with mock.patch("torch.cuda.get_device_name", return_value="another GPU"):
        loaded()
    assert f"SGLang 0.5.23 on a GPU; SGLang {SGLANG.version()} on another GPU was not measured" in said.messages()[0]


def test_fusions_of_another_package_are_planned_for_on_a_cpu_too(
    policy: Any, said: Said, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    policy()
    assert ADD in FUSIONS, "read before the package is there"
    monkeypatch.syspath_prepend(outside_package(tmp_path, 1.0))
    loaded()
    line, report = said.messages()
    assert line == "layerfuse: nothing is fused in LlamaForCausalLM: no site of it has a fusion that is on"
    assert "few_token_linear: cannot stand at 8 sites: SGLang compiles no model" in report


def test_a_default_that_has_no_site_stops_no_strict_engine(
    policy: Any, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAYERFUSE_STRICT", "1")
    policy(measured("mla_dual_rms_norm"))
    loaded()
    line, report = said.messages()
    assert line == "layerfuse: nothing is fused in LlamaForCausalLM: no site of it has a fusion that is on"
    assert "few_token_linear: cannot stand at 8 sites: SGLang compiles no model" in report


def test_switched_off_nothing_is_on_whatever_was_measured(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    policy(measured(ADD))
    monkeypatch.setenv("LAYERFUSE_FUSIONS", f"-{ADD}")
    assert called(loaded().get_submodule(FIRST), *rows())[1] == 0


# ---- the hook


def test_ours_stands_around_a_neighbours_hook_at_the_same_place(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    HookRegistry.register(f"{LOADED.module}.{LOADED.path}", lambda self: ran.append("neighbour's"), HookType.REPLACE)
    process.this.off = "tried"
    monkeypatch.setattr(plugin, "options_here", lambda: ran.append("ours") or SimpleNamespace(strict=False))
    plugin.register()
    HookRegistry.apply_hooks()
    model_runner.ModelRunner.load_model(SimpleNamespace())
    assert ran == ["ours", "neighbour's"]


@pytest.mark.parametrize("other", [None, lambda self, model_config: None])
def test_another_release_is_left_alone_with_one_line(other: Any, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    if other is None:
        monkeypatch.delattr(model_runner.ModelRunner, "load_model")
    else:
        monkeypatch.setattr(model_runner.ModelRunner, "load_model", other)
    plugin.register()
    plugin.register()
    (line,) = said.messages()
    assert line.startswith(
        f"layerfuse leaves SGLang {SGLANG.version()} alone (tested with {facts.RELEASE}): {LOADED.place}"
    )
    assert vars(model_runner.ModelRunner).get("load_model") is other
    assert not HookRegistry._hooks


def test_strict_stops_where_sglang_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    process.this.off = "something is expected"
    assert plugin._at_load(lambda runner: None, runner_of(llama())) is None
    monkeypatch.setenv("LAYERFUSE_STRICT", "1")
    with pytest.raises(NotHereError, match=r"leaves SGLang .* alone: something is expected"):
        plugin._at_load(lambda runner: None, runner_of(llama()))


def test_what_goes_wrong_is_one_warning_and_stops_only_where_it_is_strict(
    said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: nn.Module) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(registry, "unknown_in", broken)
    plugin._at_load(lambda runner: None, runner_of(llama()))
    assert said.messages() == ["layerfuse: planning failed: RuntimeError: broken"]
    monkeypatch.setenv("LAYERFUSE_STRICT", "1")
    with pytest.raises(RuntimeError, match="broken"):
        plugin._at_load(lambda runner: None, runner_of(llama()))


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("LAYERFUSE_FUSIONS", "add_rms_nrom", FusionConfigError),
        ("LAYERFUSE_STRICT", "maybe", OptionsError),
        ("LAYERFUSE_REPORT", "/", OptionsError),
    ],
)
def test_options_that_do_not_exist_stop_the_engine_before_it_loads(
    name: str, value: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(error):
        plugin._at_load(lambda runner: pytest.fail("it loaded"), runner_of(llama()))
