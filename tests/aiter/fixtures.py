"""Fixtures of the tests that run on stand-ins of AITER."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from standin import imported, shared_standin

from layerfuse.fusion.backends import aiter as amd


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors are tiny: several threads only wait for one another, for minutes where other work is going on."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def aiter_of(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Imports the stand-in of a release, with the options of `make_standin`; forgotten when the test is over."""
    with contextlib.ExitStack() as stack:

        def load(release: str, **options: Any) -> Any:
            folder = shared_standin(release, **options)
            module = stack.enter_context(imported(folder))
            amd.forget()
            return module

        yield load
    amd.forget()
