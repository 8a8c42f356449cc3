"""The fusion that moves a model's numbers most, and a smallest set of sites: found by running each by itself, then halves of its sites.

Importing this module imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import attrs
from attrs import field, frozen

from .adapters.errors import ArgumentError, LayerfuseError, counted, shown

if TYPE_CHECKING:
    from .fusion import FusionConfig
    from .fusion.report import Report
    from .registry.lookup import Registry

Pair: TypeAlias = tuple[str, str]
"""A site and a fusion."""
T = TypeVar("T")
Step = Callable[[str], None]


class PromptsError(LayerfuseError, ValueError):
    """A file of prompts that holds something else than a list of token ids on each line."""


class NothingRanError(LayerfuseError, RuntimeError):
    """Nothing ran fused in the run with all fusions, so that none of them can be searched. `reasons` are lines of what did not and why."""

    def __init__(self, reasons: Iterable[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__(self.reasons)

    def __str__(self) -> str:
        return "\n".join(["no fusion ran, so that none can be searched:", *(f"  - {each}" for each in self.reasons)])


@frozen(kw_only=True)
class Moved:
    """How far the logits of some prompts are from those without fusions."""

    relative: float
    "The largest difference, to the largest logit without fusions."
    prompt: int
    "Counted from 1: that of the largest difference."
    position: int
    "Of the token behind which it is, counted from 1."
    tokens: int
    "Positions of all prompts at which another token has the largest logit."
    beyond: bool
    "Whether that is more than is allowed."

    def __str__(self) -> str:
        most = f"{self.relative:.2e} of the largest logit (prompt {self.prompt}, token {self.position})"
        return f"off by {most}, {counted(self.tokens, 'other greedy token')}: {'too far' if self.beyond else 'near enough'}"


@frozen(kw_only=True)
class Found:
    """What moves a number."""

    pairs: tuple[Pair, ...]
    "The smallest set; each of them is needed where there are several."
    moved: Moved
    "By it alone."
    others: Moved
    "By all fusions but these."
    apart: Mapping[str, Moved] = field(factory=dict)
    "Other fusions that move one too far by themselves, at all their sites, the largest first."
    left: tuple[str, ...] = ()
    "The fusions that ran and are in no pair."


def prompts_in(path: Path, vocabulary: int | None = None) -> tuple[tuple[int, ...], ...]:
    """The token ids in a file, one JSON list per line; empty lines are passed over.

    Args:
        path: of the file.
        vocabulary: how many tokens the model knows; None: that is not known.

    Raises:
        PromptsError: a line is something else or holds a token beyond the vocabulary, or none holds anything.
    """
    import json

    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            ids = json.loads(line)
        except ValueError:
            ids = line
        if not isinstance(ids, list) or not ids or not all(type(each) is int and each >= 0 for each in ids):
            raise PromptsError(
                f"{path}, line {number}: expected token ids in a JSON list, as [1, 15043], got {shown(ids)}"
            )
        if vocabulary is not None and max(ids) >= vocabulary:
            raise PromptsError(
                f"{path}, line {number}: token {max(ids)} is beyond the vocabulary: the model knows {vocabulary} tokens, from 0 on"
            )
        found.append(tuple(ids))
    if not found:
        raise PromptsError(f"{path}: expected a JSON list of token ids on each line, and there is none")
    return tuple(found)


@frozen(kw_only=True)
class Reported:
    """What a report says of one module, its sites named from the loaded model on."""

    model: str = ""
    "The class of that model; empty in a report of `fusion.compile`."
    sites: tuple[str, ...]
    "All, fused or not."
    pairs: tuple[Pair, ...]
    "What is fused."


def reported_in(path: Path) -> tuple[Reported, ...]:
    """What is fused by a report: that of an engine, or the `to_dict()` of one of `fusion.compile`, as JSON.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    from .registry.inspect import ConfigError, read_config

    data = read_config(path)
    found = []
    try:
        if "modules" in data:
            # A module is named by the class of the model, and where it is in that.
            for name, module in data["modules"].items():
                model, _, place = name.partition(".")
                rows = [(_below(place, row["site"]), row["fusion"], row["outcome"]) for row in module["sites"]]
                fused = tuple((site, fusion) for site, fusion, outcome in rows if outcome == "fused")
                found.append(Reported(model=model, sites=tuple(site for site, _, _ in rows), pairs=fused))
        else:
            several = data["fusions"].items()
            kinds = ("expected", "refused", "not_applicable", "fallback")
            sites = tuple(site for _, each in several for kind in kinds for site in each[kind])
            fused = tuple((site, name) for name, each in several for site in (*each["matched"], *each["fallback"]))
            found.append(Reported(sites=sites, pairs=fused))
        if not all(isinstance(each, str) for module in found for each in chain(module.sites, *module.pairs)):
            raise TypeError
    except (KeyError, TypeError, AttributeError):
        expected = (
            "expected an engine's report (layerfuse-report.json), or a report of fusion.compile (its to_dict() as JSON)"
        )
        raise ConfigError(str(path), [expected]) from None
    return tuple(found)


