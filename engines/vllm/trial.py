"""Whether what stands at a place of vLLM's computes what a fused op does: tried out once, on numbers of its own.

Code can be held to its source (`native`). What objects of other packages do, that stand where vLLM looks functions up, shows in their
numbers only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

ROWS = 4
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}
"""How far apart results may be, as the norm of the difference by theirs; 2e-2 in 16 bits, which round in between."""


def possible() -> bool:
    """Whether there is anything to look at: not in a CUDA graph that is being captured."""
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def difference(
    meaning: Callable[..., Any], fused: Sequence[Any], own: Callable[..., Any], plain: Sequence[Any]
) -> str | None:
    """Call vLLM's own and the reference of a fused op on random rows: how they differ, as a sentence, or None where they do not.

    Args:
        meaning: the op's reference.
        fused: its arguments, of which the first two are rows of one shape but for their width.
        own: vLLM's.
        plain: its arguments; the first two are the same rows, perhaps in another shape.
    """
    x, second = (_random(each) for each in _few(plain[0], plain[1]))
    try:
        with torch.no_grad():
            theirs = own(x.clone(), second.clone(), *plain[2:])
            like = x.shape[:-1] + fused[1].shape[-1:]
            ours = meaning(x, second.view(like), *fused[2:])
    except Exception as error:  # of anybody's
        return f"trying out what runs there raised {type(error).__name__}: {error}"
    pairs = zip(_several(theirs), _several(ours), strict=False)
    off = max(_apart(their, our) for their, our in pairs)
    if off <= TOLERANCE.get(x.dtype, 2e-2):
        return None
    return f"what runs there computes something else: its results are off by {off:.1e} of their norm"


def _few(x: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """A few tokens of both."""
    if x.dim() == second.dim() + 1:  # Kimi's delta nets give the gate without the leading dimension of 1
        return x[:, :ROWS], second[:ROWS]
    return x[:ROWS], second[:ROWS]


def _random(like: Tensor) -> Tensor:
    # A generator of its own: what vLLM draws afterwards stays what it was.
    generator = torch.Generator(device=like.device).manual_seed(0)
    return torch.randn(like.shape, generator=generator, device=like.device).to(like.dtype)


def _several(results: Any) -> tuple[Tensor, ...]:
    return tuple(results) if isinstance(results, tuple | list) else (results,)


def _apart(theirs: Any, ours: Tensor) -> float:
    if not isinstance(theirs, Tensor) or theirs.numel() != ours.numel():
        return float("inf")
    wanted = ours.double().flatten()
    off = float((theirs.double().flatten() - wanted).norm() / wanted.norm())
    return off if off == off else float("inf")
