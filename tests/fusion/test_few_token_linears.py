"""The linears with few tokens, on the reference and on Triton's kernels: weights of 16 bits, fp8 in blocks, and fp8 in rows."""

from __future__ import annotations

import itertools
import random
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from helpers import in_turn
from linear_support import (
    BLOCKS,
    DEVICE,
    FP8,
    GPU,
    LINEARS,
    PLAIN,
    QUANTISES,
    ROWS,
    call,
    close,
    given_of,
    operands,
)

from layerfuse.fusion import backends, ops
from layerfuse.fusion.backends.triton import linear
from layerfuse.fusion.ops import warming
from layerfuse.fusion.ops.linear import MOST, WIDEST
from layerfuse.fusion.ops.quantisation import quantise

TRITON = pytest.mark.parametrize("backend", ["triton"], indirect=True)
FLOATS = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(64, 128), (192, 1536), (80, 272), (16, 16), (200, 896), (130, 1040), (16, 9728), (8200, 144)]
AXES: dict[str, dict[str, list[Any]]] = {
    PLAIN: {"dtype": FLOATS[:2], "bias": [False, True]},
    QUANTISES: {"dtype": FLOATS},
    BLOCKS: {"dtype": FLOATS, "column_major": [False, True]},
    ROWS: {
        "dtype": FLOATS,
        "bias": [False, True],
        "scheme": [("token", "channel"), ("tensor", "tensor"), ("token", "tensor"), ("tensor", "channel")],
    },
}


@pytest.mark.parametrize(
    ("op", "shape", "tokens", "options"),
    [
        pytest.param(op, shape, tokens, dict(zip(axes, options, strict=True)), marks=case.marks)
        for op, axes in AXES.items()
        for case in in_turn(SHAPES if op in (QUANTISES, BLOCKS) else [*SHAPES, (3, 5)], [1, 3, 8, 9, 16, 17], *axes.values())
        for shape, tokens, *options in [case.values]
    ],
    ids=str,
)  # fmt: skip
def test_the_product(backend: str, op: str, shape: tuple[int, int], tokens: int, options: dict[str, Any]) -> None:
    given = given_of(op, tokens, *shape, **options)
    # The last time without Triton's search. Its interpreter has none, and knows no kernel in front that a steady one need not wait for.
    for steady in (False, True, True) if GPU else (tokens % 2 == 0,):
        got = call(op, given, steady=steady)
        assert got.shape == (tokens, shape[0])
        if op == PLAIN and tokens > MOST:
            assert torch.equal(got, torch.nn.functional.linear(given["x"], given["weight"], given.get("bias")))
        else:
            close(op, got, given, backend)


@pytest.mark.parametrize("op", LINEARS)
def test_views_of_columns_leading_dimensions_and_a_row_alone(backend: str, op: str) -> None:
    given = given_of(op, 6, 96, 200)
    right = call(op, given)

    def within(values: torch.Tensor, ahead: int) -> torch.Tensor:
        raw = values.view(torch.uint8) if values.dtype == FP8 else values
        return torch.cat([raw[:, :ahead], raw, raw], 1)[:, ahead : ahead + 200].view(values.dtype)

    for ahead in (0, 8, 1):  # rows that start between the widest loads
        close(op, call(op, given, **{name: within(given[name], ahead) for name in ("x", "weight")}), given, backend)
    tokens = {name: given[name] for name in ("x", "x_scale") if name in given}
    several = call(op, given, **{name: each.unflatten(0, (2, 3)) for name, each in tokens.items()})
    assert several.shape == (2, 3, 96) and torch.equal(several.flatten(0, 1), right)
    alone = call(op, given, **{name: each[0] for name, each in tokens.items()})
    assert alone.shape == (96,)
    close(op, alone[None], given | {name: each[:1] for name, each in tokens.items()}, backend)


def test_scales_of_rows_in_other_shapes_and_strides(backend: str) -> None:
    given = given_of(ROWS, 6, 96, 200)
    right = call(ROWS, given)
    spread = torch.stack([given["x_scale"]] * 3, 1)[:, 0]
    assert spread.stride(0) == 3 and torch.equal(call(ROWS, given, x_scale=spread), right)
    for shape in ((96,), (1, 96)):
        assert torch.equal(call(ROWS, given, weight_scale=given["weight_scale"].view(shape)), right)
    one = call(ROWS, given, x=given["x"][0], x_scale=given["x_scale"][0, 0])
    torch.testing.assert_close(one, right[0])


