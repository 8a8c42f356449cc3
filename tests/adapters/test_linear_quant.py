"""How a linear quantises its activations: transformers' own linears, and stand-ins of the engines' that are not here.

A stand-in has the class names and attributes of the source that its reading cites, and no code of it.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from standins import layer_class, module, weight
from torch import nn

from layerfuse.adapters import ActivationQuant, activation_quant_of, describe_linear_quant
from layerfuse.adapters.linear_quant import TABLE, Asks
from layerfuse.adapters.linear_quant_readings import grouped

PER_TOKEN = ActivationQuant()
GROUP = ActivationQuant(group_size=128)


def check(linear: Any, expected: ActivationQuant | str | None) -> None:
    """The answer, or a sentence that begins with the linear's class and holds these words."""
    described = describe_linear_quant(linear)
    if isinstance(expected, str):
        assert isinstance(described, str) and expected in described
        assert described.startswith(type(linear).__name__)
        assert activation_quant_of(linear) is None
    else:
        assert described == expected
        assert activation_quant_of(linear) == expected


# ---- transformers, the real thing


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"block_size": (128, 128)}, GROUP),
        ({"block_size": [64, 32]}, ActivationQuant(group_size=32)),
        ({}, PER_TOKEN),
        ({"block_size": (128, 128), "activation_scheme": "static"}, "static scale"),
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
        ({"dynamic": False, "strategy": "tensor"}, "static scale"),
        ({"dynamic": "local", "strategy": "tensor_group", "group_size": 16}, "static scale"),
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


def with_weight(name: str, **held: Any) -> Any:
    cls = type(name, (Wrapped,), {"__module__": "torchao.quantization"})
    linear: Any = nn.Linear(8, 8)
    linear.weight = nn.Parameter(torch.empty(8, 8).as_subclass(cls), requires_grad=False)
    assert type(linear.weight).__name__ == name
    for attribute, value in held.items():
        setattr(linear.weight, attribute, value)
    return linear


def granularity(name: str, **held: Any) -> Any:
    made = type(name, (), {})()
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
    held = None
    if kwargs is not None:
        base = {"float8_dtype": torch.float8_e4m3fn, "hp_value_lb": None, "hp_value_ub": None}
        held = SimpleNamespace(**{**base, **kwargs})
    check(with_weight("Float8Tensor", act_quant_kwargs=held), expected)


def test_torchao_before_float8_tensor() -> None:
    kwargs = {"activation_granularity": ROW, "activation_dtype": torch.float8_e4m3fn}
    check(with_weight("LinearActivationQuantizedTensor", quant_kwargs=kwargs), PER_TOKEN)
    check(with_weight("LinearActivationQuantizedTensor", quant_kwargs={}), "does not say how")
    check(with_weight("WeightTensorWithLinearActivationQuantizationMetadata"), "static scale")
    check(with_weight("AffineQuantizedTensor"), None)


def test_torchao_int8_and_what_is_not_known() -> None:
    check(with_weight("Int8Tensor", act_quant_kwargs=None), None)
    check(with_weight("Int8Tensor", act_quant_kwargs=object()), "int8")
    check(with_weight("NVFP4Tensor"), "torchao:NVFP4Tensor, which is not known here")


# ---- vLLM: stand-ins

_V = "vllm.model_executor"
_QUANT = f"{_V}.layers.quantization"
BASES = {
    "Fp8BlockScaledMMLinearKernel": layer_class(f"{_V}.kernels.linear:Fp8BlockScaledMMLinearKernel"),
    "FP8ScaledMMLinearKernel": layer_class(f"{_V}.kernels.linear:FP8ScaledMMLinearKernel"),
}


def vllm_op(row: int, col: int, *, static: bool = False, column_major: bool = False, ue8m0: bool = False) -> Any:
    return SimpleNamespace(
        static=static, group_shape=SimpleNamespace(row=row, col=col), column_major_scales=column_major, use_ue8m0=ue8m0
    )


