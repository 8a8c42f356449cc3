"""The Triton kernels against float64 and against the reference: on a GPU compiled, elsewhere in Triton's interpreter."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import in_turn
from hypothesis import given, settings
from hypothesis import strategies as st

from layerfuse.fusion import FUSIONS, backends
from layerfuse.fusion.backends import BackendError, survey
from layerfuse.fusion.ops import (
    mla_dual_rms_norm,
    mla_dual_rms_norm_group_quant,
    mla_dual_rms_norm_per_token_quant,
)
from layerfuse.fusion.ops.library import case_type
from layerfuse.fusion.ops.quantisation import LARGEST

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
EPS = {torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}
E4M3 = torch.float8_e4m3fn

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(autouse=True, scope="module")
def _triton() -> Iterator[None]:
    backends.force("triton")
    yield
    backends.force(None)


def inputs(
    leading: tuple[int, ...], q_width: int, kv_width: int, dtype: torch.dtype, seed: int = 0, shift: int = 0
) -> tuple[torch.Tensor, ...]:
    """Column ranges of one projection, `shift` elements off its start, and two weights."""
    generator = torch.Generator().manual_seed(seed)
    down = torch.randn(*leading, shift + q_width + kv_width + 8, generator=generator).to(dtype)
    weights = [(torch.rand(width, generator=generator) + 0.5).to(dtype) for width in (q_width, kv_width)]
    _, q, kv, _ = down.to(DEVICE).split([shift, q_width, kv_width, 8], -1)
    return q, kv, *(weight.to(DEVICE) for weight in weights)


def exact(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    wide = x.double()
    return wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + epsilon) * weight.double()


def assert_rounded_once(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> None:
    assert (got.dtype, got.shape, got.is_contiguous()) == (x.dtype, x.shape, True)
    tiny = 6e-8 if x.dtype == torch.float16 else 1e-30
    # Triton's interpreter cuts float32 down to bfloat16 where the hardware rounds to nearest.
    unit = EPS[x.dtype] / (2 if GPU or x.dtype != torch.bfloat16 else 1)
    slack = unit + 8 * EPS[torch.float32]
    torch.testing.assert_close(got.double(), exact(x, weight, epsilon), rtol=slack, atol=tiny, equal_nan=True)


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize(
    ("widths", "step"), in_turn([(1536, 512), (2304, 512), (256, 128), (1000, 384)], range(7)), ids=str
)
def test_every_step_of_the_tuning(
    widths: tuple[int, int], quantised: bool, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from layerfuse.fusion.backends.triton import tuning

    monkeypatch.setattr(tuning, "regime", lambda _: step)
    q, kv, q_weight, kv_weight = inputs((7,), *widths, torch.bfloat16)
    if quantised:
        got, scale, kv_out = mla_dual_rms_norm_group_quant(q, kv, q_weight, kv_weight, 1e-6, 1e-6)
        values = exact(q, q_weight, 1e-6)
        torch.testing.assert_close(scale.double(), expected_scale(values, 128, False), rtol=1e-6, atol=0)
        dequantised = got.double() * scale.double().repeat_interleave(128, -1)[..., : widths[0]]
        # The interpreter loses carries: one value in fifty is half of what it should be.
        assert ((dequantised - values).norm() / values.norm()) < (0.04 if GPU else 0.12)
    else:
        q_out, kv_out = mla_dual_rms_norm(q, kv, q_weight, kv_weight, 1e-6, 1e-6)
        assert_rounded_once(q_out, q, q_weight, 1e-6)
    assert_rounded_once(kv_out, kv, kv_weight, 1e-6)


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
    from layerfuse.fusion.backends.triton import tuning

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
    from layerfuse.fusion.backends.triton import tuning

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


# ---- quantisation ----------------------------------------------------------------------------------------------------

QUANTS: dict[str, tuple[Callable[..., Any], int | None, bool, bool]] = {
    "per token": (lambda *a: mla_dual_rms_norm_per_token_quant(*a, 0.0, 0.0, E4M3, False), None, False, False),
    "per token, ue8m0": (lambda *a: mla_dual_rms_norm_per_token_quant(*a, 0.0, 0.0, E4M3, True), None, False, True),
    "128": (lambda *a: mla_dual_rms_norm_group_quant(*a, 0.0, 0.0, E4M3, 128, False, False, False), 128, False, False),
    "64, column-major": (
        lambda *a: mla_dual_rms_norm_group_quant(*a, 0.0, 0.0, E4M3, 64, True, False, False),
        64,
        True,
        False,
    ),
    "32, ue8m0": (
        lambda *a: mla_dual_rms_norm_group_quant(*a, 0.0, 0.0, E4M3, 32, False, False, True),
        32,
        False,
        True,
    ),
}


def expected_scale(values: torch.Tensor, group_size: int | None, power_of_two: bool) -> torch.Tensor:
    """From float64 values, and independent of the library's own reference."""
    width = values.shape[-1]
    step = width if group_size is None else group_size
    groups = [values[..., at : at + step].abs().amax(-1) for at in range(0, width, step)]
    scale = torch.stack(groups, -1).clamp(min=1e-10) / LARGEST[E4M3]
    return torch.exp2(torch.ceil(torch.log2(scale))) if power_of_two else scale


