"""Arguments of another type, in every public function: an error of this library that names what was given, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from layerfuse import LayerfuseError, adapters, bench, fusion, registry, tensor_parallel, testing
from layerfuse.adapters import DEEPSEEK_V3, Adapter, Facts, GatedDeltaNetSpec, MLASpec, NormSpec, Parallel, const
from layerfuse.fusion import metadata
from layerfuse.fusion.backends import force
from layerfuse.fusion.chain import Fusion, Norm
from layerfuse.fusion.sites import FINAL
from layerfuse.registry import files
from layerfuse.registry.inspect import inspect

MOST_LETTERS = 2_000
"""Of one message."""


class Broken:
    """Its text, its hash and its equality raise."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    __str__ = __repr__
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no equality")


NOTHING: dict[str, Any] = {"None": None}
TEXTS: dict[str, Any] = {"text": "abc", "empty": "", "long": "x" * 100_000}
COUNTS: dict[str, Any] = {"count": 7}
OTHER_NUMBERS: dict[str, Any] = {"zero": 0, "negative": -1, "huge": 10**400}
FLAGS: dict[str, Any] = {"True": True, "False": False}
ODD: dict[str, Any] = {
    "numpy's count": np.int64(8), "numpy's flag": np.True_, "tensor of one": torch.tensor(8), "tensor": torch.zeros(2),
    "float": 1.5, "nan": math.nan, "bytes": b"x", "class": int, "object": object(), "broken": Broken(),
    "set": {1}, "list of texts": ["a"], "list of None": [None], "dict": {"a": 1}, "tuple": (1, 2),
}  # fmt: skip
NO_TEXT = {**NOTHING, **COUNTS, **OTHER_NUMBERS, **FLAGS, **ODD}
NO_COUNT = {**NOTHING, **TEXTS, **OTHER_NUMBERS, **FLAGS, **ODD}
NO_FLAG = {**NOTHING, **TEXTS, **COUNTS, **OTHER_NUMBERS, **ODD}
NONE_OF_THEM = {**NOTHING, **TEXTS, **COUNTS, **OTHER_NUMBERS, **FLAGS, **ODD}


def but(wrong: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in wrong.items() if name not in names}


TARGET = fusion.Target.named("gfx950")
ENTRY = registry.model("kimi-k2.5")
SPECS = ENTRY.specs(tp=8, rank=3)
MLA: Any = SPECS[1][1]
DELTA: Any = next(s for _, s in registry.model("kimi-linear-48b-a3b").specs() if isinstance(s, GatedDeltaNetSpec))
PLAN = fusion.plan(SPECS, TARGET)
BUFFERS = metadata.plan_metadata(MLA, TARGET, batch=2)
FACTS = DEEPSEEK_V3.layers["transformers:DeepseekV3Attention"][0]
MODULE = torch.nn.Linear(2, 2)
DENSE = registry.model("qwen3-4b")


def entered(size: Any, rank: Any) -> None:
    with tensor_parallel(size, rank):
        pass


def declared(**changes: Any) -> Any:
    return Fusion(**{"name": "mine", "doc": "one op", "level": 1, "roles": (FINAL,), "chain": (Norm,), **changes})


def measure(**changes: Any) -> Any:
    usual = {"fusion": "mla_dual_rms_norm", "tokens": [1], "peers": ["layerfuse (reference)"], "device": "cpu"}
    return bench.run(**{**usual, **changes})


def planned(**changes: Any) -> Any:
    return metadata.plan_metadata(**{"spec": MLA, "target": TARGET, "batch": 4, **changes})


