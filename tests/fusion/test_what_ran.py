"""What ran: report, counters and profiler agree, whatever Dynamo did with a model, and strict speaks of the call at hand.

The graphs are run op by op instead of by generated code: the same graphs and calls, in a fraction of the time.
"""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from fusion_support import HIDDEN, CanonicalNorm, FusedProjection, TwoProjections, mla_spec
from torch import nn

from layerfuse import GQASpec, fusion, registry
from layerfuse.fusion import FusedModel, FusionMissedError

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("_op_by_op")

DUAL, ADD = "mla_dual_rms_norm", "add_rms_norm"
SMALL = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "max_position_embeddings": 64,
    "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip


def deepseek(layers: int = 2) -> Any:
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(**SMALL, num_hidden_layers=layers, first_k_dense_replace=layers)
    return transformers.DeepseekV3ForCausalLM(config).eval()


def call(model: Any, length: int = 6, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(length)[None] % 64, **{"use_cache": False, **kwargs}).logits


def assert_agree(fused: FusedModel, expected: dict[str, int], ran: dict[str, int], *args: Any, **kwargs: Any) -> Any:
    """Profiler, counters and report say that these many of these many ran."""
    with torch.no_grad():
        audit = fused.audit(*args, **kwargs)
    assert {name: found.expected for name, found in audit.fusions.items()} == expected
    assert {name: found.profiled for name, found in audit.fusions.items()} == ran
    assert {name: found.counted for name, found in audit.fusions.items()} == ran
    assert {name: fused.report.of(name).last_call for name in ran} == ran
    return audit


IDS = {"input_ids": torch.arange(6)[None], "use_cache": False}


def test_a_whole_model() -> None:
    fused = fusion.compile(deepseek(2), strict=True)
    torch.testing.assert_close(call(fused), call(fused.original), rtol=1e-5, atol=1e-5)
    audit = assert_agree(fused, {DUAL: 2, ADD: 4}, {DUAL: 2, ADD: 4}, **IDS)
    assert audit.ok and "2 by the profiler" in str(audit)
    verdict = fused.report.of(DUAL)
    assert (verdict.compiled, verdict.executed, verdict.last_call) == (2, 2 * fused.report.calls, 2)


# ---- several uses of one site (findings 1 and 18) --------------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self, layers: list[nn.Module], times: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.times = times

    def forward(self, x: torch.Tensor) -> Any:
        return tuple(part for _ in range(self.times) for layer in self.layers for part in layer(x))


def specs(count: int = 1, **changes: Any) -> list[tuple[str, Any]]:
    return [(f"layers.{i}", mla_spec(i, **changes)) for i in range(count)]


X = torch.randn(5, HIDDEN)


def one(**how: Any) -> FusedModel:
    """Of one layer, which Dynamo traces in a tenth of the time of transformers' own: what is said of a whole call is said of it too."""
    return fusion.compile(Layers([TwoProjections()]), specs=specs(), **how)


def outputs(fused: Any, length: int = 5) -> Any:
    with torch.no_grad():
        return fused(X[:length])


def test_a_layer_called_twice_in_one_forward() -> None:
    fused = fusion.compile(Layers([TwoProjections(), TwoProjections()], times=2), specs=specs(2), strict=True)
    with torch.no_grad():
        for got, wanted in zip(fused(X), fused.original(X), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert_agree(fused, {DUAL: 2}, {DUAL: 4}, X)
    assert fused.report.of(DUAL).compiled == 4


def test_a_layer_appended_after_compile() -> None:
    model = deepseek(1)
    fused = fusion.compile(model, strict=True)
    call(fused)
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))
    model.model.layers[1].self_attn.layer_idx = 1
    model.config.num_hidden_layers = 2
    call(fused)
    assert len(fused.plan.expected(DUAL)) == 2
    assert_agree(fused, {DUAL: 2, ADD: 4}, {DUAL: 2, ADD: 4}, **IDS)


