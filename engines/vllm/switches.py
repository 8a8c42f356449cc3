"""vLLM's own switches in the environment, as far as they decide on fusions."""

from __future__ import annotations

import os

BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
INVARIANT = f"{BATCH_INVARIANT} is set: vLLM keeps to kernels whose results do not depend on the batch"

MLA_DISABLE = "VLLM_MLA_DISABLE"

SHARED_IN_TURN = "VLLM_DISABLE_SHARED_EXPERTS_STREAM"
"""With it shared experts run behind the routed ones, on the same stream; on CPUs vLLM sets it itself."""

BLOCKS_INSIDE = "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER"
"""On by default: for linears in fp8 blocks FlashInfer's op, which quantises inside of itself, where DeepGEMM multiplies more tokens."""

DEEP_GEMM = "VLLM_USE_DEEP_GEMM"
"""On by default."""

_NUMBERS = BATCH_INVARIANT, MLA_DISABLE, SHARED_IN_TURN
"""Those that vLLM reads as a number: each but 0 sets them."""


def is_set(variable: str) -> bool:
    """Whether one of vLLM's switches is on in the environment."""
    said = os.environ.get(variable, "").strip().lower()
    return said in ("1", "true") or (variable in _NUMBERS and said.isdecimal() and int(said) != 0)


def is_off(variable: str) -> bool:
    """Whether one of vLLM's switches that are on by default, which it reads as a number, is off in the environment."""
    said = os.environ.get(variable, "").strip()
    return said.isdecimal() and int(said) == 0


BLOCK_LINEARS = {DEEP_GEMM: "CUTLASS", BLOCKS_INSIDE: "DeepGEMM"}
"""Whose kernel vLLM takes on Hopper for linears in fp8 blocks where the switch is off, as measurements name it; the first decides."""


def block_switch() -> str | None:
    """The one of `BLOCK_LINEARS` that decides in the environment; None: what is installed does."""
    return next(filter(is_off, BLOCK_LINEARS), None)
