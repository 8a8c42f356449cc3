"""SGLang's own switches in the environment and on its command line, as far as they decide on fusions."""

from __future__ import annotations

import os

JIT_DEEPGEMM = "SGLANG_ENABLE_JIT_DEEPGEMM"
"""On by default: DeepGEMM multiplies by weights in fp8 blocks from Hopper on, where it is installed; else Triton."""

MARLIN = "SGLANG_FORCE_FP8_MARLIN"
BY_MARLIN = f"{MARLIN} is set: SGLang multiplies by weights in fp8 with Marlin, which takes activations as they are"

QUANT_ONCE = "SGLANG_OPT_MOE_QUANT_ONCE"
ASKS = f"{QUANT_ONCE} is set, and asks which function multiplies"

OP_BACKEND = "SGLANG_FORCE_FUSED_OP_BACKEND"
CHOOSES = f"{OP_BACKEND} chooses the kernels of SGLang's ops"

YES, NO = ("1", "true", "yes", "y"), ("0", "false", "no", "n")
"""As SGLang reads a switch (sglang/srt/environ.py, `EnvBool`); at another word it is as by default."""

BLOCK_LINEARS = {"deep_gemm": "DeepGEMM", "flashinfer_deepgemm": "FlashInfer", "triton": "Triton"}
"""`--fp8-gemm-backend` -> whose kernel multiplies by weights in fp8 blocks on Hopper, as measurements name it."""


def is_set(variable: str) -> bool:
    """Whether a switch that is off by default is on in the environment."""
    return os.environ.get(variable, "").lower() in YES


def is_off(variable: str) -> bool:
    """Whether a switch that is on by default is off in the environment."""
    return os.environ.get(variable, "").lower() in NO


def block_linears(arch: str, backend: str = "auto") -> str | None:
    """Whose kernel multiplies by weights in fp8 blocks; None: what is installed decides.

    Args:
        arch: as `Target.arch`.
        backend: `--fp8-gemm-backend`.
    """
    if arch != "sm90":
        return None
    return BLOCK_LINEARS["triton"] if backend == "auto" and is_off(JIT_DEEPGEMM) else BLOCK_LINEARS.get(backend)
