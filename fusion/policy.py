"""What is on in an engine unless it is switched: measurements as data (`policy.toml`), and the one rule that reads them.

A fusion is on where a measurement of that engine says that it is faster there, and nowhere else. Nothing here needs torch.
"""

from __future__ import annotations

import datetime
import functools
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cattrs
from attrs import field, frozen
from cattrs import transform_error
from cattrs.v import format_exception

from ..adapters.errors import LayerfuseError, shown
from .engine import SPELT

if TYPE_CHECKING:
    from ..adapters.activation_quant import ActivationQuant
    from .engine import Engine
    from .sites import Site
    from .target import Target

SHIPPED = Path(__file__).parents[1] / "policy.toml"
"""The measurements that come with the library."""

NO_SLOWER = 0.995
"""No cell of a measurement may fall below this at the lower end of its interval."""
FASTER = 1.01
"""At least one cell must be this many times faster."""
GROUP = 128
"""Columns that share a scale in checkpoints in fp8 blocks."""


class PolicyError(LayerfuseError, ValueError):
    """A policy file that cannot be read; every problem is listed."""

    def __init__(self, file: str, problems: list[str]) -> None:
        self.file = file
        self.problems = tuple(problems)
        super().__init__(f"{file}: " + "; ".join(problems))


def _interval(_instance: Any, attribute: Any, cells: Mapping[str, tuple[float, ...]]) -> None:
    if not cells:
        raise ValueError(f"{attribute.name}: expected a cell per batch, as {{ 1 = [1.06, 1.05, 1.07] }}")
    for batch, cell in cells.items():
        if not batch.isdecimal() or len(cell) != 3 or not 0 < cell[1] <= cell[0] <= cell[2]:
            raise ValueError(
                f"{attribute.name}: expected a batch, then the ratio and its interval, low and high, got {shown(batch)} = "
                f"{shown(list(cell))}"
            )


def _some(_instance: Any, attribute: Any, names: tuple[str, ...]) -> None:
    if not names:
        raise ValueError(f"{attribute.name}: expected the fusions that were on")


def _known(_instance: Any, attribute: Any, engine: str) -> None:
    if engine not in SPELT:
        raise ValueError(f"{attribute.name}: expected one of {', '.join(SPELT)}, got {shown(engine)}")


