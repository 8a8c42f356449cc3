"""How a linear quantises its activations before the matrix product, as far as a fusion must know.

It is a fact about the linear that follows a norm: `linear_quant` reads it there, and a user may say it. The fp8 format
is the target's.
"""

from __future__ import annotations

import re

from attrs import field, frozen

from .errors import LayerfuseError

GROUP_SIZES = (32, 64, 128)
"""Columns per scale that the group form takes; `ops.quantisation` says the same."""


class ActivationQuantError(LayerfuseError, ValueError):
    """A quantisation that no fusion could describe."""


def _group_size(_instance: object, _attribute: object, value: int | None) -> None:
    if value is not None and (type(value) is not int or value not in GROUP_SIZES):
        sizes = ", ".join(map(str, GROUP_SIZES))
        raise ActivationQuantError(f"ActivationQuant.group_size: expected None or one of {sizes}, got {value!r}")


def _layout(instance: ActivationQuant, _attribute: object, value: object) -> None:
    if value and instance.group_size is None:
        raise ActivationQuantError("ActivationQuant.column_major: one scale per token is one column, in either layout")


@frozen(kw_only=True)
class ActivationQuant:
    """Dynamic fp8 quantisation of activations: the scales come from the values of each token.

    Raises:
        ActivationQuantError: a group size that is not in `GROUP_SIZES`, or column-major scales without groups.
    """

    group_size: int | None = field(default=None, validator=_group_size)
    "Columns per scale; None: one scale per token."
    column_major: bool = field(default=False, validator=_layout)
    "The scales' strides: (1, M) for M rows instead of (groups, 1), as DeepGEMM and CUTLASS take them."
    use_ue8m0: bool = False
    "The scales are powers of two."

    @property
    def scheme(self) -> str:
        """`per_token` or `group`, as the fused ops are named."""
        return "per_token" if self.group_size is None else "group"

    @classmethod
    def parse(cls, text: str) -> ActivationQuant:
        """From words with commas: `per_token`, or `group128`, and then `column_major`, `ue8m0`.

        Raises:
            ActivationQuantError: another word.
        """
        scheme, *options = (word.strip() for word in text.split(","))
        match = re.fullmatch(r"group(\d+)", scheme)
        unknown = [word for word in options if word not in ("column_major", "ue8m0")]
        if (scheme != "per_token" and match is None) or unknown:
            raise ActivationQuantError(
                f"expected per_token or group{'|'.join(map(str, GROUP_SIZES))}, then column_major or ue8m0, separated "
                f"by commas, got {text!r}"
            )
        return cls(
            group_size=None if match is None else int(match[1]),
            column_major="column_major" in options,
            use_ue8m0="ue8m0" in options,
        )

    def __str__(self) -> str:
        what = "one scale per token" if self.group_size is None else f"one scale per {self.group_size} columns"
        return what + (", column-major" if self.column_major else "") + (", powers of two" if self.use_ue8m0 else "")
