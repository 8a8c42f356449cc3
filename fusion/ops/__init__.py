"""The ops, registered with torch.library when this package is imported: `torch.ops.layerfuse.*`.

They are the canonical ops, those of MLA decode layers, and the ops of every fusion in the catalog, other packages' included, each as a function here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..catalog import FUSIONS
from ..latent_ops import MLA
from .canonical import CANONICAL
from .library import public

FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{op.name: public(op) for op in CANONICAL},
    **{op.name: public(op, kernels) for op, kernels in MLA.items()},
    **{form.op.name: public(form.op, fusion.backends) for fusion in FUSIONS.values() for form in fusion.forms},
}
"""Every op by name, as users call it."""

globals().update(FUNCTIONS)

__all__ = ["FUNCTIONS", *FUNCTIONS]  # noqa: PLE0604 (names of functions that are made from declarations)


def __getattr__(name: str) -> Callable[..., Any]:
    """For type checkers, which do not see the names above."""
    raise AttributeError(f"layerfuse.fusion.ops has no op {name!r}; it has: {', '.join(FUNCTIONS)}")
