"""TOML that is written is read back as the same."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerfuse.registry.toml import written

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
NUMBERS = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
VALUES = st.recursive(
    TEXTS | NUMBERS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3)
)


@given(st.dictionaries(TEXTS, VALUES, max_size=4))
def test_a_document_goes_round_unchanged(document: dict[str, Any]) -> None:
    found = tomllib.loads(written(document))
    assert json.dumps(found, sort_keys=True) == json.dumps(document, sort_keys=True)  # where True, 1 and 1.0 differ


def test_tables_stand_behind_what_is_theirs() -> None:
    document = {"b": {"c": {"at": [0, {"step": 2}]}, "d": True}, "a": 1e-06, "e.f": {}, "g": "x\x7f\n"}
    assert (
        written(document) == 'a = 1e-06\ng = "x\\u007f\\n"\n\n[b]\nd = true\n\n[b.c]\nat = [0, {step = 2}]\n\n["e.f"]\n'
    )


def test_what_toml_does_not_hold_is_refused() -> None:
    with pytest.raises(TypeError, match="TOML holds no NoneType"):
        written({"a": [None]})
