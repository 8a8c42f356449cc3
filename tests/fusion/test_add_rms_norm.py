"""The residual add and its norm: the op against float64, and the chain in graphs, found and left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fusion_support import trace
from torch import nn

from layerfuse import registry
from layerfuse.adapters.specs import WHOLE, FinalNormSpec, NormSpec, ResidualSpec
from layerfuse.fusion import FusionConfig, Target, compile, ops, plan  # noqa: A004
from layerfuse.testing import small_model

ADD = "add_rms_norm"
pytestmark = pytest.mark.usefixtures("_op_by_op")


# ---- the op


def test_what_does_not_fit_is_named() -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="residual must have the leading dimensions of x"):
        ops.add_rms_norm(x, torch.zeros(3, 8), torch.ones(8), 1e-6)
    with pytest.raises(ValueError, match="residual must be as wide as x, 8 columns"):
        ops.add_rms_norm(x, torch.zeros(2, 4), torch.ones(8), 1e-6)
    with pytest.raises(ValueError, match=r"residual is torch\.float16, x is torch\.float32"):
        ops.add_rms_norm(x, x.half(), torch.ones(8), 1e-6)
    with pytest.raises(ValueError, match=r"weight must have shape \(8,\)"):
        ops.add_rms_norm(x, x, torch.ones(4), 1e-6)
    with pytest.raises(RuntimeError, match="for inference"):
        ops.add_rms_norm(x.clone().requires_grad_(), x, torch.ones(8), 1e-6)


# ---- real models


# The contract's C14 asks the same of every declared model in float32; what a graph break parts, test_what_ran looks at.
@pytest.mark.parametrize(
    "name",
    [
        "gpt-oss-20b",
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("deepseek-v3", "qwen3-next-80b-a3b")),
    ],
)
def test_real_models_in_bfloat16(name: str) -> None:
    model = small_model(registry.model(name), layers=2, hidden_size=64, heads=2, dtype=torch.bfloat16)
    for layer in model.model.layers:
        for part in layer.children():
            if "linear_attn" in dict(layer.named_children()) and part is layer.linear_attn:
                part.forward = torch.compiler.disable(part.forward)
    fused = compile(model, config=FusionConfig(switches={"mla_dual_rms_norm": False}))
    ids = torch.arange(6)[None]
    with torch.no_grad():
        got, wanted = fused(input_ids=ids, use_cache=False).logits, model(input_ids=ids, use_cache=False).logits
    scale = wanted.float().abs().max()
    assert (got.float() - wanted.float()).abs().max() <= 3e-2 * scale
    verdict = fused.report.of(ADD)
    # Both sites of each layer but the first input, and the final norm.
    assert len(verdict.expected) == 4
    # Around a delta net that is not compiled, the add is in one graph and the norm in another, which siblings share.
    breaks = sum("in another graph" in why for why in verdict.missed.values())
    assert len(verdict.matched) + breaks == 4, str(fused.report)
    assert breaks == 0 or "linear_attn" in str(model)
    assert verdict.last_call == len(verdict.matched) >= verdict.compiled


# ---- what is found and what is left alone


class Block(nn.Module):
    """A decoder layer without its attention."""

    def __init__(self, norm: Any = None) -> None:
        super().__init__()
        self.attention = nn.Linear(64, 64, bias=False)
        self.norm = norm or nn.RMSNorm(64, eps=1e-6)

    def forward(self, residual: torch.Tensor) -> Any:
        residual = residual + self.attention(residual)
        return self.norm(residual), residual


class ZeroCentred(nn.Module):
    """As Gemma and Qwen3-Next write it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * (1.0 + self.weight.float())).type_as(x)


def spec(offset: float = 0.0, **changes: Any) -> ResidualSpec:
    norm = NormSpec(width=64, epsilon=1e-6, weight_offset=offset, module="norm")
    fields = {"hidden_size": 64, "layer_index": 1, "parallel": WHOLE, "input_norms": (norm,)}
    other = NormSpec(width=64, epsilon=1e-6, module="other")
    return ResidualSpec(**{**fields, "post_attention_norms": (other,), **changes})


def fused_reason(module: nn.Module, given: ResidualSpec | None = None, x: torch.Tensor | None = None) -> str | None:
    """None where the chain was fused and answers as before, else the reason."""
    x = torch.randn(5, 64) if x is None else x
    fused = compile(module, specs=[("", given or spec())])
    with torch.no_grad():
        for got, wanted in zip(fused(x), module(x), strict=True):
            torch.testing.assert_close(got, wanted, rtol=2e-2 if x.dtype != torch.float32 else 1e-5, atol=1e-2)
    verdict = fused.report.of(ADD)
    assert (verdict.last_call == 1) == ("input" in verdict.matched)
    return verdict.missed.get("input")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("norm", "offset"), [(None, 0.0), (ZeroCentred, 1.0)])
