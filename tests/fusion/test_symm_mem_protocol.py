"""The protocol of the kernel over symmetric memory, searched: it holds in every order of steps, and each mistake is found."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence

import pytest
from symm_mem_protocol import Call, Exchange, Rules, explore

ONE, TWO = Call(1), Call(1, shots=2)
MIXED = (ONE, TWO, TWO, ONE, ONE, TWO)


def changing(shots: int) -> tuple[Call, ...]:
    return tuple(Call(rows, shots=shots) for rows in (2, 1, 2, 2))  # type: ignore[arg-type]


def replayed(call: Call) -> tuple[Call, ...]:
    """An eager call, the capture's own run, two replays, and an eager call again."""
    replay = Call(call.rows, call.shots, captured=1)
    return (call, call, replay, replay, call)


@pytest.fixture(autouse=True)
def _uncollected() -> Iterator[None]:
    """States are tuples of numbers, in no circles: looking for some takes half of the time."""
    gc.disable()
    yield
    gc.enable()


THOROUGH = pytest.mark.thorough
RIGHT = {
    "one shot, changing rows": (2, changing(1), 2, Rules(), 20_000),
    "one shot, replays": (2, replayed(ONE), 2, Rules(), 600),
    "one shot, three ranks": (3, [ONE] * 5, 1, Rules(), 8_000),
    "two shots, changing rows": (2, changing(2), 1, Rules(), 5_000),
    "two shots, replays": (2, replayed(TWO), 2, Rules(), 1_900),
    "two shots, three ranks": (3, [TWO] * 5, 1, Rules(), 3_500),
    "both forms, three ranks": (3, MIXED, 1, Rules(), 5_000),
    "sums need only one phase": (2, MIXED, 2, Rules(sum_phases=1), 1_000),
    "more rows than programs, one shot": (2, [Call(2)] * 4, 2, Rules(resident=1), 6_000),
    "more rows than programs, both forms": (*(2, [Call(3, shots=2), TWO, Call(2), Call(3, shots=2)], 1), *(Rules(resident=1), 6_000)),
    "more rows than programs, replays": (2, replayed(Call(2, shots=2)), 1, Rules(resident=1), 1_000),
}  # fmt: skip


@pytest.mark.parametrize(
    ("world_size", "calls", "words", "rules", "least"),
    [
        *RIGHT.values(),
        pytest.param(3, [ONE] * 3, 2, Rules(), 200_000, marks=THOROUGH),
        pytest.param(3, [TWO] * 3, 2, Rules(), 50_000, marks=THOROUGH),
        pytest.param(2, [Call(3, shots=2)] * 2, 1, Rules(resident=2), 50_000, marks=THOROUGH),
    ],
    ids=[*RIGHT, "one shot, two words", "two shots, two words", "two programs at once"],
)
def test_every_order_of_steps_ends_with_what_was_sent(
    world_size: int, calls: Sequence[Call], words: int, rules: Rules, least: int
) -> None:
    """A rank may stand still at any point, so that late ranks are among them."""
    found = explore(Exchange(world_size, calls, words, rules))
    assert found.problem is None, "\n".join(found.steps)
    assert found.states > least, "the search has become smaller"


@pytest.mark.parametrize(
    ("rules", "problem", "problem_of_two"),
    [
        (Rules(phases=1), "lost", "lost"),
        (Rules(empties_parts=False), "lost", "stale"),
        (Rules(empties_sums=False), None, "stale"),
        (Rules(part_words=0), "stale", "stale"),
        (Rules(part_words=1), "stale", "stale"),
        (Rules(sum_words=1), None, "stale"),
        (Rules(flips_last=False), "deadlock", "deadlock"),
        (Rules(ahead=1), "deadlock", "deadlock"),
        (Rules(ends=False), "lost", "stale"),
        (Rules(sum_phases=1, ends=False), None, "stale"),
    ],
    ids=str,
)
def test_mistakes_are_found(rules: Rules, problem: str | None, problem_of_two: str) -> None:
    """None: one-shot calls have no such step."""
    for call, expected in ((ONE, problem), (TWO, problem_of_two)):
        if expected is not None:
            found = explore(Exchange(2, [call] * 3, 2, rules))
            assert (found.problem or "").startswith(expected), (call, found, "\n".join(found.steps))


@pytest.mark.parametrize("shots", [1, 2])
@pytest.mark.parametrize(
    ("rules", "problem"),
    [(Rules(on_device=False), ("lost", "stale")), (Rules(resident=1, resets=False), "outside: call 2 has 2 rows")],
    ids=["calls", "rows"],
)
def test_what_the_host_counts_is_wrong_under_replay_only(
    rules: Rules, problem: str | tuple[str, ...], shots: int
) -> None:
    call = Call(2 if rules.resident else 1, shots=shots)  # type: ignore[arg-type]
    assert explore(Exchange(2, [call] * 4, 1, rules)).problem is None
    assert (explore(Exchange(2, replayed(call), 1, rules)).problem or "").startswith(problem)


@pytest.mark.parametrize(("world_size", "resident", "shots"), [(2, 1, 1), (2, 2, 2), (3, 1, 2)])
def test_ranks_that_take_rows_in_different_orders_keep_each_other_out(
    world_size: int, resident: int, shots: int
) -> None:
    """All places are taken by programs of rows that do not run on all ranks."""
    calls = [Call(2 * resident, shots=shots)]  # type: ignore[arg-type]
    found = explore(Exchange(world_size, calls, 1, Rules(resident=resident, in_order=False)))
    assert (found.problem or "").startswith("deadlock: rank 0 in call 0, rank 1 in call 0"), found
