"""Entries that `layerfuse inspect` wrote from published configs: written again, and held to the layers that transformers builds from the config."""

from __future__ import annotations

import copy
import json
from typing import Any

import attrs
import pytest
from helpers import ROOT

from layerfuse import registry
from layerfuse.adapters import ExpertsSpec, FinalNormSpec, ResidualSpec
from layerfuse.registry.inspect import inspect
from layerfuse.testing.models import published_model

CONFIGS: dict[str, Any] = json.loads((ROOT / "tests" / "data" / "published_configs.json").read_text())
"""Of each entry, what of its config.json says how it is built."""


@pytest.mark.parametrize("name", CONFIGS)
def test_the_entry_is_what_inspect_writes(name: str) -> None:
    entry = registry.model(name)
    found = inspect(CONFIGS[name], registry=registry.default, name=name)
    quant = {key: attrs.evolve(kind, source=entry.quant[key].source) for key, kind in found.entry.quant.items()}
    of_people: dict[str, Any] = {"aliases": entry.aliases, "hf_id": entry.hf_id, "source": entry.source, "quant": quant}
    assert attrs.evolve(found.entry, **of_people) == entry
    assert entry.source and entry.hf_id


@pytest.mark.parametrize("name", CONFIGS)
def test_the_entry_is_what_transformers_builds(name: str) -> None:
    """The first layers of each kind, of the config's own model on the meta device."""
    pytest.importorskip("transformers")
    entry = registry.model(name)
    declared = {_place(spec): spec for _, spec in entry.specs(engine="transformers")}
    kinds, mixtures = entry.kind_at(), entry.mixture_at()
    layers = 1 + max(*map(kinds.index, kinds), *map(mixtures.index, mixtures), 1)
    real = registry.specs_in(published_model(entry, _cut(CONFIGS[name], layers)))
    assert {type(spec) for _, spec in real} == {type(spec) for spec in declared.values()}
    for path, spec in real:
        said: Any = declared[_place(spec)]
        assert spec == attrs.evolve(said, layer_index=spec.layer_index), path
        if isinstance(spec, ResidualSpec):
            assert _sizes(spec.experts) == _sizes(said.experts), path


def _place(spec: Any) -> tuple[str, int | None]:
    return type(spec).__name__, None if isinstance(spec, FinalNormSpec) else spec.layer_index


def _sizes(experts: ExpertsSpec | None) -> Any:
    if experts is None:
        return None
    shared = None if experts.shared is None else experts.shared.intermediate_size
    return experts.num_experts, experts.experts_per_token, experts.intermediate_size, shared


def _cut(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The language model's part with its first layers, not quantised."""
    part = copy.deepcopy(config.get("text_config", config))
    total, part["num_hidden_layers"] = part["num_hidden_layers"], layers
    part.pop("quantization_config", None)
    return {k: v[:layers] if isinstance(v, list) and len(v) == total else v for k, v in part.items()}
