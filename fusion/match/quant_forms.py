"""Quantisation to fp8 as compiled graphs hold it: the tables.

A scale's arithmetic is read as a word, a letter per step (`STEPS`), and the words that are known are lines in
`SCALE_FORMS`; a quantisation that is one op is a line in `ONE_OP_QUANTS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ..formats import FORMATS, Format
from ..ops.quantisation import SMALLEST_AMAX
from .layouts import ROWS, Layout
from .values import is_number

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
    """What one op does, read off its arguments."""

    columns: int | None = None
    "Columns per scale; None: one scale per token."
    layout: Layout | None = ROWS
    "Of the scales; None: that of the buffer they are written into."
    use_ue8m0: bool = False
    largest: float | None = None
    "What it scales the largest magnitude to, where an argument says so."
    largest_fnuz: float = 240.0
    "The same in e4m3fnuz where none does; vLLM keeps below the format's own."
    static: bool = False
    "One scale for the whole tensor, which is given."
    fixed: str | None = None
    "The word of a format that is no plain fp8."
    swizzled: bool = False
    "Whether its scales lie in tiles, see `ops.quantisation.swizzle`."


_Arguments = Mapping[str, Any]
Read = Callable[[_Arguments], Described | str]


class OneOp(NamedTuple):
    """A quantisation that is one op: how it is read, and where its parts are, as `calls.Call` counts them."""

    read: Read
    source: int = 0
    "The argument that is quantised."
    values: int = 0
    scales: int | None = 1
    "The result; of a static quantisation None, or the written argument that the scale is handed on in."
    scale: int | None = None
    "The argument that is a static or global scale."


def _as_ours(form: Format) -> OneOp:
    """Of the op that does a format alone: what its format leaves open is an argument."""

    def read(given: _Arguments) -> Described:
        return Described(
            given.get("group_size"),
            Layout(given.get("column_major", False), given.get("tma_aligned", False)),
            given.get("use_ue8m0", False),
            static=form.is_plain and len(form.results) == 1,
            fixed=None if form.is_plain else form.word,
            swizzled=given.get("swizzled", False),
        )

    scale = next((place for place, name in enumerate(form.options, 1) if name in ("scale", "global_scale")), None)
    return OneOp(read, scales=len(form.results) - 1 or None, scale=scale)


def _aiter_per_tensor(given: _Arguments) -> Described | str:
    return "it has one scale for the whole tensor" if given["is_dynamic"] else Described(static=True)


def _aiter_per_token(given: _Arguments) -> Described | str:
    return Described() if given.get("scale") is None else "its scale is given, not taken from the values"


def _aiter_group(given: _Arguments) -> Described | str:
    if given.get("transpose_scale"):
        return "it transposes its scales in place, into rows of another shape"
    return Described(given["group_size"])


def _vllm_ir(given: _Arguments) -> Described | str:
    if not given["per_token"]:
        return "it has one scale for the whole tensor"
    if given.get("scale_ub") is not None or given.get("num_token_padding") is not None:
        return "it bounds its scale or pads its rows"
    return Described(largest_fnuz=224.0)


def _vllm_ir_group(given: _Arguments) -> Described | str:
    if given["group_shape"][0] != 1 or given.get("scale_alignment", 1) != 1:
        return "its groups span rows, or its scales are padded"
    return Described(given["group_shape"][1], Layout(given["column_major"]), given["use_ue8m0"], largest_fnuz=224.0)


def _writes_groups(given: _Arguments) -> Described | str:
    """Of vLLM's op, `(input, output_q, output_s, group_size, eps, smallest, largest, scale_ue8m0, ...)`."""
    size, eps, smallest, largest, ue8m0 = [*given.values()][3:8]
    if not is_number(eps, SMALLEST_AMAX):
        return f"it raises the largest magnitude of a group to {eps:g}, and the fused op to {SMALLEST_AMAX:g}"
    if smallest != -largest:
        return f"it clamps to {smallest:g} and {largest:g}, and the fused op to the same on both sides"
    return Described(size, None, bool(ue8m0), float(largest))


