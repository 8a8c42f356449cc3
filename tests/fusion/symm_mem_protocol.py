"""How ranks sum rows without a barrier, in plain Python: the steps that the kernel takes. Tests search every order of them.

Each rank has a buffer that ranks write into. For each row and each of two phases it has a slot for each source's part and one for
the sum; a slot is the same row's in every call. A word of a slot is empty (all bits ones) or holds what was sent. In a one-shot
call every rank adds up the parts of a row. In a two-shot call only its owner does, rank `row % world_size`, and sends the sum to
all. The program that handles a row in a call

1. looks up the row's phase, in memory of the device, so that a replay of a CUDA graph goes on where the last call ended;
2. pushes its part into its slot of that phase at every other rank that adds up: stores that land in any order, word by word;
3. if its rank adds up, reads its own buffer until no word of any other rank's part is empty: the data are the flag. It empties the
   words that it read, and in a two-shot call pushes the sum into the slot for it at every rank, its own included;
4. in a two-shot call, reads its own buffer until no word of the sum is empty, and empties them;
5. sets the row's phase to the other one.

A call starts when the one before it has ended on this rank, with all that it wrote to this rank's own memory. Peers' memory may
be written later. Ranks make the same calls in the same order, and need nothing else in common.

Why two phases are enough: no rank ends a use of a row before all have started it, as it waits for words that each of them sends,
or for a sum that is made of them. So when a rank starts use k + 2, all have ended use k, and have emptied the slots that it
writes. That holds for calls of both forms in any sequence, on the same slots and phases.

Where one phase is too few: in a one-shot call, use k + 1 may meet words of use k that the peer has not read. In a two-shot call the
owner has read them before anybody goes on, but its emptying may land after words of use k + 1, as no fence makes it land before
the sum. Slots for sums need only one phase: the owner sends the sum of use k + 1 when it has a part of it from every rank, and
a rank that sent one has ended use k. Without emptying, a later use reads the words of an earlier one.

Why a call may have more rows than the GPU holds programs: they take rows in order, by a counter on the device that the last one
sets back to zero. Take the first row of the first call that is not through on all ranks. Where it is not, it runs or is the next
to run, as those before it are through there, and it waits only for the same row's programs. If ranks took rows in different
orders, programs that wait could keep out those that they wait for. So could two groups' calls at once, where a GPU has no room
for programs of both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from attrs import frozen

EMPTY = 0
_Store = tuple[int, int, int]
"""Who wrote, which word, and what: EMPTY, or one more than the number of the call."""
_AHEAD, _PARTS, _SUM, _THROUGH = range(4)
"""Where a program is: before step 1, in step 3, in step 4, through. Steps 1 and 2 wait for nothing and are taken at once."""


@frozen(kw_only=True)
class Rules:
    """The protocol. Other values than these are mistakes, which the search must find, except where it says otherwise."""

    phases: int = 2
    "Of slots for parts."
    sum_phases: int = 2
    "Of slots for sums. One is enough."
    empties_parts: bool = True
    empties_sums: bool = True
    part_words: int | None = None
    "How many words of each part step 3 waits for. None: all."
    sum_words: int | None = None
    "How many words of the sum step 4 waits for. None: all."
    flips_last: bool = True
    "The phase changes in step 5, not between steps 2 and 3."
    on_device: bool = True
    "The phase is kept on the device. Otherwise the host counts calls, and a replay has the numbers of its capture."
    ends: bool = True
    "A call waits for the end of the one before it."
    ahead: int | None = None
    "A rank whose phases start with the second."
    resident: int | None = None
    "How many programs a GPU holds at once, any number. None: those of all rows, which then start in any order."
    in_order: bool = True
    "Where not all are resident, programs take rows by the counter. Otherwise in any order."
    resets: bool = True
    "The last program of a call sets the counter back. Otherwise the host does before a call, but not before a replay."


@frozen
class Call:
    """One call that all ranks make."""

    rows: int
    shots: Literal[1, 2] = 1
    captured: int | None = None
    "In a replay: which number the call had when its graph was captured."


class Rank(NamedTuple):
    """Where a rank is."""

    call: int
    stages: tuple[int, ...]
    "Of the call's rows."
    phases: tuple[int, ...]
    "Of all rows."
    taken: int
    "The counter: how many rows of the call programs have taken."


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
        self._planes = self.rules.phases * world_size + self.rules.sum_phases

    def first(self) -> State:
        """Nobody has called anything, and every word is empty."""
        starts = [int(rank == self.rules.ahead) for rank in range(self.world_size)]
        ranks = tuple(Rank(0, (_AHEAD,) * self.calls[0].rows, (start,) * self.rows, 0) for start in starts)
        return State(ranks, (EMPTY,) * (self.world_size * self._planes * self.rows * self.words), ())

    def slot(self, home: int, phase: int, source: int | None, row: int) -> range:
        """The words in which a rank's buffer takes a source's part of a row, or its sum (None)."""
        of_sum = self.rules.phases * self.world_size + phase % self.rules.sum_phases
        plane = of_sum if source is None else phase % self.rules.phases * self.world_size + source
        start = ((home * self._planes + plane) * self.rows + row) * self.words
        return range(start, start + self.words)

    def next(self, state: State) -> Iterator[tuple[str, State | str]]:
        """Every step that can be taken, in words, and what it leads to: a state, or what is wrong."""
        yield from self._landings(state)
        for number, rank in enumerate(state.ranks):
            if rank.call == len(self.calls):
                continue
            if all(stage == _THROUGH for stage in rank.stages):
                writing = any(writer == number == self._home(cell) for writer, cell, _ in state.flying)
                if not (writing and self.rules.ends):
                    yield f"rank {number} ends call {rank.call}", self._ended(state, number)
                continue
            for row in self._startable(rank):
                yield f"rank {number} pushes row {row}", self._pushed(state, number, row)
            for row, stage in enumerate(rank.stages):
                if stage in (_PARTS, _SUM) and self._arrived(state, number, row):
                    said = "reads" if stage == _PARTS else "reads the sum of"
                    yield f"rank {number} {said} row {row}", self._read(state, number, row)

    def problem_at_end(self, state: State) -> str | None:
        """What is wrong with a state that nothing follows."""
        ranks = enumerate(state.ranks)
        stuck = [f"rank {number} in call {rank.call}" for number, rank in ranks if rank.call < len(self.calls)]
        if stuck:
            return f"deadlock: {', '.join(stuck)}"
        return None if not any(state.memory) else "words are left over"

    def _home(self, cell: int) -> int:
        return cell // (self._planes * self.rows * self.words)

    def _adds_up(self, rank: Rank, row: int) -> Sequence[int]:
        """The ranks that add up a row of the call that a rank is in."""
        return range(self.world_size) if self.calls[rank.call].shots == 1 else (row % self.world_size,)

    def _phase(self, rank: Rank, row: int) -> int:
        call = self.calls[rank.call]
        if not self.rules.on_device:
            return (rank.call if call.captured is None else call.captured) % 2
        early = rank.stages[row] != _AHEAD and not self.rules.flips_last
        return (rank.phases[row] + early) % 2

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

    def _ended(self, state: State, number: int) -> State:
        rank = state.ranks[number]
        after = self.calls[rank.call + 1] if rank.call + 1 < len(self.calls) else Call(0)
        taken = rank.taken if self.rules.resets or after.captured is not None else 0
        return self._with(state, number, Rank(rank.call + 1, (_AHEAD,) * after.rows, rank.phases, taken), ())

    def _startable(self, rank: Rank) -> Sequence[int]:
        """The rows that a program can take now."""
        ahead = [row for row, stage in enumerate(rank.stages) if stage == _AHEAD]
        if self.rules.resident is None:
            return ahead
        if not ahead or len(rank.stages) - len(ahead) - rank.stages.count(_THROUGH) == self.rules.resident:
            return ()
        return (rank.taken,) if self.rules.in_order else ahead

    def _pushed(self, state: State, number: int, row: int) -> State | str:
        rank = state.ranks[number]
        rows = len(rank.stages)
        if row >= rows:
            return f"outside: call {rank.call} has {rows} rows, and a program takes row {row}"
        adding = self._adds_up(rank, row)
        stores = [
            (number, cell, rank.call + 1)
            for peer in adding
            if peer != number
            for cell in self.slot(peer, self._phase(rank, row), number, row)
        ]
        stages = _put(rank.stages, row, _PARTS if number in adding else _SUM)
        taken = 0 if self.rules.resets and rank.taken + 1 == rows else rank.taken + 1
        return self._with(state, number, rank._replace(stages=stages, taken=taken), stores)

    def _awaited(self, state: State, number: int, row: int) -> list[range]:
        """The slots whose words a program waits for."""
        rank = state.ranks[number]
        peers = [source for source in range(self.world_size) if source != number]
        sources: Sequence[int | None] = peers if rank.stages[row] == _PARTS else (None,)
        return [self.slot(number, self._phase(rank, row), source, row) for source in sources]

    def _arrived(self, state: State, number: int, row: int) -> bool:
        summing = state.ranks[number].stages[row] == _PARTS
        asked = self.rules.part_words if summing else self.rules.sum_words
        return all(state.memory[cell] != EMPTY for slot in self._awaited(state, number, row) for cell in slot[:asked])

    def _read(self, state: State, number: int, row: int) -> State | str:
        rank = state.ranks[number]
        # All at once: what is there stays until it is emptied here, or the search reports it as lost.
        cells = [cell for slot in self._awaited(state, number, row) for cell in slot]
        seen = [state.memory[cell] for cell in cells]
        if any(value != rank.call + 1 for value in seen):
            return f"stale: call {rank.call} reads {seen}, where every word is {rank.call + 1}"
        summing = rank.stages[row] == _PARTS
        empties = self.rules.empties_parts if summing else self.rules.empties_sums
        stores = [(number, cell, EMPTY) for cell in cells] if empties else []
        if summing and self.calls[rank.call].shots == 2:
            slots = [self.slot(home, self._phase(rank, row), None, row) for home in range(self.world_size)]
            stores += [(number, cell, rank.call + 1) for slot in slots for cell in slot]
            return self._with(state, number, rank._replace(stages=_put(rank.stages, row, _SUM)), stores)
        phases = _put(rank.phases, row, 1 - rank.phases[row])
        after = rank._replace(stages=_put(rank.stages, row, _THROUGH), phases=phases)
        return self._with(state, number, after, stores)

    @staticmethod
    def _with(state: State, number: int, rank: Rank, stores: Sequence[_Store]) -> State:
        # By writer and word, and otherwise in order: which of several came first elsewhere makes no difference.
        flying = tuple(sorted((*state.flying, *stores), key=lambda store: store[:2])) if stores else state.flying
        return State(_put(state.ranks, number, rank), state.memory, flying)


def _put(several: tuple, place: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (*several[:place], value, *several[place + 1 :])


# ---- a search over every order in which the steps can be taken


class Explored(NamedTuple):
    """What a search found."""

    states: int
    problem: str | None
    steps: tuple[str, ...]
    "That lead to the problem."


def explore(exchange: Exchange) -> Explored:
    """Search every order of steps, breadth first: the steps to a problem are the fewest."""
    first = exchange.first()
    came: dict[State, tuple[State, str] | None] = {first: None}
    waiting = deque([first])
    while waiting:
        state = waiting.popleft()
        steps = list(exchange.next(state))
        for said, after in steps:
            if isinstance(after, str):
                return Explored(len(came), after, (*_way(came, state), said))
            if after not in came:
                came[after] = state, said
                waiting.append(after)
        problem = None if steps else exchange.problem_at_end(state)
        if problem is not None:
            return Explored(len(came), problem, _way(came, state))
    return Explored(len(came), None, ())


def _way(came: dict[State, tuple[State, str] | None], state: State) -> tuple[str, ...]:
    said = []
    while (before := came[state]) is not None:
        state = before[0]
        said.append(before[1])
    return tuple(reversed(said))
