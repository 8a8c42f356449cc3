"""The ranks that measure together, and what they tell each other; what is measured on one rank has `ALONE` in their place.

They talk through torch.distributed's store, so that no GPU is needed to say that one has failed.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from ..adapters.errors import LayerfuseError

if TYPE_CHECKING:
    import torch

PATIENCE = timedelta(seconds=200)
"""How long a rank waits for what the others say, and a collective for the ranks that it needs."""

_T = TypeVar("_T")


class RankError(LayerfuseError, RuntimeError):
    """Something failed on a rank, or a rank does not answer; the message says which."""


class Alone:
    """One rank, which has nobody to ask."""

    rank, size = 0, 1

    def gather(self, value: _T, patience: timedelta = PATIENCE) -> list[_T]:  # noqa: ARG002
        """What each rank says, in their order. All ranks make this call."""
        return [value]

    def line_up(self) -> None:
        """On a GPU, queue what ends at about the same time on all ranks; on a CPU, wait for them."""

    def together(self, function: Callable[[], _T]) -> list[_T]:
        """What each rank's call gives, in their order.

        Raises:
            RankError: on all ranks, where a call failed on one of them.
        """
        value, problem = None, None
        try:
            value = function()
        except Exception as error:  # what is tried may fail in any way, and the others wait to hear of it
            problem = said(error)
        answers = self.gather((value, problem))
        reason = first([problem for _, problem in answers])
        if reason is not None:
            raise RankError(reason)
        return [answer for answer, _ in answers]  # type: ignore[misc]

    def slowest(self, samples: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
        """For each round the time of the rank that took longest."""
        every = self.gather({name: list(several) for name, several in samples.items()})
        return {name: [max(row) for row in zip(*(each[name] for each in every), strict=True)] for name in samples}


class RankGroup(Alone):
    """The ranks of a benchmark, seen from one of them."""

    def __init__(self, store: Any, rank: int, size: int, device: torch.device) -> None:
        import torch
        import torch.distributed as dist

        self.rank, self.size = rank, size
        self._store = store
        self._asked = 0
        self._token = torch.zeros(1, device=device)
        # Of its own, so that lining up shares no communicator with what is captured in graphs.
        self._lines: Any = dist.new_group(list(range(size)), timeout=PATIENCE)

    def gather(self, value: _T, patience: timedelta = PATIENCE) -> list[_T]:
        """What each rank says, in their order. All ranks make this call.

        Raises:
            RankError: a rank has not said anything for so long.
        """
        keys = [self._key(self._asked, rank) for rank in range(self.size)]
        self._store.set(keys[self.rank], pickle.dumps(value))
        with suppress(RuntimeError):  # a timeout, which says nothing of ranks
            self._store.wait(keys, patience)
        silent = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
        if silent:
            raise RankError(
                f"rank {', '.join(silent)} has not come here for {patience.seconds} s; rank {self.rank} says {value!r:.300}"
            )
        if self._asked:  # whoever is here has read what was said before
            self._store.delete_key(self._key(self._asked - 1, self.rank))
        self._asked += 1
        return [pickle.loads(self._store.get(key)) for key in keys]

    def _key(self, number: int, rank: int) -> str:
        return f"layerfuse/bench/{number}/{rank}"

    def line_up(self) -> None:
        """On a GPU, queue an all-reduce of one number; on a CPU, make it."""
        import torch.distributed as dist

        dist.all_reduce(self._token, group=self._lines)


def first(reasons: Sequence[str | None]) -> str | None:
    """The first reason that a rank has, with its number where not all have the same."""
    found = next(((rank, reason) for rank, reason in enumerate(reasons) if reason is not None), None)
    if found is None:
        return None
    return found[1] if len(set(reasons)) == 1 else f"rank {found[0]}: {found[1]}"


def said(error: BaseException) -> str:
    """An error in a line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".strip(": ")[:300]


ALONE = Alone()
_here: list[Alone] = [ALONE]


def rank_group() -> Alone:
    """The ranks that this process measures with."""
    return _here[0]


def join(found: Alone) -> None:
    """Measure with these ranks from now on."""
    _here[0] = found
