"""The linear with few tokens whose fp8 operands have scales of whole rows, on the reference and on Triton's kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import in_turn

from layerfuse.fusion import backends, ops
from layerfuse.fusion.backends.triton import linear
from layerfuse.fusion.ops import warming
from layerfuse.fusion.ops.linear import MOST

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
FP8 = torch.float8_e4m3fn
UNIT = {torch.bfloat16: 2**-8 if GPU else 2**-7, torch.float16: 2**-11, torch.float32: 2**-20}
"""One rounding. Triton's interpreter cuts float32 down to bfloat16."""
SCHEMES = ("token", "tensor"), ("channel", "tensor")
"""What has a scale of its own: of activations, and of weights."""


@pytest.fixture
def triton() -> Iterator[None]:
    backends.force("triton")
    yield
    backends.force(None)


def given_of(
    tokens: int,
    columns: int,
    width: int,
    dtype: torch.dtype = torch.bfloat16,
    scheme: tuple[str, str] = ("token", "channel"),
    bias: bool = True,
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 60).clamp(-448, 448).to(FP8).to(DEVICE)

    def scales(*shape: int) -> torch.Tensor:
        return (torch.rand(shape, generator=generator) + 0.1).to(DEVICE) * 0.01

    given: dict[str, Any] = {
        "x": drawn(tokens, width),
        "x_scale": scales(*((tokens, 1) if scheme[0] == "token" else ())),
        "weight": drawn(columns, width),
        "weight_scale": scales(*((columns, 1) if scheme[1] == "channel" else (1,))),
        "out_dtype": dtype,
    }
    added = torch.randn(columns, generator=generator).to(DEVICE, dtype) * 100
    return given | ({"bias": added} if bias else {})


def close(got: torch.Tensor, given: dict[str, Any]) -> None:
    """To float64, but for one rounding and what the tensor cores' sums lose."""
    x, weight = given["x"].double() * given["x_scale"], given["weight"].double() * given["weight_scale"].view(-1, 1)
    bias = given.get("bias")
    right = x @ weight.t() + (0 if bias is None else bias.double())
    # Hopper's tensor cores keep 14 bits of a sum of fp8 products (DeepSeek-V3, arXiv 2412.19437, section 3.5.2), here of 128 of them.
    lost = x.abs() @ weight.abs().t() * (2**-11 if GPU else 2**-20)
    assert got.dtype == given["out_dtype"] and got.is_contiguous()
    assert bool(((got.double() - right).abs() <= right.abs() * UNIT[got.dtype] + lost).all())


SHAPES = [(64, 128), (192, 1536), (80, 272), (16, 16), (200, 896), (130, 1040), (16, 9728), (3, 5), (8200, 144)]


@pytest.mark.parametrize(
    ("shape", "tokens", "dtype", "scheme", "bias"),
    in_turn(
        SHAPES,
        [1, 3, 8, 9, 16, 17],
        [torch.bfloat16, torch.float16, torch.float32],
        [("token", "channel"), ("tensor", "tensor")],
        [False, True],
    ),
    ids=str,
)
def test_the_product_with_its_scales_and_bias(
    backend: str, shape: tuple[int, int], tokens: int, dtype: torch.dtype, scheme: tuple[str, str], bias: bool
) -> None:
    given = given_of(tokens, *shape, dtype, scheme, bias)
    for steady in (False, True, True):  # the last time without Triton's search
        got = ops.scaled_linear(**given, steady=steady)
        assert got.shape == (tokens, shape[0])
        close(got, given)


@pytest.mark.parametrize("of_x", SCHEMES[0])
@pytest.mark.parametrize("of_weight", SCHEMES[1])
def test_every_scheme(backend: str, of_x: str, of_weight: str) -> None:
    for bias in (False, True):
        given = given_of(5, 96, 400, scheme=(of_x, of_weight), bias=bias)
        close(ops.scaled_linear(**given), given)


