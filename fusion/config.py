"""Which fusions are wanted: an optimisation level, a switch per fusion, and whether a miss is an error.

The environment variable `LAYERFUSE_FUSIONS` says the same in one line: `none`, `all`, `a,b` (only these), `-a` (the default without a).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from attrs import asdict, field, frozen

from ..adapters.activation_quant import ActivationQuant
from ..adapters.arguments import expect
from ..adapters.errors import FOREIGN, ArgumentError, LayerfuseError, cut, did_you_mean, shown
from .catalog import FUSIONS
from .chain import Fusion
from .engine import Engine
from .formats import why_unknown
from .policy import At, Measurement, Policy, shipped
from .sites import FINAL, ROLES, UNREAD, Site

ENVIRONMENT = "LAYERFUSE_FUSIONS"
"""The environment variable that `FusionConfig.from_environment` reads."""

LEVELS = {
    0: "no fusion",
    1: "fusions that change at most the order and number of float roundings",
    2: "also fusions that change numerics, such as quantisation",
}
"""The optimisation levels."""

DEFAULT_LEVEL = 1

NEEDS_LEVEL = "needs optimisation level"
"""In the reason why a fusion is off by its level alone."""


OFF_BY = "switched off by"
"""In the reason why a fusion is off by what was said: behind its name, in front of where that was."""

UNLESS = "unless switched on"
"""In the reason why a fusion is off in an engine by default: behind its name and the engine's, in front of a colon and why."""


class FusionConfigError(LayerfuseError, ValueError):
    """A switch or level that does not exist."""


SHADOW = "LAYERFUSE_SHADOW"
"""The environment variable that says how many calls are compared at each site, where `fusion.compile` is not told."""


def shadow_calls() -> int:
    """How many calls `LAYERFUSE_SHADOW` says are to be compared at each site; 0 where it is not set.

    Raises:
        ArgumentError: that is no number.
    """
    text = os.environ.get(SHADOW, "").strip()
    if text and not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise ArgumentError(f"{SHADOW}={cut(text)}: expected how many calls are compared at each site, as 3")
    return int(text or 0)


def _known(name: str, where: str) -> str:
    if not isinstance(name, str) or name not in FUSIONS:
        raise FusionConfigError(
            f"{where}: no fusion is called {shown(name)}"
            + (did_you_mean(name, FUSIONS) or f". Known: {', '.join(FUSIONS)}.")
            + "".join(f" Not usable: {why}" for why in FUSIONS.refused.values())
        )
    return name


def check_signs(words: Sequence[str], origin: str) -> None:
    """Check that no name of a line is both switched on and off, and that all names have a sign or none has.

    Args:
        words: of the line, none of them empty.
        origin: where it was said.

    Raises:
        FusionConfigError: one is, or some names have a sign and others none.
    """
    signs: dict[str, set[bool]] = {}
    for word in words:
        signs.setdefault(word.lstrip("+-"), set()).add(word[0] != "-")
    both = next((name for name, said in signs.items() if len(said) > 1), None)
    if both is not None:
        raise FusionConfigError(f"{origin}: {shown(both)} is both switched on and switched off")
    bare = [word for word in words if word[0] not in "+-"]
    if bare and len(bare) < len(words):
        beside = ",".join(dict.fromkeys(word if word[0] in "+-" else f"+{word}" for word in words))
        alone = ",".join(dict.fromkeys(word.lstrip("+") for word in words if word[0] != "-"))
        raise FusionConfigError(
            f"{origin}: names without a sign are all that is on, and those with one are on or off beside what is on by default, so that they "
            f"do not go together: write {beside!r} to change what is on by default, or {alone!r} for nothing else"
        )


def _is_pairs(value: object) -> bool:
    """Whether this is a mapping, or what a config holds for one: its pairs in a tuple."""
    return isinstance(value, Mapping) or (
        isinstance(value, tuple)
        and all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in value)
    )


def _switches(value: Mapping[str, bool] | tuple[tuple[str, bool], ...]) -> tuple[tuple[str, bool], ...]:
    if not _is_pairs(value):
        raise FusionConfigError(
            f"FusionConfig.switches: expected a mapping from fusions to True or False, got {shown(value)}; "
            "FusionConfig.parse takes a line such as '+add_rms_norm,-mla_dual_rms_norm'"
        )
    pairs = dict(value)
    for name, on in pairs.items():
        _known(name, "FusionConfig.switches")
        if not isinstance(on, bool):
            raise FusionConfigError(f"FusionConfig.switches[{shown(name)}]: expected True or False, got {shown(on)}")
    return tuple(sorted(pairs.items()))


def _level(_instance: Any, _attribute: Any, value: Any) -> None:
    if value is not None and (type(value) is not int or value not in LEVELS):
        raise FusionConfigError(
            f"FusionConfig.level: expected one of {', '.join(map(str, LEVELS))}, got {shown(value)}"
        )


