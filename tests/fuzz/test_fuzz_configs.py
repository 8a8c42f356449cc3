"""Hugging Face configs that chance has changed: an entry that can be loaded, or a ConfigError, and nothing else."""

from __future__ import annotations

import json
import random

from helpers import ROOT
from mutations import ODD, mutated, tried

from layerfuse import registry
from layerfuse.registry import files
from layerfuse.registry.inspect import ConfigError, inspect

CONFIGS = [
    json.loads(path.read_text()) for path in sorted((ROOT / "tests" / "engines" / "checkpoints").glob("*/config.json"))
]
CONFIGS += json.loads((ROOT / "tests" / "cli" / "bases.json").read_text(encoding="utf-8")).values()
KEYS = sorted(
    {key for config in CONFIGS for part in (config, config.get("text_config", {})) for key in part}
    | {
        "sliding_window_pattern",
        "attn_type_list",
        "query_pre_attn_scalar",
        "head_dim",
        "qk_head_dim",
        "use_sliding_window",
    }
)
MOST_LETTERS = 20_000
"""Of one message."""


def one(chance: random.Random) -> str:
    """One config."""
    config = mutated(chance.choice(CONFIGS), chance, KEYS, (*ODD, None, [None]))
    try:
        found = inspect(config, registry=registry.default)
    except ConfigError as refused:
        assert refused.problems
        assert 0 < len(str(refused)) < MOST_LETTERS
        return "refused"
    text = found.toml()
    assert files.parse(text) == {found.entry.name: found.entry}
    assert len(found.entry.specs()) >= 2 * found.entry.num_hidden_layers
    assert not (found.same_as and found.differs)
    return "accepted"


def test_any_config_is_understood_or_refused() -> None:
    found = tried(one)
    assert min(found["refused"], found["accepted"]) * 20 > found.total()