def vllm_kernel(name: str, base: str = "Fp8BlockScaledMMLinearKernel", **held: Any) -> Any:
    return module(f"{_V}.kernels.linear.scaled_mm:{name}", BASES[base], **held)


def vllm_linear(kernel: Any, method: str = "fp8:Fp8LinearMethod") -> Any:
    held = SimpleNamespace if kernel is None else partial(module, f"{_QUANT}.{method}", fp8_linear=kernel)
    return module(f"{_V}.layers.linear:ColumnParallelLinear", quant_method=held(), weight=weight(8, 8))


DEEP_GEMM = vllm_op(1, 128, column_major=True)
VLLM = {
    "DeepGEMM on Hopper": (
        vllm_kernel("DeepGemmFp8BlockScaledMMKernel", apply_input_quant=True, quant_fp8=DEEP_GEMM),
        ActivationQuant(group_size=128, column_major=True),
    ),
    "DeepGEMM with powers of two": (
        vllm_kernel("DeepGemmFp8BlockScaledMMKernel", quant_fp8=vllm_op(1, 128, column_major=True, ue8m0=True)),
        ActivationQuant(group_size=128, column_major=True, use_ue8m0=True),
    ),
    "Triton": (vllm_kernel("TritonFp8BlockScaledMMKernel", quant_fp8=vllm_op(1, 128)), GROUP),
    "FlashInfer": (
        vllm_kernel("FlashInferFp8BlockScaledMMKernel", apply_input_quant=False, quant_fp8=vllm_op(1, 128)),
        "inside its matrix product",
    ),
    "W8A16 on a CPU": (vllm_kernel("CPUFp8BlockScaledMMKernel", apply_input_quant=False), None),
    "per token": (
        # `use_ue8m0` follows the engine's DeepGEMM switch even where only the group form looks at it.
        vllm_kernel("CutlassFP8ScaledMMLinearKernel", "FP8ScaledMMLinearKernel", quant_fp8=vllm_op(1, -1, ue8m0=True)),
        PER_TOKEN,
    ),
    "per tensor": (
        vllm_kernel("RowWiseTorchFP8ScaledMMLinearKernel", "FP8ScaledMMLinearKernel", quant_fp8=vllm_op(-1, -1)),
        "one scale for all tokens",
    ),
    "static": (
        vllm_kernel(
            "CutlassFP8ScaledMMLinearKernel", "FP8ScaledMMLinearKernel", quant_fp8=vllm_op(-1, -1, static=True)
        ),
        "static scale",
    ),
    "Marlin": (
        vllm_kernel("MarlinFP8ScaledMMLinearKernel", "FP8ScaledMMLinearKernel", marlin_input_dtype=None),
        None,
    ),
    "Marlin with fp8 activations": (
        vllm_kernel("MarlinFP8ScaledMMLinearKernel", "FP8ScaledMMLinearKernel", marlin_input_dtype="float8"),
        "inside its matrix product",
    ),
    "a kernel of tomorrow": (module(f"{_V}.kernels.linear:NewKernel"), "multiplies by vllm:NewKernel"),
}


@pytest.mark.parametrize(("kernel", "expected"), VLLM.values(), ids=VLLM)
def test_vllm_fp8(kernel: Any, expected: Any) -> None:
    check(vllm_linear(kernel), expected)
    check(vllm_linear(kernel, "online.fp8:Fp8PerBlockOnlineLinearMethod"), expected)
    schemed = module(
        f"{_V}.layers.linear:QKVParallelLinear",
        quant_method=module(f"{_QUANT}.compressed_tensors:CompressedTensorsLinearMethod"),
        scheme=module(f"{_QUANT}.compressed_tensors.schemes:CompressedTensorsW8A8Fp8", fp8_linear=kernel),
        weight=weight(8, 8),
    )
    check(schemed, expected)


