"""How a linear quantises its activations before the matrix product, as far as a fusion must know.

It is a fact about the linear that follows a norm: `linear_quant` reads it there, and a user may say it. The fp8 format
is the target's.
"""

from __future__ import annotations

import re
from typing import Any

from attrs import field, frozen

from .errors import ArgumentError, LayerfuseError, shown

GROUP_SIZES = (32, 64, 128)
"""Columns per scale that the group form takes; `ops.quantisation` says the same."""


class ActivationQuantError(LayerfuseError, ValueError):
    """A quantisation that no fusion could describe."""


def _group_size(_instance: object, _attribute: object, value: int | None) -> None:
    if value is not None and (type(value) is not int or value not in GROUP_SIZES):
        sizes = ", ".join(map(str, GROUP_SIZES))
        raise ActivationQuantError(f"ActivationQuant.group_size: expected None or one of {sizes}, got {shown(value)}")


def _flag(_instance: object, attribute: Any, value: object) -> None:
    if type(value) is not bool:
        raise ActivationQuantError(f"ActivationQuant.{attribute.name}: expected True or False, got {shown(value)}")


def _layout(instance: ActivationQuant, _attribute: object, value: object) -> None:
    if value and instance.group_size is None:
        raise ActivationQuantError("ActivationQuant.column_major: one scale per token is one column, in either layout")


def _aligned(instance: ActivationQuant, _attribute: object, value: object) -> None:
    if value and not instance.column_major:
        raise ActivationQuantError("ActivationQuant.tma_aligned: aligned scales are column-major; say both")


def _fixed(instance: ActivationQuant, _attribute: object, value: str | None) -> None:
    if value is not None and (type(value) is not str or not re.fullmatch(_WORD, value)):
        raise ActivationQuantError(
            f"ActivationQuant.fixed: expected None or a format's name, as static or mxfp8, got {shown(value)}"
        )
    if value is not None and (instance.group_size is not None or instance.use_ue8m0):
        raise ActivationQuantError(f"ActivationQuant.fixed: {value} has no group size and no ue8m0 to choose")


def _tiles(instance: ActivationQuant, _attribute: object, value: object) -> None:
    if value and instance.fixed in (None, "static"):
        raise ActivationQuantError("ActivationQuant.swizzled: scales in tiles are those of a format, as fixed='nvfp4'")


_WORD = r"(?!per_|group)[a-z][a-z0-9_]{0,31}"
"""The name of a format that leaves nothing to choose, but for the layout of its scales. `fusion.formats` knows them, and a fusion is there for those."""

OPTIONS = ("column_major", "tma_aligned", "ue8m0", "swizzled", "inside")
"""What may stand behind a scheme, as `ActivationQuant.parse` reads it."""


@frozen(kw_only=True, cache_hash=True)
class ActivationQuant:
    """Quantisation of activations: dynamic fp8 unless `fixed` says otherwise.

    Raises:
        ActivationQuantError: a group size that is not in `GROUP_SIZES`, or column-major scales without groups.

    Whether there is a format of this name is for `FusionConfig` to say: a checkpoint may have one that no fusion writes.
    """

    group_size: int | None = field(default=None, validator=_group_size)
    "Columns per scale; None: one scale per token."
    column_major: bool = field(default=False, validator=[_flag, _layout])
    "The scales' strides: (1, M) for M rows instead of (groups, 1), as DeepGEMM and CUTLASS take them."
    use_ue8m0: bool = field(default=False, validator=_flag)
    "The scales are powers of two."
    tma_aligned: bool = field(default=False, validator=[_flag, _aligned])
    "Column-major scales whose columns start on 16 bytes: strides (1, M rounded up to 4)."
    inside: bool = field(default=False, validator=_flag)
    "The op that multiplies quantises too, and takes what it reads as it is: a fusion finds the quantisation where an engine takes it out."
    fixed: str | None = field(default=None, validator=_fixed)
    "static: fp8 with one scale for the whole tensor, from calibration. Another format's name, as mxfp8 or nvfp4. None: dynamic fp8."
    swizzled: bool = field(default=False, validator=[_flag, _tiles])
    "NVFP4's scales in tiles of 128 rows and 4 scales, as NVIDIA's products take them; else row by row."

    @property
    def scheme(self) -> str:
        """`per_token`, `group` or what is `fixed`, as the fused ops are named."""
        return self.fixed or ("per_token" if self.group_size is None else "group")

    @classmethod
    def parse(cls, text: str) -> ActivationQuant:
        """From words with commas: `per_token`, `group128`, or a format's name, as `static` or `mxfp8`, and then options.

        The options are `column_major`, `tma_aligned` (which implies column_major), `ue8m0`, `swizzled` and `inside`.

        Raises:
            ActivationQuantError: another word.
        """
        if not isinstance(text, str):
            raise ArgumentError(f"ActivationQuant.parse: expected a text such as 'group128,ue8m0', got {shown(text)}")
        scheme, *options = (word.strip() for word in text.split(","))
        match = re.fullmatch(r"group(\d+)", scheme)
        unknown = [word for word in options if word not in OPTIONS]
        fixed = scheme if re.fullmatch(_WORD, scheme) else None
        if (scheme != "per_token" and match is None and fixed is None) or unknown:
            raise ActivationQuantError(
                f"expected per_token, group{'|'.join(map(str, GROUP_SIZES))} or a format's name, as static or mxfp8, then "
                f"{', '.join(OPTIONS[:-1])} or {OPTIONS[-1]}, separated by commas, got {shown(text)}"
            )
        return cls(
            group_size=None if match is None else int(match[1]),
            column_major="column_major" in options or "tma_aligned" in options,
            use_ue8m0="ue8m0" in options,
            tma_aligned="tma_aligned" in options,
            swizzled="swizzled" in options,
            inside="inside" in options,
            fixed=fixed,
        )

    def __str__(self) -> str:
        where = " inside of the product" if self.inside else ""
        if self.fixed is not None:
            tiles = " with scales in tiles of 128 x 4" if self.swizzled else ""
            return ("a static scale" if self.fixed == "static" else self.fixed) + tiles + where
        what = "one scale per token" if self.group_size is None else f"one scale per {self.group_size} columns"
        layout = ", column-major and TMA-aligned" if self.tma_aligned else ", column-major"
        return what + (layout if self.column_major else "") + (", powers of two" if self.use_ue8m0 else "") + where
