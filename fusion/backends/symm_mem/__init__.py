"""Fused all-reduces on NVIDIA GPUs of one host: a Triton kernel over torch's symmetric memory, without multicast.

`kernel` exchanges rows between ranks, and `crossovers` has up to how many tokens, without torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...declare import Op


def function_of(op: Op) -> Callable[..., Any]:
    """The function of an op that starts with an all-reduce; it imports Triton."""
    from .functions import function_of as made

    return made(op)
