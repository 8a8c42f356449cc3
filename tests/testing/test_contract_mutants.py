"""Each scenario turns red for an adapter that is wrong in the way it watches for, and all are green for the right one."""

from __future__ import annotations

import attrs
import contract_mylib
import pytest
import torch
from contract_mylib import MODELS_TOML, _fill, registry_of
from torch import nn

from layerfuse.adapters import (
    WHOLE,
    LayerfuseError,
    MissingAttributeError,
    ParallelConflictError,
    ParallelUnknownError,
    UnknownLayerError,
)
from layerfuse.registry import Registry, default, fresh
from layerfuse.testing import AdapterContract, full_model
from layerfuse.testing.run import results_of


def outcomes(registry, build=None, *, full=False):
    class Mine(AdapterContract):
        model = "my-model"
        decoder_layers = False

        def build(self):
            return contract_mylib.meta_model(kernels=True) if build is None else build()

        def build_small(self):
            return contract_mylib.small()

        def tp_plan(self):
            return {"layers.*.q_b": "colwise", "layers.*.kv_b": "colwise", "layers.*.o": "rowwise"}

        def call(self, model):
            return model(torch.arange(6).reshape(2, 3))

    Mine.registry = registry
    return {result.scenario: result for result in results_of(Mine(), full=full)}


def failed(results):
    return [name for name, result in results.items() if result.outcome == "failed"]


def test_the_right_adapter_passes_every_scenario():
    results = outcomes(registry_of(), full=True)
    assert {name: result.outcome for name, result in results.items()} == {f"C{n}": "passed" for n in range(1, 15)}, (
        "\n".join(str(result) for result in results.values())
    )


# ---- wrong facts: red is exactly what watches for them ---------------------------------------------------------------

