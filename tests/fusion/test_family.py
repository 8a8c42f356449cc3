"""Every op of the norm family, in every form: the reference and the Triton kernel against float64, and against each other."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch
from family_support import (
    DEVICE,
    E4M3,
    FORMS,
    GPU,
    Options,
    arguments,
    kernel_of,
    made_by_kernel,
    made_by_reference,
    plain,
    problems,
)
from helpers import in_turn
from hypothesis import given, settings
from hypothesis import strategies as st

from layerfuse.fusion import ops
from layerfuse.fusion.declare import BlockScale, Exponents, Flag, GroupSize, Limit, Quantised, Rows, Scales
from layerfuse.fusion.ops.quantisation import Scaling, quantise, quantise_mxfp8, scale_groups
from layerfuse.fusion.steps import Quant
from layerfuse.testing.op_inputs import HEADS

triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def several(results: Any) -> tuple[torch.Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def cases_of(name: str) -> list[Options]:
    """Each option at least once both ways, dtypes in turn."""
    op = FORMS[name].op
    words = {argument.name for argument in op.args}
    plain = Options()
    found = [
        plain,
        attrs.evolve(plain, dtype=torch.float16, offset=1.0, weight_dtype=torch.float32, activation="sigmoid"),
        attrs.evolve(plain, dtype=torch.float32, gap=0, norm_before_gate=False, limit=0.7),
    ]
    if any(isinstance(argument, GroupSize) for argument in op.args):
        found += [
            attrs.evolve(plain, group_size=32, column_major=True),
            attrs.evolve(plain, group_size=128, column_major=True, tma_aligned=True, activation="sigmoid"),
        ]
    if "swizzled" in words:
        found.append(attrs.evolve(plain, swizzled=True, offset=1.0))
    if "use_ue8m0" in words:
        found.append(attrs.evolve(plain, use_ue8m0=True, weight_dtype=torch.float32))
    return found


def widths_of(name: str) -> list[int]:
    op = FORMS[name].op
    if any(isinstance(result, BlockScale) for result in op.results):
        return [64, 320] if any(isinstance(result, Exponents) for result in op.results) else [64, 272]
    if op.rows[0].heads:
        return [128, 256]
    return [128, 200, 257]


CASES = [
    pytest.param(name, *case.values, marks=case.marks)
    for name in FORMS
    for case in in_turn(widths_of(name), cases_of(name))
]


@pytest.mark.parametrize(("name", "width", "options"), CASES)
def test_the_reference(name: str, width: int, options: Options) -> None:
    for leading in ((7,), (2, 3)):
        args = arguments(FORMS[name], leading, width, options)
        with torch.no_grad():
            results = FORMS[name].op.reference(*args)
        assert problems(FORMS[name], args, results, made_by=made_by_reference) == []


@triton
@pytest.mark.parametrize(("name", "width", "options"), CASES)
def test_the_kernel(name: str, width: int, options: Options) -> None:
    form, kernel = FORMS[name], kernel_of(name)
    args = arguments(form, (3,), width, options)
    assert problems(form, args, kernel(*args), interpreted=not GPU, made_by=made_by_kernel) == []


@triton
@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(sorted(FORMS)),
    rows=st.integers(0, 9),
    width=st.integers(1, 700),
    offset=st.sampled_from([0.0, 1.0]),
    group_size=st.sampled_from([32, 64, 128]),
    gap=st.integers(0, 9),
)
def test_any_width(name: str, rows: int, width: int, offset: float, group_size: int, gap: int) -> None:
    form = FORMS[name]
    block = next((result.columns for result in form.op.results if isinstance(result, BlockScale)), 1)
    width = -(-width // block) * block
    if form.op.rows[0].heads:
        width = -(-width // group_size) * group_size
    if len(form.op.widths) > 1:
        width = max(width, 2)
    args = arguments(form, (rows,), width, Options(offset=offset, group_size=group_size, gap=gap))
    assert problems(form, args, kernel_of(name)(*args), interpreted=not GPU, made_by=made_by_kernel) == []


QUANTISED = [name for name, form in FORMS.items() if isinstance(form.chain[-1], Quant)]


@pytest.mark.parametrize("name", QUANTISED)
def test_what_is_quantised_is_what_the_plain_op_gives(name: str) -> None:
    """Bit for bit: whoever quantises that has the same values and scales."""
    form = FORMS[name]
    args = arguments(form, (5,), 128, Options(group_size=32))
    named = {argument.name: value for argument, value in zip(form.op.args, args, strict=True)}
    quant = form.chain[-1]
    assert isinstance(quant, Quant)
    rows = plain(form, args, made_by_reference).flatten(1)
    options = [named[option] for option in quant.format.options]
    with torch.no_grad():
        given = dict(zip((result.name for result in form.op.results), several(form.op.reference(*args)), strict=True))
        again = several(quant.format.function(rows, *options))
    for result, one in zip(quant.outs, again, strict=True):
        assert torch.equal(given[result].float(), one.float()), result


@triton
@pytest.mark.parametrize("name", QUANTISED)
def test_and_what_a_kernel_quantises_is_what_the_plain_kernel_gives(name: str) -> None:
    """Bit for bit, but for ties, carries and small values, which Triton's interpreter converts to fp8 otherwise than GPUs."""
    form = FORMS[name]
    args = arguments(form, (5,), 128, Options(group_size=32))
    per = form.chain[-1].format.word
    values, scales, *_ = (*several(kernel_of(name)(*args)), None)
    rows = plain(form, args, made_by_kernel).flatten(1).float()
    if per in ("mxfp4", "nvfp4"):
        more = args[-2:] if per == "nvfp4" else []
        packed, small = form.chain[-1].format.function(rows, *more)
        assert torch.equal(values, packed) and torch.equal(scales.view(torch.uint8), small.view(torch.uint8))
        return
    groups = rows.unflatten(1, (-1, rows.shape[1] if per in ("static", "token") else 32))
    if per == "static":
        scales = args[[argument.name for argument in form.op.args].index("scale")].view(1, 1).expand(5, 1)
    elif per == "mxfp8":
        assert torch.equal(scales, quantise_mxfp8(rows)[1])
        scales = torch.exp2(scales.float() - 127)
    else:
        assert torch.equal(scales, groups.abs().amax(-1) * torch.tensor(1 / 448, device=DEVICE))
    scaled = (groups * (1 / scales)[..., None]).clamp(-448, 448).flatten(1)
    wanted = scaled.to(E4M3).view(torch.uint8)
    right = values.view(torch.uint8) == wanted
    if not GPU:
        tie = scaled.contiguous().view(torch.int32) & 0xFFFFF == 0x80000
        right |= tie | (wanted & 7 == 0) | (scaled.abs() < 2.0**-6)
    assert right.all()


