"""One module that an engine compiles: its plan, and what became of each piece of its graph in each range of tokens."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import attrs
import cattrs
import torch
from attrs import define, field, frozen
from torch._dynamo.utils import counters

from ..fusion.engine import Engine
from ..fusion.planning import Plan, plan
from ..fusion.report import GraphRecord, Report
from ..fusion.rewrite import ModuleIndex, Pipeline
from ..fusion.shadow import Shadow
from ..fusion.sites import DECODE
from . import record_cache
from .host import here
from .pieces import Outline, PieceRecord, Sites
from .placement import Placement
from .process import once

Source = Literal["rewritten", "equal", "cache", "unknown", "kept", "module"]
"""Whether a piece was rewritten here, is equal to one that was, came from a cache with a record or without one, or was read
with the whole model from the engine's cache. `module`: it is none, but what stands in the modules of a model that is not compiled."""


@frozen(kw_only=True)
class Started:
    """What torch and our pass had done before a piece was compiled."""

    graphs: int
    "Those that our pass came to."
    misses: int = field(factory=lambda: counters["aot_autograd"]["autograd_cache_miss"])
    "Graphs that AOTAutograd's cache did not hold; Inductor's may."
    served: int = field(factory=lambda: counters["inductor"]["fxgraph_cache_hit"])
    compiled: int = field(factory=lambda: counters["inductor"]["fxgraph_cache_miss"])
    "Those that neither held; some of an engine's ways ask AOTAutograd's alone."

    def compiled_since(self) -> bool:
        """Whether torch has compiled a graph since then, as no cache of its held it."""
        now = Started(graphs=self.graphs)
        return now.compiled > self.compiled or (now.misses > self.misses and now.served == self.served)


@frozen(kw_only=True)
class Piece:
    """One piece in one range of tokens."""

    number: int
    tokens: str
    "The range of tokens as the engine writes it."
    source: Source
    record: GraphRecord
    sites: tuple[str, ...] = ()
    "Those whose norms stand in it; kept only where no record is known."


