"""Ranks decide alike, or none of them goes on.

A rank that fuses an all-reduce beside one that does not would hang both, or add up wrong numbers. So what each rank of a
group decided is compared before the first call that rests on it, and a difference is an error on all of them.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from ...adapters.errors import LayerfuseError
from .groups import process_group

MOST_SHOWN = 8
"""Of what one rank decided and others did not."""


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
    ranks: dict[tuple[str, ...], list[str]] = {}
    for rank, lines in enumerate(several):
        ranks.setdefault(tuple(line for line in lines if line not in common), []).append(str(rank))
    return [(_shortened(own), ", ".join(numbers)) for own, numbers in ranks.items()]


def _shortened(own: tuple[str, ...]) -> str:
    more = [f"and {len(own) - MOST_SHOWN} more"] if len(own) > MOST_SHOWN else []
    return "; ".join([*own[:MOST_SHOWN], *more]) or "none of what the others have beside"


TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for what the others decided, unless its group waits less: they may compile kernels for minutes before."""

GRACE = timedelta(seconds=10)
"""How long a rank that knows the answer waits for the others to read it: with it may go the store, where it is held by this process."""

_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, set[tuple[str, str]]] = weakref.WeakKeyDictionary()
_asked: Counter[str] = Counter()
"""How often each thing was compared: the keys in the store, which outlives a process group, must be new each time."""


def agree(group: str, what: str, decision: str) -> None:
    """Compare a decision over all ranks of a process group; all of them make this call. What was agreed on is not asked again.

    The ranks meet in torch.distributed's store: no collective is called, which a rank that runs another graph might answer
    with another one. All read the same answer, and none goes on, or ends, before all have read it.

    Args:
        group: its name.
        what: what is decided, in a few words, alike on all ranks.
        decision: the decision, line by line: equal texts are equal decisions.

    Raises:
        RankDisagreementError: on every rank, where they differ, where one has not come to it in the smaller of `TIMEOUT` and the
            group's own timeout, or where the store is gone with the process that holds it.
        GroupError: no such group.
    """
    ranks = process_group(group)
    agreed = _agreed.setdefault(ranks, set())
    if (what, decision) in agreed or ranks.size() == 1 or dist.get_backend(ranks) == "fake":
        return
    members = dist.get_process_group_ranks(ranks)
    key = f"layerfuse/{'-'.join(map(str, members))}/{group}/{what}"
    _asked[key] += 1
    keys = [f"{key}/{_asked[key]}/{rank}" for rank in range(ranks.size())]
    try:
        decisions = _exchanged(keys, ranks.rank(), decision, patience(ranks))
    except RuntimeError as error:  # DistNetworkError
        gone = f"cannot be asked: the store is gone, with the process that holds it ({type(error).__name__})"
        decisions = tuple(decision if rank == ranks.rank() else gone for rank in range(ranks.size()))
    if len(set(decisions)) > 1:
        raise RankDisagreementError(group, what, decisions)
    agreed.add((what, decision))


def patience(ranks: dist.ProcessGroup) -> timedelta:
    """How long to wait for the others of a group: `TIMEOUT`, or the group's own timeout where that is smaller."""
    own = [TIMEOUT]
    for device in ranks._device_types:
        with suppress(RuntimeError, AttributeError):  # a backend of somebody else's has no options
            own.append(ranks._get_backend(device).options._timeout)
    return min(own)


_SAID, _SILENT = "said ", "silent "


def _exchanged(keys: Sequence[str], rank: int, decision: str, limit: timedelta) -> tuple[str, ...]:
    """What all ranks decided, the same on all of them: whoever has waited long enough writes down who is silent.

    Raises:
        RuntimeError: the store is gone.
    """
    store = dist.distributed_c10d._get_default_store()
    store.compare_set(
        keys[rank], "", _SAID + decision
    )  # not over what others have written of a rank that comes too late
    with suppress(RuntimeError):  # DistStoreError, or a bare one of a FileStore: neither says anything of ranks
        store.wait(keys, limit)
    silent = f"{_SILENT}has decided nothing for {limit}: it runs another graph, or none"
    found = [store.compare_set(key, "", silent).decode() for key in keys]
    store.set(f"{keys[rank]}/read", "")
    with suppress(RuntimeError):  # one has died meanwhile, or was the last to read
        store.wait([f"{key}/read" for key, text in zip(keys, found, strict=True) if text.startswith(_SAID)], GRACE)
    return tuple(text.removeprefix(_SAID).removeprefix(_SILENT) for text in found)
