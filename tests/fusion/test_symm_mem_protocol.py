"""The protocol of the kernel over symmetric memory, searched: it holds in every order of steps, and each mistake is found."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence

import pytest
from search import explore
from symm_mem_protocol import Call, Exchange, Rules

ONE, TWO = Call(1), Call(1, shots=2)
CHANGING = (Call(2), Call(1), Call(2), Call(2))
CHANGING_TWO = tuple(Call(call.rows, shots=2) for call in CHANGING)
MIXED = (ONE, TWO, TWO, ONE, ONE, TWO)


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


@pytest.mark.parametrize(
    ("world_size", "calls", "words", "least"),
    [
        (2, [ONE] * 6, 2, 800),
        (2, CHANGING, 2, 20_000),
        (2, replayed(ONE), 2, 600),
        (3, [ONE] * 5, 1, 8_000),
        pytest.param(3, [ONE] * 3, 2, 200_000, marks=pytest.mark.thorough),
        (2, [TWO] * 6, 2, 2_400),
        (2, CHANGING_TWO, 1, 5_000),
        (2, replayed(TWO), 2, 1_900),
        (3, [TWO] * 5, 1, 3_500),
        pytest.param(3, [TWO] * 3, 2, 50_000, marks=pytest.mark.thorough),
        (2, MIXED, 2, 1_500),
        (3, MIXED, 1, 5_000),
    ],
    ids=[
        *("long", "changing rows", "replays", "three ranks", "three ranks, two words"),
        *("two shots", "two shots, changing rows", "two shots, replays", "two shots, three ranks"),
        *("two shots, three ranks, two words", "both forms", "both forms, three ranks"),
    ],
)
def test_every_order_of_steps_ends_with_what_was_sent(
    world_size: int, calls: Sequence[Call], words: int, least: int
) -> None:
    """A rank may stand still at any point, so that late ranks are among them."""
    found = explore(Exchange(world_size, calls, words))
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
    ],
    ids=[
        *("one phase", "parts not emptied", "sums not emptied", "sum of what is there", "one word for a part"),
        *("one word for a sum", "phase changed early", "wrong phase", "no end"),
    ],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_mistakes_are_found(world_size: int, rules: Rules, problem: str | None, problem_of_two: str) -> None:
    """None: one-shot calls have no such step."""
    words = 2 if world_size == 2 or 1 in (rules.part_words, rules.sum_words) else 1
    for call, expected in ((ONE, problem), (TWO, problem_of_two)):
        if expected is not None:
            found = explore(Exchange(world_size, [call] * 3, words, rules))
            assert (found.problem or "").startswith(expected), (call, found, "\n".join(found.steps))


@pytest.mark.parametrize(
    ("world_size", "calls", "words"),
    [(2, [TWO] * 6, 2), (2, CHANGING_TWO, 1), (2, MIXED, 2), (3, [TWO] * 3, 2), (3, MIXED, 1)],
    ids=["long", "changing rows", "both forms", "three ranks", "both forms, three ranks"],
)
def test_sums_need_only_one_phase(world_size: int, calls: Sequence[Call], words: int) -> None:
    found = explore(Exchange(world_size, calls, words, Rules(sum_phases=1)))
    assert found.problem is None, "\n".join(found.steps)


@pytest.mark.parametrize("mistake", [{"ends": False}, {"empties_sums": False}], ids=["no end", "sums not emptied"])
def test_one_phase_of_sums_needs_them_emptied_when_a_call_ends(mistake: dict[str, bool]) -> None:
    """Two phases would let two calls pass."""
    found = explore(Exchange(2, [TWO] * 2, 1, Rules(sum_phases=1, **mistake)))
    assert found.problem == "stale: call 1 reads [1], where every word is 2"
    found = explore(Exchange(2, [TWO] * 2, 1, Rules(**mistake)))
    assert found.problem in (None, "words are left over")


def test_in_two_shots_an_emptying_can_be_late() -> None:
    """Which is why parts need two phases there, although the owner has read them before anybody goes on."""
    found = explore(Exchange(2, [TWO] * 2, 1, Rules(phases=1)))
    assert found.problem == "lost: it overwrites 1, which nobody has emptied"
    assert found.steps[-3:-1] == ("rank 1 ends call 0", "rank 1 pushes row 0")
    assert "rank 0 reads row 0" in found.steps


@pytest.mark.parametrize("call", [ONE, TWO], ids=["one shot", "two shots"])
def test_a_counter_on_the_host_is_wrong_under_replay_only(call: Call) -> None:
    host = Rules(on_device=False)
    assert explore(Exchange(2, [call] * 4, 2, host)).problem is None
    found = explore(Exchange(2, replayed(call), 2, host))
    assert (found.problem or "").startswith(("lost", "stale"))


@pytest.mark.parametrize(
    ("world_size", "calls", "words", "resident", "least"),
    [
        (2, [Call(2)] * 4, 2, 1, 6_000),
        (2, [Call(3)] * 2, 1, 2, 7_000),
        (2, [Call(2, shots=2)] * 2, 2, 1, 30_000),
        (2, [Call(3, shots=2)] * 2, 1, 2, 50_000),
        (2, [Call(3, shots=2), TWO, Call(2), Call(3, shots=2)], 1, 1, 6_000),
        (3, [Call(2, shots=2)] * 2, 1, 1, 25_000),
    ],
    ids=["one shot", "one shot, two at once", "two shots", "two at once", "both forms, changing rows", "three ranks"],
)
def test_more_rows_than_programs_at_once(
    world_size: int, calls: Sequence[Call], words: int, resident: int, least: int
) -> None:
    found = explore(Exchange(world_size, calls, words, Rules(resident=resident)))
    assert found.problem is None, "\n".join(found.steps)
    assert found.states > least, "the search has become smaller"


@pytest.mark.parametrize(("world_size", "resident"), [(2, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("call", [ONE, TWO], ids=["one shot", "two shots"])
def test_ranks_that_take_rows_in_different_orders_keep_each_other_out(
    world_size: int, resident: int, call: Call
) -> None:
    """All places are taken by programs of rows that do not run on all ranks."""
    calls = [Call(2 * resident, call.shots)]
    found = explore(Exchange(world_size, calls, 1, Rules(resident=resident, in_order=False)))
    assert (found.problem or "").startswith("deadlock: rank 0 in call 0, rank 1 in call 0"), found
    ranks = [f"rank {rank} pushes row " for rank in range(world_size)]
    running = [{step.removeprefix(rank) for step in found.steps if step.startswith(rank)} for rank in ranks]
    assert {len(rows) for rows in running} == {resident}
    assert not set.intersection(*running)


@pytest.mark.parametrize("call", [Call(2), Call(2, shots=2)], ids=["one shot", "two shots"])
def test_rows_are_counted_on_the_device_or_wrong_under_replay(call: Call) -> None:
    host = Rules(resident=1, resets=False)
    assert explore(Exchange(2, [call] * 4, 1, host)).problem is None
    assert explore(Exchange(2, replayed(call), 1, Rules(resident=1))).problem is None
    found = explore(Exchange(2, replayed(call), 1, host))
    assert found.problem == "outside: call 2 has 2 rows, and a program takes row 2"


def test_the_steps_to_a_problem_are_told() -> None:
    found = explore(Exchange(2, [ONE], 2, Rules(part_words=1)))
    assert found.problem == "stale: call 0 reads [1, 0], where every word is 1"
    assert len(found.steps) == 4
    assert found.steps[-1].endswith("reads row 0")