CALLS: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "spec_for": (registry.spec_for, NONE_OF_THEM),
    "spec_for of": (lambda v: registry.spec_for(MODULE, v), NONE_OF_THEM),
    "spec_for of, where the class is known": (lambda v: registry.spec_for(layer(), v), NONE_OF_THEM),
    "spec_for parallel": (lambda v: registry.spec_for(MODULE, parallel=v), NONE_OF_THEM),
    "spec_for path": (lambda v: registry.spec_for(MODULE, path=v), but(NO_TEXT, "None")),
    "explain": (registry.explain, NONE_OF_THEM),
    "explain of": (lambda v: registry.explain(MODULE, v), NONE_OF_THEM),
    "explain parallel": (lambda v: registry.explain(MODULE, parallel=v), NONE_OF_THEM),
    "specs_in": (registry.specs_in, NONE_OF_THEM),
    "specs_in of": (lambda v: registry.specs_in(MODULE, of=v), but(NONE_OF_THEM, "None", "class")),
    "unknown_in": (registry.unknown_in, NONE_OF_THEM),
    "adapter_for": (registry.adapter_for, NONE_OF_THEM),
    "readers_for": (registry.default.readers_for, but(NONE_OF_THEM, "class")),
    "model": (registry.model, NONE_OF_THEM),
    "register_adapter": (registry.register_adapter, NONE_OF_THEM),
    "register_adapter source": (lambda v: registry.default.register_adapter(DEEPSEEK_V3, v), NO_TEXT),
    "register_adapters": (lambda v: registry.default.register_adapters(v, "me"), NONE_OF_THEM),
    "register_model": (registry.register_model, NONE_OF_THEM),
    "register_models": (lambda v: registry.default.register_models(v, "me"), NONE_OF_THEM),
    "register_models entry": (lambda v: registry.default.register_models({"a": v}, "me"), NONE_OF_THEM),
    "register_models name": (lambda v: registry.default.register_models({v: ENTRY}, "me"), TEXTS),
    "Registry": (lambda v: registry.Registry(fill=v), but(NONE_OF_THEM, "None", "class")),
    "on_miss": (lambda v: registry.Registry().on_miss(v), but(NONE_OF_THEM, "class")),
    "load": (registry.load, NONE_OF_THEM),
    "files.parse": (files.parse, but(NONE_OF_THEM, "empty")),
    "files.structure": (lambda v: files.structure(v, "f"), NONE_OF_THEM),
    "inspect": (lambda v: inspect(v, registry=registry.default), NONE_OF_THEM),
    "tensor_parallel": (lambda v: entered(v, 0), NO_COUNT),
    "tensor_parallel rank": (lambda v: entered(8, v), but(NO_COUNT, "None", "zero")),
    "Parallel": (lambda v: Parallel(size=v, rank=0), NO_COUNT),
    "entry.specs tp": (lambda v: ENTRY.specs(tp=v), {**NO_COUNT, **COUNTS}),
    "entry.specs engine": (lambda v: ENTRY.specs(engine=v), but(NONE_OF_THEM, "None")),
    "entry.refusal": (lambda v: ENTRY.refusal(8, v), but(NONE_OF_THEM, "None")),
    "spec.shard": (lambda v: DELTA.shard(v), NO_COUNT),
    "MLASpec": (lambda v: attrs.evolve(MLA, hidden_size=v), NO_COUNT),
    "NormSpec": (lambda v: NormSpec(width=8, epsilon=v), but(NONE_OF_THEM, "count", "float")),
    "ResidualSpec": (lambda v: attrs.evolve(SPECS[0][1], input_norms=v), NONE_OF_THEM),
    "Adapter": (lambda v: Adapter(v, {}), but(NONE_OF_THEM, "text")),
    "Adapter layers": (lambda v: Adapter("x", v), NONE_OF_THEM),
    "Adapter facts": (lambda v: Adapter("x", {"a:B": v}), NONE_OF_THEM),
    "Adapter ignored": (lambda v: Adapter("x", {}, v), NONE_OF_THEM),
    "Facts": (lambda v: Facts(v, FACTS.words), NONE_OF_THEM),
    "Facts words": (lambda v: Facts(MLASpec, v), NONE_OF_THEM),
    "Facts constant": (lambda v: FACTS.but(num_heads=const(v)), NO_COUNT),
    "Facts norm": (lambda v: FACTS.but(kv_norm=[v]), NONE_OF_THEM),
    "plan specs": (lambda v: fusion.plan(v, TARGET), NONE_OF_THEM),
    "plan spec": (lambda v: fusion.plan([v], TARGET), NONE_OF_THEM),
    "plan target": (lambda v: fusion.plan(SPECS, v), NONE_OF_THEM),
    "plan config": (lambda v: fusion.plan(SPECS, TARGET, v), but(NONE_OF_THEM, "None")),
    "plan engine": (lambda v: fusion.plan(SPECS, TARGET, engine=v), but(NONE_OF_THEM, "None")),
    "Plan.expected": (PLAN.expected, but(NONE_OF_THEM, "None")),
    "Plan.at": (PLAN.at, NONE_OF_THEM),
    "Plan.of": (PLAN.of, NONE_OF_THEM),
    "Plan.expects": (lambda v: PLAN.expects(v, 1), NONE_OF_THEM),
    "Plan.expects tokens": (lambda v: PLAN.expects("x", v), but(NO_COUNT, *OTHER_NUMBERS)),
    "Target.named": (fusion.Target.named, NONE_OF_THEM),
    "Target": (lambda v: fusion.Target(arch=v, vendor="amd"), but(NONE_OF_THEM, "text")),
    "Target vendor": (lambda v: fusion.Target(arch="gfx950", vendor=v), {**NONE_OF_THEM, "misspelt": "nvida"}),
    "Target fp8": (lambda v: fusion.Target(arch="gfx950", vendor="amd", fp8=v), but(NONE_OF_THEM, "None")),
    "Engine": (lambda v: fusion.Engine(name=v), but(NONE_OF_THEM, "text")),
    "Engine experts": (lambda v: fusion.Engine(name="x", experts=v), but(NO_TEXT, "None")),
    "Engine uncompiled": (lambda v: fusion.Engine(name="x", uncompiled=v), but(NO_TEXT, "None")),
    **{
        f"Engine {said}": (
            lambda v, said=said: fusion.Engine(name="x", **{said: v}),
            {**NONE_OF_THEM, "of nothing": {"foo": "x"}, "misspelt": {"add_rms_nrm": "x"}},
        )
        for said in ("refuses", "does", "keeps")
    },
    "Pipeline": (fusion.Pipeline, NONE_OF_THEM),
    "FusionConfig": (lambda v: fusion.FusionConfig(level=v), but(NONE_OF_THEM, "zero", "None")),
    "FusionConfig switches": (lambda v: fusion.FusionConfig(switches=v), NONE_OF_THEM),
    "FusionConfig switch": (lambda v: fusion.FusionConfig(switches={"add_rms_norm": v}), NO_FLAG),
    "FusionConfig quant": (lambda v: fusion.FusionConfig(quant=v), but(NONE_OF_THEM, "None")),
    "FusionConfig strict": (lambda v: fusion.FusionConfig(strict=v), NO_FLAG),
    "FusionConfig origin": (lambda v: fusion.FusionConfig(origin=v), NO_TEXT),
    "FusionConfig only": (lambda v: fusion.FusionConfig(only=v), but(NONE_OF_THEM, "None")),
    "Fusion chain": (lambda v: declared(chain=v), {**NONE_OF_THEM, "a step's class": Norm, "a step": Norm()}),
    "Fusion roles": (lambda v: declared(roles=v), NONE_OF_THEM),
    "Fusion role": (lambda v: declared(roles=(v,)), NONE_OF_THEM),
    "Fusion backends": (lambda v: declared(backends=v), NONE_OF_THEM),
    "Fusion limit": (lambda v: declared(limit=v), but(NONE_OF_THEM, "None", "class")),
    "ActivationQuant": (lambda v: fusion.ActivationQuant(group_size=v), but(NONE_OF_THEM, "None")),
    "ActivationQuant flag": (lambda v: fusion.ActivationQuant(use_ue8m0=v), NO_FLAG),
    "ActivationQuant.parse": (fusion.ActivationQuant.parse, but(NONE_OF_THEM, "text")),
    "FusionConfig quant, parsed": (lambda v: fusion.FusionConfig(quant=fusion.ActivationQuant.parse(v)), NONE_OF_THEM),
    "compile": (fusion.compile, NONE_OF_THEM),
    "compile specs": (lambda v: fusion.compile(MODULE, specs=v, target=TARGET), but(NONE_OF_THEM, "None")),
    "compile config": (lambda v: fusion.compile(MODULE, specs=SPECS, config=v), but(NONE_OF_THEM, "None")),
    "compile registry": (lambda v: fusion.compile(MODULE, registry=v), but(NONE_OF_THEM, "None")),
    "compile registry, specs given": (
        lambda v: fusion.compile(MODULE, specs=SPECS, registry=v),
        but(NONE_OF_THEM, "None"),
    ),
    "compile target": (lambda v: fusion.compile(MODULE, specs=SPECS, target=v), but(NONE_OF_THEM, "None")),
    "compile engine": (lambda v: fusion.compile(MODULE, specs=SPECS, engine=v), but(NONE_OF_THEM, "None")),
    "compile parallel": (lambda v: fusion.compile(MODULE, parallel=v), NONE_OF_THEM),
    "compile strict": (lambda v: fusion.compile(MODULE, specs=SPECS, strict=v), NO_FLAG),
    "keep_recurrences": (fusion.keep_recurrences, NONE_OF_THEM),
    "force": (force, but(NONE_OF_THEM, "None")),
    "plan_heads spec": (lambda v: metadata.plan_heads(v, TARGET), NONE_OF_THEM),
    "plan_heads target": (lambda v: metadata.plan_heads(MLA, v), NONE_OF_THEM),
    "plan_heads release": (lambda v: metadata.plan_heads(MLA, TARGET, v), but(NONE_OF_THEM, "None")),
    "plan_heads q_dtype": (lambda v: metadata.plan_heads(MLA, TARGET, q_dtype=v), NONE_OF_THEM),
    "plan_heads dcp": (lambda v: metadata.plan_heads(MLA, TARGET, dcp=v), NO_COUNT),
    "plan_heads sparse": (lambda v: metadata.plan_heads(MLA, TARGET, sparse=v), NO_FLAG),
    "plan_metadata batch": (lambda v: planned(batch=v), NO_COUNT),
    "plan_metadata page_size": (lambda v: planned(page_size=v), {**NO_COUNT, **COUNTS}),
    "plan_metadata topk": (lambda v: planned(topk=v), but(NO_COUNT, "zero", "negative")),
    "plan_metadata cu_count": (lambda v: planned(cu_count=v), but(NO_COUNT, "None")),
    "plan_metadata splits": (lambda v: planned(max_split_per_batch=v), but(NO_COUNT, "zero", "negative")),
    "plan_metadata fast": (lambda v: planned(fast=v), NO_FLAG),
    "plan_metadata build": (lambda v: planned(build=v), but(NONE_OF_THEM, "None")),
    "plan_state": (metadata.plan_state, NONE_OF_THEM),
    "plan_state batch": (lambda v: metadata.plan_state(DELTA, batch=v), NO_COUNT),
    "plan_state speculated": (lambda v: metadata.plan_state(DELTA, speculated=v), but(NO_COUNT, "zero")),
    "plan_state dtype": (lambda v: metadata.plan_state(DELTA, conv_dtype=v), NONE_OF_THEM),
    "group_layers": (metadata.group_layers, NONE_OF_THEM),
    "group_layers model": (lambda v: metadata.group_layers({"a": v}), NONE_OF_THEM),
    "group_layers groups": (lambda v: metadata.group_layers(SPECS, groups=v), but(NONE_OF_THEM, "None")),
    "group_layers group": (lambda v: metadata.group_layers(SPECS, groups={"a": v}), NONE_OF_THEM),
    "allocate": (lambda v: metadata.allocate(v, "cpu"), NONE_OF_THEM),
    "allocate device": (lambda v: metadata.allocate(BUFFERS, v), but(NONE_OF_THEM, "count", "zero", "numpy's count")),
    "allocate reuse": (lambda v: metadata.allocate(BUFFERS, "cpu", v), but(NONE_OF_THEM, "None")),
    "byte_text": (metadata.byte_text, but(NO_COUNT, *OTHER_NUMBERS)),
    "bench fusion": (lambda v: measure(fusion=v), NONE_OF_THEM),
    "bench model": (lambda v: measure(model=v), but(NONE_OF_THEM, "None")),
    "bench widths": (lambda v: measure(widths=v), but(NONE_OF_THEM, "None", "tuple")),
    "bench tokens": (lambda v: measure(tokens=v), but(NONE_OF_THEM, "None", "tuple")),
    "bench peers": (lambda v: measure(peers=v), but(NONE_OF_THEM, "None")),
    "bench quick": (lambda v: measure(quick=v), NO_FLAG),
    "bench device": (lambda v: measure(device=v), but(NONE_OF_THEM, "None")),
    "bench ranks": (lambda v: measure(ranks=v), but(NONE_OF_THEM, "None")),
    "bench registry": (lambda v: measure(registry=v), but(NONE_OF_THEM, "None")),
    "bench rounds": (lambda v: measure(rounds=v), but(NO_COUNT, "None")),
    "bench step": (lambda v: measure(step=v), but(NONE_OF_THEM, "class")),
    "bench dtype": (lambda v: measure(dtype=v), NONE_OF_THEM),
    "bench heads": (lambda v: measure(heads=v), but(NONE_OF_THEM, "None")),
    "bench option": (lambda v: measure(hedas=v), NONE_OF_THEM),
    "bench.write": (lambda v: bench.write(v, "."), NONE_OF_THEM),
    "bench.markdown": (bench.markdown, NONE_OF_THEM),
    "bench.register": (bench.register, NONE_OF_THEM),
    "bench.unregister": (bench.unregister, NO_TEXT),
    "bench.Ranks": (lambda v: bench.Ranks(v, "cpu"), but(NO_COUNT, "None")),
    "bench.Ranks device": (lambda v: bench.Ranks(2, v), but(NONE_OF_THEM, "None", "empty")),
    "full_model": (testing.full_model, NONE_OF_THEM),
    "config_of": (testing.config_of, NONE_OF_THEM),
    "why_not": (testing.why_not, NONE_OF_THEM),
    "small_entry layers": (lambda v: testing.small_entry(ENTRY, layers=v), but(NO_COUNT, "tuple")),
    "small_entry layer": (lambda v: testing.small_entry(ENTRY, layers=[v]), but(NO_COUNT, "zero")),
    "small_entry heads": (lambda v: testing.small_entry(ENTRY, heads=v), NO_COUNT),
    "small_entry hidden_size": (lambda v: testing.small_entry(ENTRY, hidden_size=v), NO_COUNT),
    "small_model": (testing.small_model, NONE_OF_THEM),
    "small_model layer": (
        lambda v: testing.small_model(DENSE, layers=[v]),
        {**but(NO_COUNT, "zero"), "99": 99, "-1": -1},
    ),
    "small_model heads": (lambda v: testing.small_model(DENSE, heads=v), NO_COUNT),
    "small_model dtype": (
        lambda v: testing.small_model(DENSE, dtype=v),
        {**but(NONE_OF_THEM, "None"), "name": "bfloat16", "count": torch.int64, "fp8": torch.float8_e4m3fn},
    ),
    "small_model seed": (lambda v: testing.small_model(DENSE, seed=v), but(NO_COUNT, "zero")),
    "run_contract": (testing.run_contract, NONE_OF_THEM),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_argument_is_refused_in_this_librarys_words(call: str) -> None:
    function, wrong = CALLS[call]
    for name, value in wrong.items():
        try:
            answer = function(value)
        except LayerfuseError as refused:
            assert 0 < len(str(refused)) <= MOST_LETTERS, f"{call}, {name}: {len(str(refused))} letters"
        except Exception as foreign:
            pytest.fail(f"{call}, {name}: {type(foreign).__name__}: {foreign}")
        else:
            pytest.fail(f"{call}, {name}: accepted, and gives {adapters.errors.shown(answer)}")


