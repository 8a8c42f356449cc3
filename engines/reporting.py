"""The report: one block in the engine's log, one JSON file, over all pieces, ranges of tokens and tensor-parallel ranks."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from itertools import chain, count
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import torch.distributed as dist
from attrs import define, field

from .. import __version__
from ..fusion.ops.agreement import patience
from . import record_cache
from .compiled_module import CompiledModule
from .host import here
from .process import of_each_class, once
from .rank_report import Outcome, RankReport, differences, lines_of, rank_report_of

PATIENCE = timedelta(minutes=2)
"""How long a rank waits for the others' reports."""


@define
class _File:
    """What this process has written into one file: a model may have several compiled modules."""

    engine: str
    modules: dict[str, Any] = field(factory=dict)
    names: WeakKeyDictionary[CompiledModule, str] = field(factory=WeakKeyDictionary)
    "What those that live are called in it."

    def named(self, compiled: CompiledModule) -> str:
        """By its model and where it is in that; the model has a number where another one of the same class has a module there, as a draft's target."""
        if compiled not in self.names:
            models = chain([compiled.model], (f"{compiled.model} ({number})" for number in count(2)))
            names = (".".join(filter(None, (model, compiled.path))) for model in models)
            self.names[compiled] = next(name for name in names if name not in self.names.values())
        return self.names[compiled]


_written: dict[Path, _File] = {}


def publish(compiled: CompiledModule) -> None:
    """Say what became of a module's plan, on the first rank of its group.

    Raises:
        FusionMissedError: strict, and an expected fusion is missing on some rank.
        CallsDifferError: strict, and the run that was looked at called other fused ops than the report says.
    """
    rank, ranks = _together(compiled)
    outcome = Outcome(plan=compiled.plan, ranks=ranks, unknown=compiled.report().all_unknown(), run=compiled.run)
    if not compiled.put_off:  # else it was done at the run that compiled
        keep(compiled)
    if compiled.from_cache and not compiled.forced and any(differences(compiled)):
        compiled.forget()  # another one than the report is of, as two starts at the same time may leave: the next start compiles anew
    if rank == 0:
        path, engine = _file(compiled)
        problem = _write(path, engine, compiled, outcome)
        if problem is not None:
            once(logging.WARNING, "layerfuse: the report is in this log only: %s", problem)
        where = [] if problem is not None else [f"in full: {path}"]
        level = logging.WARNING if outcome.missed or outcome.problems or outcome.unknown else logging.INFO
        here().logger.log(level, "%s", "\n  ".join([_title(compiled, outcome), *_lines(compiled, outcome), *where]))
    if compiled.strict:
        outcome.check()


def keep(compiled: CompiledModule) -> None:
    """Keep beside what the engine's compiler has just written what its next start is to report."""
    if compiled.pieces and not compiled.from_cache and compiled.at_modules is None:
        problem = compiled.keep()
        if problem is not None:
            once(logging.WARNING, "layerfuse: a start from %s's cache will have no report: %s", here().name, problem)


def _title(compiled: CompiledModule, outcome: Outcome) -> str:
    ranks = len(outcome.ranks)
    of = "" if ranks == 1 else f", {ranks} ranks"
    return f"layerfuse {__version__} in {here().name} {here().version()}: {compiled.name} on {compiled.plan.target}{of}"


def _lines(compiled: CompiledModule, outcome: Outcome) -> list[str]:
    lines = lines_of(outcome)
    first = outcome.ranks[0]
    if len(outcome.ranks) > 1:
        differing = [report.rank for report in outcome.ranks if not report.same_as(first)]
        lines.append(f"ranks that differ from rank 0: {differing}" if differing else "all ranks say the same")
    ranges = {piece.tokens: None for piece in compiled.pieces}
    if ranges and compiled.at_modules is None:
        pieces = len({piece.number for piece in compiled.pieces})
        lines.append(
            f"over {_count(pieces, 'graph')} and {_count(len(ranges), 'range')} of tokens: {', '.join(ranges)}"
        )
    lines += first.notes
    lines += [f"problem: {problem}" for problem in outcome.problems]
    lines += [f"unknown: no adapter knows {of_a_class}" for of_a_class in of_each_class(outcome.unknown)]
    return lines


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _file(compiled: CompiledModule) -> tuple[Path, str]:
    """Where the report goes, and which of the engines of this host writes it."""
    path, engine = here().report_file(compiled)
    return (path if compiled.report_path is None else _not_anothers(path, engine)), engine