@pytest.mark.parametrize(
    ("form", "widths", "leading"),
    in_turn(QUANTS, [(1536, 512), (384, 72), (200, 40), (33, 7)], [(6,), (2, 3), (0,)]),
    ids=str,
)
def test_quantised_forms(leading: tuple[int, ...], widths: tuple[int, int], form: str) -> None:
    call, group_size, column_major, power_of_two = QUANTS[form]
    q, kv, q_weight, kv_weight = inputs(leading, *widths, torch.bfloat16)
    got, scale, kv_out = call(q, kv, q_weight, kv_weight, 1e-6, 1e-5)
    assert_rounded_once(kv_out, kv, kv_weight, 1e-5)
    values = exact(q, q_weight, 1e-6)
    wanted = expected_scale(values, group_size, power_of_two)
    assert got.shape == q.shape
    assert scale.shape == wanted.shape
    if column_major and scale.numel():
        assert scale.movedim(-1, 0).is_contiguous()
    torch.testing.assert_close(scale.double(), wanted, rtol=0 if power_of_two else 1e-6, atol=0)
    step = widths[0] if group_size is None else group_size
    spread = scale.double().repeat_interleave(step, -1)[..., : widths[0]]
    # Half a step of e4m3 (3 mantissa bits, smallest step 2^-9), and room for the interpreter, whose conversion drops a
    # carry into the next power of two (seen with Triton 3.6: 127.9 becomes 64).
    error = (got.double() * spread - values).abs()
    allowed = spread * torch.maximum((values / spread).abs() * 2**-4, torch.tensor(2.0**-10, device=DEVICE)) * 1.0001
    wrong = (error > allowed).double().mean() if error.numel() else torch.tensor(0.0)
    assert wrong <= (0 if GPU else 0.05)


@pytest.mark.parametrize("form", QUANTS)
def test_rows_of_zeros_and_broken_rows(form: str) -> None:
    call, _, _, power_of_two = QUANTS[form]
    q, kv, q_weight, kv_weight = inputs((4,), 256, 64, torch.float32)
    q = q.clone()
    q[0] = 0
    q[1, 130] = float("nan")
    q[2, 5] = float("inf")
    got, scale, _ = call(q, kv, q_weight, kv_weight, 1e-6, 1e-6)
    floor = 2.0**-42 if power_of_two else 1e-10 / LARGEST[E4M3]
    torch.testing.assert_close(scale[0], torch.full_like(scale[0], floor), rtol=1e-6, atol=0)
    assert not got[0].float().any()
    assert scale[1].isnan().all()
    if GPU:  # the interpreter converts NaN to a finite fp8
        assert got[1].float().isnan().all()
        assert got[2, 5].float().isnan()
    assert scale[2, 0].isnan(), "the group with the infinity"
    assert torch.isfinite(scale[3]).all()


@given(exponent=st.integers(-30, 30), ulps=st.integers(-2, 2))
@settings(max_examples=40, deadline=None)
def test_power_of_two_scales_are_exact_at_their_steps(exponent: int, ulps: int) -> None:
    """A largest magnitude of 448 * 2^k has the scale 2^k, and one float32 step more has 2^(k+1)."""
    amax = (torch.tensor([448.0 * 2.0**exponent]).view(torch.int32) + ulps).view(torch.float32).to(DEVICE)
    one = torch.ones(1, 1, device=DEVICE)  # of one column: its norm is its weight
    _, scale, _ = mla_dual_rms_norm_per_token_quant(one, one, amax, amax, 0.0, 0.0, 0.0, 0.0, E4M3, True)
    assert scale.item() == 2.0 ** (exponent + (ulps > 0))


# ---- what it does not take -------------------------------------------------------------------------------------------


def test_what_is_refused_says_why() -> None:
    q, kv, q_weight, kv_weight = (x.double() for x in inputs((2,), 16, 8, torch.float32))
    with pytest.raises(BackendError, match=r"triton: the rows are torch.float64; the kernel takes torch.bfloat16"):
        mla_dual_rms_norm(q, kv, q_weight, kv_weight, 1e-6, 1e-6)
    wide = torch.ones(1, 65537, device=DEVICE)
    with pytest.raises(BackendError, match="65537 columns is wider than the 65536"):
        mla_dual_rms_norm(wide, wide, wide[0], wide[0], 1e-6, 1e-6)


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


@pytest.mark.skipif(bool(torch.version.hip), reason="ROCm converts to e4m3fnuz")
def test_amds_fp8_is_refused_off_rocm() -> None:
    q, kv, q_weight, kv_weight = inputs((2,), 16, 8, torch.float32)
    with pytest.raises(BackendError, match="float8_e4m3fnuz is AMD's"):
        mla_dual_rms_norm_per_token_quant(q, kv, q_weight, kv_weight, 1e-6, 1e-6, dtype=torch.float8_e4m3fnuz)
