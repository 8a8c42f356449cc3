"""Which fusions are wanted: an optimisation level, a switch per fusion, and whether a miss is an error.

For the impatient, `LAYERFUSE_FUSIONS` says the same in one line: `none`, `all`, `a,b` (only these), `-a` (all but a).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from attrs import asdict, field, frozen
from attrs.validators import instance_of, optional

from ..adapters.errors import LayerfuseError, did_you_mean
from .activation_quant import ActivationQuant
from .rules import FUSIONS, Fusion

ENVIRONMENT = "LAYERFUSE_FUSIONS"
"""The environment variable that `FusionConfig.from_environment` reads."""

LEVELS = {
    0: "no fusion",
    1: "fusions that change at most the order and number of float roundings",
    2: "also fusions that change numerics, such as quantisation (the norms that quantise)",
}
"""The optimisation levels. The default is 1."""


class FusionConfigError(LayerfuseError, ValueError):
    """A switch or level that does not exist."""


def _known(name: str, where: str) -> str:
    if name not in FUSIONS:
        raise FusionConfigError(
            f"{where}: no fusion is called {name!r}{did_you_mean(name, FUSIONS) or '.'} Known: {', '.join(FUSIONS)}."
        )
    return name


def _switches(value: Mapping[str, bool] | tuple[tuple[str, bool], ...]) -> tuple[tuple[str, bool], ...]:
    pairs = dict(value)
    for name, on in pairs.items():
        _known(name, "FusionConfig.switches")
        if not isinstance(on, bool):
            raise FusionConfigError(f"FusionConfig.switches[{name!r}]: expected True or False, got {on!r}")
    return tuple(sorted(pairs.items()))


def _level(_instance: object, _attribute: object, value: object) -> None:
    if type(value) is not int or value not in LEVELS:
        raise FusionConfigError(f"FusionConfig.level: expected one of {', '.join(map(str, LEVELS))}, got {value!r}")


@frozen(kw_only=True)
class FusionConfig:
    """What is wanted of the fusions.

    Raises:
        FusionConfigError: an unknown level, or a switch for a fusion that does not exist.
    """

    level: int = field(default=1, validator=_level)
    "See `LEVELS`."
    switches: tuple[tuple[str, bool], ...] = field(default=(), converter=_switches)
    "Fusions turned on or off whatever the level: given as a mapping from name to bool."
    quant: ActivationQuant | None = field(default=None, validator=optional(instance_of(ActivationQuant)))
    "How the engine quantises the activations of its matrix products; None: not at all."
    strict: bool = False
    "True: an expected fusion that did not happen raises FusionMissedError."
    origin: str = "FusionConfig"
    "Where the switches were set, as the reasons in plans and reports say it."

    @classmethod
    def from_environment(cls, *, strict: bool = False) -> FusionConfig:
        """The default config, as changed by `LAYERFUSE_FUSIONS` where that is set and not empty.

        Raises:
            FusionConfigError: the variable names a fusion that does not exist.
        """
        text = os.environ.get(ENVIRONMENT, "").strip()
        return cls.parse(text, origin=f"{ENVIRONMENT}={text}", strict=strict) if text else cls(strict=strict)

    @classmethod
    def parse(cls, text: str, *, origin: str = "FusionConfig.parse", strict: bool = False) -> FusionConfig:
        """The config that a line such as `none`, `all`, `mla_dual_rms_norm` or `-mla_dual_rms_norm` asks for."""
        words = [word.strip() for word in text.split(",") if word.strip()]
        if words == ["none"]:
            return cls(level=0, origin=origin, strict=strict)
        if words == ["all"]:
            return cls(level=2, switches=dict.fromkeys(FUSIONS, True), origin=origin, strict=strict)
        wanted = [_known(word, origin) for word in words if not word.startswith("-")]
        switches = {name: name in wanted for name in FUSIONS} if wanted else {}
        for word in words:
            if word.startswith("-"):
                switches[_known(word[1:], origin)] = False
        return cls(switches=switches, origin=origin, strict=strict)

    def why_off(self, fusion: Fusion) -> str | None:
        """The reason why this fusion is off, as a sentence, or None where it is on."""
        switch = dict(self.switches).get(fusion.name)
        if switch is None and fusion.level > self.level:
            return f"{fusion.name} needs optimisation level {fusion.level}, and {self.origin} sets level {self.level}"
        if switch is False:
            return f"{fusion.name} is switched off by {self.origin}"
        return None

    def concerns(self, fusion: Fusion) -> bool:
        """Whether the fusion can come about at all: one that takes in a quantisation needs that one to be declared."""
        return fusion.scheme is None or (self.quant is not None and self.quant.scheme == fusion.scheme)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON and for cache keys."""
        return {
            "level": self.level,
            "switches": dict(self.switches),
            "quant": None if self.quant is None else asdict(self.quant),
            "strict": self.strict,
            "origin": self.origin,
        }
