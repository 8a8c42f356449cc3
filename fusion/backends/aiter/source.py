"""What AITER's functions take, read from its installed source with `ast`: nothing is imported.

At run time most of them are closures that take `(*args, **kwargs)`, so `inspect.signature` would say nothing.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable
from pathlib import Path

from attrs import field, frozen


@frozen
class Parameter:
    """One parameter of a function, as declared."""

    name: str
    required: bool
    by_name_only: bool = False
    sometimes: bool = field(default=False, eq=False)
    "Of a record: only some supported releases have it."

    def __str__(self) -> str:
        return self.name + ("" if self.required else "=")


@frozen
class Signature:
    """A function's parameters in order, without `self`. It prints as records are written: `x, weight, bias=`."""

    parameters: tuple[Parameter, ...]

    def __str__(self) -> str:
        said: list[str] = []
        for parameter in self.parameters:
            if parameter.by_name_only and "*" not in said:
                said.append("*")
            said.append(str(parameter))
        return ", ".join(said)


def signature_of(text: str) -> Signature:
    """From `out, input, *, weight, gemma_norm?=`: `=` marks what may be left out, `?=` what some releases lack."""
    parameters: list[Parameter] = []
    by_name = False
    for word in (part.strip() for part in text.split(",")):
        if word == "*":
            by_name = True
        else:
            parameters.append(Parameter(word.rstrip("?="), not word.endswith("="), by_name, word.endswith("?=")))
    return Signature(tuple(parameters))


def module_file(folder: Path, module: str) -> Path | None:
    """The file of `aiter.ops.rmsnorm` below the folder of `aiter`, or None."""
    place = folder.joinpath(*module.split(".")[1:])
    return next((file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()), None)


def read_signature(folder: Path, path: str) -> Signature | None:
    """The signature of `module:function` or `module:Class.method`, or None where there is none of that name."""
    module, _, name = path.partition(":")
    file = module_file(folder, module)
    return None if file is None else definitions(file).get(name)


@functools.cache
def definitions(file: Path) -> dict[str, Signature]:
    """Every function at a file's top level, and every method of its classes; empty where the file does not parse."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return {}
    return dict(_functions(tree.body, ""))


def _functions(body: Iterable[ast.stmt], prefix: str) -> Iterable[tuple[str, Signature]]:
    """In order, so that a later definition replaces an earlier one, as it does in Python."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, _signature(node.args, method=bool(prefix) and not _is_static(node))
        elif isinstance(node, ast.ClassDef) and not prefix:
            yield from _functions(node.body, f"{node.name}.")
        elif isinstance(node, ast.If):
            yield from _functions([*node.orelse, *node.body], prefix)
        elif isinstance(node, ast.Try):
            yield from _functions([*node.body, *node.orelse], prefix)


def _is_static(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(isinstance(found, ast.Name) and found.id == "staticmethod" for found in node.decorator_list)


def _signature(arguments: ast.arguments, *, method: bool) -> Signature:
    positional = [*arguments.posonlyargs, *arguments.args]
    first_default = len(positional) - len(arguments.defaults)
    found = [Parameter(argument.arg, i < first_default) for i, argument in enumerate(positional)]
    if method:
        found = found[1:]
    if arguments.vararg is not None:  # no record has one, so that a function that hides its parameters is refused
        found.append(Parameter(f"*{arguments.vararg.arg}", required=True))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(Parameter(argument.arg, default is None, by_name_only=True))
    if arguments.kwarg is not None:
        found.append(Parameter(f"**{arguments.kwarg.arg}", required=True))
    return Signature(tuple(found))
