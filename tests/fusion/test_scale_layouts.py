"""Scales laid out anew, step by step as engines write it: column by column, and with columns that start on 16 bytes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import in_turn
from quant_support import assert_quantised, vllm_group
from stream_support import SITE, Stream, exact_norm, form_of, rows, run
from torch import Tensor
from torch.nn.functional import pad

GROUP = "add_rms_norm_group_quant"


def up(rows: Any) -> Any:
    return (rows + 3) // 4 * 4


def deepgemm(scales: Tensor) -> Tensor:
    """DeepGEMM's get_col_major_tma_aligned_tensor: written into the rows of a wider buffer."""
    rows, groups = scales.shape
    buffer = torch.empty((1, groups, up(rows)), dtype=scales.dtype).transpose(1, 2)
    buffer[:, :rows, :] = scales.unsqueeze(0)
    return buffer[:, :rows, :].squeeze(0)


def padded(scales: Tensor) -> Tensor:
    rows = scales.shape[0]
    return pad(scales.t(), (0, up(rows) - rows)).t()[:rows]


def strided(scales: Tensor) -> Tensor:
    aligned = torch.empty_strided(scales.shape, (1, up(scales.shape[0])), dtype=scales.dtype)
    aligned.copy_(scales)
    return aligned


def columns(scales: Tensor) -> Tensor:
    return scales.transpose(-2, -1).contiguous().transpose(-1, -2)


def with_scales(lay_out: Any) -> Any:
    def quantise(x: Tensor) -> tuple[Tensor, ...]:
        values, scales = vllm_group(x)
        return values, lay_out(scales)

    return quantise


def traced_with(lay_out: Any, quant: str, count: int = 6, dynamic: bool = False) -> tuple[Any, Any, Any]:
    module = Stream(with_scales(lay_out))
    x, residual = rows(count)
    if dynamic:
        for each in (x, residual):
            torch._dynamo.mark_dynamic(each, 0)
    return run(module, quant, x, residual), module, (x, residual)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("lay_out", "count"), in_turn([deepgemm, padded, strided], [6, 3, 8]))
def test_aligned(lay_out: Any, count: int, dynamic: bool) -> None:
    if lay_out is padded and count == 8:
        pytest.skip("nothing is padded, so nothing is copied: the scales stay row by row")
    traced, module, given = traced_with(lay_out, "group128,tma_aligned", count, dynamic)
    assert traced.report.of(GROUP).matched == (SITE,), str(traced.report)
    assert form_of(traced) == GROUP
    values, scales, _ = traced.output
    assert scales.stride() == module(*given)[1].stride() == (1, up(count))
    assert_quantised(values, scales, exact_norm(module, *given), rounding=2**-8)


LAID_OUT = [
    (deepgemm, "group128,tma_aligned"),
    (columns, "group128,column_major"),
    (strided, "group128,tma_aligned"),
    (None, "group128,column_major"),
    (None, "group128,tma_aligned"),
]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("laid_out", "shape", "back"),
    in_turn(LAID_OUT, [(2, 3), (5, 1), (1, 6), (2, 2, 3)], [False, True]),
    ids=lambda value: f"{value[0] and value[0].__name__},{value[1]}" if value in LAID_OUT else str(value),
)
def test_tokens_flattened_for_the_quantisation(
    laid_out: tuple[Any, str], shape: tuple[int, ...], back: bool, dynamic: bool
) -> None:
    """(batch, seq, hidden) becomes (tokens, hidden), and the scales are laid out there, by steps or by our own op."""
    lay_out, quant = laid_out
    if back and lay_out is deepgemm:
        pytest.skip("the written buffer is then read by two slices, which is no form that is known")
    aligned, count = "tma" in quant, math.prod(shape)

    def quantise(x: Tensor) -> tuple[Tensor, ...]:
        flat = x.reshape(-1, x.shape[-1])
        if lay_out is None:
            values, scales = torch.ops.layerfuse.quantise_group(flat, torch.float8_e4m3fn, 128, True, aligned, False)
        else:
            values, scales = with_scales(lay_out)(flat)
        # exp2: something that reads the scales as they lie, and is read in either shape.
        return values, scales, (scales.view(*x.shape[:-1], -1) if back else scales).exp2()

    module = Stream(quantise)
    given = tuple(each.view(*shape, -1) for each in rows(count))
    if dynamic:
        for each in given:
            torch._dynamo.mark_dynamic(each, 0)
    traced = run(module, quant, *given)
    assert traced.report.of(GROUP).matched == (SITE,), str(traced.report)
    # A graph for any batch asks the flattened norm how many tokens there are, and so keeps it.
    assert form_of(traced) in (GROUP, f"{GROUP}_with_norm" if dynamic else GROUP)
    values, scales, powers, _ = traced.output
    expected = (1, up(count) if aligned else count)
    with torch.no_grad():
        assert scales.stride() == module(*given)[1].stride() == expected
    assert_quantised(values, scales, exact_norm(module, *given).flatten(0, -2), rounding=2**-8)
    torch.testing.assert_close(powers, (scales.view(*shape, -1) if back else scales).exp2())


@pytest.mark.parametrize(
    ("lay_out", "quant", "reason"),
    [
        (deepgemm, "group128", "the graph has the scales column by column, TMA-aligned, the plan row by row"),
        (strided, "group128,column_major", "column by column, TMA-aligned, the plan column by column"),
        (columns, "group128,tma_aligned", "the graph has the scales column by column, the plan column by column, TMA"),
        (lambda s: s, "group128,tma_aligned", "the graph has the scales row by row, the plan column by column, TMA"),
        (lambda s: pad(s.t(), (0, 3)).t()[:6], "group128,tma_aligned", "neither row by row nor column by column"),
        (lambda s: torch.stack([deepgemm(s), columns(s)]), "group128,tma_aligned", "are laid out in 2 ways"),
        (lambda s: pad(s.t(), (2, 0)).t()[:6], "group128,tma_aligned", "has the scales row by row"),
        (lambda s: pad(s.t(), (0, 2)).t()[1:7], "group128,tma_aligned", "has the scales row by row"),
    ],
)  # fmt: skip
def test_another_layout(lay_out: Any, quant: str, reason: str) -> None:
    traced, module, given = traced_with(lay_out, quant)
    assert reason in traced.report.of(GROUP).missed[SITE]
    assert form_of(traced) == "add_rms_norm"
    for got, wanted in zip(traced.output, module(*given), strict=True):
        torch.testing.assert_close(got.float(), wanted.float(), rtol=0.13, atol=0.02)


@pytest.mark.parametrize("lay_out", [deepgemm, columns])
def test_where_both_are_the_same(lay_out: Any) -> None:
    """Eight rows need no rows behind them, so column by column is aligned already."""
    for quant in ("group128,tma_aligned", "group128,column_major"):
        traced, _, _ = traced_with(lay_out, quant, count=8)
        assert form_of(traced) == GROUP
