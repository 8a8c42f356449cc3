"""Whether what stands at a place of an engine's computes what a fused op does: tried out once, on numbers of its own.

Code can be held to its source (`native`). What objects of other packages do, that stand where an engine looks functions up, shows in their
numbers only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

ROWS = 4
TOLERANCE = {1: 1e-1, 2: 2e-2}
"""How far apart results may be, as the norm of the difference by theirs, for so many bytes; 1e-4 for more. 16 bits round in between, and
a value on the edge of two in 8 bits may become the other one."""


def possible() -> bool:
    """Whether there is anything to look at: not in a CUDA graph that is being captured."""
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def difference(
    meaning: Callable[..., Any], fused: Sequence[Any], own: Callable[..., Any], plain: Sequence[Any]
) -> str | None:
    """Call the engine's own and the reference of a fused op on random rows: how they differ, as a sentence, or None where they do not.

    Args:
        meaning: the op's reference.
        fused: its arguments, of which the first, or the first two, are rows of one shape but for their width.
        own: the engine's.
        plain: its arguments; the first, or the first two, are the same rows, perhaps in another shape.
    """
    rows = [random(each) for each in _few(*plain[:2])]
    try:
        with torch.no_grad():
            theirs = own(*(each.clone() for each in rows), *plain[2:])
            like = rows[0].shape[:-1]
            given = (each.view(like + of.shape[-1:]) for each, of in zip(rows, fused, strict=False))
            ours = meaning(*given, *fused[len(rows) :])
    except Exception as error:  # of anybody's
        return raised(error)
    return why_apart(zip(_several(theirs), _several(ours), strict=False))


def raised(error: Exception) -> str:
    """What is said of a trial that did not come to its end."""
    return f"trying out what runs there raised {type(error).__name__}: {error}"


def why_apart(pairs: Iterable[tuple[Any, Tensor]], tolerance: float | None = None) -> str | None:
    """How the engine's results, the first of each pair, differ from ours, as a sentence; None where they do not.

    Args:
        pairs: of results.
        tolerance: how far they may be apart; None: by the bytes of an element.
    """
    for theirs, ours in pairs:
        off = _apart(theirs, ours)
        if not off <= (tolerance or TOLERANCE.get(ours.element_size(), 1e-4)):
            return f"what runs there computes something else: its results are off by {off:.1e} of their norm"
    return None


def _few(x: Tensor, second: Tensor | None = None) -> tuple[Tensor, ...]:
    """A few tokens of each."""
    if second is None:
        return (x[:ROWS],)
    if x.dim() == second.dim() + 1:  # Kimi's delta nets give the gate without the leading dimension of 1
        return x[:, :ROWS], second[:ROWS]
    return x[:ROWS], second[:ROWS]


def random(like: Tensor) -> Tensor:
    """Numbers of a tensor's shape, dtype and device. The generator is their own: what the engine draws afterwards stays what it was."""
    generator = torch.Generator(device=like.device).manual_seed(0)
    return torch.randn(like.shape, generator=generator, device=like.device).to(like.dtype)


def _several(results: Any) -> tuple[Tensor, ...]:
    return tuple(results) if isinstance(results, tuple | list) else (results,)


def _apart(theirs: Any, ours: Tensor) -> float:
    if not isinstance(theirs, Tensor) or theirs.numel() != ours.numel():
        return float("inf")
    # What is smaller than a dtype's smallest number is rounding, however large it is by what is expected.
    limits, wanted = torch.finfo(ours.dtype), ours.double().flatten()
    least = limits.tiny * limits.eps * wanted.numel() ** 0.5
    return float((theirs.double().flatten() - wanted).norm() / (wanted.norm() + least))
