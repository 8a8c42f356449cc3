"""The models that ship with the library: an entry is structured when it is asked for, and is then what the checked file says."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib

import attrs
import pytest
from helpers import ROOT, real_model

import layerfuse
from layerfuse import registry
from layerfuse.registry import files
from layerfuse.registry.entries import MODELS_TOML, Entries


def structured(own: registry.Registry) -> frozenset[str]:
    models = own._tables.models
    assert isinstance(models, Entries)
    return models.structured


def test_an_entry_is_structured_when_it_is_asked_for_and_no_other() -> None:
    own = registry.fresh()
    for layer in real_model("deepseek-v3").modules():
        own.readers_for(type(layer))
    assert len(own.models()) == len(tomllib.loads(MODELS_TOML.read_text())["models"])
    assert "kimi-k2.5" in own.models()
    assert structured(own) == frozenset()
    assert own.model("moonshotai/Kimi-K2.5") is own.model("kimi-k2.5")
    assert structured(own) == {"kimi-k2.5"}
    # What others add leaves the rest as it is.
    own.register_model(attrs.evolve(own.model("kimi-k2.5"), name="mine", aliases=[], hf_id=None, layer_classes={}))
    assert own.model("mine").num_hidden_layers == 61
    assert structured(own) == {"kimi-k2.5"}


def test_each_entry_is_what_the_checked_file_says_and_its_head_has_its_names() -> None:
    checked, entries = files.read_file(MODELS_TOML), Entries.shipped()
    assert dict(entries) == checked
    for name, entry in checked.items():
        head = entries.heads[name]
        assert (head.names, head.adapter, [*head.engines], head.layer_classes) == (
            *(entry.names, entry.adapter, [*entry.engines], entry.layer_classes),
        )


def test_a_wrong_value_in_the_shipped_file_is_said_with_its_key() -> None:
    tables = {"bad": {**tomllib.loads(MODELS_TOML.read_text())["models"]["kimi-k2.5"], "hidden_sise": 7168}}
    with pytest.raises(registry.CatalogError, match="hidden_sise"):
        Entries({"bad": files.head("bad", tables["bad"])}, tables)["bad"]


def test_the_json_that_is_read_says_what_models_toml_says() -> None:
    built = MODELS_TOML.with_suffix(".json")
    assert layerfuse.__file__ != str(ROOT / "__init__.py")
    assert json.loads(built.read_text()) == tomllib.loads((ROOT / "models.toml").read_text())


def test_importing_the_registry_imports_next_to_nothing() -> None:
    """Under 15 ms above bare Python, which is a question of what it imports: `typing`, `attrs` and `re` alone take more."""
    code = "import sys; before = {*sys.modules}; import layerfuse.registry; print(*sorted({*sys.modules} - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = {name for name in done.stdout.split() if name.startswith("layerfuse")}
    assert found == {"layerfuse", "layerfuse._lazy", "layerfuse.registry"}
    others = {name.partition(".")[0] for name in done.stdout.split()} - {"layerfuse"}
    assert others <= {"__future__", "importlib", "warnings"}


def test_a_rank_that_is_not_there_has_no_layers() -> None:
    entry = registry.model("qwen3-4b")
    assert entry.specs(tp=1, rank=0) == entry.specs()
    for tp in (1, 2):
        with pytest.raises(layerfuse.LayerfuseError, match="rank"):
            entry.specs(tp=tp, rank=tp)
