"""The ops, registered with torch.library when this package is imported: `torch.ops.layerfuse.*`.

They are the canonical ops, those of MLA decode layers, those of linears with few tokens, and the ops of every fusion in the catalog, other packages' included, each as a function here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...adapters.errors import said
from ..catalog import FUSIONS
from ..chain import LAYERFUSE, Fusion
from ..latent_ops import MLA
from ..linear_ops import LINEARS
from .canonical import CANONICAL
from .library import public


def _of(fusion: Fusion) -> dict[str, Callable[..., Any]]:
    """The ops of a fusion. Another package's that torch does not take are refused with the fusion, and not with all others."""
    try:
        # Those of linears and MLA layers are there without a fusion too.
        return {form.op.name: public(form.op, fusion.backends) for form in fusion.forms if form.op not in MLA | LINEARS}
    except Exception as error:  # torch says in many ways that it does not take an op
        if fusion.owner == LAYERFUSE:
            raise
        FUSIONS.refuse(fusion, f"its ops cannot be registered: {said(error)}")
        return {}


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{op.name: public(op) for op in CANONICAL},
    **{op.name: public(op, kernels) for op, kernels in (MLA | LINEARS).items()},
}
"""Every op by name, as users call it."""
for _fusion in tuple(FUSIONS.values()):
    FUNCTIONS |= _of(_fusion)

globals().update(FUNCTIONS)

__all__ = ["FUNCTIONS", *FUNCTIONS]  # noqa: PLE0604 (names of functions that are made from declarations)


def __getattr__(name: str) -> Callable[..., Any]:
    """For type checkers, which do not see the names above."""
    raise AttributeError(f"layerfuse.fusion.ops has no op {name!r}; it has: {', '.join(FUNCTIONS)}")