def test_views_of_columns_and_leading_dimensions(backend: str) -> None:
    given = given_of(6, 96, 200)
    right = ops.scaled_linear(**given)

    def within(values: torch.Tensor, ahead: int) -> torch.Tensor:
        rows = values.view(torch.uint8)
        return torch.cat([rows[:, :ahead], rows, rows], 1)[:, ahead : ahead + 200].view(FP8)

    spread = torch.stack([given["x_scale"]] * 3, 1)[:, 0]
    assert spread.stride(0) == 3
    for ahead in (0, 8, 1):  # rows that start between the widest loads
        views = {"x": within(given["x"], ahead), "weight": within(given["weight"], ahead), "x_scale": spread}
        assert torch.equal(ops.scaled_linear(**(given | views)), right)
    several = {"x": given["x"].unflatten(0, (2, 3)), "x_scale": given["x_scale"].unflatten(0, (2, 3))}
    got = ops.scaled_linear(**(given | several))
    assert got.shape == (2, 3, 96) and torch.equal(got.flatten(0, 1), right)
    for shape in ((96,), (1, 96)):
        assert torch.equal(ops.scaled_linear(**(given | {"weight_scale": given["weight_scale"].view(shape)})), right)


def test_a_row_alone(backend: str) -> None:
    given = given_of(1, 96, 256)
    right = ops.scaled_linear(**given)
    for scale in (given["x_scale"][0], given["x_scale"][0, 0]):
        assert torch.equal(ops.scaled_linear(**(given | {"x": given["x"][0], "x_scale": scale})), right[0])


@pytest.mark.usefixtures("triton")
def test_the_same_call_gives_the_same_bits_whatever_stands_beside_a_token() -> None:
    given = given_of(16, 128, 2560)
    for several, fewer in ((8, (1, 2, 8)), (16, (9, 15, 16))):
        all_of_them = ops.scaled_linear(**(given | {name: given[name][:several] for name in ("x", "x_scale")}))
        for tokens in fewer:
            few = {name: given[name][:tokens] for name in ("x", "x_scale")}
            for _ in range(3):
                assert torch.equal(ops.scaled_linear(**(given | few)), all_of_them[:tokens])


@pytest.mark.parametrize("of", [(64, 128, 6, 2, 4), (128, 256, 5, 4, 8), (32, 64, 20, 20, 2)])
@pytest.mark.usefixtures("triton")
def test_other_ways_to_share_out_a_product(of: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "scaled_shape_of", lambda _, depth, __: linear.plain_shape(depth, *of))
    given = given_of(5, 200, 2560)
    close(ops.scaled_linear(**given), given)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_what_is_broken_is_broken_in_its_token_or_column_alone(backend: str, broken: float) -> None:
    given = given_of(4, 128, 512)
    given["x_scale"][2] = broken
    got = ops.scaled_linear(**given)
    assert not got[2].isfinite().any() and got[[0, 1, 3]].isfinite().all()
    given = given_of(4, 128, 512)
    given["weight_scale"][7] = broken
    got = ops.scaled_linear(**given)
    assert not got[:, 7].isfinite().any() and got[:, :7].isfinite().all() and got[:, 8:].isfinite().all()


def test_no_tokens_give_nothing(backend: str) -> None:
    assert ops.scaled_linear(**given_of(0, 128, 256)).shape == (0, 128)
    assert ops.scaled_linear(**given_of(0, 128, 256, scheme=("tensor", "tensor"))).shape == (0, 128)


def test_counters_are_there_whatever_number_of_tokens_ran_first(monkeypatch: pytest.MonkeyPatch, triton: None) -> None:
    monkeypatch.setattr(linear, "_slabs", {})
    ops.scaled_linear(**given_of(MOST + 1, 16, 128))
    assert len(linear._slabs) == 1


@pytest.mark.parametrize("of_x", SCHEMES[0])
@pytest.mark.usefixtures("triton")
def test_every_launch_for_fewer_tokens_is_made_at_load(of_x: str) -> None:
    for tokens in (MOST + 1, 3):
        with warming.recording() as calls:
            ops.scaled_linear(**given_of(tokens, 16, 128, scheme=(of_x, "channel")))
        launches = warming.warm_up(calls, tokens=tokens, most=MOST + 1)
        assert launches == len({1, *(step + 1 for step in linear.buckets())})


@pytest.mark.usefixtures("triton")
def test_more_tokens_are_the_other_ops() -> None:
    library = torch.library.Library("layerfuse_test_linears", "FRAGMENT")
    library.define("scaled(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, Tensor? bias) -> Tensor")
    library.impl("scaled", lambda x, _, weight, *__: x.new_ones(len(x), len(weight)).float(), "CompositeExplicitAutograd")  # fmt: skip
    given = given_of(MOST + 1, 64, 128) | {"beyond": "layerfuse_test_linears::scaled"}
    assert ops.scaled_linear(**given).eq(1).all()
    few = {name: given[name][:MOST] for name in ("x", "x_scale")}
    assert not ops.scaled_linear(**(given | few)).eq(1).all()


