"""How a Hugging Face config says that its checkpoint is quantised: `quantization_config`, in the words of entries.

What it leaves out is held to the names that the linears have in checkpoints. Where part of them is left out, or the method is not
known here, nothing is written, and a note says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from ..adapters.errors import FOREIGN, LayerfuseError, cut, shown
from .published import LINEARS, Linears, QuantKind

_NAMES: Mapping[Linears, tuple[str, ...]] = {
    "attention": (
        "self_attn.o_proj",
        "self_attn.q_proj",
        "self_attn.q_b_proj",
        "self_attn.kv_b_proj",
        "self_attn.k_proj",
    ),
    "mlps": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    "shared_experts": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"),
    "experts": ("mlp.experts.0.gate_proj", "mlp.experts.0.up_proj", "mlp.experts.0.down_proj"),
}
"""Of each, linears as checkpoints call them below a decoder layer."""


MOST_NAMES = 2_000
"""More names that are left out than any config has are not held to the linears."""

_PATTERN = re.compile(r"[\w.*\\()|^$-]{1,200}")
"""Of the patterns of compressed-tensors those that are tried: a pattern may take longer than any file is worth."""


class _UnreadError(Exception):
    """Why a quantization_config is not read."""


def quant_of(said: Any, held: Sequence[Linears], total: int, file: str) -> tuple[dict[str, QuantKind], str | None]:
    """The tables of an entry, and a note where there are none though the config has some.

    Args:
        said: its `quantization_config`, or None.
        held: what the model has linears of.
        total: how many decoder layers there are.
        file: what messages call the config.
    """
    if said is None:
        return {}, None
    try:
        return _read(said, held, total, file), None
    except _UnreadError as why:
        return {}, f"quantization_config is not read: {why}; declare it under quant"
    except FOREIGN as error:
        return {}, f"quantization_config is not read: {cut(str(error))}; declare it under quant"


def _read(said: Any, held: Sequence[Linears], total: int, file: str) -> dict[str, QuantKind]:
    if not isinstance(said, Mapping):
        raise _UnreadError(f"expected a table, got {shown(said)}")
    method = said.get("quant_method")
    reading = {"fp8": _fp8, "mxfp4": _mxfp4, "compressed-tensors": _compressed_tensors}.get(method)  # type: ignore[arg-type]
    if reading is None:
        raise _UnreadError(f"its quant_method is {shown(method)}, and fp8, mxfp4 and compressed-tensors are known here")
    left = [text for key in ("modules_to_not_convert", "ignored_layers", "ignore") for text in said.get(key) or ()]
    if len(left) > MOST_NAMES:
        raise _UnreadError(f"it leaves out {len(left)} names")
    linears = [each for each in LINEARS if each in held and not _is_left_out(each, left, total)]
    if not linears:
        raise _UnreadError("it leaves out every linear that is known here")
    name, words = reading(said)
    kind = QuantKind(linears=linears, source=file, **words)
    try:
        problems = list(kind.problems())
    except LayerfuseError as error:
        problems = [str(error)]
    if problems:
        raise _UnreadError("; ".join(problems))
    return {name: kind}


def _fp8(said: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """transformers/utils/quantization_config.py, `FineGrainedFP8Config`; DeepSeek's `scale_fmt` beside it."""
    block, scheme = said.get("weight_block_size"), said.get("activation_scheme")
    if block is None and scheme == "static":
        return "fp8", {"weight": "float8_e4m3fn", "scheme": "tensor", "activation": "static"}
    if block is None or scheme != "dynamic":
        raise _UnreadError(f"weight_block_size {shown(block)} with activation_scheme {shown(scheme)}")
    powers = ",ue8m0" if said.get("scale_fmt") == "ue8m0" else ""
    words = {"weight": "float8_e4m3fn", "scheme": "block", "block": list(block)}
    return "fp8", {**words, "activation": f"group{block[1]}{powers}"}


def _mxfp4(_: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """transformers/utils/quantization_config.py, `Mxfp4Config`: its linears read what they are given as it is."""
    return "mxfp4", {"weight": "float4_e2m1fn", "scheme": "mx", "block": [1, 32], "activation": "none"}


def _compressed_tensors(said: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """compressed_tensors/quantization/quant_config.py, `QuantizationConfig`: one group, of all linears."""
    groups = list((said.get("config_groups") or {}).values())
    if len(groups) != 1 or groups[0].get("targets") != ["Linear"]:
        raise _UnreadError("it has several groups of linears, or one that is not of all")
    weights, reads = groups[0]["weights"], groups[0].get("input_activations")
    bits, kind, strategy, size = (weights.get(key) for key in ("num_bits", "type", "strategy", "group_size"))
    mx = str(groups[0].get("format") or said.get("format")).startswith("mx")
    dtypes = {(4, "int"): "int4", (8, "int"): "int8", (8, "float"): "float8_e4m3fn", (4, "float"): "float4_e2m1fn"}
    if (
        (bits, kind) not in dtypes
        or strategy not in ("tensor", "channel", "group", "block")
        or (bits == 4 and mx == (kind == "int"))
    ):
        raise _UnreadError(f"weights of {shown(bits)} bits of type {shown(kind)}, one scale per {shown(strategy)}")
    words: dict[str, Any] = {"weight": dtypes[bits, kind], "scheme": "mx" if mx else strategy}
    if strategy in ("group", "block"):
        words["block"] = [1, size] if strategy == "group" else list(weights["block_structure"])
    return f"{kind}{bits}", {**words, "activation": _activation(reads)}


def _activation(reads: Mapping[str, Any] | None) -> str:
    if reads is None:
        return "none"
    said = tuple(reads.get(key) for key in ("num_bits", "type", "strategy", "dynamic"))
    known = {(8, "float", "token", True): "per_token", (8, "float", "tensor", False): "static"}
    if said == (8, "float", "group", True):
        return f"group{reads.get('group_size')}"
    if said not in known:
        raise _UnreadError(f"activations quantised as {shown(dict(reads))}")
    return known[said]


def _is_left_out(linears: Linears, left: Sequence[Any], total: int) -> bool:
    """Whether none of these linears is converted.

    Raises:
        _UnreadError: some are, and some are not.
    """
    names = [f"layers.{layer}.{name}" for layer in range(total) for name in _NAMES[linears]]
    out = [name for name in names if any(_names(str(text), name) for text in left)]
    if 0 < len(out) < len(names):
        raise _UnreadError(f"it leaves out some of the {linears.replace('_', ' ')} ({cut(out[0])}), and not all")
    return bool(out)


def _names(text: str, name: str) -> bool:
    """Whether what a config leaves out is this linear: a pattern of compressed-tensors, a path, a path with stars, or a part of one.

    The path of the layers differs, as where a model has pictures too.
    """
    if text.startswith("re:"):
        if not _PATTERN.fullmatch(text[3:]) or text.count("*") > 2 or ")*" in text:
            raise _UnreadError(f"it leaves out what matches {shown(text)}")
        return re.match(text[3:], f"model.{name}") is not None
    text = text[text.find("layers.") if "layers." in text else 0 :]
    if "*" in text:
        return fnmatchcase(name, text) or fnmatchcase(name, f"{text}.*")
    return f".{text}." in f".{name}."


def held_by(mlps: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[Linears]:
    """What a model has linears of, by its entry's MLPs and its config."""
    yield "attention"
    if any(name != "shared_experts" for name in mlps):
        yield "mlps"
    if "shared_experts" in mlps:
        yield "shared_experts"
    if any(values.get(key) for key in ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")):
        yield "experts"
