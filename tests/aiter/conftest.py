"""Shared by the tests of the AITER layer: stand-ins that last for one test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from standin import imported, make_standin


@pytest.fixture
def aiter_of(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Imports the stand-in of a release, with the options of `make_standin`; forgotten when the test is over."""
    with contextlib.ExitStack() as stack:

        def load(release: str, **options: Any) -> Any:
            return stack.enter_context(imported(make_standin(tmp_path / release, release, **options)))

        yield load
