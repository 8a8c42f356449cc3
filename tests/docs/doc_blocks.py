"""The fenced code blocks of a page, and how the Python ones are run: in order, in one namespace, output captured.

Pages and commands each run in a process of their own. Those are forked from one that has imported what is slow to
import, so that only one interpreter starts.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import re
import sys
import tomllib
import traceback
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[2] / "docs"
FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    language: str
    title: str | None
    code: str
    start: int
    end: int


def blocks_of(text):
    return [Block(m[1], m[2], m[3], m.start(3), m.end(3)) for m in FENCE.finditer(text)]


def expected_outputs(blocks):
    """(Python block, the text block that shows its output or None)."""
    found = []
    for i, block in enumerate(blocks):
        if block.language == "python" and not block.title:
            following = blocks[i + 1] if i + 1 < len(blocks) else None
            found.append((block, following if following and following.language == "text" else None))
    return found


def pretend_installed(pyproject):
    """Put the current folder on the path, with the metadata that installing a package there would have left."""
    project = tomllib.loads(pyproject)["project"]
    info = Path(f"{project['name'].replace('-', '_')}-{project['version']}.dist-info")
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"]
    (info / "entry_points.txt").write_text(
        "".join(f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in groups.items())
    )
    sys.path.insert(0, str(Path.cwd()))


def run_page(path):
    """Every Python block's output, in order. Titled blocks are files in the current folder, Python's from the beginning."""
    text = path.read_text()
    for block in blocks_of(text):
        if block.title and block.language == "python":
            Path(block.title).parent.mkdir(exist_ok=True)
            Path(block.title).write_text(block.code)
    # The same graphs and calls, op by op: a page shows no numbers that generated code would change.
    import torch._inductor.compile_fx as inductor

    inductor.compile_fx_inner = lambda gm, _inputs, **_: gm
    namespace = {"__name__": "__docs__"}
    outputs = []
    for block in blocks_of(text):
        if block.title:
            Path(block.title).write_text(block.code)
            if block.title == "pyproject.toml":
                pretend_installed(block.code)
        if block.language != "python" or block.title:
            continue
        line = text[: block.start].count("\n")
        captured = io.StringIO()
        with contextlib.redirect_stdout(captured):
            exec(compile("\n" * line + block.code, str(path), "exec"), namespace)
        outputs.append(captured.getvalue())
    return outputs


def run_command(words):
    """The exit code of `layerfuse WORDS` and what it printed, on stdout and stderr together."""
    from layerfuse.cli import main

    captured = io.StringIO()
    code = 0
    with contextlib.redirect_stdout(captured), contextlib.redirect_stderr(captured):
        try:
            main(words)
        except SystemExit as exit_:
            code = exit_.code or 0
    return code, captured.getvalue()


_forkserver = multiprocessing.get_context("forkserver")


def in_own_process(folder, function, argument):
    """What the function gives for the argument, run in a process of its own in this folder.

    Raises:
        AssertionError: it raised; the message is the traceback.
    """
    receiver, sender = _forkserver.Pipe(duplex=False)
    process = _forkserver.Process(target=_serve, args=(sender, folder, function, argument))
    process.start()
    sender.close()
    try:
        failure, result = receiver.recv()
    except EOFError:
        process.join()
        raise AssertionError(f"the process ended with exit code {process.exitcode}") from None
    process.join()
    assert failure is None, failure
    return result


def _serve(sender, folder, function, argument):
    os.chdir(folder)
    os.environ["COLUMNS"] = "200"
    try:
        answer = (None, function(argument))
    except BaseException:
        answer = (traceback.format_exc()[-3000:], None)
    sender.send(answer)
