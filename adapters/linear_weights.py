"""How each kind of linear holds its weight: a table of class names, beside that of `linear_quant`.

Classes are named and found as there. What is in no table is not known, and no guess.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from .errors import FOREIGN
from .linear_quant_readings import Holders, at, holders_of, is_fp8, maybe, stored
from .linear_specs import WeightSpec, weight_spec

_FP4 = "float4_e2m1fn"

Reading: TypeAlias = Callable[[Any, Any], WeightSpec | None]
"""Given the object that the table knows and the linear itself; None where neither says it."""


def weight_of(linear: Any, holders: Holders | None = None) -> WeightSpec | None:
    """How a linear that is not plain holds its weight, or None where it is not known. `holders`: as of `describe_linear_quant`."""
    try:
        held, classes = holders or holders_of(linear)
        at, reading = _speaker(classes)
        return None if reading is None else reading(held[at], linear)
    except FOREIGN:  # a linear whose own code fails where it is asked: this decides no spec
        return None


@lru_cache(maxsize=64)
def plain_weight(dtype: Any) -> WeightSpec | None:
    """Of a linear without a quantisation; a weight of eight bits is said to be one by nobody."""
    return weight_spec(_name(dtype), "plain", None) if dtype.itemsize > 1 else None


def _plain(_: Any, linear: Any) -> WeightSpec | None:
    return plain_weight(stored(linear, "weight").dtype)


def _scaled(dtype: str, block: Sequence[int] | None, whole: str = "tensor") -> WeightSpec:
    """One scale per block if there are blocks, else as `whole` says."""
    return (
        weight_spec(dtype, whole, None)
        if block is None
        else weight_spec(dtype, "block", (int(block[0]), int(block[1])))
    )


def _finegrained_fp8(linear: Any, _: Any) -> WeightSpec | None:
    """transformers/integrations/finegrained_fp8.py, `FP8Linear`."""
    if not is_fp8(linear.weight.dtype):
        return plain_weight(linear.weight.dtype)
    return _scaled(_name(linear.weight.dtype), at(linear, "block_size"))


def _float8_tensor(weight: Any, _: Any) -> WeightSpec | None:
    """torchao/quantization/quantize_/workflows/float8/float8_tensor.py, `Float8Tensor` of 0.18: `block_size` is what shares a scale."""
    dtype, (rows, columns) = _name(at(weight, "qdata.dtype")), at(weight, "block_size")
    if columns != weight.shape[1]:
        return _scaled(dtype, (rows, columns))
    return (
        weight_spec(dtype, "channel", None) if rows == 1 else _scaled(dtype, None) if rows == weight.shape[0] else None
    )


def _compressed_tensors(scheme: Any, linear: Any) -> WeightSpec | None:
    """compressed_tensors/quantization/quant_args.py, `QuantizationArgs` of `QuantizationScheme.weights`."""
    args = at(scheme, "weights")
    return _plain(scheme, linear) if args is None else _compressed(args)


def _compressed(args: Any) -> WeightSpec | None:
    kind, bits = at(args, "type"), at(args, "num_bits")
    dtype = "float8_e4m3fn" if (kind, bits) == ("float", 8) else f"{kind}{bits}"
    strategy = at(args, "strategy")
    if strategy in ("tensor", "channel", "block"):
        return _scaled(dtype, at(args, "block_structure") if strategy == "block" else None, strategy)
    return weight_spec(dtype, "group", (1, at(args, "group_size"))) if strategy == "group" else None


def _quant_key(method: Any, linear: Any) -> WeightSpec | None:
    """vllm/model_executor/layers/quantization/utils/quant_utils.py, `QuantKey`; 16 bits wide, it is not yet quantised."""
    dtype = stored(linear, "weight").dtype
    if dtype.itemsize in (2, 4) and dtype.is_floating_point:
        return plain_weight(dtype)
    return _of_key(at(method, "weight_quant_key"))


def _modelopt(method: Any, _: Any) -> WeightSpec | None:
    """vllm/model_executor/layers/quantization/modelopt.py, `ModelOptLinearMethod`: of two keys, of the weight and of activations."""
    return _of_key(at(method, "spec.weight"))


def _of_key(key: Any) -> WeightSpec | None:
    rows, columns = key.scale.group_shape
    if not _name(key.dtype).startswith("float8"):  # vLLM's word for two values of four bits to a byte
        return _nvfp4() if key.scale2 is not None and (rows, columns) == (1, 16) else None
    if rows == 1 < columns:  # of an MX format
        return weight_spec(_name(key.dtype), "mx", (1, 32)) if columns == 32 else None
    if (rows, columns) == (-1, -1):
        return weight_spec(_name(key.dtype), "tensor", None)
    channel = (rows, columns) in ((-1, 1), (1, -1))  # vLLM's words for it are those of activations, or of weights
    return weight_spec(_name(key.dtype), "channel", None) if channel else _scaled(_name(key.dtype), (rows, columns))


def _packed_integers(scheme: Any, _: Any) -> WeightSpec | None:
    """vllm: compressed_tensors/schemes/compressed_tensors_wNa16.py."""
    dtype, group = f"int{at(scheme, 'num_bits')}", at(scheme, "group_size")
    return weight_spec(dtype, "channel", None) if group == -1 else weight_spec(dtype, "group", (1, group))


def _mx(dtype: str) -> Reading:
    return lambda *_: weight_spec(dtype, "mx", (1, 32))


def _nvfp4(*_: Any) -> WeightSpec:
    return weight_spec(_FP4, "group", (1, 16))


def _sglang_fp8(method: Any, linear: Any) -> WeightSpec | None:
    """sglang/srt/layers/quantization/fp8.py, w8a8_fp8.py and compressed_tensors_w8a8_fp8.py: blocks, or as many scales as there are."""
    if maybe(method, "use_mxfp8"):
        return weight_spec("float8_e4m3fn", "mx", (1, 32))
    weight = stored(linear, "weight")
    if not is_fp8(weight.dtype):
        return plain_weight(weight.dtype)
    block = maybe(method, "weight_block_size")
    if block is None and maybe(method, "block_quant"):
        block = at(method, "quant_config.weight_block_size")
    if block is not None:
        return _scaled(_name(weight.dtype), block)
    scales = at(linear, "weight_scale").numel()
    return weight_spec(_name(weight.dtype), "channel" if scales == weight.shape[0] > 1 else "tensor", None)


_ATOM = {"per_Token": "channel", "per_Tensor": "tensor"}


def _atom(linear: Any, _: Any) -> WeightSpec | None:
    """atom/model_ops/linear.py, `LinearBase`; the names are those of AITER's `QuantType`."""
    return _atom_scales(at(linear, "quant_type.name"), _name(at(linear, "params_dtype")))


