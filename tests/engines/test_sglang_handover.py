"""Norms that quantise for the fp8 linears behind them inside SGLang: its own layers and linear methods, built on a CPU.

Its kernels for that are Triton's and sgl_kernel's; here plain torch stands for them, and for nothing else.
Run by `make test-engines` in an environment of its own.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("sglang_layers")
from reports import Said
from sglang_fixtures import FP8, Kernels

from sglang_layers import build_of, published_config  # isort: skip  (before sglang)
import torch
from sglang.kernels.ops.attention.fla import fused_norm_gate
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization import fp8, get_quantization_config
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.model_executor.runner_utils import capture_mode
from test_sglang_plugin import ADD, LLAMA, runner_of
from torch import Tensor, nn

from layerfuse.adapters.activation_quant import ActivationQuant
from layerfuse.engines import calls, standing
from layerfuse.engines.native import NotNativeError, native, native_methods
from layerfuse.engines.sglang import facts, plugin, readers
from layerfuse.engines.sglang.loading import compiled_module_of
from layerfuse.engines.sglang.seams import LINEARS, SEAMS
from layerfuse.engines.standing import AWAY, NOT_TAKEN, at_first_call

NORM = "rms_norm"  # the first layer has no residual to add
SIZES = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
BLOCKS = {"weight_block_size": [128, 128]}
QUANTS: dict[str, dict[str, Any]] = {"group": BLOCKS, "per_token": {}, "static": {"activation_scheme": "static"}}


def config_of(scheme: str, *without: str) -> Fp8Config:
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": list(without)}
    return Fp8Config.from_config({**config, **QUANTS[scheme]})


def fill(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        values = torch.rand(parameter.shape, generator=generator)
        scaled = values / 256 if name.endswith(("scale_inv", "scale")) else values - 0.5
        parameter.data = (values if "norm" in name else scaled).to(parameter.dtype)


def llama(scheme: str) -> nn.Module:
    model, _ = build_of({**LLAMA, **SIZES}, tp=1, rank=0, patch={}, device="cpu", quantised=config_of(scheme))
    fill(model)
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, fp8.Fp8LinearMethod) and scheme != "group":
            module.weight = nn.Parameter(
                module.weight.t(), requires_grad=False
            )  # as SGLang lays it out when it is loaded
            method.use_per_token_if_dynamic = True
            if scheme == "static":
                module.input_scale = nn.Parameter(torch.full((1,), 0.02), requires_grad=False)
    return model


def loaded(model: nn.Module) -> Any:
    """What is planned in a model, as when it is loaded: the ops are put in at its first call."""
    compiled = compiled_module_of(runner_of(model), plugin.options_here())
    at_first_call(model, compiled, SEAMS, lambda _: None, lambda _: None)
    return compiled


def products(self: Any, ids: Tensor, *_: Any) -> Tensor:
    """The norms of a Llama and the linears behind them, without attention and activations."""
    generator = torch.Generator().manual_seed(1)
    x, residual = torch.randn(len(ids), 256, generator=generator).to(self.model.norm.weight.dtype), None
    for layer in self.model.layers:
        if residual is None:
            x, residual = layer.input_layernorm(x), x
        else:
            x, residual = layer.input_layernorm(x, residual)
        x = layer.self_attn.qkv_proj(x)[0][:, :256]
        x, residual = layer.post_attention_layernorm(x, residual)
        x = layer.mlp.gate_up_proj(x)[0][:, :256]
    return x + residual


def inside(self: Any, ids: Tensor, *_: Any) -> Tensor:
    """The same where SGLang calls it: the model in the model, whose hooks are called."""
    return products(SimpleNamespace(model=self), ids)


class Steps:
    """Steps of a Llama with fused ops beside those of one without."""

    def __init__(self) -> None:
        self.model, self.own = llama("group"), llama("group")
        loaded(self.model)
        self.ids = torch.arange(5)
        self.model.forward(self.ids)

    def forwards(self) -> int:
        """How many forwards of instances there are."""
        return sum("forward" in vars(module) for module in self.model.modules())

    def calls(self, model: nn.Module, of: Callable[[CodeType], bool] = lambda _: True) -> int:
        """Of functions, Python's and C's, that are or are called by such code in a step."""
        found = 0

        def count(frame: FrameType, event: str, _: Any) -> None:
            nonlocal found
            found += event in ("call", "c_call") and of(frame.f_code)

        sys.setprofile(count)
        try:
            model.forward(self.ids)
        finally:
            sys.setprofile(None)
        return found


@pytest.fixture
def steps(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    monkeypatch.setenv("LAYERFUSE_FUSIONS", f"{ADD}_group_quant,{NORM}_group_quant")
    cls = type(llama("group"))
    monkeypatch.setattr(cls, "forward", lambda self, ids: self.model(ids))
    monkeypatch.setattr(cls.__init__.__globals__["LlamaModel"], "forward", inside)
    with torch.inference_mode():
        yield Steps()


def test_what_is_looked_at_costs_a_step_little(steps: Steps) -> None:
    """Of the calls that are layerfuse's own beside its ops, no number grows with what is held to the source."""
    steps.model.forward(steps.ids)
    folder = str(Path(standing.__file__).parent)
    ours = steps.calls(steps.model, lambda code: code.co_filename.startswith(folder))
    places = steps.forwards()
    assert places == 4
    assert len(native(steps.own.model.norm).held) > 40
    assert ours < 45 * places


