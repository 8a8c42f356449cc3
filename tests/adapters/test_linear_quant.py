"""How a linear quantises its activations: transformers' own linears, and stand-ins of the engines' that are not here.

A stand-in has the class names and attributes of the source that its reading cites, and no code of it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import fresh_layer
from linear_quant_checks import GROUP, PER_TOKEN, STATIC, check
from standins import layer_class, module, weight
from torch import nn

from layerfuse import registry
from layerfuse.adapters import ActivationQuant
from layerfuse.adapters.linear_quant import TABLE, Asks
from layerfuse.adapters.linear_quant_readings import grouped
from layerfuse.adapters.linear_specs import weight_spec
from layerfuse.adapters.linear_weights import weight_of
from layerfuse.fusion import FusionConfig, Target, plan

# ---- transformers, the real thing


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"block_size": (128, 128)}, GROUP),
        ({"block_size": [64, 32]}, ActivationQuant(group_size=32)),
        ({}, PER_TOKEN),
        ({"block_size": (128, 128), "activation_scheme": "static"}, STATIC),
        ({"block_size": (16, 16)}, "groups of 16 columns"),
        ({"block_size": (128, 128), "scale_fmt": "ue8m0"}, "powers of two"),
    ],
    ids=str,
)
def test_transformers_fp8_linear(words: dict[str, Any], expected: Any) -> None:
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    with torch.device("meta"):
        check(finegrained.FP8Linear(256, 256, **words), expected)
        check(finegrained.FP8GroupedLinear(256, 256, 2, **words), expected)


def test_transformers_fp8_linear_with_weights_that_were_dequantised_is_a_plain_one() -> None:
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    with torch.device("meta"):
        linear = finegrained.FP8Linear(256, 256, block_size=(128, 128))
        linear.weight = nn.Parameter(torch.empty(256, 256, dtype=torch.bfloat16))
    check(linear, None)


def test_transformers_other_fp8_linears() -> None:
    compressed = pytest.importorskip("transformers.integrations.compressed_tensors")
    with torch.device("meta"):
        check(compressed.CompressedTensorsFP8Linear(64, 64), PER_TOKEN)
    check(module("transformers.integrations.fbgemm_fp8:FbgemmFp8Linear"), "bounds the scales")


def test_plain_linears_quantise_nothing() -> None:
    with torch.device("meta"):
        check(nn.Linear(8, 8, dtype=torch.bfloat16), None)
        check(type("MyLinear", (nn.Linear,), {"__module__": "my.package"})(8, 8), None)


# ---- compressed-tensors and torchao: stand-ins


def with_scheme(**changes: Any) -> Any:
    args = {"num_bits": 8, "type": "float", "dynamic": True, "symmetric": True, "strategy": "token"}
    held = SimpleNamespace(**{**args, "group_size": None, "scale_dtype": None, **changes})
    linear: Any = nn.Linear(8, 8, device="meta")
    scheme: Any = type("QuantizationScheme", (), {"__module__": "compressed_tensors.quantization.quant_scheme"})()
    scheme.input_activations = held
    linear.quantization_scheme = scheme
    return linear


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, PER_TOKEN),
        ({"strategy": "group", "group_size": 128}, GROUP),
        ({"strategy": "group", "group_size": 16}, "groups of 16 columns"),
        ({"strategy": "tensor"}, "one scale for all tokens"),
        ({"dynamic": False, "strategy": "tensor"}, STATIC),
        ({"dynamic": False, "strategy": "channel"}, "not of the whole tensor"),
        ({"dynamic": "local", "strategy": "tensor_group", "group_size": 16}, "not of the whole tensor"),
        ({"type": "int"}, "int of 8 bits"),
        ({"num_bits": 4, "strategy": "tensor_group", "group_size": 16}, "float of 4 bits"),
        ({"symmetric": False}, "zero point"),
        ({"strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}, "torch.uint8"),
    ],
    ids=str,
)
def test_compressed_tensors(changes: dict[str, Any], expected: Any) -> None:
    check(with_scheme(**changes), expected)


def test_compressed_tensors_of_weights_only_or_switched_off_quantise_nothing() -> None:
    linear = with_scheme()
    linear.quantization_enabled = False
    check(linear, None)
    linear = with_scheme()
    linear.quantization_scheme.input_activations = None
    check(linear, None)


class Wrapped(torch.Tensor):
    """A tensor whose class can be told to be torchao's."""


def with_weight(name: str, linear: Any = None, **held: Any) -> Any:
    cls = type(name, (Wrapped,), {"__module__": "torchao.quantization"})
    linear = nn.Linear(8, 8) if linear is None else linear
    linear.weight = nn.Parameter(linear.weight.data.as_subclass(cls), requires_grad=False)
    assert type(linear.weight).__name__ == name
    for attribute, value in held.items():
        setattr(linear.weight, attribute, value)
    return linear


def float8(granularity: Any, **held: Any) -> Any:
    """How activations are quantised: torchao's `QuantizeTensorToFloat8Kwargs`."""
    base = {"float8_dtype": torch.float8_e4m3fn, "hp_value_lb": None, "hp_value_ub": None, "granularity": granularity}
    return SimpleNamespace(**{**base, **held})