def _strict(_instance: object, _attribute: object, value: object) -> None:
    if not isinstance(value, bool):
        raise FusionConfigError(f"FusionConfig.strict: expected True or False, got {shown(value)}")


Quants: TypeAlias = tuple[tuple[str, ActivationQuant | None], ...]
"""(role, quantisation) pairs."""


def _quants(value: ActivationQuant | Mapping[str, ActivationQuant | None] | Quants | None) -> Quants:
    """One quantisation for every role, or one for each that is named."""
    if value is None:
        return ()
    if isinstance(value, ActivationQuant):
        # What reads the final norm, a language-model head, is quantised in hardly any checkpoint.
        value = {role: value for role in ROLES if role not in (FINAL, *UNREAD)}
    if not _is_pairs(value):
        raise FusionConfigError(
            f"FusionConfig.quant: expected an ActivationQuant, or a mapping from roles to them, got {shown(value)}"
        )
    pairs = dict(value)
    for role, quant in pairs.items():
        if not isinstance(role, str) or role not in ROLES:
            raise FusionConfigError(
                f"FusionConfig.quant: no role is called {shown(role)}{did_you_mean(role, ROLES) or '.'} "
                f"Known: {', '.join(ROLES)}."
            )
        if quant is not None and not isinstance(quant, ActivationQuant):
            raise FusionConfigError(
                f"FusionConfig.quant[{shown(role)}]: expected an ActivationQuant or None, got {shown(quant)}"
            )
        if quant is not None and (problem := why_unknown(quant)) is not None:
            raise FusionConfigError(f"FusionConfig.quant[{shown(role)}]: {problem}")
    return tuple(sorted(pairs.items()))


def _only(value: Any) -> frozenset[tuple[str, str]] | None:
    if value is None:
        return None
    try:
        pairs = None if isinstance(value, str) else [*value]
    except FOREIGN:  # what it is to go through it is the value's own code
        pairs = None
    if pairs is None or not all(
        isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(each, str) for each in pair) for pair in pairs
    ):
        raise FusionConfigError(f"FusionConfig.only: expected (site, fusion) pairs, or None, got {shown(value)}")
    for _, name in pairs:
        _known(name, "FusionConfig.only")
    return frozenset(pairs)


def _origin(value: str) -> str:
    expect("FusionConfig.origin", value, str, "where it was said")
    return cut(value, 200)


