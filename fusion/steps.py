"""The steps of a chain: each names the arguments and results of an op that it stands for. Nothing here needs torch."""

from __future__ import annotations

from typing import TypeAlias

from attrs import field, frozen

from ..adapters.errors import LayerfuseError
from .declare import (
    COLUMN_MAJOR,
    TMA_ALIGNED,
    UE8M0,
    Argument,
    Choice,
    ColumnMajor,
    Epsilon,
    Exponents,
    Flag,
    GroupName,
    GroupSize,
    Like,
    Limit,
    Packed,
    Padded,
    PaddedWidth,
    QuantDtype,
    Quantised,
    Result,
    Rows,
    Scales,
    StaticScale,
    TmaAligned,
    Weight,
    WeightOffset,
)


class FusionError(LayerfuseError, ValueError):
    """A fusion that is declared wrongly; the message says what to change."""


GATES = ("silu", "sigmoid")
"""What the gate of a gated norm passes through."""


@frozen(kw_only=True)
class AllReduce:
    """The sum over the ranks of a process group, in the order of the ranks and in float32: all of them get the same bits."""

    x: str = "x"
    group: str = "group"

    def arguments(self) -> tuple[Argument, ...]:
        """What it fills."""
        return (
            Rows(name=self.x, doc="(..., width): this rank's part of the sum; every rank gives the same shape."),
            GroupName(name=self.group),
        )

    def results(self, of: str) -> tuple[Result, ...]:  # noqa: ARG002 (the sum goes on unrounded into the add)
        """What it gives."""
        return ()


@frozen(kw_only=True)
class Add:
    """The residual add in front of a norm: `x + residual`, with the sum as a result of its own."""

    x: str = "x"
    residual: str = "residual"
    out: str = "residual_out"

    def arguments(self) -> tuple[Argument, ...]:
        """What it fills."""
        return (
            Rows(name=self.x, doc="(..., width): what attention or MLP gives."),
            Rows(name=self.residual, like=self.x, doc=f"of {self.x}'s shape: the residual stream."),
        )

    def results(self, of: str) -> tuple[Result, ...]:
        """What it gives."""
        return (Like(name=self.out, of=of, doc=f"the sum, rounded to {of}'s dtype."),)


@frozen(kw_only=True)
class Norm:
    """An RMSNorm. `weight_offset` None: the op takes no zero-centred weights."""

    x: str = "x"
    weight: str = "weight"
    epsilon: str = "epsilon"
    weight_offset: str | None = "weight_offset"
    out: str = "normed"
    kept: bool = False
    "Whether the op gives the norm itself beside its quantisation, for its other readers."

    @classmethod
    def of(cls, name: str) -> Norm:
        """One norm of several: `of("q")` takes `q`, `q_weight`, `q_epsilon` and `q_weight_offset`, and gives `q`."""
        return cls(
            x=name,
            weight=f"{name}_weight",
            epsilon=f"{name}_epsilon",
            weight_offset=f"{name}_weight_offset",
            out=name,
        )

    def arguments(self) -> tuple[Argument, ...]:
        """What it fills."""
        width = "width" if self.x == "x" else f"{self.x}_width"
        offset = () if self.weight_offset is None else (WeightOffset(name=self.weight_offset),)
        return (
            Rows(name=self.x, width=width, doc="(..., width): a view of columns goes in as it is."),
            Weight(name=self.weight, of=self.x),
            Epsilon(name=self.epsilon),
            *offset,
        )

    def results(self, of: str) -> tuple[Result, ...]:  # noqa: ARG002 (a norm's result is like what it norms)
        """What it gives."""
        return (Like(name=self.out, of=self.x, doc="the norm, rounded once."),)


@frozen(kw_only=True)
class GatedNorm:
    """The norm of each head with a gate of the same shape, activated, before or behind it."""

    x: str = "x"
    gate: str = "gate"
    weight: str = "weight"
    epsilon: str = "epsilon"
    weight_offset: str = "weight_offset"
    activation: str = "activation"
    norm_before_gate: str = "norm_before_gate"
    out: str = "normed"

    def arguments(self) -> tuple[Argument, ...]:
        """What it fills."""
        before = "True: norm(x) * activation(gate). False: norm(x * activation(gate))."
        return (
            Rows(name=self.x, heads=True, doc="(..., heads, width), normed head by head."),
            Rows(name=self.gate, like=self.x, heads=True, doc=f"of {self.x}'s shape."),
            Weight(name=self.weight, of=self.x),
            Epsilon(name=self.epsilon),
            WeightOffset(name=self.weight_offset),
            Choice(name=self.activation, words=GATES, doc="of the gate: silu or sigmoid."),
            Flag(name=self.norm_before_gate, on=True, doc=before),
        )

    def results(self, of: str) -> tuple[Result, ...]:
        """What it gives."""
        return (Like(name=self.out, of=of, doc="the gated norm, rounded once."),)


