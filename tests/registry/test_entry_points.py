"""Entry points are found wherever `importlib.metadata` finds a package, though most starts do without asking it."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Callable
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from unittest import mock

import pytest

from layerfuse.registry.entry_points import entry_points

GROUP = "layerfuse.trial"
TEXT = f"[{GROUP}]\nmine = some:THING\n"


def package(folder: Path, info: str = "some-1.0.dist-info", facts: str = "METADATA") -> Path:
    """A folder with the metadata of a package, as an installer leaves it."""
    (folder / info).mkdir(parents=True)
    (folder / info / facts).write_text("Metadata-Version: 2.1\nName: some\nVersion: 1.0\n")
    (folder / info / "entry_points.txt").write_text(TEXT)
    return folder


def archive(folder: Path) -> list[object]:
    with zipfile.ZipFile(folder / "some.zip", "w") as file:
        file.writestr("some-1.0.dist-info/METADATA", "Name: some\nVersion: 1.0\n")
        file.writestr("some-1.0.dist-info/entry_points.txt", TEXT)
    return [str(folder / "some.zip")]


def finder(folder: Path) -> list[object]:
    """One that knows packages elsewhere than on Python's path."""
    elsewhere = metadata.PathDistribution(package(folder) / "some-1.0.dist-info")
    sys.meta_path.append(mock.Mock(spec=["find_distributions"], find_distributions=lambda _: [elsewhere]))
    return []


WAYS: dict[str, Callable[[Path], list[object]]] = {
    "a folder": lambda folder: [str(package(folder))],
    "capital letters": lambda folder: [str(package(folder, "some-1.0.DIST-INFO"))],
    "an egg": lambda folder: [str(package(folder / "some-1.0-py3.egg", "EGG-INFO", "PKG-INFO"))],
    "an archive": archive,
    "a finder": finder,
    "a path that is no text": lambda folder: [package(folder)],
    "beside bytes": lambda folder: [bytes(folder), str(package(folder))],
    "beside what is no path": lambda folder: [None, [], str(package(folder))],
}


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python that finds no package."""
    monkeypatch.setattr(sys, "meta_path", [PathFinder])
    monkeypatch.setattr(sys, "path", [])


@pytest.mark.parametrize("way", WAYS)
def test_a_package_is_found_in_whichever_way_python_has_it(way: str, tmp_path: Path) -> None:
    sys.path += WAYS[way](tmp_path)
    assert [point.value for point in entry_points(GROUP)] == ["some:THING"]


def test_one_whose_file_cannot_be_read_is_named(tmp_path: Path) -> None:
    file = package(tmp_path) / "some-1.0.dist-info" / "entry_points.txt"
    file.unlink()
    file.symlink_to(file)
    sys.path.append(str(tmp_path))
    with pytest.warns(RuntimeWarning, match="the entry points of some in .* cannot be read, .*: OSError: "):
        assert entry_points(GROUP) == []


def test_where_no_package_names_the_group_nothing_else_is_asked(tmp_path: Path) -> None:
    sys.path += [str(package(tmp_path)), str(tmp_path / "nowhere")]
    (tmp_path / "flat-1.0.egg-info").write_text("Name: flat\n")
    (tmp_path / "none-1.0.dist-info").mkdir()
    with mock.patch.object(metadata, "entry_points", return_value=[]) as asked:
        assert entry_points("layerfuse.other") == []
        asked.assert_not_called()
        entry_points(GROUP)
        asked.assert_called_once()