# ---- graph breaks and Dynamo's limit (findings 16 and 17) ------------------------------------------------------------


def hooked(model: Any) -> Any:
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    return model


def test_graph_breaks_per_layer() -> None:
    fused = fusion.compile(hooked(deepseek(2)))
    torch.testing.assert_close(call(fused), call(fused.original), rtol=1e-5, atol=1e-5)
    audit = assert_agree(fused, {DUAL: 2, ADD: 4}, {DUAL: 2, ADD: fused.report.of(ADD).last_call or 0}, **IDS)
    assert not any("profiler" in problem for problem in audit.problems)
    assert fused.report.of(DUAL).complete


def test_a_graph_of_siblings_says_what_each_of_them_misses() -> None:
    """Their first layer has no add at its entry: what is missed there is of the others, which run its graph."""
    model = deepseek(3)
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
    fused = fusion.compile(model)
    torch.testing.assert_close(call(fused), call(model), rtol=1e-5, atol=1e-5)
    missed = fused.report.of(ADD).missed
    assert set(missed) >= {"model.layers.1:input", "model.layers.2:input"}
    assert all("its residual add is in another graph" in why for why in missed.values()), missed


def test_dynamos_limit_is_named() -> None:
    # With a cache each layer's index is a guard, so that every frame is compiled anew for each layer.
    with torch._dynamo.config.patch(recompile_limit=2):
        fused = fusion.compile(hooked(deepseek(4)), strict=True)
        with pytest.raises(FusionMissedError, match=r"Dynamo has reached its limit of 2 recompilations"):
            call(fused, use_cache=True)
        with torch.no_grad():
            audit = fused.audit(input_ids=torch.arange(6)[None], use_cache=True)
    found = audit.fusions[DUAL]
    assert found.expected == 4
    assert found.profiled == found.counted == fused.report.of(DUAL).last_call < 4
    verdict = fused.report.of(DUAL)
    assert len(verdict.matched) == found.counted
    assert all("limit of" in why for why in verdict.missed.values())


def test_twelve_lengths_without_dynamic_shapes() -> None:
    fused = fusion.compile(Layers([TwoProjections()]), specs=specs(), dynamic=False, strict=True)
    with torch.no_grad():
        for length in range(2, 10):
            fused(torch.randn(length, HIDDEN))
        for length in range(10, 14):
            with pytest.raises(FusionMissedError, match=r"limit of 8 .*dynamic=True"):
                fused(torch.randn(length, HIDDEN))
            assert fused.report.of(DUAL).last_call == 0
        assert not fused.report.of(DUAL).complete
        fused(torch.randn(3, HIDDEN))
    assert fused.report.of(DUAL).last_call == 1
    assert fused.report.of(DUAL).complete


# ---- what is kept out of compilation ---------------------------------------------------------------------------------


def test_a_disabled_attention() -> None:
    model = deepseek(2)
    attention = model.model.layers[1].self_attn
    attention.forward = torch.compiler.disable(attention.forward)
    fused = fusion.compile(model, strict=True)
    with pytest.raises(
        FusionMissedError, match=r"layers.1.self_attn:latents: model.layers.1.self_attn.forward is kept"
    ):
        call(fused)
    with torch.no_grad():
        audit = fused.audit(**IDS)
    assert (audit.fusions[DUAL].profiled, audit.fusions[DUAL].counted, audit.fusions[DUAL].expected) == (1, 1, 2)
    assert list(fused.report.of(DUAL).missed) == ["model.layers.1.self_attn:latents"]
    # After the break, layer 0 may run the graph of layer 1, in which the residual add is expected and missed.
    assert "model.layers.0:input" not in audit.missed[ADD]


