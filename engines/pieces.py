"""A piece of a model's graph as an engine hands it to its compiler, and what was fused there said so that equal pieces can read it.

Pieces that are equal are compiled once, and caches serve them to other ranks. So a piece's record names nodes of the piece,
not layers, and each piece says by itself which layers those are.
"""

from __future__ import annotations

import hashlib
from typing import Any

import attrs
import torch
from attrs import field, frozen
from torch.fx import GraphModule, Node

from ..fusion.planning import Plan
from ..fusion.report import GraphRecord
from ..fusion.rewrite.attribution import ModuleIndex, join
from ..fusion.rewrite.parameters import module_path
from ..fusion.sites import Site


@frozen(kw_only=True)
class PieceRecord:
    """What rewriting did to a piece, for every piece that is equal to it."""

    record: GraphRecord
    "Of the piece that it was recorded in."
    anchors: tuple[tuple[int | None, int], ...]
    """For each use the first node that stands in the module of the site's first norm, None where none says so, and which of the modules
    around that node it is."""


@frozen(kw_only=True)
class Outline:
    """What of a piece is looked at: a digest of all that decides what is compiled, and the modules around each node."""

    digest: str
    "Equal for pieces that differ in the names of nodes and modules only."
    modules: tuple[tuple[str, ...], ...] = field(repr=False)
    "For each node the paths of the modules around it, the outermost first."


def outline_of(graph: GraphModule) -> Outline:
    """The outline of a piece, from the graph that Dynamo made."""
    numbers: dict[Node, int] = {}
    symbols: dict[str, int] = {}
    digest = hashlib.sha256()
    modules = []
    for number, node in enumerate(graph.graph.nodes):
        numbers[node] = number
        arguments = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda other: f"%{numbers[other]}")
        shape = _shape(node.meta.get("example_value"), symbols) if node.op == "placeholder" else ""
        target = "" if node.op == "placeholder" else _target(node.target)
        digest.update(f"{node.op} {target} {arguments!r} {shape}\n".encode())
        stack = node.meta.get("nn_module_stack")
        modules.append(tuple(module_path(path) for path, _ in stack.values()) if stack else ())
    return Outline(digest=digest.hexdigest(), modules=tuple(modules))


def _target(target: Any) -> str:
    if isinstance(target, str):
        return target
    # A function's repr holds its address.
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)} {type(target).__name__}"


def _shape(value: Any, symbols: dict[str, int]) -> str:
    if isinstance(value, torch.Tensor):
        sizes = [_size(size, symbols) for size in (*value.shape, *value.stride())]
        return f"{value.dtype} {value.device} {sizes}"
    return _size(value, symbols)


def _size(size: Any, symbols: dict[str, int]) -> str:
    # Two pieces may name one and the same number of tokens differently.
    return str(size) if isinstance(size, int) else f"s{symbols.setdefault(str(size), len(symbols))}"


class Sites:
    """Which site of a plan a module belongs to."""

    def __init__(self, plan: Plan, around: ModuleIndex) -> None:
        self._plan = plan
        self._aliases = around.aliases
        self._by_path: dict[str, str] = {_path(site): site.name for site in reversed(plan.sites)}

    def anchored(self, outline: Outline, record: GraphRecord) -> PieceRecord:
        """A record of this piece, for every piece that is equal."""
        places: dict[str, tuple[int, int]] = {}
        for number, paths in enumerate(outline.modules):
            for depth, path in enumerate(paths):
                places.setdefault(self._known(path), (number, depth))
        anchors = tuple(places.get(_path(self._plan.site[use.site]), (None, 0)) for use in record.uses)
        # How norms were found is of this piece alone.
        uses = tuple(attrs.evolve(use, how="structure", weights=(), whole=True) for use in record.uses)
        return PieceRecord(record=attrs.evolve(record, uses=uses), anchors=anchors)

    def in_piece(self, outline: Outline, known: PieceRecord, number: int) -> GraphRecord | None:
        """What a record says of a piece that is equal to the recorded one; None where it does not fit.

        Args:
            outline: of this piece.
            known: of the equal one.
            number: graphs that came before.
        """
        uses = []
        for use, (node, depth) in zip(known.record.uses, known.anchors, strict=True):
            paths = () if node is None or node >= len(outline.modules) else outline.modules[node]
            site = self._by_path.get(self._known(paths[depth])) if depth < len(paths) else None
            if site is None:
                return None
            missed = {f: why for f, why in use.missed.items() if self._expected(site, f, use.tokens)}
            uses.append(attrs.evolve(use, site=site, missed=missed))
        return attrs.evolve(known.record, graph=number, uses=tuple(uses))

    def within(self, outline: Outline) -> tuple[str, ...]:
        """The sites whose norms stand in a piece, by its modules."""
        paths = {self._known(path) for several in outline.modules for path in several}
        return tuple(name for path, name in self._by_path.items() if path in paths)

    def _known(self, path: str) -> str:
        return path if path in self._by_path else self._aliases.get(path, path)

    def _expected(self, site: str, fusion: str, tokens: int | None) -> bool:
        return any(
            decision.fusion == fusion and decision.applies and (tokens is None or tokens in decision.tokens)
            for decision in self._plan.at(site)
        )


def _path(site: Site) -> str:
    """The module that tells a site from every other: its first norm or its linear, or the layer where it has neither."""
    module = site.modules[0]
    return site.layer if module is None else join(site.layer, module)
