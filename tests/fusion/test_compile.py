"""fusion.compile on real Inductor: results, report, strictness, switches, caches, and the passes in other slots."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fusion_support import FUSION, HIDDEN, FusedProjection, TwoProjections, mla_spec
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code

import layerfuse
from layerfuse import fusion
from layerfuse.fusion import FusionConfig, FusionMissedError, Target, plan
from layerfuse.fusion.config import ENVIRONMENT
from layerfuse.fusion.passes import LowerCanonicalPass, MLADualRMSNormPass, Pipeline

CPU = Target.named("cpu")
HERE = Path(__file__).parent


class Layers(nn.Module):
    def __init__(self, layer: Any = FusedProjection, count: int = 1, **kwargs: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(**kwargs) for _ in range(count))

    def forward(self, x: torch.Tensor) -> Any:
        return tuple(part for layer in self.layers for part in layer(x))


def specs(count: int = 1, **changes: Any) -> list[tuple[str, Any]]:
    return [(f"layers.{i}", mla_spec(i, **changes)) for i in range(count)]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def tokens(count: int = 5) -> torch.Tensor:
    return torch.randn(count, HIDDEN)


def test_end_to_end() -> None:
    model = Layers(TwoProjections)
    compiled = fusion.compile(model, specs=specs(), strict=True, mode="default")
    assert compiled.layers is model.layers
    assert compiled.model is model
    assert "no graph has come to the pass" in compiled.report.of(FUSION).missed["layers.0"]
    for count in (5, 5, 9, 12):
        x = tokens(count)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
    # The first count is compiled as it is, the second one makes the graph dynamic, the third reuses it.
    assert compiled.report.graphs == 2
    assert all(len(record.matched) == 1 for record in compiled.report.records)
    assert str(compiled.report) == (
        "fusion report: 2 graphs compiled for cpu\n"
        "  mla_dual_rms_norm: 1 expected, 1 matched, 0 refused, 0 not applicable"
    )
    assert json.loads(json.dumps(compiled.report.to_dict()))["fusions"][FUSION]["matched"] == ["layers.0"]


def test_views_reach_the_kernel_without_a_copy() -> None:
    model = Layers().bfloat16()
    x = tokens().bfloat16()
    compiled = fusion.compile(model, specs=specs(), dynamic=True, options={"max-fusion-size": 32})
    with torch.no_grad():
        _, (code,) = run_and_get_code(compiled, x)
    (call,) = [line for line in code.splitlines() if "layerfuse.mla_dual_rms_norm.default(" in line]
    # Both latents are the projection's own memory, at its row stride and their offsets.
    assert call.count("reinterpret_tensor(buf0") == 2
    assert "(2112, 1), 0)" in call
    assert "(2112, 1), 1536)" in call
    assert compiled.report.of(FUSION).complete


def test_strict_names_layer_and_reason() -> None:
    compiled = fusion.compile(Layers(count=2, epsilon=1e-5), specs=specs(2, kv_epsilon=1e-5), strict=True)
    with torch.no_grad(), pytest.raises(FusionMissedError) as caught:
        compiled(tokens())
    assert set(caught.value.missed[FUSION]) == {"layers.0", "layers.1"}
    text = str(caught.value)
    assert "happen in 2 layers" in text
    assert "layers.1: " in text
    assert "1e-05" in text
    assert "strict=False" in text
    with torch.no_grad(), pytest.raises(FusionMissedError):
        compiled(tokens())


def test_a_recompilation_that_loses_a_layer() -> None:
    compiled = fusion.compile(Layers(), specs=specs(), config=FusionConfig(strict=True))
    with torch.no_grad():
        compiled(tokens())
    # With grad enabled the norms' intermediates are saved for the backward pass.
    with pytest.raises(FusionMissedError, match="saved for the backward pass"):
        compiled(tokens())
    verdict = compiled.report.of(FUSION)
    assert verdict.matched == ()
    assert list(verdict.missed) == ["layers.0"]


def test_gradients_are_those_of_the_model() -> None:
    model = Layers()
    compiled = fusion.compile(model, specs=specs())
    x = tokens()
    torch.autograd.backward([part.sum() for part in compiled(x)])
    got = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    torch.autograd.backward([part.sum() for part in model(x)])
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-4, atol=1e-4)


def test_switched_off_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "none")
    compiled = fusion.compile(Layers(), specs=specs(), strict=True)
    with torch.no_grad():
        compiled(tokens())
    verdict = compiled.report.of(FUSION)
    assert verdict.expected == verdict.matched == ()
    assert "LAYERFUSE_FUSIONS=none" in verdict.refused["layers.0"]


def test_a_backend_is_refused() -> None:
    with pytest.raises(TypeError, match=r"takes no backend; .* fusion.passes.Pipeline"):
        fusion.compile(Layers(), specs=specs(), backend="inductor")


def test_in_inductors_own_slot() -> None:
    # The joint passes have run by then; module paths alone tie sites to layers. A graph from Inductor's cache never
    # comes to its slots, so the caches are off.
    model = Layers(TwoProjections, count=2)
    each = MLADualRMSNormPass(plan(specs(2), CPU))
    with inductor_config.patch(post_grad_custom_pre_pass=each, force_disable_caches=True), torch.no_grad():
        x = tokens()
        torch.testing.assert_close(torch.compile(model)(x), model(x), rtol=1e-5, atol=1e-5)
    assert each.report.of(FUSION).matched == ("layers.0", "layers.1")


def test_uuid_covers_specs_plan_and_config() -> None:
    base = plan(specs(2), CPU)
    others = [
        plan(specs(3), CPU),
        plan(specs(2, epsilon=1e-5), CPU),
        plan([("elsewhere", mla_spec(0)), specs(2)[1]], CPU),
        plan(specs(2), Target.named("gfx950")),
        plan(specs(2), CPU, FusionConfig(level=2)),
    ]
    for build in (MLADualRMSNormPass, Pipeline):
        uuids = [build(made).uuid() for made in (base, *others)]
        assert len(set(uuids)) == len(uuids)
        assert build(plan(specs(2), CPU)).uuid() == uuids[0]
        assert pickle.loads(pickle.dumps(build(base))).uuid() == uuids[0]
    assert LowerCanonicalPass().uuid() == LowerCanonicalPass().uuid()


class Bare(FusedProjection):
    """Nothing but products and norms: fused, it needs no generated kernel."""

    def forward(self, x: torch.Tensor) -> Any:
        q, kv, _ = self.split(x)
        return self.q_norm(q), self.kv_norm(kv)


CHILD = """
import json, sys
sys.path.insert(0, {here!r})
import torch
from test_compile import Bare, Layers, specs
torch._inductor.config.cpp_cache_precompile_headers = False
from torch._dynamo.utils import counters
from layerfuse import fusion