def _not_anothers(path: Path, engine: str) -> Path:
    """A file that was asked for, or the first numbered one beside it that no other engine on this machine has written and still runs."""
    found, number = path, 1
    while _is_anothers(found, engine):
        number += 1
        found = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return found


def _is_anothers(path: Path, engine: str) -> bool:
    if path in _written:
        return _written[path].engine != engine
    by = record_cache.written_by(path)
    return by is not None and by != os.getpid() and _runs(by)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def _write(path: Path, engine: str, compiled: CompiledModule, outcome: Outcome) -> str | None:
    """Write the report of every module of this process so far. None, or why that was not possible."""
    file = _written.get(path)
    if (
        file is None or file.engine != engine
    ):  # another's lies beside what the engine keeps: the same model, started again
        file = _written[path] = _File(engine)
    file.modules[file.named(compiled)] = {
        "class": compiled.name,
        "target": compiled.plan.target.to_dict(),
        "config": compiled.plan.config.to_dict(),
        "kept_since": compiled.kept_since,
        "sites": outcome.sites(),
        "missed": outcome.missed,
        "problems": list(outcome.problems),
        "unknown": dict(outcome.unknown),
        "outside": list(compiled.outside),
        "unread": dict(compiled.unread),
        "unfound": dict(compiled.unfound),
        **_compared(compiled),
        "ranks": [attrs.asdict(report) for report in outcome.ranks],
        "graphs": [
            {
                "number": p.number,
                "tokens": p.tokens,
                "source": p.source,
                "uses": [attrs.asdict(u) for u in p.record.uses],
            }
            for p in compiled.parts
        ],
    }
    return _put(path, file.modules)


def _put(path: Path, modules: dict[str, Any]) -> str | None:
    return record_cache.write(
        path, {"layerfuse": __version__, here().package: here().version(), "pid": os.getpid(), "modules": modules}
    )


def _compared(compiled: CompiledModule) -> dict[str, Any]:
    return {} if compiled.shadow is None else {"shadow": compiled.shadow.to_dict()}


def write_again(compiled: CompiledModule) -> None:
    """Bring what was compared into a report that is written already: by the first rank, of its own calls."""
    path, _ = _file(compiled)
    file = _written.get(path)
    if file is not None and compiled in file.names:
        file.modules[file.names[compiled]].update(_compared(compiled))
        _put(path, file.modules)


def _together(compiled: CompiledModule) -> tuple[int, tuple[RankReport, ...]]:
    """This rank, and the reports of all ranks of its tensor-parallel group."""
    rank, size, group = here().ranks()
    try:
        own = rank_report_of(compiled, rank)
    except Exception as error:  # the others wait for an answer
        problem = f"no report: {type(error).__name__}: {error}"
        own = RankReport(rank=rank, fused={}, missed={}, called=None, problems=(problem,))
    if size == 1 or not (compiled.active or compiled.placements) or dist.get_backend(group) != "gloo":
        return rank, (own,)
    reports: list[Any] = [None] * size
    try:
        # All ranks have just run the model together; one that does not come has failed elsewhere, and must not be waited for.
        dist.monitored_barrier(group, timeout=min(PATIENCE, patience(group)))
        dist.all_gather_object(reports, own, group=group)
    except RuntimeError as error:
        problem = f"not all of the {size} ranks gave an answer: {error}"
        return rank, (attrs.evolve(own, problems=(*own.problems, problem)),)
    return rank, tuple(reports)