def test_once_sglang_has_captured_graphs_what_it_launches_itself_is_its_own(steps: Steps, said: Said) -> None:
    assert steps.forwards() == 4
    with mock.patch.object(capture_mode, "is_capture_mode", True):
        steps.model.forward(steps.ids)
    assert steps.forwards() == 4
    found = steps.model.forward(steps.ids)
    assert steps.forwards() == 0
    assert torch.equal(found, steps.own.forward(steps.ids))
    assert steps.calls(steps.model) - steps.calls(steps.own) < 30  # in the whole step
    assert said.messages().count(AWAY % "SGLang") == 1
    with mock.patch.object(capture_mode, "is_capture_mode", True):
        kernels_of = steps.model.model.layers[0].mlp.gate_up_proj.quant_method
        steps.model.forward(steps.ids)
        assert (steps.forwards(), "apply" in vars(kernels_of)) == (4, True)


def test_what_is_put_there_while_steps_are_sglangs_stays(steps: Steps, said: Said) -> None:
    with mock.patch.object(capture_mode, "is_capture_mode", True):
        steps.model.forward(steps.ids)
    steps.model.forward(steps.ids)
    norm = steps.model.model.layers[0].post_attention_layernorm

    def theirs(x: Tensor, residual: Tensor) -> Any:
        return type(norm).forward(norm, x * 2, residual)

    norm.forward = theirs
    with mock.patch.object(capture_mode, "is_capture_mode", True):
        steps.model.forward(steps.ids)
    assert (steps.forwards(), norm.forward) == (4, theirs)
    assert any(
        line.startswith("layerfuse: another forward was put where the fused op stands") for line in said.messages()
    )