LONG = "x" * 100_000


def layer(name: str = "DeepseekV3Attention", module: str = "transformers.x") -> Any:
    return type(name, (), {"__module__": module})()


def holding(path: str, inner: Any) -> Any:
    return type("Model", (), {"named_modules": lambda _: [(path, inner)]})()


def adding(source: str, *names: str) -> None:
    own = registry.Registry()
    for name in names:
        own.register_adapter(Adapter("mine", {f"mine:{name}": FACTS}), source)


NAMES: dict[str, Callable[[], Any]] = {
    "a class": lambda: registry.spec_for(layer(LONG)),
    "a module": lambda: registry.spec_for(layer("MLAAttention", LONG)),
    "a path": lambda: registry.spec_for(layer(), path=LONG),
    "a path in a model": lambda: registry.specs_in(holding(LONG, layer())),
    "an unknown layer's path": lambda: registry.specs_in(holding(LONG, layer("MyAttention", "mine"))),
    "an owner": lambda: adding(LONG, "One", "Two"),
    "an adapter": lambda: registry.register_model(attrs.evolve(ENTRY, name="mine", aliases=[], adapter=LONG)),
    "a file": lambda: inspect({}, registry=registry.default, file=LONG),
    "layers of a group": lambda: metadata.group_layers(
        [(LONG, MLA), ("y", ENTRY.specs()[1][1])], groups={"g": [LONG, "y"]}
    ),
    "a site": lambda: fusion.plan([(LONG, MLA), (LONG, MLA)], TARGET),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_long_name_is_cut_in_the_message(name: str) -> None:
    with pytest.raises(LayerfuseError) as refused:
        NAMES[name]()
    assert "xxx" in str(refused.value)
    assert len(str(refused.value)) <= MOST_LETTERS


def test_of_many_sites_with_one_reason_the_first_is_named() -> None:
    """Reasons that name nodes of graphs differ in their numbers. The error holds all sites."""
    missed = {
        f"layers.{i}:input": f"mul_{i} has epsilon 1e-06; the spec says {'1e-05' if i else '0.1'}" for i in range(61)
    }
    error = fusion.FusionMissedError(
        {"add_rms_norm": missed}, {f"layers.{i}.attn": "mine:Attention" for i in range(61)}
    )
    assert str(error).splitlines()[:5] == [
        "add_rms_norm was expected and did not happen at 61 sites:",
        "  - layers.0:input: mul_0 has epsilon 1e-06; the spec says 0.1",
        "  - layers.1:input and 59 more: mul_1 has epsilon 1e-06; the spec says 1e-05",
        "No adapter knows the class of these layers, so nothing can be planned for them:",
        "  - layers.0.attn and 60 more: mine:Attention",
    ]
    assert error.missed == {"add_rms_norm": missed} and len(error.unknown) == 61