@frozen(kw_only=True, slots=False)
class Measurement:
    """Fusions that were on together in an engine, against the engine as it is without them."""

    fusions: tuple[str, ...] = field(validator=_some)
    engine: str = field(validator=_known)
    "One of `engine.NAMES`."
    release: str
    device: str
    "As its driver names it."
    arch: str
    "As `Target.arch` names it: where it is taken to hold."
    model: str
    "In words, with the format of its weights."
    decode: Mapping[str, tuple[float, ...]] = field(validator=_interval)
    """Batch -> how many times faster a decode step is: the ratio of the medians, and the lower and upper end of the 95 % interval of the
    ratio over turns."""
    date: datetime.date
    commit: str
    file: str
    "Where the figures are, below bench/results."
    stage: str
    arm: str
    "Of the file."
    against: str | None = None
    "The arm of the file that it is compared with, whose fusions were on in both; None: the engine as it is."
    linears: str | None = None
    "Whose kernel the quantised linears were."
    ranks: int = 1
    "It holds from this tensor-parallel size on."
    unless: str | None = None
    "A fusion: it holds where the engine does not do that itself."
    quant: str | None = None
    "It holds where what reads the site quantises like this: a word of `ActivationQuant.scheme`. None: however it does."
    group: int = GROUP
    "Columns that share a scale in linears that quantise in groups: it holds beside those, and where none does."
    inside: bool = False
    "Whether the linears quantise inside of the op that multiplies (`ActivationQuant.inside`); of no account where nothing is quantised."
    mixtures: bool | None = None
    "Whether its layers were mixtures of experts; None: both kinds. Of several measurements that hold at a site, a plan quotes one of its kind."
    output: str | None = None
    "The spec of the layers whose gated norm was fused, as `GatedDeltaNetSpec`: at the output of other layers it says nothing."
    compiled: bool = True
    "Whether the engine compiled the model. False: the fusions stood at module level."
    why: str | None = None
    "Why nothing is gained, as a sentence, where nothing is."
    but: str | None = None
    "What else it costs, as a sentence, so that it does not count as faster."
    note: str | None = None
    "What else was measured, in words."

    @functools.cached_property
    def faster(self) -> bool:
        """The rule: no cell is slower, and one is faster."""
        ratios, lows = zip(*[(cell[0], cell[1]) for cell in self.decode.values()], strict=True)
        return self.but is None and bool(min(lows) >= NO_SLOWER and max(ratios) >= FASTER)

    @property
    def on(self) -> str:
        """What was measured, in words."""
        linears = [] if self.linears is None else [f"{self.linears} linears"]
        ranks = [] if self.ranks == 1 else [f"TP {self.ranks}"]
        return ", ".join([self.model, *linears, *ranks, f"{SPELT[self.engine]} {self.release}", self.device])

    @property
    def figure(self) -> str:
        """The measurement as plans and docs say it, the same of each of its fusions."""
        return self.quoted("")

    def quoted(self, there: str) -> str:
        """The figure, and in front of its numbers where they were measured: a word of `At.elsewhere`."""
        ratios = _listed(
            [f"{cell[0]:.2f}" if self.faster or self.but else f"{cell[0]:.3f}" for cell in self.decode.values()]
        )
        beside = "" if self.against is None else ", beside what is on by default"
        step = f"{ratios} times faster per decode step at batch {_listed(list(self.decode))}{beside}"
        if not self.faster and self.but is None:
            because = there if self.why is None else f"{self.why}: {there}"
            slower = min(cell[1] for cell in self.decode.values()) < NO_SLOWER
            took = "longer in one cell at least" if slower else "as long"
            return f"{because}with the fusion a decode step took {took} ({step}; {self.on})"
        together = [f"by {_listed([*self.fusions])} together"] if len(self.fusions) > 1 else []
        noted = [] if self.note is None else [self.note]
        costs = there if self.but is None else f"{self.but}{'; ' if there else ': '}{there}"
        return costs + ", ".join([step, *together, *noted]) + f" ({self.on})"

    @property
    def where(self) -> str:
        """The conditions in words."""
        quant = [] if self.quant is None else [f"where activations are quantised {self.quant.replace('_', ' ')}"]
        ranks = [] if self.ranks == 1 else [f"from {self.ranks} ranks on"]
        unless = [] if self.unless is None else [f"where {SPELT[self.engine]} does not do {self.unless} itself"]
        inside = [] if not self.inside else ["where linears quantise inside of their op"]
        eager = [] if self.compiled else ["where nothing is compiled"]
        output = [] if self.output is None else [f"gated norms of {self.output} alone"]
        return ", ".join([self.arch, *quant, *inside, *ranks, *unless, *eager, *output])

    def holds(self, at: At) -> bool:
        """Whether a site is one that the measurement speaks of."""
        from ..adapters.specs import KernelSpec
        from .sites import OUTPUT

        scheme = None if at.quant is None else at.quant.scheme
        return (
            at.target.arch == self.arch
            and at.columns in (None, self.group)
            and self.quant in (None, scheme)
            and (at.site.role != OUTPUT or self.output in (None, type(at.site.spec).__name__))
            and not isinstance(at.site.spec, KernelSpec)
            and at.site.spec.parallel.size >= self.ranks
        )


@frozen(kw_only=True, slots=False)
class At:
    """A site of a plan, and what of its layer and its model measurements are compared with."""

    site: Site
    target: Target
    quant: ActivationQuant | None
    "How what reads the site quantises it."
    mixture: bool
    "Whether its layer holds a mixture of experts."
    quantised: bool
    "Whether any linear of the model quantises what it reads."
    foreign: Callable[[str], bool]
    "Whether the model has no site for a fusion."
    columns: int | None = None
    "Columns that share a scale where what reads the site quantises in groups, else where the model's linears do; None: none does."
    linears: str | None = None
    "Whose kernel the model's linears in fp8 blocks are, as `Measurement.linears`; None: not known, or it has none."

    def distance(self, each: Measurement, engine: Engine) -> tuple[int, ...]:
        """How far a measurement is from here; of several the nearest is quoted.

        It is one with the linears that are here, where those are known; of these it is not one of layers of another kind, a mixture or not, if it can be helped; of these it is the one with the fewest fusions that the model has
        no site for; of these one of layers of this kind alone; of these one of a model whose linears quantise, or do not, as this one's;
        of these one of the engine's release.
        """
        return (
            each.linears != (self.linears or each.linears),
            each.mixtures is (not self.mixture),
            sum(map(self.foreign, each.fusions)),
            each.mixtures is not self.mixture,
            (each.linears is not None) is not self.quantised,
            not engine.is_release(each.release),
        )

    def elsewhere(self, each: Measurement) -> str:
        """Where a measurement was made, if not in layers like these, as its figure goes on; empty where it was."""
        places = []
        if any(map(self.foreign, each.fusions)):
            places.append("on another model")
        elif each.mixtures not in (None, self.mixture):
            places.append("on other layers")
        if None not in (self.linears, each.linears) and each.linears != self.linears:
            places.append(f"with other linears, as none was with {self.linears}'s")
        return f"{' and '.join(places)}: " if places else ""


def _inside(fusion: str, quant: ActivationQuant | None) -> bool:
    return quant is not None and quant.inside and fusion.endswith("_quant")


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


