"""Norms that are written out: where they round tells them from other arithmetic, and what is bound is what the graph multiplies by."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from layerfuse.fusion.match.found import FoundNorm
from layerfuse.fusion.match.index import GraphIndex
from layerfuse.fusion.match.norms import find_norms

CONVERT = torch.ops.prims.convert_element_type.default
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def rounded(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None else CONVERT(tensor, dtype)


def norms_of(
    roundings: tuple[torch.dtype | None, ...],
    *,
    widen: bool = True,
    weight: torch.dtype = BF16,
    rows: torch.dtype = BF16,
) -> tuple[list[FoundNorm], int]:
    """The norms of a graph that rounds behind the root, the rows and the weight; and how many only resemble one."""
    behind_root, behind_rows, behind_weight = roundings

    def norm(x: Tensor, factor: Tensor) -> Tensor:
        wide = rounded(x, F32 if widen else None)
        root = rounded(torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6), behind_root)
        return rounded(factor * rounded(wide * root, behind_rows), behind_weight)

    graph = make_fx(norm, tracing_mode="fake")(torch.randn(3, 8, dtype=rows), torch.rand(8, dtype=weight)).graph
    found, near = find_norms(GraphIndex(graph))
    return found, len(near)


@pytest.mark.parametrize(
    ("roundings", "given", "form"),
    [
        ((None, None, BF16), {}, "rounded after the weight"),
        ((None, None, BF16), {"weight": F32}, "rounded after the weight"),
        ((None, BF16, None), {}, "rounded before the weight"),
        ((None, BF16, BF16), {"weight": F32}, "rounded before a float32 weight"),
        ((None, None, None), {"widen": False, "rows": F32, "weight": F32}, "plain"),
        ((None, None, None), {"widen": False, "rows": torch.float64, "weight": torch.float64}, "plain"),
    ],
)
def test_where_a_norm_rounds_is_its_form(roundings: tuple, given: dict, form: str) -> None:
    (norm,), near = norms_of(roundings, **given)
    assert (norm.form, str(norm.x), str(norm.weight), near) == (form, "x_1", "factor_1", 0)


def test_rows_that_stay_wide_are_those_of_a_plain_norm() -> None:
    (norm,), _ = norms_of((None, None, None))
    assert norm.form == "plain"
    assert norm.x.target is CONVERT


@pytest.mark.parametrize(
    ("roundings", "given"),
    [
        ((BF16, None, BF16), {}),  # the root
        ((None, F16, BF16), {}),  # to another dtype than the rows'
        ((None, BF16, None), {"weight": F32}),  # and not again behind a float32 weight
        ((None, None, F16), {"rows": F32, "widen": False, "weight": F32}),
        ((None, None, None), {"widen": False}),  # a mean square in bfloat16
        ((None, BF16, None), {"widen": False, "rows": F32}),
    ],
)
def test_another_rounding_is_another_norm(roundings: tuple, given: dict) -> None:
    found, near = norms_of(roundings, **given)
    # The second one leaves a plain norm of float32 rows in front of its conversion.
    assert [norm.form for norm in found] == (["plain"] if roundings[2] is F16 else [])
    assert len(found) + near == 1


@pytest.mark.parametrize(("added", "is_rounded", "offset"), [(1.0, False, 1.0), (1.0, True, 0.0), (0.5, False, 0.0)])
def test_only_one_that_is_added_and_not_rounded_is_an_offset(added: float, is_rounded: bool, offset: float) -> None:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        wide, factor = CONVERT(x, F32), CONVERT(weight, F32) + added
        unit = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6)
        return CONVERT(unit * rounded(factor, BF16 if is_rounded else None), BF16)

    graph = make_fx(norm, tracing_mode="fake")(torch.randn(3, 8, dtype=BF16), torch.rand(8, dtype=BF16)).graph
    ((found,), _) = find_norms(GraphIndex(graph))
    assert found.weight_offset == offset
    assert (str(found.weight) == "weight_1") is (offset == 1.0)
