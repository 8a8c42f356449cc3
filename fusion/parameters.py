"""Which parameter of the model each input of a compiled graph is, by identity.

Names of modules in a graph are relative to the frame that Dynamo compiled; the parameters themselves are not.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from torch import nn
from torch.fx import Graph, Node

from .passes.owners import PARAMETER, module_path


@frozen(kw_only=True)
class Parameter:
    """A graph input that is a parameter of the model."""

    name: str
    "As `named_parameters` gives it."
    frame: str
    """The module whose forward the graph was traced from, empty for the model itself. After a graph break, Dynamo runs
    one graph for every module of the same shape, so this graph may serve the frame's siblings too."""


def parameters_of(gm: torch.fx.GraphModule, model: nn.Module | None) -> dict[int, Parameter]:
    """Position among the inputs of a Dynamo graph -> the parameter found there."""
    if model is None:
        return {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {}
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        argument = node.meta.get("grapharg")
        # Sizes and floats come as inputs too; and a GraphArg refers to its example weakly, and may have dropped it.
        if argument is not None and isinstance(argument.example, nn.Parameter):
            name = names.get(id(argument.example))
            if name is not None:
                found[position] = Parameter(name=name, frame=_frame(name, argument.source))
    return found


def _frame(name: str, source: Any) -> str:
    # A method up to torch 2.9, a property since.
    text = source.name() if callable(source.name) else source.name
    inner = module_path(text)
    return name.removesuffix(inner).rstrip(".") if name.endswith(inner) else ""


def mark(graph: Graph, parameters: dict[int, Parameter]) -> None:
    """Leave the parameters on the placeholders of the graph that AOTAutograd made from a Dynamo graph."""
    for node in graph.find_nodes(op="placeholder"):
        position = _position(node)
        if position in parameters:
            node.meta[PARAMETER] = parameters[position]


def _position(node: Node) -> int | None:
    """AOTAutograd describes each input by the position of the argument that it came from."""
    described = node.meta.get("desc")
    position = None if described is None else vars(described).get("idx")
    return position if isinstance(position, int) else None
