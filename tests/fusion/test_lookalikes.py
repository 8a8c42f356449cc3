"""What looks like the fusion and is not stays as it is, and the report says why.

Each case checks three things: nothing was fused, the graph is unchanged, and the reason names the cause.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fusion_support import (
    FUSION,
    HIDDEN,
    KV,
    ROPE,
    FusedProjection,
    Layer,
    LlamaNorm,
    Q,
    TwoProjections,
    mla_spec,
    trace,
    with_modules,
)
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from layerfuse.adapters.specs import NormSpec
from layerfuse.fusion import Target, plan
from layerfuse.fusion.rewrite import Pipeline


def assert_stays(module: nn.Module, reason: str, *, spec: Any = None, paths: bool = False, **kwargs: Any) -> None:
    """Whether or not there are weights to go by, and whether or not the norms say which modules they are."""
    x = torch.randn(5, HIDDEN)
    spec = spec or mla_spec()
    name = "layer" if paths else "layer 0"
    for by_weight, named in ((True, False), (False, False), *([(True, True), (False, True)] if paths else [])):
        each = with_modules(spec) if named else spec
        traced = trace(module, x, specs=[(name, each)] if paths else [each], by_weight=by_weight, **kwargs)
        assert traced.fused == 0
        assert traced.before == traced.after
        verdict = traced.report.of(FUSION)
        assert verdict.matched == ()
        assert verdict.compiled == verdict.executed == 0
        assert list(verdict.missed) == [f"{name}:latents"]
        said = verdict.missed[f"{name}:latents"]
        assert reason in said, (by_weight, named, said)


@pytest.mark.parametrize("shape", [FusedProjection, TwoProjections])
@pytest.mark.parametrize(("epsilon", "off"), [(1e-6 + 1e-7, 1e-6), (1e-6, 1e-6 + 1e-7), (1e-5, 1e-6)])
def test_an_epsilon_off_by_little(shape: Any, epsilon: float, off: float) -> None:
    reason = "has epsilon" if epsilon != 1e-5 else "has epsilon 1e-05; the spec says 1e-06"
    assert_stays(Layer(shape(epsilon=epsilon, kv_epsilon=off)), reason, paths=True)


def test_an_epsilon_off_without_paths() -> None:
    assert_stays(FusedProjection(epsilon=1e-5, kv_epsilon=1e-5), "width 1536 with epsilon 1e-05")


def test_wrong_width() -> None:
    spec = mla_spec(q_lora_rank=768)
    assert_stays(Layer(FusedProjection()), "no query norm of width 768", spec=spec, paths=True)


class TwoInputs(FusedProjection):
    """The norms of different tensors: the keys come from another hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(HIDDEN, KV + ROPE)

    def forward(self, x: torch.Tensor) -> Any:
        q, _, _ = self.split(x)
        return self.q_norm(q), self.kv_norm(self.other(x.cos())[..., :KV])


@pytest.mark.parametrize("paths", [True, False])
def test_norms_of_different_tensors(paths: bool) -> None:
    assert_stays(Layer(TwoInputs()) if paths else TwoInputs(), "different tensors", paths=paths)


class Twice(Layer):
    """One layer that runs twice in a graph."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x), self.layer(x.sin())


@pytest.mark.parametrize(("layer", "fused"), [(TwoInputs, 0), (FusedProjection, 2)])
def test_each_use_of_a_layer_counts(layer: Any, fused: int) -> None:
    traced = trace(Twice(layer()), torch.randn(5, HIDDEN), specs=[("layer", mla_spec())])
    (record,) = traced.report.records
    assert [use.site for use in record.uses] == ["layer:latents"] * 2
    assert traced.fused == fused


class Shared(nn.Module):
    """One weight for both norms, which takes equal widths."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.down = nn.Linear(HIDDEN, KV + KV + ROPE)
        self.q_norm = LlamaNorm(KV)
        self.kv_norm = self.q_norm if shared else LlamaNorm(KV)

    def forward(self, x: torch.Tensor) -> Any:
        q, kv, k_pe = self.down(x).split([KV, KV, ROPE], -1)
        return self.q_norm(q), self.kv_norm(kv), k_pe


def test_a_shared_weight() -> None:
    spec = mla_spec(q_lora_rank=KV)
    assert_stays(Shared(shared=True), "share the weight", spec=spec)
    assert trace(Shared(shared=False), torch.randn(5, HIDDEN), specs=[spec]).fused == 1


class NormedRope(Shared):
    """The second norm reads columns that are not the latent's."""

    def forward(self, x: torch.Tensor) -> Any:
        down = self.down(x)
        return self.q_norm(down[..., :KV]), self.kv_norm(down[..., KV + ROPE :])


def test_a_norm_of_the_rope_columns() -> None:
    reason = "the key/value norm reads columns 576:1088"
    assert_stays(NormedRope(shared=False), reason, spec=mla_spec(q_lora_rank=KV))


class MutatedBetween(FusedProjection):
    def forward(self, x: torch.Tensor) -> Any:
        q, kv, _ = self.split(x)
        query = self.q_norm(q)
        kv.add_(1)
        return query, self.kv_norm(kv)


def test_an_input_mutated_between() -> None:
    # AOTAutograd turns the in-place add into a new tensor, which is no column of the projection any more.
    assert_stays(MutatedBetween(), "different tensors")


