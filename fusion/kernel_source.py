"""The functions that declarations name, and whether those of another package are there, by the source of their modules.

To ask for that, nothing is imported but the packages around a module: the module itself may import torch, or need a GPU.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ..adapters.errors import FOREIGN, cut, did_you_mean, said, shown

_MADE_OTHERWISE = ("globals", "exec", "setattr", "__getattr__")
"""By these a module has names that its source does not show."""


def imported(path: str) -> Callable[..., Any]:
    """The function or the class at `module:name`."""
    module, _, name = path.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), name)
    return found


def later(path: str) -> Callable[..., Any]:
    """The function at `module:name`, imported when it is called: it may need torch."""

    def function(*args: Any) -> Any:
        return imported(path)(*args)

    return function


def why_absent(path: str, passed: Sequence[str] | None = None) -> str | None:
    """Why there is no function at `module:function`, or none that takes these arguments by position, in a sentence; None where there is one, or where no source tells."""
    module, _, name = path.partition(":")
    try:
        spec = find_spec(module)
    except FOREIGN as error:
        return f"the module of {path} cannot be found: {said(error)}"
    if spec is None:
        return f"there is no module {module}, which {path} names"
    try:
        source = spec.loader.get_source(module)  # type: ignore[union-attr]
    except FOREIGN:  # an extension module, or a loader of another kind
        return None
    if source is None:
        return None
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        return f"the module of {path} cannot be imported: {said(error)}"
    if any(
        isinstance(node, ast.Name | ast.FunctionDef) and _name_of(node) in _MADE_OTHERWISE for node in ast.walk(tree)
    ):
        return None
    names = [*_bound(tree.body)]
    if "*" in names:
        return None
    if name not in names:
        return f"{module} has no {shown(name)}{did_you_mean(name, set(names))}"
    functions = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == name]
    if passed is None or len(functions) != names.count(name) or _takes(functions[-1], len(passed)):
        return None
    return f"{path} takes ({cut(ast.unparse(functions[-1].args), 200)}), and ({', '.join(passed)}) is passed to it"


def _takes(function: ast.FunctionDef, count: int) -> bool:
    """Whether it takes so many arguments by position, as far as its source tells: a decorator may change that."""
    takes = function.args
    most = len(takes.posonlyargs) + len(takes.args)
    enough = most - len(takes.defaults) <= count and None not in takes.kw_defaults
    return bool(function.decorator_list) or (enough and (count <= most or takes.vararg is not None))


def _name_of(node: ast.Name | ast.FunctionDef) -> str:
    return node.id if isinstance(node, ast.Name) else node.name


def _bound(statements: list[ast.stmt]) -> Iterator[str]:
    """The names that a module's statements bind, and `*` where another module's are taken over."""
    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif isinstance(node, ast.alias):
                yield (node.asname or node.name).partition(".")[0]
            elif isinstance(
                node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
            ):  # behind an `if` or in a `try`
                yield node.name
