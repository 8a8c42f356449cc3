"""The command line. Its exit codes: 0 all is well, 1 the answer is no or problems were found, 2 a usage error.

Commands import what they need when they run, so that `layerfuse plan` answers without torch and at once.
"""

from __future__ import annotations

from .main import main

__all__ = ["main"]
