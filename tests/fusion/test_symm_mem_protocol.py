"""The protocol of the kernel over symmetric memory, searched: it holds in every order of steps, and each mistake is found."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from search import explore

from layerfuse.fusion.backends.symm_mem.protocol import Call, Exchange, Rules

ONE = Call(1)
CHANGING = (Call(2), Call(1), Call(2), Call(2))
REPLAYED = (ONE, ONE, Call(1, captured=1), Call(1, captured=1), ONE)
"""An eager call, the capture's own run, two replays, and an eager call again."""


@pytest.fixture(autouse=True)
def _uncollected() -> Iterator[None]:
    """States are tuples of numbers, in no circles: looking for some takes half of the time."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    ("world_size", "calls", "words", "least"),
    [
        (2, [ONE] * 6, 2, 800),
        (2, CHANGING, 2, 20_000),
        (2, REPLAYED, 2, 600),
        (3, [ONE] * 5, 1, 8_000),
        (3, [ONE] * 3, 2, 200_000),
    ],
    ids=["long", "changing rows", "replays", "three ranks", "three ranks, two words"],
)
def test_every_order_of_steps_ends_with_what_was_sent(
    world_size: int, calls: list[Call], words: int, least: int
) -> None:
    """A rank may stand still at any point, so that late ranks are among them."""
    found = explore(Exchange(world_size, calls, words))
    assert found.problem is None, "\n".join(found.steps)
    assert found.states > least, "the search has become smaller"


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        (Rules(phases=1), "lost"),
        (Rules(empties=False), "lost"),
        (Rules(waits_for_all=False), "stale"),
        (Rules(flips_last=False), "deadlock"),
        (Rules(ahead=1), "deadlock"),
        (Rules(ends=False), "lost"),
    ],
    ids=["one phase", "nothing emptied", "one word for all", "phase changed early", "wrong phase", "no end"],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_mistakes_are_found(world_size: int, rules: Rules, problem: str) -> None:
    words = 2 if world_size == 2 or not rules.waits_for_all else 1
    found = explore(Exchange(world_size, [ONE] * 3, words, rules))
    assert (found.problem or "").startswith(problem), (found, "\n".join(found.steps))


def test_a_counter_on_the_host_is_wrong_under_replay_only() -> None:
    host = Rules(on_device=False)
    assert explore(Exchange(2, [ONE] * 4, 2, host)).problem is None
    found = explore(Exchange(2, REPLAYED, 2, host))
    assert (found.problem or "").startswith("lost")


def test_the_steps_to_a_problem_are_told() -> None:
    found = explore(Exchange(2, [ONE], 2, Rules(waits_for_all=False)))
    assert found.problem == "stale: call 0 reads [1, 0], where every word is 1"
    assert len(found.steps) == 4
    assert found.steps[-1].endswith("reads row 0")
