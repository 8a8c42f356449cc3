"""Linears with few tokens at sizes, numbers of tokens and strides that a seed draws: both sides from 256 to 65536, in steps of 16."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import test_few_token_linear as plain
import test_group_quant_linear as blocks
import test_scaled_linear as rows
import torch
from helpers import in_turn

from layerfuse.fusion import backends, ops

LEAST, MOST = 256, 65536
GPU = torch.cuda.is_available()
NUMBERS = 1 << 28 if GPU else 1 << 20
"""Of a weight at most, but for the narrowest."""
APART = (0, 0, 1, 3, 8, 16, 48)
"""Columns between the rows of a view, and in front of the first."""


class Drawn(NamedTuple):
    """One case."""

    op: str
    columns: int
    depth: int
    tokens: int
    behind: int
    "Columns between the rows of the weight that are not its own."
    ahead: int
    "The same in front of the activations' first."


def drawn(seed: int) -> Drawn:
    """The sizes of a side are drawn by their order of magnitude; the other one is no larger than what is left."""
    chance = random.Random(seed)

    def side(most: int) -> int:
        return int(LEAST * (most / LEAST) ** chance.random()) // 16 * 16

    one = side(MOST)
    two = side(max(LEAST, min(MOST, NUMBERS // one)))
    columns, depth = (one, two) if chance.random() < 0.5 else (two, one)
    op = ("few_token_linear", "group_quant_linear", "block_scaled_linear", "scaled_linear")[seed % 4]
    tokens = chance.choice([1, 2, chance.randint(3, 8), chance.randint(9, 16), chance.randint(17, 64)])
    return Drawn(op, columns, depth, tokens, chance.choice(APART), chance.choice(APART))


SEEDS = [pytest.param(seed, marks=[] if seed < 4 or GPU else pytest.mark.thorough) for seed in range(96)]


@pytest.fixture(autouse=True)
def _triton() -> Iterator[None]:
    backends.force("triton")
    yield
    backends.force(None)


def view(values: torch.Tensor, ahead: int, behind: int) -> torch.Tensor:
    """The same numbers, as columns of a wider tensor."""
    raw = values.view(torch.uint8) if values.dtype.itemsize == 1 else values
    wide = raw.new_zeros(len(raw), ahead + raw.shape[1] + behind)
    wide[:, ahead : ahead + raw.shape[1]] = raw
    return wide[:, ahead : ahead + raw.shape[1]].view(values.dtype)


def made(case: Drawn) -> dict[str, Any]:
    sizes = case.tokens, case.columns, case.depth
    given: dict[str, Any] = (
        plain.given_of(*sizes)
        if case.op == "few_token_linear"
        else rows.given_of(*sizes)
        if case.op == "scaled_linear"
        else blocks.given_of(*sizes)
    )
    return given | {"weight": view(given["weight"], 0, case.behind), "x": view(given["x"], case.ahead, 0)}


def held(got: torch.Tensor, case: Drawn, given: dict[str, Any]) -> None:
    """To float64."""
    if case.op == "few_token_linear":
        plain.close(got, given, "triton" if case.tokens <= ops.linear.MOST else "reference")
    elif case.op == "scaled_linear":
        rows.close(got, given)
    else:
        blocks.close(got, blocks.wanted(given), got.dtype)


@pytest.mark.parametrize("seed", SEEDS)
def test_any_size_any_tokens_any_stride(seed: int) -> None:
    case = drawn(seed)
    given = made(case)
    call = dict(given)
    if case.op == "block_scaled_linear":
        call["x"], call["x_scale"] = ops.quantise_group(given["x"])
        call["x"] = view(call["x"], case.ahead, 0)
    function = getattr(ops, case.op)
    got = function(**call)
    assert got.shape == (case.tokens, case.columns), case
    held(got, case, given)
    assert torch.equal(function(**call), got), "the same call gives the same bits"


@pytest.mark.parametrize(
    ("op", "sides"),
    in_turn(["few_token_linear", "scaled_linear", "group_quant_linear"], [(MOST, LEAST), (LEAST, MOST)]),
    ids=str,
)
def test_the_ends(op: str, sides: tuple[int, int]) -> None:
    case = Drawn(op, *sides, 3, 0, 0)
    given = made(case)
    held(getattr(ops, op)(**given), case, given)


def test_what_is_drawn_is_of_every_kind() -> None:
    cases = [drawn(seed) for seed in range(96)]
    assert all(LEAST <= side <= MOST and side % 16 == 0 for case in cases for side in (case.columns, case.depth))
    assert any(side % 128 for case in cases for side in (case.columns, case.depth))
    assert max(case.columns for case in cases) > 8192 and max(case.depth for case in cases) > 8192
    assert {case.tokens > 16 for case in cases} == {True, False}
