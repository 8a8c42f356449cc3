"""The head of `layerfuse plan`: at how many sites each fusion stands, and each reason once, with a number."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..fusion.config import OFF_BY, UNLESS
from ..fusion.engine import SPELT
from ..fusion.planning import ANY, UNKNOWN
from ..fusion.sites import sites_in_words
from .console import prose_width, show

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..fusion import Decision, Plan

MEASURED = "; measured "
"""Between what a fusion is and how fast it was, in a reason."""
ANSWERS = {"yes": "green", "off": "yellow", "no": "red", "depends": "cyan"}


def possible(decisions: Iterable[Mapping[str, Any]], done: Collection[str]) -> set[str]:
    """The fusions that could stand in one role of a kind of layer, as far as is known, or that the engine does there itself."""
    said = (*done, UNKNOWN)
    return {d["fusion"] for d in decisions if d["decision"] != "not_applicable" or d["reason"].startswith(said)}


def with_tokens(reason: str, tokens: str) -> str:
    """A reason, and of how many tokens it is true: what a footnote says."""
    return reason if tokens == str(ANY) else f"{tokens}: {reason}"


def summed(plan: Plan, kinds: Iterable[Mapping[str, Any]], done: Collection[str]) -> list[dict[str, Any]]:
    """Each fusion with its sites by answer, those that stand somewhere first: `fusion`, and `yes`, `off`, `no` and `depends`.

    An answer is how many sites have it, and the sites of each reason. A role in which no fusion is possible is one row.

    Args:
        plan: the plan of all layers.
        kinds: tables with the `paths` of the layers of a kind, and their `sites`, as in the JSON.
        done: what the engine does itself, as reasons of the plan begin.
    """
    rows: dict[str, dict[str, tuple[int, dict[str, set[str]]]]] = {}
    role_of = {(path, role): kind for kind in kinds for path in kind["paths"] for role in kind["sites"]}
    for site in plan.sites:
        here = possible(role_of[site.layer, site.role]["sites"][site.role], done)
        found: dict[str, list[Decision]] = {}
        for decision in plan.at(site.name):
            if decision.fusion in here:
                found.setdefault(decision.fusion, []).append(decision)
        for name, decisions in (found or {f"any at {site.role}": list(plan.at(site.name))[:1]}).items():
            row = rows.setdefault(name, {})
            answer = _answer(decisions, plan.off, site.multiplies is not None)
            sites, reasons = row.get(answer, (0, {}))
            for d in decisions:
                reasons.setdefault(with_tokens(d.reason, str(d.tokens)), set()).add(site.name)
            row[answer] = sites + 1, reasons
    order = sorted(rows.items(), key=lambda row: "yes" not in row[1])
    return [{"fusion": name, **row} for name, row in order]


def _answer(decisions: Sequence[Decision], off: Collection[str], few: bool) -> str:
    """Depends: on how many tokens there are, on what else is taken, or on what a plan cannot know.

    `off`: the reasons that a switch would change. `few`: the site is a linear, whose product is by design the engine's from so many tokens on. What is expected up to there is a yes.
    """
    kinds = {d.kind for d in decisions} - ({"not_applicable"} if few and decisions[0].applies else set())
    if kinds == {"expected"}:
        return "yes"
    if kinds & {"expected", "fallback"} or any(is_open(d.reason) for d in decisions):
        return "depends"
    return "off" if all(d.kind == "refused" and d.reason in off for d in decisions) else "no"


def is_open(reason: str) -> bool:
    """Whether a reason says that something is not known."""
    return "not known" in reason


def _parts(reason: str) -> tuple[str, ...]:
    off, unless, why = reason.partition(f" {UNLESS}: ")
    if unless:  # said once of all that are off for the same reason: which these are, the table says
        first = why[0] if why.startswith(tuple(SPELT.values())) else why[0].upper()
        return (f"{off.partition(' is ')[2]} {UNLESS}. {first}{why[1:]}",)
    _, by, said = reason.partition(f" is {OFF_BY} ")
    if by:
        return (f"{OFF_BY} {said}",)
    what, _, measured = reason.partition(MEASURED)
    return (what, f"{MEASURED[2:]}{measured}") if measured else (what,)


class Footnotes:
    """Reasons by their numbers, in the order in which they are first asked for. A measurement of several is one of its own."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._sites: dict[str, set[str]] = {}

    def mark(self, reasons: Mapping[str, Collection[str]]) -> str:
        """The numbers of some reasons, each with the sites that it is given for: `[1, 3]`."""
        numbers = set()
        for reason, sites in reasons.items():
            for part in _parts(reason):
                numbers.add(self._numbers.setdefault(part, len(self._numbers) + 1))
                self._sites.setdefault(part, set()).update(sites)
        return f"[{', '.join(map(str, sorted(numbers)))}]"

    def table(self, width: int) -> Table:
        """All of them, a number and a paragraph each, which begins with the number of sites."""
        from rich.table import Table

        grid = Table.grid(padding=(0, 1))
        grid.add_column(no_wrap=True, justify="right", style="dim")
        grid.add_column(max_width=width - len(str(len(self._numbers))) - 3)
        for reason, number in self._numbers.items():
            count = len(self._sites[reason])
            grid.add_row(f"[{number}]", f"{sites_in_words(count)}: {reason}")
        return grid


def show_summary(rows: Iterable[Mapping[str, Any]], to: Console) -> Footnotes:
    """The table and its footnotes."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("fusion", overflow="fold")
    table.add_column("sites", justify="right", no_wrap=True)
    rows = list(rows)
    answers = [answer for answer in ANSWERS if any(answer in row for row in rows)]
    for answer in answers:
        table.add_column(answer, style=ANSWERS[answer])
    notes = Footnotes()
    for row in rows:
        given = {answer: row[answer] for answer in answers if answer in row}
        cells = {answer: f"{sites} {notes.mark(reasons)}" for answer, (sites, reasons) in given.items()}
        total = str(sum(sites for sites, _ in given.values()))
        table.add_row(Text(row["fusion"]), total, *(Text(cells.get(answer, "")) for answer in answers))
    show(table, to)
    to.print()
    show(notes.table(prose_width(to)), to)
    return notes
