"""vLLM's own switches in the environment, as far as they decide on fusions."""

from __future__ import annotations

import os

BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
INVARIANT = f"{BATCH_INVARIANT} is set: vLLM keeps to kernels whose results do not depend on the batch"

MLA_DISABLE = "VLLM_MLA_DISABLE"

SHARED_IN_TURN = "VLLM_DISABLE_SHARED_EXPERTS_STREAM"
"""With it shared experts run behind the routed ones, on the same stream; on CPUs vLLM sets it itself."""


_NUMBERS = BATCH_INVARIANT, MLA_DISABLE, SHARED_IN_TURN
"""Those that vLLM reads as a number: each but 0 sets them."""


def is_set(variable: str) -> bool:
    """Whether one of vLLM's switches is on in the environment."""
    said = os.environ.get(variable, "").strip().lower()
    return said in ("1", "true") or (variable in _NUMBERS and said.isdecimal() and int(said) != 0)
