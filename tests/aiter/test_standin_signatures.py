"""The stand-ins say what was recorded: every signature of every release, in the source and, where AITER shows it, live."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from standin import EVERY_REF, RELEASES, aliases, between, definitions, imported, make_standin, shared_standin, version
from standin.recorded import DATA, every_key

RECORDED: dict[str, Any] = json.loads(DATA.read_text())


def written(folder: Path, key: str) -> ast.FunctionDef | None:
    """The definition of a key in the generated source, found as a reader of files would find it."""
    module, _, path = key.partition(":")
    file = folder / (module.replace(".", "/") + ".py")
    if not file.exists():
        return None
    body = ast.parse(file.read_text()).body
    *owner, name = path.split(".")
    for outer in owner:
        body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == outer), [])
    return next((node for node in body if isinstance(node, ast.FunctionDef) and node.name == name), None)


def texts(arguments: ast.arguments) -> str:
    return ast.unparse(arguments)


def as_recorded(release: str, key: str) -> dict[str, Any]:
    """The raw entry, looked up without the reader that the generator uses."""
    order = RECORDED["releases"].index
    return next(
        entry for entry in RECORDED["definitions"][key] if order(entry["from"]) <= order(release) <= order(entry["to"])
    )


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


def check_source(folder: Path, release: str) -> None:
    for key in definitions(release):
        function, raw = written(folder, key), as_recorded(release, key)
        assert function is not None, f"{release} lacks {key} in its source"
        expected = ast.parse(f"def f({', '.join(raw['parameters'])}): ...").body[0]
        assert isinstance(expected, ast.FunctionDef)
        assert texts(function.args) == texts(expected.args), f"{release} {key}"
        assert (None if function.returns is None else ast.unparse(function.returns)) == raw["returns"]
        decorators = [node.func.id for node in function.decorator_list if isinstance(node, ast.Call)]  # type: ignore[attr-defined]
        assert decorators == ([raw["hidden_by"]] if "hidden_by" in raw else [])


def check_live(release: str) -> None:
    for key, definition in definitions(release).items():
        signature = inspect.signature(reached(key))
        if definition.hidden_by:
            assert str(signature) == "(*args, **kwargs)", f"{release} {key} can be inspected"
            continue
        kinds = {parameter.name: parameter.kind for parameter in signature.parameters.values()}
        assert list(kinds) == [parameter.name for parameter in definition.parameters], f"{release} {key}"
        for parameter in definition.parameters:
            assert (kinds[parameter.name] is inspect.Parameter.KEYWORD_ONLY) == parameter.keyword_only
            default = signature.parameters[parameter.name].default
            assert (default is inspect.Parameter.empty) == (parameter.default is None)


@pytest.mark.parametrize("release", EVERY_REF)
def test_every_recorded_signature_is_there_and_nothing_else(release: str) -> None:
    folder = shared_standin(release)
    check_source(folder, release)
    with imported(folder):
        check_live(release)
        for alias, target in aliases(release).items():
            one, other = reached(alias), reached(target)
            assert one is other, f"{release} {alias}"
        absent = set(every_key()) - set(definitions(release)) - set(aliases(release))
        assert not [key for key in absent if exists(key)]


@pytest.mark.parametrize("release", ["v0.1.17-longctx", "v0.1.20"])
def test_metadata_is_found_under_amds_name(release: str) -> None:
    with imported(shared_standin(release)) as package:
        assert importlib.metadata.version("amd-aiter") == version(release)
        with pytest.raises(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version("aiter")
        assert not hasattr(package, "__version__")
        assert importlib.import_module("aiter._version").__version__ == version(release)


def test_versions_are_what_setuptools_scm_makes_of_the_tags() -> None:
    assert version("v0.1.17-rc0") == "0.1.17rc0"
    assert version("v0.1.16.post6") == "0.1.16.post6"
    assert version("v0.1.17-longctx") == version("v0.1.17") == "0.1.17"


def test_the_record_is_whole_and_in_order() -> None:
    assert len(RELEASES) == 13 and RECORDED["releases"][-1] == "HEAD"
    assert "e4048607a5" in RECORDED["source"]
    for entries in (*RECORDED["definitions"].values(), *RECORDED["aliases"].values()):
        ends = [RECORDED["releases"].index(entry[end]) for entry in entries for end in ("from", "to")]
        assert ends == sorted(ends)
    assert between("v0.1.17-longctx", "v0.1.17", "v0.1.18") and not between("v0.1.17-rc0", "v0.1.17", None)
    with pytest.raises(KeyError, match="no recorded release"):
        make_standin(Path("unused"), "v0.1.21")
