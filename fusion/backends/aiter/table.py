"""Every function of AITER's that layerfuse calls, as a list of facts.

Read off the sources of v0.1.5 to v0.1.20.post1. In a parameter list `=` marks what may be left out.
"""

from __future__ import annotations

from .conventions import Binding
from .table_activations import ACTIVATION_BINDINGS
from .table_all_reduce import ALL_REDUCE_BINDINGS
from .table_attention import ATTENTION_BINDINGS
from .table_latents import LATENT_BINDINGS
from .table_norms import NORM_BINDINGS
from .table_quantised import QUANTISED_BINDINGS
from .table_queries import QUERY_BINDINGS

BINDINGS: tuple[Binding, ...] = (
    *NORM_BINDINGS,
    *QUANTISED_BINDINGS,
    *LATENT_BINDINGS,
    *QUERY_BINDINGS,
    *ACTIVATION_BINDINGS,
    *ATTENTION_BINDINGS,
    *ALL_REDUCE_BINDINGS,
)
"""All bindings, in the order in which the docs and the doctor list them."""

BY_NAME = {binding.name: binding for binding in BINDINGS}


def candidates(op: str) -> tuple[Binding, ...]:
    """The bindings that can serve an op, the preferred one first; none where AITER has nothing for it."""
    return tuple(binding for binding in BINDINGS if binding.op == op)
