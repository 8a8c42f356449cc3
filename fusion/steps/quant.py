"""Quantisation of a chain's first norm, or of its product."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import asdict, evolve, field, frozen

from ...adapters.activation_quant import ActivationQuant
from ...adapters.linear_specs import NOT_QUANTISED, NOT_READ
from ...adapters.specs import GatedNormSpec
from ..declare import (
    COLUMN_MAJOR,
    SWIZZLED,
    TMA_ALIGNED,
    UE8M0,
    Argument,
    ColumnMajor,
    Flag,
    GlobalScale,
    GroupSize,
    QuantDtype,
    Result,
    StaticScale,
    Swizzled,
    TmaAligned,
)
from ..formats import FORMATS, Format
from ..kernel_source import later
from ..sites import ROLES, Site
from .step import SINKS, At, FusionError, Legality, Source, Step


@frozen(kw_only=True)
class Quant(Step):
    """Quantisation of the chain's first norm, or of its product."""

    stage = SINKS
    roles = frozenset(ROLES)

    per: str = field()
    "A word of `formats.FORMATS`."
    dtype: str = "dtype"
    scale: str = "scale"
    group_size: str = "group_size"
    column_major: str = "column_major"
    tma_aligned: str | None = "tma_aligned"
    "None: the op knows row- and column-major scales only."
    use_ue8m0: str = "use_ue8m0"
    global_scale: str = "global_scale"
    swizzled: str = "swizzled"
    out: str = "values"
    scales: str = "scales"

    @per.validator
    def _check(self, _: object, value: object) -> None:
        if value not in FORMATS:
            raise FusionError(f"Quant.per: expected one of {', '.join(FORMATS)}, got {value!r}")

    @property
    def format(self) -> Format:
        return FORMATS[self.per]

    @property
    def kernel(self) -> str:
        return "" if self.tma_aligned is None or self.format.mode is None else "quant"

    @property
    def outs(self) -> tuple[str, ...]:
        return (self.out, self.scales)[: len(self.format.results)]

    def arguments(self) -> tuple[Argument, ...]:
        aligned = self.tma_aligned
        known: dict[str, Argument | None] = {
            "scale": StaticScale(name=self.scale),
            "dtype": QuantDtype(name=self.dtype),
            "group_size": GroupSize(name=self.group_size),
            "column_major": ColumnMajor(name=self.column_major, doc=COLUMN_MAJOR.doc),
            "tma_aligned": None if aligned is None else TmaAligned(name=aligned, doc=TMA_ALIGNED.doc),
            "use_ue8m0": Flag(name=self.use_ue8m0, doc=UE8M0.doc),
            "global_scale": GlobalScale(name=self.global_scale),
            "swizzled": Swizzled(name=self.swizzled, doc=SWIZZLED.doc),
        }
        return tuple(taken for option in self.format.options if (taken := known[option]) is not None)

    def results(self, of: str) -> tuple[Result, ...]:
        return tuple(evolve(each, name=name, of=of) for name, each in zip(self.outs, self.format.results, strict=True))

    def said(self, before: str, source: Source) -> str:
        which = f"{source.main.outs[0]} " if source.several else ""
        kept = f"; the {'norm' if source.main.is_norm else 'product'} itself too" if source.main.is_kept else ""
        return f"{before}; {which}quantised ({self.format.says}){kept}"

    def source(self, source: Source) -> Iterator[str]:
        names = asdict(self) | {"tma_aligned": self.tma_aligned or "False"}
        given = ", ".join([source.main.rows, *(names[option] for option in self.format.options)])
        yield f"{', '.join(f'made_{out}' for out in self.outs)} = {self.format.op}({given})"

    def why_not(self, at: At) -> Legality | None:
        site, quant = at.site, at.quant
        readers = f"the linears that read the {site.role} site"
        if quant is None and at.declared:
            return Legality("not_applicable", f"{readers} do not quantise what they read, as was said")
        if quant is None and site.unquantised == NOT_QUANTISED:
            return Legality("not_applicable", f"{readers} {NOT_QUANTISED.removeprefix('they ')}")
        if quant is None and site.unquantised not in (None, NOT_READ):
            counted = "" if site.quantising is None else f" ({site.quantising})"
            why = f"agree on no quantisation that a fusion knows{counted}: {site.unquantised}"
            return Legality("not_applicable", f"{readers} {why}")
        if quant is None:
            return Legality(
                "not_applicable",
                f"{readers} are not known to quantise their activations, so that they may not take what this fusion gives",
            )
        if quant.scheme != self.format.scheme:
            return Legality(
                "not_applicable", f"{readers} quantise with {quant}, which is another format than this fusion's"
            )
        problem = self.format.why_not(at.target, site.quantised_width) or _why_no_groups(site, quant)
        return None if problem is None else Legality("refused", problem)

    def described(self, at: At) -> str:
        first = "the first " if len(at.site.norms) > 1 else ""
        counted = "" if at.site.quantising is None else f" ({at.site.quantising})"
        how = f"{at.target.fp8} with {at.quant}" if self.format.is_plain else str(at.quant)
        return f"{first}in {how}{counted}"

    bind = later("layerfuse.fusion.rewrite.quant_choice:bind_quant")


def _why_no_groups(site: Site, quant: ActivationQuant) -> str | None:
    width, group = site.quantised_width, quant.group_size
    if group is None:
        return None
    if width % group:
        return f"the quantised tensor is {width} wide, which is no multiple of the {group} columns that share a scale, and kernels take whole groups alone"
    if site.norms and isinstance(site.norms[0], GatedNormSpec) and site.norms[0].width % group:
        return f"groups of {group} columns straddle heads of {site.norms[0].width}, and the fused op norms and quantises head by head"
    return None