@pytest.mark.parametrize("use_ue8m0", [False, True])
def test_activations_that_are_rounded(backend: str, use_ue8m0: bool) -> None:
    given = given_of(QUANTISES, 5, 128, 256, dtype=torch.float32)
    if GPU or backend == "reference":
        given["x"] = torch.randn(given["x"].shape, device=DEVICE) * 3
    x, weight = operands(QUANTISES, given, use_ue8m0)
    right = x @ weight.t()
    # A value between two of fp8 may go either way: one of 256 then moves the sum.
    assert float((call(QUANTISES, given, use_ue8m0=use_ue8m0).double() - right).norm() / right.norm()) < 2e-3


@pytest.mark.skipif(GPU, reason="the interpreter's conversion is left out")
def test_scales_are_of_their_group_and_token(backend: str) -> None:
    given = given_of(QUANTISES, 3, 64, 384)
    turned = 2.0 ** torch.arange(-4, 5).view(3, 3).repeat_interleave(128, 1)
    given["x"] = (given["x"].float() * turned).bfloat16()
    close(QUANTISES, call(QUANTISES, given), given)


@TRITON
@pytest.mark.parametrize("op", LINEARS)
def test_the_same_call_gives_the_same_bits_whatever_stands_beside_a_token(backend: str, op: str) -> None:
    given = given_of(op, 16, 128, 2560)
    names = [name for name in ("x", "x_scale") if name in given]
    for several, fewer in ((8, (1, 8)), (16, (9, 15))):
        all_of_them = call(op, given, **{name: given[name][:several] for name in names})
        for tokens in fewer:
            few = call(op, given, **{name: given[name][:tokens] for name in names})
            assert torch.equal(few, all_of_them[:tokens])


@TRITON
def test_where_activations_are_quantised_makes_no_difference(backend: str) -> None:
    """With up to 8 tokens."""
    given = given_of(QUANTISES, 5, 128, 768)
    values, scales = quantise(given["x"].float(), FP8, 128, True, False)
    weights = {name: given[name] for name in ("weight", "weight_scale")}
    assert torch.equal(ops.block_scaled_linear(values, scales, **weights), call(QUANTISES, given))


