"""Which commit this is: of a checkout by git, of a wheel or an sdist by the file that setup.py writes into it, which runs this one alone."""

from __future__ import annotations

import subprocess
from pathlib import Path

FILE = "commit.txt"


def version_text() -> str:
    """The version, and in brackets the commit where it is known."""
    from . import __version__

    commit = commit_of(Path(__file__).parent)
    return f"{__version__} ({commit})" if commit else __version__


def commit_of(root: Path) -> str | None:
    """The commit of a checkout, or that an unpacked sdist or an installed package was built from; None where it is not known.

    Args:
        root: the folder that holds models.toml. What is changed in a checkout is said: `5837ac8f0a1b-dirty`.
    """
    if (root / FILE).is_file():
        return (root / FILE).read_text(encoding="utf-8").strip()
    if not (root / ".git").exists():  # a package that is installed inside of another repository is not of its commits
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None
