"""Ranks decide alike, or none of them goes on.

A rank that fuses an all-reduce beside one that does not would hang both, or add up wrong numbers. So what each rank of a
group decided is compared before the first call that rests on it, and a difference is an error on all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ...adapters.errors import LayerfuseError
from .groups import process_group


class RankDisagreementError(LayerfuseError, RuntimeError):
    """Ranks of one process group decided differently. `decisions` holds what each rank decided, in the order of the ranks."""

    def __init__(self, group: str, what: str, decisions: tuple[str, ...]) -> None:
        self.group = group
        self.what = what
        self.decisions = decisions
        super().__init__(group, what, decisions)

    def __str__(self) -> str:
        lines = [f"the ranks of process group {self.group!r} decided differently on {self.what}, and would hang:"]
        lines += [f"  - rank {ranks}: {text}" for text, ranks in _differences(self.decisions)]
        lines.append(
            "Give every rank the same layerfuse, torch and AITER, the same LAYERFUSE_FUSIONS and LAYERFUSE_BACKEND, and the "
            "same FusionConfig and Target, and let all trace the same graphs: a graph break on one rank parts them too."
        )
        return "\n".join(lines)


def _differences(decisions: Sequence[str]) -> list[tuple[str, str]]:
    """What only some ranks decided, with those ranks."""
    several = [text.splitlines() for text in decisions]
    common = set.intersection(*map(set, several))
    ranks: dict[str, list[str]] = {}
    for rank, lines in enumerate(several):
        own = "; ".join(line for line in lines if line not in common) or "none of what the others have beside"
        ranks.setdefault(own, []).append(str(rank))
    return [(text, ", ".join(numbers)) for text, numbers in ranks.items()]


_agreed: set[tuple[dist.ProcessGroup, str, str]] = set()


def agree(group: str, what: str, decision: str) -> None:
    """Compare a decision over all ranks of a process group; all of them make this call. What was agreed on is not asked again.

    Args:
        group: its name.
        what: what is decided, in a few words.
        decision: the decision, line by line: equal texts are equal decisions.

    Raises:
        RankDisagreementError: on every rank, where they differ.
        RuntimeError: a CUDA graph is being captured, which no comparison may be part of.
        GroupError: no such group.
    """
    ranks = process_group(group)
    key = ranks, what, decision
    if key in _agreed or ranks.size() == 1 or ranks.name() == "fake":
        return
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{what}: the ranks of process group {group!r} have not compared their decisions, and cannot while a CUDA "
            "graph is captured; make the call once before the capture, as a warm-up"
        )
    with unset_fake_temporarily():
        digests = _gathered(hashlib.sha256(decision.encode()).hexdigest(), ranks)
        if len(set(digests)) > 1:
            raise RankDisagreementError(group, what, tuple(_gathered(decision, ranks)))
    _agreed.add(key)


def _gathered(text: str, ranks: dist.ProcessGroup) -> list[str]:
    several: list[str] = [""] * ranks.size()
    dist.all_gather_object(several, text, group=ranks)
    return several