@pytest.mark.skipif(not GPU, reason="captures CUDA graphs")
def test_graphs_of_two_streams_and_launches_that_follow_each_other() -> None:
    """Each launch starts while the one in front of it still runs, and reads what that gives."""
    given = given_of(8, 512, 512, bias=False)
    ops.scaled_linear(**given, steady=True)

    def chain() -> torch.Tensor:
        x, scale = given["x"], given["x_scale"]
        for _ in range(12):
            out = ops.scaled_linear(**(given | {"x": x, "x_scale": scale}), steady=True)
            x, scale = ops.quantise_per_token(out)
        return x.float() * scale

    right = chain()
    assert right.isfinite().all() and right.abs().max() > 0
    graphs, results, streams = [], [], [torch.cuda.Stream() for _ in range(2)]
    for stream in streams:
        with torch.cuda.stream(stream):
            chain()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            results.append(chain())
        graphs.append(graph)
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(each, right) for each in results)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"x": torch.ones(2, 256)}, "x must be one of torch.float8_e4m3fn, torch.float8_e4m3fnuz, got torch.float32"),
        ({"weight": torch.zeros(64, 128).to(FP8)}, r"weight must be \(columns, 256\), as wide as x; got \(64, 128\)"),
        ({"x_scale": torch.ones(2)}, r"x_scale must be \(2, 1\), one per token of x \(2, 256\), or one element; got \(2,\)"),
        ({"x_scale": torch.ones(3, 1)}, r"x_scale must be \(2, 1\), one per token of x \(2, 256\), or one element; got \(3, 1\)"),
        ({"x_scale": torch.ones(2, 1).half()}, "x_scale must be torch.float32 on cpu, got torch.float16 on cpu"),
        ({"weight_scale": torch.ones(127, 1)}, r"weight_scale must be \(128,\), \(128, 1\) or \(1, 128\), or one element; got \(127, 1\)"),
        ({"weight_scale": torch.ones(256, 1)[::2]}, r"weight_scale has strides \(2, 1\); pass weight_scale.contiguous\(\)"),
        ({"weight_scale": torch.ones(128).half()}, "weight_scale must be torch.float32 on cpu, got torch.float16 on cpu"),
        ({"bias": torch.zeros(128)}, "bias must be torch.bfloat16 on cpu, got torch.float32 on cpu"),
        ({"bias": torch.zeros(127).bfloat16()}, r"bias must be \(128,\), as weight \(128, 256\) has columns; got \(127,\)"),
        ({"out_dtype": FP8, "bias": None}, "out_dtype must be one of torch.float32, torch.bfloat16, torch.float16, got torch.float8_e4m3fn"),
    ],
)  # fmt: skip
@pytest.mark.skipif(GPU, reason="the messages name a device")
def test_what_does_not_fit_is_named(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ops.scaled_linear(**(given_of(2, 128, 256) | change))


def test_its_fake_gives_the_same_shape_and_dtype() -> None:
    given = {
        name: each.to("meta") if isinstance(each, torch.Tensor) else each for name, each in given_of(3, 80, 272).items()
    }
    got = ops.scaled_linear(**given)
    assert got.shape == (3, 80) and got.dtype == torch.bfloat16


@pytest.mark.parametrize("scheme", [("token", "channel"), ("tensor", "tensor")])
def test_it_is_an_op_for_any_number_of_tokens(scheme: tuple[str, str]) -> None:
    given = given_of(5, 80, 272, scheme=scheme)
    named = (*(given[name] for name in ("x", "x_scale", "weight", "weight_scale", "bias", "out_dtype")), True, "")
    # test_schema multiplies what it is given, which torch does not do in fp8.
    kinds = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.layerfuse.scaled_linear.default, named, test_utils=kinds)


@pytest.mark.parametrize("depth", [16, 256, 1536, 2048, 8192, 9728, 65536])
@pytest.mark.parametrize("columns", [16, 2560, 65536])
@pytest.mark.parametrize("most", [8, 16])
def test_a_program_holds_few_groups_and_all_programs_have_some(columns: int, depth: int, most: int) -> None:
    shape = linear.scaled_shape_of(columns, depth, most)
    assert shape.held <= shape.groups <= 8 and shape.held * shape.block <= 1024
    assert shape.groups * (shape.split - 1) < depth / shape.block <= shape.groups * shape.split