def _below(path: str, site: str) -> str:
    """The name that a site of a module has in the model that holds the module there."""
    return f"{path}{_marked(site)}" if path else site


def _marked(site: str) -> str:
    """A site's name with what separates it from the path of what holds its model."""
    return f"{'.' if ':' in site else ':'}{site}"


@frozen(kw_only=True)
class Matched:
    """What of a report can be fused in another model."""

    pairs: tuple[Pair, ...]
    renamed: Mapping[str, str]
    "What the report says -> what it is taken for: the class of the model, and the path of what holds its layers."
    unmatched: Mapping[Pair, str]
    "What cannot, by the report's names -> why, as a sentence."


def matched(model: Any, reported: Iterable[Reported], registry: Registry | None = None) -> Matched:
    """Which of a report's sites and fusions a model has, by its plan with those fusions switched on.

    Of several models in a report, as a draft is one beside its target, it is that of the same class, or else the first. Where none of its
    modules has a site of the model's by name, the layers of one may be at another path: those that have the same numbers as the model's.

    Args:
        model: as for `bisect`.
        reported: as `reported_in` gives them, perhaps of an engine's model of the same checkpoint.
        registry: what reads the layers; the default one if not given.
    """
    from .fusion import FUSIONS, compile  # noqa: A004

    reported, own_class = [*reported], type(model).__name__
    classes = [each.model for each in reported]
    searched = own_class if own_class in classes else next(iter(classes), "")
    renamed = {} if searched in ("", own_class) else {searched: own_class}
    unmatched = {
        (f"{each.model}.{site}", fusion): f"it is of another model of the report than {searched}, which is searched"
        for each in reported
        for site, fusion in each.pairs
        if each.model != searched
    }
    modules = [each for each in reported if each.model == searched]
    known = _chosen(pair for each in modules for pair in each.pairs if pair[1] in FUSIONS)
    sites = compile(model, config=attrs.evolve(known, only=None), registry=registry).plan.site
    elsewhere = not any(site in sites for each in modules for site in each.sites)
    here = {}
    for each in modules:
        move = _move(each.sites, sites) if elsewhere else None
        for site, fusion in each.pairs:
            place = site if move is None else _moved(site, *move)
            if fusion not in FUSIONS:
                unmatched[site, fusion] = "no fusion is called that here"
            elif place not in sites:
                unmatched[site, fusion] = "the model has no such site"
            else:
                here[site, fusion] = place, fusion
        if move is not None:
            before, after = (path.removeprefix(".") or "the model itself" for path in move)
            renamed[before] = after
    plan = compile(model, config=_chosen(here.values()), registry=registry).plan
    on = {(each.site, each.fusion) for each in (*plan.expected(), *plan.fallback())}
    for pair, own in here.items():
        if own not in on:
            said = (each.reason for each in plan.at(own[0]) if each.fusion == own[1])
            unmatched[pair] = next(said, "it has no place there")
    found = dict.fromkeys(own for own in here.values() if own in on)
    return Matched(pairs=tuple(found), renamed=renamed, unmatched=unmatched)


def _move(theirs: Iterable[str], ours: Iterable[str]) -> tuple[str, str] | None:
    """From where to where a module's sites move, so that it has layers of the same numbers as the model there; None: there is no such place, or several."""
    theirs = [*theirs]
    lists, own = _layers(theirs), _layers(ours)
    start, _, last = next(iter(lists), "").rpartition(".")
    if not lists or not all(_marked(site).startswith((f"{start}.", f"{start}:")) for site in theirs):
        return None
    ends = [path.removesuffix(f".{last}") for path in own if path.endswith(f".{last}")]
    found = [end for end in ends if all(own.get(end + path.removeprefix(start)) == lists[path] for path in lists)]
    return (start, found[0]) if len(found) == 1 else None


