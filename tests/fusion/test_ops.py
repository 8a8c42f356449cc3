"""The ops against float64, on every shape and layout that reaches them, and what they refuse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layerfuse.fusion import backends
from layerfuse.fusion.backends import Backend, BackendError
from layerfuse.fusion.declare import Like, Op, Rows
from layerfuse.fusion.ops import (
    mla_dual_rms_norm,
    mla_dual_rms_norm_group_quant,
    mla_dual_rms_norm_per_token_quant,
    rms_norm,
)
from layerfuse.fusion.ops.library import declared

EPS = {torch.float64: 2**-52, torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def exact(x: torch.Tensor, weight: torch.Tensor, epsilon: float, offset: float = 0.0) -> torch.Tensor:
    wide = x.double()
    return wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + epsilon) * (weight.double() + offset)


def assert_rounded_once(
    got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, epsilon: float, offset: float
) -> None:
    """Half a unit in the last place for the one rounding, and a few float32 units for the accumulation."""
    assert got.dtype == x.dtype
    assert got.shape == x.shape
    assert got.is_contiguous()
    slack = 8 * EPS[torch.float64 if x.dtype == torch.float64 else torch.float32]
    tiny = 6e-8 if x.dtype == torch.float16 else 1e-30
    torch.testing.assert_close(
        got.double(), exact(x, weight, epsilon, offset), rtol=EPS[x.dtype] / 2 + slack, atol=tiny, equal_nan=True
    )


@given(
    leading=st.lists(st.integers(0, 3), max_size=3),
    width=st.integers(1, 70),
    dtype=st.sampled_from(list(EPS)),
    layout=st.sampled_from(["contiguous", "columns", "transposed"]),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
    epsilon=st.sampled_from([1e-6, 1e-5, 1e-2]),
    offset=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 99),
)
@settings(max_examples=150, deadline=None)
def test_rms_norm_is_rounded_once(
    leading: list[int],
    width: int,
    dtype: torch.dtype,
    layout: str,
    scale: float,
    epsilon: float,
    offset: float,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(*leading, width + 5, generator=generator) * scale).to(dtype)
    if layout == "transposed":
        x = x.mT.contiguous().mT if x.dim() > 1 else x
    x = x[..., 2 : 2 + width]
    x = x if layout != "contiguous" else x.contiguous()
    weight = (torch.rand(width, generator=generator) + 0.5).to(dtype)
    kept = x.clone()
    assert_rounded_once(rms_norm(x, weight, epsilon, offset), x, weight, epsilon, offset)
    assert torch.equal(x, kept), "the input was written"


def test_extremes() -> None:
    weight = torch.ones(4)
    assert torch.equal(rms_norm(torch.zeros(2, 4), weight, 1e-6), torch.zeros(2, 4))
    assert rms_norm(torch.full((1, 4), float("inf")), weight, 1e-6).isnan().all()
    assert torch.equal(rms_norm(torch.full((1, 4), 60000.0).half(), weight.half(), 1e-6), torch.ones(1, 4).half())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck_of_the_canonical_norm(dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 24).to(dtype)[:, :16], torch.rand(16).to(dtype)
    torch.library.opcheck(torch.ops.layerfuse.rms_norm.default, (x, weight, 1e-6, 0.0))
    x, weight = x.float().detach().requires_grad_(), weight.float().requires_grad_()
    torch.library.opcheck(torch.ops.layerfuse.rms_norm.default, (x, weight, 1e-6, 1.0))


def test_gradients_of_the_canonical_norm() -> None:
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-3, 1.0), (x, weight))


ONE = torch.ones(2, 4)
W4, W2 = torch.ones(4), torch.ones(2)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((ONE, ONE, W2, W4, 1e-6, 1e-6), r"q_weight must have shape \(4,\), the last dimension of q \(2, 4\); got \(2,\)"),
        ((ONE, ONE, W4, W2, 1e-6, 1e-6), r"kv_weight must have shape \(4,\)"),
        ((ONE, ONE.half(), W4, W4, 1e-6, 1e-6), "kv is torch.float16, q is torch.float32"),
        ((ONE, ONE[:1], W4, W4, 1e-6, 1e-6), r"leading dimensions of q \(2,\), got \(1,\)"),
        ((ONE, ONE.to("meta"), W4, W4.to("meta"), 1e-6, 1e-6), "kv is on meta, q on cpu"),
        ((ONE, ONE, W4.to("meta"), W4, 1e-6, 1e-6), "q_weight is on meta, q on cpu"),
        ((ONE.int(), ONE, W4, W4, 1e-6, 1e-6), "q must be one of torch.bfloat16, torch.float16, torch.float32, torch.float64, got torch.int32"),
        ((ONE, ONE, W4, W4, 1e-6, -1.0), "kv_epsilon must be at least 0, got -1.0"),
        ((ONE, ONE, W4, W4, float("nan"), 1e-6), "q_epsilon must be at least 0, got nan"),
        ((torch.ones(()), ONE, W4, W4, 1e-6, 1e-6), "q needs at least one dimension, got a scalar"),
    ],
)  # fmt: skip
def test_refusals_name_the_argument(args: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        mla_dual_rms_norm(*args)


def test_the_dual_norm_is_for_inference() -> None:
    weight = W4.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="for inference and has no backward"):
        mla_dual_rms_norm(ONE, ONE, weight, W4, 1e-6, 1e-6)
    with torch.no_grad():
        mla_dual_rms_norm(ONE, ONE, weight, W4, 1e-6, 1e-6)


# ---- which backend is chosen -------------------------------------------------------------------------------------------


@pytest.fixture
def _unforced() -> Iterator[None]:
    yield
    backends.force(None)


@pytest.mark.usefixtures("_unforced")
def test_the_choice_is_visible_and_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    backends.force("reference")
    mla_dual_rms_norm(ONE, ONE, W4, W4, 1e-6, 1e-6)
    assert backends.chosen()["mla_dual_rms_norm", "cpu"] == "reference"
    with pytest.raises(BackendError, match="no backend is called 'refrence'; did you mean 'reference'"):
        backends.force("refrence")
    with pytest.raises(BackendError, match="already has a backend called 'reference'"):
        backends.register(Backend(op=declared("rms_norm")))
    backends.force(None)
    monkeypatch.setenv(backends.ENVIRONMENT, "aiter")
    # An op that has no backend of that name keeps the automatic choice.
    rms_norm(ONE, W4, 1e-6)
    assert backends.chosen()["rms_norm", "cpu"] == "reference"
    with pytest.raises(BackendError, match=r"mla_dual_rms_norm cannot run on cpu: aiter: .* not on cpu"):
        mla_dual_rms_norm(ONE, ONE, W4, W4, 1e-6, 1e-6)
    monkeypatch.setenv(backends.ENVIRONMENT, "refrence")
    with pytest.raises(
        BackendError, match="LAYERFUSE_BACKEND=refrence: no op has a backend called 'refrence'; did you"
    ):
        rms_norm(ONE[:1], W4, 1e-6, 1.0)


def test_a_stand_in_is_taken_by_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delenv(backends.ENVIRONMENT, raising=False)
    reason = dict(backends.survey("mla_dual_rms_norm", "cpu"))["triton"]
    assert reason == "on cpu only when asked for by name (LAYERFUSE_BACKEND=triton)"
    mla_dual_rms_norm(ONE, ONE, W4, W4, 1e-6, 1e-6)
    assert backends.chosen()["mla_dual_rms_norm", "cpu"] == "reference"


@pytest.fixture
def spare_op(_spare: None) -> Op:
    """An op of no library, so that a backend of it can be anything."""
    op = Op(name="spare_op", doc="", args=(Rows(name="x"),), results=(Like(name="y", of="x"),), reference=torch.neg)
    backends.register(Backend(op=op))
    return op


def test_a_backend_that_cannot_be_loaded_is_passed_over(spare_op: Op) -> None:
    class Broken(Backend):
        name = "broken"

        def load(self) -> Any:
            raise ImportError("no module named kernels")

    backends.register(Broken(op=spare_op))
    assert backends.choose(spare_op.name, "cpu").name == "reference"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(backends.ENVIRONMENT, "broken")
        backends._chosen.clear()
        with pytest.raises(BackendError, match="it cannot be loaded: ImportError: no module named kernels"):
            backends.choose(spare_op.name, "cpu")


def test_loading_a_backend_may_register_another(spare_op: Op) -> None:
    class Third(Backend):
        name = "third"

    class Second(Backend):
        name = "second"

        def load(self) -> Any:
            backends.register(Third(op=spare_op))
            return super().load()

    backends.register(Second(op=spare_op))
    # It takes the call: it was registered before anything was chosen.
    assert backends.choose(spare_op.name, "cpu").name == "third"


# ---- what the quantised forms refuse, and what they promise of their strides --------------------------------------------


@pytest.mark.parametrize("op", [mla_dual_rms_norm, mla_dual_rms_norm_per_token_quant, mla_dual_rms_norm_group_quant])
def test_what_no_norm_can_be_of(op: Any) -> None:
    none, one = torch.ones(4, 0), torch.ones(4, 4)
    with pytest.raises(ValueError, match=r"q \(4, 0\) has rows of no columns"):
        op(none, one, none[0], W4, 1e-6, 1e-6)
    with pytest.raises(ValueError, match=r"kv \(4, 0\) has rows of no columns"):
        op(one, none, W4, none[0], 1e-6, 1e-6)
    fp8 = one.to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"q must be one of .*torch.bfloat16.*, got torch.float8_e4m3fn"):
        op(fp8, fp8, W4, W4, 1e-6, 1e-6)
    with pytest.raises(ValueError, match="kv_weight must be one of"):
        op(one, one, W4, fp8[0], 1e-6, 1e-6)
    with pytest.raises(TypeError, match="q must be a tensor, got None"):
        op(None, one, W4, W4, 1e-6, 1e-6)
    with pytest.raises(ValueError, match=r"kv has stride 2 along its last dimension.*pass kv.contiguous\(\)"):
        op(one, torch.ones(4, 8)[:, ::2], W4, W4, 1e-6, 1e-6)
