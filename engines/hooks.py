"""A place of an engine that layerfuse stands at, as data, and the check that it is what this version knows.

A hook is a function of the engine's that is called through one of ours. Where one is missing or takes other arguments, layerfuse
leaves the engine alone.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeAlias

from attrs import frozen

from .whose import module_of, package

Around: TypeAlias = "Callable[..., Any]"
"""Called in a hook's place, with the original as its first argument."""


class HookError(LookupError):
    """The engine is not what this version of layerfuse knows; the message says where."""


@frozen(kw_only=True)
class Hook:
    """One function of an engine's, and what is expected of it."""

    name: str = ""
    "By which layerfuse knows what to do there, where it wraps it."
    does: str = ""
    "What that is, as the doctor says it."
    module: str
    path: str
    "In the module: `Class.method`, or a function's name."
    takes: tuple[str, ...]
    "Parameters that it must have by name, in this order."
    others: Literal["any", "optional", "none"] = "any"
    """Which parameters it may have beside: any, where it is given all that it was called with; those with a default, where layerfuse
    calls it; none, where something of layerfuse's is called in its place."""
    source: str | None = None
    "Where its source is, as `module:path`, if not at `place`."
    reads: frozenset[str] | None = None
    "The attributes of itself that a method reads; one that reads more does something new. None: any."
    needed: bool = True
    "Whether nothing may be done without it. One that is not needed belongs to a part of the engine that few use."
    on_rocm: bool = False
    "Whether the engine uses it on ROCm alone, and imports its module there alone."

    @classmethod
    def of(cls, written: str, **more: Any) -> Hook:
        """One that is written as `module:path(parameters)`."""
        place, _, takes = written.removesuffix(")").partition("(")
        module, _, path = place.partition(":")
        return cls(module=module, path=path, takes=tuple(takes.split(", ")), **more)

    @property
    def cls(self) -> tuple[str, str]:
        """The module and the name of the class of a method."""
        return self.module, self.path.partition(".")[0]

    @property
    def place(self) -> str:
        """`module:path`, as errors name it."""
        return f"{self.module}:{self.path}"


def owner_of(hook: Hook, module: ModuleType) -> tuple[Any, str, Any]:
    """What holds a hook's function, its name there, and the function as it is held.

    Raises:
        HookError: there is no such thing.
    """
    *outer, name = hook.path.split(".")
    owner: Any = module
    for part in outer:
        owner = _held(owner, part, hook)
        if not inspect.isclass(owner):
            owner = type(owner)  # a platform may be held as an object
    return owner, name, _held(owner, name, hook)


def _held(owner: Any, name: str, hook: Hook) -> Any:
    try:
        if inspect.isclass(owner):
            return inspect.getattr_static(owner, name)
        return getattr(owner, name)
    except AttributeError:
        where = getattr(owner, "__name__", repr(owner))
        raise HookError(f"{hook.place} is expected, and {where} has no {name!r}") from None


def check(hook: Hook, module: ModuleType) -> Callable[..., Any]:
    """The function at a hook, if it is what is expected.

    Raises:
        HookError: it is missing, no function, or takes other parameters.
    """
    _, _, held = owner_of(hook, module)
    function = _plain(held)
    if not inspect.isroutine(function):
        raise HookError(f"{hook.place} is expected to be a function, and is {type(function).__name__}")
    try:
        found = {
            name: each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
            for name, each in inspect.signature(function).parameters.items()
        }
    except (TypeError, ValueError):
        raise HookError(f"{hook.place} has no signature that Python can tell") from None
    problem, other = _misfit(hook, found), wrapped_by(hook, module)
    if problem is None and hook.reads is not None:
        problem = _why_new(hook, hook.reads, ast.parse(textwrap.dedent(inspect.getsource(function))))
    if problem is not None:
        whose = hook.place if other is None else f"{hook.place}, from {other},"
        raise HookError(problem.replace(hook.place, whose, 1))
    return function


def check_source(hook: Hook, folder: Path) -> str | None:
    """The same from the engine's source, without importing it: what is not as expected, or None.

    Args:
        hook: any.
        folder: of the engine's package.
    """
    module, _, path = (hook.source or hook.place).partition(":")
    file = folder.joinpath(*module.split(".")[1:]).with_suffix(".py")
    try:
        found: Any = ast.parse(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"{hook.place} is expected, and there is no {module}"
    except (OSError, SyntaxError, ValueError) as error:
        return f"{hook.place} is expected, and {file} cannot be read: {type(error).__name__}"
    for part in path.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = next((each for each in found.body if isinstance(each, kinds) and each.name == part), None)
        if found is None:
            return f"{hook.place} is expected, and there is no {part!r} in {module}"
    if isinstance(found, ast.ClassDef):
        return f"{hook.place} is expected to be a function, and is a class"
    problem = _misfit(hook, dict(_parameters(found.args)))
    return _why_new(hook, hook.reads, found) if problem is None and hook.reads is not None else problem


def _why_new(hook: Hook, known: frozenset[str], source: ast.AST) -> str | None:
    """Why a method does more than is known, from its source; None where it does not."""
    names = (node for node in ast.walk(source) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name))
    new = sorted({node.attr for node in names if ast.unparse(node.value) == "self"} - known)
    return f"{hook.place} reads self.{new[0]}, of which this version of layerfuse knows nothing" if new else None


def _parameters(given: ast.arguments) -> Iterator[tuple[str, bool]]:
    """The names of parameters, each with whether it has no default."""
    plain = [*given.posonlyargs, *given.args]
    for place, each in enumerate(plain):
        yield each.arg, place < len(plain) - len(given.defaults)
    for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        yield each.arg, default is None
    for several in filter(None, (given.vararg, given.kwarg)):
        yield several.arg, False


_BESIDE = {"any": "", "optional": " and others with a default only", "none": " and nothing else"}


def _misfit(hook: Hook, found: Mapping[str, bool]) -> str | None:
    """What does not fit in a function's parameters, each with whether it has no default; or None."""
    beside = [found[name] for name in found if name not in hook.takes]
    fits = hook.others == "any" or not (beside if hook.others == "none" else any(beside))
    if fits and [name for name in found if name in hook.takes] == list(hook.takes):
        return None
    wanted = ", ".join(hook.takes) + _BESIDE[hook.others]
    return f"{hook.place} is expected to take {wanted}, and takes {', '.join(found) or 'nothing'}"


def wrapped_by(hook: Hook, module: ModuleType) -> str | None:
    """The module of another plugin's function that stands at a hook already, or None where the engine's own does."""
    found = module_of(owner_of(hook, module)[2])
    return None if package(found) in (package(hook.module), "contextlib", "layerfuse") else found


def stand_at(hook: Hook, module: ModuleType, around: Around) -> None:
    """Call `around(original, ...)` in the place of a hook's function, from now on; once.

    Raises:
        HookError: as `check`.
    """
    function = check(hook, module)
    if getattr(function, "__layerfuse__", None) == hook.place:
        return
    owner, name, held = owner_of(hook, module)

    @functools.wraps(function)
    def standing(*args: Any, **kwargs: Any) -> Any:
        return around(function, *args, **kwargs)

    setattr(standing, "__layerfuse__", hook.place)  # noqa: B010 (functions have no such attribute by type)
    setattr(owner, name, type(held)(standing) if isinstance(held, classmethod | staticmethod) else standing)


def _plain(held: Any) -> Any:
    return held.__func__ if isinstance(held, classmethod | staticmethod) else held