class SharedIntermediate(FusedProjection):
    def forward(self, x: torch.Tensor) -> Any:
        q, kv, _ = self.split(x)
        scale = torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.q_norm.weight * (q * scale), self.kv_norm(kv), scale.exp()


def test_an_intermediate_used_elsewhere() -> None:
    assert_stays(Layer(SharedIntermediate()), "2 readers", paths=True)


def test_saved_for_the_backward_pass() -> None:
    assert_stays(Layer(FusedProjection()), "saved for the backward pass", paths=True, grad=True)


class CrossedLayers(nn.Module):
    """Layer 0's query norm and layer 1's key norm, of one hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([FusedProjection(), FusedProjection()])

    def forward(self, x: torch.Tensor) -> Any:
        q, _, _ = self.layers[0].split(x)
        _, kv, _ = self.layers[1].split(x)
        return self.layers[0].q_norm(q), self.layers[1].kv_norm(kv)


def test_norms_of_two_layers() -> None:
    specs = [(f"layers.{i}", mla_spec(i)) for i in range(2)]
    for by_weight in (True, False):
        traced = trace(CrossedLayers(), torch.randn(5, HIDDEN), specs=specs, by_weight=by_weight)
        assert traced.fused == 0
        assert traced.before == traced.after
        missed = traced.report.of(FUSION).missed
        assert "found the query norm only" in missed["layers.0:latents"]
        assert "found the key/value norm only" in missed["layers.1:latents"]


class DependentInput(TwoProjections):
    """The keys are projected from a state that the normed query went into."""

    def forward(self, x: torch.Tensor) -> Any:
        query = self.q_norm(self.down(x))
        return self.kv_norm(self.kv_down(x + query[..., :HIDDEN])[..., :KV])


def test_one_norm_feeding_the_other() -> None:
    assert_stays(DependentInput(), "different tensors")


class Transposed(FusedProjection):
    def forward(self, x: torch.Tensor) -> Any:
        down = self.down(x).T.contiguous().T
        return self.q_norm(down[..., :Q]), self.kv_norm(down[..., Q : Q + KV])


def test_results_that_are_not_contiguous() -> None:
    assert_stays(Transposed(), "not contiguous")


def test_mixed_dtypes_stay() -> None:
    # A float32 weight widens transformers' result; the fused op would not.
    module = FusedProjection()
    module.down.bfloat16()
    x = torch.randn(5, HIDDEN, dtype=torch.bfloat16)
    module.up.float()
    traced = trace(Layer(module), x, specs=[("layer", mla_spec())])
    assert traced.fused == 0
    assert traced.before == traced.after
    assert "another dtype" in traced.report.of(FUSION).missed["layer:latents"]


class ReadsRope(FusedProjection):
    """The rope columns have readers before, between and after the norms. The fused op writes nothing: this may fuse."""

    def forward(self, x: torch.Tensor) -> Any:
        q, kv, k_pe = self.split(x)
        before = k_pe.exp()
        query = self.q_norm(q)
        between = k_pe.sin()
        return query, self.kv_norm(kv), before, between, k_pe.cos()


def test_rope_columns_with_other_readers_are_kept_intact() -> None:
    module, x = ReadsRope(), torch.randn(5, HIDDEN)
    traced = trace(module, x, specs=[mla_spec()])
    assert traced.fused == 1
    with torch.no_grad():
        expected = module(x)
    torch.testing.assert_close(traced.output[2:], expected[2:], rtol=0, atol=0)
    torch.testing.assert_close(traced.output[:2], expected[:2], rtol=1e-5, atol=1e-5)


# ---- graphs that really write in place, as a backend may hand them over ----------------------------------------------


def run_pass(function: Any, *args: torch.Tensor) -> tuple[str, Pipeline, torch.fx.GraphModule]:
    module = make_fx(function, tracing_mode="fake")(*args)
    pipeline = Pipeline(plan([mla_spec()], Target.named("cpu")))
    pipeline(module.graph)
    module.graph.lint()
    module.recompile()
    return str(module.graph), pipeline, module


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


INPUTS = (torch.randn(3, Q + KV + ROPE), torch.rand(Q), torch.rand(KV))


def test_a_plain_norm_where_the_spec_has_a_zero_centred_one() -> None:
    spec = mla_spec(q_norm=NormSpec(width=Q, epsilon=1e-6, weight_offset=1.0))
    assert_stays(FusedProjection(), "adds 0 to its weight; the spec says 1", spec=spec)


def test_nothing_random_is_moved() -> None:
    hidden, q_down, kv_down = torch.randn(3, HIDDEN), torch.randn(HIDDEN, Q), torch.randn(HIDDEN, KV + ROPE)

    def function(h: torch.Tensor, a: torch.Tensor, b: torch.Tensor, wq: torch.Tensor, wkv: torch.Tensor) -> Any:
        query = _norm(h @ a, wq)
        noise = torch.rand_like(b)
        return query, _norm((h @ (b + noise))[:, :KV], wkv)

    text, pipeline, _ = run_pass(function, hidden, q_down, kv_down, *INPUTS[1:])
    assert "mla_dual_rms_norm" not in text
    assert "random" in pipeline.report.of(FUSION).missed["layer 0:latents"]


# ---- specs and switches that refuse before any graph -----------------------------------------------------------------
