"""Whose code something is, and whether it is what its module's source file compiles to.

A patch looks like what it stands for: `functools.wraps` copies name, parameters and module. Its globals and its code are its own.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import SourceFileLoader
from types import CodeType, FunctionType, MethodType
from typing import Any

HOLDERS: dict[tuple[str, str], Callable[[Any], Any]] = {}
"""Module and name of an engine's class whose objects hold a function -> what gets it from one."""


@functools.cache
def _compiled(module: str) -> CodeType | None:
    """What the source file of a module compiles to; nothing where there is no file."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    try:
        # Python's own loader, whatever loaded the module: it takes the compiled file that lies beside the source if that is as new.
        return SourceFileLoader(module, spec.origin).get_code(module)  # type: ignore[union-attr]
    except (AttributeError, TypeError, ImportError, OSError, SyntaxError, ValueError):
        return None


@functools.cache
def codes(module: str) -> Mapping[str, tuple[CodeType, ...]]:
    """Qualified name -> the code objects that the source file of a module compiles to; nothing where there is no file."""
    found: dict[str, tuple[CodeType, ...]] = {}
    for code in _inner(_compiled(module)):
        found[code.co_qualname] = (*found.get(code.co_qualname, ()), code)
    return found


@functools.cache
def imported(module: str) -> Mapping[str, frozenset[str]]:
    """Name -> the modules that the source file of a module imports under it, as far as they are loaded; nothing without a file."""
    found: dict[str, frozenset[str]] = {}
    for name, path in imports_of(_compiled(module)):
        if path in sys.modules:
            found[name] = found.get(name, frozenset()) | {path}
    return found


def imports_of(top: CodeType | None) -> Iterator[tuple[str, str]]:
    """What the code of a module imports by absolute names: the name that it gets and its path, be that a module or not.

    Of the compiled code: to parse the sources again takes a hundred times as long.
    """
    if top is None:
        return
    constants: list[Any] = [None, None]
    path, whole, given, wide = "", False, "", 0
    for kind, low in zip(top.co_code[::2], top.co_code[1::2], strict=True):
        op, number = dis.opname[kind], wide << 8 | low
        wide = number if op == "EXTENDED_ARG" else 0
        if op in ("LOAD_CONST", "LOAD_SMALL_INT"):
            constants = [constants[1], top.co_consts[number] if op == "LOAD_CONST" else number]
        elif op == "IMPORT_NAME":
            level, names = constants
            path, whole = "" if level else top.co_names[number], names is None
            given = path.partition(".")[0] if whole else ""
        elif op == "IMPORT_FROM":  # of `import a.b as c` too
            given = path and (path if whole else f"{path}.{top.co_names[number]}")
        elif op in ("STORE_NAME", "STORE_GLOBAL"):  # as where a function below says `global`
            if given:
                yield top.co_names[number], given
            given = ""


def _inner(code: CodeType | None) -> Iterator[CodeType]:
    for each in () if code is None else code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _inner(each)


@functools.cache
def is_source(code: CodeType, module: str) -> bool:
    """Whether code is what the source file of a module compiles to under the same name."""
    fresh = _fresh(code)
    return any(fresh == _fresh(each) for each in codes(module).get(code.co_qualname, ()))


def _fresh(code: CodeType) -> CodeType:
    """A copy as it is before it has run: the interpreter writes into code as it runs."""
    return code.replace(co_consts=tuple(_fresh(c) if isinstance(c, CodeType) else c for c in code.co_consts))


@functools.cache
def names_in(code: CodeType) -> frozenset[str]:
    """Every name that code asks for, of its module or of something: those of locals are not among them."""
    return frozenset(code.co_names).union(*(each.co_names for each in _inner(code)))


def package(module: str) -> str:
    """The first part of a module's name."""
    return module.partition(".")[0]


def kind_of(instance: Any) -> tuple[str, str]:
    """The module and the name of an object's class, or of a class."""
    cls = instance if isinstance(instance, type) else type(instance)
    return cls.__module__, cls.__qualname__


def plain(held: Any) -> Any:
    """The function of what holds one, or what it is."""
    while True:
        if isinstance(held, staticmethod | classmethod | MethodType):
            held = held.__func__
        elif isinstance(held, property):
            held = held.fget
        elif isinstance(held, functools.partial):
            held = held.func
        elif isinstance(held, functools._lru_cache_wrapper):
            held = held.__wrapped__
        elif (type(held).__module__, type(held).__name__) in HOLDERS:
            held = HOLDERS[type(held).__module__, type(held).__name__](held)
        elif package(type(held).__module__) == "triton" and isinstance(getattr(held, "fn", None), FunctionType):
            return held.fn
        else:
            return held


def module_of(held: Any) -> str:
    """The module whose code something is."""
    found = plain(held)
    if isinstance(found, FunctionType):
        return str(found.__globals__.get("__name__", "nowhere"))
    return str((found if isinstance(found, type) else type(found)).__module__)


def within(function: FunctionType) -> Iterator[FunctionType]:
    """The functions that a function closes over: what a decorator wraps."""
    for cell in function.__closure__ or ():
        try:
            found = plain(cell.cell_contents)
        except ValueError:  # empty
            continue
        if isinstance(found, FunctionType):
            yield found
