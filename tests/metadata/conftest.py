"""Stand-ins of AITER's releases, as the tests of the bindings make them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "aiter"))


@pytest.fixture
def aiter_of(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Imports the stand-in of a release; forgotten when the test is over."""
    from standin import imported, make_standin

    from layerfuse.fusion.backends import aiter as amd

    with contextlib.ExitStack() as stack:

        def load(release: str, **options: Any) -> Any:
            module = stack.enter_context(imported(make_standin(tmp_path / release, release, **options)))
            amd.forget()
            return module

        yield load
    amd.forget()
