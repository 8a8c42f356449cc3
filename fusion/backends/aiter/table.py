"""Every function of AITER's that layerfuse calls, as a list of facts.

Read off the sources of v0.1.5 to v0.1.20.post1. In a parameter list `=` marks what may be left out.
"""

from __future__ import annotations

from .conventions import Binding
from .table_all_reduce import ALL_REDUCE_BINDINGS
from .table_attention import ATTENTION_BINDINGS
from .table_norms import NORM_BINDINGS
from .table_triton import TRITON_BINDINGS

BINDINGS: tuple[Binding, ...] = (*NORM_BINDINGS, *TRITON_BINDINGS, *ATTENTION_BINDINGS, *ALL_REDUCE_BINDINGS)
"""All bindings, in the order in which the docs and the doctor list them."""

BY_NAME = {binding.name: binding for binding in BINDINGS}