def test_a_stance_and_a_switch_after_a_good_call() -> None:
    fused = one(strict=True)
    outputs(fused)
    with torch.compiler.set_stance("force_eager"), pytest.raises(FusionMissedError, match="set_stance"):
        outputs(fused)
    assert fused.report.of(DUAL).last_call == 0
    outputs(fused)
    assert fused.report.of(DUAL).complete


def test_a_switch_before_the_first_call() -> None:
    with torch._dynamo.config.patch(disable=True):
        fused = one(strict=True)
        with pytest.raises(FusionMissedError, match=r"config\.disable is set"):
            outputs(fused)


# ---- one miss is not for ever, and a later graph that loses a fusion shows (findings 2 and 19) -----------------------


class Changing(TwoProjections):
    """Another spelling of the norm from ten tokens on."""

    def forward(self, x: torch.Tensor) -> Any:
        q, kv, _ = self.down(x), *self.kv_down(x).split([512, 64], -1)
        if x.shape[0] < 10:
            return self.q_norm(q), self.kv_norm(kv)
        return q / torch.sqrt(q.pow(2).mean(-1, keepdim=True) + 1e-6) * self.q_norm.weight, self.kv_norm(kv)


def test_a_recompilation_that_loses_the_fusion() -> None:
    fused = fusion.compile(Layers([Changing()]), specs=specs(), dynamic=False, strict=True)
    with torch.no_grad():
        fused(X)
        assert fused.report.of(DUAL).complete
        with pytest.raises(FusionMissedError, match="found the key/value norm only"):
            fused(torch.randn(12, HIDDEN))
        verdict = fused.report.of(DUAL)
        assert list(verdict.missed) == ["layers.0:latents"]
        assert verdict.last_call == 0
        fused(X)
    assert fused.report.of(DUAL).last_call == 1
    assert not fused.report.of(DUAL).complete, "a graph that lost the fusion stays in the report"


# ---- specs, weights and shapes that are not as usual (findings 3, 4, 7 and 20) ---------------------------------------


@pytest.mark.parametrize("placed", [[mla_spec()], [("", mla_spec())], [("layers.0", mla_spec())]])
def test_specs_without_a_path_or_with_that_of_the_whole_model(placed: list[Any]) -> None:
    whole = placed[0][0] == "" if isinstance(placed[0], tuple) else False
    model = TwoProjections() if whole else Layers([TwoProjections()])
    fused = fusion.compile(model, specs=placed, strict=True)
    with torch.no_grad():
        fused(X)
    assert_agree(fused, {DUAL: 1}, {DUAL: 1}, X)


class Turned(FusedProjection):
    """The latents are columns of a transposed product, and the norms are one op each."""

    def forward(self, x: torch.Tensor) -> Any:
        q, kv, _ = (self.down.weight @ x.T).T.split([1536, 512, 64], -1)
        return self.q_norm(q), self.kv_norm(kv)


