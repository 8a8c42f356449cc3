"""Rewriting graphs by a plan: one graph pass for any slot that takes one.

It runs inside `fusion.compile`, and alone in Inductor's `post_grad_custom_pre_pass` or vLLM's
`post_grad_custom_post_pass`.
"""

from __future__ import annotations

import threading
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from ...adapters.errors import ArgumentError, shown
from .. import backends
from ..match.linears import READERS, Reader
from ..planning import Plan
from ..report import GraphRecord, Report
from .attribution import ModuleIndex
from .driver import Driver
from .identity import key_of
from .lowering import lower_canonical
from .ranks import asks_ranks

_here: weakref.WeakValueDictionary[str, Pipeline] = weakref.WeakValueDictionary()
"""The pipelines of this process by their token: a copy finds the report of its original here."""


class Pipeline(CustomGraphPass):  # type: ignore[misc]
    """The rewriting that a plan calls for, as one graph pass, with its report.

    It can be pickled and copied. A copy in the same process shares the report of the original, so that whoever made the
    pipeline sees what an engine's copy did; in another process it starts a report of its own.

    Raises:
        ArgumentError: the plan is none.
        BackendError: `LAYERFUSE_BACKEND` names a backend that no op has.
    """

    def __init__(self, plan: Plan, report: Report | None = None, around: ModuleIndex | None = None) -> None:
        if not isinstance(plan, Plan):
            raise ArgumentError(f"plan: expected what fusion.plan(...) gives, got {shown(plan)}")
        backends.check_forced()
        self.plan = plan
        self.report = Report(plan) if report is None else report
        self.around = around
        self._driver = Driver(plan, around)
        self._lock = threading.Lock()
        self._token = uuid.uuid4().hex
        _here[self._token] = self

    def __call__(
        self, graph: Graph, readers: Sequence[Reader] = READERS, behind: Callable[[], None] | None = None
    ) -> None:
        """Rewrite the graph in place and add its record to the report.

        Args:
            graph: any.
            readers: of the products of linears, an engine's own among them.
            behind: called when all is rewritten.
        """
        self.rewrite(graph, readers, behind)

    def rewrite(
        self, graph: Graph, readers: Sequence[Reader] = READERS, behind: Callable[[], None] | None = None
    ) -> GraphRecord:
        """The same, with the record as the answer.

        Ranks are not compared here, as other compilers' caches may serve some of them without a rewriting: what they run
        is, at the first call of each op. The key of such caches holds `uuid`.
        """
        # Dynamo compiles under a lock of its own; other compilers may not.
        with self._lock:
            number = self.report.graphs
            try:
                record = self._driver(graph, number, readers)
                lower_canonical(graph)
                if behind is not None:
                    behind()
            except Exception as error:
                # Whoever catches this runs the graph as it was.
                self.report.add(GraphRecord(graph=number, uses=(), failed=f"{type(error).__name__}: {error}"))
                raise
            self.report.add(record)
        return record

    def leave(self, why: str) -> None:
        """Add the record of a graph that is not to be rewritten.

        Args:
            why: a sentence.
        """
        with self._lock:
            self.report.add(GraphRecord(graph=self.report.graphs, uses=(), failed=why))

    def replan(self, plan: Plan, around: ModuleIndex) -> None:
        """Rewrite by another plan from now on, with the same report."""
        with self._lock:
            self.plan = plan
            self.report.replan(plan)
            self.around = around
            self._driver = Driver(plan, around)

    def uuid(self) -> Any:
        """Changes with the specs (but for the rank), the plan, the config, the source and the forced backend: a key for caches.

        None where it depends on the ranks' GPUs too what is fused: Inductor then keeps nothing.
        """
        return None if asks_ranks(self.plan) else key_of(self.plan)

    def __reduce__(self) -> Any:
        return _again, (self._token, self.plan)


def _again(token: str, plan: Plan) -> Pipeline:
    original = _here.get(token)
    return Pipeline(plan, None if original is None else original.report)


__all__ = ["ModuleIndex", "Pipeline"]
