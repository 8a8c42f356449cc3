"""Which parameter of the model each input of a compiled graph is, by identity.

Names of modules in a graph are relative to the frame that Dynamo compiled; the parameters themselves are not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen
from torch import nn
from torch._functorch._aot_autograd.descriptors import PlainAOTInput, SubclassGetAttrAOTInput
from torch.fx import Graph, Node

PARAMETER = "layerfuse_parameter"
"""Placeholder meta key: the `Parameter` that the input is. `fusion.compile` sets it."""

_FRAME = re.compile(r"^[LG]\[['\"][^'\"]*['\"]\](?:\[[^\]]*\]|\.__self__\b)*")
"""A local or global of the frame, and the module that it holds: an item (`args[0]` of a decorator), or what a method is bound to."""

_METHOD = re.compile(r"\.\w+\.(?:__self__|__closure__\[\d+\]\.cell_contents)\b")
"""A method that a module holds as an attribute, and the module that it is bound to or closes over, as `mla_decode`'s: that module."""

_INDEX = re.compile(r"(?:\._modules|\._parameters)?\[['\"]?([^'\"\]]+)['\"]?\]")


@frozen(kw_only=True)
class Parameter:
    """A graph input that is a parameter of the model."""

    names: tuple[str, ...]
    "As `named_parameters` gives them; several where the model holds it several times."
    position: int
    "Among the inputs of the compiled graph."
    whole: bool
    """Whether the graph was traced from the model's own forward. If not, Dynamo runs this graph for every module that
    passes its guards, so the parameter may be another one at each call."""


def module_path(text: str) -> str:
    """A path below the frame, from the way Dynamo writes it: `L['args'][0]._modules['layers'][0].mlp` -> `layers.0.mlp`."""
    return _INDEX.sub(r".\1", _METHOD.sub("", _FRAME.sub("", text, count=1))).lstrip(".")


def names_of(model: nn.Module) -> dict[int, tuple[str, ...]]:
    """Identity of a parameter -> every name that the model has for it."""
    found: dict[int, tuple[str, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[id(parameter)] = (*found.get(id(parameter), ()), name)
    return found


def parameters_of(gm: torch.fx.GraphModule, model: nn.Module | None) -> dict[int, Parameter]:
    """Position among the inputs of a Dynamo graph -> the parameter found there."""
    if model is None:
        return {}
    names = names_of(model)
    found = {}
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        argument = node.meta.get("grapharg")
        # Sizes and floats come as inputs too; and a GraphArg refers to its example weakly, and may have dropped it.
        if argument is not None and isinstance(argument.example, torch.Tensor):
            known = names.get(id(argument.example))
            if known is not None:
                inner = module_path(argument.source.name)
                found[position] = Parameter(names=known, position=position, whole=inner in known)
    return found


def mark(graph: Graph, parameters: Mapping[int, Parameter]) -> None:
    """Leave the parameters on the placeholders of the graph that AOTAutograd made from a Dynamo graph."""
    for node in graph.find_nodes(op="placeholder"):
        parameter = parameters.get(_position(node))
        if parameter is not None:
            node.meta[PARAMETER] = parameter


def _position(node: Node) -> int:
    """AOTAutograd describes each input by the position of the argument that it came from; -1 where it does not."""
    described: Any = node.meta.get("desc")
    while isinstance(described, SubclassGetAttrAOTInput):  # a part of a tensor subclass: torchao's weights, DTensors
        described = described.base
    return described.idx if isinstance(described, PlainAOTInput) else -1
