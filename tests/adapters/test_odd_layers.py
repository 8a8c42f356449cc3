"""Layers whose own code fails, or says what means nothing: each is told in the library's words, and shortly."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import fresh_layer
from torch import nn
from vllm_standins import mla

from layerfuse import registry
from layerfuse.adapters import (
    Adapter,
    FactsError,
    LayerfuseError,
    MissingAttributeError,
    Parallel,
    ParallelUnknownError,
    SpecError,
    const,
)
from layerfuse.adapters.errors import cut, said, shown
from layerfuse.adapters.parallel import ranks_summed, shards_of_linear
from layerfuse.adapters.sources import UnreadableError
from layerfuse.adapters.vocabulary import SGLANG_GDN, TRANSFORMERS_MLA


class Unprintable(Exception):
    def __str__(self) -> str:
        raise self

    __repr__ = __str__  # type: ignore[assignment]


class Fails:
    """An attribute for which nothing works."""

    def _fail(self, *_: Any) -> Any:
        raise Unprintable

    __hash__ = __repr__ = __str__ = __eq__ = __index__ = __float__ = __len__ = __getitem__ = __bool__ = _fail  # type: ignore[assignment]
    __class__ = property(_fail)  # type: ignore[assignment]


def alive(value: Any) -> Any:
    """pytest prints its parameters, so that what cannot be printed is made in the test."""
    return Fails() if value is Fails else value


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_dynamically_quantised_projection_says_that_its_weight_is_a_method() -> None:
    layer = fresh_layer("deepseek-v2-lite", "model.layers.0.self_attn")
    quantised = torch.ao.nn.quantized.dynamic.Linear(8, 8)
    layer.kv_b_proj = layer.o_proj = quantised
    with pytest.raises(ParallelUnknownError) as caught:
        registry.spec_for(layer)
    assert caught.value.tried == (
        "the weight of kv_b_proj: its weight is no tensor, but a method",
        "the weight of o_proj: its weight is no tensor, but a method",
    )
    assert registry.spec_for(layer, parallel=Parallel(size=1, rank=0)).num_local_heads == 16


def linear(**held: Any) -> Any:
    return SimpleNamespace(**{"weight": torch.empty(8, 8), "in_features": 8, "out_features": 8, **held})


class Raises(nn.Linear):
    @property
    def out_features(self) -> int:
        raise RuntimeError("not loaded")

    @out_features.setter
    def out_features(self, _: int) -> None:
        pass


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        (linear(weight=None), "its weight is no tensor, but a NoneType"),
        (linear(weight=SimpleNamespace(shape=(8.0, 8))), "its weight is no tensor, but a SimpleNamespace"),
        (linear(out_features=torch.tensor([8, 8])), r"out_features and in_features are .* no whole numbers"),
        (lambda: linear(weight=Fails()), "reading its weight raised|its weight is no tensor, but a Fails"),
        (Raises(8, 8, device="meta"), "reading its weight raised RuntimeError: not loaded"),
        (linear(weight=SimpleNamespace(shape=(4, 8))), "has no attribute 'dtype'"),
    ],
)
def test_a_linear_that_cannot_be_read_is_a_reason(odd: Any, says: str) -> None:
    odd = odd() if callable(odd) and not isinstance(odd, nn.Module) else odd
    with pytest.raises(UnreadableError, match=says):
        shards_of_linear(odd)
    with pytest.raises(UnreadableError, match=says):
        ranks_summed(odd)


def delta_net(**changes: Any) -> Any:
    norm = SimpleNamespace(weight=torch.empty(8), eps=1e-6, activation="silu")
    held = dict.fromkeys(
        ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "conv_kernel_size", "hidden_size"), 8
    )
    made = type("GatedDeltaNet", (SimpleNamespace,), {"__module__": "odd"})
    return made(**{**held, "layer_id": 3, "attn_tp_size": 2, "attn_tp_rank": 1, "norm": norm, **changes})


@pytest.fixture(scope="module")
def odd() -> registry.Registry:
    own = registry.Registry()
    own.register_adapter(Adapter("odd", {"odd:GatedDeltaNet": SGLANG_GDN}))
    return own


@pytest.mark.parametrize("rank", [-1, "1", 1.0, True, [1], torch.tensor([1]), torch.tensor([0, 1]), Fails], ids=type)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("given", [None, 0])
def test_an_odd_rank_is_refused_by_name(odd: registry.Registry, rank: Any, size: int, given: Any) -> None:
    parallel = None if given is None else Parallel(size=size, rank=given)
    with pytest.raises(SpecError, match="rank: expected 0 to "):
        odd.spec_for(delta_net(attn_tp_size=size, attn_tp_rank=alive(rank)), parallel=parallel)


@pytest.mark.parametrize("size", [0, -2, "2", 2.0, True, [2], torch.tensor([2]), Fails, 10**5000, 2**31], ids=type)
def test_an_odd_size_is_refused_by_name(odd: registry.Registry, size: Any) -> None:
    with pytest.raises(SpecError, match="attn_tp_size: expected a tensor-parallel size, got"):
        odd.spec_for(delta_net(attn_tp_size=alive(size)))


@pytest.mark.parametrize("field", ["num_k_heads", "layer_id", "norm", "attn_tp_size"])
def test_an_attribute_for_which_nothing_works_is_refused(odd: registry.Registry, field: str) -> None:
    with pytest.raises(LayerfuseError) as caught:
        odd.spec_for(delta_net(**{field: Fails()}))
    assert 0 < len(str(caught.value)) < 2_000


def test_an_error_without_a_text_is_named(odd: registry.Registry) -> None:
    layer = delta_net()
    del layer.head_k_dim

    def fail(_: Any, name: str) -> Any:
        raise Unprintable

    layer.__class__ = type("GatedDeltaNet", (type(layer),), {"__module__": "odd", "__getattr__": fail})
    with pytest.raises(MissingAttributeError) as caught:
        odd.spec_for(layer)
    assert caught.value.tried == ("head_k_dim: reading 'head_k_dim' raised Unprintable: (its text cannot be read)",)


def test_an_unknown_layer_that_was_never_initialised_is_unknown() -> None:
    class Unmade(nn.Module):
        def __init__(self) -> None:
            pass

    with pytest.raises(LookupError, match=r"no adapter knows the layer class .*Unmade"):
        registry.spec_for(Unmade())


def test_a_class_body_may_say_any_module(odd: registry.Registry) -> None:
    with pytest.raises(LookupError, match="None:GatedDeltaNet"):
        odd.spec_for(type("GatedDeltaNet", (), {"__module__": None})())


# ---- every echo is cut ------------------------------------------------------------------------------------------------

LONG = "x" * 1_000_000


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_id": LONG, "hidden_size": None},
        {"layer_id": 10**5000, "hidden_size": None},
        {"hidden_size": LONG},
        {"hidden_size": 10**5000},
        {"attn_tp_size": LONG},
        {"attn_tp_rank": 10**4 * "9"},
        {LONG: 1, "norm": None},
        {"norm": SimpleNamespace(weight=torch.empty(8), eps=-(10**400), activation=LONG)},
    ],
    ids=lambda changes: cut(",".join(changes), 30),
)
def test_what_a_layer_says_is_cut(odd: registry.Registry, changes: Any) -> None:
    with pytest.raises(LayerfuseError) as caught:
        odd.spec_for(delta_net(**changes))
    assert len(str(caught.value)) < 1_000


def test_a_path_and_a_class_of_any_length_are_cut(odd: registry.Registry) -> None:
    with pytest.raises(SpecError) as caught:
        odd.spec_for(delta_net(hidden_size=0), path=LONG)
    assert len(str(caught.value)) < 1_000
    with pytest.raises(LookupError) as unknown:
        odd.spec_for(type(LONG, (), {"__module__": LONG})())
    assert len(str(unknown.value)) < 1_000


@pytest.mark.parametrize(
    "declare",
    [
        lambda: Adapter(LONG, {}),
        lambda: Adapter("a", {f"{LONG}:A": TRANSFORMERS_MLA}),
        lambda: Adapter("a", {f"a:{LONG}": TRANSFORMERS_MLA}),
        lambda: TRANSFORMERS_MLA.but(**{LONG: "a"}),
        lambda: TRANSFORMERS_MLA.but(num_heads=LONG + "!"),
        lambda: TRANSFORMERS_MLA.but(num_heads=f"{LONG}/{LONG}/a"),
        lambda: TRANSFORMERS_MLA.but(num_heads={LONG: 1}),
        lambda: TRANSFORMERS_MLA.but(num_heads={"path": "a", "as": LONG}),
        lambda: TRANSFORMERS_MLA.but(num_heads=const(10**5000)),
        lambda: TRANSFORMERS_MLA.but(kv_norm={"module": "a", LONG: 1}),
        lambda: TRANSFORMERS_MLA.but(kv_norm=LONG + "!"),
    ],
)
def test_what_an_adapter_says_is_cut(declare: Any) -> None:
    with pytest.raises(FactsError) as caught:
        declare()
    assert len(str(caught.value)) < 1_000


def test_values_of_any_kind_are_shown() -> None:
    assert shown(LONG) == "'" + 76 * "x" + "..."
    assert shown(10**5000) == "int, too long or too broken to print"
    assert shown(Fails()) == "Fails, too long or too broken to print"
    assert said(Unprintable()) == "Unprintable: (its text cannot be read)"
    assert len(said(ValueError(LONG))) < 300


# ---- what is declared, and how the functions are called ---------------------------------------------------------------


def test_several_facts_may_stand_in_a_list() -> None:
    assert Adapter("a", {"a:B": [TRANSFORMERS_MLA]}) == Adapter("a", {"a:B": TRANSFORMERS_MLA})


def test_specs_of_an_engine_that_does_not_exist_are_refused_with_the_closest() -> None:
    entry = registry.model("kimi-k2")
    for ask in (entry.specs, entry.first_of_each_kind):
        with pytest.raises(registry.UnknownEngineError, match="no engine is called 'vlm'; did you mean 'vllm'"):
            ask(engine="vlm")
    assert entry.specs(engine="vllm") == entry.specs()


def test_a_total_beyond_every_number_tells_no_ranks() -> None:
    layer = mla()
    layer.num_heads, layer.num_local_heads = 10**5000, 1
    with pytest.raises(
        ParallelUnknownError, match=r"num_heads / num_local_heads: int, too long .* no whole number of ranks"
    ) as caught:
        registry.spec_for(layer)
    assert len(repr(caught.value)) < 1_000
