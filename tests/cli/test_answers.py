"""What commands answer, as transcripts in `answers/*.txt`: each begins with `#` and what it shows.

    + MODULE as DIST VERSION [[GROUP] ENTRY POINT]
                      a package that looks installed, and raises where it is imported
    > FILE [of NAME]  the lines that follow, up to `<`, are a file in the folder where the commands run; or they change keys of a published config, "absent" taking one away
    $ NAME=VALUE plan MODEL ... [> FILE] [| LOOK]
    [2]               its exit code, where it is not 0
    words             that stand in the answer, whose blanks and lines do not count; `...` stands for any others
    ! words           that do not
    .                 nothing is said beside the words, which stand in this order
    =                 all that is said is what the command before it said

Where a command answers 2, or says on stderr why it answers 1, stdout is empty or, with 1, holds a draft in comments.

A LOOK at the JSON of a plan or the doctor takes the place of words. `value KEY / KEY` is what stands there: of a finding, its state and detail. `at ROLE FUSION` is the decision and its reason at layers of the first kind that has
one. `count ROLE FUSION` are all of them but those from some number of tokens on: each is as one line says, which begins with the number of
their sites. `kinds` are the decisions that there are, and `notes` all the notes, each a line.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from helpers import files_in
from published import CHECKPOINTS, published

from layerfuse.engines.switches import SWITCHES

FOLDER = Path(__file__).parent / "answers"


def cases() -> list[Any]:
    found = []
    for file in sorted(FOLDER.glob("*.txt")):
        for number, case in enumerate(re.split(r"^# ", file.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:], 1):
            title, _, text = case.partition("\n")
            found.append(pytest.param(text, id=f"{file.stem}-{number}-{title[:60]}"))
    return found


def pattern(words: str) -> str:
    return ".*?".join(re.escape(" ".join(part.split())) for part in re.split(r"\s?\.\.\.\s?", words))


def rows(data: Any) -> Iterator[tuple[str, Any]]:
    for kind in data["kinds"]:
        yield from ((role, row) for role, several in kind["sites"].items() for row in several)


def check(answer: Any, look: list[str], lines: list[str]) -> None:
    codes = [line for line in lines if re.fullmatch(r"\[\d+\]", line)]
    assert f"[{answer.code}]" == (codes or ["[0]"])[0], answer.out + answer.err
    assert answer.out == "" or answer.code != 2, answer.out
    assert not (answer.code and answer.err) or all(line.startswith("#") for line in answer.out.splitlines()), answer.out
    wanted = [line for line in lines if line not in (*codes, ".") and not line.startswith("! ")]
    if not look:
        said = " ".join((answer.out + " " + answer.err).split())
        assert "." not in lines or re.fullmatch(" ".join(map(pattern, wanted)), said), said
        for line in lines:
            if line.startswith("! "):
                assert not re.search(pattern(line[2:]), said), f"{line}\nin {said}"
            elif line in wanted:
                assert re.search(pattern(line), said), f"{line}\nnot in {said}"
        return
    data = json.loads(answer.out)
    what, *names = look
    if what == "value":
        value = reduce(lambda held, key: held[key], " ".join(names).split(" / "), data)
        said = f"{value['state']}: {value['detail']}" if isinstance(value, dict) and "state" in value else str(value)
        assert [re.fullmatch(pattern(line), said) is not None for line in wanted] == [True], said
        return
    if what == "notes":
        found = [re.fullmatch(pattern(line), note) for line, note in zip(wanted, data["notes"], strict=True)]
        assert all(found), data["notes"]
        return
    here = [row for role, row in rows(data) if names == [role, row["fusion"]]]
    if what == "kinds":
        assert [" ".join(sorted({row["decision"] for _, row in rows(data)}))] == wanted
    elif what == "at":
        said = f"{here[0]['decision']}: {here[0]['reason']}" if here else "none"
        assert [re.fullmatch(pattern(line), said) is not None for line in wanted] == [True], said
    elif what == "count":
        found: Counter[str] = Counter()
        for row in (row for row in here if not row["tokens"].startswith("from ")):
            of = "" if row["tokens"] == "any number of tokens" else f", {row['tokens']}"
            said = f"{row['decision']}{of}: {row['reason']}"
            alike = [line for line in wanted if re.fullmatch(pattern(line.partition(" ")[2]), said)]
            found[alike[0] if len(alike) == 1 else said] += row["sites"]
        assert [f"{found.pop(line, 0)} {line.partition(' ')[2]}" for line in wanted] == wanted and not found
    else:
        pytest.fail(f"nothing is looked at by {what!r}")


@pytest.mark.parametrize("text", cases())
def test_the_answer(
    text: str, run: Callable[..., Any], packages: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("LAYERFUSE_FUSIONS", "LAYERFUSE_BACKEND", "VLLM_PLUGINS", *SWITCHES):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "checkpoints").symlink_to(CHECKPOINTS)
    for package in re.findall(r"^\+ (\S+) as (\S+) (\S+) ?(.*)$", text, re.MULTILINE):
        packages(*package)
    for file, of, content in files_in(text):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        if of:
            config = published(of) | json.loads(content or "{}")
            content = json.dumps({key: value for key, value in config.items() if value != "absent"})
        Path(file).write_text(content, encoding="utf-8")
    asked = re.split(r"^\$ ", re.sub(r"^> .*?^<$", "", text, flags=re.MULTILINE | re.DOTALL), flags=re.MULTILINE)[1:]
    assert asked
    before = None
    for each in asked:
        command, *lines = filter(None, each.splitlines())
        words, _, look = command.partition(" | ")
        words, _, file = words.partition(" > ")
        with monkeypatch.context() as set_here:
            arguments = shlex.split(words)
            while re.match(r"[A-Z_0-9]+=", arguments[0]):
                set_here.setenv(*arguments.pop(0).split("=", 1))
            answer = run(*arguments, *(["--json"] if look else []))
        if file:
            Path(file).write_text(answer.out, encoding="utf-8")
        assert "=" not in lines or answer == before
        check(answer, look.split(), [line for line in lines if line != "="])
        before = answer
    assert not {"aiter", "vllm", "sglang"} & sys.modules.keys(), "they are read, and not imported"
