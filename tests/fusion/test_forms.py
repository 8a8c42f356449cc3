"""Every way in which engines write the two norms is found, fused exactly once, and computes the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fusion_support import (
    FUSION,
    HIDDEN,
    KV,
    NORMS,
    ROPE,
    TOLERANCE,
    CanonicalNorm,
    FusedProjection,
    Q,
    TwoProjections,
    mla_spec,
    torch_norm,
    trace,
    with_modules,
)  # fmt: skip
from helpers import in_turn
from torch import nn

DTYPES = list(TOLERANCE)


def assert_fused(module: nn.Module, x: torch.Tensor, spec: Any = None, count: int = 1, **kwargs: Any) -> None:
    with torch.no_grad():
        eager = module(x)
    specs = [spec or mla_spec()] if count == 1 else [mla_spec(i) for i in range(count)]
    traced = trace(module, x, specs=specs, **kwargs)
    assert traced.fused == count, str(traced.report)
    verdict = traced.report.of(FUSION)
    assert len(verdict.matched) == count
    assert verdict.matched == verdict.expected
    assert not verdict.missed
    assert (verdict.compiled, verdict.executed, verdict.last_call) == (count, count, count)
    assert not any("rsqrt" in text for text in traced.after), "the norms were fused and computed"
    for got, expected in zip(traced.output, eager, strict=True):
        torch.testing.assert_close(got, expected, **TOLERANCE[x.dtype])


@pytest.mark.parametrize("shape", [FusedProjection, TwoProjections])
@pytest.mark.parametrize(("norm", "dtype"), in_turn(NORMS, DTYPES), ids=str)
def test_form(shape: Any, norm: str, dtype: torch.dtype) -> None:
    assert_fused(shape(NORMS[norm]).to(dtype), torch.randn(7, HIDDEN, dtype=dtype))


@pytest.mark.parametrize("shape", [FusedProjection, TwoProjections])
@pytest.mark.parametrize("leading", [(2, 3), (2, 1, 3)])
def test_more_dimensions(shape: Any, leading: tuple[int, ...]) -> None:
    assert_fused(shape().bfloat16(), torch.randn(*leading, HIDDEN, dtype=torch.bfloat16))


@pytest.mark.parametrize("shape", [FusedProjection, TwoProjections])
def test_one_graph_serves_every_token_count(shape: Any) -> None:
    module = shape(torch_norm)
    x = torch.randn(7, HIDDEN)
    torch._dynamo.mark_dynamic(x, 0)
    assert_fused(module, x)
    # dynamic=True would trace the epsilon as an input; see test_compile for how fusion.compile deals with it.
    with torch._dynamo.config.patch(specialize_float=True):
        assert_fused(shape(), torch.randn(7, HIDDEN), dynamic=True)


@pytest.mark.parametrize("norm", NORMS)
def test_different_epsilons(norm: str) -> None:
    module = FusedProjection(NORMS[norm], epsilon=1e-6, kv_epsilon=1e-5)
    assert_fused(module, torch.randn(3, HIDDEN) * 1e-3, spec=mla_spec(epsilon=1e-6, kv_epsilon=1e-5))


class ThreeWaySplit(FusedProjection):
    def split(self, x: torch.Tensor) -> Any:
        return self.down(x).split([Q, KV, ROPE], dim=-1)


class Slices(FusedProjection):
    def split(self, x: torch.Tensor) -> Any:
        down = self.down(x)
        rest = down[..., Q:]
        return down[..., :Q], rest[..., :-ROPE], rest[..., KV:]


class Views(FusedProjection):
    """SGLang's habit: a batch dimension added and dropped on the way."""

    def split(self, x: torch.Tensor) -> Any:
        down = self.down(x).unsqueeze(0)
        q, rest = down.split([Q, KV + ROPE], dim=-1)
        rest = rest.reshape(-1, KV + ROPE)
        return q.squeeze(0), rest[:, :KV], rest[:, KV:]


class Chunked(FusedProjection):
    """split by one size: [512, 512, 512, 512, 64], the query not from the first chunk's parent but from the whole."""

    def split(self, x: torch.Tensor) -> Any:
        down = self.down(x)
        chunks = down.split(KV, dim=-1)
        return down[..., :Q], chunks[3], chunks[4]


class Gated(FusedProjection):
    """Kimi-K3 on ROCm: an output gate follows the rope columns."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(HIDDEN, Q + KV + ROPE + 96)

    def split(self, x: torch.Tensor) -> Any:
        q, kv, k_pe, gate = self.down(x).split([Q, KV, ROPE, 96], dim=-1)
        return q, kv, k_pe + gate[..., :ROPE].sigmoid()


@pytest.mark.parametrize("module", [ThreeWaySplit, Slices, Views, Chunked, Gated])
def test_ways_to_split(module: Any) -> None:
    assert_fused(module(), torch.randn(5, HIDDEN))


class KeysFirst(FusedProjection):
    def forward(self, x: torch.Tensor) -> Any:
        q, kv, k_pe = self.split(x)
        keys = self.kv_norm(kv)
        return self.up(self.q_norm(q)), keys, k_pe.exp()


def test_the_order_of_the_norms_does_not_matter() -> None:
    assert_fused(KeysFirst(), torch.randn(5, HIDDEN))


class Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FusedProjection() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> Any:
        return tuple(part for layer in self.layers for part in layer(x))


def test_layers_without_paths_are_told_apart_by_order() -> None:
    # The specs are bare ("layer 0", ...), so the module paths in the graph say nothing, and all layers read one input.
    assert_fused(Stack(3), torch.randn(5, HIDDEN), count=3)


def test_layers_with_paths_are_tied_by_path_or_weight() -> None:
    for by_weight, how in ((True, "parameter"), (False, "module path")):
        for named in (True, False):
            given = [with_modules(mla_spec(i)) if named else mla_spec(i) for i in range(2)]
            specs = [(f"layers.{i}", spec) for i, spec in enumerate(given)]
            traced = trace(Stack(2), torch.randn(5, HIDDEN), specs=specs, by_weight=by_weight)
            (record,) = traced.report.records
            assert [(use.site, use.fused, use.how) for use in record.uses] == [
                ("layers.0:latents", FUSION, how),
                ("layers.1:latents", FUSION, how),
            ]


def test_a_layer_that_the_plan_leaves_out_stays() -> None:
    for spec in (mla_spec(1), with_modules(mla_spec(1))):
        traced = trace(Stack(3), torch.randn(5, HIDDEN), specs=[("layers.1", spec)])
        assert traced.fused == 1
        assert traced.report.of(FUSION).matched == ("layers.1:latents",)


def test_unmatched_canonical_ops_are_lowered() -> None:
    norm = CanonicalNorm(KV)
    x = torch.randn(3, KV, dtype=torch.bfloat16)
    norm = norm.bfloat16()
    traced = trace(norm, x, specs=[mla_spec()])
    assert traced.fused == 0
    assert "layerfuse" in traced.before[0]
    assert "layerfuse" not in traced.after[0]
    torch.testing.assert_close(traced.output, norm(x), rtol=0, atol=0)


def test_lowering_keeps_the_weight_offset() -> None:
    def gemma(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.ops.layerfuse.rms_norm(x, weight, 1e-6, 1.0)

    x, weight = torch.randn(8, 4, dtype=torch.float16).T, torch.randn(8, dtype=torch.float16)
    traced = trace(gemma, x, weight, specs=[mla_spec()])
    assert "layerfuse" not in traced.after[0]
    assert traced.output.is_contiguous()
    torch.testing.assert_close(traced.output, gemma(x, weight), **TOLERANCE[torch.float16])
