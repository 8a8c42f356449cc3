"""The same expectations held to AITER's own sources: `LAYERFUSE_AITER_SOURCES=folder`, with a checkout per release.

`folder/v0.1.20/aiter` and so on: what the stand-ins say of the signatures, the real files must say too.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from expected import EXPECTED, No
from test_bindings import expected_of

from layerfuse.fusion.backends.aiter.conventions import Match, match
from layerfuse.fusion.backends.aiter.releases import RELEASES, release_range
from layerfuse.fusion.backends.aiter.table import BY_NAME

SOURCES = os.environ.get("LAYERFUSE_AITER_SOURCES", "")

pytestmark = pytest.mark.skipif(not SOURCES, reason="LAYERFUSE_AITER_SOURCES names no folder of checkouts")


def folder_of(release: str) -> Path:
    return Path(SOURCES) / release / "aiter"


@pytest.mark.parametrize("release", RELEASES)
def test_a_release(release):
    assert (folder_of(release) / "ops").is_dir(), "no checkout of this release"
    assert release in release_range(folder_of(release))
    for name in EXPECTED:
        binding, expected = BY_NAME[name], expected_of(name, release)
        found = [match(folder_of(release), function) for function in binding.functions]
        there = next((each for each in found if each is not None), None)
        if isinstance(there, Match):
            assert there.recorded, there
            assert isinstance(expected, No) or there.convention.since == expected.since
        elif there is None:
            assert isinstance(expected, No)
            assert expected.words == "has no such function"
        else:
            assert isinstance(expected, No)
            assert expected.words in there
