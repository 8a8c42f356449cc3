"""fp8 linears of transformers' and torchao's on a GPU: few tokens by layerfuse's kernels in graphs of Inductor's, and the results of the model without them.

transformers' own kernels come from the hub, which a GPU without a network has not: plain torch of the same arithmetic stands in.
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
from layerfuse.fusion.ops.linear import dequantised
from layerfuse.fusion.ops.quantisation import quantise
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


def check(model: Any, fusion_name: str, config: FusionConfig, least: int) -> Any:
    """Compile it, give that, and hold its results to the model's own with few tokens and with many; every linear that specs list is fused and runs.

    Inductor rounds less in between, and an fp8 value beside a halfway point moves by a sixteenth: compiled without a fusion such a model is 0.06
    from itself.
    """
    wanted = {tokens: call(model, tokens) for tokens in TOKENS}
    torch._dynamo.reset()
    compiled = torch.compile(model, dynamic=True)
    by_itself = {tokens: _apart(call(compiled, tokens), wanted[tokens]) for tokens in TOKENS}
    torch._dynamo.reset()
    fused = fusion.compile(model, engine=engine_of(model), config=config, dynamic=True)
    for tokens in TOKENS:
        assert _apart(call(fused, tokens), wanted[tokens]) <= max(0.02, 1.25 * by_itself[tokens]), tokens
    verdict = fused.report.of(fusion_name)
    assert len(verdict.expected) >= least and verdict.expected == verdict.matched, str(fused.report)
    audit = fused.audit(input_ids=torch.arange(FEW, device=DEVICE)[None], use_cache=False)
    assert audit.ok and audit.fusions[fusion_name].profiled == len(verdict.matched), str(audit)
    return fused


def _apart(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """A kernel in the place of the hub's: tokens -> calls."""
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    own, calls = finegrained.fp8_linear, Counter[int]()

    def matmul(x: Any, weight: Any, scales: Any, block: Any, dtype: Any, activation_scale: Any = None) -> torch.Tensor:
        calls[x.shape[:-1].numel()] += 1
        values, of_rows = quantise(x.reshape(-1, x.shape[-1]).float(), torch.float8_e4m3fn, 128, False, False)
        product = dequantised(values, of_rows, 1) @ dequantised(weight, scales, 128).t()
        return product.to(dtype).view(*x.shape[:-1], len(weight))

    kernels = SimpleNamespace(matmul=matmul)  # made here, as Dynamo makes none
    monkeypatch.setattr(finegrained, "load_finegrained_fp8_kernel", lambda: kernels)
    monkeypatch.setattr(finegrained, "fp8_linear", own)  # put back afterwards
    return calls


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
    fused = check(model, BLOCKS, FusionConfig.parse(BLOCKS, strict=True), replaced - absorbed)
    hub.clear()
    for tokens in (FEW, 40):
        call(fused, tokens)
    assert (hub[FEW], hub[40]) == (absorbed, replaced), "more tokens are transformers' function"


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
