"""Where the rope of a layer is read, in the words that adapters and models.toml share.

    rope = {module = "rotary_emb", width = "rotary_dim", interleaved = {path = "is_neox_style", as = "not"}, ...}
    rope = {width = "qk_rope_head_dim", interleaved = {const = true}, ...}    no module: paths start at the layer
    rope = {const = "none"}                                                   these layers have no rope

A module that is None (SGLang's, of a layer without rope) says that there is none, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from .errors import FactsError, did_you_mean, shown
from .sources import Path, Source, const, parse_path, parse_source

ROPE_WORDS: dict[str, Any] = {
    "width": None,
    "interleaved": None,
    "attention_scaling": None,
    "interleaved_out": const(True),
    "table": None,
}
"""The fields of a rope, and what stands for those that are not said. None: they must be."""


@frozen
class RopeSource:
    """A rope's module and where its fields are: relative to it, or to the layer where there is none."""

    module: Path | None
    fields: tuple[tuple[str, tuple[Source, ...]], ...]
    "Empty: the layers have no rope."

    def __str__(self) -> str:
        return "no rope" if not self.fields else "rope" if self.module is None else f"rope at {self.module}"


def rope(module: str | None = None, **words: Any) -> dict[str, Any]:
    """A rope, in the shared words."""
    return words if module is None else {"module": module, **words}


def parse_rope(words: Any, field: str) -> RopeSource:
    """Where the rope is read, from the shared words.

    Raises:
        FactsError: unknown keys, or a rope that does not say all of its fields.
    """
    if words in (const(None), {"const": None}):
        return RopeSource(None, ())
    if not isinstance(words, Mapping) or not isinstance(words.get("module", ""), str):
        raise FactsError(f'{field}: expected a rope, {{width = ..., ...}}, or {{const = "none"}}, got {shown(words)}')
    allowed = ("module", *ROPE_WORDS)
    for word in words:
        if word not in allowed:
            raise FactsError(f"{field}: a rope has no {shown(word)}{did_you_mean(word, allowed)}")
    missing = [word for word, default in ROPE_WORDS.items() if default is None and word not in words]
    if missing:
        raise FactsError(f"{field}: a rope must also say its {', '.join(missing)}")
    module = parse_path(words["module"], field) if "module" in words else None
    if module is not None and not isinstance(module, Path):
        raise FactsError(f"{field}: a rope's module is a path, not a quotient")
    return RopeSource(
        module,
        tuple(
            (name, parse_source(words.get(name, default), f"{field}.{name}")) for name, default in ROPE_WORDS.items()
        ),
    )
