"""A small valid models.toml, and files that are wrong in one way each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
GOOD = (HERE / "good.toml").read_text(encoding="utf-8")


def but(old: str, new: str) -> str:
    """The same with one difference."""
    assert GOOD.count(old) == 1, old
    return GOOD.replace(old, new)


def also(line: str, table: str = "[models.mine]") -> str:
    """The same with one line more in a table."""
    return but(table, f"{table}\n{line}")


def _cases(file: str) -> Iterator[tuple[str, dict[str, str], str]]:
    """Of each case of a text: its name, its lines by how they begin, and what one of the problems must say."""
    for case in (HERE / file).read_text(encoding="utf-8").split("\n\n"):
        name, *lines = case.strip().splitlines()
        of = {sign: "\n".join(line[2:] for line in lines if line[0] == sign) for sign in "|-+="}
        yield name[2:], of, of["="]


def _changed(old: str, new: str) -> str:
    assert old in GOOD, old
    return GOOD.replace(old, new)


BAD: dict[str, tuple[str, str]] = {
    name: (of["|"] or (_changed(of["-"], of["+"]) if of["-"] else also(of["+"])), says)
    for name, of, says in _cases("wrong_models.txt")
}
"""Every one is refused; with what it must at least say. A name that ends in `*` contradicts something elsewhere in the file: no schema of
single values can know it."""

BAD_CLASSES: dict[str, tuple[str, str]] = {
    "huge number for a place": (
        f"{{ like = 'vllm:MLAAttention', kv_lora_rank = 0x{'f' * 5000} }}",
        "kv_lora_rank: expected",
    ),
    **{name: (of["+"], says) for name, of, says in _cases("wrong_layer_classes.txt")},
}
"""The text of one layer class, and what the problem says when the entry is registered."""


def with_class(words: str, key: str = "mylib:A") -> str:
    return f'{GOOD}\n[models.mine.layer_classes]\n"{key}" = {words}\n'