torch.manual_seed(0)
compiled = fusion.compile(Layers(Bare), specs=specs(epsilon={epsilon}))
with torch.no_grad():
    compiled(torch.randn(5, {hidden}))
verdict = compiled.report.of("mla_dual_rms_norm")
print(json.dumps([dict(counters["inductor"]), verdict.matched, verdict.missed]))
"""


def child(cache: Path, epsilon: float) -> tuple[dict[str, int], list[str], dict[str, str]]:
    root = str(Path(layerfuse.__path__[0]).parent)
    environment = {
        **os.environ,
        "PYTHONPATH": root,
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        # Otherwise each fresh cache directory compiles a probe for the CPU's vector instructions.
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
    }
    code = CHILD.format(here=str(HERE), epsilon=epsilon, hidden=HIDDEN)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    inductor, matched, missed = json.loads(done.stdout.splitlines()[-1])
    return inductor, matched, missed


def test_the_cache_is_hit_by_the_same_spec_and_missed_by_another(tmp_path: Path) -> None:
    first, matched, _ = child(tmp_path, 1e-6)
    assert first.get("fxgraph_cache_miss") == 1
    assert matched == ["layers.0"]
    second, matched, _ = child(tmp_path, 1e-6)
    assert second.get("fxgraph_cache_hit") == 1
    assert not second.get("fxgraph_cache_miss")
    assert matched == ["layers.0"], "the report must be complete on a cache hit too"
    third, matched, missed = child(tmp_path, 1e-5)
    assert third.get("fxgraph_cache_miss") == 1
    assert not third.get("fxgraph_cache_hit")
    assert matched == []
    assert "has epsilon 1e-06; the spec says 1e-05" in missed["layers.0"]


def test_generate_is_the_models_own_and_says_that_it_runs_unfused() -> None:
    class Generating(nn.Linear):
        def generate(self) -> str:
            return "own"

    fused = fusion.compile(Generating(4, 4), specs=[])

    with pytest.warns(RuntimeWarning, match="without the fusions"):
        assert fused.generate() == "own"