def mlps(self: Any, ids: Tensor, *_: Any) -> Tensor:
    """The MLPs of a Llama, or of the first layers of a DeepSeek-V3 and its shared experts."""
    x = torch.randn(len(ids), 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    for layer in self.model.layers:
        mlp = getattr(layer.mlp, "shared_experts", layer.mlp)
        product = mlp.act_fn(mlp.gate_up_proj(x)[0])
        # As its forward does, which asks for a group of ranks.
        x = x + mlp.down_proj.quant_method.apply(mlp.down_proj, product, None)
    return x


DEEPSEEK = {
    **published_config("deepseek-v3"), "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 2,
    "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 128, "vocab_size": 64,
}  # fmt: skip


def deepseek() -> nn.Module:
    """A dense layer and one with a shared expert."""
    config = {name: value for name, value in DEEPSEEK.items() if name != "quantization_config"}
    model, _ = build_of(config, tp=1, rank=0, patch={}, device="cpu", quantised=config_of("group"))
    fill(model)
    return model


def latents(self: Any, ids: Tensor, *_: Any) -> Tensor:
    """MLA's norms of the query's and the key's latents, as SGLang calls them, and the linear behind the first."""
    found = []
    for seed, layer in enumerate(self.model.layers):
        mla, generator = layer.self_attn, torch.Generator().manual_seed(seed)
        both = torch.randn(len(ids), 128 + 128 + 64, generator=generator).bfloat16()
        q, latent_cache = both.split([128, 128 + 64], dim=-1)
        normed = mla.q_a_layernorm(q)
        between = mla.q_b_proj(normed)[0] if seed else None  # in prefill
        key = mla.kv_a_layernorm(latent_cache[..., :128])
        found += [mla.q_b_proj(normed)[0] if between is None else between, key]
    return torch.cat(found, -1)


def test_norms_of_latents_that_do_not_lie_side_by_side_are_sglangs(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAYERFUSE_FUSIONS", "mla_dual_rms_norm")
    model, own = deepseek(), deepseek()

    def apart(self: Any, ids: Tensor, *_: Any) -> Tensor:
        mla, (x, y) = (
            self.model.layers[0].self_attn,
            torch.randn(2, len(ids), 128, generator=torch.Generator().manual_seed(1)).bfloat16(),
        )
        both = torch.cat([x, y, x], -1)
        # A copy of the key's latent; the query's alone, and the key's where it was; the query's in the last columns of its tensor.
        found = [mla.q_a_layernorm(both[:, :128]), mla.kv_a_layernorm(both[:, 128:256].clone())]
        found += [mla.q_a_layernorm(x), mla.kv_a_layernorm(both[:, 128:256])]
        found += [mla.q_a_layernorm(both[:, 256:]), mla.kv_a_layernorm(y)]
        return torch.cat(found, -1)

    with mock.patch.object(type(model), "forward", apart), torch.inference_mode():
        compiled = loaded(model)
        torch.testing.assert_close(model.forward(torch.arange(4)), own.forward(torch.arange(4)), rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(model.forward(torch.arange(1)), own.forward(torch.arange(1)), rtol=2e-2, atol=2e-2)
    missed = compiled.report().of("mla_dual_rms_norm").missed
    assert missed["model.layers.0.self_attn:latents"].endswith("on tensors that do not lie side by side")
    assert "did not call" in missed["model.layers.1.self_attn:latents"]


@pytest.mark.parametrize("method", ["forward_absorb_prepare", "forward_normal_prepare"])
def test_norms_of_latents_whose_caller_is_anothers_are_left(
    method: str, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAYERFUSE_FUSIONS", "mla_dual_rms_norm")

    def theirs(self: Any, positions: Any, hidden_states: Any, forward_batch: Any, zero_allocator: Any, *_: Any) -> Any:
        raise NotImplementedError

    model = deepseek()
    with mock.patch.object(type(model), "forward", latents), torch.inference_mode():
        with mock.patch.object(type(model.model.layers[0].self_attn), method, theirs):
            compiled = loaded(model)
        model.forward(torch.arange(3))
    missed = compiled.report().of("mla_dual_rms_norm").missed
    assert len(missed) == 2
    assert all("is not SGLang's own: it is from test_sglang_handover" in why for why in missed.values())


QWEN = {
    **published_config("qwen3-next-80b-a3b"), "hidden_size": 256, "num_hidden_layers": 1, "num_experts": 2, "num_experts_per_tok": 1,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "vocab_size": 64,
}  # fmt: skip


def qwen() -> nn.Module:
    """Its delta net's output projection quantises in blocks."""
    quantised = config_of("group", "model.layers.0.linear_attn.in_proj_ba")
    model, _ = build_of(QWEN, tp=1, rank=0, patch={}, device="cpu", quantised=quantised)
    fill(model)
    return model


def gated(self: Any, ids: Tensor, *_: Any) -> Tensor:
    """A delta net's norm and the linear behind it."""
    net = self.model.layers[0].linear_attn
    x, z = torch.randn(2, len(ids) * 4, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    normed = net.norm(x, z).reshape(len(ids), -1)
    return net.out_proj.quant_method.apply(
        net.out_proj, normed, None
    )  # as its forward does, which asks for a group of ranks


def plainly(x: Tensor, gate: Tensor, weight: Tensor, *_: Any, eps: float, **__: Any) -> Tensor:
    """What SGLang's Triton kernel computes."""
    normed = x.float() * (x.float().square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()
    return (normed * torch.nn.functional.silu(gate.float())).to(x.dtype)


FORWARDS: dict[str, tuple[Any, Any, dict[str, int], int, int]] = {
    "latents": (deepseek, latents, {"mla_dual_rms_norm": 2}, 2, 2),
    "latents, group": (deepseek, latents, {"mla_dual_rms_norm_group_quant": 2}, 0, 2),
    "delta net": (qwen, gated, {"gated_rms_norm": 1}, 1, 1),
    "delta net, group": (qwen, gated, {"gated_rms_norm_group_quant": 1}, 0, 1),
    "product of shared experts": (deepseek, mlps, {"silu_mul_group_quant": 2}, 2, 4),
}
for _scheme in QUANTS:
    _norms, _build = {f"{ADD}_{_scheme}_quant": 3, f"{NORM}_{_scheme}_quant": 1}, functools.partial(llama, _scheme)
    FORWARDS[f"norms, {_scheme}"] = (_build, products, _norms, 0, 4)
    # In front of gate and up nothing is fused.
    FORWARDS[f"product, {_scheme}"] = (_build, mlps, {f"silu_mul_{_scheme}_quant": 2}, 2, 4)
"""Model, what runs of it, fusions and calls of their ops in the first run, and how often SGLang quantises in a later one with them and without."""


@pytest.mark.parametrize("case", FORWARDS)
def test_linears_take_what_is_quantised_in_front_of_them(
    case: str, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, forward, fusions, ours, theirs = FORWARDS[case]
    monkeypatch.setenv("LAYERFUSE_FUSIONS", ",".join(fusions))
    monkeypatch.setenv("LAYERFUSE_STRICT", "1")
    model, own = build(), build()
    if build is qwen:  # a kernel of Triton's, which no source of SGLang's has
        monkeypatch.setattr(fused_norm_gate, "rms_norm_gated", plainly)
        monkeypatch.setattr(calls, "native", lambda _: native_methods())
    with mock.patch.object(type(model), "forward", forward), torch.inference_mode():
        compiled = loaded(model)
        model.forward(torch.arange(3))
        plain = "_with_product" if forward is mlps else "_with_norm"  # which the op gives too
        ops = {name + (plain if name.endswith("_quant") else ""): count for name, count in fusions.items()}
        assert compiled.counted == Counter(ops)
        assert not [each for fusion in fusions for each in compiled.report().of(fusion).missed]
        kernels.quantised = 0
        found = model.forward(torch.arange(5))
        by_ours, kernels.quantised = kernels.quantised, 0
        torch.testing.assert_close(found, own.forward(torch.arange(5)), rtol=2e-2, atol=2e-2)
        assert (by_ours, kernels.quantised) == (ours, theirs)


def test_a_static_scale_that_is_made_anew_is_the_one_that_counts(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    """As SGLang does it when weights are updated from a disk."""
    monkeypatch.setenv("LAYERFUSE_FUSIONS", f"{ADD}_static_quant,{NORM}_static_quant")
    model, own = llama("static"), llama("static")
    with mock.patch.object(type(model), "forward", products), torch.inference_mode():
        loaded(model)
        model.forward(torch.arange(3))
        for each in (model, own):
            linear = each.model.layers[1].mlp.gate_up_proj
            linear.input_scale = nn.Parameter(torch.full((1,), 0.5), requires_grad=False)
        torch.testing.assert_close(model.forward(torch.arange(5)), own.forward(torch.arange(5)), rtol=2e-2, atol=2e-2)
    assert readers.RELOADED in said.messages()


def test_a_product_that_would_change_the_dtype_is_given_the_plain_tensor(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks, SGLang gives bfloat16 where it is given fp8."""
    monkeypatch.setenv("LAYERFUSE_FUSIONS", f"{ADD}_group_quant")
    model, own = llama("group").float(), llama("group").float()
    for each in (model, own):
        for module in each.modules():
            if isinstance(getattr(module, "quant_method", None), fp8.Fp8LinearMethod):
                module.weight.data = module.weight.data.to(FP8)
    with mock.patch.object(type(model), "forward", products), torch.inference_mode():
        compiled = loaded(model)
        torch.testing.assert_close(model.forward(torch.arange(3)), own.forward(torch.arange(3)), rtol=2e-2, atol=2e-2)
    missed = compiled.report().of(f"{ADD}_group_quant").missed
    assert (len(missed), set(missed.values())) == (3, {NOT_TAKEN})


SCALED = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
GROUPS = {
    "group_0": {
        "targets": ["Linear"],
        "weights": {**SCALED, "dynamic": False},
        "input_activations": {**SCALED, "dynamic": False},
    }
}
QUARK = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "observer_cls": "PerTensorMinMaxObserver"}
CHECKPOINT_CONFIGS: dict[str, dict[str, Any]] = {
    "fp8": {"activation_scheme": "static"},
    "modelopt": {"quant_algo": "FP8", "ignore": []},
    "compressed-tensors": {"config_groups": GROUPS, "format": "float-quantized", "ignore": []},
    "quark": {
        "global_quant_config": {"weight": QUARK, "input_tensors": QUARK, "output_tensors": None},
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": [],
        "export": {"kv_cache_group": [], "pack_method": "reorder"},
    },
}


@pytest.mark.parametrize("name", facts.MULTIPLY)
def test_plans_name_the_class_that_multiplies_and_what_stands_there(name: str) -> None:
    said = {"quant_method": name, "packed_modules_mapping": {}, **CHECKPOINT_CONFIGS[name]}
    config = get_quantization_config(name).from_config(said)
    linear = mock.Mock(spec=LinearBase)
    hopper = [
        f"{module}.get_device_capability" for module in ("torch.cuda", "sglang.srt.layers.quantization.quark.quark")
    ]
    with mock.patch(hopper[0], return_value=(9, 0)), mock.patch(hopper[1], return_value=(9, 0)):
        linear.quant_method = config.get_quant_method(linear, "model.layers.0.self_attn.o_proj")
    assert type(linear.quant_method).__name__ == facts.MULTIPLY[name]
    linear._parameters = {"input_scale": torch.ones(1)}
    made = readers.reader_of(linear, ActivationQuant.parse("static"), LINEARS.hook)
    assert (made is not None) == (facts.MULTIPLY[name] == facts.STANDS_AT)


def test_a_linear_that_is_not_sglangs_own_is_left_alone_and_named() -> None:
    """All that it calls is held to the source: here its block product is another's."""
    method = llama("group").model.layers[0].mlp.gate_up_proj.quant_method
    native_methods((method, "apply"))
    with (
        mock.patch.object(fp8.Fp8LinearMethod, "apply", lambda self, layer, x, bias=None: x),
        pytest.raises(NotNativeError, match=r"apply .*is not SGLang's own: it is from test_sglang_handover"),
    ):
        readers.reader_of(
            mock.Mock(quant_method=method), mock.Mock(scheme="group", inside=False), SEAMS[-1].consumer.hook
        )
