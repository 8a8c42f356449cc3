"""fp8 linears of transformers' and torchao's on a GPU: few tokens by layerfuse's kernels in graphs of Inductor's, and the results of the model without them.

transformers' own kernels come from the hub, which a GPU without a network has not: vLLM's Triton kernel of the same arithmetic stands in, or plain torch.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from layerfuse import fusion, registry
from layerfuse.engines.transformers import engine_of
from layerfuse.fusion import FusionConfig
from layerfuse.fusion.catalog.few_token_linear import BLOCKS, PLAIN, ROWS
from layerfuse.testing import small_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE = "cuda"
TOKENS = (1, 8, 16, 17, 40)
FEW = 16


def named(name: str) -> Any:
    """A declared model of two layers, with linears of which none is small."""
    model = small_model(registry.model(name), layers=2, hidden_size=1024, heads=4, dtype=torch.bfloat16)
    return model.to(DEVICE).eval().requires_grad_(False)


def call(model: Any, tokens: int) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(tokens, device=DEVICE)[None], use_cache=False).logits.float()


def check(model: Any, fusion_name: str, config: FusionConfig, least: int) -> None:
    """Compile it, and hold its results to its own with few tokens and with many; every linear that specs list is fused and runs."""
    wanted = {tokens: call(model, tokens) for tokens in TOKENS}
    fused = fusion.compile(model, engine=engine_of(model), config=config, dynamic=True)
    for tokens in TOKENS:
        apart = call(fused, tokens) - wanted[tokens]
        assert apart.norm() <= 2e-2 * wanted[tokens].norm(), (tokens, float(apart.norm() / wanted[tokens].norm()))
    verdict = fused.report.of(fusion_name)
    assert len(verdict.expected) >= least and verdict.expected == verdict.matched, str(fused.report)
    audit = fused.audit(input_ids=torch.arange(FEW, device=DEVICE)[None], use_cache=False)
    assert audit.ok and audit.fusions[fusion_name].profiled == len(verdict.matched), str(audit)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """A kernel in the place of the hub's: tokens -> calls."""
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    own, calls = finegrained.fp8_linear, Counter[int]()

    def matmul(x: Any, weight: Any, scales: Any, block: Any, dtype: Any, activation_scale: Any = None) -> torch.Tensor:
        calls[x.shape[:-1].numel()] += 1
        rows = x.reshape(-1, x.shape[-1])
        return _product(rows, weight, scales, dtype).view(*x.shape[:-1], len(weight))

    monkeypatch.setattr(finegrained, "load_finegrained_fp8_kernel", lambda: SimpleNamespace(matmul=matmul))
    monkeypatch.setattr(finegrained, "fp8_linear", own)  # put back afterwards
    return calls


def _product(rows: Any, weight: Any, scales: Any, dtype: Any) -> torch.Tensor:
    try:
        from vllm.model_executor.layers.quantization.utils import fp8_utils
    except ImportError:
        from layerfuse.fusion.ops.linear import dequantised
        from layerfuse.fusion.ops.quantisation import quantise

        values, of_rows = quantise(rows.float(), torch.float8_e4m3fn, 128, False, False)
        return (dequantised(values, of_rows, 1) @ dequantised(weight, scales, 128).t()).to(dtype)
    values, of_rows = fp8_utils.per_token_group_quant_fp8(rows, 128, use_ue8m0=False)
    return fp8_utils.w8a8_triton_block_scaled_mm(values, weight, of_rows, scales, [128, 128], dtype)


@pytest.mark.parametrize("name", ["qwen3-8b", "deepseek-v3"])
def test_transformers_fp8_linears(name: str, hub: Counter[int]) -> None:
    import transformers
    from transformers.integrations import finegrained_fp8 as finegrained

    model = named(name)
    plain = {path: each.weight.detach() for path, each in model.named_modules() if isinstance(each, nn.Linear)}
    kept = ["lm_head", "experts"]
    finegrained.replace_with_fp8_linear(model, kept, transformers.FineGrainedFP8Config(), True)
    replaced = 0
    for path, linear in model.named_modules():
        if isinstance(linear, finegrained.FP8Linear):
            linear.weight, linear.weight_scale_inv = (
                nn.Parameter(each, requires_grad=False) for each in quantised(plain[path])
            )
            replaced += 1
    model.to(DEVICE).requires_grad_(False)
    # MLA's second projections of the key/value latent are no sites.
    absorbed = sum(path.endswith("kv_b_proj") for path in plain)
    check(model, BLOCKS, FusionConfig.parse(BLOCKS, strict=True), replaced - absorbed)
    assert hub[FEW] <= 2 * replaced and hub[40] >= 2 * replaced, "more tokens are transformers' function"


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight (columns, depth) in e4m3 with scales per 128 x 128."""
    columns, depth = weight.shape
    wide = nn.functional.pad(weight.float(), (0, -depth % 128, 0, -columns % 128))
    blocks = wide.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-10) / 448
    values = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1)[:columns, :depth]
    return values.to(torch.float8_e4m3fn).contiguous(), scales


def test_torchaos_linears_per_row() -> None:
    pytest.importorskip("torchao")
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

    model = named("qwen3-8b")

    def wanted(module: nn.Module, path: str) -> bool:
        return isinstance(module, nn.Linear) and path != "lm_head"

    several = sum(wanted(each, path) for path, each in model.named_modules())
    quantize_(model, Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()), wanted)
    check(model, ROWS, FusionConfig(level=2, switches={ROWS: True}, strict=True), several)


def test_linears_of_16_bits() -> None:
    model = named("qwen3-8b")
    several = sum(isinstance(each, nn.Linear) for path, each in model.named_modules() if path != "lm_head")
    check(model, PLAIN, FusionConfig.parse(PLAIN, strict=True), several)
