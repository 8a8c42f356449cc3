"""What each `quant_method` of a `quantization_config` says of weights and activations, in the words of `QuantKind`.

The keys and their defaults are those of transformers 5.23, `utils/quantization_config.py`; NVIDIA's ModelOpt has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from ..adapters.errors import shown

Words: TypeAlias = dict[str, Any]
"""Of a `QuantKind`: weight, scheme, block where the scheme has one, activation."""

_FP8, _FP4 = "float8_e4m3fn", "float4_e2m1fn"
NVFP4 = "nvfp4,swizzled"
"""As products take activations in NVFP4: NVIDIA's alone do, and they want scales in tiles."""


class UnreadError(Exception):
    """Why a quantization_config is not read."""


class MalformedError(Exception):
    """A value of a quantization_config that its method cannot have there: its key, what was expected, and what it is."""


def _block(said: Mapping[str, Any], key: str) -> list[int]:
    """Output and input features that share a scale."""
    value = said.get(key)
    if (
        not isinstance(value, (list, tuple))
        or len(value) != 2
        or not all(type(side) is int and side > 0 for side in value)
    ):
        raise MalformedError(
            f"{key}: expected two whole numbers above 0, the output and input features that share a scale, as [128, 128], "
            f"got {shown(value)}"
        )
    return list(value)


def _weight(dtype: str, scheme: str, block: Any = None, activation: str = "none") -> Words:
    words: Words = {"weight": dtype, "scheme": scheme, "activation": activation}
    return words if block is None else {**words, "block": block}


def _integers(bits: Any, group: Any) -> Words:
    """Weights of whole numbers that are read as they are: in groups of input features, or one scale per output feature (-1, None)."""
    if type(bits) is not int or bits not in (2, 3, 4, 8):
        raise UnreadError(f"weights of {shown(bits)} bits")
    return (
        _weight(f"int{bits}", "channel") if group in (-1, None) else _weight(f"int{bits}", "group", [1, _group(group)])
    )


def _group(size: Any) -> int:
    """Input features that share a scale."""
    if type(size) is not int or size < 1:
        raise MalformedError(f"group_size: expected a whole number above 0, got {shown(size)}")
    return size


def _fp8(said: Mapping[str, Any]) -> Words:
    """`FineGrainedFP8Config`, with DeepSeek's `scale_fmt`; without blocks, as vLLM reads it."""
    for key in ("modules_to_convert", "expert_dtype"):
        if said.get(key) not in (None, "fp8"):
            raise UnreadError(f"{key} is {shown(said[key])}")
    block, scheme = said.get("weight_block_size"), said.get("activation_scheme")
    if block is None and scheme == "static":
        return _weight(_FP8, "tensor", activation="static")
    if block is None and scheme == "dynamic":
        raise UnreadError(
            "weights with one scale per tensor and dynamic activations, of which the config does not say whether they have one scale per token "
            "or one for all tokens: vLLM decides by whether its CUTLASS products take fp8"
        )
    if block is None or scheme != "dynamic":
        raise UnreadError(f"weight_block_size {shown(block)} with activation_scheme {shown(scheme)}")
    if said.get("scale_fmt") not in (None, "float", "ue8m0"):
        raise MalformedError(f"scale_fmt: expected float or ue8m0, got {shown(said['scale_fmt'])}")
    powers = ",ue8m0" if said.get("scale_fmt") == "ue8m0" else ""
    sides = _block(said, "weight_block_size")
    return _weight(_FP8, "block", sides, f"group{sides[1]}{powers}")


def left_out(said: Mapping[str, Any]) -> list[str]:
    """The patterns of GPTQModel's `dynamic` that begin with `-:`, which leave linears out, as compressed-tensors writes patterns."""
    rules = said.get("dynamic")
    named = rules if isinstance(rules, Mapping) else {}
    return [f"re:{rule[2:]}" for rule in named if rule.startswith("-:")]


def _gptq(said: Mapping[str, Any]) -> Words:
    """`GPTQConfig`, GPTQModel's `dynamic` and AutoRound's `extra_config`: exceptions, of which those that leave linears out are read (`left_out`)."""
    for key in ("dynamic", "extra_config", "modules_in_block_to_quantize"):
        if said.get(key) and not (key == "dynamic" and len(left_out(said)) == len(said[key])):
            raise UnreadError(f"{key} quantises some linears otherwise, or not")
    return _integers(said.get("bits"), said.get("group_size", 128))