def _layers(sites: Iterable[str]) -> dict[str, set[int]]:
    """The path of each list of layers, marked -> the numbers of those that have sites."""
    found: dict[str, set[int]] = {}
    for site in sites:
        if (layer := re.match(r"(.*?)\.(\d+)[.:]", _marked(site))) is not None:
            found.setdefault(layer[1], set()).add(int(layer[2]))
    return found


def _moved(site: str, start: str, end: str) -> str:
    return (end + _marked(site).removeprefix(start))[1:]


def _chosen(pairs: Iterable[Pair] | None) -> FusionConfig:
    """What `LAYERFUSE_FUSIONS` chooses; with pairs nothing but these, each of them on unless it switches that off."""
    from .fusion import FusionConfig

    chosen = FusionConfig.from_environment()
    if pairs is None:
        return chosen
    only = frozenset(pairs)
    named = {} if chosen.level == 0 else dict.fromkeys((fusion for _, fusion in only), True)
    return attrs.evolve(chosen, only=only, switches=named | dict(chosen.switches))


def smallest(units: Sequence[T], moves: Callable[[Sequence[T]], bool], beside: Sequence[T] = ()) -> list[T]:
    """A smallest set of units that moves a number (delta debugging: Zeller, "Yesterday, my program worked", 1999).

    Args:
        units: which all together, and beside these others, move one.
        moves: whether so many do.
        beside: what stays on meanwhile.
    """
    if len(units) == 1:
        return [*units]
    half = len(units) // 2
    for part in (units[:half], units[half:]):
        if moves([*beside, *part]):
            return smallest(part, moves, beside)
    # Only together: what of the first half is needed beside the second, and then of the second beside that.
    first = smallest(units[:half], moves, [*beside, *units[half:]])
    return first + smallest(units[half:], moves, [*beside, *first])