@TRITON
@pytest.mark.parametrize(
    ("op", "of"),
    [
        (PLAIN, (128, 64, 6, 2, 4)),
        (PLAIN, (128, 128, 5, 4, 8)),
        (ROWS, (64, 128, 6, 2, 4)),
        (ROWS, (32, 64, 20, 20, 2)),
    ],
)
def test_other_ways_to_share_out_a_product(
    backend: str, op: str, of: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer groups on their way than a program takes, or all."""
    name = "plain_shape_of" if op == PLAIN else "scaled_shape_of"
    monkeypatch.setattr(linear, name, lambda _, depth, __: linear.plain_shape(depth, *of))
    given = given_of(op, 5, 200, 2560)
    close(op, call(op, given), given)


def test_warps_without_columns_of_their_own_are_refused() -> None:
    with pytest.raises(ValueError, match="8 warps share 64 columns, and each takes 16"):
        linear.plain_shape(7168, 64, 128, 8, 4, 8)


@pytest.mark.parametrize("op", LINEARS)
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_what_is_broken_is_broken_in_its_token_or_column_alone(backend: str, broken: float, op: str) -> None:
    if op == QUANTISES and backend == "triton" and not GPU:
        pytest.skip("the interpreter converts NaN to a finite fp8")
    given = given_of(op, 4, 128, 512)
    given["x_scale" if "x_scale" in given else "x"][2, 0 if op == ROWS else 1] = broken
    got = call(op, given)
    assert not got[2].isfinite().any() and got[[0, 1, 3]].isfinite().all()
    if op == ROWS:
        given = given_of(op, 4, 128, 512)
        given["weight_scale"][7] = broken
        finite = call(op, given).isfinite()
        assert not finite[:, 7].any() and finite[:, :7].all() and finite[:, 8:].all()


@pytest.mark.parametrize("op", LINEARS)
def test_no_tokens_give_nothing(backend: str, op: str) -> None:
    assert call(op, given_of(op, 0, 128, 256)).shape == (0, 128)
    if op == ROWS:
        assert call(op, given_of(op, 0, 128, 256, scheme=("tensor", "tensor"))).shape == (0, 128)


def test_float32_is_torchs() -> None:
    given = given_of(PLAIN, 3, 64, 128, dtype=torch.float32)
    torch.testing.assert_close(call(PLAIN, given), torch.nn.functional.linear(*given.values()))


@TRITON
@pytest.mark.parametrize("op", LINEARS)
def test_counters_are_there_whatever_number_of_tokens_ran_first(
    backend: str, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "_slabs", {})
    given = given_of(op, MOST + 1, 16, 128)
    call(op, given)
    assert list(linear._slabs) == [given["x"].device]


@TRITON
@pytest.mark.parametrize("of_x", ["token", "tensor"])
def test_every_launch_for_fewer_tokens_is_made_at_load(backend: str, of_x: str) -> None:
    for tokens in (MOST + 1, 3):
        with warming.recording() as calls:
            call(ROWS, given_of(ROWS, tokens, 16, 128, scheme=(of_x, "channel")))
        launches = warming.warm_up(calls, tokens=tokens, most=MOST + 1)
        assert launches == len({1, *(step + 1 for step in linear.buckets())})


BEYOND = {
    QUANTISES: ("Tensor x, Tensor weight, Tensor weight_scale", 1),
    ROWS: ("Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, Tensor? bias", 2),
}
"""What takes more tokens, and where its weight is."""


@TRITON
@pytest.mark.parametrize("op", BEYOND)
def test_more_tokens_are_another_op(backend: str, op: str) -> None:
    schema, place = BEYOND[op]
    library = torch.library.Library("layerfuse_test_linears", "FRAGMENT")
    library.define(f"{op}({schema}) -> Tensor")
    library.impl(op, lambda *of: torch.ones(len(of[0]), len(of[place]), device=DEVICE), "CompositeExplicitAutograd")
    given = given_of(op, MOST + 1, 64, 128) | {"beyond": f"layerfuse_test_linears::{op}"}
    with mock.patch.object(linear, "make_ready") as ready:
        for _ in range(3):
            assert call(op, given).eq(1).all()
        assert ready.call_count == 1, "from the second call on it goes there directly"
        with backends.counting() as counted:
            call(op, given)
        assert counted == {op: 1}
    few = {name: given[name][:MOST] for name in ("x", "x_scale") if name in given}
    assert not call(op, given, **few).eq(1).all()
    wide = given_of(op, 1, WIDEST + 1, 128) | {"beyond": given["beyond"]}
    assert call(op, wide).eq(1).all()


ANY_FP8 = "must be one of torch.float8_e4m3fn, torch.float8_e4m3fnuz, got torch.float32"
NO_OP = "beyond: no op is registered as '{}'; import what registers it"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (PLAIN, {"weight": torch.zeros(64, 128).bfloat16()}, r"weight must be \(columns, 256\), as wide as x; got \(64, 128\)"),
    (PLAIN, {"weight": torch.zeros(128, 256)}, "weight must be one of torch.bfloat16, got torch.float32"),
    (PLAIN, {"weight": torch.zeros(256, 128).bfloat16().t()}, "weight has stride 128 along its last dimension"),
    (PLAIN, {"bias": torch.zeros(127).bfloat16()}, r"bias must be \(128,\), as weight \(128, 256\) has columns; got \(127,\)"),
    (PLAIN, {"bias": torch.zeros(128)}, "bias must be torch.bfloat16 on cpu, got torch.float32 on cpu"),
    (PLAIN, {"bias": torch.zeros(256).bfloat16()[::2]}, "bias has stride 2 along its last dimension"),
    (QUANTISES, {"weight": torch.zeros(64, 128).to(FP8)}, r"weight must be \(columns, 256\), as wide as x; got \(64, 128\)"),
    (QUANTISES, {"weight": torch.zeros(128, 256)}, f"weight {ANY_FP8}"),
    (QUANTISES, {"weight_scale": torch.ones(2, 1)}, r"weight_scale must be \(1, 2\), one per 128 x 128 of weight \(128, 256\); got \(2, 1\)"),
    (QUANTISES, {"weight_scale": torch.ones(1, 2).bfloat16()}, "weight_scale must be torch.float32 on cpu, got torch.bfloat16"),
    (QUANTISES, {"beyond": "nope"}, f"layerfuse::group_quant_linear: {NO_OP.format('nope')}"),
    (QUANTISES, {"beyond": "layerfuse::no_such_op"}, NO_OP.format("layerfuse::no_such_op")),
    (BLOCKS, {"x": torch.ones(2, 256)}, f"x {ANY_FP8}"),
    (BLOCKS, {"x_scale": torch.ones(2, 1)}, r"x_scale must be \(2, 2\), one per 128 columns of x \(2, 256\); got \(2, 1\)"),
    (BLOCKS, {"x_scale": torch.ones(2, 2).half()}, "x_scale must be torch.float32 on cpu, got torch.float16 on cpu"),
    (BLOCKS, {"out_dtype": FP8}, "out_dtype must be one of torch.float32, torch.bfloat16, torch.float16, got torch.float8_e4m3fn"),
    (ROWS, {"x_scale": torch.ones(2)}, r"x_scale must be \(2, 1\), one per token of x \(2, 256\), or one element; got \(2,\)"),
    (ROWS, {"x_scale": torch.ones(3, 1)}, r"x_scale must be \(2, 1\), one per token of x \(2, 256\), or one element; got \(3, 1\)"),
    (ROWS, {"weight_scale": torch.ones(127, 1)}, r"weight_scale must be \(128,\) or \(128, 1\) or \(1, 128\), one per row of weight \(128, 256\), or one element; got \(127, 1\)"),
    (ROWS, {"weight_scale": torch.ones(256, 1)[::2]}, r"weight_scale has strides \(2, 1\); pass weight_scale.contiguous\(\)"),
    (ROWS, {"weight_scale": torch.ones(128).half()}, "weight_scale must be torch.float32 on cpu, got torch.float16 on cpu"),
    (ROWS, {"bias": torch.zeros(128)}, "bias must be torch.bfloat16 on cpu, got torch.float32 on cpu"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "change", "says"), REFUSED)
@pytest.mark.skipif(GPU, reason="the messages name a device")
def test_what_does_not_fit_is_named(op: str, change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call(op, given_of(op, 2, 128, 256), **change)


@pytest.mark.parametrize("op", LINEARS)
def test_torch_is_told_the_truth(op: str) -> None:
    """Its fake, and tracing for any number of tokens; test_schema multiplies what it is given, which torch does not do in fp8."""
    given = given_of(op, 5, 80, 272)
    for name in ("use_ue8m0", "bias", "out_dtype", "steady", "beyond"):
        given.setdefault(name, "" if name == "beyond" else False)
    schema = getattr(torch.ops.layerfuse, op).default._schema
    named = [given[argument.name] for argument in schema.arguments]
    kinds = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(torch.ops.layerfuse, op).default, named, test_utils=kinds)


def test_up_to_8_tokens_take_more_of_the_depth_where_so_many_programs_are_left() -> None:
    taken = {
        (columns, depth): shape.groups * shape.block
        for columns, depth in ((2112, 7168), (7168, 2048), (2560, 4096), (4608, 7168), (7168, 2304))
        for shape in [linear.plain_shape_of(columns, depth, 8)]
    }
    assert {size for size, each in taken.items() if each == 1024} == {(2112, 7168), (7168, 2048)}
    assert {*taken.values()} == {512, 1024}


@pytest.mark.parametrize("depth", [16, 256, 1536, 2048, 7168, 9728, 65536])
def test_a_program_holds_few_groups_and_all_programs_have_some(depth: int) -> None:
    for most in (8, 16):
        for columns in (16, 2560, 65536):
            plain, scaled = linear.plain_shape_of(columns, depth, most), linear.scaled_shape_of(columns, depth, most)
            assert plain.held <= plain.groups <= 9 and plain.held * plain.block <= 512
            assert plain.groups <= 2 or columns * plain.split >= 128 * plain.tile, "fewer programs leave SMs idle"
            assert scaled.held <= scaled.groups <= 8 and scaled.held * scaled.block <= 1024
            for each in (plain, scaled):
                assert each.tile.bit_count() == each.block.bit_count() == 1, "Triton's ranges are powers of two"
                assert each.groups * (each.split - 1) < depth / each.block <= each.groups * each.split
        for quantised, columns in itertools.product({True, most == 8}, (16, 3072, 8448, 8464, 65536)):
            shape = linear.shape_of(columns, depth, most, quantised)
            assert shape.tile >= 16 * shape.warps
            # One that holds more is alone on its SM, and there is one for each.
            assert shape.groups <= 8 or (shape.split == 1 and shape.groups <= 12 and columns <= shape.tile * 132)
            assert shape.groups * (shape.split - 1) < depth / 128 <= shape.groups * shape.split


# ---- sizes, numbers of tokens and strides that a seed draws


class Drawn(NamedTuple):
    """One case."""

    op: str
    columns: int
    depth: int
    tokens: int
    apart: tuple[int, int]
    "Columns between the rows of the weight that are not its own, and in front of the activations' first."


LEAST, WIDE = 256, 65536
NUMBERS = 1 << 28 if GPU else 1 << 18
"""Of a weight at most, but for the narrowest."""


def drawn(seed: int) -> Drawn:
    """The sizes of a side are drawn by their order of magnitude, in steps of 16; the other one is no larger than what is left."""
    chance = random.Random(seed)

    def side(most: int) -> int:
        return int(LEAST * (most / LEAST) ** chance.random()) // 16 * 16

    one = side(WIDE)
    sides = [one, side(max(LEAST, min(WIDE, NUMBERS // one)))]
    chance.shuffle(sides)
    tokens = chance.choice([1, 2, chance.randint(3, 8), chance.randint(9, 16), chance.randint(17, 64)])
    return Drawn(LINEARS[seed % 4], *sides, tokens, tuple(chance.choices((0, 1, 3, 8, 16, 48), k=2)))  # type: ignore[arg-type]


ENDS = [Drawn(op, *sides, 3, (0, 0)) for op, sides in zip(LINEARS, ((WIDE, LEAST), (LEAST, WIDE)) * 2, strict=True)]


@TRITON
@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(end, marks=[] if end.op == ROWS or GPU else pytest.mark.thorough) for end in ENDS),
        *(pytest.param(drawn(n), marks=[] if n < 4 or GPU else pytest.mark.thorough) for n in range(96)),
    ],
    ids=str,
)
def test_any_size_any_tokens_any_stride(backend: str, case: Drawn) -> None:
    given = given_of(case.op, case.tokens, case.columns, case.depth)
    for name, ahead, behind in (("weight", 0, case.apart[0]), ("x", case.apart[1], 0)):
        raw = given[name].view(torch.uint8) if given[name].dtype == FP8 else given[name]
        wide = torch.nn.functional.pad(raw, (ahead, behind))
        given[name] = wide[:, ahead : ahead + raw.shape[1]].view(given[name].dtype)
    got = call(case.op, given)
    assert got.shape == (case.tokens, case.columns)
    close(case.op, got, given, "triton" if case.tokens <= MOST else "reference")
    assert torch.equal(call(case.op, given), got), "the same call gives the same bits"


# ---- on a GPU: graphs, streams, and launches that follow each other


@pytest.mark.skipif(not GPU, reason="captures CUDA graphs")
@pytest.mark.parametrize("op", [PLAIN, ROWS])
def test_graphs_of_two_streams_and_launches_that_follow_each_other(op: str) -> None:
    """Each launch starts while the one in front of it still runs, and reads what that gives."""
    given = given_of(op, 8, 512, 512, bias=False)
    if op == PLAIN:
        given["weight"] *= 0.05

    def chain() -> torch.Tensor:
        x = {name: given[name] for name in ("x", "x_scale") if name in given}
        for _ in range(12):
            out = call(op, given, **x, steady=True)
            x = {"x": out} if op == PLAIN else dict(zip(x, ops.quantise_per_token(out), strict=True))
        return out

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


@pytest.mark.skipif(not GPU, reason="captures a CUDA graph")
def test_a_stream_that_leaves_a_graphs_own_and_comes_back() -> None:
    """As vLLM runs shared experts: behind a norm on one stream, beside experts on another."""
    hidden, width, beside = 1024, 256, torch.cuda.Stream()
    up, down = given_of(QUANTISES, 4, 2 * width, hidden), given_of(QUANTISES, 4, hidden, width)
    for each in (up, down):
        del each["x"]
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
