"""Where the residual streams of a model start and whether they end in it: from the paths of its modules."""

from __future__ import annotations

from collections import Counter
from typing import Any

import attrs

from ..adapters.pipeline import stands_for_missing
from ..adapters.specs import ResidualSpec


class Streams:
    """The streams of one model: each runs through the decoder layers that one module holds."""

    def __init__(self, modules: list[tuple[str, Any]]) -> None:
        """Args: modules: all of the model, by path, in its order."""
        self._children = Counter(path.rpartition(".")[0] for path, _ in modules if path)
        self.elsewhere = False
        "Whether another rank of a pipeline holds any of it, as far as the model was walked."
        # Whether this rank holds a layer of them so far.
        self._begun: dict[str, bool] = {}
        last = {path.rpartition(".")[0]: module for path, module in modules if path.rpartition(".")[2].isdecimal()}
        self.cut = {holder for holder, module in last.items() if stands_for_missing(module)}
        "What holds layers the last of which is on another rank of a pipeline."

    def outermost(self, path: str) -> str:
        """The path of what only wraps this module, and the wrapper of that: `layers.3` of `layers.3._orig_mod`."""
        holder, _, name = path.rpartition(".")
        while path and not name.isdecimal() and self._children[holder] == 1:
            path = holder
            holder, _, name = holder.rpartition(".")
        return path

    def passes(self, path: str) -> None:
        """Another rank of a pipeline holds the layer at this path. Told of each in the model's order."""
        self.elsewhere = True
        self._begun.setdefault(self.outermost(path).rpartition(".")[0], False)

    def entered(self, path: str, spec: ResidualSpec) -> ResidualSpec:
        """A layer's spec with how the stream comes to it. Asked of each in the model's order.

        Nothing is known of a layer without a model.
        """
        path = self.outermost(path)
        if not path:
            return attrs.evolve(spec, starts_stream=None, handed_over=False)
        here = self._begun.get(holder := path.rpartition(".")[0])
        self._begun[holder] = True
        return attrs.evolve(spec, starts_stream=here is None, handed_over=here is False)

    def goes_on_elsewhere(self, path: str) -> bool:
        """Whether the last decoder layers of the model at this path are on another rank of a pipeline."""
        return any(within(holder, path) for holder in self.cut)


def within(path: str, outer: str | None) -> bool:
    """Whether a module lies inside another, by their paths; None holds nothing."""
    return outer is not None and (path.startswith(f"{outer}.") if outer else path != "")
