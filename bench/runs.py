"""A peer on its way through one number of tokens: built and captured, checked, timed. Several ranks do each step together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
import torch
from attrs import define

from ..adapters.errors import counted
from . import check, inputs, sums, timing
from .inputs import Work
from .peers import Call, InPlace, Peer, RefusedError, Setting, is_ours
from .rank_group import first, rank_group, said
from .result import Host, Measured, Row
from .timing import Graph, Timing


@define
class PeerRun:
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
) -> tuple[Row, list[PeerRun]]:
    """All peers with one number of tokens."""
    case, cache, at = setting.case, inputs.cache_size(place), counted(tokens, "token")
    sets = min(rank_group().gather(inputs.sets_for(case, tokens, place, len(peers))))
    work = inputs.make(case, tokens, place, sets)
    runs = []
    for peer in peers:
        step(f"{at}: {peer.name}")
        runs.append(_prepare(peer, work, setting))
    step(f"{at}: timing")
    _check(work, runs)
    good = [run for run in runs if run.ok]
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
        measured=tuple(_measured(run, timings.get(run.peer.name)) for run in runs),
    ), runs


def _prepare(peer: Peer, work: Work, setting: Setting) -> PeerRun:
    """Build and compile it. What it raises is its own failure, and stops nobody else."""
    run = PeerRun(peer)

    def build() -> None:
        run.calls = peer.build(work, setting)

    def capture() -> None:
        if work.device.type == "cuda":
            repeats = timing.repeats_for(len(work.sets), work.case.bytes_moved(work.tokens))
            run.graph = timing.Graph(run.calls, repeats)
        else:
            for call in run.calls:
                call()

    def start() -> None:
        if run.graph is not None:
            if peer.captured is not None:
                peer.captured()
            run.graph.start()

    for do in (build, capture, start):
        problem = None
        try:
            do()
        except RefusedError as error:
            run.refused, problem = True, str(error)
        except Exception as error:
            problem = said(error)
        # No rank calls what another one could not prepare.
        run.failure = first(rank_group().gather(problem)) or ""
        if run.failure:
            break
    return run


def _check(work: Work, runs: Sequence[PeerRun]) -> None:
    """The first and the last set of everybody, written anew after all results were made NaN."""
    alive = [run for run in runs if not run.failure]
    for index in dict.fromkeys((0, len(work.sets) - 1)):
        right = check.expected(work, index)
        senses = sums.senses(work, index)
        for run in alive:
            if run.verdict is not None and not run.verdict.ok:
                continue
            verdict = _worst(rank_group().gather(_verdict(work, index, right, senses, run)))
            if run.verdict is None or not verdict.ok or verdict.error > run.verdict.error:
                message = verdict.message or (run.verdict.message if run.verdict is not None else "")
                run.verdict = attrs.evolve(verdict, message=message)


def _verdict(
    work: Work,
    index: int,
    right: tuple[torch.Tensor, ...],
    senses: Mapping[str, check.Slack | None],
    run: PeerRun,
) -> check.Verdict:
    results, peer = _anew(run, index), run.peer
    if peer.is_copy:
        return check.check_copy(results)
    if peer.check is not None:
        return peer.check(work, index, results)
    for sense, slack in senses.items():
        verdict = check.check(work, right, results, slack)
        if verdict.ok:
            verdict = attrs.evolve(verdict, message=sense or verdict.message)
            break
    if rank_group().size > 1 and is_ours(peer) and not sums.same_bits(results):
        return attrs.evolve(verdict, ok=False, message="its bits differ from those of the first rank")
    return verdict


def _worst(verdicts: Sequence[check.Verdict]) -> check.Verdict:
    """Of all ranks."""
    wrong = first([None if verdict.ok else verdict.message for verdict in verdicts])
    if wrong is not None:
        return attrs.evolve(next(verdict for verdict in verdicts if not verdict.ok), message=wrong)
    worst = max(verdicts, key=lambda verdict: verdict.error)
    return attrs.evolve(worst, message=next((each.message for each in verdicts if each.message), ""))


def _anew(run: PeerRun, index: int) -> tuple[torch.Tensor, ...]:
    written = 1 if run.peer.is_copy else None  # the second result of the copy is its source
    if run.graph is not None:
        graph = run.graph.checked
        for results in graph.results:
            check.poison(results[:written])
        graph.write_anew()
        return graph.results[index]
    call = run.calls[index]
    # A fresh allocation of the same size is likely to get this memory.
    check.poison(call()[:written])
    if isinstance(call, InPlace):
        call.restore()
    return call()


def _measured(run: PeerRun, timing: Timing | None) -> Measured:
    verdict = run.verdict
    word = ("refused" if run.refused else "failed") if verdict is None else "ok" if verdict.ok else "wrong"
    figures = (
        {"us": None, "low": None, "high": None, "rounds": 0, "calls": 0} if timing is None else attrs.asdict(timing)
    )
    return Measured(
        peer=run.peer.name,
        verdict=word,
        error=None if verdict is None or run.peer.is_copy else _finite(verdict.error),
        quant_error=None if verdict is None else _finite(verdict.quant_error),
        message=run.failure if verdict is None else verdict.message,
        **figures,
    )


def _finite(number: float | None) -> float | None:
    """JSON has no NaN and no infinity."""
    return number if number is not None and abs(number) < float("inf") else None


def host(runs: Sequence[PeerRun]) -> tuple[Host, ...]:
    """What a call of a GPU's costs the host, of whoever is right."""
    calls = {one.peer.name: one.calls[0] for one in runs if one.ok and not one.peer.is_copy}
    timings = timing.time_host(calls, torch.cuda.synchronize)
    return tuple(Host(peer=name, us=found.us, low=found.low, high=found.high) for name, found in timings.items())
