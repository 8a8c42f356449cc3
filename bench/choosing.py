"""From a question to its case: what a model's site says, what is given by hand, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import attrs
from attrs import field, frozen

from ..adapters.errors import counted, did_you_mean, shown
from ..adapters.specs import MLASpec
from ..fusion.chain import Form, Fusion
from ..fusion.declare import (
    COLUMN_MAJOR,
    TMA_ALIGNED,
    UE8M0,
    Epsilon,
    GroupSize,
    Limit,
    PaddedWidth,
    QuantDtype,
    Rows,
    WeightOffset,
)
from ..fusion.sites import LATENTS, ROLES, Site, sites_of
from ..fusion.steps import GATES, Add, GatedNorm, Quant, Rope, SiluMul
from .cases import EPSILON, ITEM_SIZES, Case, forms, known_form, names_of, rows_of, step_of, whole_numbers
from .errors import BenchError

if TYPE_CHECKING:
    from ..adapters.specs import AnySpec
    from ..registry.lookup import Registry

FP8 = ("e4m3fn", "e4m3fnuz")
GROUP_SIZES = (32, 64, 128)
GROUP_SIZE = 128
PAD_MULTIPLE = 256
"""Of what padded results are as wide as, unless told otherwise."""

MODELS = ("deepseek-v3", "qwen3-next-80b-a3b", "qwen3-4b")
"""Whose widths are taken where nothing is asked for: the first that has a site."""
PADDED_MODELS = ("gpt-oss-20b",)
"""Likewise where something is padded: a width that is no multiple of anything."""


@frozen(kw_only=True)
class Options:
    """What a case leaves open besides its widths. None: as the model has it, else as the op has it."""

    dtype: str = "bf16"
    "Of rows and unquantised results."
    weight_dtype: str | None = None
    "None: that of the rows."
    fp8: str | None = None
    "e4m3fn or e4m3fnuz; None: the one of this machine's GPU."
    group_size: int | None = None
    "Columns per scale, of a fusion that quantises by groups; 128 if not given."
    column_major: bool = False
    "Scales of groups that lie column after column."
    tma_aligned: bool = False
    "The same, each column starting on 16 bytes."
    ue8m0: bool = False
    "Scales that are powers of two."
    heads: int | None = None
    "Of a gated norm, or of a query."
    kv_heads: int | None = None
    "Of a key; as many as of the query if not given."
    turned: int | None = None
    "Columns of each head that a rope turns; all of them if not given."
    pad_to: int | None = None
    "Columns of a padded result; the next multiple of 256 if not given."
    weight_offset: float | None = None
    "1.0: zero-centred weights."
    activation: str | None = None
    "Of a gated norm's gate: silu or sigmoid."
    gate_first: bool | None = None
    "Whether a gated norm's gate comes before its norm."
    limit: float | None = None
    "What a gated MLP clamps to."

    def __attrs_post_init__(self) -> None:
        for a in attrs.fields(Options):
            value, (word, _, optional) = getattr(self, a.name), str(a.type).partition(" | ")
            if (value is not None or not optional) and (
                type(value) not in _TYPES[word] or (word == "float" and not math.isfinite(value))
            ):
                raise BenchError(f"{a.name}: expected {_WORDS[word]}, got {shown(value)}")


_TYPES: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "bool": (bool,), "float": (float, int)}
_WORDS = {"str": "a name", "int": "a whole number", "bool": "True or False", "float": "a finite number"}
"""What an option of each type takes, in words."""


def options_named(given: dict[str, Any]) -> Options:
    """The options of these names.

    Raises:
        BenchError: there is none of this name, or it takes something else.
    """
    known = [a.name for a in attrs.fields(Options)]
    for name in given:
        if name not in known:
            raise BenchError(f"no option is called {shown(name)}{did_you_mean(name, known)}; known: {', '.join(known)}")
    return Options(**given)


@frozen(kw_only=True)
class _Shape:
    """What a site, or widths given by hand, say of a case."""

    name: str
    widths: dict[str, int]
    columns_after: int | None
    epsilons: dict[str, float]
    weight_offsets: dict[str, float]
    given: dict[str, Any] = field(factory=dict)
    "What the model says of the options."


def make_case(
    name: str,
    *,
    registry: Registry,
    model: str | None = None,
    widths: Sequence[int] | None = None,
    detected_fp8: str = "e4m3fn",
    ranks: int = 1,
    options: Options | None = None,
) -> Case:
    """The case that was asked for.

    Raises:
        UnknownFusionError: no such fusion, and no form whose op is called so.
        UnknownModelError: no such model.
        BenchError: a dtype, widths or option that cannot be measured, or a model without a site for the fusion.
    """
    fusion, form = known_form(name)
    options = options or Options()
    problem = next(_refusals(name, form, options), None)
    if problem is not None:
        raise BenchError(problem)
    shape = _of_model(registry, model, fusion, form) if widths is None else _of_widths(widths, fusion, form)
    asked = attrs.asdict(options)
    options = attrs.evolve(options, **{name: its for name, its in shape.given.items() if asked[name] is None})
    quant, op, gated = step_of(form, Quant), form.op, step_of(form, GatedNorm)
    if op.rows[0].heads and options.heads is None:
        raise BenchError(f"{name} norms head by head, so widths given by hand need --heads")
    if step_of(form, Rope) is not None:
        width = shape.widths[op.rows[0].width]
        turned = options.turned or width // 2 * 2
        if turned > width or turned % 2:
            raise BenchError(f"a rope turns pairs of columns of a head of {width}, got {turned}")
        options = attrs.evolve(options, kv_heads=options.kv_heads or options.heads, turned=turned)
    offsets = shape.weight_offsets
    if options.weight_offset is not None:
        offsets = dict.fromkeys(names_of(op, WeightOffset), options.weight_offset)
    case = Case(
        fusion=fusion.name,
        op=op.name,
        name=shape.name,
        widths=shape.widths,
        heads=options.heads,
        row_width=_row_width(form, shape, options),
        padded_width=_padded_width(form, shape, options),
        epsilons=shape.epsilons,
        weight_offsets=offsets,
        activation=None if gated is None else options.activation or GATES[0],
        norm_before_gate=None if gated is None else not options.gate_first,
        limit=options.limit,
        dtype=options.dtype,
        weight_dtype=options.weight_dtype or options.dtype,
        quant=None if quant is None else quant.format.scheme,
        fp8=_fp8(form, options, detected_fp8),
        group_size=(options.group_size or GROUP_SIZE) if names_of(op, GroupSize) else None,
        column_major=options.column_major or options.tma_aligned,
        tma_aligned=options.tma_aligned,
        ue8m0=options.ue8m0,
        ranks=ranks,
        kv_heads=options.kv_heads,
        turned=options.turned,
    )
    block = 0 if quant is None else quant.format.block
    if block and case.width_of(op.rows[0].name) % block:
        raise BenchError(f"{name} has one scale per {block} columns: the width must be a multiple of that")
    return case


def _refusals(name: str, form: Form, options: Options) -> Iterator[str]:
    """What cannot be asked of a form, each as a sentence."""
    quant, op = step_of(form, Quant), form.op
    for what, value, known in (
        ("dtype", options.dtype, ITEM_SIZES),
        ("weight-dtype", options.weight_dtype or options.dtype, ITEM_SIZES),
        ("fp8", options.fp8 or FP8[0], FP8),
        ("activation", options.activation or GATES[0], GATES),
    ):
        if type(value) is not str or value not in known:
            yield f"{what} must be one of {', '.join(known)}, got {shown(value)}{did_you_mean(value, list(known))}"
    if quant is None and (options.fp8 is not None or options.ue8m0):
        yield f"{name} quantises nothing, so it has no {'ue8m0 scales' if options.ue8m0 else 'fp8 format'} to choose"
    if options.group_size is not None and options.group_size not in GROUP_SIZES:
        yield f"the group size must be one of {', '.join(map(str, GROUP_SIZES))}, got {shown(options.group_size)}"
    for what, count in (("heads", options.heads), ("kv_heads", options.kv_heads), ("turned", options.turned)):
        if count is not None and count < 1:
            yield f"{what} must be at least 1, got {count}"
    takes, flags = {type(argument) for argument in op.args}, {argument.name for argument in op.args}
    gates = (options.activation, options.gate_first)
    grouped = options.group_size is not None or options.column_major or options.tma_aligned
    for asked, can, said in (
        (
            options.fp8 not in (None, FP8[0]),
            QuantDtype in takes,
            "has a format of its own, so it has no fp8 format to choose",
        ),
        (options.ue8m0, UE8M0.name in flags, "has no scales that could be rounded to powers of two"),
        (grouped, GroupSize in takes, f"has no groups; those with groups: {', '.join(_with_groups())}"),
        (options.column_major, COLUMN_MAJOR.name in flags, "has row-major scales only"),
        (options.tma_aligned, TMA_ALIGNED.name in flags, "has no TMA-aligned scales"),
        (
            gates != (None,) * 2,
            step_of(form, GatedNorm) is not None,
            "has no gated norm, so it takes no gate",
        ),
        (options.heads is not None, op.rows[0].heads, "norms no heads, so it takes no number of them"),
        (
            (options.kv_heads, options.turned) != (None, None),
            step_of(form, Rope) is not None,
            "has no rope, so it takes no heads of a key and no columns that are turned",
        ),
        (options.pad_to is not None, PaddedWidth in takes, "pads nothing"),
        (options.weight_offset is not None, WeightOffset in takes, "takes no offset of its weights"),
        (options.limit is not None, Limit in takes and (options.limit or 0) > 0, "takes no such limit"),
    ):
        if asked and not can:
            yield f"{name} {said}"


def _fp8(form: Form, options: Options, detected: str) -> str | None:
    quant = step_of(form, Quant)
    if quant is None:
        return None
    own = quant.format.dtype.removeprefix("float8_")
    return (own if own in FP8 else None) if own else options.fp8 or detected


def _padded_width(form: Form, shape: _Shape, options: Options) -> int | None:
    if not names_of(form.op, PaddedWidth):
        return None
    width = shape.widths[form.op.rows[0].width]
    wanted = options.pad_to or -(-width // PAD_MULTIPLE) * PAD_MULTIPLE
    if wanted < width:
        raise BenchError(f"rows of {width} columns cannot be padded to {wanted}")
    return wanted


def _row_width(form: Form, shape: _Shape, options: Options) -> int | None:
    if step_of(form, Rope) is not None:  # the values follow, as many as there are keys
        return ((options.heads or 1) + 2 * (options.kv_heads or 1)) * shape.widths[form.op.rows[0].width]
    after = shape.columns_after
    return None if after is None else sum(shape.widths[rows.width] for rows in form.op.rows) + after


def _with_groups() -> list[str]:
    return [name for name, (fusion, form) in forms().items() if form.op is fusion.op and names_of(form.op, GroupSize)]


# ---- by hand


def _of_widths(widths: Sequence[int], fusion: Fusion, form: Form) -> _Shape:
    widths = whole_numbers("widths", widths)
    names = form.op.widths
    shares = LATENTS in fusion.roles
    given, after = list(widths[: len(names)]), list(widths[len(names) :])
    if len(given) < len(names) or len(after) > shares or min(given) < 1 or min(after, default=0) < 0:
        more = ", then perhaps that of what follows them in a row (0 for nothing)" if shares else ""
        raise BenchError(
            f"widths of {fusion.name} are {counted(len(names), 'number')} of at least 1, {', '.join(names)}{more}; "
            f"got {','.join(map(str, widths))}"
        )
    parts = [f"{name.removesuffix('_width')}{width}" for name, width in zip(names, given, strict=True)]
    return _Shape(
        name="-".join([*parts, *(f"rope{columns}" for columns in after)]),
        widths=dict(zip(names, given, strict=True)),
        columns_after=sum(after) if shares else _halves(form),
        epsilons=dict.fromkeys(names_of(form.op, Epsilon), EPSILON),
        weight_offsets=dict.fromkeys(names_of(form.op, WeightOffset), 0.0),
    )


def _halves(form: Form) -> int | None:
    """Gate and up are the halves of one projection's row, with nothing behind them."""
    return None if step_of(form, SiluMul) is None else 0


