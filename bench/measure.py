"""One run: the case, its peers, every number of tokens; prepared, checked, timed, gathered."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import attrs
from attrs import frozen

from ..adapters.arguments import check_counts, expect, expect_callable
from ..adapters.errors import counted, shown
from .cases import TOKENS, check_tokens, known_form
from .choosing import make_case, options_named
from .errors import BenchError, CannotMeasureError
from .rank_group import first, rank_group
from .ranks import Ranks, need_torch, ranks_for
from .result import NOT_ASKED_FOR, Attendance, Host, Result, Row

if TYPE_CHECKING:
    from ..registry.lookup import Registry
    from .peers import Peer, Setting

Step = Callable[[str, int], None]
"""Told what is being done, and how many steps there are."""

ROUNDS, QUICK_ROUNDS = 40, 10

METHODS = {
    "cuda": "CUDA graphs with one call per set of inputs, replayed; microseconds per call, median over rounds in which all "
    "peers take turns; results of the replays are checked against float64",
    "cpu": "the clock around one call per set of inputs; microseconds per call, median over rounds in which all peers take "
    "turns; results are checked against float64",
}


OVER_RANKS = "; {} ranks, each with parts of its own, replay the same in the same order and line up before each; the slowest rank's time counts"


@frozen(kw_only=True)
class _Question:
    """What is measured with whom: the same on every rank."""

    setting: Setting
    counts: tuple[int, ...]
    peers: tuple[str, ...] | None
    quick: bool
    rounds: int


def run(
    fusion: str,
    *,
    model: str | None = None,
    widths: Sequence[int] | None = None,
    tokens: Sequence[int] | None = None,
    peers: Sequence[str] | None = None,
    aiter: Path | None = None,  # noqa: A002 (the project, not the builtin)
    quick: bool = False,
    device: str | None = None,
    ranks: int | Ranks | None = None,
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
        quick: fewer tokens and rounds.
        device: cuda or cpu; the GPU if there is one.
        ranks: of a fusion that starts with an all-reduce, how many processes to start, one per GPU: all GPUs if not given,
            two processes on a CPU; or `bench.Ranks`, for several runs.
        registry: what knows the model; the default one if not given.
        rounds: of timing, on a GPU; 40 if not given, 10 if quick.
        step: told of each step as it begins, for a progress bar.
        options: of the case, the fields of `bench.Options`: dtype, group_size, tma_aligned, heads, ...

    Raises:
        UnknownFusionError: no such fusion.
        UnknownPeerError: no such peer.
        UnknownModelError: no such model.
        BenchError: anything else that cannot be measured.
        RankError: a rank died, failed beyond what one peer does, or fell silent.
        CannotMeasureError: torch, a GPU, or every peer that was asked for is missing; or the fusion's chain does not say
            what its op gives.
    """
    begun = time.perf_counter()
    from ..registry.lookup import Registry

    for name, value, kinds, what in (
        ("model", model, (str, NoneType), "a model's name"), ("peers", peers, (list, tuple, NoneType), "names of peers in a list"),
        ("aiter", aiter, (str, Path, NoneType), "a folder"), ("quick", quick, bool, "True or False"),
        ("device", device, (str, NoneType), "cuda or cpu"), ("registry", registry, (Registry, NoneType), "a Registry"),
        ("ranks", ranks, (int, Ranks, NoneType), "a number of processes, or bench.Ranks"),
    ):  # fmt: skip
        expect(name, value, kinds, what)
    if rounds is not None:
        check_counts(rounds=rounds)
    expect_callable("step", step)
    if registry is None:
        from ..registry import default

        registry = default
    torch = need_torch()
    from ..fusion import Target
    from .arithmetic import EXACT, compose
    from .baselines import names
    from .peers import Setting, check_names

    over_ranks = known_form(fusion)[0].across_ranks
    if ranks is not None and not over_ranks:
        raise BenchError(f"{fusion} runs on one rank; several are for what starts with an all-reduce")
    if isinstance(ranks, Ranks) and device not in (None, ranks.device):
        raise BenchError(f"these ranks are on {ranks.device}, and device is {device}")
    if over_ranks:
        size, kind = (ranks.size, ranks.device) if isinstance(ranks, Ranks) else ranks_for(ranks, device)
    else:
        size, kind = 1, _device(torch, device)
    detected = Target.detect().fp8 if kind == "cuda" else None
    case = make_case(
        fusion,
        registry=registry,
        model=model,
        widths=widths,
        detected_fp8="e4m3fn" if detected is None else detected,
        ranks=size,
        options=options_named(options),
    )
    compose(case.form, EXACT)  # what cannot be checked is not measured
    setting = Setting(case=case, device=kind, aiter=aiter)
    if peers is not None and over_ranks and not (isinstance(ranks, Ranks) and ranks.started):
        # Processes take seconds to start. Those that run may have peers of their own, and are asked.
        check_names(names(setting), peers)
    question = _Question(
        setting=setting,
        counts=check_tokens(TOKENS[kind, quick] if tokens is None else tokens),
        peers=None if peers is None else tuple(peers),
        quick=quick,
        rounds=rounds or (QUICK_ROUNDS if quick else ROUNDS),
    )
    if not over_ranks:
        result = measured(question, step)
    else:
        with nullcontext(ranks) if isinstance(ranks, Ranks) else Ranks(size, kind) as started:
            result = started.call(measured, question, step=step)[0]
    return attrs.evolve(result, seconds=round(time.perf_counter() - begun, 1))


