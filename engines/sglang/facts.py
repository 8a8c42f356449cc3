"""What is known of SGLang without SGLang, as data for plans: what its own code fuses, and where a fused op can go in.

Read in SGLang 0.5.23. It compiles no model by default: its ops are chosen one by one, and run in CUDA graphs.
"""

from __future__ import annotations

from ...fusion.catalog import FUSIONS
from ...fusion.engine import Engine

RELEASE = "0.5.23"
"""Of which this is known."""

CHAINS = ("add_rms_norm", "rms_norm")
GATED = "gated_rms_norm"
SCHEMES = ("static", "per_token", "group")

SEAMS = frozenset(
    {"add_rms_norm", GATED, *(f"{chain}_{scheme}_quant" for chain in (*CHAINS, GATED) for scheme in SCHEMES)}
)
"""Fusions that can go in at module level (`seams.SEAMS`)."""

UNCOMPILED = "SGLang compiles no model"

DOES = {
    "add_rms_norm": "its own kernel for the add and the norm (fused_add_rmsnorm)",
    GATED: "its own kernel for the norm and the gate",
}
"""Fusion -> what does the same in one launch there, on GPUs."""


def engine_of() -> Engine:
    """What a plan needs to know of SGLang. Nothing was measured there: a fusion stands where it is asked for by name."""
    without = [name for name in FUSIONS if name not in SEAMS]
    return Engine(
        name="sglang",
        uncompiled=UNCOMPILED,
        refuses=dict.fromkeys(without, f"{UNCOMPILED}, and layerfuse knows no place for it in SGLang's code yet"),
        does={name: f"SGLang does it: {by}; naming the fusion takes it instead" for name, by in DOES.items()},
        inside="layerfuse knows no such linear in SGLang yet",
    )
