"""Fixtures of the fusion tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from layerfuse.fusion import backends

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(autouse=True, scope="session")
def _quick() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=["reference", pytest.param("triton", marks=needs_triton)])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each backend that runs anywhere, forced for a test."""
    backends.force(request.param)
    yield request.param
    backends.force(None)


@pytest.fixture
def _spare() -> Iterator[None]:
    """What a test registers as a backend goes with it: every op's backends are named where one is asked for by a wrong name."""
    before = {name: list(several) for name, several in backends._backends.items()}
    yield
    backends._backends.clear()
    backends._backends.update(before)
    backends.decide_again()
