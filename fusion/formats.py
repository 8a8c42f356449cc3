"""The formats that activations are quantised to: one entry each, of which a chain's quantised forms are made."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from .declare import BlockScale, Exponents, Packed, Quantised, Result, Scales, SmallScales
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
    scheme: str
    "As `ActivationQuant.scheme` and the names of fusions say it."
    says: str
    "What comes of a tensor, in words."
    mode: int
    "As Triton's kernels know it: `QUANT` in `backends.triton.rows`, where 0 quantises nothing."
    options: tuple[str, ...] = ()
    "The arguments of an op that writes it, in order: the fields of `Quant` that name them."
    call: str
    "Its arithmetic: a call of a function of `ops.arithmetic.REFERENCE`, with the rows and the options to be filled in."
    results: tuple[Result, ...]
    "Its values, and its scales where they are not given: with names to be filled in."
    absent: Callable[[Target], str | None] = _no_fp8
    "Why a target does not have it, as a sentence, or None where it has."

    @property
    def block(self) -> int:
        """Columns that share a scale, where the format itself says how many; else 0."""
        return next((each.columns for each in self.results if isinstance(each, BlockScale)), 0)

    @property
    def packed(self) -> bool:
        """Whether two values are in a byte."""
        return isinstance(self.results[0], Packed)

    def why_not(self, target: Target, width: int) -> str | None:
        """Why rows of this width cannot be quantised to it there, or None."""
        wrong = self.block and width % self.block
        why = f"the quantised tensor is {width} wide, which is no multiple of {self.block}" if wrong else None
        return self.absent(target) or why


_VALUES = Quantised(name="", of="", doc="in fp8, of what the op without the quantisation gives.")
_PACKED = Packed(name="", of="", doc="two fp4 values per byte.")
_EXPONENTS = Exponents(name="", of="", doc="exponents plus 127, one per 32 columns.")
_SMALL = SmallScales(name="", of="", doc="float8_e4m3fn, one per 16 columns, times `global_scale`.")
_PER_TOKEN = Scales(name="", of="", doc="the float32 scales, (..., 1).")
_PER_GROUP = Scales(name="", of="", doc="the float32 scales, (..., groups).")

FORMATS = {
    each.word: each
    for each in (
        Format(
            word="static", scheme="static", says="fp8 by a static scale", mode=3, results=(_VALUES,),
            options=("scale", "dtype"), call="_quantise_static({rows}, {scale}, {dtype})",
        ),
        Format(
            word="token", scheme="per_token", says="fp8 with one scale per token", mode=1, results=(_VALUES, _PER_TOKEN),
            options=("dtype", "use_ue8m0"), call="_quantise({rows}, {dtype}, None, False, {use_ue8m0}, False)",
        ),
        Format(
            word="group", scheme="group", says="fp8 with one scale per group of columns", mode=2,
            results=(_VALUES, _PER_GROUP),
            options=("dtype", "group_size", "column_major", "tma_aligned", "use_ue8m0"),
            call="_quantise({rows}, {dtype}, {group_size}, {column_major}, {use_ue8m0}, {tma_aligned})",
        ),
        Format(
            word="mxfp8", scheme="mxfp8", says="MXFP8: fp8 with one exponent per 32 columns", mode=4, absent=_no_mx,
            results=(_VALUES, _EXPONENTS), call="_quantise_mxfp8({rows})",
        ),
        Format(
            word="mxfp4", scheme="mxfp4", says="MXFP4: fp4 with one exponent per 32 columns", mode=5, absent=_no_mx,
            results=(_PACKED, _EXPONENTS), call="_quantise_mxfp4({rows})",
        ),
        Format(
            word="nvfp4", scheme="nvfp4", says="NVFP4: fp4 with one fp8 scale per 16 columns", mode=6, absent=_no_nvfp4,
            results=(_PACKED, _SMALL), options=("global_scale", "swizzled"),
            call="_quantise_nvfp4({rows}, {global_scale}, {swizzled})",
        ),
    )
}  # fmt: skip
"""Every format by its word."""

FP8 = ("static", "token", "group")
"""Those in plain fp8."""

BLOCKS = tuple(word for word, form in FORMATS.items() if form.block)
"""Those whose blocks are their own; `ActivationQuant.fixed` names them."""
