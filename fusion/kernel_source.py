"""The functions that declarations name, and whether those of another package are there, by the source of their modules.

To ask for that, nothing is imported but the packages around a module: the module itself may import torch, or need a GPU.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ..adapters.errors import FOREIGN, did_you_mean, said, shown

_MADE_OTHERWISE = ("globals", "exec", "setattr", "__getattr__")
"""By these a module has names that its source does not show."""


def imported(path: str) -> Callable[..., Any]:
    """The function or the class at `module:name`."""
    module, _, name = path.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), name)
    return found


def why_absent(path: str) -> str | None:
    """Why there is no function at `module:function`, in a sentence; None where there is one, or where no source tells."""
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
    names = set(_bound(tree.body))
    return None if name in names or "*" in names else f"{module} has no {shown(name)}{did_you_mean(name, names)}"


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
