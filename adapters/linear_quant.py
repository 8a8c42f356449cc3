"""How a linear quantises its activations at run time: a table of class names, and the two questions asked of it.

A new kind of linear is a line of the table. Classes are named `package:ClassName` and found through their bases; no
engine is imported. Where each line was read, its reading says.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, TypeAlias

from attrs import frozen

from . import linear_quant_readings as read
from .activation_quant import ActivationQuant
from .errors import FOREIGN, UnreadableError, said
from .linear_quant_readings import HOLDERS, Answer, Holders, holders_of, maybe


@frozen
class Asks:
    """The object at this attribute is looked up in the table instead."""

    attribute: str


Entry: TypeAlias = Callable[[Any, Any], Answer] | Asks | ActivationQuant | str | None

_UPPER_BOUND = "bounds the scales of its quantised activations from above"

TABLE: dict[str, Entry] = {
    # transformers/integrations: finegrained_fp8.py, compressed_tensors.py, fbgemm_fp8.py
    "transformers:FP8Linear": read.finegrained_fp8,
    "transformers:FP8Experts": read.IN_KERNEL,
    "transformers:Mxfp4GptOssExperts": None,
    "transformers:CompressedTensorsFP8Linear": read.PER_TOKEN,
    "transformers:FbgemmFp8Linear": _UPPER_BOUND,
    # compressed_tensors/quantization/quant_scheme.py, on any linear as `quantization_scheme`
    "compressed_tensors:QuantizationScheme": read.compressed_tensors,
    # torchao, on any linear as its `weight`
    "torchao:Float8Tensor": read.float8_tensor,
    "torchao:Int8Tensor": read.int8_tensor,
    "torchao:AffineQuantizedTensor": None,
    "torchao:LinearActivationQuantizedTensor": read.linear_activation_quantized,
    "torchao:WeightTensorWithLinearActivationQuantizationMetadata": "quantises activations by a function of its own",
    # bitsandbytes/nn/modules.py
    "bitsandbytes:Linear4bit": None,
    "bitsandbytes:Linear8bitLt": "quantises activations to int8",
    # vllm/model_executor/layers: linear.py; quantization/fp8.py, online/fp8.py, fbgemm_fp8.py, modelopt.py
    "vllm:UnquantizedLinearMethod": None,
    "vllm:Fp8LinearMethod": Asks("fp8_linear"),
    "vllm:Fp8PerTensorOnlineLinearMethod": Asks("fp8_linear"),
    "vllm:Fp8PerBlockOnlineLinearMethod": Asks("fp8_linear"),
    "vllm:Fp8PtpcOnlineLinearMethod": Asks("fp8_linear"),
    "vllm:ModelOptLinearMethod": Asks("kernel"),
    "vllm:FBGEMMFp8LinearMethod": _UPPER_BOUND,
    # ... fused_moe/unquantized_fused_moe_method.py, quantization/fp8.py, mxfp4.py, compressed_tensors/compressed_tensors_moe: of experts
    "vllm:UnquantizedFusedMoEMethod": None,
    "vllm:Fp8MoEMethod": read.vllm_fp8_experts,
    "vllm:CompressedTensorsW8A8Fp8MoEMethod": read.vllm_fp8_experts,
    "vllm:GptOssMxfp4MoEMethod": read.BY_KERNEL,
    "vllm:Mxfp4MoEMethod": read.BY_KERNEL,
    # ... quantization/compressed_tensors/schemes and quantization/quark/schemes, as `scheme`
    "vllm:CompressedTensorsW8A8Fp8": Asks("fp8_linear"),
    "vllm:CompressedTensorsW8A16Fp8": None,
    "vllm:CompressedTensorsWNA16": None,
    "vllm:QuarkW8A8Fp8": Asks("fp8_linear"),
    "vllm:QuarkW8A8Fp8PerBlock": Asks("fp8_linear"),
    "vllm:CompressedTensorsW8A8Mxfp8": Asks("kernel"),
    "vllm:CompressedTensorsW4A4Mxfp4": Asks("kernel"),
    "vllm:CompressedTensorsW4A4Fp4": Asks("kernel"),
    "vllm:QuarkNVFP4": Asks("kernel"),
    "vllm:QuarkOCP_MX": Asks("ocp_mx_linear"),
    "vllm:Mxfp8OnlineLinearMethod": Asks("kernel"),
    "vllm:Mxfp4OnlineLinearMethod": Asks("kernel"),
    # vllm/model_executor/kernels/linear/mxfp8 and mxfp4
    "vllm:RocmDotScaledMxfp8LinearKernel": read.rocm_mxfp8,
    "vllm:EmulationMxfp8LinearKernel": None,
    "vllm:MarlinMxfp8LinearKernel": None,
    "vllm:MarlinMxFp4LinearKernel": None,
    "vllm:AiterMxfp4LinearKernel": read.IN_KERNEL,
    "vllm:FlashInferCutlassMxfp8LinearKernel": read.SWIZZLED,
    "vllm:FlashInferCutedslMxfp8LinearKernel": read.SWIZZLED,
    "vllm:FlashInferTrtllmMxfp8LinearKernel": read.SWIZZLED,
    "vllm:FlashInferMxFp4LinearKernel": read.SWIZZLED,
    # vllm/model_executor/kernels/linear/nvfp4
    "vllm:CutlassNvFp4LinearKernel": read.nvfp4,
    "vllm:FlashInferCutlassNvFp4LinearKernel": read.nvfp4,
    "vllm:FlashInferCuteDslNvFp4LinearKernel": read.nvfp4,
    "vllm:FlashInferCudnnNvFp4LinearKernel": read.nvfp4,
    "vllm:FlashInferB12xNvFp4LinearKernel": read.nvfp4,
    "vllm:B12xNvFp4LinearKernel": read.nvfp4,
    "vllm:TorchNvFp4LinearKernel": read.nvfp4,
    "vllm:FbgemmNvFp4LinearKernel": read.nvfp4,
    "vllm:FlashInferTrtllmNvFp4LinearKernel": "lays out the scales by the number of tokens",
    "vllm:HummingNvFp4LinearKernel": read.IN_KERNEL,
    "vllm:EmulationNvFp4LinearKernel": "rounds activations to NVFP4 and back in plain torch",
    "vllm:MarlinNvFp4LinearKernel": None,
    "vllm:B12xNvFp4W4A16LinearKernel": None,
    "vllm:FlashInferCuteDslNvFp4W4A16LinearKernel": None,
    # vllm/model_executor/kernels/linear/scaled_mm: first those that leave activations alone, or see to them inside
    "vllm:MarlinFP8ScaledMMLinearKernel": read.marlin,
    "vllm:XPUW8A16FP8LinearKernel": None,
    "vllm:CPUFp8BlockScaledMMKernel": None,
    "vllm:CPUFp8PerTensorScaledMMLinearKernel": None,
    "vllm:CPUFP8W8A8ScaledMMLinearKernel": read.IN_KERNEL,
    "vllm:HummingFP8ScaledMMLinearKernel": read.IN_KERNEL,
    "vllm:FlashInferFp8DeepGEMMDynamicBlockScaledKernel": read.flashinfer_or_deep_gemm,
    "vllm:Fp8BlockScaledMMLinearKernel": read.quant_fp8,
    "vllm:FP8ScaledMMLinearKernel": read.quant_fp8,
    # sglang/srt/layers/quantization: unquant.py, fp8.py, w8a8_fp8.py, modelopt_quant.py, compressed_tensors/schemes
    "sglang:UnquantizedLinearMethod": None,
    "sglang:Fp8LinearMethod": read.sglang_fp8,
    "sglang:W8A8Fp8LinearMethod": read.sglang_w8a8_fp8,
    "sglang:CompressedTensorsW8A8Fp8": read.sglang_compressed_tensors,
    "sglang:CompressedTensorsW8A16Fp8": None,
    "sglang:CompressedTensorsWNA16": None,
    "sglang:CompressedTensorsW4A4Fp4": read.NVFP4,
    "sglang:ModelOptFp4LinearMethod": read.sglang_nvfp4,
    "sglang:UnquantizedFusedMoEMethod": None,
    "sglang:Fp8MoEMethod": read.IN_KERNEL,
    "sglang:Mxfp4MoEMethod": read.BY_KERNEL,
    # atom/model_ops/linear.py and moe.py
    "atom:LinearBase": read.atom,
    "atom:UnquantizedFusedMoEMethod": None,
    "atom:Fp8MoEMethod": read.IN_KERNEL,
    "atom:CompressedTensorsFp8MoEMethod": read.IN_KERNEL,
    "atom:Mxfp4MoEMethod": read.BY_KERNEL,
}
"""What each class does to activations: how it is read, who is asked instead, an answer, or the reason why there is none."""


@frozen
class _Strange:
    """A class that the table does not know."""

    name: str


_NOBODYS = _Strange("")
"""A class that says nothing of a quantisation: torch's Linear and Parameter, a text, nothing at all."""


