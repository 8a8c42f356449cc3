"""Model files that chance has changed: entries that mean what they say, or a CatalogError, and nothing else."""

from __future__ import annotations

import random
from typing import Any

import attrs
from mutations import garbled, mutated, tried

from layerfuse import registry
from layerfuse.adapters import SpecError
from layerfuse.registry import CatalogError, files
from layerfuse.registry.declare import declared_adapters
from layerfuse.registry.defaults import MODELS_TOML
from layerfuse.registry.kinds import KINDS, EngineFacts, ExpertsKind, MLPKind
from layerfuse.registry.toml import written

SHORT = ("deepseek-v2-lite", "kimi-linear-48b-a3b", "gpt-oss-20b", "qwen3.5-27b", "longcat-flash")
DOCUMENT = {"models": {name: files.tomllib.loads(MODELS_TOML.read_text())["models"][name] for name in SHORT}}
KEYS = sorted(
    {
        a.name
        for cls in (registry.ModelEntry, *KINDS.values(), MLPKind, ExpertsKind, EngineFacts)
        for a in attrs.fields(cls)
    }
    | {
        "transformers",
        "vllm",
        "like",
        "family",
        "without",
        "const",
        "path",
        "as",
        "module",
        "consumers",
        "tp_size",
        "models",
    }
)
MOST_LETTERS = 50_000
"""Of one message."""


def held(document: Any, chance: random.Random) -> str:
    """What came of one file: a word to count by."""
    try:
        entries = files.structure(document, "fuzz") if isinstance(document, dict) else files.parse(document, "fuzz")
        declared_adapters(registry.default._tables, entries, "fuzz")
    except CatalogError as refused:
        assert refused.problems
        assert 0 < len(str(refused)) < MOST_LETTERS
        return "refused"
    said = files.unstructure(entries)
    # By their texts, since nan is not itself.
    assert repr(files.unstructure(files.structure(said, "again"))) == repr(said)
    for entry in entries.values():
        whole = entry.specs()
        assert len(whole) >= 2 * entry.num_hidden_layers
        assert all(spec.hidden_size == entry.hidden_size for _, spec in whole)
        size = chance.choice((2, 3, 8, 64))
        try:
            sharded = entry.specs(size, size - 1, engine=chance.choice((None, "vllm", "transformers")))
        except SpecError as refused:
            assert "ranks" in str(refused)
        else:
            assert [name for name, _ in sharded] == [name for name, _ in whole]
    return "accepted"


def one(chance: random.Random) -> str:
    """One file: three in four are changed as a tree, the others as text."""
    registry.models()
    document = {"models": {name: DOCUMENT["models"][name] for name in chance.sample(SHORT, chance.randint(1, 2))}}
    if chance.random() < 0.75:
        return held(mutated(document, chance, KEYS), chance)
    text = written(document)
    for _ in range(chance.randint(1, 4)):
        text = garbled(text, chance)
    return held(text.encode("utf-8", "surrogatepass") if chance.random() < 0.5 else text, chance)


def test_any_file_is_read_or_refused() -> None:
    found = tried(one)
    # Chance that only ever broke the TOML, or nothing at all, would show nothing.
    assert min(found["refused"], found["accepted"]) * 20 > found.total()
