"""Which layer a node belongs to: by the parameter it reads, else by the module path that tracing left on it.

Dynamo names modules from the frame it compiled, which after a graph break is not the model. So a path is compared
with the end of each layer's path, and counts only where exactly one layer fits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch.fx import Node

PARAMETER = "layerfuse_parameter"
"""Placeholder meta key: the `parameters.Parameter` that the input is. `fusion.compile` sets it."""

NOBODY = ""
"""The owner of a node that certainly belongs to no layer of the plan."""

_FRAME = re.compile(r"^L\[['\"][^'\"]*['\"]\]")
_INDEX = re.compile(r"(?:\._modules|\._parameters)?\[['\"]?([^'\"\]]+)['\"]?\]")


def module_path(text: str) -> str:
    """A path below the frame, from the way Dynamo writes it: `L['self']._modules['layers'][0].mlp` -> `layers.0.mlp`."""
    return _INDEX.sub(r".\1", _FRAME.sub("", text, count=1)).lstrip(".")


class Owners:
    """Looks up the layers of a plan. Immutable after construction but for a cache of paths."""

    def __init__(self, layers: Iterable[str]) -> None:
        self._exact = {layer: layer for layer in layers}
        self._ends: dict[tuple[str, ...], set[str]] = {}
        for layer in self._exact:
            parts = tuple(layer.split("."))
            for k in range(len(parts)):
                self._ends.setdefault(parts[k:], set()).add(layer)
        self._paths: dict[str, str | None] = {}

    def of_parameter(self, weight: Node) -> tuple[str, str] | None:
        """(layer, frame) of the parameter this weight is; NOBODY for the layer if none of the plan's holds it.

        None if the node is no known parameter.
        """
        while weight.op == "call_function" and len(weight.all_input_nodes) == 1:
            weight = weight.all_input_nodes[0]
        parameter = weight.meta.get(PARAMETER)
        if parameter is None:
            return None
        name: str = parameter.name
        while "." in name:
            name = name.rpartition(".")[0]
            if name in self._exact:
                return name, parameter.frame
        return NOBODY, parameter.frame

    def of_path(self, node: Node) -> str | None:
        """The layer whose module a node was traced in, or None if that is unknown or ambiguous."""
        stack = node.meta.get("nn_module_stack")
        if not stack:
            return None
        path = next(reversed(stack.values()))[0]
        if path not in self._paths:
            self._paths[path] = self._resolve(path)
        return self._paths[path]

    def _resolve(self, path: str) -> str | None:
        parts = tuple(module_path(path).split("."))
        for length in range(len(parts), 0, -1):
            layer = ".".join(parts[:length])
            if layer in self._exact:
                return layer
        for length in range(len(parts), 0, -1):
            layers = self._ends.get(parts[:length], set())
            if len(layers) == 1:
                return next(iter(layers))
        return None
