"""Dynamic fp8 quantisation as compiled graphs hold it: the tables.

A scale's arithmetic is read as a word, a letter per step (`STEPS`), and the words that are known are lines in
`SCALE_FORMS`; a quantisation that is one op is a line in `ONE_OP_QUANTS`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.fx import Node

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default

FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
"""What counts as a conversion to fp8. The plan then says which of them it wants."""

LARGEST_FLOOR = 1 / 512
"""The largest floor of a group's largest magnitude that only concerns tiny rows: vLLM's for one scale per token."""

STEPS = """
a  magnitudes
r  the largest along the last dimension
d  divided by the largest value of the format
f  raised to a floor
u  rounded up to a power of two
"""
"""The letters of a word. Views and float conversions have none: they may stand anywhere."""

SCALE_FORMS: dict[str, str] = {
    "ardf": "vLLM's QuantFP8, per token and in groups",
    "arduf": "vLLM's QuantFP8 in groups, powers of two",
    "arfd": "SGLang, AITER, torchao with a lower bound",
    "ard": "torchao, and DeepSeek's reference code",
    "arfdu": "SGLang and DeepGEMM, powers of two",
    "ardu": "DeepSeek's reference code, powers of two",
    "ardfu": "a floor under the scale itself, powers of two",
}
"""The scales that are known: word, and who writes it."""


class Described(NamedTuple):
    """What one op does, read off its arguments. `columns` None: one scale per token."""

    columns: int | None
    column_major: bool
    use_ue8m0: bool
    largest_fnuz: float = 240.0
    "What it scales the largest magnitude to in e4m3fnuz; vLLM keeps below the format's own."


_Arguments = Mapping[str, Any]


def _ours_per_token(given: _Arguments) -> Described:
    return Described(None, False, given["use_ue8m0"])


def _ours_group(given: _Arguments) -> Described:
    return Described(given["group_size"], given["column_major"], given["use_ue8m0"])


def _aiter_per_token(given: _Arguments) -> Described | str:
    return (
        Described(None, False, False) if given.get("scale") is None else "its scale is given, not taken from the values"
    )


def _aiter_group(given: _Arguments) -> Described:
    return Described(given["group_size"], False, False)


def _vllm_ir(given: _Arguments) -> Described | str:
    if not given["per_token"]:
        return "it has one scale for the whole tensor"
    if given.get("scale_ub") is not None or given.get("num_token_padding") is not None:
        return "it bounds its scale or pads its rows"
    return Described(None, False, False, 224.0)


def _vllm_ir_group(given: _Arguments) -> Described | str:
    if given["group_shape"][0] != 1 or given.get("scale_alignment", 1) != 1:
        return "its groups span rows, or its scales are padded"
    return Described(given["group_shape"][1], given["column_major"], given["use_ue8m0"], 224.0)


ONE_OP_QUANTS: dict[str, Callable[[_Arguments], Described | str]] = {
    "layerfuse::quantise_per_token": _ours_per_token,
    "layerfuse::quantise_group": _ours_group,
    "vllm::rocm_aiter_per_token_quant": _aiter_per_token,
    "vllm::rocm_aiter_group_fp8_quant": _aiter_group,
    "vllm_ir::dynamic_quant_fp8": _vllm_ir,
    "vllm_ir::dynamic_group_quant_fp8": _vllm_ir_group,
}
"""Quantisations that are one op with results (values, scales): qualified name, and what its arguments say. They are
found by name, so naming an engine's op imports nothing. The first argument is what is quantised."""


def describe(node: Node) -> Described | str | None:
    """What a one-op quantisation does, or a sentence on why it cannot be taken in; None where it is no such op."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    read = ONE_OP_QUANTS.get(node.target._schema.name)
    if read is None:
        return None
    given = {argument.name: argument.default_value for argument in node.target._schema.arguments}
    given.update(zip(given, node.args, strict=False))
    said = read({**given, **node.kwargs})
    return f"{node}: {said}" if isinstance(said, str) else said


def largest_of(dtype: torch.dtype) -> float:
    """The largest value of an fp8 format."""
    return float(torch.finfo(dtype).max)


def is_number(given: object, wanted: float) -> bool:
    """Whether an argument is this number, as it is or rounded to float32."""
    if not isinstance(given, float | int) or isinstance(given, bool):
        return False
    return given in (wanted, struct.unpack("f", struct.pack("f", wanted))[0])


def name_of(word: str) -> str | None:
    """Which libraries write a scale that way, or None where none is known."""
    return SCALE_FORMS.get(word)


def spell(word: str) -> str:
    """The steps of a word, spelled out."""
    meanings = dict(re.findall(r"^(\w)  (.+)$", STEPS, re.MULTILINE))
    return ", ".join(meanings[letter] for letter in word)
