"""Which site a norm of a graph belongs to: by the parameter it reads, else by the module path that tracing left on it.

Dynamo names modules from the frame it compiled, which after a graph break is not the model. So a path is compared with
the end of each norm's path, and several sites may fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from attrs import field, frozen
from torch.fx import Node

from ..sites import Site
from .parameters import PARAMETER, Parameter, module_path

Place = tuple[Site, int]
"""A site, and which of its norms; 0 where it has none."""


@frozen(kw_only=True)
class Location:
    """What is known of where a norm belongs. One that is known to belong to no site has no places."""

    places: tuple[Place, ...] = ()
    "In the plan's order; several where it cannot be told which."
    how: str = "structure"
    "parameter, module path, or structure alone."
    parameter: Parameter | None = None


@frozen(kw_only=True)
class ModuleIndex:
    """What the model says in addition to the specs. Empty without a model."""

    paths: frozenset[str] = frozenset()
    "Every module's path."
    aliases: Mapping[str, str] = field(factory=dict)
    "A second path of a module that the model holds several times -> the path that the plan may know."
    whole: bool = False
    "Whether the plan is of all that the model's layers say, so that what belongs to none of them was not read."
    ignored: frozenset[str] = frozenset()
    "The modules that are left unread on purpose."


class Attribution:
    """Looks up the sites of a plan. Immutable after construction but for a cache of paths."""

    def __init__(self, sites: Iterable[Site], around: ModuleIndex | None = None) -> None:
        self._around = ModuleIndex() if around is None else around
        self._exact: dict[str, list[Place]] = {}
        self._layers: dict[str, list[Place]] = {}
        self._ends: dict[tuple[str, ...], list[str]] = {}
        self._all: list[Place] = []
        self._unplaced: list[Place] = []
        for site in sites:
            # The product of a gated MLP has no norm: its layer says where it is.
            for i, module in enumerate(site.modules):
                place = (site, i)
                self._all.append(place)
                if self._around.paths and site.layer and site.layer not in self._around.paths:
                    self._unplaced.append(place)
                    continue
                if module is None:
                    self._layers.setdefault(site.layer, []).append(place)
                else:
                    self._exact.setdefault(join(site.layer, module), []).append(place)
        for path in dict.fromkeys([*self._exact, *self._layers]):
            parts = tuple(path.split("."))
            for k in range(len(parts)):
                self._ends.setdefault(parts[k:], []).append(path)
        self._paths: dict[str, tuple[Place, ...]] = {}

    def locate(self, weights: Iterable[Node], out: Node) -> Location:
        """Where a norm belongs that reads one of these weights and gives `out`."""
        by_path = self._of_path(out)
        for weight in weights:
            parameter = parameter_of(weight)
            if parameter is not None:
                places = tuple(dict.fromkeys(place for name in parameter.names for place in self._of_name(name)))
                # Tied weights belong to several norms; where the module path tells which, it decides.
                places = tuple(place for place in places if place in by_path) or places
                if not places and self._unplaced:
                    return Location(places=tuple(self._unplaced), parameter=parameter)
                return Location(places=places, how="parameter", parameter=parameter)
        if by_path:
            return Location(places=by_path, how="module path")
        if not self._unplaced and self._is_elsewhere(out):
            return Location(how="module path")
        return Location(places=tuple(self._unplaced or self._all))

    def _of_name(self, name: str) -> list[Place]:
        """The places of a parameter, by its own module and then by the layers around it."""
        path = self._planned(name.rpartition(".")[0])
        # A parametrised norm holds its weight in a module below; a layer may hold those of its norms itself.
        while not (found := self._exact.get(path) or self._layers.get(path)) and path:
            path = path.rpartition(".")[0]
        return found or []

    def _planned(self, path: str) -> str:
        """The path that the plan has of a module that the model holds several times."""
        return path if path in self._exact or path in self._layers else self._around.aliases.get(path, path)

    def _of_path(self, node: Node) -> tuple[Place, ...]:
        return next(self.outwards(node), ())

    def outwards(self, node: Node) -> Iterator[tuple[Place, ...]]:
        """The places that each module around a node stands for, the innermost first."""
        for path, _ in reversed(node.meta.get("nn_module_stack", {}).values()):
            if path not in self._paths:
                self._paths[path] = tuple(self._resolve(module_path(path)))
            yield self._paths[path]

    def modules(self, weights: Iterable[Node], out: Node) -> list[str]:
        """The modules of the model that a norm may stand in; none where nothing tells."""
        parameter = next(filter(None, map(parameter_of, weights)), None)
        if parameter is not None:
            return [name.rpartition(".")[0] for name in parameter.names]
        stack = out.meta.get("nn_module_stack")
        path = module_path(next(reversed(stack.values()))[0]) if stack else ""
        return sorted(each for each in self._around.paths if path and f".{each}".endswith(f".{path}"))

    def _is_elsewhere(self, node: Node) -> bool:
        """Whether a node stands in a module of the model that no site is in or around: a draft model's `enorm`."""
        aliases = self._around.aliases
        known = {aliases.get(each, each) for each in self.modules((), node)}
        sites = {aliases.get(each, each) for each in (*self._exact, *self._layers)}
        return bool(known) and not any(is_around(a, b) or is_around(b, a) for a in known for b in sites)

    def _resolve(self, path: str) -> list[Place]:
        path = self._planned(path)
        parts = tuple(path.split("."))
        for length in range(len(parts), -1, -1):
            inner = ".".join(parts[:length])
            found = self._exact.get(inner) if length == len(parts) else None
            found = found or self._layers.get(inner)
            if found:
                return found
        for length in range(len(parts), 0, -1):
            ends = self._ends.get(parts[:length], [])
            places = [
                place
                for end in ends
                for place in (self._exact.get(end, []) if length == len(parts) else []) or self._layers.get(end, [])
            ]
            if places:
                return places
        return []


def join(layer: str, module: str) -> str:
    """A path below a layer; the model itself has the empty path."""
    return f"{layer}.{module}" if layer else module


def is_around(outer: str, path: str) -> bool:
    """Whether a path is another or lies inside of it."""
    return f"{path}.".startswith(f"{outer}.")


def parameter_of(weight: Node) -> Parameter | None:
    """The parameter that a norm's weight is, or is made from."""
    while weight.op == "call_function" and len(weight.all_input_nodes) == 1:
        weight = weight.all_input_nodes[0]
    found: Parameter | None = weight.meta.get(PARAMETER)
    return found