def _bitsandbytes(said: Mapping[str, Any]) -> Words:
    """`BitsAndBytesConfig`: four bits in runs of 64 elements; eight with one scale per output feature and per token."""
    if said.get("load_in_4bit") is True:
        return _weight(str(said.get("bnb_4bit_quant_type", "fp4")), "group", [1, 64])
    if said.get("load_in_8bit") is True:
        return _weight("int8", "channel", activation="llm_int8")  # without the columns of outliers
    raise UnreadError("neither load_in_4bit nor load_in_8bit is true")


def _quanto(said: Mapping[str, Any]) -> Words:
    """`QuantoConfig`: eight bits per output feature, fewer in groups of 128."""
    if said.get("activations") is not None:
        raise UnreadError(f"activations quantised as {shown(said['activations'])}")
    weights = said.get("weights", "int8")
    known = {"int8": ("int8", None), "float8": (_FP8, None), "int4": ("int4", 128), "int2": ("int2", 128)}
    if weights not in known:
        raise UnreadError(f"weights of {shown(weights)}")
    dtype, group = known[weights]
    return _weight(dtype, "channel") if group is None else _weight(dtype, "group", [1, group])


def _hqq(said: Mapping[str, Any]) -> Words:
    """`HqqConfig`, which stores its numbers under `quant_config`; groups lie along one of the two sides."""
    held = said.get("quant_config")
    if said.get("dynamic_config") or (isinstance(held, Mapping) and "weight_quant_params" not in held):
        raise UnreadError("some linears are quantised otherwise than others")
    numbers = said if held is None else held["weight_quant_params"]
    words = _integers(numbers.get("nbits", 4), numbers.get("group_size", 64))
    if numbers.get("axis", 1) == 0 and "block" in words:
        words["block"] = words["block"][::-1]
    return words


def _torchao(said: Mapping[str, Any]) -> Words:
    """`TorchAoConfig`: the name of torchao's config, and its values."""
    kind = said.get("quant_type")
    of_all = kind.get("default") if isinstance(kind, Mapping) else None
    if not isinstance(kind, Mapping) or len(kind) != 1 or not isinstance(of_all, Mapping):
        raise UnreadError(f"quant_type is {shown(kind)}, and one config of torchao for all linears is known here")
    name, values = of_all.get("_type"), of_all.get("_data") or {}
    if name == "Int4WeightOnlyConfig":
        return _integers(4, values.get("group_size", 128))
    if name == "Int8WeightOnlyConfig":
        return _integers(8, values.get("group_size"))
    if name == "Float8WeightOnlyConfig":
        return _weight(_FP8, "channel")
    if name == "Int8DynamicActivationInt8WeightConfig":
        return _weight("int8", "channel", activation="int8")
    if name == "Float8DynamicActivationFloat8WeightConfig" and "PerRow" in str(values.get("granularity")):
        return _weight(_FP8, "channel", activation="per_token")
    raise UnreadError(f"torchao's {shown(name)}")


def _modelopt(said: Mapping[str, Any]) -> Words:
    """NVIDIA's ModelOpt, whose `hf_quant_config.json` has the same under `quantization`."""
    algorithm = said.get("quant_algo")
    algorithm = algorithm.upper() if isinstance(algorithm, str) else algorithm
    if algorithm == "FP8":
        return _weight(_FP8, "tensor", activation="static")
    if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        return _weight(_FP8, "channel", activation="per_token")
    if algorithm == "NVFP4":
        return _weight(_FP4, "group", [1, _group(said.get("group_size", 16))], NVFP4)
    raise UnreadError(f"its quant_algo is {shown(algorithm)}")


def _quark(said: Mapping[str, Any]) -> Words:
    """AMD's Quark, `global_quant_config`; what single layers have otherwise is not read."""
    if said.get("layer_quant_config") or said.get("layer_type_quant_config"):
        raise UnreadError("some linears are quantised otherwise than others")
    everywhere = said.get("global_quant_config") or {}
    weight, reads = everywhere.get("weight") or {}, everywhere.get("input_tensors")
    keys = ("dtype", "qscheme", "group_size", "is_dynamic")
    held = tuple(weight.get(key) for key in keys[:3])
    given = None if reads is None else tuple(reads.get(key) for key in (keys[0], keys[1], keys[3]))
    known: dict[Any, Words] = {
        (("fp4", "per_group", 32), None): _weight(_FP4, "mx", [1, 32]),
        (("fp4", "per_group", 32), ("fp4", "per_group", True)): _weight(_FP4, "mx", [1, 32], "mxfp4"),
        (("fp8_e4m3", "per_tensor", None), ("fp8_e4m3", "per_tensor", False)): _weight(_FP8, "tensor", None, "static"),
        (("fp8_e4m3", "per_channel", None), ("fp8_e4m3", "per_token", True)): _weight(
            _FP8, "channel", None, "per_token"
        ),
        (("int8", "per_channel", None), ("int8", "per_token", True)): _weight("int8", "channel", None, "int8"),
    }
    found = known.get((held, given))
    if found is None:
        raise UnreadError(f"weights {shown(held)} and activations {shown(given)}")
    return found


