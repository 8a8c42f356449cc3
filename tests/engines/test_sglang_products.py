"""fp8 products of few tokens inside SGLang: its own layers and linear methods, built on a CPU, with plain torch in the place of its kernels.

Run by `make test-engines` in an environment of its own.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("sglang_layers")
import torch
from reports import Said
from sglang.srt.layers.quantization import fp8_utils
from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod, Fp8MoEMethod
from sglang.srt.model_executor.runner_utils import capture_mode
from sglang_fixtures import Kernels
from test_sglang_handover import ADD, NORM, deepseek, inside, latents, llama, mlps, products
from test_sglang_plugin import runner_of
from torch import Tensor, nn

from layerfuse.adapters.linear_quant import activation_quant_of
from layerfuse.engines.compiled_module import CompiledModule
from layerfuse.engines.loading import NotFusedError
from layerfuse.engines.native import NotNativeError, native_function, native_methods
from layerfuse.engines.rank_report import rank_report_of
from layerfuse.engines.sglang import loading, plugin
from layerfuse.engines.sglang import products as few
from layerfuse.engines.sglang.loading import compiled_module_of
from layerfuse.engines.sglang.seams import SEAMS
from layerfuse.engines.sglang.switches import JIT_DEEPGEMM, block_linears
from layerfuse.engines.standing import AWAY, at_first_call
from layerfuse.engines.switches import SWITCHES
from layerfuse.fusion import Target
from layerfuse.fusion.backends import counting
from layerfuse.fusion.catalog.few_token_linear import BLOCKS
from layerfuse.fusion.linear_ops import MOST

QUANTISED = (f"{ADD}_group_quant", f"{NORM}_group_quant")
LINEAR, BLOCK_LINEAR = "group_quant_linear", "block_scaled_linear"
CALLED = {
    f"model.layers.{layer}.{path}:linear" for layer in (0, 1) for path in ("self_attn.qkv_proj", "mlp.gate_up_proj")
}
SITES = CALLED | {
    f"model.layers.{layer}.{path}:linear" for layer in (0, 1) for path in ("self_attn.o_proj", "mlp.down_proj")
}
OWN = "triton_w8a8_block_fp8_linear"
"""What SGLang multiplies by on a CPU."""


@pytest.fixture(autouse=True)
def asked(fresh: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few tokens, and no fusion in front."""
    monkeypatch.setenv("LAYERFUSE_FUSIONS", BLOCKS)
    with mock.patch.object(few, "native_function", return_value=native_methods()):  # which would find the plain torch
        yield


def planned(model: nn.Module, **arguments: Any) -> CompiledModule | None:
    return compiled_module_of(runner_of(model, **arguments), plugin.options_here())


def put_in(model: nn.Module) -> CompiledModule:
    """As it is done when a model is loaded."""
    compiled = planned(model)
    assert compiled is not None
    few.put_in(compiled, model)
    at_first_call(model, compiled, SEAMS, lambda _: None, lambda _: None)
    return compiled


def ran(model: nn.Module, kernels: Kernels, tokens: int) -> tuple[Tensor, Counter[str], int]:
    """What a model gives, which linears of layerfuse's it called, and what SGLang quantised."""
    kernels.quantised = 0
    with counting() as calls:
        found = model.forward(torch.arange(tokens))
    return found, Counter({name: calls[name] for name in (LINEAR, BLOCK_LINEAR) if calls[name]}), kernels.quantised


