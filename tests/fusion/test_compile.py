"""fusion.compile: results, report, strictness, switches, caches, and the rewriting in other slots.

On real Inductor where generated code or its caches are the point, else op by op.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fusion_support import FUSION, HIDDEN, KV, FusedProjection, TwoProjections, mla_spec
from helpers import run_copy
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code

from layerfuse import fusion
from layerfuse.adapters.specs import Parallel
from layerfuse.fusion import FusionConfig, FusionMissedError, Target, plan, rewrite
from layerfuse.fusion.config import ENVIRONMENT
from layerfuse.fusion.rewrite import Pipeline

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


def test_what_the_docs_print_is_the_graph_that_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/adding-a-fusion.md shows an author both: what a step's `bind` reads, and what has become of it."""
    from torch._inductor.compile_fx import compile_fx

    from layerfuse.fusion.rewrite.driver import Driver

    def ops(graph: Any) -> list[tuple[str, str]]:
        return [(node.name, str(node.target)) for node in graph.nodes]

    shown, searched, behind = [], [], []
    search = Driver.__call__
    monkeypatch.setattr(
        Driver, "__call__", lambda self, graph, *rest: searched.append(ops(graph)) or search(self, graph, *rest)
    )

    def show(module: Any, _inputs: Any, **_: Any) -> Any:
        shown.append(ops(module.graph))
        return module

    model = Layers(TwoProjections)
    slot = {"post_grad_custom_pre_pass": lambda graph: behind.extend(str(node.target) for node in graph.nodes)}
    with torch.no_grad():
        torch.compile(model, backend=lambda module, inputs: compile_fx(module, inputs, inner_compile=show))(tokens())
        torch._dynamo.reset()
        fusion.compile(model, specs=specs(), options=slot)(tokens())
    assert shown == searched and len(shown) == 1
    assert f"layerfuse.{FUSION}.default" in behind and "aten.rsqrt.default" not in behind


def test_end_to_end() -> None:
    model = Layers(TwoProjections)
    compiled = fusion.compile(model, specs=specs(), strict=True, mode="default")
    assert compiled.layers is model.layers
    assert compiled.original is model
    assert "no graph was rewritten" in compiled.report.of(FUSION).missed["layers.0:latents"]
    for count in (5, 5, 9, 12):
        x = tokens(count)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
    # The first count is compiled as it is, the second one makes the graph dynamic, the third reuses it.
    assert compiled.report.graphs == 2
    assert [record.fused() for record in compiled.report.records] == [1, 1]
    assert str(compiled.report) == (
        "fusion report: 2 graphs compiled for cpu, 4 calls\n"
        "  mla_dual_rms_norm: 1 expected, 1 matched, 0 refused, 0 not applicable; 1 use ran fused in the last call"
    )
    verdict = compiled.report.of(FUSION)
    assert (verdict.compiled, verdict.executed, verdict.last_call) == (2, 4, 1)
    assert json.loads(json.dumps(compiled.report.to_dict()))["fusions"][FUSION]["matched"] == ["layers.0:latents"]


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


@pytest.mark.usefixtures("_op_by_op")
def test_strict_names_layer_and_reason() -> None:
    compiled = fusion.compile(Layers(count=2, epsilon=1e-5), specs=specs(2, kv_epsilon=1e-5), strict=True)
    with torch.no_grad(), pytest.raises(FusionMissedError) as caught:
        compiled(tokens())
    assert set(caught.value.missed[FUSION]) == {"layers.0:latents", "layers.1:latents"}
    text = str(caught.value)
    assert "happen at 2 sites" in text
    assert "layers.0:latents and 1 more: " in text
    assert "1e-05" in text
    assert "strict=False" in text
    with torch.no_grad(), pytest.raises(FusionMissedError):
        compiled(tokens())
    one = fusion.compile(Layers(epsilon=1e-5), specs=specs(kv_epsilon=1e-5), strict=True)
    with torch.no_grad(), pytest.raises(FusionMissedError, match=r"did not happen at 1 site:\n  - layers.0:latents: "):
        one(tokens())


