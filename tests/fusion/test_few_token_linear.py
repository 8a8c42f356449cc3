"""The linear with few tokens whose weight has 16 bits, on the reference and on Triton's kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import in_turn

from layerfuse.fusion import backends, ops
from layerfuse.fusion.backends.triton import linear
from layerfuse.fusion.ops.linear import MOST

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
UNIT = {torch.bfloat16: 2**-8 if GPU else 2**-7, torch.float16: 2**-11}
"""One rounding. Triton's interpreter cuts float32 down to bfloat16."""


def given_of(
    tokens: int, columns: int, width: int, dtype: torch.dtype = torch.bfloat16, bias: bool = True
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    return {"x": drawn(tokens, width), "weight": drawn(columns, width)} | ({"bias": drawn(columns)} if bias else {})


def close(got: torch.Tensor, given: dict[str, torch.Tensor], backend: str = "triton") -> None:
    """To float64, but for one rounding and the order of sums in float32. What torch calls may round in between."""
    x, weight, bias = given["x"].double(), given["weight"].double(), given.get("bias")
    right = x @ weight.t() + (0 if bias is None else bias.double())
    summed = x.abs() @ weight.abs().t()
    assert got.dtype == given["x"].dtype and got.is_contiguous()
    order = summed * (2**-20 if backend == "triton" else 2**-9)
    assert bool(((got.double() - right).abs() <= right.abs() * UNIT[got.dtype] + order).all())


SHAPES = [
    (64, 128),
    (8200, 144),
    (192, 1536),
    (80, 272),
    (16, 16),
    (200, 896),
    (130, 1040),
    (16, 9728),
    (3, 5),
    (321, 7),
]


@pytest.mark.parametrize(
    ("shape", "tokens", "dtype", "bias"),
    in_turn(SHAPES, [1, 3, 8, 9, 16, 17], [torch.bfloat16, torch.float16], [False, True]),
    ids=str,
)
def test_it_is_torchs_linear(backend: str, shape: tuple[int, int], tokens: int, dtype: torch.dtype, bias: bool) -> None:
    given = given_of(tokens, *shape, dtype, bias)
    for steady in (False, True, True):  # the last time without Triton's search
        got = ops.few_token_linear(**given, steady=steady)
        assert got.shape == (tokens, shape[0])
        close(got, given, backend)


def test_views_of_columns_and_leading_dimensions(backend: str) -> None:
    whole = given_of(6, 96, 200)
    x, weight = torch.cat([whole["x"]] * 2, 1)[:, :200], torch.cat([whole["weight"]] * 2, 1)[:, :200]
    got = ops.few_token_linear(x.unflatten(0, (2, 3)), weight, whole["bias"])
    assert got.shape == (2, 3, 96)
    close(got.flatten(0, 1), whole, backend)
    odd = torch.cat([whole["weight"][:, :1], whole["weight"]], 1)[:, 1:]  # rows that start between the widest loads
    close(ops.few_token_linear(**(whole | {"weight": odd})), whole, backend)


def test_a_row_alone(backend: str) -> None:
    given = given_of(1, 96, 256)
    got = ops.few_token_linear(**(given | {"x": given["x"][0]}))
    assert got.shape == (96,)
    close(got[None], given, backend)


def test_the_same_call_gives_the_same_bits_whatever_stands_beside_a_token() -> None:
    backends.force("triton")
    try:
        given = given_of(16, 128, 2560)
        for several, fewer in ((8, (1, 2, 8)), (16, (9, 15, 16))):
            all_of_them = ops.few_token_linear(**(given | {"x": given["x"][:several]}))
            for tokens in fewer:
                for _ in range(3):
                    few = ops.few_token_linear(**(given | {"x": given["x"][:tokens]}))
                    assert torch.equal(few, all_of_them[:tokens])
    finally:
        backends.force(None)


@pytest.mark.parametrize("shape", [linear.plain_shape(2560, *of) for of in ((128, 64, 6, 2, 4), (64, 128, 5, 4, 8))])
def test_fewer_groups_on_their_way_than_a_program_takes(
    shape: linear.PlainShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "plain_shape_of", lambda *_: shape)
    backends.force("triton")
    try:
        given = given_of(5, 200, 2560)
        close(ops.few_token_linear(**given), given)
    finally:
        backends.force(None)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_what_is_broken_is_broken_in_its_token_alone(backend: str, broken: float) -> None:
    given = given_of(4, 128, 512)
    given["x"][2, 300] = broken
    got = ops.few_token_linear(**given)
    assert not got[2].isfinite().any() and got[[0, 1, 3]].isfinite().all()


def test_no_tokens_give_nothing(backend: str) -> None:
    assert ops.few_token_linear(**given_of(0, 128, 256)).shape == (0, 128)


def test_float32_is_torchs() -> None:
    given = {name: each.float() for name, each in given_of(3, 64, 128).items()}
    torch.testing.assert_close(ops.few_token_linear(**given), torch.nn.functional.linear(*given.values()))


def test_counters_are_there_whatever_number_of_tokens_ran_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_slabs", {})
    backends.force("triton")
    try:
        ops.few_token_linear(**given_of(MOST + 1, 16, 128))
        assert len(linear._slabs) == 1
    finally:
        backends.force(None)


@pytest.mark.skipif(not GPU, reason="captures CUDA graphs")
def test_graphs_of_two_streams_and_launches_that_follow_each_other() -> None:
    """Each launch starts while the one in front of it still runs, and reads what that gives."""
    given = given_of(8, 512, 512)
    square = given["weight"] * 0.05
    ops.few_token_linear(given["x"], square, steady=True)

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(12):
            x = ops.few_token_linear(x, square, steady=True)
        return x

    right = chain(given["x"])
    graphs, results, streams = [], [], [torch.cuda.Stream() for _ in range(2)]
    for stream in streams:
        with torch.cuda.stream(stream):
            chain(given["x"])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            results.append(chain(given["x"]))
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
        ({"weight": torch.zeros(64, 128).bfloat16()}, r"weight must be \(columns, 256\), as wide as x; got \(64, 128\)"),
        ({"weight": torch.zeros(128, 256)}, "weight must be one of torch.bfloat16, got torch.float32"),
        ({"weight": torch.zeros(256, 128).bfloat16().t()}, "weight has stride 128 along its last dimension"),
        ({"bias": torch.zeros(127).bfloat16()}, r"bias must be \(128,\), as weight \(128, 256\) has columns; got \(127,\)"),
        ({"bias": torch.zeros(128)}, "bias must be torch.bfloat16 on cpu, got torch.float32 on cpu"),
        ({"bias": torch.zeros(256).bfloat16()[::2]}, "bias has stride 2 along its last dimension"),
    ],
)  # fmt: skip
@pytest.mark.skipif(GPU, reason="the messages name a device")
def test_what_does_not_fit_is_named(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ops.few_token_linear(**(given_of(2, 128, 256) | change))


def test_its_fake_gives_the_same_shape_and_dtype() -> None:
    given = {name: value.to("meta") for name, value in given_of(3, 80, 272).items()}
    got = ops.few_token_linear(**given)
    assert got.shape == (3, 80) and got.dtype == torch.bfloat16


@pytest.mark.parametrize("depth", [16, 256, 1536, 2048, 2560, 9728, 65536])
@pytest.mark.parametrize("columns", [16, 65536])
@pytest.mark.parametrize("most", [8, 16])
def test_a_program_holds_few_groups_and_all_programs_have_some(columns: int, depth: int, most: int) -> None:
    shape = linear.plain_shape_of(columns, depth, most)
    assert shape.held <= shape.groups <= 2
    assert shape.groups * (shape.split - 1) < depth / shape.block <= shape.groups * shape.split