def bisect(
    model: Any,
    prompts: Iterable[Sequence[int]],
    *,
    tolerance: float | None = None,
    greedy: bool = False,
    among: Iterable[Pair] | None = None,
    registry: Registry | None = None,
    step: Step = lambda _: None,
    begin: Step = lambda _: None,
) -> Found | None:
    """Find what moves the logits of a model: with the fusions that `LAYERFUSE_FUSIONS` chooses, and without.

    Args:
        model: of transformers: takes `input_ids` and `use_cache`, and gives `logits`. On the device where it is to run.
        prompts: token ids, each run by itself.
        tolerance: the largest difference of a logit that is near enough, as a fraction of the largest one; by default what
            `layerfuse verify` allows for the model's dtype.
        greedy: hold the token of the largest logit at each position instead of the logits.
        among: what takes part, as `matched` has it, whatever is on by default; None: everything that is chosen.
        registry: what reads the layers; the default one if not given.
        step: told of each run, in a line, when it has ended, and behind the first of what did not run in it.
        begin: told what runs next; the first runs compile the whole model and take longest.

    Returns:
        A smallest set of the fusion that moves most by itself, or of several that only together move one; None where all fusions together
        move nothing too far.

    Raises:
        ArgumentError: a prompt holds a token that the model does not know.
        NothingRanError: nothing was fused, with the reasons.
    """
    import torch

    from .fusion import compile, keep_recurrences  # noqa: A004
    from .fusion.report import in_groups
    from .verify import TOLERANCES

    rows = [torch.tensor([ids], device=next(model.parameters()).device) for ids in prompts]
    vocabulary = model.get_input_embeddings().num_embeddings
    for number, ids in enumerate(rows, 1):
        if int(ids.max()) >= vocabulary:
            raise ArgumentError(
                f"prompt {number}: token {int(ids.max())} is beyond the {vocabulary} that the model knows"
            )
    keep_recurrences(model)
    among = None if among is None else [*among]
    chosen = _chosen(among)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    most = TOLERANCES.get(dtype, TOLERANCES["bfloat16"]) if tolerance is None else tolerance

    def run(only: Iterable[Pair] | None) -> tuple[list[torch.Tensor], Report]:
        """The logits of each prompt, and the report of what ran fused."""
        torch._dynamo.reset()
        fused = compile(model, config=attrs.evolve(chosen, only=only), registry=registry)
        with torch.no_grad():
            logits = [fused(input_ids=ids, use_cache=False).logits[0].float() for ids in rows]
        return logits, fused.report

    begin("without fusions")
    plain, _ = run(())

    def moved_by(logits: list[torch.Tensor]) -> Moved:
        largest = max(float(each.abs().max()) for each in plain)
        apart = [
            (one - other).abs().nan_to_num_(nan=float("inf")).amax(-1) for one, other in zip(logits, plain, strict=True)
        ]
        prompt = max(range(len(apart)), key=lambda place: float(apart[place].max()))
        relative = float(apart[prompt].max()) / largest
        tokens = sum(int((one.argmax(-1) != other.argmax(-1)).sum()) for one, other in zip(logits, plain, strict=True))
        return Moved(
            relative=relative,
            prompt=prompt + 1,
            position=int(apart[prompt].argmax()) + 1,
            tokens=tokens,
            beyond=tokens > 0 if greedy else not relative <= most,
        )

    known: dict[frozenset[Pair] | None, tuple[Moved, Report]] = {}

    def tried(only: Iterable[Pair] | None) -> tuple[Moved, Report]:
        some = None if only is None else [*only]
        key = None if some is None else frozenset(some)
        if key not in known:
            begin("with all fusions" if some is None else f"with {_named(some)}")
            logits, report = run(key)
            known[key] = moved_by(logits), report
            step(f"{_named([*report.executed])}: {known[key][0]}")
        return known[key]

    whole, report = tried(among)
    pairs, left = [*report.executed], [*_not_run(report, among)]
    if not pairs:
        refused = {f"{each.fusion} at {each.site}": each.reason for each in report.plan.refused()}
        raise NothingRanError(left or [*in_groups(refused)] or [str(report.plan.why_empty)])
    for line in left:
        step(f"not searched: {line}")
    if not whole.beyond:
        return None

    def by_fusion(names: Iterable[str]) -> list[Pair]:
        wanted = set(names)
        return [pair for pair in pairs if pair[1] in wanted]

    names = [*dict.fromkeys(name for _, name in pairs)]
    alone = {name: tried(by_fusion([name]))[0] for name in names} if len(names) > 1 else {}
    apart = sorted(
        (name for name, moved in alone.items() if moved.beyond),
        key=lambda name: alone[name].tokens if greedy else alone[name].relative,
        reverse=True,
    )
    names = apart[:1] or smallest(names, lambda some: tried(by_fusion(some))[0].beyond)
    found = smallest(by_fusion(names), lambda some: tried(some)[0].beyond)
    moved, report = tried(found)  # layers that share a graph share what is fused in it
    ran = [*report.executed]
    others, _ = tried(pair for pair in pairs if pair not in ran)
    named = {name for _, name in ran}
    return Found(
        pairs=tuple(ran),
        moved=moved,
        others=others,
        apart={name: alone[name] for name in apart[1:]},
        left=tuple(dict.fromkeys(name for _, name in pairs if name not in named)),
    )


def _not_run(report: Report, among: Iterable[Pair] | None) -> Iterator[str]:
    """What was to run and did not, each fusion and reason a line."""
    from .fusion.report import in_groups

    wanted = [(each.site, each.fusion) for each in report.plan.expected()] if among is None else among
    sites: dict[str, list[str]] = {}
    for site, fusion in dict.fromkeys(wanted):
        if (site, fusion) not in report.executed:
            sites.setdefault(fusion, []).append(site)
    for fusion, several in sites.items():
        verdict = report.of(fusion)
        said = {each.site: each.reason for each in report.plan.decisions if each.fusion == fusion}
        reasons = {**said, **verdict.beyond, **verdict.refused}
        for line in in_groups({site: reasons.get(site, "it has no place there") for site in several}):
            yield f"{fusion} at {line}"


def _named(pairs: Sequence[Pair]) -> str:
    """In a few words: the fusions, each with its site or with how many."""
    sites: dict[str, list[str]] = {}
    for site, name in pairs:
        sites.setdefault(name, []).append(site)
    return (
        ", ".join(
            f"{name} at {several[0] if len(several) == 1 else f'{len(several)} sites'}"
            for name, several in sites.items()
        )
        or "no fusion"
    )
