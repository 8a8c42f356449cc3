"""The graphs before and after, as text, held to golden files.

Names of values are numbered, so that the text does not change with torch's naming. To write the files anew after an
intended change: `LAYERFUSE_REGENERATE=1 pytest tests/fusion/test_golden.py`, then read the difference.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fusion_support import HIDDEN, FusedProjection, Traced, TwoProjections, mla_spec, torch_norm, trace
from gated_support import GatedMLP, GatedNorm, Heads, RoundedBefore, clamped, delta_net, mlp
from quant_support import CPU_FP8, QuantisedTwo, config, sglang_group, trace_quantised, vllm_per_token
from torch import nn
from torch.torch_version import TorchVersion

GOLDEN = Path(__file__).parent / "golden"


def latents(make: Any = FusedProjection, dtype: torch.dtype = torch.bfloat16) -> Traced:
    return trace(make().to(dtype), torch.randn(5, HIDDEN, dtype=dtype), specs=[mla_spec()])


def quantised(quantise: Any, quant: str) -> Traced:
    return trace_quantised(QuantisedTwo(quantise).bfloat16(), torch.randn(5, HIDDEN, dtype=torch.bfloat16), quant)


def gated(norm: nn.Module, activation: str = "silu", *layout: str) -> Traced:
    x = torch.randn(2, 3, HIDDEN, dtype=torch.bfloat16)
    return trace(Heads(norm, *layout).bfloat16(), x, specs=[("", delta_net(activation))])


def product(limit: float) -> Traced:
    model, x = GatedMLP(sglang_group, clamped).bfloat16(), torch.randn(5, HIDDEN, dtype=torch.bfloat16)
    with torch.no_grad():
        return trace(model, x, specs=[("", mlp(limit))], config=config("group128"), target=CPU_FP8)


GRAPHS: dict[str, tuple[str, Callable[[], Traced]]] = {
    "one_projection_bf16": ("mla_dual_rms_norm(", latents),
    "two_projections_bf16": ("mla_dual_rms_norm(", lambda: latents(TwoProjections)),
    "torch_norms_fp32": ("mla_dual_rms_norm(", lambda: latents(lambda: FusedProjection(torch_norm), torch.float32)),
    "look_alike_epsilon": ("mla_dual_rms_norm(", lambda: latents(lambda: FusedProjection(epsilon=1.1e-6))),
    "per_token_quant_bf16": ("_quant(", lambda: quantised(vllm_per_token, "per_token")),
    "group_quant_bf16": ("_quant(", lambda: quantised(sglang_group, "group128")),
    "look_alike_group_size": ("_quant(", lambda: quantised(sglang_group, "group64")),
    "gated_norm_flat_bf16": ("gated_rms_norm(", lambda: gated(RoundedBefore(), "silu", "flat")),
    "gated_norm_sigmoid_bf16": ("gated_rms_norm(", lambda: gated(GatedNorm(torch.sigmoid), "sigmoid")),
    "look_alike_gate": ("gated_rms_norm(", lambda: gated(GatedNorm(torch.tanh))),
    "silu_mul_group_quant_bf16": ("silu_mul_group_quant(", lambda: product(0.5)),
    "look_alike_clamp": ("silu_mul_group_quant(", lambda: product(7.0)),
}
"""Name of the file -> the end of the fused op's name, which look-alikes do not have, and the graph."""


@pytest.mark.parametrize("name", GRAPHS)
def test_golden(name: str) -> None:
    op, make = GRAPHS[name]
    traced = make()
    assert (op in traced.after[0]) == (not name.startswith("look_alike"))
    text = f"# before\n{traced.before[0]}\n\n# after\n{traced.after[0]}\n"
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("LAYERFUSE_REGENERATE"):
        path.write_text(text)
    if TorchVersion(torch.__version__) < (2, 13):
        pytest.skip("the files hold the graphs of torch 2.13; older ones round differently between operations")
    assert text == path.read_text()
