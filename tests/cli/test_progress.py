"""What a command that takes minutes says meanwhile: a bar on a terminal, a line per step in a log, and never a word on stdout."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = """
from layerfuse.cli.progress import progress
with progress() as step:
    step("loading", {total})
    print("a result", flush=True)
    step("running", {total})
"""


def said(total, *, terminal):
    """Stdout, which is a pipe, and stderr."""
    code = CODE.format(total=total)
    if not terminal:
        answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        return answer.stdout, answer.stderr
    ours, theirs = pty.openpty()
    answer = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        check=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
    )
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    return answer.stdout, shown


@pytest.mark.parametrize(
    ("total", "lines"), [(2, "[1/2] loading\n[2/2] running\n"), (None, "[1] loading\n[2] running\n")]
)
def test_a_log_gets_a_line_per_step(total, lines):
    assert said(total, terminal=False) == ("a result\n", lines)


@pytest.mark.parametrize(("total", "count"), [(2, "2/2"), (None, "2/?")])
def test_a_terminal_gets_a_bar_and_stdout_is_left_alone(total, count):
    out, bar = said(total, terminal=True)
    assert out == "a result\n"
    assert count in bar and "running" in bar and "\n[" not in bar


def test_make_says_what_it_installs_before_it_does(tmp_path, monkeypatch):
    for name in ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES"):  # of the make that runs the tests
        monkeypatch.delenv(name, raising=False)
    answer = subprocess.run(
        ["make", "-n", "verify", f"VENV={tmp_path / 'venv'}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines = [line for line in answer.stdout.splitlines() if "echo" in line or "/pip " in line or "/layerfuse " in line]
    assert ["echo" in line for line in lines] == [True, False, True, False, True, False, True, False]
