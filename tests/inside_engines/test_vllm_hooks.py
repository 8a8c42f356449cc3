"""Hooks are checked when they are set, on modules that are what some other vLLM might be."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest

from layerfuse.engines.hooks import Hook, HookError, check, check_source, stand_at, wrapped_by
from layerfuse.engines.imports import when_imported
from layerfuse.engines.vllm.hooks import HOOKS

HOOK = Hook(name="test", module="vllm.some", path="Backend.compile", takes=("self", "graph"))
SOURCE = """
class Backend:
    def compile(self, graph, more=1):
        return ["theirs", graph, more]

class Platform:
    @classmethod
    def update(cls, vllm_config):
        return cls.__name__, vllm_config

platform = Platform()
"""


def module_of(source: str, name: str = "vllm.some") -> ModuleType:
    module = ModuleType(name)
    exec(source, vars(module))
    return module


def ours(original: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    return ["ours", original(*args, **kwargs)]


def test_a_function_is_called_through_ours_from_then_on_and_once() -> None:
    module = module_of(SOURCE)
    stand_at(HOOK, module, ours)
    stand_at(HOOK, module, ours)
    assert module.Backend().compile("g", more=2) == ["ours", ["theirs", "g", 2]]


def test_class_methods_are_found_through_an_object_and_stay_class_methods() -> None:
    module = module_of(SOURCE)
    stand_at(Hook(name="t", module="vllm.some", path="platform.update", takes=("vllm_config",)), module, ours)
    assert module.platform.update(3) == module.Platform.update(3) == ["ours", ("Platform", 3)]


@pytest.mark.parametrize(
    ("path", "takes", "problem"),
    [
        ("Backend.lower", ("self",), "vllm.some:Backend.lower is expected, and Backend has no 'lower'"),
        ("Compiler.compile", ("self",), "vllm.some:Compiler.compile is expected, and vllm.some has no 'Compiler'"),
        ("Backend.compile", ("self", "range"), "is expected to take self, range, and takes self, graph, more"),
        ("Backend.compile", ("graph", "self"), "is expected to take graph, self, and takes self, graph, more"),
        ("platform", (), "is expected to be a function, and is Platform"),
    ],
)
def test_what_is_not_as_known_is_refused_with_both_sides(path: str, takes: tuple[str, ...], problem: str) -> None:
    module = module_of(SOURCE)
    hook = Hook(name="test", module="vllm.some", path=path, takes=takes)
    with pytest.raises(HookError) as raised:
        stand_at(hook, module, ours)
    assert problem in str(raised.value)
    assert module.Backend().compile("g") == ["theirs", "g", 1]


@pytest.mark.parametrize(
    ("beside", "fits"),
    [
        ("", {"any", "optional", "none"}),
        ("more=1", {"any", "optional"}),
        ("*, more=1", {"any", "optional"}),
        ("*more", {"any", "optional"}),
        ("**more", {"any", "optional"}),
        ("more", {"any"}),
        ("*, more", {"any"}),
    ],
)
def test_parameters_beside_those_that_are_known(beside: str, fits: set[str], tmp_path: Path) -> None:
    """By the function and by its source."""
    source = f"class Backend:\n    def compile(self, graph{beside and ', '}{beside}): pass\n"
    (tmp_path / "some.py").write_text(source)
    words: tuple[Any, ...] = ("any", "optional", "none")
    hooks = {word: attrs.evolve(HOOK, others=word) for word in words}
    assert {word for word, hook in hooks.items() if check_source(hook, tmp_path) is None} == fits
    for word, hook in hooks.items():
        if word in fits:
            check(hook, module_of(source))
        else:
            with pytest.raises(HookError, match=r"is expected to take self, graph and .*, and takes self, graph, more"):
                check(hook, module_of(source))


def test_a_hook_that_another_plugin_wraps_well_is_stood_around_and_one_that_hides_its_arguments_is_refused() -> None:
    module = module_of(SOURCE)
    original = module.Backend.compile
    assert wrapped_by(HOOK, module) is None

    @functools.wraps(original)
    def well(*args: Any) -> Any:
        return ["another", original(*args)]

    module.Backend.compile = well
    assert wrapped_by(HOOK, module) == __name__
    check(HOOK, module)
    module.Backend.compile = lambda *args: original(*args)
    with pytest.raises(HookError, match=r"is expected to take self, graph, and takes args"):
        check(HOOK, module)


def test_every_hook_says_where_it_is() -> None:
    assert len({hook.place for hook in HOOKS}) == len(HOOKS)
    assert {hook.name for hook in HOOKS} == {
        "options",
        "specs",
        "loader",
        "pass",
        "piece",
        "artefact",
        "step",
        "metadata",
    }


# ---- waiting for an import


@pytest.fixture
def later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "imported_later.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "imported_later", raising=False)
    return "imported_later"


def test_those_who_wait_are_told_after_the_import_and_those_who_come_late_at_once(later: str) -> None:
    told: list[tuple[str, int]] = []
    when_imported(later, lambda module: told.append(("first", module.value)))
    when_imported(later, lambda module: told.append(("second", module.value)))
    assert importlib.util.find_spec(later) is not None  # a look is no import
    assert told == []
    module = __import__(later)
    assert told == [("first", 1), ("second", 1)]
    when_imported(later, lambda module: told.append(("late", module.value)))
    assert told[2:] == [("late", 1)]
    # Nothing of the waiting stays on the module: tools that ask its loader for the source get it.
    assert module.__loader__.get_source(later) == "value = 1\n"
    assert module.__spec__ is not None and module.__spec__.loader is module.__loader__
