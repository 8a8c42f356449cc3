"""What AITER must give for the query of an MLA layer: what the reference of its op gives, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from check_tools import random
from torch import Tensor

from layerfuse.fusion.declare import Op
from layerfuse.fusion.latent_ops import MLA, MLA_QUERY_CONCAT

MLA_OPS: dict[str, Op] = {op.name: op for op in MLA}

LATENT, ROPE, POSITIONS = 128, 16, 32
LEADING = ((5,), (2, 3), (1,), (0,))


def query(
    *leading: int, heads: int = 3, dtype: torch.dtype = torch.bfloat16, table: torch.dtype = torch.float32
) -> Any:
    """The arguments but for pairs: the latent head by head, rope columns behind others, cos and sin as halves of one table."""
    tokens = torch.Size(leading).numel()
    latent = random(heads, *leading, LATENT, dtype=dtype).movedim(0, -2)
    rope = random(*leading, heads, 32 + ROPE, dtype=dtype)[..., 32:]
    cos, sin = random(POSITIONS, ROPE, dtype=table).chunk(2, -1)
    positions = torch.arange(tokens, dtype=torch.int32) * 7 % POSITIONS
    return latent, rope, cos, sin, positions


def check_query(call: Callable[..., Tensor], binding: str) -> None:
    """One binding, for every kind of leading dimensions and what it takes of dtypes and pairs."""
    for pairs in ("none",) if binding.endswith(".cat") else ("interleaved", "halves"):
        for leading in LEADING:
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                given = (*query(*leading, dtype=dtype), pairs)
                found, expected = call(*given), MLA_QUERY_CONCAT.reference(*given)
                assert found.is_contiguous()
                assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
                assert torch.equal(found, expected)
