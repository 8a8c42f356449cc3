"""The formats that activations are quantised to: one entry each, of which a chain's quantised forms are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import Factory, field, frozen

from .declare import ELEMENTS, BlockScale, Exponents, Quantised, Result, Scales, SmallScales
from .kernel_source import imported
from .target import Target

FP8_FORMATS = ("e4m3fn", "e4m3fnuz")
"""What a quantising fusion can write; `Target.fp8` is one of them where it can run."""


def _no_fp8(target: Target) -> str | None:
    if target.fp8 in FP8_FORMATS:
        return None
    has = "no fp8 format" if target.fp8 is None else f"fp8 {target.fp8}"
    return f"{target} has {has}, and the fused op writes {' or '.join(FP8_FORMATS)}"


def _no_mx(target: Target) -> str | None:
    return None if target.mx else f"{target} has no MX formats; gfx950, gfx1250 and sm100 have"


def _no_nvfp4(target: Target) -> str | None:
    return None if target.nvfp4 else f"{target} has no NVFP4; NVIDIA's have it from sm100 on"


@frozen(kw_only=True)
class Format:
    """One format of quantised activations."""

    word: str
    "As `Quant(per=...)` says it."
    scheme: str = field(default=Factory(lambda self: self.word, takes_self=True))
    "As `ActivationQuant.scheme` and the names of fusions say it."
    says: str
    "What comes of a tensor, in words."
    mode: int | None = None
    "As Triton's kernels know it: `QUANT` in `backends.triton.rows`, where 0 quantises nothing; None: no kernel of layerfuse's does it."
    options: tuple[str, ...] = ()
    "The arguments of an op that writes it, in order: the fields of `Quant` that name them."
    results: tuple[Result, ...]
    "Its values, and its scales where they are not given: with names to be filled in."
    reference: str = field(default=Factory(lambda self: f"{__package__}.ops.quantisation:{self.op}", takes_self=True))
    "`module:function`, its arithmetic in plain torch: from values (..., width) of any dtype and the options, by position, to the results."
    ops: tuple[str, ...] = ()
    "Ops of others, by qualified name, that take and give what `op` does: arguments that they share have its names."
    absent: Callable[[Target], str | None]
    "Why a target does not have it, as a sentence, or None where it has."

    @property
    def op(self) -> str:
        """The op of `ops.canonical` that does it alone."""
        return f"quantise_{self.scheme}"

    @property
    def function(self) -> Callable[..., Any]:
        """What `reference` names. It may import torch."""
        return imported(self.reference)

    @property
    def is_plain(self) -> bool:
        """Whether it is in the target's fp8 format, so that graphs may hold it step by step."""
        return "dtype" in self.options

    @property
    def block(self) -> int:
        """Columns that share a scale, where the format itself says how many; else 0."""
        return next((each.columns for each in self.results if isinstance(each, BlockScale)), 0)

    @property
    def dtype(self) -> str:
        """Of the tensor that holds its values, as torch names it; empty: the target's fp8 format."""
        return next(each.dtype for each in self.results if isinstance(each, Quantised))

    @property
    def packed(self) -> int:
        """How many values lie in one element of that tensor."""
        return ELEMENTS[self.dtype].per if self.dtype else 1

    def why_not(self, target: Target, width: int) -> str | None:
        """Why rows of this width cannot be quantised to it there, or None."""
        wrong = self.block and width % self.block
        why = (
            f"the quantised tensor is {width} wide, which is no multiple of the {self.block} columns that share a scale, and kernels take whole groups alone"
            if wrong
            else None
        )
        return self.absent(target) or why


_VALUES = Quantised(name="", of="", doc="in fp8, of what the op without the quantisation gives.")
_E4M3FN = Quantised(name="", of="", doc=_VALUES.doc, dtype="float8_e4m3fn")
_PACKED = Quantised(name="", of="", doc="two fp4 values per byte.", dtype="uint8")
_EXPONENTS = Exponents(name="", of="", doc="exponents plus 127, one per 32 columns.")
_SMALL = SmallScales(name="", of="", doc="float8_e4m3fn, one per 16 columns, times `global_scale`.")
_PER_TOKEN = Scales(name="", of="", doc="the float32 scales, (..., 1).")
_PER_GROUP = Scales(name="", of="", doc="the float32 scales, (..., groups).")

FORMATS = {
    each.word: each
    for each in (
        Format(
            word="static", says="fp8 by a static scale", mode=3, absent=_no_fp8,
            results=(_VALUES,), options=("scale", "dtype"),
        ),
        Format(
            word="token", scheme="per_token", says="fp8 with one scale per token", mode=1, absent=_no_fp8,
            results=(_VALUES, _PER_TOKEN), options=("dtype", "use_ue8m0"),
        ),
        Format(
            word="group", says="fp8 with one scale per group of columns", mode=2, absent=_no_fp8,
            results=(_VALUES, _PER_GROUP),
            options=("dtype", "group_size", "column_major", "tma_aligned", "use_ue8m0"),
        ),
        Format(
            word="mxfp8", says="MXFP8: fp8 with one exponent per 32 columns", mode=4, absent=_no_mx,
            results=(_E4M3FN, _EXPONENTS),
        ),
        Format(
            word="mxfp4", says="MXFP4: fp4 with one exponent per 32 columns", mode=5, absent=_no_mx,
            results=(_PACKED, _EXPONENTS),
            ops=("vllm::rocm_aiter_dynamic_mxfp4_quant",),  # over AITER's Triton dynamic_mxfp4_quant
        ),
        Format(
            word="nvfp4", says="NVFP4: fp4 with one fp8 scale per 16 columns", mode=6, absent=_no_nvfp4,
            results=(_PACKED, _SMALL), options=("global_scale", "swizzled"),
        ),
    )
}  # fmt: skip
"""Every format by its word."""

FP8 = tuple(word for word, form in FORMATS.items() if form.is_plain)
"""Those in plain fp8."""
