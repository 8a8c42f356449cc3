"""Shared by the tests inside engines."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from layerfuse.engines import process


@pytest.fixture(autouse=True)
def environ() -> Iterator[None]:
    """vLLM sets a variable for models that it does not compile, and would not compile those of later tests."""
    with mock.patch.dict("os.environ"):
        yield


@pytest.fixture(autouse=True)
def unsaid() -> Iterator[None]:
    """What a process has logged once, each test hears again."""
    with mock.patch.object(process.this, "said", set()):
        yield
