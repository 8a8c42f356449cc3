"""The switches of engines in the environment that change what layerfuse plans or does there: what each does as it is set."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Literal, NamedTuple

from ..adapters.errors import shown
from .sglang import switches as sglang
from .vllm.switches import (
    BATCH_INVARIANT,
    BLOCK_LINEARS,
    BLOCKS_INSIDE,
    DEEP_GEMM,
    INVARIANT,
    MLA_DISABLE,
    SHARED_IN_TURN,
)


class Switch(NamedTuple):
    """One of an engine's switches."""

    does: str
    "What it does where it is not as by default."
    default: bool = False
    reads: Literal["number", "word", "name"] = "number"
    "What the engine reads: a number, and it stops at anything else; a word, and what is neither yes nor no is the default; a name, and each is on."


_BLOCKS = "multiplies linears in fp8 blocks on Hopper: figures are of these"
SWITCHES = {
    BATCH_INVARIANT: Switch(f"no fusion stands in vLLM: {INVARIANT.partition(': ')[2]}"),
    DEEP_GEMM: Switch(f"{BLOCK_LINEARS[DEEP_GEMM]} {_BLOCKS}", default=True),
    BLOCKS_INSIDE: Switch(f"{BLOCK_LINEARS[BLOCKS_INSIDE]} {_BLOCKS}", default=True),
    "VLLM_USE_DEEP_GEMM_E8M0": Switch("scales in front of DeepGEMM are no powers of two", default=True),
    MLA_DISABLE: Switch("vLLM runs MLA layers without MLA"),
    SHARED_IN_TURN: Switch("vLLM runs shared experts behind the routed ones, on the same stream"),
    "VLLM_USE_BREAKABLE_CUDAGRAPH": Switch(
        "vLLM captures its CUDA graphs in pieces, and mla_decode stands in none", reads="word"
    ),
    "VLLM_ROCM_USE_AITER": Switch("vLLM takes AITER's kernels on AMD's GPUs, some of which fuse", reads="word"),
    "SGLANG_USE_AITER": Switch("SGLang takes AITER's kernels on AMD's GPUs", reads="word"),
    sglang.QUANT_ONCE: Switch("few_token_linear_group_quant stands nowhere in SGLang", reads="word"),
    sglang.JIT_DEEPGEMM: Switch(f"Triton {_BLOCKS.replace('these', 'DeepGEMM')}", default=True, reads="word"),
    sglang.MARLIN: Switch(
        "SGLang's linears in fp8 take activations as they are, and nothing that quantises stands there", reads="word"
    ),
    sglang.OP_BACKEND: Switch(f"no fusion stands in SGLang: {sglang.CHOOSES}", reads="name"),
}
"""By their names."""


def switched() -> Iterator[tuple[str, Literal["found", "broken"], str]]:
    """Each that is set: its name, its state, and what it does, or that its engine cannot read it."""
    for name, switch in SWITCHES.items():
        said = os.environ.get(name, "").strip()
        if not said:
            continue
        on = switch.reads == "name" or (
            said.lower() in sglang.YES if said.lower() in (*sglang.YES, *sglang.NO) else switch.default
        )
        if switch.reads == "number":
            try:
                on = int(said) != 0
            except ValueError:
                yield name, "broken", f"{shown(said)} is no number, which vLLM expects there and stops at: 0 or 1"
                continue
        yield name, "found", f"{said}, {'as by default' if on == switch.default else switch.does}"
