"""Linears with few tokens: the weights that their kernel reads, and those that no graph shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from ..fusion.ops.linear import WIDEST, scales_shape
from ..fusion.rewrite.linears import UNREAD
from .placement import Placement

UNFIT = "its weight is not in e4m3fn with float32 scales of 128 x 128, row by row"


def fits(weight: Any, weight_scale: Any) -> bool:
    """Whether layerfuse's kernels read a weight (columns, depth) with one scale per 128 x 128."""
    return (
        isinstance(weight, Tensor)
        and isinstance(weight_scale, Tensor)
        and weight.dtype == torch.float8_e4m3fn
        and weight.dim() == 2
        and weight.stride(1) == 1
        and len(weight) <= WIDEST
        and weight_scale.dtype == torch.float32
        and weight_scale.is_contiguous()
        and scales_shape(weight) == tuple(weight_scale.shape)
    )


@define(kw_only=True, eq=False)
class AtSeams(Placement):
    """Linears that no graph shows, with layerfuse's product at a seam of each."""

    counts: Mapping[str, Counter[str]] = field(repr=False)
    "Site -> op -> calls so far, kept up where ops are called."

    def calls(self) -> Mapping[str, Counter[str]]:
        """As they are now: they go on."""
        return {site: calls.copy() for site, calls in self.counts.items()}

    def why_left(self, site: str, run: str) -> str:  # noqa: ARG002 (alike for all)
        """That nothing of what stands there was called."""
        return f"the {run} did not come to its product, or {UNREAD}"
