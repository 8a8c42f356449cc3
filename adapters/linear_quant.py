"""How a linear quantises its activations at run time: a table of class names, and the two questions asked of it.

A new kind of linear is a line of the table. Classes are named `package:ClassName` and found through their bases; no
engine is imported. Where each line was read, its reading says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, TypeAlias

from attrs import frozen

from . import linear_quant_readings as read
from .activation_quant import ActivationQuant
from .linear_quant_readings import Answer, maybe
from .sources import UnreadableError


@frozen
class Asks:
    """The object at this attribute is looked up in the table instead."""

    attribute: str


Entry: TypeAlias = Callable[[Any, Any], Answer] | Asks | ActivationQuant | str | None

_UPPER_BOUND = "bounds the scales of its quantised activations from above"

TABLE: dict[str, Entry] = {
    # transformers/integrations: finegrained_fp8.py, compressed_tensors.py, fbgemm_fp8.py
    "transformers:FP8Linear": read.finegrained_fp8,
    "transformers:CompressedTensorsFP8Linear": read.PER_TOKEN,
    "transformers:FbgemmFp8Linear": _UPPER_BOUND,
    # compressed_tensors/quantization/quant_scheme.py, on any linear as `quantization_scheme`
    "compressed_tensors:QuantizationScheme": read.compressed_tensors,
    # torchao, on any linear as its `weight`
    "torchao:Float8Tensor": read.float8_tensor,
    "torchao:LinearActivationQuantizedTensor": read.linear_activation_quantized,
    "torchao:WeightTensorWithLinearActivationQuantizationMetadata": read.STATIC,
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
    # ... quantization/compressed_tensors/schemes and quantization/quark/schemes, as `scheme`
    "vllm:CompressedTensorsW8A8Fp8": Asks("fp8_linear"),
    "vllm:CompressedTensorsW8A16Fp8": None,
    "vllm:CompressedTensorsWNA16": None,
    "vllm:QuarkW8A8Fp8": Asks("fp8_linear"),
    "vllm:QuarkW8A8Fp8PerBlock": Asks("fp8_linear"),
    # vllm/model_executor/kernels/linear/scaled_mm: first those that leave activations alone, or see to them inside
    "vllm:MarlinFP8ScaledMMLinearKernel": read.marlin,
    "vllm:XPUW8A16FP8LinearKernel": None,
    "vllm:CPUFp8BlockScaledMMKernel": None,
    "vllm:CPUFp8PerTensorScaledMMLinearKernel": None,
    "vllm:CPUFP8W8A8ScaledMMLinearKernel": read.IN_KERNEL,
    "vllm:HummingFP8ScaledMMLinearKernel": read.IN_KERNEL,
    "vllm:Fp8BlockScaledMMLinearKernel": read.quant_fp8,
    "vllm:FP8ScaledMMLinearKernel": read.quant_fp8,
    # sglang/srt/layers/quantization: unquant.py, fp8.py, w8a8_fp8.py, compressed_tensors/schemes
    "sglang:UnquantizedLinearMethod": None,
    "sglang:Fp8LinearMethod": read.sglang_fp8,
    "sglang:W8A8Fp8LinearMethod": read.sglang_w8a8_fp8,
    "sglang:CompressedTensorsW8A8Fp8": read.sglang_compressed_tensors,
    "sglang:CompressedTensorsW8A16Fp8": None,
    "sglang:CompressedTensorsWNA16": None,
    # atom/model_ops/linear.py
    "atom:LinearBase": read.atom,
}
"""What each class does to activations: how it is read, who is asked instead, an answer, or the reason why there is none."""

_HOLDERS = ("quantization_scheme", "scheme", "quant_method", "weight")
"""What of a linear is looked up after the linear itself: the first that the table knows answers."""

_NOBODYS = ("torch", "builtins")
"""Whose classes say nothing of a quantisation: a Parameter, a text."""

_UNKNOWN: Any = object()


def activation_quant_of(linear: Any) -> ActivationQuant | None:
    """The fp8 quantisation that this linear gives its activations at run time, from the values of each token.

    Returns:
        None where it does not: a plain linear, weights only, static scales, another format, an unknown class.
        `describe_linear_quant` tells these apart.
    """
    answer = describe_linear_quant(linear)
    return answer if isinstance(answer, ActivationQuant) else None


def describe_linear_quant(linear: Any) -> ActivationQuant | str | None:
    """As `activation_quant_of`, and where activations may be quantised in a way that it cannot say, the reason.

    Returns:
        None where the activations stay as they are; a sentence where ActivationQuant has no words for it.
    """
    try:
        answer = _answer(linear)
    except UnreadableError as error:
        answer = f"does not say how it quantises activations: {error.args[0]}"
    return f"{type(linear).__name__} {answer}" if isinstance(answer, str) else answer


def agreed(linears: Iterable[Any]) -> ActivationQuant | None:
    """What all of these linears quantise their activations to; None where they differ, or there are none."""
    found = {activation_quant_of(linear) for linear in linears}
    return found.pop() if len(found) == 1 else None


def _answer(linear: Any) -> Answer:
    strange = ""
    for held in _held(linear):
        entry = _entry(type(held))
        if entry is not _UNKNOWN:
            return _resolved(entry, held, linear)
        if held is not linear and not strange and _name(type(held)).partition(":")[0] not in _NOBODYS:
            strange = _name(type(held))
    if strange:
        return f"is quantised by {strange}, which is not known here"
    dtype = maybe(maybe(linear, "weight"), "dtype")
    if dtype is None or dtype.itemsize < 2:
        return f"is no plain linear (weight: {dtype}), and its class is not known here"
    return None


def _held(linear: Any) -> Iterator[Any]:
    yield linear
    for name in _HOLDERS:
        held = maybe(linear, name)
        if held is not None:
            yield held


def _resolved(entry: Entry, held: Any, linear: Any) -> Answer:
    if isinstance(entry, Asks):
        asked = read.at(held, entry.attribute)
        further = _entry(type(asked))
        if further is _UNKNOWN:
            return f"multiplies by {_name(type(asked))}, which is not known here"
        return _resolved(further, asked, linear)
    return entry(held, linear) if callable(entry) else entry


@lru_cache(maxsize=512)
def _entry(cls: type) -> Any:
    return next((TABLE[name] for name in map(_name, cls.__mro__) if name in TABLE), _UNKNOWN)


def _name(cls: type) -> str:
    return f"{cls.__module__.partition('.')[0]}:{cls.__name__}"