WRONG_FACTS = {
    "another attribute": ({"num_heads": "head_groups"}, "C1", "num_heads: declared 4, read 1"),
    "total for local": ({"num_heads": None, "num_local_heads": "n_heads"}, "C10", "num_heads: declared 4, read 8"),
    "a constant epsilon": ({"kv_norm": {"module": "kv_norm", "epsilon": {"const": 1e-06}}}, "C4", "kv_norm.epsilon is the constant 1e-06"),
    "another norm's epsilon": ({"kv_norm": {"module": "kv_norm", "epsilon": "missing_eps"}, "q_norm": "q_norm"}, "C1", "kv_norm.epsilon"),
    "a constant width": ({"v_head_dim": {"const": 6}}, "C4", "v_head_dim is the constant 6 of the adapter"),
    "a default": ({"qk_nope_head_dim": ["qk_nope_head_dim", {"const": 8}]}, "C5", "expected MissingAttributeError"),
    "an epsilon of another norm": ({"kv_norm": {"module": "kv_norm", "width": "weight.shape.0", "epsilon": ["eps", {"const": 1e-05}]}}, "C5", "kv_norm.epsilon"),
    "the wrong side of a weight": ({"tp_weight": "kv_b.in_features"}, "C10", "num_local_heads: declared 2, read 4"),
    "a linear that reads something else": ({"q_norm": {"module": "q_norm", "consumers": ["kv_b"]}}, "C1", ": kv_b: in_features "),
    "a guessed size": ({"tp_weight": None, "tp_size": {"const": 1}}, "C7", "expected ParallelUnknownError"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_FACTS)
def test_wrong_facts_turn_their_scenario_red(name):
    words, scenario, says = WRONG_FACTS[name]
    results = outcomes(registry_of(**words))
    assert scenario in failed(results)
    assert says in results[scenario].reason


def test_a_wrong_epsilon_is_planned_and_not_matched():
    words = {"kv_norm": {"module": "kv_norm", "epsilon": {"const": 2e-6}}}
    result = outcomes(registry_of(**words), full=True)["C14"]
    assert result.outcome == "failed"
    assert "planned for 2 sites, matched at 0" in result.reason


def test_an_outer_layer_without_a_name_is_refused():
    toml = MODELS_TOML + '\nouter = { const = " " }\n'
    result = outcomes(registry_of(toml=toml))["C11"]
    assert (result.outcome, "does not name the outer layer" in result.reason) == ("failed", True)


def test_a_rank_that_is_read_as_the_whole_model_is_named():
    class Mine(AdapterContract):
        model, registry, decoder_layers = "my-model", registry_of(), False

        def build(self):
            return contract_mylib.meta_model(make=contract_mylib.MyShardedAttention)

        def build_sharded(self, size, rank):  # an engine that ignores its ranks
            return self.build()

    results = {result.scenario: result for result in results_of(Mine(), full=False)}
    assert failed(results) == ["C10"]
    assert "num_local_heads: declared 2, read 4" in results["C10"].reason


def test_an_overlooked_layer_is_named():
    def build():
        model = contract_mylib.meta_model()
        model.extra = type("StrangeAttention", (nn.Module,), {"__module__": "elsewhere"})()
        return model

    result = outcomes(registry_of(), build)["C2"]
    assert result.outcome == "failed"
    assert "extra (elsewhere:StrangeAttention)" in result.reason


# ---- wrong registries ------------------------------------------------------------------------------------------------


class Cached(Registry):
    def spec_for(self, layer, of=None, **kwargs):
        known = vars(self).setdefault("known", {})
        if id(layer) not in known:
            known[id(layer)] = super().spec_for(layer, of, **kwargs)
        return known[id(layer)]


class Restless(Registry):
    def spec_for(self, layer, of=None, **kwargs):
        vars(self)["reads"] = vars(self).get("reads", 0) + 1
        return attrs.evolve(super().spec_for(layer, of, **kwargs), softmax_scale=1.0 / self.reads)


class Vague(Registry):
    def spec_for(self, layer, of=None, **kwargs):
        try:
            return super().spec_for(layer, of, **kwargs)
        except MissingAttributeError as error:
            raise AttributeError("something is missing") from error


class Filling(Registry):
    """What an `or` chain does: 0 and None are taken for missing, and filled in."""

    def spec_for(self, layer, of=None, **kwargs):
        usual = vars(self).setdefault("usual", {})
        try:
            spec = super().spec_for(layer, of, **kwargs)
        except LayerfuseError:
            return usual[type(layer)]
        if spec.q_lora_rank is not None:
            usual[type(layer)] = spec
        return usual[type(layer)]


class Guessing(Registry):
    def spec_for(self, layer, of=None, **kwargs):
        try:
            return super().spec_for(layer, of, **kwargs)
        except ParallelUnknownError:
            return super().spec_for(layer, of, **{**kwargs, "parallel": WHOLE})


class Trusting(Registry):
    def spec_for(self, layer, of=None, **kwargs):
        try:
            return super().spec_for(layer, of, **kwargs)
        except ParallelConflictError:
            return super().spec_for(layer, of, **{**kwargs, "parallel": None})


class Exact(Registry):
    def spec_for(self, layer, of=None, **kwargs):
        if type(layer).__module__ != "mylib.attention":
            raise UnknownLayerError(type(layer).__name__, ())
        return super().spec_for(layer, of, **kwargs)


class Lenient(Registry):
    def spec_for(self, layer, of=None, **kwargs):
        try:
            return super().spec_for(layer, of, **kwargs)
        except UnknownLayerError:
            return "whatever"


class Forgetful(Registry):
    """Gives the whole model's specs at every size."""

    def model(self, name):
        entry = super().model(name)

        class Unsharded:
            specs = staticmethod(lambda tp=1, rank=None, *, engine=None: entry.specs(engine=engine))

        return Unsharded()


WRONG_REGISTRIES = {
    Restless: ("C3", "softmax_scale"),
    Cached: ("C4", "stays the same when"),
    Vague: ("C5", "expected MissingAttributeError, got AttributeError"),
    Filling: ("C6", "was read as"),
    Guessing: ("C7", "expected ParallelUnknownError"),
    Trusting: ("C8", "expected ParallelConflictError"),
    Forgetful: ("C9", "num_local_heads: declared 2, read 4"),
    Exact: ("C12", "a subclass of MyAttention is not known"),
    Lenient: ("C13", "expected UnknownLayerError"),
}


@pytest.mark.parametrize("kind", WRONG_REGISTRIES, ids=lambda kind: kind.__name__)
def test_wrong_registries_turn_their_scenario_red(kind):
    scenario, says = WRONG_REGISTRIES[kind]
    result = outcomes(registry_of(kind))[scenario]
    assert result.outcome == "failed"
    assert says in result.reason


class Careless(Registry):
    """Takes a query latent without its norm for none at all."""

    def spec_for(self, layer, of=None, **kwargs):
        usual = vars(self).setdefault("usual", {})
        try:
            spec = super().spec_for(layer, of, **kwargs)
        except MissingAttributeError as error:
            if error.field != "q_norm" or layer.q_lora_rank == 0:  # 0 is refused as it should be
                raise
            return usual[id(layer)]
        usual.setdefault(id(layer), spec)
        return spec


def test_a_model_without_a_query_latent_is_held_to_the_norm_that_comes_with_one():
    entry = attrs.evolve(default.model("deepseek-v2-lite"), num_hidden_layers=2)

    class Lite(AdapterContract):
        model, registry = "deepseek-v2-lite", fresh()

        def build(self):
            return full_model(entry)

    def c6():
        return next(result for result in results_of(Lite(), full=False) if result.scenario == "C6")

    assert c6().outcome == "passed"
    careless = Careless(fill=default._fill or _fill)
    careless.register_models(default.models(), "tests")
    Lite.registry = careless
    assert c6().outcome == "failed"
    assert "with q_lora_rank of 7: expected LayerfuseError, got MLASpec" in c6().reason


def test_every_scenario_has_a_mutant():
    red = {scenario for _, scenario, _ in WRONG_FACTS.values()} | {s for s, _ in WRONG_REGISTRIES.values()}
    assert red | {"C2", "C11", "C14"} == {f"C{n}" for n in range(1, 15)}
