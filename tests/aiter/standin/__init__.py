"""Stand-ins for AMD's AITER: its recorded signatures, release by release, with bodies in plain torch on the CPU.

A body follows what the real function does with its arguments, outputs and result, and fails with `StandInMisuse` where
the real one would silently misread an argument or reach outside a buffer. What the real one refuses, it refuses with
the same type of exception.

    make_standin(tmp_path, "v0.1.20", arch="gfx942", mutate=Mutation("rename", "aiter.ops.rmsnorm:rmsnorm_quant", name="norm"))
    with imported(tmp_path) as package:
        package.norm(out, x, scale, weight, epsilon)

`recorded` reads the signatures, `generate` and `texts` write the package, `behaviour` finds the bodies in its
neighbours.
"""

from __future__ import annotations

from .flavours import make_checkout, make_unrelated
from .generate import make_standin, shared_standin
from .importing import imported, on_path
from .misuse import StandInMisuse
from .mutation import Mutation
from .recorded import RELEASES, TOO_OLD, between, definitions

__all__ = [
    "RELEASES", "TOO_OLD", "Mutation", "StandInMisuse", "between", "definitions", "imported", "make_checkout", "make_standin",
    "make_unrelated", "on_path", "shared_standin",
]  # fmt: skip