def granularity(name: str, **held: Any) -> Any:
    made = type(name, (), {"__repr__": lambda self: f"{name}({self.__dict__})"})()
    made.__dict__.update(held)
    return made


ROW = granularity("PerRow", dim=-1)


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        (None, None),
        ({"granularity": ROW}, PER_TOKEN),
        ({"granularity": granularity("PerBlock", block_size=[1, 128])}, GROUP),
        ({"granularity": granularity("PerBlock", block_size=[128, 128])}, "PerBlock"),
        ({"granularity": granularity("PerRow", dim=0)}, "PerRow"),
        ({"granularity": granularity("PerTensor")}, "one scale for all tokens"),
        ({"granularity": ROW, "float8_dtype": torch.int8}, "torch.int8"),
        ({"granularity": ROW, "hp_value_ub": 1200.0}, "bounds the values"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_torchao_float8_tensor(kwargs: dict[str, Any] | None, expected: Any) -> None:
    check(with_weight("Float8Tensor", act_quant_kwargs=None if kwargs is None else float8(**kwargs)), expected)


@pytest.mark.parametrize(
    ("block", "expected"),
    [([1, 8], ("channel", None)), ([8, 8], ("tensor", None)), ([4, 4], ("block", (4, 4))), ([2, 8], None)],
)
def test_how_a_torchao_float8_tensor_is_scaled(block: list[int], expected: Any) -> None:
    linear = with_weight("Float8Tensor", qdata=torch.empty(8, 8, dtype=torch.float8_e4m3fn), block_size=block)
    assert weight_of(linear) == (None if expected is None else weight_spec("float8_e4m3fn", *expected))


def test_a_plan_says_how_torchaos_linears_quantise_that_no_fusion_can_serve() -> None:
    layer = fresh_layer("qwen3-4b", "model.layers.0")
    for linear in (layer.mlp.gate_proj, layer.mlp.up_proj):
        with_weight("Float8Tensor", linear, act_quant_kwargs=float8(granularity("PerTensor")))
    made = plan([("0", registry.spec_for(layer))], Target.named("sm90"), FusionConfig(level=2))
    (reason,) = {d.reason for d in made.at("0:post_attention") if d.fusion == "add_rms_norm_static_quant"}
    assert reason == (
        "the linears that read the post_attention site agree on no quantisation that a fusion knows: "
        "mlp.gate_proj and mlp.up_proj: Linear quantises activations with one scale for all tokens"
    )


def test_torchao_before_float8_tensor() -> None:
    kwargs = {"activation_granularity": ROW, "activation_dtype": torch.float8_e4m3fn}
    check(with_weight("LinearActivationQuantizedTensor", quant_kwargs=kwargs), PER_TOKEN)
    check(with_weight("LinearActivationQuantizedTensor", quant_kwargs={}), "does not say how")
    check(with_weight("WeightTensorWithLinearActivationQuantizationMetadata"), "a function of its own")
    check(with_weight("AffineQuantizedTensor"), None)


def test_torchao_int8_and_what_is_not_known() -> None:
    check(with_weight("Int8Tensor", act_quant_kwargs=None), None)
    check(with_weight("Int8Tensor", act_quant_kwargs=object()), "int8")
    check(with_weight("NVFP4Tensor"), "torchao:NVFP4Tensor, which is not known here")


# ---- what is not known


def test_a_class_that_is_not_known_gives_none_and_a_sentence() -> None:
    strange = module("new.engine:Linear", quant_method=module("new.engine:SecretMethod"), weight=weight(8, 8))
    check(strange, "Linear is quantised by new:SecretMethod, which is not known here")
    strange.quantization_scheme = module("new.engine:SecretScheme")
    check(strange, "Linear is quantised by new:SecretScheme, which is not known here")
    packed = module("new.engine:PackedLinear", weight=nn.Parameter(torch.empty(8, dtype=torch.uint8), False))
    check(packed, "PackedLinear is no plain linear (weight: torch.uint8), and its class is not known here")
    check(nn.ReLU(), "is no plain linear (weight: None)")


def test_a_linear_that_fails_in_its_own_way_is_a_sentence_too() -> None:
    class Fails:
        @property
        def fp8_linear(self) -> Any:
            raise RuntimeError("not loaded")

    method = layer_class("vllm.model_executor.layers.quantization.fp8:Fp8LinearMethod")
    linear: Any = nn.Linear(8, 8)
    linear.quant_method = type("Fp8LinearMethod", (Fails,), {"__module__": method.__module__})()
    check(linear, "does not say how it quantises activations: fp8_linear: reading 'fp8_linear' raised RuntimeError")


def test_every_group_that_a_fusion_cannot_describe_is_a_sentence() -> None:
    assert grouped(64, column_major=True) == ActivationQuant(group_size=64, column_major=True)
    assert grouped(48) == "quantises activations in groups of 48 columns"
    assert isinstance(grouped("128"), str) and isinstance(grouped(True), str)


def test_the_table_is_of_classes_and_of_what_can_be_done_with_them() -> None:
    for name, entry in TABLE.items():
        package, _, cls = name.partition(":")
        assert package.isidentifier() and cls.isidentifier(), name
        assert entry is None or callable(entry) or isinstance(entry, (Asks, ActivationQuant, str)), name
