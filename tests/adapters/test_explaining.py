"""Where each field of a spec was read: every field is told, and the path that is told holds the value."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from helpers import real_model

from layerfuse import registry, tensor_parallel
from layerfuse.adapters import Adapter, MissingAttributeError, Parallel, ResidualSpec, UnknownLayerError

MODELS = ("deepseek-v3", "kimi-linear-48b-a3b", "gpt-oss-20b", "qwen3-next-80b-a3b", "longcat-flash")


def layers(name: str) -> list[tuple[str, Any, Any]]:
    """One layer of each class of a model, with its path and spec."""
    model = real_model(name)
    found = {type(model.get_submodule(path)): (path, spec) for path, spec in reversed(registry.specs_in(model))}
    return [(path, model.get_submodule(path), spec) for path, spec in found.values()]


@pytest.mark.parametrize("name", MODELS)
def test_every_field_of_the_facts_is_told(name: str) -> None:
    for path, layer, spec in layers(name):
        found = registry.explain(layer, type(spec), path=path)
        assert found.spec == spec
        told = {place.partition(".")[0] for place in found.places}
        spoken = set(registry.default.readers_for(type(layer))[0].facts.words)
        read = {a.name for a in attrs.fields(type(spec))} & spoken
        assert read <= told, (path, read - told)
        halves = {half for pair in type(spec).pairs for half in (pair.total, pair.local)}
        assert halves <= told and "parallel.size" in found.places
        defaults = {each.name: each.default for each in attrs.fields(type(spec))}
        assert told | {*found.unsaid} == {*defaults}
        assert all(getattr(found.spec, each) == defaults[each] for each in found.unsaid)
        assert ("without a place, as by default: " in str(found)) == bool(found.unsaid)


def test_each_field_of_a_mixture_is_told_with_its_own_place() -> None:
    _, layer, spec = next(
        each for each in layers("qwen3-next-80b-a3b") if isinstance(each[2], ResidualSpec) and each[2].experts
    )
    places = registry.explain(layer, type(spec)).places
    told = {field.partition(".")[2]: place for field, place in places.items() if field.startswith("experts.")}
    assert told["num_experts"] == "mlp.gate.weight.shape.0" and told["experts_per_token"] == "mlp.gate.top_k"
    assert told["shared"] == "mlp.shared_expert" and told["weight"] == "mlp.experts"


@pytest.mark.parametrize("name", MODELS)
def test_a_plain_path_that_is_told_holds_the_value(name: str) -> None:
    checked = 0
    for path, layer, spec in layers(name):
        for field, place in registry.explain(layer, type(spec), path=path).places.items():
            value: Any = spec
            for step in field.split("."):
                value = None if isinstance(value, tuple) else getattr(value, step)
            held: Any = layer
            if type(value) is not int or not place.replace(".", "").replace("_", "").isalnum():
                continue
            for step in place.split("."):
                held = held[int(step)] if step.isdigit() else getattr(held, step)
            assert held == value, (path, field, place)
            checked += 1
    assert checked > 8


def attention(**changes: Any) -> Any:
    norm = SimpleNamespace(weight=SimpleNamespace(shape=(512,)), variance_epsilon=1e-6)
    held = {"num_heads": 8, "num_local_heads": 4, "hidden_size": 64, "layer_id": 1, "scaling": 0.1, "q_lora_rank": None}
    held |= {"kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
    held |= {"kv_a_layernorm": norm, "rotary_emb": None}
    cls = type("DeepseekV2AttentionMLA", (SimpleNamespace,), {"__module__": "sglang.srt.models.deepseek_v2"})
    return cls(**{**held, **changes})


def test_what_is_printed_says_field_value_and_place() -> None:
    lines = str(registry.explain(attention())).splitlines()
    assert lines[0] == "MLASpec of sglang:DeepseekV2AttentionMLA, by deepseek_v3"
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in lines[1:]}
    assert rows["num_local_heads"] == ["4", "num_local_heads"]
    assert rows["kv_norm.epsilon"] == ["1e-06", "kv_a_layernorm.variance_epsilon"]
    assert rows["q_norm"] == ["None", "q_lora_rank is None"]
    assert rows["parallel.size"] == ["2", "num_heads / num_local_heads"]
    # Places stand under each other, two columns behind the longest value.
    starts = {len(line) - len(rows[line.split()[0]][1]) for line in lines[1:]}
    assert starts == {6 + max(map(len, rows)) + max(len(value) for value, _ in rows.values())}


def test_the_place_is_the_one_that_answered_and_not_the_first_that_was_asked() -> None:
    (facts,) = registry.default.readers_for(type(attention()))
    own = registry.Registry()
    own.register_adapter(
        Adapter("mine", {"sglang:DeepseekV2AttentionMLA": facts.facts.but(num_heads=["heads", "num_heads"])})
    )
    assert own.explain(attention()).places["num_heads"] == "num_heads"
    assert own.explain(attention(heads=8)).places["num_heads"] == "heads"


def test_a_sharding_that_the_layer_does_not_say_is_told_to_be_the_caller_s() -> None:
    whole = registry.default.readers_for(type(attention()))[0].facts.but(
        num_local_heads=None, tp_size=None, tp_rank=None
    )
    own = registry.Registry()
    own.register_adapter(Adapter("mine", {"sglang:DeepseekV2AttentionMLA": whole.but(tp_weight=None)}))
    given = own.explain(attention(), parallel=Parallel(size=2, rank=1)).places
    assert (given["parallel.size"], given["parallel.rank"]) == ("the parallel argument",) * 2
    assert given["num_local_heads"] == "num_heads and parallel.size"
    with tensor_parallel(4, 3):
        assert own.explain(attention()).places["parallel.size"] == "tensor_parallel() around the call"


def test_errors_are_those_of_a_reading() -> None:
    layer = attention()
    del layer.kv_lora_rank
    with pytest.raises(MissingAttributeError, match="kv_lora_rank"):
        registry.explain(layer)
    with pytest.raises(UnknownLayerError):
        registry.explain(SimpleNamespace())
