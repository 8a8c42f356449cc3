"""The linear with few tokens whose activations it quantises itself, on the reference and on Triton's kernel."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from helpers import in_turn

from layerfuse.fusion import backends, ops
from layerfuse.fusion.backends.triton import linear
from layerfuse.fusion.ops.linear import MOST, WIDEST, dequantised, scales_shape
from layerfuse.fusion.ops.quantisation import quantise

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
FP8 = torch.float8_e4m3fn
UNIT = {torch.bfloat16: 2**-8 if GPU else 2**-7, torch.float16: 2**-11, torch.float32: 2**-20}
"""One rounding. Triton's interpreter cuts float32 down to bfloat16."""


def given_of(tokens: int, columns: int, width: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Activations that fp8 holds exactly, with scales of 1: Triton's interpreter rounds to fp8 as no hardware does."""
    generator = torch.Generator().manual_seed(5)

    def normal_numbers(*shape: int) -> torch.Tensor:
        values = (torch.randn(shape, generator=generator) * 100).clamp(-448, 448)
        return values.where(values.abs() > 1, 0).to(FP8)

    x, weight = normal_numbers(tokens, width).to(dtype), normal_numbers(columns, width).to(DEVICE)
    x[:, ::128] = 448
    scale = torch.rand(scales_shape(weight), generator=generator).to(DEVICE) * width**-0.5 / 10000 + 1e-6
    return {"x": x.to(DEVICE), "weight": weight, "weight_scale": scale}


def wanted(given: dict[str, torch.Tensor], use_ue8m0: bool = False) -> torch.Tensor:
    """In float64, of the activations as `quantisation` says."""
    x, weight = given["x"], given["weight"]
    values, scales = quantise(x.float(), weight.dtype, 128, False, use_ue8m0)
    return dequantised(values, scales, 1).double() @ dequantised(weight, given["weight_scale"], 128).double().t()


def close(got: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> None:
    # Hopper's tensor cores keep 14 bits of a sum of fp8 products (DeepSeek-V3, arXiv 2412.19437, section 3.5.2), here of 128 of them.
    least = 2**-11 if GPU else 2**-16
    torch.testing.assert_close(got.double(), right, rtol=UNIT[dtype], atol=float(right.abs().max()) * least)


@pytest.mark.parametrize(
    ("shape", "tokens", "dtype"),
    in_turn(
        [(64, 128), (192, 1536), (80, 272), (16, 16), (200, 896), (130, 1040), (16, 7168)],
        [1, 3, 16, 17],
        [torch.bfloat16, torch.float16, torch.float32],
    ),
    ids=str,
)
def test_quantised_activations_times_the_weight(
    backend: str, shape: tuple[int, int], tokens: int, dtype: torch.dtype
) -> None:
    given = given_of(tokens, *shape, dtype)
    for steady in (False, True, True):  # the last time without Triton's search
        got = ops.group_quant_linear(**given, steady=steady)
        assert got.shape == (tokens, shape[0]) and got.dtype == dtype and got.is_contiguous()
        close(got, wanted(given), dtype)


@pytest.mark.parametrize("use_ue8m0", [False, True])
def test_activations_that_are_rounded(backend: str, use_ue8m0: bool) -> None:
    given = given_of(5, 128, 256, torch.float32)
    if GPU or backend == "reference":
        given["x"] = torch.randn(given["x"].shape, device=DEVICE) * 3
    got, right = ops.group_quant_linear(**given, use_ue8m0=use_ue8m0), wanted(given, use_ue8m0)
    # A value between two of fp8 may go either way: one of 256 then moves the sum.
    assert float((got.double() - right).norm() / right.norm()) < 2e-3


@pytest.mark.skipif(GPU, reason="the interpreter's conversion is left out")
def test_scales_are_of_their_group_and_token(backend: str) -> None:
    given = given_of(3, 64, 384)
    turned = 2.0 ** torch.arange(-4, 5).view(3, 3).repeat_interleave(128, 1)
    given["x"] = (given["x"].float() * turned).bfloat16()
    close(ops.group_quant_linear(**given), wanted(given), torch.bfloat16)


def test_views_of_columns_and_leading_dimensions(backend: str) -> None:
    wide, tall = given_of(6, 96, 200), given_of(6, 96, 200)
    x, weight = torch.cat([wide["x"], wide["x"]], 1)[:, :200], torch.cat([tall["weight"].view(torch.uint8)] * 2, 1)
    given = {"x": x.unflatten(0, (2, 3)), "weight": weight.view(FP8)[:, :200], "weight_scale": wide["weight_scale"]}
    got = ops.group_quant_linear(**given)
    assert got.shape == (2, 3, 96)
    torch.testing.assert_close(got.flatten(0, 1), ops.group_quant_linear(**wide), rtol=0, atol=0)


def test_a_token_gives_the_same_bits_whatever_stands_beside_it() -> None:
    backends.force("triton")
    try:
        given = given_of(16, 128, 768)
        for several, fewer in ((8, (1, 2)), (16, (9, 15))):
            all_of_them = ops.group_quant_linear(**(given | {"x": given["x"][:several]}))
            for tokens in fewer:
                few = ops.group_quant_linear(**(given | {"x": given["x"][:tokens]}))
                assert torch.equal(few, all_of_them[:tokens])
    finally:
        backends.force(None)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_what_is_broken_is_broken_in_its_token_alone(backend: str, broken: float) -> None:
    given = given_of(4, 128, 512)
    given["x"][2, 300] = broken
    if backend == "triton" and not GPU:
        pytest.skip("the interpreter converts NaN to a finite fp8")
    got = ops.group_quant_linear(**given)
    assert got[2].isnan().all() and got[[0, 1, 3]].isfinite().all()


def test_no_tokens_give_nothing(backend: str) -> None:
    assert ops.group_quant_linear(**given_of(0, 128, 256)).shape == (0, 128)


@pytest.mark.parametrize(
    ("shape", "tokens", "dtype", "column_major"),
    in_turn(
        [(64, 128), (192, 1536), (80, 272), (16, 16), (200, 896), (130, 1040), (16, 7168)],
        [1, 3, 8, 9, 16, 17],
        [torch.bfloat16, torch.float16, torch.float32],
        [False, True],
    ),
    ids=str,
)
def test_what_was_quantised_before_times_the_weight(
    backend: str, shape: tuple[int, int], tokens: int, dtype: torch.dtype, column_major: bool
) -> None:
    given = given_of(tokens, *shape, torch.float32)
    right = wanted(given)
    values, scales = quantise(given.pop("x"), FP8, 128, column_major, False, column_major)
    got = ops.block_scaled_linear(values, scales, **given, out_dtype=dtype)
    assert got.shape == (tokens, shape[0]) and got.dtype == dtype and got.is_contiguous()
    close(got, right, dtype)


def test_both_linears_are_one_arithmetic() -> None:
    """With up to 8 tokens, a product does not depend on where they were quantised."""
    backends.force("triton")
    try:
        given = given_of(5, 128, 768)
        values, scales = quantise(given["x"].float(), FP8, 128, True, False)
        inside = ops.group_quant_linear(**given)
        del given["x"]
        assert torch.equal(ops.block_scaled_linear(values, scales, **given), inside)
    finally:
        backends.force(None)


def test_a_row_and_rows_in_several_dimensions(backend: str) -> None:
    given = given_of(6, 96, 256)
    right = ops.group_quant_linear(**given)
    values, scales = ops.quantise_group(given.pop("x"), FP8, 128)
    several = ops.block_scaled_linear(values.view(2, 3, -1), scales.view(2, 3, -1), **given)
    assert several.shape == (2, 3, 96) and torch.equal(several.flatten(0, 1), right)
    assert torch.equal(ops.block_scaled_linear(values[0], scales[0], **given), right[0])


def test_counters_are_there_whatever_number_of_tokens_ran_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_slabs", {})
    backends.force("triton")
    try:
        ops.group_quant_linear(**given_of(MOST + 1, 16, 128))
        assert list(linear._slabs) == [given_of(1, 16, 128)["x"].device]
    finally:
        backends.force(None)


@pytest.mark.skipif(not GPU, reason="captures a CUDA graph")
def test_a_stream_that_leaves_a_graphs_own_and_comes_back() -> None:
    """As vLLM runs shared experts: behind a norm on one stream, beside experts on another."""
    hidden, width, beside = 1024, 256, torch.cuda.Stream()
    up, down = given_of(4, 2 * width, hidden), given_of(4, hidden, width)
    for each, factor in ((up, 100), (down, 1000)):  # so that what they give is no smaller than what it is added to
        del each["x"]
        each["weight_scale"] *= factor
    x, residual = (torch.randn(4, hidden, device=DEVICE).bfloat16() for _ in range(2))
    weight = torch.ones(hidden, device=DEVICE).bfloat16()

    def layer(x: torch.Tensor, residual: torch.Tensor, stream: torch.cuda.Stream | None) -> tuple[torch.Tensor, ...]:
        normed, summed = ops.add_rms_norm(x, residual, weight, 1e-6)
        here = torch.cuda.current_stream()
        if stream is not None:
            stream.wait_stream(here)
        with torch.cuda.stream(stream or here):
            gate, other = ops.group_quant_linear(normed, **up, steady=True).chunk(2, -1)
            values, scales = ops.silu_mul_group_quant(gate, other)
            shared = ops.block_scaled_linear(values, scales, **down, steady=True)
        routed = torch.nn.functional.silu(normed) + ops.group_quant_linear(summed, **up, steady=True)[:, :1]
        if stream is not None:
            here.wait_stream(stream)
        return (routed + shared).clamp(-3, 3), summed

    def layers(stream: torch.cuda.Stream | None) -> tuple[torch.Tensor, ...]:
        result = (x, residual)
        for _ in range(8):
            result = layer(*result, stream)
        return result

    right = layers(None)
    graph = torch.cuda.CUDAGraph()
    layers(beside)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        got = layers(beside)
    for _ in range(20):
        for each in got:
            each.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(*pair) for pair in zip(got, right, strict=True))


def test_more_tokens_are_the_other_ops() -> None:
    library = torch.library.Library("layerfuse_test_linears", "FRAGMENT")
    library.define("product(Tensor x, Tensor weight, Tensor weight_scale) -> Tensor")
    library.impl("product", lambda x, weight, _: x.new_ones(len(x), len(weight)), "CompositeExplicitAutograd")
    backends.force("triton")
    try:
        given = given_of(MOST + 1, 64, 128)
        with mock.patch.object(linear, "make_ready") as ready:
            for _ in range(3):
                assert ops.group_quant_linear(**given, beyond="layerfuse_test_linears::product").eq(1).all()
            assert ready.call_count == 1, "from the second call on it goes there directly"
            with backends.counting() as counted:
                ops.group_quant_linear(**given, beyond="layerfuse_test_linears::product")
            assert counted == {"group_quant_linear": 1}
        few = given | {"x": given["x"][:MOST]}
        assert not ops.group_quant_linear(**few, beyond="layerfuse_test_linears::product").eq(1).all()
        wide = given_of(1, WIDEST + 1, 128)
        for _ in range(2):
            assert ops.group_quant_linear(**wide, beyond="layerfuse_test_linears::product").eq(1).all()
    finally:
        backends.force(None)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"weight": torch.zeros(64, 128).to(FP8)}, r"weight must be \(columns, 256\), as wide as x; got \(64, 128\)"),
        ({"weight": torch.zeros(128, 256)}, "weight must be one of torch.float8_e4m3fn, torch.float8_e4m3fnuz, got torch.float32"),
        ({"weight_scale": torch.ones(2, 1)}, r"weight_scale must be \(1, 2\), one per 128 x 128 of weight \(128, 256\); got \(2, 1\)"),
        ({"weight_scale": torch.ones(1, 2).bfloat16()}, "weight_scale must be torch.float32 on cpu, got torch.bfloat16"),
        ({"beyond": "nope"}, "layerfuse::group_quant_linear: beyond: no op is registered as 'nope'; import what registers it"),
        ({"beyond": "layerfuse::no_such_op"}, "beyond: no op is registered as 'layerfuse::no_such_op'; import what registers it"),
    ],
)  # fmt: skip
@pytest.mark.skipif(GPU, reason="the messages name a device")
def test_what_does_not_fit_is_named(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ops.group_quant_linear(**(given_of(2, 128, 256) | change))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"x": torch.ones(2, 256)}, "x must be one of torch.float8_e4m3fn, torch.float8_e4m3fnuz, got torch.float32"),
        ({"x_scale": torch.ones(2, 1)}, r"x_scale must be \(2, 2\), one per 128 columns of x \(2, 256\); got \(2, 1\)"),
        ({"x_scale": torch.ones(2, 2).half()}, "x_scale must be torch.float32 on cpu, got torch.float16 on cpu"),
        ({"out_dtype": FP8}, "out_dtype must be one of torch.float32, torch.bfloat16, torch.float16, got torch.float8_e4m3fn"),
    ],
)  # fmt: skip
@pytest.mark.skipif(GPU, reason="the messages name a device")
def test_what_does_not_fit_of_quantised_activations_is_named(change: dict[str, Any], says: str) -> None:
    given = given_of(2, 128, 256) | {"x": torch.ones(2, 256).to(FP8), "x_scale": torch.ones(2, 2)}
    with pytest.raises(ValueError, match=says):
        ops.block_scaled_linear(**(given | change))


def test_its_fake_gives_the_same_shape_and_dtype() -> None:
    given = {name: value.to("meta") for name, value in given_of(3, 80, 272).items()}
    got = ops.group_quant_linear(**given)
    assert got.shape == (3, 80) and got.dtype == torch.bfloat16


@pytest.mark.parametrize("depth", [16, 256, 1536, 2048, 2304, 7168, 65536])
@pytest.mark.parametrize(("most", "quantised"), [(8, True), (16, False), (16, True)])
def test_a_program_holds_few_groups_and_all_programs_have_some(depth: int, most: int, quantised: bool) -> None:
    shape = linear.shape_of(depth, most, quantised)
    assert shape.groups <= 8 and shape.groups * (shape.split - 1) < depth / 128 <= shape.groups * shape.split