@frozen(kw_only=True)
class FusionConfig:
    """What is wanted of the fusions.

    Raises:
        FusionConfigError: an unknown level, a switch for a fusion that does not exist, or a value of another type.
    """

    level: int | None = field(default=None, validator=_level)
    "See `LEVELS`. None: 1, and in an engine also what was measured faster there, whose level does not matter then."
    switches: tuple[tuple[str, bool], ...] = field(default=(), converter=_switches)
    "Fusions turned on or off whatever the level: given as a mapping from name to bool."
    quant: Quants = field(default=(), converter=_quants)
    """How the linear layers after a role's sites quantise their activations: an ActivationQuant for all roles but `final`,
    whose reader is the language-model head, or a mapping from role to one. What is not declared here is what the specs say, as read off the model."""
    strict: bool = field(default=False, validator=_strict)
    "True: an expected fusion that did not happen raises FusionMissedError."
    only: frozenset[tuple[str, str]] | None = field(default=None, converter=_only)
    "(site, fusion) pairs: of what is on, nothing is fused elsewhere. A fusion that goes with others is on there without them. None: everywhere. This is how `layerfuse bisect` asks."
    origin: str = field(default="FusionConfig", converter=_origin)
    "Where the switches were set, as the reasons in plans and reports say it."

    @classmethod
    def from_environment(cls, *, strict: bool = False) -> FusionConfig:
        """The default config, as changed by `LAYERFUSE_FUSIONS` where that is set and not empty.

        Raises:
            FusionConfigError: the variable names a fusion that does not exist.
        """
        text = os.environ.get(ENVIRONMENT, "").strip()
        return cls.parse(text, origin=f"{ENVIRONMENT}={cut(text)}", strict=strict) if text else cls(strict=strict)

    @classmethod
    def parse(cls, text: str, *, origin: str = "FusionConfig.parse", strict: bool = False) -> FusionConfig:
        """The config that a line such as `none`, `all`, `mla_dual_rms_norm` or `-mla_dual_rms_norm` asks for.

        Names alone are all that is on. Those with a plus or a minus are on or off beside what is on by default. A line has one sort of them.

        Raises:
            FusionConfigError: a fusion that does not exist, one that is both switched on and off, or names with a sign beside names without.
        """
        if not isinstance(text, str):
            raise ArgumentError(
                f"FusionConfig.parse: expected a line such as 'all' or '-add_rms_norm', got {shown(text)}"
            )
        words = [word.strip() for word in text.split(",") if word.strip()]
        if any(re.search(r"[\s;|]", word) for word in words):
            apart = ",".join(filter(None, re.split(r"[\s,;|]+", re.sub(r"([+-])\s+", r"\1", text))))
            raise FusionConfigError(f"{origin}: names are separated by commas: write {shown(apart, 400)}")
        if words == ["none"]:
            return cls(level=0, origin=origin, strict=strict)
        if words == ["all"]:
            return cls(
                level=2,
                switches={name: True for name, fusion in FUSIONS.items() if not fusion.opt_in},
                origin=origin,
                strict=strict,
            )
        signed = next((word for word in words if word[1:] in ("none", "all")), None)
        if signed is not None:
            raise FusionConfigError(f"{origin}: {signed[1:]!r} takes no sign, got {shown(signed)}")
        alone = next((word for word in words if word in ("none", "all")), None)
        if alone is not None:
            without = ",".join(word for word in words if word[0] == "-")
            hint = (
                f"; no line says all but some: write {shown(without, 400)} for what is on by default without it, or name, without signs, "
                "each that is wanted (`layerfuse bench --list` lists them)"
            )
            raise FusionConfigError(
                f"{origin}: {alone!r} stands alone, and {cut(', '.join(words))} are {len(words)} words"
                + (hint if alone == "all" and without else "")
            )
        names = {word: _known(word[1:] if word[0] in "+-" else word, origin) for word in words}
        check_signs(words, origin)
        switches = {name: word[0] != "-" for word, name in names.items()}
        if words and words[0] in switches:  # without a sign, as all others then
            switches = dict.fromkeys(FUSIONS, False) | switches
        return cls(switches=switches, origin=origin, strict=strict)

    def why_off(
        self,
        fusion: Fusion,
        engine: Engine | None = None,
        measured: Measurement | None = None,
        policy: Policy | None = None,
        at: At | None = None,
        companion: bool = False,
    ) -> str | None:
        """The reason why this fusion is off, as a sentence, or None where it is on.

        Args:
            fusion: of the catalog.
            engine: where it would run; there it is off unless measured faster or switched on. transformers runs in
                torch.compile as it is.
            measured: what says that it is faster there.
            policy: gives the reason where nothing does; the library's if not given.
            at: where; None asks for the fusion as such.
            companion: whether a chain that it goes with is on there.
        """
        if at is not None and self.only is not None and (at.site.name, fusion.name) not in self.only:
            return f"{fusion.name} is not among what {self.origin} leaves on at this site"
        switches = dict(self.switches)
        switch = switches.get(fusion.name)
        if switch is not None:
            return None if switch else f"{fusion.name} is {OFF_BY} {self.origin}"
        if fusion.form_of is not None and switches.get(fusion.form_of) is False:
            return f"{fusion.name} is {OFF_BY} {self.origin}, with {fusion.form_of}"
        if companion or (fusion.goes_with is not None and at is not None and self.only is not None):
            return None
        if self.level == 0:
            return f"{fusion.name} is {OFF_BY} {self.origin}"
        if engine is not None:
            rows, off = (
                shipped() if policy is None else policy,
                f"{fusion.name} is off in {engine.name} {UNLESS}",
            )
            if fusion.goes_with is not None and (measured is not None or not rows.of(fusion.name, engine.name)):
                others = "fusions that quantise in the same way, and none is on"
                with_it = f"{fusion.goes_with}, which is not on" if fusion.goes_with in FUSIONS else others
                return f"{off}: it goes with {with_it} here"
            if engine.name != "transformers" and measured is None:
                return f"{off}: {rows.why_off(fusion.name, engine, at)}"
        if fusion.opt_in and measured is None:
            return f"{fusion.name} is on by its own name alone"
        level = DEFAULT_LEVEL if self.level is None else self.level
        if fusion.level > level and (measured is None or self.level is not None):
            return f"{fusion.name} {NEEDS_LEVEL} {fusion.level}, and {self.origin} sets level {level}"
        return None

    @property
    def named(self) -> tuple[str, ...]:
        """The fusions that are switched on by name: with `all`, none is."""
        on = {name for name, switch in self.switches if switch}
        every = {name for name, fusion in FUSIONS.items() if not fusion.opt_in}
        return tuple(sorted(on - every if every <= on else on))

    def quant_at(self, site: Site) -> ActivationQuant | None:
        """How what reads a site's first norm, or its product, quantises it: as declared here, else as read off the model."""
        declared = dict(self.quant)
        if site.role in declared:
            return declared[site.role]
        return site.quant

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON and for cache keys."""
        return {
            "level": self.level,
            "switches": dict(self.switches),
            "quant": {role: None if quant is None else asdict(quant) for role, quant in self.quant},
            "strict": self.strict,
            "only": None if self.only is None else sorted(self.only),
            "origin": self.origin,
        }