def _writes_tokens(given: _Arguments) -> Described | str:
    if given.get("scale_ub") is not None:
        return "the scale is bounded above, and the fused op's is not"
    return Described(layout=None, largest_fnuz=224.0)


def _writes_static(given: _Arguments) -> Described | str:
    if given.get("group_shape") is not None and [*given["group_shape"]] != [-1, -1]:
        return f"its scales are given for blocks of {tuple(given['group_shape'])}, and the fused op takes one scale"
    return Described(static=True, largest_fnuz=224.0)


def _refused(reason: str) -> Read:
    return lambda _: reason


def _vllm_mxfp8(given: _Arguments) -> Described | str:
    """Its exponents are those of amax / 448 rounded up: ours, but for an amax of 448 * 2^k to the last bit."""
    return "it swizzles its exponents" if given["is_sf_swizzled_layout"] else Described(fixed="mxfp8")


def _nvfp4(swizzled: str) -> Read:
    return lambda given: Described(fixed="nvfp4", swizzled=bool(given[swizzled]))


ONE_OP_QUANTS: dict[str, OneOp] = {
    **{name: _as_ours(form) for form in FORMATS.values() for name in (f"layerfuse::{form.op}", *form.ops)},
    "vllm::mxfp8_quantize": OneOp(_vllm_mxfp8),  # quantization/utils/mxfp8_utils.py
    # csrc/libtorch_stable/quantization/fp4, and csrc/libtorch_stable/torch_bindings.cpp; _custom_ops.py calls the second.
    "_C::scaled_fp4_quant": OneOp(_nvfp4("is_sf_swizzled_layout"), scale=1),
    "_C::scaled_fp4_quant.out": OneOp(_nvfp4("is_sf_swizzled_layout"), values=3, scales=4, scale=1),
    "vllm::flashinfer_nvfp4_quantize": OneOp(
        _refused("its scales lie in tiles of 8 x 4, and the fused op's of 128 x 4")
    ),
    "vllm::quant_dequant_mxfp4": OneOp(_refused("it gives the values that MXFP4 would stand for, and not MXFP4")),
    # AITER's HIP kernels round MXFP4's exponents up; torchao/prototype/mx_formats/kernels.py.
    "aiter::dynamic_per_group_scaled_quant_fp4": OneOp(
        _refused("it rounds the exponents of MXFP4 up, and the fused op amax"), source=1, values=0, scales=2
    ),
    "torchao::triton_to_mxfp8_dim0": OneOp(
        _refused("it gives its exponents as float8_e8m0fnu, rounded up, and the fused op as uint8")
    ),
    "vllm::rocm_aiter_per_token_quant": OneOp(_aiter_per_token),
    "vllm::rocm_aiter_group_fp8_quant": OneOp(_aiter_group),
    "vllm::rocm_aiter_per_tensor_quant": OneOp(_aiter_per_tensor, source=1, scales=2, scale=2),
    "vllm_ir::dynamic_quant_fp8": OneOp(_vllm_ir),
    "vllm_ir::dynamic_group_quant_fp8": OneOp(_vllm_ir_group),
    # vLLM's csrc/libtorch_stable
    "_C::per_token_group_fp8_quant": OneOp(_writes_groups, source=0, values=1, scales=2),
    "_C::dynamic_per_token_scaled_fp8_quant": OneOp(_writes_tokens, source=1, values=0, scales=2),
    "_C::static_scaled_fp8_quant": OneOp(_writes_static, source=1, values=0, scales=None, scale=2),
}
"""Quantisations that are one op, by qualified name. Nothing is imported for an engine's op."""


def largest_of(dtype: torch.dtype) -> float:
    """The largest value of an fp8 format."""
    return float(torch.finfo(dtype).max)


def name_of(word: str) -> str | None:
    """Which libraries write a scale that way, or None where none is known."""
    return SCALE_FORMS.get(word)


def spell(word: str) -> str:
    """The steps of a word, spelled out."""
    meanings = dict(re.findall(r"^(\w)  (.+)$", STEPS, re.MULTILINE))
    return ", ".join(meanings[letter] for letter in word)