def broken(x: torch.Tensor) -> torch.Tensor:
    """Rows of zeros, with a NaN, with an infinity, of subnormal numbers."""
    x = x.clone()
    x[0] = 0
    x[1, ..., 3] = float("nan")
    x[2, ..., 5] = float("inf")
    x[3] = 1e-40
    return x


@triton
@pytest.mark.parametrize("name", FORMS)
def test_broken_rows_are_the_same_everywhere(name: str) -> None:
    """Nothing broken becomes a finite number, and a row of zeros stays one."""
    form = FORMS[name]
    args = arguments(form, (5,), 128, Options(dtype=torch.float32, group_size=32))
    first = next(place for place, argument in enumerate(form.op.args) if isinstance(argument, Rows))
    args[first] = broken(args[first])
    for place, argument in enumerate(form.op.args):
        if isinstance(argument, Rows) and place != first:
            args[place][0] = 0
            args[place][3] = 0
    with torch.no_grad():
        wanted, got = form.op.reference(*args), kernel_of(name)(*args)
    several = [result if isinstance(result, tuple) else (result,) for result in (wanted, got)]
    for declared, want, result in zip(form.op.results, *several, strict=True):
        if want.dtype == E4M3 and not GPU:
            continue  # the interpreter converts NaN to a finite fp8
        wide, other = want.float(), result.float()
        assert torch.equal(wide.isnan(), other.isnan()), declared.name
        assert torch.equal(wide.isinf(), other.isinf()), declared.name
        assert not other[0].any() or declared.name in ("scales",), declared.name
        if declared.name != "kv" and want.dtype in (E4M3, torch.float32) and len(form.op.widths) == 1:
            assert wide[1].isnan().any(), "the NaN shows"
        assert wide[4].isfinite().all() and other[4].isfinite().all(), "a whole row stays whole"


