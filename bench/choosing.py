"""From a question to its case: what a model's site says, what is given by hand, and what is refused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

from attrs import frozen

from ..adapters.errors import did_you_mean, shown
from ..adapters.specs import MLASpec
from ..fusion.catalog import FUSIONS
from ..fusion.chain import Fusion
from ..fusion.declare import GroupSize
from ..fusion.sites import LATENTS, ROLES, Site, sites_of
from .cases import EPSILON, ITEM_SIZES, Case, epsilons_of, offsets_of, rows_of
from .errors import BenchError, UnknownFusionError

if TYPE_CHECKING:
    from ..adapters.specs import AnySpec
    from ..registry.lookup import Registry

FP8 = ("e4m3fn", "e4m3fnuz")
GROUP_SIZES = (32, 64, 128)
GROUP_SIZE = 128


@frozen(kw_only=True)
class _Shape:
    """What a site, or widths given by hand, say of a case."""

    name: str
    widths: dict[str, int]
    columns_after: int | None
    epsilons: dict[str, float]
    weight_offsets: dict[str, float]


def known_fusion(name: str) -> Fusion:
    """The fusion of this name.

    Raises:
        UnknownFusionError: there is none.
    """
    if name not in FUSIONS:
        raise UnknownFusionError(name, FUSIONS)
    return FUSIONS[name]


def make_case(
    name: str,
    *,
    registry: Registry,
    model: str,
    widths: Sequence[int] | None,
    dtype: str,
    fp8: str | None,
    detected_fp8: str,
    group_size: int | None,
    column_major: bool,
    ue8m0: bool,
) -> Case:
    """The case that was asked for. `fp8` and `group_size` are None where nothing was said about them.

    Raises:
        UnknownFusionError: no such fusion.
        UnknownModelError: no such model.
        BenchError: a dtype, widths or option that cannot be measured, or a model without a site for the fusion.
    """
    fusion = known_fusion(name)
    _one_of("dtype", dtype, ITEM_SIZES)
    quant = fusion.quant
    if quant is None and (fp8 is not None or ue8m0):
        raise BenchError(
            f"{name} quantises nothing, so it has no {'ue8m0 scales' if ue8m0 else 'fp8 format'} to choose"
        )
    groups = quant is not None and quant.per == "group"
    if not groups and (group_size is not None or column_major):
        raise BenchError(f"{name} has no groups; {' and '.join(_with_groups()) or 'no fusion'} has")
    fp8 = detected_fp8 if fp8 is None else fp8
    group_size = GROUP_SIZE if group_size is None else group_size
    _one_of("fp8", fp8, FP8)
    if group_size not in GROUP_SIZES:
        raise BenchError(f"the group size must be one of {', '.join(map(str, GROUP_SIZES))}, got {shown(group_size)}")
    shape = _of_model(registry, model, fusion) if widths is None else _of_widths(widths, fusion)
    return Case(
        fusion=name,
        op=fusion.op.name,
        name=shape.name,
        widths=shape.widths,
        row_width=None if shape.columns_after is None else sum(_widths_of_rows(fusion, shape)) + shape.columns_after,
        epsilons=shape.epsilons,
        weight_offsets=shape.weight_offsets,
        dtype=dtype,
        quant=None if quant is None else quant.scheme,
        fp8=None if quant is None else fp8,
        group_size=group_size if groups else None,
        column_major=column_major,
        ue8m0=ue8m0,
    )


def _widths_of_rows(fusion: Fusion, shape: _Shape) -> list[int]:
    return [shape.widths[rows.width] for rows in fusion.op.rows]


def _with_groups() -> list[str]:
    return [name for name, fusion in FUSIONS.items() if any(isinstance(each, GroupSize) for each in fusion.op.args)]


def _one_of(what: str, value: str, known: Iterable[str]) -> None:
    known = list(known)
    if value not in known:
        raise BenchError(f"{what} must be one of {', '.join(known)}, got {shown(value)}{did_you_mean(value, known)}")


# ---- by hand


def _of_widths(widths: Sequence[int], fusion: Fusion) -> _Shape:
    names = fusion.op.widths
    shares = LATENTS in fusion.roles
    given, after = list(widths[: len(names)]), list(widths[len(names) :])
    if len(given) < len(names) or len(after) > shares or min(given) < 1 or min(after, default=0) < 0:
        more = ", then perhaps that of what follows them in a row (0 for nothing)" if shares else ""
        raise BenchError(
            f"widths of {fusion.name} are {len(names)} number{'s' if len(names) > 1 else ''}, {', '.join(names)}{more}; "
            f"got {','.join(map(str, widths))}"
        )
    parts = [f"{_short(name)}{width}" for name, width in zip(names, given, strict=True)]
    return _Shape(
        name="-".join([*parts, *(f"rope{columns}" for columns in after)]),
        widths=dict(zip(names, given, strict=True)),
        columns_after=sum(after) if shares else None,
        epsilons=dict.fromkeys(epsilons_of(fusion.op), EPSILON),
        weight_offsets=dict.fromkeys(offsets_of(fusion.op), 0.0),
    )


def _short(width: str) -> str:
    return width.removesuffix("_width")


# ---- of a model


def _of_model(registry: Registry, model: str, fusion: Fusion) -> _Shape:
    entry = registry.model(model)
    reasons: dict[str, None] = {}
    placed = cast("list[tuple[str, AnySpec]]", entry.specs())
    for path, spec in placed:
        for site in sites_of(path, spec):
            if site.role in fusion.roles:
                found = _at(site, fusion)
                if isinstance(found, dict):
                    return _Shape(name=entry.name, columns_after=_columns_after(site), **found)
                reasons[found] = None
    roles = " or ".join(f"{name} ({ROLES[name].doc})" for name in fusion.roles)
    why = "; ".join(reasons) or f"it has none of the kind {roles}"
    hint = ",".join(name.upper() for name in fusion.op.widths)
    raise BenchError(
        f"{entry.name} has no site where {fusion.name} can stand: {why}. Take another model, or give --widths {hint}"
    )


def _at(site: Site, fusion: Fusion) -> dict[str, Any] | str:
    """Widths, epsilons and offsets of a fusion at a site; or why it cannot stand there."""
    if site.absent is not None or site.unknown is not None:
        return site.absent or site.unknown or ""
    if fusion.add is not None and not site.adds:
        return "no residual is added in front of its norm"
    op = fusion.op
    widths: dict[str, int] = {}
    epsilons = dict.fromkeys(epsilons_of(op), EPSILON)
    offsets = dict.fromkeys(offsets_of(op), 0.0)
    for step, norm in zip(fusion.norms, site.norms, strict=True):
        epsilons[step.epsilon] = norm.epsilon
        if step.weight_offset is not None:
            offsets[step.weight_offset] = norm.weight_offset
        elif norm.weight_offset:
            return f"its norm adds {norm.weight_offset:g} to the weight, which {op.name} does not take"
        width = rows_of(op, step.x).width
        if widths.setdefault(width, norm.width) != norm.width:
            return f"its norms are {widths[width]} and {norm.width} wide, and {op.name} has one width for both"
    missing = [name for name in op.widths if name not in widths]
    if missing:
        return f"no norm says the {', '.join(missing)} of {op.name}"
    in_order = {name: widths[name] for name in op.widths}
    return {"widths": in_order, "epsilons": epsilons, "weight_offsets": offsets}


def _columns_after(site: Site) -> int | None:
    """What follows the latents in a row of the projection that they are split from."""
    if site.role != LATENTS or not isinstance(site.spec, MLASpec):
        return None
    return sum(site.spec.split_sizes) - sum(norm.width for norm in site.norms)
