"""The fusions as one pass of vLLM's pass manager. It leaves a graph as it was where anything goes wrong in it."""

from __future__ import annotations

from typing import Any

import torch.fx
from torch.fx import Graph
from vllm.compilation.passes.inductor_pass import InductorPass
from vllm.distributed import parallel_state

from ...fusion.catalog import FUSIONS
from ...fusion.match.linears import READERS, Reader
from ...fusion.planning import Plan
from ...fusion.rewrite import Pipeline
from ..process import troubled
from ..whose import kind_of, module_of
from . import inside, products, scaled_products
from .few_tokens import looks_inside
from .host_bound import holds
from .inside import TakenOut, why_not
from .native import why_not_all_reduce, why_not_ops

AFTER = frozenset({"NoOpEliminationPass"})
"""Passes of vLLM's that ours stands behind, being first otherwise: they only tidy what would hide a chain."""


class FusionPass(InductorPass):  # type: ignore[misc]
    """Rewrites by a plan. Copies and unpickled ones of the same process write to the same report."""

    def __init__(self, pipeline: Pipeline, key: str, start: str = "", untouched: range = range(0)) -> None:
        self.pipeline = pipeline
        self.untouched = untouched
        "As `CompiledModule.untouched`."
        self.start = start
        "Of the piece that is compiled next, as `record_cache.start_of` has it."
        self._key = key
        self._group = tensor_parallel_group()

    def is_applicable_for_range(self, compile_range: Any) -> bool:
        """Whether vLLM's graphs for these numbers of tokens are rewritten at all."""
        return not holds(self.untouched, compile_range)

    def __call__(self, graph: Graph) -> None:
        """Rewrite the graph in place. Where that raises, or an op that the plan replaces is not vLLM's any more, it is as it was.

        The report says why.
        """
        kept = Graph()
        output = kept.graph_copy(graph, {})
        try:
            foreign = why_not_now(self.pipeline.plan)
            if foreign is None:
                self._rewrite(graph)
            else:
                self.pipeline.leave(foreign)
        except Exception as error:
            _restore(graph, kept, output)
            troubled("rewriting a graph", error)

    def _rewrite(self, graph: Graph) -> None:
        taken = TakenOut(graph) if looks_inside(self.pipeline.plan) else None
        self.pipeline(graph, readers(), None if taken is None else taken.put_back)

    def uuid(self) -> str:
        """Part of Inductor's key: changes with the key of the module (`keys.key_for`), with the group, and where a piece is distrusted.

        Fused all-reduces hold torch's name of the tensor-parallel group, and groups that are started together share a cache.
        """
        return f"{self._key} over {self._group}{self.start}"

    def __reduce__(self) -> Any:
        return FusionPass, (self.pipeline, self._key, self.start, self.untouched)

    def __deepcopy__(self, memo: dict[int, Any]) -> FusionPass:
        return self


def readers() -> tuple[Reader, ...]:
    """Of the products of linears in vLLM's graphs, torch's among them."""
    blocks = products.READERS if products.why_not() is None else ()
    return (*inside.READERS, *blocks, *scaled_products.READERS, *READERS)


def why_not_now(plan: Plan) -> str | None:
    """Why the ops that a plan replaces, which graphs hold by name, do not compute what vLLM's own do; None where they do.

    Asked again at each compilation: another package may choose an implementation once a model is loaded.
    """
    reduced = any(FUSIONS[decision.fusion].across_ranks for decision in plan.expected())
    return why_not_ops() or (why_not_all_reduce() if reduced else None) or (why_not() if looks_inside(plan) else None)


def tensor_parallel_group() -> str:
    """Torch's name of this rank's tensor-parallel group."""
    if not parallel_state.model_parallel_is_initialized():
        return "no group"
    return str(parallel_state.get_tp_group().device_group.group_name)


def _restore(graph: Graph, kept: Graph, output: Any) -> None:
    last = graph.output_node()
    meta = dict(last.meta)
    for node in reversed(list(graph.nodes)):
        graph.erase_node(node)
    values: dict[Any, Any] = {}
    graph.graph_copy(kept, values)
    copied = {node: values[node] for node in kept.nodes}
    graph.output(torch.fx.map_arg(output, copied.__getitem__)).meta.update(meta)


def insert(backend: Any, added: FusionPass) -> FusionPass:
    """Put the pass into the manager of one of vLLM's backends, ahead of its own fusions; the one that stands there then.

    Raises:
        TypeError: the manager keeps its passes in another way than vLLM's own.
    """
    manager = backend.pass_manager
    passes = getattr(manager, "passes", None)
    if not isinstance(passes, list):
        raise TypeError(f"{'.'.join(kind_of(manager))} has no list of passes")
    standing = next((each for each in passes if isinstance(each, FusionPass)), None)
    if standing is not None and standing.pipeline is added.pipeline:
        return standing
    # That of another module: somebody's manager may serve them all.
    passes[:] = [each for each in passes if each is not standing]
    place = next((i + 1 for i, each in enumerate(passes) if type(each).__name__ in AFTER), 0)
    passes.insert(place, added)
    return added


def caller_of(manager: Any) -> str:
    """The class of a manager of passes, and where its code is from if that is another module."""
    cls, owner = type(manager), module_of(type(manager).__call__)
    patched = "" if owner == cls.__module__ else f", called by {owner}"
    return f"{'.'.join(kind_of(cls))}{patched}"