def activation_quant_of(linear: Any) -> ActivationQuant | None:
    """The fp8 quantisation that this linear gives its activations at run time.

    Returns:
        None where it does not: a plain linear, weights only, another format, an unknown class.
        `describe_linear_quant` tells these apart.
    """
    answer = describe_linear_quant(linear)
    return answer if isinstance(answer, ActivationQuant) else None


def describe_linear_quant(linear: Any, holders: Holders | None = None) -> ActivationQuant | str | None:
    """As `activation_quant_of`, and where activations may be quantised in a way that it cannot say, the reason.

    Args:
        linear: the module.
        holders: of it, where they were looked up already.

    Returns:
        None where the activations stay as they are; a sentence where ActivationQuant has no words for it.
    """
    try:
        answer = _answer(linear, *(holders or holders_of(linear)))
    except UnreadableError as error:
        answer = f"does not say how it quantises activations: {error.args[0]}"
    except FOREIGN as error:  # a property of the linear that fails in its own way: in words, as this decides no spec
        answer = f"does not say how it quantises activations: {said(error)}"
    return f"{type(linear).__name__} {answer}" if isinstance(answer, str) else answer


def quantises_inside(linear: Any) -> bool:
    """Whether a fusion finds its quantisation only where an engine takes it out of the product's op."""
    answer = describe_linear_quant(linear)
    return isinstance(answer, ActivationQuant) and answer.inside


