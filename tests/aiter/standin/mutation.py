"""Made-up releases: one change to one signature, as AITER's releases make them, with a body that follows it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from .recorded import Definition, Parameter


@dataclass(frozen=True)
class Mutation:
    """One change to one function.

    Attributes:
        kind: `rename` the function to `name`; `rename_parameter` `parameter` to `name`; `swap` the positions of
            `parameter` and `other`; `insert` a required parameter `name` before `parameter`; `drop` `parameter`, whose
            value is then its recorded default, or None if it had none.
        function: the key of the definition, `module:function`.
    """

    kind: Literal["rename", "rename_parameter", "swap", "insert", "drop"]
    function: str
    parameter: str | None = None
    other: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class Mutated:
    """A definition as it is to be written, and how its arguments reach the body.

    Attributes:
        definition: the recorded definition, mutated.
        name: the name under which it is written.
        values: for each parameter that the body knows, the source of its value in the written function.
    """

    definition: Definition
    name: str
    values: dict[str, str]


def _index(parameters: list[Parameter], name: str | None, definition: Definition) -> int:
    names = [parameter.name for parameter in parameters]
    if name not in names:
        raise ValueError(f"{definition.key} has no parameter {name!r}; it has {', '.join(names)}")
    return names.index(name)


def mutated(definition: Definition, mutation: Mutation | None) -> Mutated:
    """A definition under a mutation, or unchanged if it is of another function.

    Raises:
        ValueError: the mutation names a parameter that is not there.
    """
    values = {parameter.name: parameter.name for parameter in definition.parameters}
    if mutation is None or mutation.function != definition.key:
        return Mutated(definition, definition.name, values)
    name = mutation.name or ""
    if mutation.kind == "rename":
        return Mutated(definition, name, values)
    parameters = list(definition.parameters)
    at = _index(parameters, mutation.parameter, definition)
    chosen = parameters[at]
    if mutation.kind == "rename_parameter":
        parameters[at] = replace(chosen, name=name)
        values[chosen.name] = name
    elif mutation.kind == "swap":
        to = _index(parameters, mutation.other, definition)
        parameters[at], parameters[to] = (
            replace(parameters[to], keyword_only=chosen.keyword_only),
            replace(chosen, keyword_only=parameters[to].keyword_only),
        )
    elif mutation.kind == "insert":
        parameters.insert(at, Parameter(name, "Tensor", None, chosen.keyword_only))
    else:
        del parameters[at]
        values[chosen.name] = chosen.default or "None"
    return Mutated(replace(definition, parameters=tuple(parameters)), definition.name, values)
