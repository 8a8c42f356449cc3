"""What a peer is: somebody who computes the same thing, or says why it cannot. Others can be added with `register`."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from ..adapters.arguments import expect
from .cases import Case
from .errors import UnknownPeerError
from .inputs import Work

if TYPE_CHECKING:
    from .check import Verdict

Call = Callable[[], tuple[Tensor, ...]]


@frozen(kw_only=True)
class Setting:
    """What decides whether a peer can run."""

    case: Case
    device: str
    "torch's device type: cuda or cpu."
    aiter: Path | None = None
    "A checkout of ROCm/aiter, or None to take what is installed."


@frozen(kw_only=True, eq=False)
class Peer:
    """Somebody who computes the same thing."""

    name: str
    about: str
    "What is called, in a sentence."
    why_not: Callable[[Setting], str | None]
    "Why it cannot run, or None where it can."
    build: Callable[[Work, Setting], Sequence[Call]]
    "One call per set of `work.sets`, in their order: the results of the op's schema, in its order, always as a tuple."
    is_copy: bool = False
    slow: bool = False
    "Whether it takes minutes to prepare: left out on a CPU and of a quick run, unless asked for by name."
    version: Callable[[Setting], str | None] = lambda _: None
    "Of what it runs, for the record."
    check: Callable[[Work, int, tuple[Tensor, ...]], Verdict] | None = None
    "From a set's number and the results to a verdict, for a peer that gives other results than the op; all ranks call it."
    captured: Callable[[], None] | None = None
    "Called on every rank after its calls were captured as a graph, before that is replayed."


class RefusedError(Exception):
    """What `build` raises where a peer does not take this number of tokens; the text says why. It counts as no failure."""


def over_sets(function: Callable[..., tuple[Tensor, ...]], work: Work) -> list[Call]:
    """One call of `function` per set, which takes the rows of the set."""
    return [functools.partial(function, *rows) for rows in work.sets]


class InPlace:
    """A call that writes its results over its inputs, and so has copies of them as its own (`own`, where they lie elsewhere).

    Repeated, it reads what it wrote: right for timing. Before it is checked, `restore` brings the inputs back.
    """

    def __init__(
        self,
        function: Callable[..., tuple[Tensor, ...]],
        rows: Sequence[Tensor],
        own: Sequence[Tensor] | None = None,
    ) -> None:
        self._function = function
        self._rows = tuple(rows)
        if own is None:
            own = [row.clone(memory_format=torch.contiguous_format) for row in rows]
        self._own = tuple(own)

    def __call__(self) -> tuple[Tensor, ...]:
        """Run it once more on what is in the copies."""
        return self._function(*self._own)

    def restore(self) -> None:
        """Bring the inputs back."""
        for own, row in zip(self._own, self._rows, strict=True):
            own.copy_(row)


_added: dict[str, Peer] = {}


def register(peer: Peer) -> None:
    """Measure this peer too, from now on. One of the same name is replaced."""
    expect("peer", peer, Peer, "a bench.Peer")
    _added[peer.name] = peer


def unregister(name: str) -> None:
    """Take back a `register`."""
    expect("name", name, str, "a peer's name")
    _added.pop(name, None)


def added() -> tuple[Peer, ...]:
    """What was registered."""
    return tuple(_added.values())


OURS = "layerfuse"
"""Asks for all of our backends."""


def select(peers: Iterable[Peer], wanted: Sequence[str] | None, setting: Setting, quick: bool) -> list[Peer]:
    """Those that were asked for by name, or all but the slow ones where that is not worth it.

    Raises:
        UnknownPeerError: a name that no peer has.
    """
    peers = list(peers)
    if wanted is None:
        return [peer for peer in peers if not (peer.slow and (quick or setting.device == "cpu"))]
    check_names([peer.name for peer in peers], wanted)
    return [peer for peer in peers if peer.name in wanted or (OURS in wanted and is_ours(peer))]


def check_names(known: Iterable[str], wanted: Iterable[str]) -> None:
    """Raise UnknownPeerError for a name that no peer has."""
    known = (OURS, *known)
    for name in wanted:
        if name not in known:
            raise UnknownPeerError(name, known)


def is_ours(peer: Peer) -> bool:
    """Whether it is one of layerfuse's backends."""
    return peer.name.startswith(f"{OURS} (")


def missing(module: str) -> bool:
    """Whether a module is not installed."""
    try:
        return importlib.util.find_spec(module) is None
    except (ImportError, ValueError):
        return True


def needs_triton(setting: Setting) -> str | None:
    """Why Triton kernels cannot run, or None."""
    if missing("triton"):
        return "Triton is not installed (pip install triton)"
    if setting.device == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return f"its kernels are Triton's, which compiles for GPUs, not for {setting.device}"


def needs_gpu(setting: Setting) -> str | None:
    """Why kernels that are compiled ahead for GPUs cannot run, or None."""
    return None if setting.device == "cuda" else f"its kernels are for GPUs, not for {setting.device}"
