"""One run: the case, its peers, every number of tokens; prepared, checked, timed, gathered."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import define

from .cases import TOKENS, check_tokens
from .choosing import Options, make_case
from .errors import BenchError, CannotMeasureError
from .result import NOT_ASKED_FOR, Attendance, Host, Measured, Result, Row

if TYPE_CHECKING:
    import torch

    from ..registry.lookup import Registry
    from .check import Verdict
    from .inputs import Work
    from .peers import Call, Peer, Setting
    from .timing import Graph, Timing

Step = Callable[[str, int], None]
"""Told what is being done, and how many steps there are."""

ROUNDS, QUICK_ROUNDS = 40, 10

METHODS = {
    "cuda": "CUDA graphs with one call per set of inputs, replayed; microseconds per call, median over rounds in which all "
    "peers take turns; results of the replays are checked against float64",
    "cpu": "the clock around one call per set of inputs; microseconds per call, median over rounds in which all peers take "
    "turns; results are checked against float64",
}


@define
class _Entrant:
    """A peer on its way through one number of tokens."""

    peer: Peer
    calls: Sequence[Call] = ()
    graph: Graph | None = None
    verdict: Verdict | None = None
    failure: str = ""


def run(
    fusion: str,
    *,
    model: str | None = None,
    widths: Sequence[int] | None = None,
    tokens: Sequence[int] | None = None,
    peers: Sequence[str] | None = None,
    aiter: Path | None = None,  # noqa: A002 (the project, not the builtin)
    vllm: Path | None = None,
    quick: bool = False,
    device: str | None = None,
    registry: Registry | None = None,
    rounds: int | None = None,
    step: Step = lambda _doing, _total: None,
    **options: Any,
) -> Result:
    """Measure a fusion's op, or that of another of its forms, against its peers.

    Args:
        fusion: a name of the catalog, `layerfuse.fusion.FUSIONS`, or the name of a form's op.
        model: whose widths, epsilons and weight offsets to take, from its first site where the fusion can stand; if not
            given, that of the first of `choosing.MODELS` that has one.
        widths: by hand instead, in the order of `op.widths`; for latents perhaps also of what follows them in a row.
        tokens: how many rows to try; by default from one to 65536 on a GPU and to 1024 on a CPU.
        peers: names of those to measure, `layerfuse` for all of ours; all that are here if not given.
        aiter: a checkout of ROCm/aiter, for its Triton ops.
        vllm: vLLM's compiled library or the folder that holds it, for its CUDA ops; the installed one if not given.
        quick: fewer tokens and rounds.
        device: cuda or cpu; the GPU if there is one.
        registry: what knows the model; the default one if not given.
        rounds: of timing, on a GPU; 40 if not given, 10 if quick.
        step: told of each step as it begins, for a progress bar.
        options: of the case, the fields of `bench.Options`: dtype, group_size, tma_aligned, heads, ...

    Raises:
        UnknownFusionError: no such fusion.
        UnknownPeerError: no such peer.
        UnknownModelError: no such model.
        BenchError: anything else that cannot be measured.
        CannotMeasureError: torch, a GPU, or every peer that was asked for is missing; or the fusion's chain does not say
            what its op gives.
    """
    begun = time.perf_counter()
    if registry is None:
        from ..registry import default

        registry = default
    torch = _torch()
    from ..fusion import Target
    from . import environment, ours
    from .arithmetic import EXACT, compose
    from .peers import Setting, select
    from .roster import all_peers

    place = _device(torch, device)
    detected = Target.detect().fp8 if place.type == "cuda" else None
    case = make_case(
        fusion,
        registry=registry,
        model=model,
        widths=widths,
        detected_fp8="e4m3fn" if detected is None else detected,
        options=Options(**options),
    )
    compose(case.form, EXACT)  # what cannot be checked is not measured
    counts = check_tokens(TOKENS[place.type, quick] if tokens is None else tokens)
    setting = Setting(case=case, device=place.type, aiter=aiter, vllm=vllm)
    everybody = all_peers(setting)
    wanted = select(everybody, peers, setting, quick)
    reasons = {peer.name: peer.why_not(setting) for peer in wanted}
    present = [peer for peer in wanted if reasons[peer.name] is None]
    if not present:
        raise CannotMeasureError(
            "none of these peers can run here: " + "; ".join(f"{n}: {why}" for n, why in reasons.items())
        )
    total = len(counts) * (len(present) + 1) + 1
    wanted_rounds = rounds or (QUICK_ROUNDS if quick else ROUNDS)
    rows: list[Row] = []
    host: tuple[Host, ...] = ()
    with torch.inference_mode():
        for count in counts:
            row, entrants = _row(count, place, setting, present, wanted_rounds, lambda doing: step(doing, total))
            rows.append(row)
            if count == counts[0]:
                step(f"{count} tokens: time on the host", total)
                host = _host(torch, place, entrants)
            del entrants
            torch._dynamo.reset()
            if place.type == "cuda":
                torch.cuda.empty_cache()
    chosen = ours.chosen_name(setting)
    return Result(
        case=case,
        ours=chosen if any(peer.name == chosen for peer in present) else None,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        device=place.type,
        method=METHODS[place.type],
        environment=environment.environment(place),
        peers=tuple(_attendance(peer, wanted, reasons, peers, setting) for peer in everybody),
        rows=tuple(rows),
        host_tokens=counts[0],
        host=host,
        seconds=round(time.perf_counter() - begun, 1),
    )


def _torch() -> Any:
    try:
        import torch
        import torch._dynamo
    except ModuleNotFoundError as error:
        raise CannotMeasureError(f"{error.name} is not installed; pip install 'layerfuse[torch]'") from None
    return torch


def _device(torch: Any, wanted: str | None) -> torch.device:
    there = torch.cuda.is_available()
    if wanted not in (None, "cpu", "cuda"):
        raise BenchError(f"device must be cuda or cpu, got {wanted!r}")
    if wanted == "cuda" and not there:
        raise CannotMeasureError("torch finds no GPU on this machine; use device cpu")
    if wanted == "cpu" or not there:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _attendance(
    peer: Peer,
    wanted: Sequence[Peer],
    reasons: dict[str, str | None],
    asked: Sequence[str] | None,
    setting: Setting,
) -> Attendance:
    left_out = "left out here, as it takes long to tune; ask for it with --peers" if asked is None else NOT_ASKED_FOR
    why_not = reasons[peer.name] if peer in wanted else left_out
    return Attendance(
        name=peer.name,
        about=peer.about,
        present=why_not is None,
        why_not=why_not,
        version=peer.version(setting) if why_not is None else None,
        rounds_between=peer.rounds_between,
    )


def _row(
    tokens: int,
    place: torch.device,
    setting: Setting,
    peers: Sequence[Peer],
    rounds: int,
    step: Callable[[str], None],
) -> tuple[Row, list[_Entrant]]:
    from . import inputs, timing

    case, cache = setting.case, inputs.cache_size(place)
    sets = inputs.sets_for(case, tokens, place, len(peers))
    work = inputs.make(case, tokens, place, sets)
    entrants = []
    for peer in peers:
        step(f"{tokens} tokens: {peer.name}")
        entrants.append(_prepare(peer, work, setting))
    _check(work, entrants)
    step(f"{tokens} tokens: timing")
    good = [entrant for entrant in entrants if entrant.verdict is not None and entrant.verdict.ok]
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


def _prepare(peer: Peer, work: Work, setting: Setting) -> _Entrant:
    """Build and compile it. What it raises is its own failure, and stops nobody else."""
    from . import timing

    entrant = _Entrant(peer)
    try:
        entrant.calls = peer.build(work, setting)
        if work.device.type == "cuda":
            moved = work.case.bytes_moved(work.tokens)
            entrant.graph = timing.Graph(entrant.calls, timing.repeats_for(len(work.sets), moved))
        else:
            for call in entrant.calls:
                call()
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        entrant.failure = f"{type(error).__name__}: {lines[0]}".strip(": ")[:300]
    return entrant


def _check(work: Work, entrants: Sequence[_Entrant]) -> None:
    """The first and the last set of everybody, written anew after all results were made NaN."""
    from . import check

    alive = [entrant for entrant in entrants if not entrant.failure]
    for index in dict.fromkeys((0, len(work.sets) - 1)):
        right = check.expected(work, index)
        for entrant in alive:
            if entrant.verdict is not None and not entrant.verdict.ok:
                continue
            results = _anew(entrant, index)
            if entrant.peer.is_copy:
                verdict = check.check_copy(results)
            else:
                verdict = check.check(work, right, results, entrant.peer.rounds_between)
            if entrant.verdict is None or not verdict.ok or verdict.error > entrant.verdict.error:
                entrant.verdict = verdict


def _anew(entrant: _Entrant, index: int) -> tuple[torch.Tensor, ...]:
    from . import check
    from .peers import InPlace

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


def _measured(entrant: _Entrant, timing: Timing | None) -> Measured:
    verdict = entrant.verdict
    word = "failed" if verdict is None else "ok" if verdict.ok else "wrong"
    return Measured(
        peer=entrant.peer.name,
        verdict=word,
        us=None if timing is None else timing.us,
        low=None if timing is None else timing.low,
        high=None if timing is None else timing.high,
        rounds=0 if timing is None else timing.rounds,
        calls=0 if timing is None else timing.calls,
        error=None if verdict is None or entrant.peer.is_copy else _finite(verdict.error),
        quant_error=None if verdict is None else _finite(verdict.quant_error),
        message=entrant.failure if verdict is None else verdict.message,
    )


def _finite(number: float | None) -> float | None:
    """JSON has no NaN and no infinity."""
    return number if number is not None and abs(number) < float("inf") else None


def _host(torch: Any, place: torch.device, entrants: Sequence[_Entrant]) -> tuple[Host, ...]:
    if place.type != "cuda":
        return ()
    from . import timing

    calls = {
        one.peer.name: one.calls[0]
        for one in entrants
        if one.verdict is not None and one.verdict.ok and not one.peer.is_copy
    }
    timings = timing.time_host(calls, torch.cuda.synchronize)
    return tuple(Host(peer=name, us=found.us, low=found.low, high=found.high) for name, found in timings.items())