@frozen(kw_only=True, slots=False)
class Policy:
    """Measurements, in the order in which they are asked."""

    measurement: tuple[Measurement, ...] = ()

    @functools.cached_property
    def _by_fusion(self) -> Mapping[tuple[str, str], list[Measurement]]:
        found: dict[tuple[str, str], list[Measurement]] = {}
        for each in self.measurement:
            for fusion in dict.fromkeys(each.fusions):
                found.setdefault((fusion, each.engine), []).append(each)
        return found

    def of(self, fusion: str, engine: str) -> Sequence[Measurement]:
        """What was measured of a fusion in an engine."""
        return self._by_fusion.get((fusion, engine), ())

    def faster_at(self, fusion: str, engine: Engine, at: At) -> Measurement | None:
        """The measurement that turns a fusion on in an engine at such a site, or None: of several the nearest, of these the first."""
        there = (
            each
            for each in self.of(fusion, engine.name)
            if each.faster
            and each.compiled == engine.compiled
            and (each.compiled or engine.captures)
            and each.unless not in engine.does
            and each.inside == _inside(fusion, at.quant)
            and each.holds(at)
        )
        return min(there, key=lambda each: at.distance(each, engine), default=None)

    def why_nothing_gained(self, fusion: str, engine: Engine, at: At | None = None) -> str | None:
        """The measurement in words that says that nothing is gained in an engine, or that something else is lost, or None.

        `at`: of several it is the nearest to this site. What is lost is said where it was measured alone.
        """
        none = [each for each in self.of(fusion, engine.name) if not each.faster and each.compiled == engine.compiled]
        if at is None or not none:
            return none[0].figure if none else None
        near = [each for each in none if each.but is None or each.holds(at)]
        if not near:
            return f"it was benchmarked only on {'; '.join(dict.fromkeys(each.where for each in none))}"
        nearest = min(near, key=lambda each: (not each.holds(at), *at.distance(each, engine)))
        return nearest.quoted(at.elsewhere(nearest))

    def why_off(self, fusion: str, engine: Engine, at: At | None = None) -> str:
        """Why a fusion is off in an engine unless it is switched on, where no measurement turns it on; `at`: where, None: anywhere."""
        inside, how = (
            at is not None and _inside(fusion, at.quant),
            "" if engine.compiled else " without compilation",
        )
        known = [each for each in self.of(fusion, engine.name) if each.compiled == engine.compiled]
        if known and not (engine.compiled or engine.captures):
            return f"it was measured in CUDA graphs, and {SPELT[engine.name]} captures none here"
        groups = sorted({each.group for each in known if each.faster or each.but is not None})
        if at is not None and groups and at.columns not in (None, *groups):
            several = _listed([*map(str, groups)])
            return f"of linears that quantise in groups it was benchmarked with those of {several} columns alone, and here they have {at.columns}"
        if inside and not any(each.inside for each in known):
            return f"it was not benchmarked in {engine.name}{how}{'' if engine.compiled else ' and'} with linears that quantise inside of their op"
        faster = [each for each in known if each.faster and each.inside == inside]
        if faster:
            where = dict.fromkeys(each.where for each in faster)
            done = dict.fromkeys(each.unless for each in faster if each.unless in engine.does)
            here = "".join(f"{SPELT[engine.name]} does {each} itself here; " for each in done)
            return f"{here}it was measured faster on {'; '.join(where)}"
        return self.why_nothing_gained(fusion, engine, at) or f"it was not benchmarked in {engine.name}{how}"


@functools.cache
def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True)
    for kind, what in _TAKEN.items():
        converter.register_structure_hook(kind, functools.partial(_as_it_is, kind, what))
    return converter


_TAKEN = {
    str: "a text",
    int: "a whole number",
    float: "a number with a point",
    bool: "true or false",
    datetime.date: "a date, as 2026-11-23",
}
"""What is taken as it is written, and nothing else in its place."""


def _as_it_is(kind: type, what: str, value: Any, _: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"expected {what}, got {shown(value)}")
    return value


def _in_words(error: BaseException, kind: type | None) -> str:
    return str(error) if type(error) is ValueError else format_exception(error, kind)


def read_policy(path: Path) -> Policy:
    """The measurements of a file.

    Raises:
        PolicyError: it cannot be read, is no TOML, or holds mistakes; all are listed.
    """
    try:
        return _converter().structure(tomllib.loads(path.read_text(encoding="utf-8")), Policy)
    except OSError as error:
        raise PolicyError(str(path), [f"cannot be read: {error.strerror}"]) from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PolicyError(str(path), [f"is not TOML: {error}"]) from None
    except cattrs.BaseValidationError as error:
        raise PolicyError(str(path), transform_error(error, format_exception=_in_words)) from None


@functools.cache
def shipped() -> Policy:
    """The measurements that come with the library."""
    return read_policy(SHIPPED)