# ---- of a model


def _of_model(registry: Registry, model: str | None, fusion: Fusion, form: Form) -> _Shape:
    names = (model,) if model is not None else PADDED_MODELS if names_of(form.op, PaddedWidth) else MODELS
    said = ""
    for name in names:
        found = _at_model(registry, name, fusion, form)
        if isinstance(found, _Shape):
            return found
        said = said or found
    hint = ",".join(name.upper() for name in form.op.widths)
    raise BenchError(f"{said}. Take another model, or give --widths {hint}")


def _at_model(registry: Registry, model: str, fusion: Fusion, form: Form) -> _Shape | str:
    """What the first site of a model says, or why there is none."""
    entry = registry.model(model)
    reasons: dict[str, None] = {}
    placed = cast("list[tuple[str, AnySpec]]", entry.specs())
    for path, spec in placed:
        for site in sites_of(path, spec):
            if site.role in fusion.roles:
                found = _at(site, form)
                if isinstance(found, dict):
                    return _Shape(name=entry.name, columns_after=_columns_after(site, form), **found)
                reasons[found] = None
    roles = " or ".join(f"{name} ({ROLES[name].doc})" for name in fusion.roles)
    why = "; ".join(reasons) or f"it has none of the kind {roles}"
    return f"{entry.name} has no site where {form.op.name} can stand: {why}"


