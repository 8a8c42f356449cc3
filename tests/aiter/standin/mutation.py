"""Made-up releases: one change to one signature, as AITER's releases make them, with a body that follows it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from .recorded import Definition, parts


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


def mutated(definition: Definition, mutation: Mutation | None) -> Mutated:
    """A definition under a mutation, or unchanged if it is of another function.

    Raises:
        ValueError: the mutation names a parameter that is not there.
    """
    values = {name: name for name in definition.names}
    if mutation is None or mutation.function != definition.key:
        return Mutated(definition, definition.name, values)
    name = mutation.name or ""
    if mutation.kind == "rename":
        return Mutated(definition, name, values)
    parameters = list(definition.parameters)
    at = [parts(parameter)[0] for parameter in parameters].index(mutation.parameter)
    chosen, _, default = parts(parameters[at])
    if mutation.kind == "rename_parameter":
        parameters[at] = name + parameters[at].removeprefix(chosen)
        values[chosen] = name
    elif mutation.kind == "swap":
        to = [parts(parameter)[0] for parameter in parameters].index(mutation.other)
        parameters[at], parameters[to] = parameters[to], parameters[at]
    elif mutation.kind == "insert":
        parameters.insert(at, f"{name}: Tensor")
    else:
        del parameters[at]
        values[chosen] = default or "None"
    return Mutated(replace(definition, parameters=tuple(parameters)), definition.name, values)
