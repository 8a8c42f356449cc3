"""The same expectations held to AITER's own sources: `LAYERFUSE_AITER_SOURCES=folder`, with a checkout per release.

`folder/v0.1.20/aiter` and so on: what the stand-ins say of the signatures, the real files must say too.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from test_bindings import NAMES, refused

from layerfuse.fusion.backends.aiter.matching import Match, match
from layerfuse.fusion.backends.aiter.releases import RELEASES, release_range
from layerfuse.fusion.backends.aiter.table import BY_NAME

SOURCES = os.environ.get("LAYERFUSE_AITER_SOURCES", "")

pytestmark = pytest.mark.skipif(not SOURCES, reason="LAYERFUSE_AITER_SOURCES names no folder of checkouts")


def folder_of(release: str) -> Path:
    return Path(SOURCES) / release / "aiter"


@pytest.mark.parametrize("release", RELEASES)
def test_a_release(release):
    assert (folder_of(release) / "ops").is_dir(), "no checkout of this release"
    found = release_range(folder_of(release))
    assert found is not None and release in found
    for name in NAMES:
        there = match(folder_of(release), BY_NAME[name].function)
        if isinstance(there, Match):
            assert there.recorded, there
        else:
            assert refused(name, release) == "has no such function", there
