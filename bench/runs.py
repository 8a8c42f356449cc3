"""A peer on its way through one number of tokens: built and captured, checked, timed. Several ranks do each step together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
import torch
from attrs import define

from . import check, inputs, sums, timing
from .inputs import Work
from .peers import Call, InPlace, Peer, RefusedError, Setting, is_ours
from .rank_group import first, said, team
from .result import Host, Measured, Row
from .timing import Graph, Timing


@define
class Entrant:
    """A peer, and what has become of it."""

    peer: Peer
    calls: Sequence[Call] = ()
    graph: Graph | None = None
    verdict: check.Verdict | None = None
    failure: str = ""
    refused: bool = False

    @property
    def ok(self) -> bool:
        """Whether its results were right."""
        return self.verdict is not None and self.verdict.ok


def row(
    tokens: int,
    place: torch.device,
    setting: Setting,
    peers: Sequence[Peer],
    rounds: int,
    step: Callable[[str], None],
) -> tuple[Row, list[Entrant]]:
    """All peers with one number of tokens."""
    case, cache = setting.case, inputs.cache_size(place)
    sets = min(team().gather(inputs.sets_for(case, tokens, place, len(peers))))
    work = inputs.make(case, tokens, place, sets)
    entrants = []
    for peer in peers:
        step(f"{tokens} tokens: {peer.name}")
        entrants.append(_prepare(peer, work, setting))
    step(f"{tokens} tokens: timing")
    _check(work, entrants)
    good = [entrant for entrant in entrants if entrant.ok]
    if place.type == "cuda":
        timings = timing.time_graphs({one.peer.name: one.graph for one in good if one.graph is not None}, rounds)
    else:
        timings = timing.time_calls({one.peer.name: one.calls for one in good}, rounds)
    moved = case.bytes_moved(tokens)
    return Row(
        tokens=tokens,
        sets=sets,
        bytes_read=case.bytes_read(tokens),
        bytes_written=case.bytes_written(tokens),
        caches=round(sets * moved / cache, 3) if cache else None,
        measured=tuple(_measured(entrant, timings.get(entrant.peer.name)) for entrant in entrants),
    ), entrants


def _prepare(peer: Peer, work: Work, setting: Setting) -> Entrant:
    """Build and compile it. What it raises is its own failure, and stops nobody else."""
    entrant = Entrant(peer)

    def build() -> None:
        entrant.calls = peer.build(work, setting)

    def capture() -> None:
        if work.device.type == "cuda":
            repeats = timing.repeats_for(len(work.sets), work.case.bytes_moved(work.tokens))
            entrant.graph = timing.Graph(entrant.calls, repeats)
        else:
            for call in entrant.calls:
                call()

    def start() -> None:
        if entrant.graph is not None:
            if peer.captured is not None:
                peer.captured()
            entrant.graph.start()

    for do in (build, capture, start):
        problem = None
        try:
            do()
        except RefusedError as error:
            entrant.refused, problem = True, str(error)
        except Exception as error:
            problem = said(error)
        # No rank calls what another one could not prepare.
        entrant.failure = first(team().gather(problem)) or ""
        if entrant.failure:
            break
    return entrant


def _check(work: Work, entrants: Sequence[Entrant]) -> None:
    """The first and the last set of everybody, written anew after all results were made NaN."""
    alive = [entrant for entrant in entrants if not entrant.failure]
    for index in dict.fromkeys((0, len(work.sets) - 1)):
        right = check.expected(work, index)
        senses = sums.senses(work, index)
        for entrant in alive:
            if entrant.verdict is not None and not entrant.verdict.ok:
                continue
            verdict = _worst(team().gather(_verdict(work, index, right, senses, entrant)))
            if entrant.verdict is None or not verdict.ok or verdict.error > entrant.verdict.error:
                message = verdict.message or (entrant.verdict.message if entrant.verdict is not None else "")
                entrant.verdict = attrs.evolve(verdict, message=message)


def _verdict(
    work: Work,
    index: int,
    right: tuple[torch.Tensor, ...],
    senses: Mapping[str, check.Slack | None],
    entrant: Entrant,
) -> check.Verdict:
    results, peer = _anew(entrant, index), entrant.peer
    if peer.is_copy:
        return check.check_copy(results)
    if peer.check is not None:
        return peer.check(work, index, results)
    for sense, slack in senses.items():
        verdict = check.check(work, right, results, peer.rounds_between, slack)
        if verdict.ok:
            verdict = attrs.evolve(verdict, message=sense or verdict.message)
            break
    if team().size > 1 and is_ours(peer) and not sums.same_bits(results):
        return attrs.evolve(verdict, ok=False, message="its bits differ from those of the first rank")
    return verdict


def _worst(verdicts: Sequence[check.Verdict]) -> check.Verdict:
    """Of all ranks."""
    wrong = first([None if verdict.ok else verdict.message for verdict in verdicts])
    if wrong is not None:
        return attrs.evolve(next(verdict for verdict in verdicts if not verdict.ok), message=wrong)
    worst = max(verdicts, key=lambda verdict: verdict.error)
    return attrs.evolve(worst, message=next((each.message for each in verdicts if each.message), ""))


def _anew(entrant: Entrant, index: int) -> tuple[torch.Tensor, ...]:
    written = 1 if entrant.peer.is_copy else None  # the second result of the copy is its source
    if entrant.graph is not None:
        graph = entrant.graph.checked
        for results in graph.results:
            check.poison(results[:written])
        graph.write_anew()
        return graph.results[index]
    call = entrant.calls[index]
    # A fresh allocation of the same size is likely to get this memory.
    check.poison(call()[:written])
    if isinstance(call, InPlace):
        call.restore()
    return call()


def _measured(entrant: Entrant, timing: Timing | None) -> Measured:
    verdict = entrant.verdict
    word = ("refused" if entrant.refused else "failed") if verdict is None else "ok" if verdict.ok else "wrong"
    figures = (
        {"us": None, "low": None, "high": None, "rounds": 0, "calls": 0} if timing is None else attrs.asdict(timing)
    )
    return Measured(
        peer=entrant.peer.name,
        verdict=word,
        error=None if verdict is None or entrant.peer.is_copy else _finite(verdict.error),
        quant_error=None if verdict is None else _finite(verdict.quant_error),
        message=entrant.failure if verdict is None else verdict.message,
        **figures,
    )


def _finite(number: float | None) -> float | None:
    """JSON has no NaN and no infinity."""
    return number if number is not None and abs(number) < float("inf") else None


def host(entrants: Sequence[Entrant]) -> tuple[Host, ...]:
    """What a call of a GPU's costs the host, of whoever is right."""
    calls = {one.peer.name: one.calls[0] for one in entrants if one.ok and not one.peer.is_copy}
    timings = timing.time_host(calls, torch.cuda.synchronize)
    return tuple(Host(peer=name, us=found.us, low=found.low, high=found.high) for name, found in timings.items())