def test_vllm_without_a_quantisation_of_activations() -> None:
    for method, expected in {
        "unquantized:UnquantizedLinearMethod": None,
        "fbgemm_fp8:FBGEMMFp8LinearMethod": "bounds the scales",
        "humming:HummingLinearMethod": "vllm:HummingLinearMethod, which is not known here",
    }.items():
        method_object = module(f"{_QUANT}.{method}")
        check(
            module(f"{_V}.layers.linear:RowParallelLinear", quant_method=method_object, weight=weight(8, 8)), expected
        )
    weights_only = module(f"{_QUANT}.compressed_tensors.schemes:CompressedTensorsW8A16Fp8")
    check(module(f"{_V}.layers.linear:RowParallelLinear", scheme=weights_only, weight=weight(8, 8)), None)


def test_vllm_before_its_kernel_is_chosen_says_what_is_missing() -> None:
    linear = vllm_linear(VLLM["Triton"][0])
    del linear.quant_method.fp8_linear
    check(linear, "Fp8LinearMethod has no 'fp8_linear'")


# ---- SGLang: stand-ins

_S = "sglang.srt.layers"


def product(name: str, **bound: Any) -> Any:
    def function() -> None: ...

    function.__name__ = name
    return partial(function, **bound) if bound else function


def sglang_linear(method: str = "fp8:Fp8LinearMethod", scale: Any = None, **changes: Any) -> Any:
    held: dict[str, Any] = {
        "use_marlin": False,
        "use_mxfp8": False,
        "block_fp8_as_mxfp8": False,
        "block_quant": True,
        "weight_block_size": [128, 128],
        "cutlass_fp8_supported": False,
        "use_per_token_if_dynamic": False,
    }
    linear = {"weight": weight(8, 8), "weight_scale_inv": scale, "weight_scale": scale, "input_scale": None}
    for name in tuple(changes):
        if name in linear or name == "aiter_bpreshuffled":
            linear[name] = changes.pop(name)
    quant_method = module(f"{_S}.quantization.{method}", **{**held, **changes})
    return module(f"{_S}.linear:ReplicatedLinear", quant_method=quant_method, **linear)


DEEP = "deepgemm_w8a8_block_fp8_linear_with_fallback"
TRITON = "triton_w8a8_block_fp8_linear"
AITER = "aiter_w8a8_block_fp8_linear"
SGLANG = {
    "Triton": ({"w8a8_block_fp8_linear": product(TRITON)}, GROUP),
    "Triton with powers of two": (
        {"w8a8_block_fp8_linear": product(TRITON, act_scale_ue8m0=True), "weight_block_size": [32, 32]},
        ActivationQuant(group_size=32, use_ue8m0=True),
    ),
    "DeepGEMM": (
        {"w8a8_block_fp8_linear": product(DEEP)},
        ActivationQuant(group_size=128, column_major=True),
    ),
    "DeepGEMM on Blackwell": (
        {"w8a8_block_fp8_linear": product(DEEP), "scale": SimpleNamespace(format_ue8m0=True, dtype=torch.int32)},
        "packs four scales",
    ),
    "DeepGEMM with powers of two": (
        {"w8a8_block_fp8_linear": product(DEEP, act_scale_ue8m0=True)},
        "by the GPU it runs on",
    ),
    "AITER": ({"w8a8_block_fp8_linear": product(AITER)}, GROUP),
    "AITER, shuffled": (
        {"w8a8_block_fp8_linear": product(AITER), "aiter_bpreshuffled": True},
        "by the number of tokens",
    ),
    "CUTLASS": (
        {"w8a8_block_fp8_linear": product("cutlass_w8a8_block_fp8_linear_with_fallback")},
        "pads the rows",
    ),
    "a product of tomorrow": ({"w8a8_block_fp8_linear": product("new_linear")}, "multiplies by new_linear"),
    "Marlin": ({"use_marlin": True}, None),
    "MXFP8": ({"use_mxfp8": True}, "MXFP8"),
    "a block checkpoint served as MXFP8": ({"block_fp8_as_mxfp8": True}, "MXFP8"),
    "static": ({"block_quant": False, "input_scale": weight(1)}, "static scale"),
    "per token on CUDA": ({"block_quant": False, "cutlass_fp8_supported": True, "scale": weight(1)}, PER_TOKEN),
    "per token by channels": ({"block_quant": False, "scale": weight(8)}, PER_TOKEN),
    "per token or per tensor": ({"block_quant": False, "scale": weight(1)}, "does not say which"),
}


