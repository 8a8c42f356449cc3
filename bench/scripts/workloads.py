"""What the scripts measure, read from `workloads.toml`: shapes of models, and stages, each a model in an engine's own ways and with layerfuse."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen
from cattrs import Converter

SAID = tomllib.loads((Path(__file__).parent / "workloads.toml").read_text())
DEFAULT = ("default",)
"""Of an arm: layerfuse without an option."""


@frozen
class Way:
    """An engine without layerfuse, computing the same in one of its own ways; without a field set, as it is installed."""

    variables: dict[str, str] = field(factory=dict)
    "Of its environment."
    passes: dict[str, bool] = field(factory=dict)
    "Of its compiler, on or off."
    engine: dict[str, Any] = field(factory=dict)
    "Arguments of its engine."
    custom_ops: tuple[str, ...] = ()
    "Its layers that run their own kernels in place of what Inductor makes of them."


@frozen
class Arm:
    """layerfuse in an engine."""

    fusions: tuple[str, ...] = DEFAULT
    way: str = "vllm"
    "Of the stage's, that the engine runs besides."
    options: dict[str, Any] = field(factory=dict)
    "Of layerfuse's, beside its fusions."


@frozen
class Stage:
    """One model on so many GPUs. The first way, called as the engine, is what all are compared with."""

    shape: str
    arms: dict[str, Arm]
    ways: dict[str, Way]
    cache: int
    "For keys and values: bytes in vLLM, tokens in SGLang."
    needs: int
    "Seconds that it takes about."
    tp: int = 1
    variables: dict[str, str] = field(factory=dict)
    engine: dict[str, Any] = field(factory=dict)
    "Arguments of its engine."

    @property
    def together(self) -> int:
        """Tokens of a sequence in a decode step: one, and those that are drafted."""
        drafts: int = self.engine.get("speculative_config", {}).get("num_speculative_tokens", 0)
        return 1 + drafts


def together(tables: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """One table of several, and so each that several have; else the last one's value."""
    found: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            both = isinstance(value, dict) and key in found
            found[key] = together([found[key], value]) if both else value
    return found


def _shape(of: str, parts: Iterable[str] = (), **changes: Any) -> tuple[str, dict[str, Any]]:
    return of, together([*(SAID["parts"][part] for part in parts), changes])


SHAPES = {name: _shape(**table) for name, table in SAID["shapes"].items()}
"""Shape -> the published config, and what differs from it."""


def stage(
    engine: str, /, arms: Iterable[str], ways: Iterable[str] = (), settings: Iterable[str] = (), **own: Any
) -> Stage:
    """A stage of an engine, of what the file has under these names."""
    said = SAID[engine]
    made = together([*(said["settings"][each] for each in ("usual", *settings)), own])
    made["arms"] = {name: {"way": engine, **arm} for name, arm in together(said["arms"][each] for each in arms).items()}
    for arm in made["arms"].values():
        arm["fusions"] = [name for each in arm.get("fusions", DEFAULT) for name in SAID["fusions"].get(each, [each])]
    made["ways"] = together(said["ways"][each] for each in ("installed", *ways))
    made["engine"] = {key: None if value == "" else value for key, value in made.get("engine", {}).items()}
    made["cache"] <<= 30 if engine == "vllm" else 0
    return Converter(forbid_extra_keys=True).structure(made, Stage)


STAGES = {
    engine: {name: stage(engine, **{"shape": name, **table}) for name, table in SAID[engine]["stages"].items()}
    for engine in ("vllm", "sglang")
}
"""By engine and name, in the order of what they are worth."""
