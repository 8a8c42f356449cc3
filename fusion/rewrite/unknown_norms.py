"""Norms of the residual stream that belong to no layer that was read: those of a decoder layer that nobody knows, a final norm of any name.

Nothing is expected of them, so that they would be missed in silence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.fx import Graph, Node

from ...adapters.specs import FinalNormSpec, KernelSpec
from ..match.found import PartialMatch
from ..match.provenance import ROW_PRESERVING
from ..match.values import last_width, value
from .attribution import Attribution, ModuleIndex, is_around
from .parameters import PARAMETER, Parameter

if TYPE_CHECKING:
    from ..planning import Plan

aten = torch.ops.aten
_STILL = {
    *ROW_PRESERVING,
    *(aten.slice.Tensor, aten.select.int, aten.index.Tensor, torch.ops.prims.convert_element_type.default),
}
"""What leaves a sum of the stream what it is."""

_TORCH = str(Path(torch.__file__).parent)
_LINE = re.compile(r'File "([^"]+)", line (\d+)')

UnknownNorm = tuple[str, str]
"""The path of what holds a norm, and the norm in words."""


class UnknownNormFinder:
    """Finds them in a model's graphs by what a fusion of the stream takes: a sum with a layer's result in it, and a norm of that sum."""

    def __init__(self, plan: Plan, attribution: Attribution, around: ModuleIndex, stream: bool) -> None:
        """Args: stream: whether a fusion of the stream is on."""
        read = [(path, spec) for path, spec in plan.specs if not isinstance(spec, FinalNormSpec | KernelSpec)]
        self._layers = {path for path, _ in read}
        self._widths = {spec.hidden_size for _, spec in read}
        self._attribution, self._around = attribution, around
        self.asked = around.whole and stream
        "Whether all of the model was to be read, and a fusion that takes such a norm is on."

    def __call__(
        self, graph: Graph, near: Iterable[PartialMatch], first: Iterable[PartialMatch] = ()
    ) -> tuple[UnknownNorm, ...]:
        """Each norm once.

        Args:
            graph: of the model.
            near: its norms that are at no site.
            first: those at the entry of a stream, where nothing is added. Of layers that run in turns they stand behind others.
        """
        sums = [norm for norm in near if norm.width in self._widths and _is_sum(norm.x)] if self.asked else []
        again = [norm for norm in first if _is_sum(norm.x)] if self.asked else []
        behind = self._behind_layers(graph) if sums else ()
        found = [self._named(norm) for norm in sums if norm.x in behind and not self._is_read(norm)]
        # What comes into the graph may be anything there: an embedding that is given, and a sum with positions.
        behind = self._behind_layers(graph, inputs=False) if again else ()
        for norm in again:
            if norm.x in behind:
                layer, name = self._named(norm)
                found.append((layer, f"{name}, where it runs behind other layers"))
        return tuple(dict.fromkeys(found))

    def _is_read(self, norm: PartialMatch) -> bool:
        where = self._attribution.locate(norm.weights, norm.root)
        if where.places and where.how != "structure":
            return True
        apart = self._layers | self._around.ignored
        return any(_within(apart, path) for path in self._attribution.modules(norm.weights, norm.root))

    def _behind_layers(self, graph: Graph, inputs: bool = True) -> set[Node]:
        """What layers that are read have a part in. After a graph break their results are inputs of the graph, as wide as the stream.

        Args:
            graph: of the model.
            inputs: whether such inputs count.
        """
        found: set[Node] = set()
        for node in graph.nodes:
            parameter: Parameter | None = node.meta.get(PARAMETER)
            if node.op != "placeholder":
                part = not found.isdisjoint(node.all_input_nodes)
            elif parameter is not None:
                part = any(_within(self._layers, name) for name in parameter.names)
            else:
                part = inputs and last_width(node) in self._widths and value(node).dtype.is_floating_point
            if part:
                found.add(node)
        return found

    def _named(self, norm: PartialMatch) -> UnknownNorm:
        path = next(iter(self._attribution.modules(norm.weights, norm.root)), "")
        holder, _, name = path.rpartition(".")
        if not path or any(is_around(path, other) for other in self._around.paths - {path}):
            holder, name = path, ""  # which norms with no module of its own
        return holder, name or _line_of(norm.root)


def _within(layers: Iterable[str], path: str) -> bool:
    return any(not layer or is_around(layer, path) for layer in layers)


def _line_of(node: Node) -> str:
    """Where the model's code computes a node, as far as tracing has left it there."""
    lines = _LINE.findall(node.meta.get("stack_trace") or "")
    own = [f"{file}:{line}" for file, line in lines if not file.startswith(_TORCH)]
    return own[-1] if own else str(node)


def _is_sum(x: Node | None) -> bool:
    """Whether something is a sum of two tensors, or some rows of one, of another shape or dtype: no fusion may take it, and it is the stream.

    Inductor puts the sum of a product and what is no bias into the product.
    """
    while x is not None and x.target in _STILL:
        x = x.args[0]
    if x is None or x.target is not aten.addmm.default:
        return x is not None and x.target is aten.add.Tensor and len(x.all_input_nodes) == 2
    return isinstance(x.args[0], Node) and value(x.args[0]).dim() == 2
