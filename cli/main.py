"""The way in: runs the commands, and turns this library's errors into one clean message and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

TRACEBACK = "LAYERFUSE_TRACEBACK"
"""Set to 1 to see the traceback of an error instead of its message."""

WRONG_QUESTIONS = frozenset({"UnknownModelError", "UnknownTargetError", "FusionConfigError"})
"""Errors about what was asked, rather than answers to it: these exit with 2."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit.

    Args:
        arguments: as in `sys.argv[1:]`, which is used if not given.
    """
    from ..adapters.errors import LayerfuseError
    from .app import app

    try:
        app.main(args=None if arguments is None else list(arguments), prog_name="layerfuse")
    except LayerfuseError as error:
        if os.environ.get(TRACEBACK, "") not in ("", "0"):
            raise
        print(f"layerfuse: {error}", file=sys.stderr)
        raise SystemExit(2 if type(error).__name__ in WRONG_QUESTIONS else 1) from None
    except BrokenPipeError:
        # The reader has gone (`| head`). Python would complain once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    raise SystemExit(0)
