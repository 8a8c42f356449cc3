"""The words that adapters and models.toml share: what they mean, and what they refuse when they are written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerfuse.adapters.conversions import CONVERSIONS
from layerfuse.adapters.errors import FactsError, UnreadableError
from layerfuse.adapters.sources import (
    Path,
    Quotient,
    below,
    const,
    parse_norm,
    parse_path,
    parse_source,
)


def read(words: Any, obj: Any) -> Any:
    """The value of the first place that can be read."""
    tried = []
    for source in parse_source(words, "field"):
        try:
            return source.read(obj)
        except UnreadableError as error:
            tried.append(str(error))
    raise UnreadableError(*tried)


def layer(**attributes: Any) -> SimpleNamespace:
    return SimpleNamespace(**attributes)


# ---- paths


@pytest.mark.parametrize(
    "text", ["num_heads", "a.b.c", "weight.shape.0", "_private", "layers.12.attn", "layers.-1.attn", "a_1.b2"]
)
def test_a_path_is_names_and_indices_joined_by_dots(text: str) -> None:
    path = parse_path(text, "field")
    assert isinstance(path, Path) and str(path) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a b",
        *[".", "a.", ".a", "a..b", "a[0]", "a()", "a;b", "é", "1.2.34567", "-2", "a.-0", "a.-12", "lambda:0", "a\x00"],
        ".".join("a" * 13),
    ],
)
def test_what_is_no_path_is_refused_with_the_field(text: str) -> None:
    with pytest.raises(FactsError, match=r"num_heads: .* is no attribute path"):
        parse_path(text, "num_heads")


@given(st.text(max_size=40))
def test_any_text_is_a_path_or_a_facts_error(text: str) -> None:
    try:
        path = parse_path(text, "field")
    except FactsError:
        return
    steps = (path.dividend, path.divisor) if isinstance(path, Quotient) else (path,)
    assert all(not step.startswith("__") for part in steps for step in part.steps)
    with pytest.raises(UnreadableError):
        path.read(object())


def test_a_step_is_an_attribute_a_key_or_an_index() -> None:
    obj = layer(config={"heads": [4, 8]}, weight=layer(shape=(16, 32)))
    assert read("config.heads.1", obj) == 8
    assert read("weight.shape.0", obj) == 16


def test_reading_calls_nothing() -> None:
    called = []
    obj = layer(
        forward=lambda: called.append("forward"), config=type("C", (), {"heads": lambda self: called.append(1)})()
    )
    assert callable(read("forward", obj)) and callable(read("config.heads", obj))
    assert called == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("heads", "heads: SimpleNamespace has no 'heads'"),
        ("q.weight", "q.weight: q is None"),
        ("p.q.weight", "p.q.weight: p.q is None"),
        ("names.7", "names.7: list has no '7'"),
        ("table.x", "table.x: dict has no 'x'"),
        ("broken.heads", "broken.heads: reading 'heads' raised RuntimeError: not yet loaded"),
        ("wide / zero", "wide / zero: 12 / 0 is no whole number"),
        ("wide / five", "wide / five: 12 / 5 is no whole number"),
        ("wide / half", "wide / half: 12 / 0.5 is no whole number"),
        ({"path": "wide", "as": "name_index"}, "12 holds no single layer number"),
        ({"path": "plain", "as": "parent_name"}, "'plain' is not the dotted name of a layer"),
    ],
)
def test_what_cannot_be_read_is_said_in_a_sentence(words: Any, said: str) -> None:
    class Broken:
        @property
        def heads(self) -> int:
            raise RuntimeError("not yet loaded")

    obj = layer(
        q=None, p=layer(q=None), names=[], table={}, broken=Broken(), wide=12, zero=0, five=5, half=0.5, plain="plain"
    )
    with pytest.raises(UnreadableError) as caught:
        read(words, obj)
    assert str(caught.value) == said


# ---- the other words


def test_a_quotient_is_exact() -> None:
    obj = layer(o_proj=layer(in_features=4096), head_dim=64)
    assert read("o_proj.in_features / head_dim", obj) == 64


def test_a_list_takes_the_first_that_exists_and_none_and_zero_exist() -> None:
    assert read(["scaling", "scale"], layer(scale=0.5)) == 0.5
    assert read(["scaling", "scale"], layer(scaling=None, scale=0.5)) is None
    assert read(["scaling", "scale"], layer(scaling=0, scale=0.5)) == 0


def test_a_constant_is_a_fact_and_none_is_written_as_a_word() -> None:
    assert read({"const": "sigmoid"}, object()) == "sigmoid"
    assert read({"const": "none"}, object()) is None
    assert read(const(None), object()) is None
    assert read({"const": False}, object()) is False


@pytest.mark.parametrize(
    ("conversion", "value", "meaning"),
    [
        ("present", None, False),
        ("present", 0, True),
        ("none", 12, None),
        ("window_before", 127, 128),
        ("window_before", 0, 1),
        ("window_before", -1, -1),
        ("window_before", None, None),
        ("name_index", "model.layers.3.self_attn.attn", 3),
        ("name_index", "3", 3),
        ("name_index", "layers.12", 12),
        ("name_index", "mtp2.layers.61.attn", 61),
        ("name_index_of_pairs", "model.layers.3.self_attn.1", 7),
        ("name_index_of_pairs", "model.layers.3.self_attn.0.mla_attn", 6),
        ("name_index_of_pairs", "model.layers.3.self_attn", 3),
        ("parent_name", "model.layers.3.self_attn.attn", "the layer model.layers.3.self_attn"),
    ],
)
def test_conversions(conversion: str, value: Any, meaning: Any) -> None:
    assert CONVERSIONS[conversion](value) == meaning
    assert read({"path": "x", "as": conversion}, layer(x=value)) == meaning


@pytest.mark.parametrize("name", ["model.layers", "", "a.1.b.2.c.3", "layers.3.experts.9", "model.layers.3.x.2"])
def test_a_name_without_one_layer_number_is_refused(name: str) -> None:
    with pytest.raises(UnreadableError, match="holds no single layer number"):
        CONVERSIONS["name_index_of_pairs"](name)


def test_a_plain_norm_needs_only_its_module() -> None:
    said = dict(parse_norm("o_norm", "x", gated=False).fields)
    assert [str(place) for place in said["epsilon"]] == ["variance_epsilon", "eps"]
    assert [str(place) for place in said["weight_offset"]] == ["const 0.0"]


def test_a_length_is_that_of_a_sequence() -> None:
    assert read({"path": "layers", "as": "length"}, layer(layers=["a", "b"])) == 2
    with pytest.raises(UnreadableError, match="7 is no sequence, so it has no length"):
        read({"path": "layers", "as": "length"}, layer(layers=7))


def test_minus_one_is_the_last_of_a_sequence() -> None:
    assert read("layers.-1.width", layer(layers=[layer(width=1), layer(width=2)])) == 2
    with pytest.raises(UnreadableError, match=r"layers\.-1: list has no '-1'"):
        read("layers.-1", layer(layers=[]))


def test_places_seen_from_an_object_around_the_layer() -> None:
    words = ["a.b / c", {"path": "d", "as": "present"}, const(3)]
    assert below("layers.-1", words) == [
        "layers.-1.a.b / layers.-1.c",
        {"path": "layers.-1.d", "as": "present"},
        const(3),
    ]


@pytest.mark.parametrize(("said", "tokens"), [(127, 128), (-1, -1)])
def test_a_window_of_numpy_is_counted_like_any_other(said: int, tokens: int) -> None:
    assert read({"path": "window", "as": "window_before"}, layer(window=np.int32(said))) == tokens


def test_a_quotient_of_numpys_numbers_is_a_plain_int() -> None:
    heads = read("width / head", layer(width=np.int64(2048), head=np.int32(128)))
    assert (heads, type(heads)) == (16, int)
    with pytest.raises(UnreadableError, match="is no whole number"):
        read("width / head", layer(width=np.int64(2048), head=np.bool_(True)))
