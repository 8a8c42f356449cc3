"""How the linears of vLLM, SGLang and ATOM quantise their activations, on stand-ins; tests/engines has vLLM's own.

A stand-in has the class names and attributes of the source that its reading cites, and no code of it.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from linear_quant_checks import GROUP, PER_TOKEN, STATIC, check
from standins import layer_class, module, weight
from torch import nn

from layerfuse.adapters import ActivationQuant
from layerfuse.adapters.linear_quant import kernel_of
from layerfuse.adapters.linear_specs import weight_spec
from layerfuse.adapters.linear_weights import weight_of
from layerfuse.adapters.linears import linear_of

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


def by_blocks(name: str, **held: Any) -> Any:
    base = BASES["Fp8BlockScaledMMLinearKernel"]
    return module(f"{_V}.kernels.linear.scaled_mm:{name}Fp8BlockScaledMMKernel", base, **held)


def by_rows(name: str, **held: Any) -> Any:
    base = BASES["FP8ScaledMMLinearKernel"]
    return module(f"{_V}.kernels.linear.scaled_mm:{name}FP8ScaledMMLinearKernel", base, **held)


def vllm_linear(kernel: Any, method: str = "fp8:Fp8LinearMethod") -> Any:
    held = SimpleNamespace if kernel is None else partial(module, f"{_QUANT}.{method}", fp8_linear=kernel)
    return module(f"{_V}.layers.linear:ColumnParallelLinear", quant_method=held(), weight=weight(8, 8))


def aligned_op(form: str) -> Any:
    """An op that aligns its columns, in one of its forms."""
    op = vllm_op(1, 128, column_major=True)
    op.tma_aligned_scales, op._forward_method = True, SimpleNamespace(__name__=form)
    return op


DEEP_GEMM = vllm_op(1, 128, column_major=True)
VLLM = {
    "DeepGEMM on Hopper": (
        by_blocks("DeepGemm", apply_input_quant=True, quant_fp8=DEEP_GEMM),
        ActivationQuant(group_size=128, column_major=True),
    ),
    "DeepGEMM, aligned by the op for CUDA": (
        by_blocks("DeepGemm", quant_fp8=aligned_op("forward_cuda")),
        ActivationQuant(group_size=128, column_major=True, tma_aligned=True),
    ),
    "DeepGEMM, in plain torch": (
        by_blocks("DeepGemm", quant_fp8=aligned_op("forward_native")),
        ActivationQuant(group_size=128, column_major=True),
    ),
    "DeepGEMM with powers of two": (
        by_blocks("DeepGemm", quant_fp8=vllm_op(1, 128, column_major=True, ue8m0=True)),
        ActivationQuant(group_size=128, column_major=True, use_ue8m0=True),
    ),
    "Triton": (by_blocks("Triton", quant_fp8=vllm_op(1, 128)), GROUP),
    "FlashInfer": (
        by_blocks("FlashInfer", apply_input_quant=False, quant_fp8=vllm_op(1, 128)),
        "inside its matrix product",
    ),
    "W8A16 on a CPU": (by_blocks("CPU", apply_input_quant=False), None),
    "per token": (  # `use_ue8m0` follows the engine's DeepGEMM switch even where only the group form looks at it.
        by_rows("Cutlass", quant_fp8=vllm_op(1, -1, ue8m0=True)),
        PER_TOKEN,
    ),
    "per tensor": (by_rows("RowWiseTorch", quant_fp8=vllm_op(-1, -1)), "one scale for all tokens"),
    "static": (by_rows("Cutlass", quant_fp8=vllm_op(-1, -1, static=True)), STATIC),
    "static, for blocks": (
        by_rows("Cutlass", quant_fp8=vllm_op(1, 128, static=True)),
        "static scales for blocks of 1 by 128",
    ),
    "Marlin": (by_rows("Marlin", marlin_input_dtype=None), None),
    "Marlin with fp8 activations": (by_rows("Marlin", marlin_input_dtype="float8"), "inside its matrix product"),
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


@pytest.mark.parametrize(
    ("shape", "scheme", "block"),
    [
        ((-1, -1), "tensor", None),
        ((-1, 1), "channel", None),
        ((1, -1), "channel", None),
        ((1, 32), "mx", (1, 32)),
        ((128, 128), "block", (128, 128)),
    ],
)
def test_vllm_says_how_the_weights_are_scaled(
    shape: tuple[int, int], scheme: str, block: tuple[int, int] | None
) -> None:
    key = SimpleNamespace(dtype=torch.float8_e4m3fn, scale=SimpleNamespace(group_shape=shape), scale2=None)
    method = module(f"{_QUANT}.fp8:Fp8LinearMethod", weight_quant_key=key)
    stored = nn.Parameter(torch.empty(8, 8, dtype=key.dtype, device="meta"), requires_grad=False)
    linear = module(f"{_V}.layers.linear:ColumnParallelLinear", quant_method=method, weight=stored)
    assert weight_of(linear) == weight_spec("float8_e4m3fn", scheme, block)


def test_the_kernel_of_a_vllm_linear_is_the_one_that_quantises() -> None:
    kernel = by_blocks("DeepGemm", quant_fp8=DEEP_GEMM)
    assert kernel_of(vllm_linear(kernel)) is kernel
    assert kernel_of(vllm_linear(None)) is None


def test_a_vllm_linear_that_fails_to_say_what_it_takes_takes_it_as_it_is() -> None:
    def fails(_: Any) -> bool:
        raise RuntimeError("not loaded")

    linear = vllm_linear(by_blocks("DeepGemm", quant_fp8=DEEP_GEMM))
    linear.weight = nn.Parameter(torch.empty(8, 8, dtype=torch.float8_e4m3fn, device="meta"), requires_grad=False)
    linear._input_quant_key = "of its kernel"
    assert linear_of("proj", (), linear).takes_quantised
    type(linear).requires_unquantized_input = property(fails)
    assert not linear_of("proj", (), linear).takes_quantised


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


MXFP8 = ActivationQuant(fixed="mxfp8")


@pytest.mark.parametrize(
    ("kernel", "dtype", "expected"),
    [
        ("mxfp8:RocmDotScaledMxfp8LinearKernel", torch.float8_e4m3fn, MXFP8),
        ("mxfp8:RocmDotScaledMxfp8LinearKernel", torch.bfloat16, None),
        ("mxfp8:EmulationMxfp8LinearKernel", torch.bfloat16, None),
        ("mxfp8:FlashInferCutlassMxfp8LinearKernel", torch.float8_e4m3fn, "laid out for its kernel"),
        ("mxfp4:AiterMxfp4LinearKernel", torch.uint8, "inside its matrix product"),
        ("mxfp4:MarlinMxFp4LinearKernel", torch.uint8, None),
        ("mxfp4:NewMxFp4LinearKernel", torch.uint8, "multiplies by vllm:NewMxFp4LinearKernel"),
    ],
)
@pytest.mark.parametrize(
    ("holder", "method", "attribute"),
    [
        ("scheme", "compressed_tensors.schemes:CompressedTensorsW8A8Mxfp8", "kernel"),
        ("scheme", "compressed_tensors.schemes:CompressedTensorsW4A4Mxfp4", "kernel"),
        ("scheme", "quark.schemes:QuarkOCP_MX", "ocp_mx_linear"),
        ("quant_method", "online.mxfp8:Mxfp8OnlineLinearMethod", "kernel"),
        ("quant_method", "online.mxfp4:Mxfp4OnlineLinearMethod", "kernel"),
    ],
)
def test_vllm_mx(holder: str, method: str, attribute: str, kernel: str, dtype: torch.dtype, expected: Any) -> None:
    held = {holder: module(f"{_QUANT}.{method}", **{attribute: module(f"{_V}.kernels.linear.{kernel}")})}
    packed = torch.nn.Parameter(torch.empty(8, 8, dtype=dtype), requires_grad=False)
    check(module(f"{_V}.layers.linear:RowParallelLinear", weight=packed, **held), expected)


NVFP4 = ActivationQuant(fixed="nvfp4", swizzled=True)


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("cutlass:CutlassNvFp4LinearKernel", NVFP4),
        ("flashinfer:FlashInferCutlassNvFp4LinearKernel", NVFP4),
        ("flashinfer:FlashInferTrtllmNvFp4LinearKernel", "lays out the scales by the number of tokens"),
        ("emulation:EmulationNvFp4LinearKernel", "rounds activations to NVFP4 and back"),
        ("humming:HummingNvFp4LinearKernel", "inside its matrix product"),
        ("marlin:MarlinNvFp4LinearKernel", None),
        ("flashinfer:NewNvFp4LinearKernel", "multiplies by vllm:NewNvFp4LinearKernel"),
    ],
)
@pytest.mark.parametrize(
    ("holder", "method"),
    [
        ("scheme", "compressed_tensors.schemes:CompressedTensorsW4A4Fp4"),
        ("scheme", "quark.schemes:QuarkNVFP4"),
        ("quant_method", "modelopt:ModelOptLinearMethod"),
    ],
)
def test_vllm_nvfp4(holder: str, method: str, kernel: str, expected: Any) -> None:
    packed = torch.nn.Parameter(torch.empty(8, 32, dtype=torch.uint8), requires_grad=False)

    def made(width: int) -> Any:
        held = {holder: module(f"{_QUANT}.{method}", kernel=module(f"{_V}.kernels.linear.nvfp4.{kernel}"))}
        where = f"{_V}.layers.linear:RowParallelLinear"
        return module(where, weight=packed, input_size_per_partition=width, **held)

    check(made(64), expected)
    check(made(48), "pads the rows of its quantised activations" if expected == NVFP4 else expected)


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


def by(name: str, **bound: Any) -> dict[str, Any]:
    return {"w8a8_block_fp8_linear": product(name, **bound)}


SGLANG = {
    "Triton": (by(TRITON), GROUP),
    "Triton with powers of two": (
        by(TRITON, act_scale_ue8m0=True) | {"weight_block_size": [32, 32]},
        ActivationQuant(group_size=32, use_ue8m0=True),
    ),
    "DeepGEMM": (by(DEEP), ActivationQuant(group_size=128, column_major=True, tma_aligned=True)),
    "DeepGEMM on Blackwell": (
        by(DEEP) | {"scale": SimpleNamespace(format_ue8m0=True, dtype=torch.int32)},
        "packs four scales",
    ),
    "DeepGEMM with powers of two": (by(DEEP, act_scale_ue8m0=True), "by the GPU it runs on"),
    "AITER": (by(AITER), GROUP),
    "AITER, shuffled": (by(AITER) | {"aiter_bpreshuffled": True}, "by the number of tokens"),
    "CUTLASS": (by("cutlass_w8a8_block_fp8_linear_with_fallback"), "pads the rows"),
    "a product of tomorrow": (by("new_linear"), "multiplies by new_linear"),
    "Marlin": ({"use_marlin": True}, None),
    "MXFP8": ({"use_mxfp8": True}, "MXFP8"),
    "a block checkpoint served as MXFP8": ({"block_fp8_as_mxfp8": True}, "MXFP8"),
    "static": ({"block_quant": False, "input_scale": weight(1)}, STATIC),
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
        ({"is_static_input_scheme": True}, STATIC),
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


@pytest.mark.parametrize(
    ("mode", "awq", "workspace", "expected"),
    [
        ("w4a4", False, None, NVFP4),
        ("w4a4", True, None, "multiplies activations by a number per column first"),
        ("w4a4", False, torch.zeros(1), None),
        ("w4a16", False, None, None),
    ],
)
def test_sglang_nvfp4(mode: str, awq: bool, workspace: Any, expected: Any) -> None:
    linear = sglang_linear("modelopt_quant:ModelOptFp4LinearMethod", quant_mode=mode)
    linear.quant_method.quant_config = SimpleNamespace(is_awq=awq)
    linear.workspace = workspace
    check(linear, expected)
    linear.scheme = module(f"{_S}.quantization.compressed_tensors.schemes:CompressedTensorsW4A4Fp4")
    check(linear, NVFP4)


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
    check(module("atom.model_ops.linear:LinearBase", input_scale=weight(1), **held), STATIC)
