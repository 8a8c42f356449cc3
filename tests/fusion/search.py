"""A search over every order in which the steps of `symm_mem_protocol` can be taken."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from symm_mem_protocol import Exchange, State


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