def _atom_scales(kind: Any, dtype: str) -> WeightSpec | None:
    if kind == "No":
        return weight_spec(dtype, "plain", None)
    if kind == "per_1x32":
        return weight_spec(dtype, "mx", (1, 32))
    if kind == "per_1x128":
        return weight_spec(dtype, "block", (128, 128))
    return weight_spec(dtype, _ATOM[kind], None) if kind in _ATOM else None


# ---- the experts of a mixture: given its quantisation method, and the module that holds their weights


def _plain_experts(_: Any, experts: Any) -> WeightSpec | None:
    return plain_weight(stored(experts, "w13_weight").dtype)


def _finegrained_fp8_experts(experts: Any, _: Any) -> WeightSpec | None:
    """transformers/integrations/finegrained_fp8.py, `FP8Experts`; weights of four bits are held two to a byte."""
    dtype = stored(experts, "down_proj").dtype
    return _scaled(_name(dtype), at(experts, "block_size")) if is_fp8(dtype) else weight_spec(_FP4, "mx", (1, 32))


def _fp8_experts(block: str) -> Reading:
    """`Fp8MoEMethod` of vLLM's and SGLang's fp8.py: without blocks, one scale per expert and projection."""

    def reading(method: Any, experts: Any) -> WeightSpec | None:
        dtype = stored(experts, "w13_weight").dtype
        if not is_fp8(dtype):  # a checkpoint that is quantised as it is loaded, or one of four bits
            return plain_weight(dtype)
        if maybe(method, "use_mxfp8"):
            return weight_spec(_name(dtype), "mx", (1, 32))
        return _scaled(_name(dtype), at(method, block))

    return reading


