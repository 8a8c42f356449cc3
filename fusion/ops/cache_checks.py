"""The checks of what an op of a decode layer takes besides its rows: positions, slots, tables, the cache, weights of heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..declare import Cache, HeadWeight, Index, Table
from .cache_layout import layout_of
from .norm import FLOATS


def tokens_of(x: Any, heads: bool) -> int:
    """The tokens of rows: their leading dimensions, counted as one, without heads."""
    count = 1
    for size in x.shape[: -2 if heads else -1]:
        count *= size
    return count


def index_check(op: str, argument: Index, heads: bool) -> Callable[..., None]:
    """Of positions and slots."""
    name, of = argument.name, argument.of

    def check(index: Any, x: Any) -> None:
        tokens = tokens_of(x, heads)
        if index.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{op}: {name} must be torch.int32 or torch.int64, got {index.dtype}")
        if index.dim() != 1 or index.shape[0] != tokens:
            raise ValueError(
                f"{op}: {name} must have one number for each of the {tokens} tokens of {of}, got {tuple(index.shape)}"
            )
        if index.device != x.device:
            raise ValueError(f"{op}: {name} is on {index.device}, {of} on {x.device}; move one of them")
        if index.stride(0) != 1 and tokens > 1:
            raise ValueError(f"{op}: {name} has stride {index.stride(0)}; pass {name}.contiguous()")

    return check


def table_check(op: str, argument: Table) -> Callable[..., None]:
    """Of cos and sin."""
    name, of = argument.name, argument.of

    def check(table: Any, x: Any) -> None:
        if table.dim() != 2 or table.shape[1] != x.shape[-1] // 2:
            raise ValueError(
                f"{op}: {name} must be (positions, {x.shape[-1] // 2}), half as wide as {of}; got {tuple(table.shape)}"
            )
        if x.shape[-1] % 2:
            raise ValueError(f"{op}: {of} has {x.shape[-1]} columns, and a rope turns pairs of them")
        if table.dtype not in FLOATS:
            raise ValueError(f"{op}: {name} must be one of {', '.join(map(str, FLOATS))}, got {table.dtype}")
        if table.device != x.device:
            raise ValueError(f"{op}: {name} is on {table.device}, {of} on {x.device}; move one of them")
        if table.stride(1) != 1 and table.shape[1] > 1:
            raise ValueError(f"{op}: {name} has stride {table.stride(1)} along its rows; pass {name}.contiguous()")

    return check


def head_weight_check(op: str, argument: HeadWeight) -> Callable[..., None]:
    """Of a weight for each head, against the rows that it is multiplied by."""
    name, of = argument.name, argument.of

    def check(weight: Any, x: Any) -> None:
        heads, width = x.shape[-2:]
        if weight.dim() != 3 or tuple(weight.shape[:2]) != (heads, width):
            raise ValueError(
                f"{op}: {name} must be ({heads}, {width}, columns), as {of} has heads and columns; got {tuple(weight.shape)}"
            )
        if weight.dtype != x.dtype or weight.device != x.device:
            raise ValueError(
                f"{op}: {name} is {weight.dtype} on {weight.device}, {of} {x.dtype} on {x.device}; convert or move one of them"
            )
        if 1 not in weight.stride()[1:]:
            raise ValueError(
                f"{op}: {name} has strides {tuple(weight.stride())}, none of the last two is 1; pass {name}.contiguous()"
            )

    return check


def cache_check(op: str, argument: Cache) -> Callable[..., None]:
    """Of a cache, against the rows that it holds."""
    name = argument.name

    def check(cache: Any, latent: Any, rope: Any) -> None:
        layout_of(cache, latent.shape[-1], rope.shape[-1], latent.dtype, name=f"{op}: {name}")
        if cache.device != latent.device:
            raise ValueError(
                f"{op}: {name} is on {cache.device}, {argument.parts[0]} on {latent.device}; move one of them"
            )

    return check
