"""What only a GPU shows: launches that overlap, CUDA graphs, every number of rows, offsets beyond 32 bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from layerfuse.fusion import backends, ops
from layerfuse.fusion.ops import mla_dual_rms_norm, mla_dual_rms_norm_group_quant, mla_dual_rms_norm_per_token_quant

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

WIDTHS = (1536, 512, 64)


@pytest.fixture(autouse=True)
def _triton() -> Iterator[None]:
    backends.force("triton")
    yield
    backends.force(None)


def weights() -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.rand(1536, device="cuda", dtype=torch.bfloat16) + 0.5,
        torch.rand(512, device="cuda", dtype=torch.bfloat16) + 0.5,
    )


def expected(down: torch.Tensor, q_weight: torch.Tensor, kv_weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q, kv, _ = down.split(WIDTHS, -1)
    return tuple(
        (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6) * w.float()).to(x.dtype)
        for x, w in ((q, q_weight), (kv, kv_weight))
    )  # type: ignore[return-value]


ROWS = [1, 2, 64, 128, 129, 384, 385, 640, 641, 1024, 1025, 3072, 3073, 8192, 8193, 20000]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [96, 512, 1000, 7168])
def test_every_number_of_rows_added_and_normed(width: int, rows: int) -> None:
    x, residual = (torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.rand(width, device="cuda")
    for _ in range(2):  # the second time without Triton's search
        normed, total = ops.add_rms_norm(x, residual, weight, 1e-6, 1.0)
        wide = x.float() + residual.float()
        assert torch.equal(total, wide.to(x.dtype))
        wanted = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * (weight + 1)
        torch.testing.assert_close(normed, wanted.to(x.dtype), rtol=2**-7, atol=0)


@pytest.mark.parametrize("rows", ROWS)
def test_every_number_of_rows(rows: int) -> None:
    down = torch.randn(rows, sum(WIDTHS), device="cuda", dtype=torch.bfloat16)
    q, kv, _ = down.split(WIDTHS, -1)
    w = weights()
    wanted = expected(down, *w)
    for got, want in zip(mla_dual_rms_norm(q, kv, *w, 1e-6, 1e-6), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=2**-7, atol=0)
    for quantised, scale, kv_out in (
        mla_dual_rms_norm_group_quant(q, kv, *w, 1e-6, 1e-6),
        mla_dual_rms_norm_per_token_quant(q, kv, *w, 1e-6, 1e-6),
    ):
        torch.testing.assert_close(kv_out, wanted[1], rtol=2**-7, atol=0)
        values = (quantised.float().unflatten(-1, (scale.shape[-1], -1)) * scale.unsqueeze(-1)).flatten(-2)
        limit = scale.max() * 2**-10
        torch.testing.assert_close(values, wanted[0].float(), rtol=2**-4 + 2**-8, atol=limit.item())


def test_overlapping_launches_see_what_came_before() -> None:
    """Each link reads what the kernel before has just written, weights too; a read too early gives another number."""
    torch.manual_seed(0)
    start = torch.randn(64, sum(WIDTHS), device="cuda", dtype=torch.bfloat16)
    step = torch.randn(64, sum(WIDTHS), device="cuda", dtype=torch.bfloat16)
    w = weights()

    def chain(wait: bool) -> torch.Tensor:
        down, q_weight = start.clone(), w[0].clone()
        for _ in range(40):
            q, kv, _ = down.split(WIDTHS, -1)
            q_out, kv_out = mla_dual_rms_norm(q, kv, q_weight, w[1], 1e-6, 1e-6)
            if wait:
                torch.cuda.synchronize()
            down = torch.cat([q_out, kv_out, down[:, 2048:]], -1) + step
            again = mla_dual_rms_norm(q_out, kv_out, q_weight, w[1], 1e-6, 1e-6)  # directly behind the first
            if wait:
                torch.cuda.synchronize()
            q_weight = again[0].abs().mean(0).tanh() * 0.5 + 0.5  # bounded: it would grow with each link
        assert torch.isfinite(down).all()
        return down

    slow = chain(True)
    for _ in range(10):
        assert torch.equal(chain(False), slow)


def test_captured_in_a_graph() -> None:
    down = torch.randn(8, sum(WIDTHS), device="cuda", dtype=torch.bfloat16)
    w = weights()

    def call() -> tuple[torch.Tensor, ...]:
        q, kv, _ = (down * 2).split(WIDTHS, -1)
        q, kv = mla_dual_rms_norm(q, kv, *w, 1e-6, 1e-6)
        return mla_dual_rms_norm(q, kv, *w, 1e-6, 1e-6)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    for _ in range(5):
        down.normal_()
        graph.replay()
        for got, want in zip(results, call(), strict=True):
            assert torch.equal(got, want)


def test_offsets_beyond_32_bits() -> None:
    rows = 2**31 // sum(WIDTHS) + 9
    if torch.cuda.mem_get_info()[0] < 3 * rows * sum(WIDTHS) * 2:
        pytest.skip("needs 13 GB of free GPU memory")
    down = torch.empty(rows, sum(WIDTHS), device="cuda", dtype=torch.bfloat16).normal_()
    q, kv, _ = down.split(WIDTHS, -1)
    w = weights()
    got = mla_dual_rms_norm(q, kv, *w, 1e-6, 1e-6)
    for result, want in zip(got, expected(down[-5:], *w), strict=True):
        torch.testing.assert_close(result[-5:], want, rtol=2**-7, atol=0)


def test_on_a_stream_of_its_own() -> None:
    down = torch.randn(64, sum(WIDTHS), device="cuda", dtype=torch.bfloat16)
    w = weights()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        later = down * 3
        q, kv, _ = later.split(WIDTHS, -1)
        got = mla_dual_rms_norm(q, kv, *w, 1e-6, 1e-6)
    stream.synchronize()
    for result, want in zip(got, expected(down * 3, *w), strict=True):
        torch.testing.assert_close(result, want, rtol=2**-7, atol=0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_a_device_that_is_not_current() -> None:
    down = torch.randn(64, sum(WIDTHS), device="cuda:1", dtype=torch.bfloat16)
    w = tuple(x.to("cuda:1") for x in weights())
    q, kv, _ = down.split(WIDTHS, -1)
    for _ in range(2):
        got = mla_dual_rms_norm(q, kv, *w, 1e-6, 1e-6)
    for result, want in zip(got, expected(down, *w), strict=True):
        torch.testing.assert_close(result, want, rtol=2**-7, atol=0)