def test_what_the_op_itself_refuses_is_a_reason() -> None:
    fused = fusion.compile(Layers([Turned(CanonicalNorm)]), specs=specs())
    with torch.no_grad():
        for got, wanted in zip(fused(X), fused.original(X), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    (reason,) = fused.report.of(DUAL).missed.values()
    assert "q has stride" in reason and "q.contiguous()" in reason


# ---- the module that comes back (finding 6) --------------------------------------------------------------------------


def test_it_is_a_module_that_behaves_as_the_model() -> None:
    model = deepseek(1)
    fused = fusion.compile(model)
    assert isinstance(fused, nn.Module)
    assert fused.eval() is fused and fused.to(torch.float32) is fused and fused.cpu() is fused
    assert dict(fused.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert fused.state_dict().keys() == model.state_dict().keys()
    outer = nn.ModuleDict({"inner": fused})
    assert len(list(outer.parameters())) == len(list(model.parameters()))
    assert outer.state_dict().keys() == {f"inner.{name}" for name in model.state_dict()}
    outer.load_state_dict(outer.state_dict())
    fused.train()
    assert model.training and fused.training
    outer.eval()
    assert not model.training and not fused.training
    assert fused.get_submodule("model.layers.0") is model.model.layers[0]
    assert fused.config is model.config
    fused.marked = 1
    assert model.marked == 1
    fused.half()
    assert next(model.parameters()).dtype == torch.float16
    assert next(fused.parameters()).dtype == torch.float16


def test_copies_compile_for_themselves() -> None:
    fused = one(strict=True)
    wanted = outputs(fused)
    for again in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert isinstance(again, FusedModel) and again.original is not fused.original
        torch.testing.assert_close(outputs(again), wanted, rtol=1e-6, atol=1e-6)
        assert again.report is not fused.report
        assert again.report.of(DUAL).last_call == 1
    assert copy.copy(fused).original is fused.original


# ---- threads (findings 5 and 8) --------------------------------------------------------------------------------------


def test_two_threads_with_dynamic_shapes() -> None:
    models = [one(dynamic=True) for _ in range(2)]
    before = torch._dynamo.config.specialize_float
    after: list[bool] = []

    def run(fused: FusedModel) -> None:
        outputs(fused)
        after.append(torch._dynamo.config.specialize_float)

    threads = [threading.Thread(target=run, args=(fused,)) for fused in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Before torch 2.13 the config is one for all threads: the other thread may have been inside.
    assert after == [before, before] or "ContextVar" not in vars(torch.utils._config_module)
    assert torch._dynamo.config.specialize_float == before
    for fused in models:
        assert fused.report.of(DUAL).last_call == 1, str(fused.report)
        assert fused.report.of(DUAL).complete


# ---- the cause, where nothing was compiled


def only_reason(fused: FusedModel) -> str:
    outputs(fused)
    (reason,) = {why for sites in fused.report.missed().values() for why in sites.values()}
    return reason


def test_disabled_as_a_whole() -> None:
    assert "disable=True" in only_reason(one(disable=True))


def test_a_forced_backend() -> None:
    with torch.compiler.set_stance("default", force_backend="eager"):
        assert "force_backend='eager'" in only_reason(one())


def test_a_model_that_was_compiled_in_place() -> None:
    model = Layers([TwoProjections()])
    model.compile(backend="eager")
    assert "nn.Module.compile" in only_reason(fusion.compile(model, specs=specs()))


def test_dynamos_limit_over_all_models_is_named() -> None:
    fused = one(dynamic=False)
    with torch._dynamo.config.patch(accumulated_recompile_limit=2):
        for length in range(2, 5):
            outputs(fused, length)
    assert fused.report.last is not None
    assert "accumulated_recompile_limit" in fused.report.last.missed[DUAL]["layers.0:latents"]


def test_a_compile_region(monkeypatch: pytest.MonkeyPatch) -> None:
    """One body serves all layers, and is not rewritten."""
    kind = transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3Attention
    monkeypatch.setattr(kind, "forward", torch.compiler.nested_compile_region(kind.forward))
    fused = fusion.compile(deepseek(2))
    torch.testing.assert_close(call(fused), call(fused.original), rtol=1e-5, atol=1e-5)
    for missed in (fused.report.of(DUAL).missed, fused.report.last.missed[DUAL]):
        assert list(missed) == ["model.layers.0.self_attn:latents", "model.layers.1.self_attn:latents"]
        assert all("norms are in the body of invoke_subgraph, which is not rewritten" in why for why in missed.values())
    assert fused.report.of(ADD).last_call == 4


class Conditional(TwoProjections):
    """Its norms in both branches of a condition on data."""

    def forward(self, x: torch.Tensor) -> Any:
        forward = super().forward
        return torch.cond(x.sum() > 0, lambda x: forward(x), lambda x: forward(x * 2), (x,))


def test_a_condition() -> None:
    fused = fusion.compile(Layers([Conditional(), TwoProjections()]), specs=specs(2))
    with torch.no_grad():
        for got, wanted in zip(fused(X), fused.original(X), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    (reason,) = fused.report.of(DUAL).missed.values()
    assert "norms are in the body of cond, which is not rewritten" in reason


def test_a_fused_model_inside_another_is_refused() -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> Any:
            return self.inner(x)

    outer, inside = Outer(one(strict=True)), [("inner.layers.0", mla_spec())]
    with pytest.raises(TypeError, match=r"its inner is compiled with fusions already.*set_submodule\('inner'"):
        fusion.compile(outer, specs=inside)
    # As it is, the inner one runs fused; and put back it is a part of the whole.
    outputs(outer)
    assert outer.inner.report.of(DUAL).last_call == 1
    outer.set_submodule("inner", outer.get_submodule("inner").original)
    assert_agree(fusion.compile(outer, specs=inside, strict=True), {DUAL: 1}, {DUAL: 1}, X)


# ---- graphs that sibling layers share


def test_sharded_by_fsdp(tmp_path: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    model = deepseek(2).requires_grad_(False)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        audit = assert_agree(fusion.compile(model), {DUAL: 2, ADD: 4}, {DUAL: 2, ADD: 2}, **IDS)
        assert set(audit.missed) == {ADD}
        assert set(audit.missed[ADD]) == {"model.layers.1:input", "model:final"}
    finally:
        torch.distributed.destroy_process_group()


def test_a_parametrised_norm() -> None:
    class Doubled(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

    model = deepseek(1)
    norm = model.model.layers[0].self_attn.q_a_layernorm
    nn.utils.parametrize.register_parametrization(norm, "weight", Doubled())
    fused = fusion.compile(model)
    assert assert_agree(fused, {DUAL: 1, ADD: 2}, {DUAL: 1, ADD: 2}, **IDS).ok
    torch.testing.assert_close(call(fused), call(model), rtol=1e-4, atol=1e-5)


def test_an_audit_of_a_model_that_compiles_at_every_call_says_so() -> None:
    fused, kept = one(), []
    fused.original.layers[0].q_norm.register_forward_hook(lambda *given: kept.append(given[2]))
    with torch.no_grad():
        audit = fused.audit(X)
    assert audit.compiled
    assert "while compiling" in audit.problems[0]


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("GPT2LMHeadModel", lambda: transformers.GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=64)),
        ("BloomForCausalLM", lambda: transformers.BloomConfig(n_layer=2, hidden_size=64, n_head=4, vocab_size=64)),
    ],
)
def test_where_no_fusion_can_stand_plan_report_and_audit_say_why(name: str, config: Any) -> None:
    fused = fusion.compile(getattr(transformers, name)(config()).eval(), strict=True)
    with torch.no_grad():
        audit = fused.audit(**IDS)
    assert audit.ok and not audit.fusions and not fused.report.missed()
    why = fused.plan.why_empty
    assert "5 sites: the norm is no RMSNorm: LayerNormSpec; 2 sites: the MLP has no gate" in why
    assert [str(each).splitlines()[1:] for each in (fused.plan, fused.report, audit)] == [[f"  {why}"]] * 3


def test_why_nothing_is_said_of_a_model_without_sites_or_specs_and_of_fusions_that_are_off() -> None:
    cpu = fusion.Target.named("cpu")
    assert fusion.plan([], cpu).why_empty == "no fusion has a site here: no layer was read"
    attention = [(path, spec) for path, spec in registry.model("gpt-oss-120b").specs() if isinstance(spec, GQASpec)]
    assert fusion.plan(attention, cpu).why_empty == "no fusion has a site here: layers are read as GQASpec"
    off = fusion.compile(deepseek(1), config=fusion.FusionConfig(level=0))
    with torch.no_grad():
        audit = off.audit(**IDS)
    assert off.plan.why_empty is None
    assert str(audit) == "audit of one call:\n  no fusion is expected: the report says why"
