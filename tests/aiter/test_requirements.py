"""What an installation of layerfuse installs with it, and what it must never install."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def requirement_names(requirements: list[str]) -> set[str]:
    return {
        re.split(r"[^A-Za-z0-9._-]", requirement.strip())[0].lower().replace("_", "-") for requirement in requirements
    }


def test_nothing_of_ours_installs_pypi_s_aiter():
    """Nor anything that our requirements require in turn, as far as it is installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {})
    waiting = requirement_names([*project["dependencies"], *(r for extra in extras.values() for r in extra)])
    assert {"attrs", "torch", "transformers"} <= waiting
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        try:
            required = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        waiting |= requirement_names([r for r in required if "extra ==" not in r]) - seen
    assert len(seen) > 20
    assert "aiter" not in seen
