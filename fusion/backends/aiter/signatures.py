"""The conventions of the norms' ops, put over one function of all their arguments, once, when binding.

All take `x, weight, epsilon, weight_offset`, a residual behind x where they add one, twice the norm for an MLA layer's latents, and the
options of their quantisation. All return the values, the scales unless they were given, the plain norm where it is kept, and the sum,
or the norm of the second latent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from torch import Tensor

from .resolved import Resolved

Norm = tuple[Tensor, Tensor, float, float]
"""x, weight, epsilon and weight offset."""

Results = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Values, scales, plain norm, sum with the residual (of two latents: the norm of kv); None for what there is not."""

Core = Callable[..., Results]
"""From a norm, a residual or None, a second norm or None, and the options: a scale and the dtype; or `dtype, group_size, column_major`,
with no size for one scale per token; or none."""


def norms(found: Resolved, core: Core) -> Callable[..., Any]:
    """The op of one norm, `(x, [residual,] weight, epsilon, weight_offset, ...)`, or of an MLA layer's latents, `(q, kv, ...)`."""
    per, adds = found.binding.per, found.binding.adds
    kept = (True, per != "static", found.binding.keeps_norm, adds or found.binding.is_dual)
    pick: Callable[[Results], Any] = itemgetter(*(place for place, is_kept in enumerate(kept) if is_kept))

    def options(given: Sequence[Any]) -> Sequence[Any]:
        return (given[0], None, False) if per == "token" else given[:3]

    def two(*given: Any) -> Any:
        q, kv, q_weight, kv_weight, q_epsilon, kv_epsilon, q_offset, kv_offset, *others = given
        second = (kv, kv_weight, kv_epsilon, kv_offset)
        return pick(core((q, q_weight, q_epsilon, q_offset), None, second, *options(others)))

    def added(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, offset: float, *others: Any) -> Any:
        return pick(core((x, weight, epsilon, offset), residual, None, *options(others)))

    def one(x: Tensor, weight: Tensor, epsilon: float, offset: float, *others: Any) -> Any:
        return pick(core((x, weight, epsilon, offset), None, None, *options(others)))

    return two if found.binding.is_dual else added if adds else one