def _at(site: Site, form: Form) -> dict[str, Any] | str:
    """Widths, epsilons and offsets of a form at a site; or why it cannot stand there."""
    if site.absent is not None or site.unknown is not None:
        return site.absent or site.unknown or ""
    if step_of(form, Add) is not None and not site.adds:
        return "no residual is added in front of its norm"
    op = form.op
    widths: dict[str, int] = {}
    epsilons = dict.fromkeys(names_of(op, Epsilon), EPSILON)
    offsets = dict.fromkeys(names_of(op, WeightOffset), 0.0)
    norms = [step.arguments() for step in form.chain if step.is_norm]
    for arguments, norm in zip(norms, site.norms, strict=True):
        names = {
            kind: [each.name for each in arguments if isinstance(each, kind)] for kind in (Rows, Epsilon, WeightOffset)
        }
        epsilons |= dict.fromkeys(names[Epsilon], norm.epsilon)
        offsets |= dict.fromkeys(names[WeightOffset], norm.weight_offset)
        if norm.weight_offset and not names[WeightOffset]:
            return f"its norm adds {norm.weight_offset:g} to the weight, which {op.name} does not take"
        width = rows_of(op, names[Rows][0]).width
        if widths.setdefault(width, norm.width) != norm.width:
            return f"its norms are {widths[width]} and {norm.width} wide, and {op.name} has one width for both"
    product = step_of(form, SiluMul)
    if product is not None:
        widths[rows_of(op, product.gate).width] = site.quantised_width
    missing = [name for name in op.widths if name not in widths]
    if missing:
        return f"no norm says the {', '.join(missing)} of {op.name}"
    in_order = {name: widths[name] for name in op.widths}
    return {"widths": in_order, "epsilons": epsilons, "weight_offsets": offsets, "given": _gate_of(site, form)}


def _gate_of(site: Site, form: Form) -> dict[str, Any]:
    """What a site says of a gate, heads, activation and order, or the clamp of a gated MLP; or of a rope, heads and columns."""
    spec: Any = site.spec
    if step_of(form, Rope) is not None:
        turned = None if spec.rope is None else spec.rope.width or None
        return {"heads": spec.num_local_heads, "kv_heads": spec.num_local_kv_heads, "turned": turned}
    if step_of(form, GatedNorm) is not None:
        norm: Any = site.norms[0]
        heads = spec.gated_norm_shape[0]
        return {"heads": heads, "activation": norm.activation, "gate_first": not norm.norm_before_gate}
    if step_of(form, SiluMul) is not None:
        limit = spec.swiglu_limit
        return {"limit": limit if limit is not None and math.isfinite(limit) else None}
    return {}


def _columns_after(site: Site, form: Form) -> int | None:
    """What follows the latents in a row of the projection that they are split from."""
    if site.role != LATENTS or not isinstance(site.spec, MLASpec):
        return _halves(form)
    return sum(site.spec.split_sizes) - sum(norm.width for norm in site.norms)