@triton
@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.op.rows[0].heads])
def test_a_gate_that_is_a_column_range_goes_in_as_it_is(name: str) -> None:
    form, width = FORMS[name], 64
    projection = torch.randn(6, HEADS, 3 * width, device=DEVICE).to(torch.bfloat16)
    args = arguments(form, (6,), width, Options(group_size=64))
    args[0], args[1] = projection[..., :width], projection[..., 2 * width :]
    assert problems(form, args, kernel_of(name)(*args), interpreted=not GPU, made_by=made_by_kernel) == []


def test_what_is_refused_names_the_argument() -> None:
    x, weight = torch.ones(2, 4, 96), torch.ones(96)
    with torch.no_grad():
        with pytest.raises(ValueError, match=r"activation must be one of silu, sigmoid, got tanh"):
            ops.gated_rms_norm(x, x, weight, 1e-6, 0.0, "tanh", True)
        with pytest.raises(ValueError, match=r"x must be \(..., heads, width\), got \(96,\)"):
            ops.gated_rms_norm(x[0, 0], x[0, 0], weight, 1e-6)
        with pytest.raises(ValueError, match=r"limit must be positive"):
            ops.silu_mul_per_token_quant(x, x, 0.0)
        with pytest.raises(ValueError, match=r"scale must be one element of torch.float32, got \(2,\)"):
            ops.rms_norm_static_quant(x, weight, 1e-6, 0.0, torch.ones(2))
        with pytest.raises(ValueError, match=r"padded_width must be at least the width 96, got 64"):
            ops.add_rms_norm_pad(x, x, weight, 1e-6, 0.0, 64)
        with pytest.raises(ValueError, match=r"tma_aligned scales are column-major"):
            ops.rms_norm_group_quant(x, weight, 1e-6, 0.0, E4M3, 32, False, True)
        with pytest.raises(ValueError, match=r"rows of 100 columns are no multiple of 32"):
            ops.rms_norm_mxfp4_quant(torch.ones(2, 100), torch.ones(100), 1e-6)


def test_aligned_scales_start_on_sixteen_bytes() -> None:
    with torch.no_grad():
        _, scales = ops.rms_norm_group_quant(torch.randn(5, 256), torch.ones(256), 1e-6, 0.0, E4M3, 64, True, True)
    assert (scales.shape, scales.stride()) == ((5, 4), (1, 8))


def test_every_form_is_covered() -> None:
    """The cases above use both values of every switch that an op has."""
    for name, form in FORMS.items():
        for argument in form.op.args:
            if isinstance(argument, Flag):
                values = {getattr(options, argument.name) for options in cases_of(name)}
                assert values == {True, False}, (name, argument.name)
            if isinstance(argument, Limit):
                assert len({options.limit for options in cases_of(name)}) > 1
    assert len(FORMS) > 30
    assert len({options.group_size for name in FORMS for options in cases_of(name)}) == 3


@pytest.mark.parametrize("name", ["gated_rms_norm_group_quant"])
@pytest.mark.parametrize(("width", "group_size"), [(96, 64), (120, 128), (64, 128)])
def test_groups_that_straddle_heads_are_refused(name: str, width: int, group_size: int) -> None:
    args = arguments(FORMS[name], (2,), width, Options(group_size=group_size))
    with torch.no_grad(), pytest.raises(ValueError, match=f"group_size {group_size} does not divide heads of {width}"):
        getattr(torch.ops.layerfuse, name)(*args)