def _atom_fp8_experts(method: Any, _: Any) -> WeightSpec | None:
    """atom/model_ops/moe.py, `Fp8MoEMethod`."""
    return _atom_scales(at(method, "quant_type.name"), _name(at(method, "quant_dtype")))


TABLE: dict[str, Reading] = {
    "transformers:FP8Linear": _finegrained_fp8,
    "compressed_tensors:QuantizationScheme": _compressed_tensors,
    "torchao:Float8Tensor": _float8_tensor,
    "vllm:UnquantizedLinearMethod": _plain,
    "vllm:Fp8LinearMethod": _quant_key,
    "vllm:Fp8PerTensorOnlineLinearMethod": _quant_key,
    "vllm:Fp8PerBlockOnlineLinearMethod": _quant_key,
    "vllm:Fp8PtpcOnlineLinearMethod": _quant_key,
    "vllm:CompressedTensorsW8A8Fp8": _quant_key,
    "vllm:CompressedTensorsW8A16Fp8": _quant_key,
    "vllm:CompressedTensorsWNA16": _packed_integers,
    "vllm:CompressedTensorsW8A8Mxfp8": _mx("float8_e4m3fn"),
    "vllm:CompressedTensorsW4A4Mxfp4": _mx(_FP4),
    "vllm:CompressedTensorsW4A4Fp4": _nvfp4,
    "vllm:QuarkNVFP4": _nvfp4,
    "vllm:ModelOptLinearMethod": _modelopt,
    "sglang:UnquantizedLinearMethod": _plain,
    "sglang:Fp8LinearMethod": _sglang_fp8,
    "sglang:W8A8Fp8LinearMethod": _sglang_fp8,
    "sglang:CompressedTensorsW8A8Fp8": _sglang_fp8,
    "sglang:CompressedTensorsW4A4Fp4": _nvfp4,
    "sglang:ModelOptFp4LinearMethod": _nvfp4,
    "atom:LinearBase": _atom,
    "transformers:FP8Experts": _finegrained_fp8_experts,
    "transformers:Mxfp4GptOssExperts": _mx(_FP4),
    "vllm:UnquantizedFusedMoEMethod": _plain_experts,
    "vllm:Fp8MoEMethod": _fp8_experts("moe_block_shape"),
    "vllm:CompressedTensorsW8A8Fp8MoEMethod": lambda method, _: _compressed(at(method, "weight_quant")),
    "vllm:GptOssMxfp4MoEMethod": _mx(_FP4),
    "vllm:Mxfp4MoEMethod": _mx(_FP4),
    "sglang:UnquantizedFusedMoEMethod": _plain_experts,
    "sglang:Fp8MoEMethod": _fp8_experts("weight_block_size"),
    "sglang:Mxfp4MoEMethod": _mx(_FP4),
    "atom:UnquantizedFusedMoEMethod": _plain_experts,
    "atom:Mxfp4MoEMethod": _mx(_FP4),
    "atom:Fp8MoEMethod": _atom_fp8_experts,
    "atom:CompressedTensorsFp8MoEMethod": _atom_fp8_experts,
}


@lru_cache(maxsize=1024)
def _speaker(classes: tuple[type, ...]) -> tuple[int, Reading | None]:
    """Which of a linear and its holders the table knows, and how it is read."""
    readings = map(_reading, classes)
    return next(((at, reading) for at, reading in enumerate(readings) if reading is not None), (-1, None))


@lru_cache(maxsize=512)
def _reading(cls: Hashable) -> Reading | None:
    assert isinstance(cls, type)
    names = (f"{base.__module__.partition('.')[0]}:{base.__name__}" for base in cls.__mro__)
    return next((TABLE[name] for name in names if name in TABLE), None)


@lru_cache(maxsize=64)
def _name(dtype: Hashable) -> str:
    return str(dtype).removeprefix("torch.")
