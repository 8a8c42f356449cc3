"""Documents that are wrong in ways nobody thought of: seeded, so that the number of a case is the case.

Each test runs for LAYERFUSE_FUZZ_SECONDS (a few seconds if it is not set), or through LAYERFUSE_FUZZ_CASES cases however long they take,
beginning at case LAYERFUSE_FUZZ_FIRST.
"""

from __future__ import annotations

import copy
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

SECONDS = float(os.environ.get("LAYERFUSE_FUZZ_SECONDS", "4"))
CASES = int(os.environ.get("LAYERFUSE_FUZZ_CASES", "0"))
FIRST = int(os.environ.get("LAYERFUSE_FUZZ_FIRST", "0"))

ODD: tuple[Any, ...] = (
    *(0, -1, 1, 2, 3, 2**31 - 1, 2**31, 2**63, -(2**63), 10**18, 10**400, 0.0, -0.0, 1e-6, 1e308, 5e-324, 0.5),
    *(float("inf"), float("-inf"), float("nan"), True, False),
    *("", "none", "off", "all", "rest", "mla", "gqa", "gated_delta_net", "silu", "\x00", "\u202e", "a.b", "__class__"),
    *("x" * 5000, "transformers:DeepseekV3Attention", "vllm", "8", "1e-6"),
    *([], {}, [[]], [0], [0, 0], {"a": {}}, {"step": 0}, {"step": 2, "start": 1}, [1] * 2000),
)
"""Values that a place may get. TOML has no null; `mutated` is given that where there is one."""


def cases(seconds: float | None = None) -> Iterator[random.Random]:
    """A source of chance for each case, until the time is up, or for as many as are wanted."""
    end = time.monotonic() + (SECONDS if seconds is None else seconds)
    number = FIRST
    while number < FIRST + CASES if CASES and seconds is None else time.monotonic() < end:
        source = random.Random(number)
        source.number = number  # type: ignore[attr-defined]
        yield source
        number += 1


def tried(one: Callable[[random.Random], str]) -> Counter[str]:
    """What came of each case, in a word.

    Raises:
        AssertionError: a case raised; with its number.
    """
    found: Counter[str] = Counter()
    for chance in cases():
        try:
            found[one(chance)] += 1
        except Exception as error:
            raise AssertionError(f"case {chance.number}: {type(error).__name__}") from error  # type: ignore[attr-defined]
    print(f"\n{found.total()} cases: {dict(found)}")
    return found


def mutated(document: Any, chance: random.Random, keys: list[str], odd: tuple[Any, ...] = ODD) -> Any:
    """A copy with one change, sometimes up to four: a value replaced, taken out, moved, said twice, or under another key."""
    document = copy.deepcopy(document)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        places = list(_places(document))
        if not places:
            break
        holder, key = chance.choice(places)
        _change(holder, key, chance, keys, places, odd)
    return document


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def _change(
    holder: Any, key: Any, chance: random.Random, keys: list[str], places: list[Any], odd: tuple[Any, ...]
) -> None:
    what = chance.randrange(7)
    if what == 0:
        del holder[key]
    elif what == 1:
        other, where = chance.choice(places)
        if _holds(other, where):
            holder[key] = copy.deepcopy(other[where])
    elif what == 2 and isinstance(holder, dict):
        holder[chance.choice(keys)] = holder.pop(key)
    elif what == 3 and isinstance(holder, dict):
        holder[chance.choice(keys)] = copy.deepcopy(chance.choice(odd))
    elif what == 4 and type(holder[key]) in (int, float):
        holder[key] = holder[key] + chance.choice((-1, 1, 0.5)) if abs(holder[key]) < 2**1000 else -1
    elif what == 5 and isinstance(holder[key], str):
        holder[key] = garbled(holder[key], chance)
    else:
        holder[key] = copy.deepcopy(chance.choice(odd))


def _holds(holder: Any, key: Any) -> bool:
    return key in holder if isinstance(holder, dict) else key < len(holder)


def garbled(text: str, chance: random.Random) -> str:
    """A text with a span taken out, doubled, moved or overwritten."""
    start = chance.randint(0, len(text))
    end = min(len(text), start + chance.choice((1, 2, 8, 40)))
    span = text[start:end]
    new = chance.choice(
        ("", span * 2, span[::-1], chance.choice('[]{}="\n.\\#,\x00\ufeff') * chance.randint(1, 3), "9" * 40, "-")
    )
    return text[:start] + new + text[end:]
