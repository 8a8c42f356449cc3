"""The absorbing GEMM of an MLA decode layer with the rope beside it, on the reference and on Triton's kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import in_turn
from latent_support import DEEPSEEK, SMALL, Widths, assert_fp8, rotated, tables

from layerfuse.fusion import backends, ops
from layerfuse.fusion.backends.triton import absorb, launcher
from layerfuse.fusion.backends.triton.tuning import STEPS
from layerfuse.fusion.ops import library

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
UNIT = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-20}


def given_of(
    widths: Widths,
    tokens: int,
    heads: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    nope: int = 32,
    transposed: bool = True,
) -> dict[str, Any]:
    """As a layer has them: both halves of the query in one tensor, the weight as a view of `kv_b_proj`'s rows or columns."""
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(tokens, heads, nope + widths.rope, generator=generator).to(dtype).to(DEVICE)
    shape = (heads, widths.kv, nope) if transposed else (heads, nope, widths.kv)
    weight = (torch.randn(shape, generator=generator) * nope**-0.5).to(dtype).to(DEVICE)
    cos, sin = tables(64, widths.rope, DEVICE)
    return {
        "q_nope": query[..., :nope], "q_rope": query[..., nope:], "weight": weight.transpose(1, 2) if transposed else weight,
        "cos": cos, "sin": sin, "positions": torch.randint(0, 64, (tokens,), generator=generator).to(DEVICE),
    }  # fmt: skip


def wanted(given: dict[str, Any], pairs: str = "interleaved") -> torch.Tensor:
    """In float64."""
    product = torch.einsum("thk,hkn->thn", given["q_nope"].double(), given["weight"].double())
    return torch.cat([product, rotated(*(given[n] for n in ("q_rope", "cos", "sin", "positions")), pairs)], -1)


@pytest.mark.parametrize(
    ("shape", "sizes", "transposed"),
    in_turn(
        [(SMALL, 32), (SMALL, 24), (DEEPSEEK, 128), (Widths(96, 72, 16), 16)],
        [(1, 16), (3, 5), (16, 3), (17, 2), (40, 5), (64, 1), (65, 2)],
        [True, False],
    ),
    ids=str,
)
def test_the_product_beside_the_turned_columns(
    backend: str, shape: tuple[Widths, int], sizes: tuple[int, int], transposed: bool
) -> None:
    (widths, nope), (tokens, heads) = shape, sizes
    given = given_of(widths, tokens, heads, nope=nope, transposed=transposed)
    for steady in (False, True, True):  # the last time without Triton's search
        got = ops.mla_query_absorb(**given, steady=steady)
    assert got.shape == (tokens, heads, widths.kv + widths.rope) and got.is_contiguous()
    torch.testing.assert_close(got.double(), wanted(given), rtol=UNIT[torch.bfloat16], atol=2e-3)


@pytest.mark.parametrize("pairs", ["interleaved", "halves", "interleaved_to_halves", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_all_pairs_and_dtypes(backend: str, dtype: torch.dtype, pairs: str) -> None:
    given = given_of(SMALL, 5, 4, dtype)
    got = ops.mla_query_absorb(**given, pairs=pairs)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), wanted(given, pairs), rtol=UNIT[dtype], atol=UNIT[dtype] / 4)


def test_in_fp8_it_is_rounded_to_the_queries_dtype_first(backend: str) -> None:
    given = given_of(SMALL, 7, 3)
    scale = torch.tensor([0.03], device=DEVICE)
    got = ops.mla_query_absorb_static_quant(**given, scale=scale)
    assert got.dtype == torch.float8_e4m3fn
    plain = ops.mla_query_absorb(**given).double() / 0.03
    assert_fp8(got.double(), plain.clamp(-448, 448), 2**-9)


