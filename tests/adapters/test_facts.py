"""Facts and adapters: what they say of a layer class, and what they refuse when they are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from layerfuse import registry
from layerfuse.adapters.base import Adapter, Facts, fields_of, words_of
from layerfuse.adapters.errors import FactsError
from layerfuse.adapters.sources import const, gated_norm, norm
from layerfuse.adapters.specs import FAMILIES, GatedDeltaNetSpec, MLASpec, NormSpec
from layerfuse.adapters.vocabulary import TRANSFORMERS_GDN, TRANSFORMERS_GQA, TRANSFORMERS_KDA, TRANSFORMERS_MLA


def test_facts_must_say_where_every_field_is() -> None:
    with pytest.raises(FactsError) as caught:
        TRANSFORMERS_MLA.but(kv_lora_rank=None, softmax_scale=None)
    assert str(caught.value) == (
        "MLASpec: nothing says where to read kv_lora_rank, softmax_scale; no geometry has a default"
    )


def test_one_of_a_pair_of_counts_is_enough_and_none_is_not() -> None:
    local = TRANSFORMERS_MLA.but(num_heads=None, num_local_heads="num_heads")
    assert "num_heads" not in local.words
    with pytest.raises(FactsError, match="nothing says where to read num_heads, num_local_heads"):
        TRANSFORMERS_MLA.but(num_heads=None)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unknown_field_is_refused_with_the_closest(family: str) -> None:
    spec = FAMILIES[family]
    name = next(iter(fields_of(spec)))
    with pytest.raises(FactsError) as caught:
        Facts(spec, {name + "x": "a"})
    assert str(caught.value) == f"{spec.__name__} has no field {name + 'x'!r}; did you mean {name!r}?"


def test_facts_of_no_spec_type_are_refused() -> None:
    with pytest.raises(FactsError, match="is no spec type; expected one of MLASpec, GatedDeltaNetSpec"):
        Facts(NormSpec, {})


def test_the_words_of_facts_cannot_be_changed_afterwards() -> None:
    words = dict(TRANSFORMERS_MLA.words)
    facts = Facts(MLASpec, words)
    words["num_heads"] = "n_heads"
    assert facts.words["num_heads"] == "num_heads"
    with pytest.raises(TypeError):
        facts.words["num_heads"] = "n_heads"  # type: ignore[index]


def test_but_says_only_the_difference() -> None:
    facts = TRANSFORMERS_MLA.but(num_heads="n_heads", tp_weight=None, tp_size="tp_size")
    assert facts.words == {
        **{name: word for name, word in TRANSFORMERS_MLA.words.items() if name != "tp_weight"},
        "num_heads": "n_heads",
        "tp_size": "tp_size",
    }
    assert facts != TRANSFORMERS_MLA == TRANSFORMERS_MLA.but()
    assert hash(TRANSFORMERS_MLA) == hash(TRANSFORMERS_MLA.but())


REFUSED = [
    line
    for line in (Path(__file__).parent / "refused_words.txt").read_text(encoding="utf-8").splitlines()
    if line[:1] not in ("", "#")
]
"""Words of a field, then how the error begins."""
BASES = (
    TRANSFORMERS_MLA,
    TRANSFORMERS_GDN,
    TRANSFORMERS_GQA,
    registry.adapters()["layer_norm_decoders"].layers["transformers:CohereDecoderLayer"][0],
)


@pytest.mark.parametrize(("words", "problem"), [*zip(REFUSED[::2], REFUSED[1::2], strict=True)])
def test_words_that_mean_nothing_are_refused_with_the_field(words: str, problem: str) -> None:
    name, _, said = words.partition(" = ")
    facts = next(base for base in BASES if name in words_of(base.spec))
    with pytest.raises(FactsError) as caught:
        facts.but(**{name: json.loads(said)})
    assert str(caught.value).startswith(problem.removeprefix("! "))


@pytest.mark.parametrize("key", ["DeepseekV3Attention", "a:", ":B", "a:b:c", "a b:C", "a.:C", ".a:C", "a/b:C", 7, ""])
def test_a_layer_class_is_a_package_and_a_name(key: Any) -> None:
    with pytest.raises(FactsError, match='is no layer class; expected "package:ClassName"'):
        Adapter("mine", {key: TRANSFORMERS_MLA})


@pytest.mark.parametrize("name", ["", "Mine", "my adapter", "_mine", 7])
def test_an_adapter_has_a_plain_name(name: Any) -> None:
    with pytest.raises(FactsError, match="an adapter's name is lower-case"):
        Adapter(name, {})


def test_facts_of_one_class_are_of_different_spec_types() -> None:
    both = Adapter("mine", {"a:B": (TRANSFORMERS_MLA, TRANSFORMERS_KDA)})
    assert [facts.spec for facts in both.layers["a:B"]] == [MLASpec, GatedDeltaNetSpec]
    for wrong in ((), (TRANSFORMERS_MLA, TRANSFORMERS_MLA.but(num_heads="n"))):
        with pytest.raises(FactsError, match="a:B: expected facts for one or more different spec types"):
            Adapter("mine", {"a:B": wrong})


def test_a_gated_norm_says_its_order_unless_told() -> None:
    assert gated_norm("o_norm", activation=const("silu")) == {
        "module": "o_norm",
        "activation": {"const": "silu"},
        "norm_before_gate": {"const": True},
        "group_size": {"const": "none"},
    }
    assert norm("n", epsilon="eps") == {"module": "n", "epsilon": "eps"}
