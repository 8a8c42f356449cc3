"""The formats that activations are quantised to: one entry each, of which a chain's quantised forms are made."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class Format:
    """One format of quantised activations."""

    word: str
    "As `Quant(per=...)` says it."
    scheme: str
    "As `ActivationQuant.scheme` and the names of fusions say it."
    says: str
    "What comes of a tensor, in words."
    mx: bool = False
    "Whether it is one of OCP's MX formats, whose scales are exponents of 32 columns each."


FORMATS = {
    each.word: each
    for each in (
        Format(word="static", scheme="static", says="fp8 by a static scale"),
        Format(word="token", scheme="per_token", says="fp8 with one scale per token"),
        Format(word="group", scheme="group", says="fp8 with one scale per group of columns"),
        Format(word="mxfp8", scheme="mxfp8", says="MXFP8: fp8 with one exponent per 32 columns", mx=True),
        Format(word="mxfp4", scheme="mxfp4", says="MXFP4: fp4 with one exponent per 32 columns", mx=True),
    )
}
"""Every format by its word."""

FP8 = ("static", "token", "group")
"""Those in plain fp8."""
