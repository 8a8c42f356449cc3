"""What tracing left on the nodes of a graph: their fake tensors, compared without adding guards."""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true


def value(node: Any) -> Any:
    """The fake tensor (or None) that tracing left on a node."""
    return node.meta.get("val") if isinstance(node, Node) else None


def same(a: Any, b: Any) -> bool:
    """Whether two sizes are equal for every input."""
    return bool(statically_known_true(a == b))


def is_number(given: object, wanted: float) -> bool:
    """Whether an argument is this number, as it is or rounded to float32."""
    if not isinstance(given, float | int) or isinstance(given, bool):
        return False
    return given in (wanted, struct.unpack("f", struct.pack("f", wanted))[0])


def same_shape(a: Any, b: Any) -> bool:
    """Whether two shapes are equal for every input."""
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


def is_contiguous(tensor: torch.Tensor) -> bool:
    """Whether a traced tensor is contiguous for every size it may have. An empty one is, as torch counts."""
    expected: Any = 1
    if any(same(size, 0) for size in tensor.shape):
        return True
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if not same(size, 1) and not same(stride, expected):
            return False
        expected = expected * size
    return True


def is_last(dims: Any, of: torch.Tensor) -> bool:
    """Whether a reduction's dimensions are the last alone, however it is counted. None and no dimension are all of them."""
    return list(dims or ()) in ([-1], [of.dim() - 1])


def last_width(node: object) -> int | None:
    """The static size of a tensor's last dimension, or None."""
    val = value(node)
    width = val.shape[-1] if isinstance(val, torch.Tensor) and val.dim() else None
    return width if isinstance(width, int) else None