@pytest.mark.parametrize(("fusions", "op"), [((), LINEAR), (QUANTISED, BLOCK_LINEAR)])
def test_few_tokens_are_multiplied_by_layerfuse_and_more_by_sglang(
    fusions: tuple[str, ...], op: str, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAYERFUSE_FUSIONS", ",".join((BLOCKS, *fusions)))
    monkeypatch.setenv("LAYERFUSE_STRICT", "1")
    model, own = llama("group"), llama("group")
    with mock.patch.object(type(model), "forward", products), torch.inference_mode():
        compiled = put_in(model)
        model.forward(torch.arange(3))
        assert compiled.counted is not None
        assert compiled.counted[op] == 4
        assert compiled.counted[LINEAR] + compiled.counted[BLOCK_LINEAR] == 4
        said_by = rank_report_of(compiled, 0)
        assert sorted(said_by.fused[BLOCKS]) == sorted(CALLED)
        assert (said_by.called or {})[BLOCKS] == 4
        assert said_by.missed[BLOCKS].keys() == SITES - CALLED  # `products` calls no others
        assert not said_by.problems
        for tokens, called, quantised in ((5, 4, 0), (MOST, 4, 0), (MOST + 1, 0, 0 if fusions else 4)):
            found, linears, of_sglang = ran(model, kernels, tokens)
            assert (linears, of_sglang) == (Counter({op: called} if called else {}), quantised)
            torch.testing.assert_close(found, own.forward(torch.arange(tokens)), rtol=2e-2, atol=2e-2)


def test_a_first_run_of_many_tokens_counts_the_linears(kernels: Kernels) -> None:
    """SGLang's first is of as many as its largest graph has: the op gives them to SGLang's product."""
    model, own = llama("group"), llama("group")
    with mock.patch.object(type(model), "forward", products), torch.inference_mode():
        compiled = put_in(model)
        found, linears, quantised = ran(model, kernels, MOST + 1)
        assert (linears, quantised) == (Counter({LINEAR: 4}), 4)
        assert compiled.counted is not None
        assert compiled.counted[LINEAR] == 4
        torch.testing.assert_close(found, own.forward(torch.arange(MOST + 1)), rtol=0, atol=0)


def test_once_sglang_has_captured_graphs_what_it_launches_itself_is_its_own(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    """Where nothing else is named that stands at modules."""
    model, own = llama("group"), llama("group")
    monkeypatch.setattr(type(model), "forward", lambda self, ids: self.model(ids))
    monkeypatch.setattr(type(model.model), "forward", inside)
    with torch.inference_mode():
        put_in(model)
        model.forward(torch.arange(3))
        for _ in range(2):
            with mock.patch.object(capture_mode, "is_capture_mode", True):
                assert ran(model, kernels, 5)[1:] == (Counter({LINEAR: 4}), 0)
            found, *called = ran(model, kernels, 5)
            assert called == [Counter(), 4]
            assert torch.equal(found, own.forward(torch.arange(5)))
    assert said.messages().count(AWAY % "SGLang") == 1


INNER = ("silu_mul_group_quant", "mla_dual_rms_norm_group_quant")


def inner(self: Any, ids: Tensor, *more: Any) -> Tensor:
    return torch.cat([mlps(self, ids, *more), latents(self, ids, *more)], -1)


def test_what_mlps_and_latents_have_quantised_is_multiplied_too(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a dense layer, and in one with shared experts."""
    monkeypatch.setenv("LAYERFUSE_FUSIONS", ",".join((BLOCKS, *INNER)))
    model, own = deepseek(), deepseek()
    with mock.patch.object(type(model), "forward", inner), torch.inference_mode():
        compiled = put_in(model)
        model.forward(torch.arange(3))
        mixed = [f"model.layers.1.mlp.shared_experts.{path}:linear" for path in ("gate_up_proj", "down_proj")]
        assert {*mixed} < {each.site for each in compiled.plan.expected(BLOCKS)}
        assert len(compiled.plan.expected(BLOCKS)) == 10
        found, linears, quantised = ran(model, kernels, 5)
        assert (linears, quantised) == (Counter({LINEAR: 2, BLOCK_LINEAR: 4}), 0)
        torch.testing.assert_close(found, own.forward(torch.arange(5)), rtol=2e-2, atol=2e-2)
        report = rank_report_of(compiled, 0)
        assert {name: len(sites) for name, sites in report.fused.items()} == {BLOCKS: 6, INNER[0]: 2, INNER[1]: 2}
        assert not report.problems


def test_what_others_ask_of_the_function_is_what_it_was(kernels: Kernels) -> None:
    """SGLang looks which one it is when weights are loaded again; adapters read how it quantises."""
    model = llama("group")
    linear = model.model.layers[0].mlp.gate_up_proj
    before, quant = linear.quant_method.w8a8_block_fp8_linear, activation_quant_of(linear)
    put_in(model)
    now = linear.quant_method.w8a8_block_fp8_linear
    assert now is not before
    assert (now.func, now.__name__) == (before, OWN)
    assert activation_quant_of(linear) == quant


def test_a_call_that_layerfuse_has_no_product_for_is_sglangs(kernels: Kernels) -> None:
    model = llama("group")
    compiled = put_in(model)
    compiled.counted = Counter()
    linear = model.model.layers[0].mlp.gate_up_proj
    x, bias = torch.ones(3, 256, dtype=torch.bfloat16), torch.ones(512, dtype=torch.bfloat16)

    def linears(x: Any, bias: Any = None) -> Counter[str]:
        with counting() as calls, torch.inference_mode():
            linear.quant_method.apply(linear, x, bias)
        return Counter({name: calls[name] for name in (LINEAR, BLOCK_LINEAR) if calls[name]})

    assert linears(x) == Counter({LINEAR: 1})
    assert linears(x, bias) == linears(x.float()) == linears(x.t().contiguous().t()) == Counter()
    with mock.patch.dict(linear._parameters, weight_scale_inv=torch.ones(4, 2, dtype=torch.int32)):
        assert linears(x) == Counter()  # as where SGLang packs scales


@pytest.mark.parametrize("name", few.OWN)
def test_all_that_sglangs_function_calls_is_held_to_its_source(name: str) -> None:
    stood = native_function(few.MODULE, name)
    assert stood.changed() is None
    for call in ("w8a8_block_fp8_matmul_triton", "sglang_per_token_group_quant_fp8"):
        with mock.patch.object(fp8_utils, call, theirs):
            assert "is from test_sglang_products" in str(stood.changed())
            with pytest.raises(NotNativeError, match="it is from test_sglang_products"):
                native_function(few.MODULE, name)


def test_what_is_put_there_later_is_called(kernels: Kernels, said: Said) -> None:
    model = llama("group")
    compiled = put_in(model)
    linear, method = model.model.layers[0].mlp.gate_up_proj, model.model.layers[0].mlp.gate_up_proj.quant_method
    compiled.counted = Counter()
    with (
        mock.patch.object(few.Native, "changed", return_value="it is from elsewhere"),
        counting() as calls,
        torch.inference_mode(),
    ):
        method.apply(linear, torch.ones(3, 256, dtype=torch.bfloat16))
    assert (calls[LINEAR], kernels.quantised > 0) == (0, True)
    assert few.GONE % "it is from elsewhere" in said.messages()
    (site,) = compiled.placements[BLOCKS].missed
    assert site.startswith("model.layers.0") and compiled.placements[BLOCKS].missed[site] == "it is from elsewhere"


# ---- linears that are left


def why_left(model: nn.Module, said: Said, **arguments: Any) -> str:
    """Why all are."""
    assert not planned(model, **arguments).active
    (line,) = said.messages()
    before = f"layerfuse: {BLOCKS} is asked for, and has no site in LlamaForCausalLM: "
    assert line.startswith(before)
    return line.removeprefix(before)


def methods(model: nn.Module) -> list[Any]:
    held = (vars(module).get("quant_method") for module in model.modules())
    return [method for method in held if isinstance(method, Fp8LinearMethod)]


@pytest.mark.parametrize("arguments", [{"enable_lora": True}, {"lora_paths": ["somewhere"]}])
def test_lora_keeps_them(arguments: Any, kernels: Kernels, said: Said) -> None:
    assert why_left(llama("group"), said, **arguments) == "LoRA may add to it"


def test_a_switch_of_sglangs_keeps_them(kernels: Kernels, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_OPT_MOE_QUANT_ONCE", "1")
    assert "asks which function multiplies" in why_left(llama("group"), said)


def test_another_gpu_keeps_them(kernels: Kernels, said: Said) -> None:
    with mock.patch.object(loading, "target_of", return_value=Target(arch="sm100", vendor="nvidia", fp8="e4m3fn")):
        assert "timed on sm90 alone" in why_left(llama("group"), said)


def theirs(**given: Any) -> Any:
    return given


def test_a_function_of_somebody_elses_keeps_them(kernels: Kernels, said: Said) -> None:
    model = llama("group")
    for method in methods(model):
        method.w8a8_block_fp8_linear = theirs
    assert "theirs" in why_left(model, said)


def test_another_patched_what_it_calls(kernels: Kernels, said: Said) -> None:
    with mock.patch.object(few, "native_function", side_effect=NotNativeError("its product", "elsewhere")):
        assert why_left(llama("group"), said) == "its product is not SGLang's own: it is from elsewhere"


def test_packed_scales_keep_a_linear(kernels: Kernels) -> None:
    model = llama("group")
    linear = model.model.layers[0].mlp.gate_up_proj
    linear.weight_scale_inv = nn.Parameter(torch.ones(512, 1, dtype=torch.int32), requires_grad=False)
    compiled = put_in(model)
    site = "model.layers.0.mlp.gate_up_proj:linear"
    assert {each.site for each in compiled.plan.expected(BLOCKS)} == SITES - {site}
    assert linear.quant_method.w8a8_block_fp8_linear.__globals__["__name__"] == few.MODULE


def test_a_function_that_computes_something_else_stays(kernels: Kernels, said: Said) -> None:
    def other(*args: Any, **kwargs: Any) -> Tensor:
        return 2 * kernels.block_product(*args, **kwargs)

    model = llama("group")
    with (
        mock.patch.object(fp8_utils, "w8a8_block_fp8_matmul_triton", other),
        mock.patch.object(type(model), "forward", products),
        torch.inference_mode(),
    ):
        compiled = put_in(model)
        model.forward(torch.arange(3))
    assert {method.w8a8_block_fp8_linear.__globals__["__name__"] for method in methods(model)} == {few.MODULE}
    missed = rank_report_of(compiled, 0).missed[BLOCKS]
    assert missed.keys() == SITES
    assert all("computes something else" in why for why in missed.values())
    assert any(
        "left to SGLang for few tokens: what runs there computes something else" in line for line in said.messages()
    )


def test_strict_stops_where_all_are_left(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYERFUSE_STRICT", "1")
    with pytest.raises(NotFusedError, match=rf"{BLOCKS} is asked for, and has no site .*LoRA may add"):
        planned(llama("group"), enable_lora=True)


# ---- SGLang's own switches


@pytest.mark.parametrize("name", [name for name in SWITCHES if name.startswith("SGLANG_")])
def test_sglang_reads_its_switches_as_the_doctor_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.environ import EnvBool, envs
    from sglang.srt.utils import get_bool_env_var

    switch, field = SWITCHES[name], getattr(envs, name, None)
    read = field.get if isinstance(field, EnvBool) else lambda: get_bool_env_var(name)
    monkeypatch.delenv(name, raising=False)
    if switch.reads == "name":
        assert field.get() is None
        monkeypatch.setenv(name, "triton")
        assert field.get() == "triton"
        return
    assert read() is switch.default
    monkeypatch.setenv(name, "0" if switch.default else "1")
    assert read() is not switch.default


@pytest.mark.parametrize(
    ("backend", "deep_gemm", "name"),
    [
        ("auto", True, "deepgemm_w8a8_block_fp8_linear_with_fallback"),
        ("auto", False, "triton_w8a8_block_fp8_linear"),
        ("deep_gemm", True, "deepgemm_w8a8_block_fp8_linear_with_fallback"),
        ("triton", True, "triton_w8a8_block_fp8_linear"),
        ("flashinfer_deepgemm", True, "flashinfer_deepgemm_w8a8_block_fp8_linear_with_fallback"),
    ],
)
def test_sglang_leaves_linears_in_blocks_on_hopper_to_whom_a_plan_says(
    backend: str, deep_gemm: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8_utils, "FP8_GEMM_RUNNER_BACKEND", fp8_utils.Fp8GemmRunnerBackend(backend))
    monkeypatch.setattr(fp8_utils.deep_gemm_wrapper, "ENABLE_JIT_DEEPGEMM", deep_gemm)
    monkeypatch.setattr(fp8_utils, "is_flashinfer_available", lambda: True)
    hopper = SimpleNamespace(is_sm90=True, is_sm100=False, is_sm120=False, is_blackwell=False)
    monkeypatch.setattr(fp8_utils, "get_platform", lambda: hopper)
    monkeypatch.setenv(JIT_DEEPGEMM, "true" if deep_gemm else "false")
    assert fp8_utils.dispatch_w8a8_block_fp8_linear([128, 128]).__name__ == name
    by = block_linears("sm90", backend) or "DeepGEMM"  # where it is installed
    assert name.startswith({"DeepGEMM": "deepgemm_", "Triton": "triton_", "FlashInfer": "flashinfer_deepgemm_"}[by])


@pytest.mark.parametrize(("ranks", "width"), [(16, 1600), (8, 3200)])
def test_sglang_refuses_a_share_in_parts_of_blocks_as_plans_say(ranks, width):
    layer = SimpleNamespace(tp_group=SimpleNamespace(world_size=ranks))
    said = pytest.raises(ValueError, match=f"{width} is not divisible") if width % 128 else contextlib.nullcontext()
    with said:
        fp8_utils.validate_fp8_block_shape(layer, ranks * width, 5120, width, [5120], [128, 128])


@pytest.mark.parametrize(("ranks", "width"), [(8, 192), (4, 384)])
def test_sglang_refuses_a_share_of_experts_in_parts_of_blocks_as_plans_say(ranks: int, width: int) -> None:
    config = Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[128, 128])
    layer = nn.Module()
    layer.moe_tp_size, layer.moe_runner_config = ranks, SimpleNamespace(is_gated=True)
    of = 2, 256, width, True, config, False, True, False, torch.bfloat16
    said = pytest.raises(ValueError, match=f"{width} is not divisible") if width % 128 else contextlib.nullcontext()
    with said:
        Fp8MoEMethod.create_fp8_moe_weight_(layer, *of, weight_loader=None)
