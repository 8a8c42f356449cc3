"""The conventions of the norms that quantise, put over one function of all their arguments, once, when binding.

All take `x, weight, epsilon, weight_offset`, a residual behind x where they add one, and the options of their quantisation. All
return the values, the scales unless they were given, the plain norm where it is kept, and the sum where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

from torch import Tensor

from .resolved import Resolved

Results = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Values, scales, plain norm, sum with the residual (of two latents: the norm of kv); None for what there is not."""

Core = Callable[..., Results]
"""From the op's arguments. Of one norm with None for a residual that there is not; of one scale per token with those of a group,
whose size is None then: `dtype, group_size, column_major, tma_aligned, use_ue8m0`."""


def one_norm(found: Resolved, core: Core) -> Callable[..., Any]:
    """The op of one norm: `(x, [residual,] weight, epsilon, weight_offset, ...)`."""
    return two_norms(found, core if found.binding.adds else lambda x, *others: core(x, None, *others))


def two_norms(found: Resolved, core: Core) -> Callable[..., Any]:
    """The op of an MLA layer's latents: `(q, kv, ..., q_weight_offset, kv_weight_offset, ...)`."""
    pick = picked(found)
    if found.binding.per != "token":
        return lambda *given: pick(core(*given))

    def per_token(*given: Any) -> Any:
        *others, dtype, use_ue8m0 = given
        return pick(core(*others, dtype, None, False, False, use_ue8m0))

    return per_token


def picked(found: Resolved) -> Callable[[Results], Any]:
    """What a binding returns of `Results`: one tensor alone, several as a tuple."""
    binding = found.binding
    kept = (True, binding.per != "static", binding.keeps_norm, binding.adds or binding.op.startswith("mla_dual"))
    pick: Callable[[Results], Any] = itemgetter(*(place for place, is_kept in enumerate(kept) if is_kept))
    return pick
