"""What a bound call costs above the same call made directly, on stand-ins for AITER whose functions do nothing.

    python benchmarks/aiter_bindings.py

Nothing of AITER runs: what is measured is the Python between layerfuse's convention and AITER's. Each number is the
least of several repeats, in microseconds per call, beside a bare launch of the cheapest torch kernel of this machine.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from environment import save
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "aiter"))

from check_tools import installed
from standin import make_standin

from layerfuse.fusion.backends import aiter as amd
from layerfuse.fusion.backends.aiter import binding

RELEASE = "v0.1.20"
EPSILON = 1e-6
FP8 = torch.float8_e4m3fn
ROWS, Q, KV = 4, 1536, 512


def least(call: Callable[[], object], number: int = 20_000, repeats: int = 9) -> float:
    """Microseconds per call, the least of some repeats."""
    return min(timeit.repeat(call, number=number, repeat=repeats)) / number * 1e6


def nothing(*_: object, **__: object) -> None:
    """AITER's function, without what it does."""


def identity(q_out: Tensor, k_out: Tensor, **_: object) -> tuple[Tensor, Tensor]:
    """Its dual norm, without what it does."""
    return q_out, k_out


def bound_with(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Our callable over a function that costs nothing, in the module where the binding looks for AITER's."""
    module, _, attribute = amd.bound(name).path.partition(":")
    setattr(importlib.import_module(module), attribute, function)
    binding._bind.cache_clear()
    return amd.bound(name).call


def measures() -> dict[str, dict[str, float]]:
    """For each call: ours, the same work written by hand with AITER's own convention, and the difference."""
    whole = torch.randn(ROWS, Q + KV + 64).bfloat16()
    q, kv = whole[:, :Q], whole[:, Q : Q + KV]
    q_weight, kv_weight = torch.ones(Q).bfloat16(), torch.ones(KV).bfloat16()
    x, residual, weight = (
        torch.randn(ROWS, 7168).bfloat16(),
        torch.randn(ROWS, 7168).bfloat16(),
        torch.ones(7168).bfloat16(),
    )

    dual = bound_with("mla_dual_rms_norm", identity)
    group = bound_with("mla_dual_rms_norm_group_quant", nothing)
    add = bound_with("add_rms_norm", nothing)

    def dual_by_hand() -> object:
        return identity(
            q_out=torch.empty((ROWS, Q), dtype=q.dtype), q=q, q_weight=q_weight, q_eps=EPSILON,
            k_out=torch.empty((ROWS, KV), dtype=q.dtype), k=kv, k_weight=kv_weight, k_eps=EPSILON,
        )  # fmt: skip

    def group_by_hand() -> object:
        out, kv_out = torch.empty((ROWS, Q), dtype=FP8), torch.empty((ROWS, KV), dtype=q.dtype)
        scale = torch.empty((ROWS, Q // 128), dtype=torch.float32)
        nothing(
            q_out_quantized=out, q_out_scale=scale, q=q, q_weight=q_weight, q_epsilon=EPSILON, k_out=kv_out, k=kv,
            k_weight=kv_weight, k_epsilon=EPSILON, group_size=128, transpose_scale=False,
        )  # fmt: skip
        return out, scale, kv_out

    def add_by_hand() -> object:
        out, residual_out = torch.empty((ROWS, 7168), dtype=x.dtype), torch.empty((ROWS, 7168), dtype=x.dtype)
        nothing(out=out, input=x, residual_in=residual, residual_out=residual_out, weight=weight, epsilon=EPSILON)
        return out, residual_out

    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "mla_dual_rms_norm": (lambda: dual(q, kv, q_weight, kv_weight, EPSILON, EPSILON, 0.0, 0.0), dual_by_hand),
        "mla_dual_rms_norm_group_quant": (
            lambda: group(q, kv, q_weight, kv_weight, EPSILON, EPSILON, 0.0, 0.0, FP8, 128, False, False, False),
            group_by_hand,
        ),
        "add_rms_norm": (lambda: add(x, residual, weight, EPSILON, 0.0), add_by_hand),
    }
    found = {}
    for name, (ours, by_hand) in pairs.items():
        bound, direct = least(ours), least(by_hand)
        found[name] = {"bound_us": bound, "by_hand_us": direct, "above_us": bound - direct}
    return found


def once() -> dict[str, float]:
    """Milliseconds of what is done once in a process: looking, telling the release, probing every binding."""

    def look() -> None:
        amd.forget()
        amd.find_build()

    def probe() -> None:
        amd.forget()
        amd.probe_all()

    return {"find_build_ms": least(look, 5, 5) / 1000, "probe_every_binding_ms": least(probe, 3, 5) / 1000}


def main() -> None:
    """Take every measurement and write it down."""
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory() as folder,
        installed(make_standin(Path(folder) / "a", RELEASE)),
        torch.inference_mode(),
    ):
        calls = measures()
        one = torch.ones(1)
        launch = {"torch_add_of_one_number_us": least(lambda: one.add(1))}
        results: dict[str, Any] = {"stand_in": RELEASE, "calls": calls, "torch": launch, "once": once()}
    table = Table("measure", "value")
    for name, values in (*calls.items(), ("torch", launch), ("once", results["once"])):
        for key, value in values.items():
            table.add_row(f"{name}.{key}", f"{value:.2f}")
    Console().print(table)
    Console().print(f"written to {save('aiter_bindings', results)}")


if __name__ == "__main__":
    main()
