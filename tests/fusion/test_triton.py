"""The Triton kernels where the shape decides how they are launched, what their arithmetic promises, and what they refuse.

On a GPU compiled, elsewhere in Triton's interpreter. Every form against float64 is `test_family`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from family_support import DEVICE, E4M3, FORMS, GPU, Options, arguments, kernel_of, made_by_kernel, problems
from helpers import in_turn
from hypothesis import given, settings
from hypothesis import strategies as st

from layerfuse.fusion import FUSIONS, backends, ops
from layerfuse.fusion.backends import BackendError, survey
from layerfuse.fusion.ops.library import case_type

pytest.importorskip("triton")

from layerfuse.fusion.backends.triton import tuning

DUAL, QUANTISED, ADD = "mla_dual_rms_norm", "mla_dual_rms_norm_group_quant", "add_rms_norm"


@pytest.fixture
def _triton() -> Iterator[None]:
    backends.force("triton")
    yield
    backends.force(None)


def check(name: str, rows: int, width: int, **options: object) -> None:
    form = FORMS[name]
    args = arguments(form, (rows,), width, Options(group_size=128, **options))
    assert problems(form, args, kernel_of(name)(*args), interpreted=not GPU, made_by=made_by_kernel) == []


@pytest.mark.parametrize(
    ("name", "width", "step"),
    [
        pytest.param(*case.values[0], case.values[1], marks=case.marks)
        for name, widths in (
            (DUAL, (1536, 2304, 256, 1000)),
            (QUANTISED, (1536, 2304, 256, 1000)),
            (ADD, (128, 512, 2880)),
        )
        for case in in_turn([(name, width) for width in widths], range(7))
    ],
)
def test_every_step_of_the_tuning(name: str, width: int, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "regime", lambda _: step)
    check(name, 9, width)


@pytest.mark.parametrize("width", [5120, 12288, 16384])
def test_wide_rows(width: int) -> None:
    check(ADD, 2, width)


@pytest.mark.parametrize(("width", "rows"), in_turn([64, 100, 256], [203, 703]))
def test_rows_that_share_a_program(width: int, rows: int) -> None:
    """More rows than the last program has: what it does twice is the same."""
    check(ADD, rows, width, dtype=torch.float32)


def test_weights_stored_around_zero() -> None:
    """The offset is added in float32: in bfloat16, 1 + 2^-9 would be 1."""
    args = arguments(FORMS[ADD], (3,), 256, Options(offset=1.0))
    args[2] = args[2] * 2**-5
    assert problems(FORMS[ADD], args, kernel_of(ADD)(*args), interpreted=not GPU, made_by=made_by_kernel) == []


def test_the_norm_is_of_the_sum_before_it_is_rounded() -> None:
    """256 + 1 is 256 in bfloat16. Normed, one lies below 256 and the other above, where steps are wide enough to show it."""
    x = torch.full((1, 64), 256.0, device=DEVICE, dtype=torch.bfloat16)
    residual = torch.ones(1, 64, device=DEVICE, dtype=torch.bfloat16)
    residual[0, ::2] = 0
    normed, total = kernel_of(ADD)(x, residual, torch.full((64,), 254.75, device=DEVICE), 0.0, 0.0)
    assert torch.equal(total, x)
    assert normed[0, 0] < normed[0, 1], "254.25 and 255.25, where bfloat16 has steps of one"


@given(
    rows=st.integers(1, 10**9),
    q=st.integers(1, 65536),
    kv=st.integers(1, 65536),
    item_size=st.sampled_from([2, 4]),
    group_size=st.sampled_from([None, 0, 32, 64, 128]),
    aligned=st.booleans(),
    wave=st.sampled_from([32, 64]),
)
def test_launches_cover_any_width(
    rows: int, q: int, kv: int, item_size: int, group_size: int | None, aligned: bool, wave: int
) -> None:
    step = tuning.regime(rows)
    dual = tuning.Dual(q, kv, item_size, group_size is not None, group_size or 0, aligned)
    quantised = group_size is not None
    row = tuning.Row(q, item_size, aligned, quantised, False, group_size or 0, group_size == 0, aligned)
    for launch, widths in (
        (tuning.launch_dual(step, dual, wave), (q, kv)),
        (tuning.launch_row(step, row, wave), (q,)),
    ):
        assert 1 <= launch.warps * wave <= 1024
        assert launch.warps.bit_count() == launch.rows.bit_count() == 1
        assert not (launch.split and launch.rows > 1)
        for width, chunk in zip(widths, (launch.chunk, launch.kv_chunk), strict=False):
            assert chunk.bit_count() == 1
            assert -(-width // chunk) <= 20, "more chunks than a kernel should be unrolled to"
        assert launch.chunk % (group_size or 1) == launch.tail % (group_size or 1) == 0
        if launch.tail:
            assert launch.tail.bit_count() == 1
            assert 0 < q % launch.chunk <= launch.tail < launch.chunk < q


@pytest.mark.parametrize(
    ("rows", "width", "adds", "group", "limited"),
    [
        (64, 5120, True, 0, True),
        (64, 7168, False, 0, True),
        (64, 7168, True, 0, False),
        (256, 8192, True, 0, False),
        (64, 7168, True, 128, False),
        (64, 7168, True, 32, False),
        (256, 7168, True, 128, True),
        (2048, 7168, True, 128, False),
    ],
)
def test_registers_are_limited_where_threads_have_room_or_programs_need_it(
    rows: int, width: int, adds: bool, group: int, limited: bool
) -> None:
    row = tuning.Row(width, 2, adds, group > 0, False, group, False, True)
    launch = tuning.launch_row(tuning.regime(rows), row, 32)
    assert launch.registers == (64 if limited else 0)


@given(
    rows=st.integers(1, 10**9),
    width=st.integers(1, 65536),
    heads=st.integers(0, 256),
    group_size=st.sampled_from([0, 32, 64, 128]),
    wave=st.sampled_from([32, 64]),
)
def test_launches_of_gates_and_products_cover_any_width(
    rows: int, width: int, heads: int, group_size: int, wave: int
) -> None:
    step, head = tuning.regime(rows), min(width, 1024)
    for launch in (
        tuning.launch_gated(step, heads, head, group_size, wave),
        tuning.launch_product(step, width, True, 0, wave),
        tuning.launch_product(step, width, False, group_size or 128, wave),
    ):
        assert 1 <= launch.warps * wave <= 1024
        assert launch.warps.bit_count() == launch.rows.bit_count() == launch.chunk.bit_count() == 1
    assert tuning.launch_gated(step, heads, head, group_size, wave).chunk >= head
    assert tuning.launch_gated(step, heads, head, group_size, wave).rows >= heads


@given(exponent=st.integers(-30, 30), ulps=st.integers(-2, 2))
@settings(max_examples=40, deadline=None)
def test_power_of_two_scales_are_exact_at_their_steps(exponent: int, ulps: int) -> None:
    """A largest magnitude of 448 * 2^k has the scale 2^k, and one float32 step more has 2^(k+1)."""
    amax = (torch.tensor([448.0 * 2.0**exponent]).view(torch.int32) + ulps).view(torch.float32).to(DEVICE)
    one = torch.ones(1, 1, device=DEVICE)  # of one column: its norm is its weight
    _, scale, _ = kernel_of("mla_dual_rms_norm_per_token_quant")(one, one, amax, amax, 0.0, 0.0, 0.0, 0.0, E4M3, True)
    assert scale.item() == 2.0 ** (exponent + (ulps > 0))


# ---- what it does not take -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_triton")
def test_what_is_refused_says_why() -> None:
    for rows, says in (
        (
            torch.ones(1, 16, dtype=torch.float64, device=DEVICE),
            "triton: the rows are torch.float64; the kernel takes torch.bfloat16",
        ),
        (torch.ones(1, 65537, device=DEVICE), "65537 columns is wider than the 65536"),
    ):
        with pytest.raises(BackendError, match=says):
            ops.mla_dual_rms_norm(rows, rows, rows[0], rows[0], 1e-6, 1e-6)


@pytest.mark.usefixtures("_triton")
@pytest.mark.skipif(bool(torch.version.hip), reason="ROCm converts to e4m3fn everywhere")
def test_fp8_is_refused_where_a_gpu_is_too_old_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    op = FUSIONS["mla_dual_rms_norm_per_token_quant"].op
    case = case_type(op)(torch.bfloat16, 16, 16, torch.bfloat16, torch.bfloat16, 0.0, 0.0, E4M3, False)

    def said() -> str | None:
        # A forced backend is asked by name on the CPU too, in the interpreter.
        return dict(survey(op.name, DEVICE, case))["triton"]

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: ((9, 0), (8, 0))[index])
    assert said() == "Triton converts to float8_e4m3fn from sm89 on, and a GPU here is sm80"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    assert said() is None


@pytest.mark.usefixtures("_triton")
@pytest.mark.skipif(bool(torch.version.hip), reason="ROCm converts to e4m3fnuz")
def test_amds_fp8_is_refused_off_rocm() -> None:
    x = torch.ones(2, 16, device=DEVICE)
    with pytest.raises(BackendError, match="float8_e4m3fnuz is AMD's"):
        ops.mla_dual_rms_norm_per_token_quant(x, x, x[0], x[0], 1e-6, 1e-6, dtype=torch.float8_e4m3fnuz)
