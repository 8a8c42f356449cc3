"""The graphs before and after, as text, held to golden files.

Names of values are numbered, so that the text does not change with torch's naming. To write the files anew after an
intended change: `LAYERFUSE_REGENERATE=1 pytest tests/fusion/test_golden.py`, then read the difference.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from fusion_support import HIDDEN, FusedProjection, Traced, TwoProjections, mla_spec, torch_norm, trace
from gated_support import GatedMLP, GatedNorm, Heads, RoundedBefore, clamped, delta_net, mlp
from quant_support import CPU_FP8, QuantisedTwo, config, sglang_group, trace_quantised, vllm_per_token
from torch.torch_version import TorchVersion

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize(
    ("name", "module", "dtype"),
    [
        ("one_projection_bf16", lambda: FusedProjection(), torch.bfloat16),
        ("two_projections_bf16", lambda: TwoProjections(), torch.bfloat16),
        ("torch_norms_fp32", lambda: FusedProjection(torch_norm), torch.float32),
        ("look_alike_epsilon", lambda: FusedProjection(epsilon=1.1e-6), torch.bfloat16),
    ],
)
def test_golden(name: str, module: Any, dtype: torch.dtype) -> None:
    traced = trace(module().to(dtype), torch.randn(5, HIDDEN, dtype=dtype), specs=[mla_spec()])
    assert traced.fused == (0 if name.startswith("look_alike") else 1)
    assert_golden(name, traced)


@pytest.mark.parametrize(
    ("name", "quantise", "quant"),
    [
        ("per_token_quant_bf16", vllm_per_token, "per_token"),
        ("group_quant_bf16", sglang_group, "group128"),
        ("look_alike_group_size", sglang_group, "group64"),
    ],
)
def test_golden_quantised(name: str, quantise: Any, quant: str) -> None:
    x = torch.randn(5, HIDDEN, dtype=torch.bfloat16)
    traced = trace_quantised(QuantisedTwo(quantise).bfloat16(), x, quant)
    assert ("_quant(" in traced.after[0]) == (not name.startswith("look_alike"))
    assert_golden(name, traced)


@pytest.mark.parametrize(
    ("name", "make", "activation"),
    [
        ("gated_norm_flat_bf16", lambda: Heads(RoundedBefore(), "flat"), "silu"),
        ("gated_norm_sigmoid_bf16", lambda: Heads(GatedNorm(torch.sigmoid)), "sigmoid"),
        ("look_alike_gate", lambda: Heads(GatedNorm(torch.tanh)), "silu"),
    ],
)
def test_golden_gated(name: str, make: Any, activation: str) -> None:
    x = torch.randn(2, 3, HIDDEN, dtype=torch.bfloat16)
    traced = trace(make().bfloat16(), x, specs=[("", delta_net(activation))])
    assert traced.after[0].count("layerfuse.gated_rms_norm(") == (not name.startswith("look_alike"))
    assert_golden(name, traced)


@pytest.mark.parametrize(
    ("name", "product", "limit"),
    [("silu_mul_group_quant_bf16", clamped, 0.5), ("look_alike_clamp", clamped, 7.0)],
)
def test_golden_product(name: str, product: Any, limit: float) -> None:
    x = torch.randn(5, HIDDEN, dtype=torch.bfloat16)
    with torch.no_grad():
        traced = trace(
            GatedMLP(sglang_group, product).bfloat16(),
            x,
            specs=[("", mlp(limit))],
            config=config("group128"),
            target=CPU_FP8,
        )
    assert traced.after[0].count("layerfuse.silu_mul_group_quant(") == (not name.startswith("look_alike"))
    assert_golden(name, traced)


def assert_golden(name: str, traced: Traced) -> None:
    text = f"# before\n{traced.before[0]}\n\n# after\n{traced.after[0]}\n"
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("LAYERFUSE_REGENERATE"):
        path.write_text(text)
    if TorchVersion(torch.__version__) < (2, 13):
        pytest.skip("the files hold the graphs of torch 2.13; older ones round differently between operations")
    assert text == path.read_text()