@pytest.mark.parametrize(("changes", "expected"), SGLANG.values(), ids=SGLANG)
def test_sglang_fp8(changes: dict[str, Any], expected: Any) -> None:
    check(sglang_linear(**changes), expected)


def test_sglang_w8a8_and_compressed_tensors() -> None:
    check(sglang_linear("w8a8_fp8:W8A8Fp8LinearMethod", scale=weight(8)), PER_TOKEN)
    check(sglang_linear("unquant:UnquantizedLinearMethod"), None)
    for held, expected in (
        ({"is_static_input_scheme": True}, "static scale"),
        ({"is_static_input_scheme": False, "weight_block_size": None}, PER_TOKEN),
        (
            {
                "is_static_input_scheme": False,
                "weight_block_size": [128, 128],
                "w8a8_block_fp8_linear": product(TRITON),
            },
            GROUP,
        ),
    ):
        linear = sglang_linear("compressed_tensors:CompressedTensorsLinearMethod")
        linear.scheme = module(f"{_S}.quantization.compressed_tensors.schemes:CompressedTensorsW8A8Fp8", **held)
        check(linear, expected)


# ---- ATOM: stand-ins


@pytest.mark.parametrize(
    ("kind", "dtype", "expected"),
    [
        ("No", torch.bfloat16, None),
        ("per_Token", torch.float8_e4m3fnuz, PER_TOKEN),
        ("per_1x128", torch.float8_e4m3fn, ActivationQuant(group_size=128, column_major=True)),
        ("per_Tensor", torch.float8_e4m3fn, "one scale for all tokens"),
        ("per_Token", torch.int8, "torch.int8"),
        ("per_1x32", torch.uint8, "torch.uint8"),
    ],
    ids=str,
)
def test_atom(kind: str, dtype: torch.dtype, expected: Any) -> None:
    base = layer_class("atom.model_ops.linear:LinearBase")
    held = {"quant_type": SimpleNamespace(name=kind), "params_dtype": dtype, "weight": weight(8, 8)}
    check(module("atom.model_ops.linear:ColumnParallelLinear", base, **held), expected)


def test_atom_static() -> None:
    held = {"quant_type": SimpleNamespace(name="per_Tensor"), "params_dtype": torch.float8_e4m3fn}
    check(module("atom.model_ops.linear:LinearBase", input_scale=weight(1), **held), "static scale")


# ---- what is not known


def test_a_class_that_is_not_known_gives_none_and_a_sentence() -> None:
    strange = module("new.engine:Linear", quant_method=module("new.engine:SecretMethod"), weight=weight(8, 8))
    check(strange, "Linear is quantised by new:SecretMethod, which is not known here")
    packed = module("new.engine:PackedLinear", weight=nn.Parameter(torch.empty(8, dtype=torch.uint8), False))
    check(packed, "PackedLinear is no plain linear (weight: torch.uint8), and its class is not known here")
    check(nn.ReLU(), "is no plain linear (weight: None)")


def test_a_linear_that_fails_in_its_own_way_is_a_sentence_too() -> None:
    class Fails:
        @property
        def fp8_linear(self) -> Any:
            raise RuntimeError("not loaded")

    method = layer_class(f"{_QUANT}.fp8:Fp8LinearMethod")
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
