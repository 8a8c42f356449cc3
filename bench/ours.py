"""Our ops as peers, one per backend: the chosen one as users call it, the others by their functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from ..fusion import backends
from ..fusion.ops.library import case_maker, public
from .inputs import Work, make
from .peers import OURS, Call, Peer, Setting
from .rank_group import rank_group


def our_peers(setting: Setting) -> list[Peer]:
    """Every backend of the op, the preferred one first."""
    op = setting.case.op
    chosen, case = _chosen(setting), _case(setting)
    return [
        Peer(
            name=_named(name),
            about=f"layerfuse.fusion.ops.{op}" if name == chosen else f"layerfuse's {name} backend, called directly",
            why_not=functools.partial(_why_not, reason),
            build=functools.partial(_build, name, name == chosen),
        )
        for name, reason in backends.survey(op, setting.device, case)
    ]


def settle(setting: Setting, place: torch.device) -> None:
    """Set up what the op's ranks need of each other, so that the backend that is named is the one that runs.

    Raises:
        RankError: on all ranks, where that failed beyond a reason.
    """
    _public(setting)
    prepared = rank_group().together(lambda: backends.prepare(setting.case.op, place, _case(setting)))
    if any(problem is not None for _, problem in prepared):
        backends.decide_again()


def chosen_name(setting: Setting) -> str:
    """The peer that users of the op get."""
    return _named(_chosen(setting))


def our_names(setting: Setting) -> list[str]:
    """Those of `our_peers`; asks no backend, as one may want a GPU or a process group."""
    _public(setting)
    return [*map(_named, backends.names(setting.case.op))]


def _named(backend: str) -> str:
    return f"{OURS} ({backend})"


def _chosen(setting: Setting) -> str:
    _public(setting)
    return backends.choose(setting.case.op, setting.device, _case(setting)).name


def _public(setting: Setting) -> Callable[..., Any]:
    """The op as users call it; defines it if nobody has."""
    return public(setting.case.form.op, setting.case.declared.backends)


def _why_not(reason: str | None, _: Setting) -> str | None:
    return reason


def _case(setting: Setting) -> Hashable:
    """What decides which backend takes the calls; one row of each input tells it."""
    work = make(setting.case, 1, torch.device("cpu"), 1)
    return case_maker(setting.case.form.op)(*work.arguments(work.sets[0]))


def _build(name: str, chosen: bool, work: Work, setting: Setting) -> Sequence[Call]:
    function = _public(setting) if chosen else _function(name, setting)
    calls = [functools.partial(function, *work.arguments(rows)) for rows in work.sets]
    return [functools.partial(_alone, call) for call in calls] if len(setting.case.form.op.results) == 1 else calls


def _alone(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return (call(),)


def _function(name: str, setting: Setting) -> Callable[..., Any]:
    """The plain callable of a backend that is not the chosen one."""
    forced = backends._forced[:]
    backends.force(name)
    try:
        return backends.choose(setting.case.op, setting.device, _case(setting)).function
    finally:
        backends.force(forced[0] if forced else None)
