"""What plans know of transformers' fp8 linears before a model is loaded. Nothing here needs torch."""

from __future__ import annotations

from ..fusion.catalog import FUSIONS

KEPT = "transformers' fp8 linears come to their kernels by a function that quantises what it is given"


def keeps() -> dict[str, str]:
    """Each fusion that quantises -> why it has no place in front of such linears, as `Engine.keeps`."""
    return {name: KEPT for name, fusion in FUSIONS.items() if fusion.format is not None}
