"""Every causal language model of transformers, built from its default config: read in full, or said why not in docs/causal-classes.md.

`UPDATE_DOCS=1 pytest` with this file writes the page.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen

from layerfuse import registry
from layerfuse.adapters import (
    FinalNormSpec,
    GatedDeltaNetSpec,
    GatedMLPSpec,
    GQASpec,
    MLASpec,
    ResidualSpec,
    UnknownLayerError,
)
from layerfuse.registry.inspect import ConfigError, inspect

transformers = pytest.importorskip("transformers")
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES  # noqa: E402

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "causal-classes.md"
LAYERS = 4
WANTED: Mapping[str, Mapping[str, Any]] = {
    name: {"head_dim": 128} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")
}
"""What a class cannot be built without, and its default config does not say."""


@frozen
class Answer:
    """One class, and what is read of its layers."""

    name: str
    read: str
    "in full, in part, no, or not built"
    why: str = ""

    def __str__(self) -> str:
        return f"| `{self.name}` | {self.read} | {self.why or '-'} |"


def answers() -> Iterator[Answer]:
    """Each class once, by name."""
    for name, model_type in sorted({name: model_type for model_type, name in CLASSES.items()}.items()):
        try:
            model, config = built(model_type, name)
        except Exception as error:
            yield Answer(name, "not built", f"its default config raises {type(error).__name__}")
            continue
        yield answer(name, model, config)


def built(model_type: str, name: str) -> tuple[Any, Any]:
    """The model on the meta device, cut to a few layers, and its text config."""
    config = transformers.CONFIG_MAPPING[model_type](**WANTED.get(model_type, {}))
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        total = getattr(part, "num_hidden_layers", None)
        if isinstance(total, int) and total > LAYERS:
            part.num_hidden_layers = LAYERS
            for key, value in list(vars(part).items()):
                if isinstance(value, list) and len(value) == total:
                    setattr(part, key, value[:LAYERS])
    with torch.device("meta"):
        return getattr(transformers, name)(config), config.get_text_config()


def answer(name: str, model: Any, config: Any) -> Answer:
    """What of this model is read. Every value that its config says too is compared."""
    try:
        specs = registry.specs_in(model)
    except UnknownLayerError:
        return Answer(name, "no", why_not(config))
    check(specs, config)
    left = list(dict.fromkeys(what.partition(":")[2].partition(":")[0] for _, what in registry.unknown_in(model)))
    if left:
        return Answer(name, "in part", f"nobody reads {', '.join(left)}")
    counts = {kind: sum(isinstance(spec, kind) for _, spec in specs) for kind in (ResidualSpec, FinalNormSpec)}
    attentions = sum(isinstance(spec, (GQASpec, MLASpec, GatedDeltaNetSpec)) for _, spec in specs)
    assert attentions and attentions % counts[ResidualSpec] == 0 and counts[FinalNormSpec] == 1, (name, counts)
    # Experts are no MLPs of their own, and an MLP without a gate is none of the gated.
    plain = [type(m).__name__ for path, m in model.named_modules() if path.endswith(".0.mlp")]
    mlps = any(isinstance(spec, GatedMLPSpec) for _, spec in specs)
    experts = any("expert" in path for path, _ in model.named_modules())
    return Answer(name, "in full") if mlps or experts else Answer(name, "in part", f"{', '.join(plain)} has no gate")


def why_not(config: Any) -> str:
    """What `inspect` says of the config that no entry could; else what is left to do."""
    try:
        inspect(json.loads(config.to_json_string(use_diff=False)), registry=registry.default)
    except ConfigError as error:
        return "; ".join(error.problems).replace("|", "\\|").replace("\n", " ")
    return "its classes are not declared"


def check(specs: list[tuple[str, Any]], config: Any) -> None:
    """Heads, widths, windows and epsilons against the config's."""
    for path, spec in specs:
        assert spec.hidden_size == config.hidden_size, path
        if not isinstance(spec, GQASpec):
            continue
        assert (spec.num_heads, spec.num_kv_heads) == (config.num_attention_heads, config.num_key_value_heads), path
        kinds = getattr(config, "layer_types", None)
        window = getattr(config, "sliding_window", None)
        slides = kinds is None or kinds[spec.layer_index] == "sliding_attention"
        assert spec.sliding_window == (window if slides else None) or not getattr(config, "use_sliding_window", True), (
            path
        )
    epsilons = {norm.epsilon for _, spec in specs if isinstance(spec, ResidualSpec) for norm in spec.input_norms}
    said = getattr(config, "rms_norm_eps", None)
    assert said is None or epsilons <= {said}


def page(found: list[Answer]) -> str:
    """The page of the docs."""
    counts = {read: sum(each.read == read for each in found) for read in ("in full", "in part", "no", "not built")}
    lines = "\n".join(map(str, found))
    return f"""# Causal language models of transformers

Each class that transformers {transformers.__version__} names as a causal language model, built from its default config, cut to at most {LAYERS} layers, on
the meta device. {counts["in full"]} of {len(found) - counts["not built"]} are read in full: residual stream, attention or delta net, gated MLP or experts, final norm. {counts["in part"]} are read in
part and {counts["no"]} are not. {counts["not built"]} cannot be built from their default configs. `make test` reads them again and compares this page.

| class | read | why not |
|---|---|---|
{lines}
"""


def test_every_class_is_read_or_named_with_the_reason() -> None:
    if f"transformers {transformers.__version__} names" not in PAGE.read_text() and not os.environ.get("UPDATE_DOCS"):
        pytest.skip(f"the page is not of transformers {transformers.__version__}")
    found = page(list(answers()))
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(found)
    assert PAGE.read_text() == found