def measured(question: _Question, step: Step) -> Result:
    """The answer, found in this process; of a fusion over ranks on all of them at once."""
    import torch

    from . import environment, ours, runs
    from .baselines import all_peers
    from .peers import select

    setting, counts, ranks = question.setting, question.counts, rank_group().size
    place = torch.device(setting.device, *([torch.cuda.current_device()] if setting.device == "cuda" else []))
    if ranks > 1:
        ours.settle(setting, place)
    everybody = all_peers(setting)
    wanted = select(everybody, question.peers, setting, question.quick)
    reasons = {peer.name: first(rank_group().gather(peer.why_not(setting))) for peer in wanted}
    present = [peer for peer in wanted if reasons[peer.name] is None]
    if not present:
        raise CannotMeasureError(
            "none of these peers can run here: " + "; ".join(f"{n}: {why}" for n, why in reasons.items())
        )
    # On a CPU a call's time is the host's, and ranks would wait for each other.
    on_host = place.type == "cuda" and ranks == 1
    total = len(counts) * (len(present) + 1) + on_host
    rows: list[Row] = []
    host: tuple[Host, ...] = ()
    with torch.inference_mode():
        for count in counts:
            row, found = runs.row(count, place, setting, present, question.rounds, lambda doing: step(doing, total))
            rows.append(row)
            if on_host and count == counts[0]:
                step(f"{counted(count, 'token')}: time on the host", total)
                host = runs.host(found)
            del found
            torch._dynamo.reset()
            if place.type == "cuda":
                torch.cuda.empty_cache()
    chosen = ours.chosen_name(setting)
    return Result(
        case=setting.case,
        ours=chosen if any(peer.name == chosen for peer in present) else None,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        device=place.type,
        method=METHODS[place.type] + (OVER_RANKS.format(ranks) if ranks > 1 else ""),
        environment=environment.environment(place),
        peers=tuple(_attendance(peer, wanted, reasons, question.peers, setting) for peer in everybody),
        rows=tuple(rows),
        host_tokens=counts[0],
        host=host,
        seconds=0.0,
    )


def _device(torch: Any, wanted: str | None) -> str:
    there = torch.cuda.is_available()
    if wanted not in (None, "cpu", "cuda"):
        raise BenchError(f"device must be cuda or cpu, got {shown(wanted)}")
    if wanted == "cuda" and not there:
        raise CannotMeasureError("torch finds no GPU on this machine; use device cpu")
    return "cuda" if there and wanted != "cpu" else "cpu"


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
    )