@pytest.mark.usefixtures("_spare")
def test_renamed_options_keep_their_meaning() -> None:
    from layerfuse.fusion.compose import op_of
    from layerfuse.fusion.ops.library import public
    from layerfuse.fusion.steps import Norm, Quant

    step = Quant(per="group", group_size="gs", column_major="cm", tma_aligned="ta")
    op = op_of("test_renamed_options", (Norm(), step))
    run = public(op)
    x, weight = torch.randn(3, 256), torch.ones(256)
    with torch.no_grad():
        scales = run(x, weight, 1e-6, 0.0, E4M3, 64, True, True, False)[1]
        fake = run(x.to("meta"), weight.to("meta"), 1e-6, 0.0, E4M3, 64, True, True, False)[1]
    assert (scales.shape, scales.stride()) == (fake.shape, fake.stride()) == ((3, 4), (1, 4))


@triton
def test_chains_that_the_kernels_do_not_know_are_refused() -> None:
    from layerfuse.fusion.backends.triton.family import function_of
    from layerfuse.fusion.compose import op_of
    from layerfuse.fusion.steps import Norm, Pad, Quant

    for chain in (
        (Norm(weight_offset=None),),
        (Norm(), Quant(per="group", tma_aligned=None)),
        (Norm(), Quant(per="token"), Pad()),
    ):
        with pytest.raises(ValueError, match="the kernels are for chains with weight offsets"):
            function_of(op_of("test_refused", chain))


GROUPED = [name for name, form in FORMS.items() if name.endswith("_group_quant")]


@pytest.fixture
def by_amax() -> Iterator[None]:
    """As SGLang's kernels have it."""
    scale_groups(Scaling.OF_AMAX)
    yield
    scale_groups(Scaling.OF_SCALE)


def test_groups_are_multiplied_by_the_largest_over_amax_where_an_engine_does_that(by_amax: None) -> None:
    # All that bfloat16 holds from 1 to 2, below sixty-four largest values: some lie halfway between two values of fp8.
    x = torch.arange(0x3F80, 0x4000, dtype=torch.int16).view(torch.bfloat16).repeat(64, 1)
    x[:, 0] = torch.linspace(1.5, 3.9, 64)
    amax = x.float().amax(-1, keepdim=True)
    values, scales = quantise(x, E4M3, 128, False, False)
    assert torch.equal(values.float(), (x.float() * (448 / amax)).to(E4M3).float())
    assert torch.equal(scales, amax / 448)
    rows, _ = quantise(x, E4M3, None, False, False)
    assert torch.equal(rows.float(), (x.float() * (1 / (amax / 448))).to(E4M3).float())
    assert not torch.equal(values.float(), rows.float())


@triton
@pytest.mark.parametrize("name", in_turn(GROUPED))
def test_a_kernel_multiplies_groups_by_that_too(name: str, by_amax: None) -> None:
    form = FORMS[name]
    args = arguments(form, (64,), 512, Options(group_size=128))
    found = []
    for how in (Scaling.OF_SCALE, Scaling.OF_AMAX):
        scale_groups(how)
        results = several(kernel_of(name)(*args))
        assert problems(form, args, results, interpreted=not GPU, made_by=made_by_kernel) == []
        by_kind = {type(result): each for result, each in zip(form.op.results, results, strict=True)}
        found.append((by_kind[Quantised], by_kind[Scales]))
    (values, scales), (by_amax_values, by_amax_scales) = found
    assert torch.equal(scales, by_amax_scales)
    assert not torch.equal(values.float(), by_amax_values.float())
    if GPU:  # Triton's interpreter rounds otherwise where it stores fp8
        rows = plain(form, args, made_by_kernel).reshape(values.shape)
        expected, _ = quantise(rows, E4M3, 128, False, False)
        assert (by_amax_values.float() != expected.float()).float().mean() < 2e-4