def test_found(norm: Any, offset: float, dtype: torch.dtype) -> None:
    module = Block(norm() if norm else None).to(dtype)
    assert fused_reason(module, spec(offset), torch.randn(5, 64, dtype=dtype)) is None


def test_a_zero_centred_norm_is_not_an_ordinary_one() -> None:
    assert "adds 1 to its weight; the spec says 0" in str(fused_reason(Block(ZeroCentred())))


def turned(x: torch.Tensor) -> torch.Tensor:
    """The same values, column by column in memory."""
    return x.T.contiguous().T


def altered(forward: Any) -> nn.Module:
    return type("Altered", (Block,), {"forward": forward})()


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda self, x: (self.norm(x), x), "its residual add is in another graph"),
        (lambda self, x: (self.norm(x * 2), x), "is no sum of two tensors"),
        (lambda self, x: (self.norm(x + 1), x), "is no plain sum of two tensors"),
        (lambda self, x: (self.norm(torch.add(x, self.attention(x), alpha=2)), x), "is no plain sum of two tensors"),
        (lambda self, x: (self.norm(x + self.attention(x)[:1]), x), "which are not alike"),
        (lambda self, x: (self.norm(turned(x) + turned(self.attention(x))), x), "not contiguous"),
    ],
)
def test_left_alone(forward: Any, reason: str) -> None:
    assert reason in str(fused_reason(altered(forward)))


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (0, 2, 64)])
def test_no_tokens_at_all_are_fused_as_some_are(shape: tuple[int, ...]) -> None:
    assert fused_reason(Block(), x=torch.randn(shape)) is None


def test_the_sum_is_read_by_others_too() -> None:
    def forward(self: Block, x: torch.Tensor) -> Any:
        total = x + self.attention(x)
        return self.norm(total), total.exp(), total

    assert fused_reason(altered(forward)) is None


def test_the_first_layer_has_nothing_to_add_and_the_final_norm_has() -> None:
    made = plan([("layers.0", spec(layer_index=0))], Target.named("cpu"))
    assert [d.kind for d in made.at("layers.0:input") if d.fusion == ADD] == ["not_applicable"]
    assert [d.kind for d in made.at("layers.0:post_attention") if d.fusion == ADD] == ["expected"]
    final = FinalNormSpec(
        hidden_size=64, layer_index=2, parallel=WHOLE, final_norm=NormSpec(width=64, epsilon=1e-6, module="norm")
    )
    assert plan([("model", final)], Target.named("cpu")).expected(ADD)[0].site == "model:final"


class Inline(nn.Module):
    """A layer that calculates its norm itself, which the model holds under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.block = altered(lambda self, x: (self.rms(x + self.attention(x)), x))
        self.block.rms = lambda x: nn.functional.rms_norm(x, (64,), self.block.norm.weight, 1e-6)
        self.again = self.block

    def forward(self, x: torch.Tensor) -> Any:
        return self.block(x)


@pytest.mark.parametrize("path", ["block", "again"])
def test_a_norm_inside_of_its_layer_is_the_sites_by_every_name_of_the_layer(path: str) -> None:
    traced = trace(Inline(), torch.randn(2, 64), specs=[(path, spec())], by_weight=False, by_path=True)
    assert traced.report.of(ADD).matched == (f"{path}:input",), str(traced.report)


class Draft(nn.Module):
    """As engines write a block of multi-token prediction: two norms of its own, and a decoder layer that is given no residual."""

    def __init__(self) -> None:
        super().__init__()
        self.enorm, self.hnorm, self.head_norm = (nn.RMSNorm(64, eps=1e-6) for _ in range(3))
        self.project = nn.Linear(128, 64, bias=False)
        self.block = Block()
        self.block.input = nn.RMSNorm(64, eps=1e-6)

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor) -> Any:
        stream = self.project(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))
        normed, stream = self.block(stream + self.block.input(stream))
        return self.head_norm(stream + normed)


@pytest.mark.parametrize("by_weight", [True, False], ids=["by weight", "by path"])
def test_a_draft_models_block_starts_a_stream_and_norms_around_it_are_no_use_of_its_sites(by_weight: bool) -> None:
    torch.manual_seed(0)
    norms = [NormSpec(width=64, epsilon=1e-6, module=module) for module in ("input", "norm")]
    block = spec(
        layer_index=61, starts_stream=True, input_norms=tuple(norms[:1]), post_attention_norms=tuple(norms[1:])
    )
    model, given = Draft(), torch.randn(2, 5, 64)
    traced = trace(model, *given, specs=[("block", block)], by_weight=by_weight, by_path=True)
    verdict = traced.report.of(ADD)
    assert verdict.expected == verdict.matched == ("block:post_attention",)
    (record,) = traced.report.records
    assert [(use.site, use.fused, dict(use.missed)) for use in record.uses] == [
        ("block:input", None, {}),
        ("block:post_attention", ADD, {}),
    ]
    assert record.unattributed == ()
    torch.testing.assert_close(traced.output, model(*given), rtol=1e-5, atol=1e-5)