@define(kw_only=True, eq=False)
class CompiledModule:
    """One compiled module of one loaded model, in this process."""

    name: str
    "The class of the module."
    model: str
    "The class of the loaded model."
    path: str
    "Where the module is in that; the plan's sites are below it."
    plan: Plan
    around: ModuleIndex
    config: Any = field(repr=False)
    "The engine's own."
    device: torch.device
    "Of the module's parameters."
    strict: bool
    report_path: str | None = None
    "As asked for."
    unknown: dict[str, str] = field(factory=dict)
    outside: tuple[str, ...] = ()
    "Layers with sites that text runs and no compiled module holds."
    unread: dict[str, str] = field(factory=dict)
    "What no adapter reads of towers that no text runs -> class. Nothing is expected of it."
    find_unfound: Callable[[], dict[str, str]] = field(default=dict, repr=False)
    "Finds `unfound`, by the plans of all of the model's modules as they are then."
    at_modules: str | None = None
    "Why the engine does not compile the model, where the fused ops stand in its modules; None: it compiles it."
    placements: dict[str, Placement] = field(factory=dict)
    "What stands at seams that no graph shows: by the fusion, or where there are several by what holds them."
    untouched: range = range(0)
    "Numbers of tokens in whose steps the engine's own graph runs, and nothing of layerfuse's is to be called."
    put_off: bool = False
    "Whether the profiling run was such a step, so that the first other one is looked at in its place."
    shadow: Shadow | None = None
    "What ops gave beside their references, where that was asked for."
    engine: Engine | None = None
    "What is planned for where none of these takes anything."
    pieces: list[Piece] = field(factory=list)
    artefact: Path | None = None
    "The file that the engine keeps the compiled module in."
    kept_since: str | None = None
    "When the module was compiled, where it came from the engine's cache with its report."
    from_cache: bool = False
    counted: Counter[str] | None = None
    "Calls of ops in the run that is looked at (`run`), by the op's name; None before it."
    trouble: list[str] = field(factory=list)
    "What went wrong in layerfuse itself."
    pipeline: Pipeline = field(init=False)
    sites: Sites = field(init=False)
    key: str = field(default="", init=False)
    "What caches know the module by (`keys.key_for`); empty before its first call, and where nothing of it is to be rewritten."
    forced: bool = field(default=False, init=False)
    "Whether the engine takes it whatever lies beside it."
    vouched: bool = field(default=False, init=False)
    "Whether a compiled module that lies in the engine's cache is taken."
    distrusts: bool = field(default=False, init=False)
    "Whether a compiled module without records lay in the engine's cache: it is compiled anew, and nothing of what was kept with it is taken."
    added: Any = field(default=None, init=False, repr=False)
    "The pass as it stands among the engine's."
    manager: str = field(default="", init=False)
    "The class of the engine's manager of passes, and whose code calls them."
    spoiled: str | None = field(default=None, init=False)
    "Why the pass is not among the engine's, or nobody was told of what is compiled, as a sentence: nothing of it may be kept under the key."
    _records: dict[tuple[str, str], PieceRecord] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.pipeline = Pipeline(self.plan, around=self.around)
        self.sites = Sites(self.plan, self.around)

    @property
    def unfound(self) -> dict[str, str]:
        """Fusions that are asked for by name and have no site in the loaded model -> why."""
        return self.find_unfound()

    def look_again(self) -> bool:
        """Before the first call: where something at seams stands aside from now on, plan anew what it would have taken. Whether it does."""
        aside = [each for each in self.placements.values() if each.look_again()]
        if aside:
            before = self.unfound
            self.plan = plan(self.plan.specs, self.plan.target, self.plan.config, self.engine)
            self.__attrs_post_init__()
            say_unfound(self.model, {name: why for name, why in self.unfound.items() if name not in before})
        return bool(aside)

    @property
    def active(self) -> bool:
        """Whether there is anything to rewrite, or to put into modules."""
        taken = (each for each in self.plan.decisions if each.kind in ("expected", "fallback"))
        return any(self.plan.site[each.site].role != DECODE for each in taken)

    @property
    def stands(self) -> bool:
        """Whether anything of layerfuse's is to stand in the module."""
        return self.active or any(each.key for each in self.placements.values())

    @property
    def run(self) -> str:
        """What the call is that is looked at: an engine makes a profiling run of what it compiles, and need not of what it does not."""
        if self.put_off:
            return f"first run of at most {self.untouched.start - 1} tokens"
        return "profiling run" if self.at_modules is None else "first run"

    # ---- pieces as they are compiled

    def piece_starts(self, outline: Outline, tokens: str) -> Started:
        """To be handed to `piece_ends` when the engine has its piece, which Inductor's cache is asked for as it is known there."""
        if self.added is not None:
            self.added.start = record_cache.start_of(self.key, outline.digest, tokens)
        return Started(graphs=self.pipeline.report.graphs)

    def piece_ends(self, outline: Outline, number: int, tokens: str, started: Started) -> bool:
        """Take down what became of a piece: the pass ran since it started, or the piece came from somewhere else.

        Args:
            outline: of the piece.
            number: the piece's, in the model.
            tokens: the range that it was compiled for.
            started: as `piece_starts` said.

        Returns:
            Whether it is known what is in it. A piece of which that is not known is to be kept nowhere.
        """
        piece = self._piece(outline, number, tokens, started)
        self.pieces.append(piece)
        known = self.vouched or (piece.source != "unknown" and piece.record.failed is None)
        if not known and self.spoiled is None:
            record_cache.distrust_piece(self.key, outline.digest, tokens)
        return known

    def _piece(self, outline: Outline, number: int, tokens: str, started: Started) -> Piece:
        key = (outline.digest, tokens)
        place, fresh = len(self.pieces), self.pipeline.report.records[started.graphs :]
        failed = self.spoiled
        if failed is None and not fresh and started.compiled_since():
            failed = f"{here().name}'s manager of passes ({self.manager}) compiled it without calling layerfuse's pass"
        if failed is not None:
            # A record of an equal piece would be of one that the pass came to.
            record = GraphRecord(graph=place, uses=(), failed=failed)
            return Piece(number=number, tokens=tokens, source="rewritten", record=record)
        if fresh:
            every: dict[str, Any] = {
                name: tuple(chain.from_iterable(map(attrgetter(name), fresh)))
                for name in ("uses", "unattributed", "strange", "others")
            }
            failed = next((each.failed for each in fresh if each.failed is not None), None)
            record = GraphRecord(graph=place, failed=failed, **every)
            known = self._records[key] = self.sites.anchored(outline, record)
            if record.failed is None:
                record_cache.keep_piece(self.key, *key, "" if self.added is None else self.added.start, known)
            return Piece(number=number, tokens=tokens, source="rewritten", record=record)
        sources: tuple[tuple[Source, PieceRecord | None], ...] = (
            ("equal", self._records.get(key)),
            ("cache", None if key in self._records else record_cache.find_piece(self.key, *key)),
        )
        for source, held in sources:
            found = None if held is None else self.sites.in_piece(outline, held, place)
            if found is not None:
                return Piece(number=number, tokens=tokens, source=source, record=found)
        nothing = GraphRecord(graph=place, uses=())
        return Piece(number=number, tokens=tokens, source="unknown", record=nothing, sites=self.sites.within(outline))

    # ---- kept with what the engine keeps of the model

    @property
    def _beside(self) -> Path:
        return (self.artefact or Path()).with_name(record_cache.BESIDE)

    def look_beside(self, artefact: Path, forced: bool = False) -> bool:
        """Whether the compiled module may be taken: records under this key lie beside it. Without them nobody knows what is in it.

        Args:
            artefact: the file that the engine keeps it in.
            forced: whether the engine has to take it whatever lies beside it.
        """
        self.artefact = artefact
        self.forced = forced
        self.vouched = forced or record_cache.read(self._beside, self.key) is not None
        self.distrusts = not self.vouched and artefact.exists()
        return self.vouched

    def forget(self) -> None:
        """Take away the compiled module and its records: another one takes its place, and where the engine cannot save that, none does."""
        if self.artefact is not None:
            self._beside.unlink(missing_ok=True)
            with suppress(OSError):  # of a cache that cannot be written: nothing is kept beside it either
                self.artefact.unlink(missing_ok=True)

    def keep(self) -> str | None:
        """Write the records beside the compiled module. None, or why that was not possible."""
        if self.spoiled is not None:  # no cache was on: with the module gone, nothing of this start is left
            self.forget()
        unsure = any(piece.record.failed is not None or piece.source == "unknown" for piece in self.pieces)
        # Without its records the compiled module is compiled anew by the next start.
        if self.artefact is None or unsure or not self.artefact.exists():
            return None
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return record_cache.write(
            self._beside, {"key": self.key, "compiled": now, "pieces": cattrs.unstructure(self.pieces)}
        )

    def take_kept(self) -> None:
        """Read the records that were written when the engine compiled what it has now read from its cache."""
        self.from_cache = True
        self.pieces.clear()
        data = None if self.artefact is None else record_cache.read(self._beside, self.key)
        if data is None:
            return
        try:
            pieces = cattrs.structure(data["pieces"], list[Piece])
            self.pieces = [attrs.evolve(each, source="kept") for each in pieces]
            self.kept_since = str(data["compiled"])
        except (KeyError, TypeError, cattrs.BaseValidationError):
            self.pieces.clear()

    # ---- what it comes to

    @property
    def parts(self) -> tuple[Piece, ...]:
        """Its pieces, and what stands at seams as one more, for any number of tokens."""
        number, placements = len(self.pieces), self.placements.values()
        uses = tuple(use for each in placements for use in each.uses(self.run))
        strange = tuple(norm for each in placements for norm in each.strange)
        record = GraphRecord(graph=number, uses=uses, strange=strange)
        last = [Piece(number=number, tokens="any", source="module", record=record)] if uses or strange else []
        return (*self.pieces, *last)

    def report(self) -> Report:
        """The report over all pieces and ranges."""
        made = Report(self.plan, at_modules=self.at_modules is not None)
        made.unknown = dict(self.unknown)
        for piece in self.parts:
            made.add(piece.record)
        return made

    def ranges(self) -> dict[str, Counter[str]]:
        """Range of tokens -> calls of each fused op in one run of the model, by the records."""
        found: dict[str, Counter[str]] = {piece.tokens: Counter() for piece in self.pieces} or {"any": Counter()}
        for piece in self.parts:
            for calls in (found[piece.tokens],) if piece.tokens in found else found.values():
                calls.update(use.form for use in piece.record.uses if use.form is not None)
                calls.update(piece.record.others)
        return found


def unfound_lines(model: str, unfound: dict[str, str]) -> list[str]:
    """A sentence for each fusion that is asked for by name and has no site in a model of this class."""
    return [f"{name} is asked for, and has no site in {model}: {why}" for name, why in unfound.items()]


def say_unfound(model: str, unfound: dict[str, str]) -> None:
    """Say so, once each."""
    for line in unfound_lines(model, unfound):
        once(logging.WARNING, "layerfuse: %s", line)