def _compressed_tensors(said: Mapping[str, Any]) -> Words:
    """compressed_tensors/quantization/quant_config.py, `QuantizationConfig`: one group, of all linears."""
    groups = list((said.get("config_groups") or {}).values())
    if not groups:
        raise UnreadError("config_groups has no group")
    if len(groups) != 1 or groups[0].get("targets") != ["Linear"]:
        raise UnreadError("it has several groups of linears, or one that is not of all")
    weights, reads = groups[0].get("weights"), groups[0].get("input_activations")
    if weights is None:
        raise UnreadError(f"config_groups.{next(iter(said['config_groups']))} has no weights")
    bits, kind, strategy, size = (weights.get(key) for key in ("num_bits", "type", "strategy", "group_size"))
    mx = str(groups[0].get("format") or said.get("format")).startswith("mx")
    dtypes = {(4, "int"): "int4", (8, "int"): "int8", (8, "float"): _FP8, (4, "float"): _FP4}
    nvfp4 = (bits, kind, strategy, mx) == (4, "float", "tensor_group", False)
    if nvfp4:
        strategy = "group"
    if (
        (bits, kind) not in dtypes
        or strategy not in ("tensor", "channel", "group", "block")
        or (bits == 4 and mx == (kind == "int"))
    ) and not nvfp4:
        raise UnreadError(f"weights of {shown(bits)} bits of type {shown(kind)}, one scale per {shown(strategy)}")
    block = None
    if strategy in ("group", "block"):
        block = [1, size] if strategy == "group" else _block(weights, "block_structure")
    return _weight(dtypes[bits, kind], "mx" if mx else strategy, block, _compressed_activation(reads))


def _compressed_activation(reads: Mapping[str, Any] | None) -> str:
    if reads is None:
        return "none"
    said = tuple(reads.get(key) for key in ("num_bits", "type", "strategy", "dynamic"))
    known = {
        (8, "float", "token", True): "per_token",
        (8, "float", "tensor", False): "static",
        (8, "int", "token", True): "int8",
        (4, "float", "tensor_group", "local"): NVFP4,
    }
    if said == (8, "float", "group", True):
        return f"group{reads.get('group_size')}"
    if said not in known:
        raise UnreadError(f"activations quantised as {shown(dict(reads))}")
    return known[said]


METHODS: Mapping[str, Callable[[Mapping[str, Any]], Words]] = {
    "fp8": _fp8,
    "mxfp8": lambda _: _weight(_FP8, "mx", [1, 32], "mxfp8"),
    "mxfp4": lambda _: _weight(_FP4, "mx", [1, 32]),  # its linears read what they are given as it is
    "nvfp4": lambda _: _weight(_FP4, "group", [1, 16], NVFP4),
    "fbgemm_fp8": lambda _: _weight(_FP8, "channel", activation="per_token"),
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "quark": _quark,
    "gptq": _gptq,
    "auto-round": _gptq,
    "awq": lambda said: _integers(said.get("bits", 4), said.get("group_size", 128)),
    "bitsandbytes": _bitsandbytes,
    "quanto": _quanto,
    "eetq": lambda _: _weight("int8", "channel"),
    "hqq": _hqq,
    "torchao": _torchao,
    "metal": lambda said: _integers(said.get("bits", 4), said.get("group_size", 64)),
}
"""The methods that are read."""

_CODEBOOKS = "weights that are numbers of entries in a codebook, which no spec describes"
UNREAD: Mapping[str, str] = {
    **dict.fromkeys(("aqlm", "vptq", "higgs"), _CODEBOOKS),
    "spqr": "weights with outliers in a sparse matrix beside them, which no spec describes",
    "bitnet": "weights of three values, which no spec describes",
    "gguf": "a file of a format of its own, which says it per tensor",
    **dict.fromkeys(
        ("fp_quant", "fouroversix", "sinq"), "weights that are turned or scaled on both sides, which no spec describes"
    ),
    "gemma": "bits that differ from module to module, as its module_quant_configs say",
}
"""The other methods of transformers 5.23, and why they are not read."""
