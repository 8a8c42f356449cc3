"""The formats that activations are quantised to: one entry each, of which a chain's quantised forms are made."""

from __future__ import annotations

from attrs import frozen

from .declare import Exponents, Packed, Quantised, Result, Scales


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
    mx: bool = False
    "Whether it is one of OCP's MX formats, whose scales are exponents of 32 columns each."


_VALUES = Quantised(name="", of="", doc="in fp8, of what the op without the quantisation gives.")
_PACKED = Packed(name="", of="", doc="two fp4 values per byte.")
_EXPONENTS = Exponents(name="", of="", doc="exponents plus 127, one per 32 columns.")
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
            word="mxfp8", scheme="mxfp8", says="MXFP8: fp8 with one exponent per 32 columns", mode=4, mx=True,
            results=(_VALUES, _EXPONENTS), call="_quantise_mxfp8({rows})",
        ),
        Format(
            word="mxfp4", scheme="mxfp4", says="MXFP4: fp4 with one exponent per 32 columns", mode=5, mx=True,
            results=(_PACKED, _EXPONENTS), call="_quantise_mxfp4({rows})",
        ),
    )
}  # fmt: skip
"""Every format by its word."""

FP8 = ("static", "token", "group")
"""Those in plain fp8."""