@pytest.mark.usefixtures("_op_by_op")
def test_a_rewriting_that_ends_in_an_error_fused_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It strikes behind the fusions: who catches it puts the graph back as it was."""

    def fails(*_: Any) -> None:
        raise ZeroDivisionError("of the tests")

    monkeypatch.setattr(rewrite, "lower_canonical", fails)
    compiled = fusion.compile(Layers(), specs=specs())
    with torch.no_grad(), pytest.raises(BackendCompilerFailed, match="ZeroDivisionError: of the tests"):
        compiled(tokens())
    verdict = compiled.report.of(FUSION)
    assert (verdict.matched, verdict.compiled) == ((), 0)
    assert verdict.missed == {"layers.0:latents": "rewriting a graph failed: ZeroDivisionError: of the tests"}


@pytest.mark.usefixtures("_op_by_op")
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


@pytest.mark.usefixtures("_op_by_op")
def test_switched_off_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "none")
    compiled = fusion.compile(Layers(), specs=specs(), strict=True)
    with torch.no_grad():
        compiled(tokens())
    verdict = compiled.report.of(FUSION)
    assert verdict.expected == verdict.matched == ()
    assert "LAYERFUSE_FUSIONS=none" in verdict.refused["layers.0:latents"]


def test_a_backend_is_refused() -> None:
    with pytest.raises(TypeError, match=r"takes no backend; .* fusion.Pipeline\(plan\)"):
        fusion.compile(Layers(), specs=specs(), backend="inductor")


class Bare(FusedProjection):
    """Nothing but products and norms: fused, it needs no generated kernel."""

    def forward(self, x: torch.Tensor) -> Any:
        q, kv, _ = self.split(x)
        return self.q_norm(q), self.kv_norm(kv)


class BareTwo(TwoProjections):
    def forward(self, x: torch.Tensor) -> Any:
        return self.up(self.q_norm(self.down(x))), self.kv_norm(self.kv_down(x)[..., :KV])


def test_in_inductors_own_slot() -> None:
    # The joint passes have run by then; module paths alone tie sites to layers. A graph from Inductor's cache never
    # comes to its slots, so the caches are off.
    model = Layers(BareTwo, count=2)
    pipeline = Pipeline(plan(specs(2), CPU))
    with inductor_config.patch(post_grad_custom_pre_pass=pipeline, force_disable_caches=True), torch.no_grad():
        x = tokens()
        torch.testing.assert_close(torch.compile(model)(x), model(x), rtol=1e-5, atol=1e-5)
    assert pipeline.report.of(FUSION).matched == ("layers.0:latents", "layers.1:latents")
    assert {use.how for record in pipeline.report.records for use in record.uses} == {"module path"}


def test_the_key_of_the_slot_keeps_the_caches_of_two_plans_apart(own_cache: Path) -> None:
    model, x = Layers(Bare), tokens()

    def hits_and_misses(target: Target) -> tuple[int, int]:
        torch._dynamo.reset()
        counters.clear()
        with inductor_config.patch(post_grad_custom_pre_pass=Pipeline(plan(specs(), target))), torch.no_grad():
            torch.compile(model)(x)
        return counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]

    # AOTAutograd's cache lies in front of Inductor's and has the same key.
    with functorch_config.patch(enable_autograd_cache=False):
        assert hits_and_misses(CPU) == (0, 1)
        assert hits_and_misses(CPU) == (1, 0)
        assert hits_and_misses(Target.named("gfx950")) == (0, 1)


def test_uuid_covers_specs_plan_and_config() -> None:
    base = plan(specs(2), CPU)
    others = [
        plan(specs(3), CPU),
        plan(specs(2, epsilon=1e-5), CPU),
        plan([("elsewhere", mla_spec(0)), specs(2)[1]], CPU),
        plan(specs(2), Target.named("gfx950")),
        plan(specs(2), CPU, FusionConfig(level=2)),
        plan(specs(2, parallel=Parallel(size=2, rank=0), num_heads=4), CPU),
    ]
    uuids = [Pipeline(made).uuid() for made in (base, *others)]
    assert len(set(uuids)) == len(uuids)
    assert Pipeline(plan(specs(2), CPU)).uuid() == uuids[0]
    assert pickle.loads(pickle.dumps(Pipeline(base))).uuid() == uuids[0]
    # The ranks of one group may share a cache.
    ranks = [plan(specs(2, parallel=Parallel(size=2, rank=rank), num_heads=4), CPU) for rank in (0, 1)]
    assert len({Pipeline(made).uuid() for made in ranks}) == 1


CHILD = """
import json
import torch._inductor.config as inductor_config

# As `own_cache` patches them; older releases of torch read no variable for these.
inductor_config.cpp_cache_precompile_headers, inductor_config.cpp.vec_isa_ok = False, True
from test_compile import compiled_with

print(json.dumps(compiled_with({epsilon})))
"""


def compiled_with(epsilon: float) -> tuple[dict[str, int], list[str], dict[str, str]]:
    """Compile one model with specs of this epsilon: Inductor's counters, and what became of the layer."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    counters.clear()
    compiled = fusion.compile(Layers(Bare), specs=specs(epsilon=epsilon))
    with torch.no_grad():
        compiled(tokens())
    verdict = compiled.report.of(FUSION)
    return dict(counters["inductor"]), list(verdict.matched), verdict.missed


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache directory of its own, for this process and its children."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    # Otherwise each fresh cache directory compiles a probe for the CPU's vector instructions, and headers.
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    with inductor_config.patch({"cpp.vec_isa_ok": True, "cpp_cache_precompile_headers": False}):
        yield tmp_path


def compiled_in_a_process(epsilon: float) -> tuple[dict[str, int], list[str], dict[str, str]]:
    """`compiled_with` in a process of its own: what other tests have left in this one is in Inductor's keys too."""
    done = run_copy(CHILD.format(epsilon=epsilon), HERE)
    assert done.returncode == 0, done.stderr
    inductors, matched, missed = json.loads(done.stdout.splitlines()[-1])
    return inductors, matched, missed


@pytest.mark.usefixtures("own_cache")
def test_the_cache_is_hit_by_the_same_spec_and_missed_by_another() -> None:
    first, matched, _ = compiled_in_a_process(1e-6)
    assert first.get("fxgraph_cache_miss") == 1
    assert matched == ["layers.0:latents"]
    second, matched, _ = compiled_in_a_process(1e-6)
    assert second.get("fxgraph_cache_hit") == 1
    assert not second.get("fxgraph_cache_miss")
    assert matched == ["layers.0:latents"], "the report must be complete on a cache hit too"
    third, matched, missed = compiled_in_a_process(1e-5)
    assert third.get("fxgraph_cache_miss") == 1
    assert not third.get("fxgraph_cache_hit")
    assert matched == []
    assert "has epsilon 1e-06; the spec says 1e-05" in missed["layers.0:latents"]


def test_generate_is_the_models_own_and_says_that_it_runs_unfused() -> None:
    class Generating(nn.Linear):
        def generate(self) -> str:
            return "own"

    fused = fusion.compile(Generating(4, 4), specs=[])

    with pytest.warns(RuntimeWarning, match="without the fusions"):
        assert fused.generate() == "own"
