"""The entry point: runs the commands, and turns this library's errors into one message and an exit code."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

TRACEBACK = "LAYERFUSE_TRACEBACK"
"""Set to 1 to see the traceback of an error instead of its message."""

WRONG_QUESTIONS = frozenset(
    {
        "ActivationQuantError",
        "BackendError",
        "BenchError",
        "FusionConfigError",
        "NoConfigError",
        "PromptsError",
        "UnknownEngineError",
        "UnknownModelError",
        "UnknownFusionError",
        "UnknownPeerError",
        "UnknownReleaseError",
        "UnknownReleaseOfVllmError",
        "UnknownTargetError",
    }
)
"""Errors about the arguments: these exit with 2."""

BRIEF = ("models", "plan")
"""Commands that are done before Python would find anything to free: looking for it, and once more as it ends, was a sixth of a plan's time."""

ANSWERS = ("bench", "bisect", "check", "contract", "diff", "doctor", "inspect", "verify")
"""Commands whose exit code is their answer."""

UNREAD = 141
"""The exit code of an answer whose reader went before its end, as of other programs in a pipe: 128 and SIGPIPE's number."""

INTERRUPTED = 130
"""The exit code of a program that Ctrl-C ended, as shells have it."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit.

    Args:
        arguments: as in `sys.argv[1:]`, which is used if not given.
    """
    code = 0
    given = sys.argv[1:] if arguments is None else list(arguments)
    command = given[0] if given else ""
    brief = arguments is None and command in BRIEF
    if brief:
        gc.disable()
    _write_any_letter()
    try:
        if sys.stdout is None:
            raise OSError("stdout is closed")
        code = _run(given)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of a pipe has closed it (`| head`): that is no error, but what is unread is no yes either.
        code = code or (UNREAD if command in ANSWERS else 0)
    except OSError as error:
        if error.filename is not None or _traceback():  # about some file, not about the output
            raise
        code = 1
        _say(f"cannot write output: {error.strerror or error}")
    _give_up_what_cannot_be_written()
    if brief:
        if "triton" not in sys.modules:  # its bindings would call what is frozen a leak
            gc.freeze()  # before looking is allowed again, which would begin with all that there is
        gc.enable()
    raise SystemExit(code)


def _run(arguments: list[str]) -> int:
    """The exit code of a command. What cannot be written is raised."""
    import click

    from ..adapters.errors import LayerfuseError
    from .app import app

    try:
        if os.environ.get("_LAYERFUSE_COMPLETE"):
            app.main(args=arguments, prog_name="layerfuse")
        # Not `app.main`, which exits with 1 where the reader of a pipe has gone, in its standalone mode and without.
        with app.make_context("layerfuse", arguments) as context:
            app.invoke(context)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        _say("interrupted")
        return INTERRUPTED
    except LayerfuseError as error:
        if _traceback():
            raise
        _say(str(error))
        return 2 if type(error).__name__ in WRONG_QUESTIONS else 1
    return 0


def _write_any_letter() -> None:
    """A terminal that lacks a letter (ASCII, a code page of Windows) gets its number: a name is no reason to fail."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _traceback() -> bool:
    return os.environ.get(TRACEBACK, "") not in ("", "0")


def _say(message: str) -> None:
    with contextlib.suppress(OSError):  # there is nowhere left to say it
        print(f"layerfuse: {message}", file=sys.stderr)


def _give_up_what_cannot_be_written() -> None:
    """Python would complain once more, and exit with 120, when it flushes the streams at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, stream.fileno())
            os.close(devnull)