@pytest.mark.parametrize("position", [-1, 64])
def test_a_position_outside_the_tables_is_an_error_or_nan_in_its_token_alone(backend: str, position: int) -> None:
    given = given_of(SMALL, 3, 2)
    given["positions"][1] = position
    if backend == "reference":
        if GPU:
            pytest.skip("a failed assertion on the device ends the process")
        with pytest.raises(ValueError, match=f"position {position} lies outside the 64 rows"):
            ops.mla_query_absorb(**given)
        return
    got = ops.mla_query_absorb(**given)
    assert (
        got[1, :, SMALL.kv :].isnan().all() and got[[0, 2]].isfinite().all() and got[1, :, : SMALL.kv].isfinite().all()
    )


def test_no_tokens_give_no_query(backend: str) -> None:
    assert ops.mla_query_absorb(**given_of(SMALL, 0, 3)).shape == (0, 3, SMALL.kv + SMALL.rope)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"weight": torch.zeros(4, 32, 64, dtype=torch.bfloat16)}, r"weight must be \(2, 32, columns\).*got \(4, 32, 64\)"),
        ({"weight": torch.zeros(2, 32, 64)}, "weight is torch.float32 on cpu, q_nope torch.bfloat16"),
        ({"weight": torch.zeros(2, 64, 128, dtype=torch.bfloat16)[:, ::2, ::2]}, "none of the last two is 1"),
    ],
    ids=["shape", "dtype", "strides"],
)  # fmt: skip
@pytest.mark.skipif(GPU, reason="the weights are on the CPU")
def test_a_weight_that_does_not_fit_is_refused_by_name(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ops.mla_query_absorb(**(given_of(SMALL, 3, 2) | change))


def test_torch_is_told_the_truth() -> None:
    with torch.no_grad():
        torch.library.opcheck(
            torch.ops.layerfuse.mla_query_absorb.default, (*given_of(SMALL, 3, 2).values(), "interleaved", False),
            test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
        )  # fmt: skip


def test_more_tokens_than_a_row_of_weights_is_read_for_take_torchs_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ours ends: the kernel is launched up to `most` tokens and not beyond."""
    launched: list[int] = []
    monkeypatch.setattr(absorb, "_launch", lambda name, tokens, *rest: launched.append(tokens))
    backends.force("triton")
    try:
        for tokens, heads in ((1, 2), (64, 2), (65, 2), (32, 33), (33, 33)):
            ops.mla_query_absorb(**given_of(SMALL, tokens, heads))
    finally:
        backends.force(None)
    assert launched == [1, 64, 32]


@pytest.mark.skipif(GPU, reason="launches are taken down in the place of Triton's interpreter")
@pytest.mark.parametrize("heads", [4, 40])
@pytest.mark.parametrize("nope", [32, 2 * absorb.DEEPEST])
@pytest.mark.parametrize("static", [False, True])
def test_every_way_to_launch_it_begins_behind_one_of_its_steps(
    static: bool, nope: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: set[Any] = set()
    monkeypatch.setattr(launcher, "first", lambda kernel, key, *_, **__: keys.add(key))
    name = "mla_query_absorb_static_quant" if static else "mla_query_absorb"
    cases = []

    def launched(tokens: int) -> frozenset[Any]:
        keys.clear()
        given = given_of(SMALL, tokens, heads, nope=nope)
        getattr(ops, name)(**given, **({"scale": torch.ones(1, device=DEVICE)} if static else {}))
        return frozenset(keys)

    backends.force("triton")
    try:
        with backends.listening(lambda _, given: cases.append(library.case_maker(library.declared(name))(*given))):
            launched(1)
        steps = backends.steps(name, DEVICE, cases[0])
        ways = {launched(count) for count in (1, *(step + 1 for step in steps))}
        edges = {rows // heads + beside for rows in STEPS for beside in (0, 1)}
        assert {launched(count) for count in {1, 2, 16, 17, 32, 33, 64, 65, 100} | edges} == ways
        assert len(ways) == len(steps) + 1
    finally:
        backends.force(None)
