"""The stand-ins themselves: they declare what was recorded, and take no call that AITER would misread.

What they compute is held to the references of the ops, wherever a binding is (`test_bindings`).
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from standin import EVERY_REF, RELEASES, aliases, definitions, imported, on_path, shared_standin, version
from standin.recorded import DATA, every_key

RECORDED: dict[str, Any] = json.loads(DATA.read_text())


def reached(key: str) -> Any:
    module, _, path = key.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


def exists(key: str) -> bool:
    try:
        reached(key)
    except (ImportError, AttributeError):
        return False
    return True


def written(folder: Path, key: str) -> ast.FunctionDef:
    """The definition of a key in the generated source, found as a reader of files would find it."""
    module, _, path = key.partition(":")
    body = ast.parse((folder / (module.replace(".", "/") + ".py")).read_text()).body
    *owner, name = path.split(".")
    for outer in owner:
        body = next(node.body for node in body if isinstance(node, ast.ClassDef) and node.name == outer)
    return next(node for node in body if isinstance(node, ast.FunctionDef) and node.name == name)


def as_recorded(release: str, key: str) -> dict[str, Any]:
    """The raw entry, looked up without the reader that the generator uses."""
    order = RECORDED["releases"].index
    return next(
        entry for entry in RECORDED["definitions"][key] if order(entry["from"]) <= order(release) <= order(entry["to"])
    )


@pytest.mark.parametrize("release", EVERY_REF)
def test_every_recorded_signature_is_there_and_nothing_else(release: str) -> None:
    """In the source and, where AITER shows it, live."""
    folder = shared_standin(release)
    with imported(folder):
        assert importlib.metadata.version("amd-aiter") == version(release)
        for key, definition in definitions(release).items():
            function, raw = written(folder, key), as_recorded(release, key)
            expected = ast.parse(f"def f({', '.join(raw['parameters'])}): ...").body[0]
            assert isinstance(expected, ast.FunctionDef)
            assert ast.unparse(function.args) == ast.unparse(expected.args), f"{release} {key}"
            assert (None if function.returns is None else ast.unparse(function.returns)) == raw["returns"]
            live = inspect.signature(reached(key))
            if definition.hidden_by:
                assert str(live) == "(*args, **kwargs)", f"{release} {key} can be inspected"
            else:
                assert list(live.parameters) == [parameter.name for parameter in definition.parameters]
        for alias, target in aliases(release).items():
            assert reached(alias) is reached(target), f"{release} {alias}"
        absent = set(every_key()) - set(definitions(release)) - set(aliases(release))
        assert not [key for key in absent if exists(key)]


def test_the_record_is_whole_and_in_order() -> None:
    assert len(RELEASES) == 13 and RECORDED["releases"][-1] == "HEAD"
    for entries in (*RECORDED["definitions"].values(), *RECORDED["aliases"].values()):
        ends = [RECORDED["releases"].index(entry[end]) for entry in entries for end in ("from", "to")]
        assert ends == sorted(ends)


def test_nothing_of_an_import_is_left_behind_and_without_a_folder_none_is_installed() -> None:
    """The folder of these tests has the name of the package, which must not make it one."""
    path, finders = list(sys.path), list(sys.meta_path)
    with imported(shared_standin("v0.1.20")):
        importlib.import_module("aiter.mla")
    assert (sys.path, sys.meta_path) == (path, finders)
    assert not [name for name in sys.modules if name.split(".")[0] == "aiter"]
    with on_path():
        spec = importlib.util.find_spec("aiter")
        assert spec is None or "tests" not in str(spec.submodule_search_locations)