def quantiser_of(linear: Any) -> Any:
    """What quantises the activations of a linear of vLLM's, or None where that is not known.

    vllm/model_executor/kernels/linear/scaled_mm: a kernel calls a `QuantFP8` of its own with its input, in front of its product; one that
    quantises inside of the product is itself the answer.
    """
    kernel = kernel_of(linear)
    inside = _entry(kernel.__class__) is read.flashinfer_or_deep_gemm
    return kernel if inside else maybe(kernel, "quant_fp8")


def kernel_of(linear: Any) -> Any:
    """The kernel of a linear of vLLM's that quantises what it reads, or None where it is not known."""
    for holder in holders_of(linear)[0]:
        asked, entry = holder, _entry(holder.__class__)
        while isinstance(entry, Asks):
            asked = maybe(asked, entry.attribute)
            entry = _entry(asked.__class__)
        if entry in (read.flashinfer_or_deep_gemm, read.quant_fp8):
            return asked
    return None


def plain_dtype(linear: Any) -> Any:
    """The dtype of the weight where this is torch's own linear with nothing attached: most are, and a layer is read often. Else None."""
    try:
        held = vars(linear)
        if "quant_method" in held or held["_modules"] or not held.keys().isdisjoint(HOLDERS):
            return None
        weight = held["_parameters"]["weight"]
        if not _entry(linear.__class__) is _entry(weight.__class__) is _NOBODYS:
            return None
        dtype = weight.dtype
        return dtype if dtype.itemsize > 1 else None
    except FOREIGN:  # which `describe_linear_quant` has words for
        return None


def says_nothing(cls: Hashable) -> bool:
    """Whether objects of this class say nothing of a quantisation: torch's Linear and Parameter."""
    return _entry(cls) is _NOBODYS


def _answer(linear: Any, holders: list[Any], classes: tuple[type, ...]) -> Answer:
    at, entry = _speaker(classes)
    if not isinstance(entry, _Strange):
        return _resolved(entry, holders[at], linear)
    if entry.name:
        return f"is quantised by {entry.name}, which is not known here"
    dtype = maybe(holders[-1], "dtype")
    if dtype is None or dtype.itemsize < 2:
        return f"is no plain linear (weight: {dtype}), and its class is not known here"
    return None


@lru_cache(maxsize=1024)
def _speaker(classes: tuple[type, ...]) -> tuple[int, Entry | _Strange]:
    """Which of a linear and its holders the table knows, and what it says there; else the first holder that it does not know."""
    entries = [_entry(cls) for cls in classes]
    for at, entry in enumerate(entries):
        if not isinstance(entry, _Strange):
            return at, entry
    return -1, next((entry for entry in entries[1:] if entry is not _NOBODYS), _NOBODYS)


def _resolved(entry: Entry, held: Any, linear: Any) -> Answer:
    if isinstance(entry, Asks):
        asked = read.at(held, entry.attribute)
        further = _entry(asked.__class__)
        if isinstance(further, _Strange):
            return f"multiplies by {further.name or asked}, which is not known here"
        return _resolved(further, asked, linear)
    return entry(held, linear) if callable(entry) else entry


@lru_cache(maxsize=512)
def _entry(cls: Hashable) -> Entry | _Strange:
    assert isinstance(cls, type)
    names = [f"{base.__module__.partition('.')[0]}:{base.__name__}" for base in cls.__mro__]
    known = [TABLE[name] for name in names if name in TABLE]
    if known:
        return known[0]
    return _NOBODYS if names[0].partition(":")[0] in ("torch", "builtins") else _Strange(names[0])
