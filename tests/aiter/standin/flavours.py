"""Other things that are called `aiter`."""

from __future__ import annotations

from pathlib import Path

from .generate import make_standin, write_metadata

ASYNC_HELPER = '''"""Small helpers around asynchronous iterators."""

from .join import join_aiters

__version__ = "0.13.20191203"
'''

JOIN = '''"""Joining asynchronous iterators."""


async def join_aiters(iterators):
    """Every item of every iterator, one iterator after the other."""
    async for iterator in iterators:
        async for item in iterator:
            yield item
'''


def make_unrelated(folder: Path) -> Path:
    """The project of that name on PyPI: an asyncio helper, whose version compares greater than any of AMD's."""
    package = folder / "aiter"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(ASYNC_HELPER)
    (package / "join.py").write_text(JOIN)
    write_metadata(folder, "aiter", "0.13.20191203")
    return folder


def make_checkout(folder: Path, release: str, *, arch: str = "gfx950") -> Path:
    """A source checkout on the path: no metadata and no `aiter/_version.py`."""
    return make_standin(folder, release, arch=arch, metadata=False)
