"""How ranks exchange rows without a barrier, in plain Python: the steps that the kernel takes. Tests search every order of them.

Each rank has a buffer that its peers write into: for each of two phases, each source and each row a slot. A word of a slot is
empty (all bits ones) or holds what its source sent. The program that handles a row in a call

1. looks up the row's phase, in memory of the device, so that a replay of a CUDA graph goes on where the last call ended;
2. pushes its part into its slot of that phase in every peer's buffer: stores that land in any order, word by word;
3. reads its own buffer until no word of any peer's slot is empty: the data are the flag;
4. empties the words that it read, and sets the row's phase to the other one.

A call starts when the one before it has ended on this rank, with all that it wrote to this rank's own memory. Peers' memory may
be written later. Ranks make the same calls in the same order, and need nothing else in common.

Why two phases are enough: a rank writes a slot in its use k + 2 of a row when its use k + 1 has ended, for which it needed its
peer's words of use k + 1. The peer sent those when its use k had ended, and with it the emptying of that slot. With one phase,
use k + 1 may meet words of use k that the peer has not read. Without emptying, use k + 2 reads those of use k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from attrs import frozen

EMPTY = 0
_Store = tuple[int, int, int]
"""Who wrote, which word, and what: EMPTY, or one more than the number of the call."""


@frozen(kw_only=True)
class Rules:
    """The protocol. Other values than these are mistakes, which the search must find."""

    phases: int = 2
    empties: bool = True
    "Step 4, its first half."
    waits_for_all: bool = True
    "Step 3 waits for every word, not for the first of each slot."
    flips_last: bool = True
    "The phase changes in step 4, not between steps 2 and 3."
    on_device: bool = True
    "The phase is kept on the device. Otherwise the host counts calls, and a replay has the numbers of its capture."
    ends: bool = True
    "A call waits for the end of the one before it."
    ahead: int | None = None
    "A rank whose phases start with the second."


@frozen
class Call:
    """One call that all ranks make."""

    rows: int
    captured: int | None = None
    "In a replay: which number the call had when its graph was captured."


class Rank(NamedTuple):
    """Where a rank is."""

    call: int
    stages: tuple[int, ...]
    "Of the call's programs: 0 has not pushed, 1 waits, 2 is through."
    phases: tuple[int, ...]
    "Of all rows."


class State(NamedTuple):
    """Everything: the ranks, all words of all buffers, and the stores that have not landed."""

    ranks: tuple[Rank, ...]
    memory: tuple[int, ...]
    flying: tuple[_Store, ...]
    "In order; of one writer's stores to one word the first lands first."


class Exchange:
    """The protocol for some ranks, which make some calls with so many words per row."""

    def __init__(self, world_size: int, calls: Sequence[Call], words: int = 1, rules: Rules | None = None) -> None:
        self.world_size, self.calls, self.words, self.rules = world_size, tuple(calls), words, rules or Rules()
        self.rows = max(call.rows for call in self.calls)

    def first(self) -> State:
        """Nobody has called anything, and every word is empty."""
        starts = [int(rank == self.rules.ahead) for rank in range(self.world_size)]
        ranks = tuple(Rank(0, (0,) * self.calls[0].rows, (start,) * self.rows) for start in starts)
        return State(ranks, (EMPTY,) * (self.world_size**2 * self.rules.phases * self.rows * self.words), ())

    def slot(self, owner: int, phase: int, source: int, row: int) -> range:
        """The words in which an owner's buffer takes a source's row."""
        plane = (owner * self.rules.phases + phase) * self.world_size + source
        start = (plane * self.rows + row) * self.words
        return range(start, start + self.words)

    def phase(self, rank: Rank, row: int, stage: int) -> int:
        """The phase of a row for a program in this stage."""
        call = self.calls[rank.call]
        if not self.rules.on_device:
            return (rank.call if call.captured is None else call.captured) % self.rules.phases
        early = stage == 1 and not self.rules.flips_last
        return (rank.phases[row] + early) % self.rules.phases

    def next(self, state: State) -> Iterator[tuple[str, State | str]]:
        """Every step that can be taken, in words, and what it leads to: a state, or what is wrong."""
        yield from self._landings(state)
        for number, rank in enumerate(state.ranks):
            if rank.call == len(self.calls):
                continue
            if all(stage == 2 for stage in rank.stages):
                if not (
                    self.rules.ends and any(self._owner(cell) == writer == number for writer, cell, _ in state.flying)
                ):
                    rows = self.calls[rank.call + 1].rows if rank.call + 1 < len(self.calls) else 0
                    after = Rank(rank.call + 1, (0,) * rows, rank.phases)
                    yield f"rank {number} ends call {rank.call}", self._with(state, number, after, ())
                continue
            for row, stage in enumerate(rank.stages):
                if stage == 0:
                    yield f"rank {number} pushes row {row}", self._pushed(state, number, row)
                elif stage == 1 and self._arrived(state, number, row):
                    yield f"rank {number} reads row {row}", self._read(state, number, row)

    def problem_at_end(self, state: State) -> str | None:
        """What is wrong with a state that nothing follows."""
        stuck = [
            f"rank {number} in call {rank.call}"
            for number, rank in enumerate(state.ranks)
            if rank.call < len(self.calls)
        ]
        if stuck:
            return f"deadlock: {', '.join(stuck)}"
        return None if not any(state.memory) else "words are left over"

    def _owner(self, cell: int) -> int:
        return cell // (self.rules.phases * self.world_size * self.rows * self.words)

    def _landings(self, state: State) -> Iterator[tuple[str, State | str]]:
        for place, (writer, cell, value) in enumerate(state.flying):
            if place and state.flying[place - 1][:2] == (writer, cell):
                continue
            said = f"rank {writer}'s store of {value} lands in word {cell}"
            if value != EMPTY and state.memory[cell] != EMPTY:
                yield said, f"lost: it overwrites {state.memory[cell]}, which nobody has emptied"
            else:
                memory = (*state.memory[:cell], value, *state.memory[cell + 1 :])
                yield said, State(state.ranks, memory, state.flying[:place] + state.flying[place + 1 :])

    def _pushed(self, state: State, number: int, row: int) -> State:
        rank = state.ranks[number]
        phase = self.phase(rank, row, 0)
        stores = [
            (number, cell, rank.call + 1)
            for peer in range(self.world_size)
            if peer != number
            for cell in self.slot(peer, phase, number, row)
        ]
        return self._with(state, number, rank._replace(stages=_put(rank.stages, row, 1)), stores)

    def _slots(self, state: State, number: int, row: int) -> list[range]:
        phase = self.phase(state.ranks[number], row, 1)
        return [self.slot(number, phase, source, row) for source in range(self.world_size) if source != number]

    def _arrived(self, state: State, number: int, row: int) -> bool:
        asked = self.words if self.rules.waits_for_all else 1
        return all(state.memory[cell] != EMPTY for slot in self._slots(state, number, row) for cell in slot[:asked])

    def _read(self, state: State, number: int, row: int) -> State | str:
        rank = state.ranks[number]
        # All at once: what is there stays until it is emptied here, or the search reports it as lost.
        cells = [cell for slot in self._slots(state, number, row) for cell in slot]
        seen = [state.memory[cell] for cell in cells]
        if any(value != rank.call + 1 for value in seen):
            return f"stale: call {rank.call} reads {seen}, where every word is {rank.call + 1}"
        phases = _put(rank.phases, row, (rank.phases[row] + 1) % self.rules.phases)
        stores = [(number, cell, EMPTY) for cell in cells] if self.rules.empties else []
        return self._with(state, number, Rank(rank.call, _put(rank.stages, row, 2), phases), stores)

    @staticmethod
    def _with(state: State, number: int, rank: Rank, stores: Sequence[_Store]) -> State:
        # By writer and word, and otherwise in order: which of several came first elsewhere makes no difference.
        flying = tuple(sorted((*state.flying, *stores), key=lambda store: store[:2])) if stores else state.flying
        return State(_put(state.ranks, number, rank), state.memory, flying)


def _put(several: tuple, place: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (*several[:place], value, *several[place + 1 :])