@frozen(kw_only=True)
class SiluMul:
    """The inside of a gated MLP: `silu(gate) * up`, both clamped where the model clamps them."""

    gate: str = "gate"
    up: str = "up"
    limit: str = "limit"
    out: str = "product"

    def arguments(self) -> tuple[Argument, ...]:
        """What it fills."""
        return (
            Rows(name=self.gate, doc="(..., width): the half that is activated; a view of columns goes in as it is."),
            Rows(name=self.up, like=self.gate, doc=f"of {self.gate}'s shape: the half that it is multiplied with."),
            Limit(name=self.limit),
        )

    def results(self, of: str) -> tuple[Result, ...]:
        """What it gives."""
        return (Like(name=self.out, of=of, doc="the product, rounded once."),)


_SCHEMES = {"static": "static", "token": "per_token", "group": "group", "mxfp8": "mxfp8", "mxfp4": "mxfp4"}


@frozen(kw_only=True)
class Quant:
    """Quantisation of the chain's first norm, or of its product.

    static: fp8 by a scale that is given. token, group: fp8 with scales from the values. mxfp8, mxfp4: OCP's MX formats.
    """

    per: str = field()
    "A word of the above."
    dtype: str = "dtype"
    scale: str = "scale"
    group_size: str = "group_size"
    column_major: str = "column_major"
    tma_aligned: str | None = "tma_aligned"
    "None: the op knows row- and column-major scales only."
    use_ue8m0: str = "use_ue8m0"
    out: str = "values"
    scales: str = "scales"

    @per.validator
    def _check(self, _: object, value: object) -> None:
        if value not in _SCHEMES:
            raise FusionError(f"Quant.per: expected one of {', '.join(_SCHEMES)}, got {value!r}")

    @property
    def scheme(self) -> str:
        """As `ActivationQuant.scheme` names it."""
        return _SCHEMES[self.per]

    @property
    def mx(self) -> bool:
        """Whether it is one of the MX formats."""
        return self.per in ("mxfp8", "mxfp4")

    @property
    def outs(self) -> tuple[str, ...]:
        """Its results."""
        return (self.out,) if self.per == "static" else (self.out, self.scales)

    def arguments(self) -> tuple[Argument, ...]:
        """What it fills."""
        if self.mx:
            return ()
        dtype = QuantDtype(name=self.dtype)
        if self.per == "static":
            return (StaticScale(name=self.scale), dtype)
        ue8m0 = Flag(name=self.use_ue8m0, doc=UE8M0.doc)
        if self.per == "token":
            return (dtype, ue8m0)
        major = ColumnMajor(name=self.column_major, doc=COLUMN_MAJOR.doc)
        aligned = () if self.tma_aligned is None else (TmaAligned(name=self.tma_aligned, doc=TMA_ALIGNED.doc),)
        return (dtype, GroupSize(name=self.group_size), major, *aligned, ue8m0)

    def results(self, of: str) -> tuple[Result, ...]:
        """What it gives."""
        if self.per == "mxfp4":
            values: Result = Packed(name=self.out, of=of, doc="two fp4 values per byte.")
        else:
            values = Quantised(name=self.out, of=of, doc="in fp8, quantised before any rounding.")
        if self.per == "static":
            return (values,)
        if self.mx:
            return values, Exponents(name=self.scales, of=of, doc="exponents plus 127, one per 32 columns.")
        groups = "1" if self.per == "token" else "groups"
        return values, Scales(name=self.scales, of=of, doc=f"the float32 scales, (..., {groups}).")


@frozen(kw_only=True)
class Pad:
    """Columns of zeros behind a norm, for kernels that take only certain widths."""

    width: str = "padded_width"
    out: str = "padded"

    def arguments(self) -> tuple[Argument, ...]:
        """What it fills."""
        return (PaddedWidth(name=self.width),)

    def results(self, of: str) -> tuple[Result, ...]:
        """What it gives."""
        return (Padded(name=self.out, of=of, doc="the norm with zeros behind it."),)


Step: TypeAlias = AllReduce | Add | Norm | GatedNorm | SiluMul | Quant | Pad
"""What may stand in a chain, in this order."""

ORDER = (AllReduce, Add, Norm, GatedNorm, SiluMul, Quant, Pad)
