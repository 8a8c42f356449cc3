"""Who is measured: ours on every backend, what others would run in its place, and the copy that nothing can beat.

A peer says whether it is here, or why not, and builds one call per set of inputs. Others can be added with `register`.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from . import plain
from .cases import Case
from .errors import UnknownPeerError
from .inputs import Work

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
    "One call per set of `work.sets`, in their order: the results of the op's schema, in its order."
    rounds_between: bool = False
    "Whether it quantises the rounded norm, which an unfused chain does: its results are then held to that."
    is_copy: bool = False
    slow: bool = False
    "Whether it takes minutes to prepare: left out on a CPU and of a quick run, unless asked for by name."
    version: Callable[[Setting], str | None] = lambda _: None
    "Of what it runs, for the record."


def over_sets(function: Callable[[Tensor, Tensor], tuple[Tensor, ...]], work: Work) -> list[Call]:
    """One call of `function` per set."""
    return [functools.partial(function, q, kv) for q, kv in work.sets]


_added: dict[str, Peer] = {}


def register(peer: Peer) -> None:
    """Measure this peer too, from now on. One of the same name is replaced."""
    _added[peer.name] = peer


def unregister(name: str) -> None:
    """Take back a `register`."""
    _added.pop(name, None)


def all_peers(setting: Setting) -> list[Peer]:
    """Every peer, here or not: ours first, the copy last."""
    from .ours import our_peers
    from .thirdparty import PEERS as THIRD_PARTY

    return [*our_peers(setting), EAGER, INDUCTOR, MAX_AUTOTUNE, *THIRD_PARTY, *_added.values(), COPY]


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
    names = {peer.name: peer for peer in peers}
    for name in wanted:
        if name != OURS and name not in names:
            raise UnknownPeerError(name, (OURS, *names))
    return [peer for peer in peers if peer.name in wanted or (OURS in wanted and is_ours(peer))]


def is_ours(peer: Peer) -> bool:
    """Whether it is one of layerfuse's backends."""
    return peer.name.startswith(f"{OURS} (")


def _here(_: Setting) -> str | None:
    return None


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


# ---- plain torch

EAGER = Peer(
    name="eager",
    about="torch.nn.functional.rms_norm twice, then plain arithmetic where q is quantised",
    why_not=_here,
    build=lambda work, _: over_sets(functools.partial(plain.eager, work), work),
    rounds_between=True,
)


def _why_no_inductor(setting: Setting) -> str | None:
    if setting.device == "cuda":
        return "torch.compile needs Triton on a GPU (pip install triton)" if missing("triton") else None
    from torch._inductor import cpp_builder

    try:
        cpp_builder.get_cpp_compiler()
    except Exception as error:
        return f"torch.compile finds no C++ compiler ({type(error).__name__})"
    return None


def _compiled(mode: str | None, work: Work, _: Setting) -> list[Call]:
    compiled: Any = torch.compile(plain.fusable(work), fullgraph=True, dynamic=False, mode=mode)

    def call(q: Tensor, kv: Tensor) -> tuple[Tensor, ...]:
        return tuple(compiled(q, kv, work.q_weight, work.kv_weight))

    return over_sets(call, work)


INDUCTOR = Peer(
    name="inductor",
    about="torch.compile of the plain arithmetic, compiled for the exact shapes",
    why_not=_why_no_inductor,
    build=functools.partial(_compiled, None),
)
MAX_AUTOTUNE = Peer(
    name="inductor max-autotune",
    about='torch.compile of the plain arithmetic, mode="max-autotune-no-cudagraphs"',
    why_not=_why_no_inductor,
    build=functools.partial(_compiled, "max-autotune-no-cudagraphs"),
    slow=True,
)


# ---- the floor


def copied_bytes(case: Case, tokens: int) -> int:
    """Length of a copy that reads and writes, together, what the op must read and write, to within half a percent.

    It is rounded down to a round number: CUDA's copy of 2^28 + 16 bytes takes half as long again as one of 2^28 (seen on
    an H200), and would be no floor.
    """
    length = case.bytes_moved(tokens) // 2
    step = min(65536, 1 << max(4, (length // 256).bit_length() - 1))
    return max(length // step * step, 16)


def _copies(work: Work, _: Setting) -> list[Call]:
    length = copied_bytes(work.case, work.tokens)
    calls: list[Call] = []
    for _set in work.sets:
        source = torch.randint(1, 256, (length,), dtype=torch.uint8, device=work.device)
        calls.append(functools.partial(_copy, source, torch.empty_like(source)))
    return calls


def _copy(source: Tensor, to: Tensor) -> tuple[Tensor, ...]:
    return to.copy_(source), source


COPY = Peer(
    name="copy",
    about="a contiguous copy on the device that reads and writes as many bytes as the op must",
    why_not=_here,
    build=_copies,
    is_copy=True,
)
