"""torch.compile with fusions: takes a model, and returns the model compiled with its fusions and a report.

Rewriting runs on the graph that AOTAutograd hands to Inductor, before Inductor computes its cache key. So the key
covers the rewritten graph, no stale graph can be served, and the report is complete on a cache hit too.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from ..adapters.errors import ArgumentError, LayerfuseError, counted, shown
from .audit import Audit, audit_call
from .call_counter import CallCounter
from .config import FusionConfig
from .dynamo_floats import floats_as_constants
from .engine import Engine
from .live_plan import Asked, LivePlan
from .planning import Placed, Plan
from .report import GraphRecord, Report
from .rewrite import Pipeline
from .rewrite.parameters import mark, parameters_of
from .rewrite.ranks import agree_on_graph, groups_in
from .shadow import Shadow, calls_asked
from .target import Target

_OWN = frozenset(
    {
        *("original", "report", "_arguments", "_compiled", "_pipeline", "_strict", "_counter"),
        # What nn.Module sets on itself in `compile` and `register_full_backward_hook`: of this object's calls.
        *("_compiled_call_impl", "_is_full_backward_hook"),
    }
)
"""What a FusedModel holds itself, beside names with two leading underscores. Every other attribute is the model's."""

_COMPILED = (
    "this model is compiled with its fusions already, and a graph around it cannot hold it: leave fullgraph out, or leave "
    "the model around it uncompiled"
)
"""What Dynamo says of a FusedModel in a graph of its own."""


class FusedModel(nn.Module):  # type: ignore[misc]
    """A compiled model, which behaves as the model that it was made from.

    Parameters, buffers, submodules, hooks on them, `state_dict`, `train`, `to` and every other attribute are the
    model's own; a call runs it compiled with its fusions.
    """

    original: nn.Module
    "The model itself, uncompiled."
    report: Report
    "Fills as graphs are compiled and called."

    def __init__(self, model: nn.Module, arguments: dict[str, Any]) -> None:
        super().__init__()
        keep = object.__setattr__
        # One and the same dictionaries: what is set on either is set on both.
        for name in ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"):
            keep(self, name, vars(model)[name])
        self.original, self._arguments = model, arguments
        _prepare(self)

    @property
    def plan(self) -> Plan:
        """What is expected. Made anew where the model says something else before a compilation."""
        made: Plan = self._pipeline.plan
        return made

    @torch.compiler.disable(reason=_COMPILED)  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model.

        Raises:
            FusionMissedError: strict, and an expected fusion did not run in this call.
            ResultsDifferError: strict, and the shadow check found an op that gave something else than its reference.
            RankDisagreementError: the ranks of a process group fused different all-reduces.
            And what reading the specs raises, before each compilation; strict, also what the shadow check's comparison raises.
        """
        # The call is where it compiles.
        with self._counter.call() as call, floats_as_constants(), _unwrapped():
            result = self._compiled(*args, **kwargs)
        if self._strict:
            self.report.check_call(call.record)
            if self.report.shadow is not None:
                self.report.shadow.check()
        return result

    def audit(self, *args: Any, **kwargs: Any) -> Audit:
        """Call the model with these arguments, and count the fused ops that ran with torch's profiler.

        The model is called until a call compiles nothing new, three times at most; the last one is counted.

        Returns:
            The profiler's count, the counters' and the plan's, for each fusion, and what they disagree on.
        """

        def call() -> None:
            with self._counter.call(), floats_as_constants():
                self._compiled(*args, **kwargs)

        return audit_call(call, self.report)

    # ---- the model's own

    def __getattr__(self, name: str) -> Any:
        # Only names that this object lacks come here.
        if name.startswith("__") or "original" not in vars(self):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}", name=name, obj=self)
        if name == "generate":
            warnings.warn(
                "generate is the model's own method and calls the model itself, without the fusions; "
                "write the decoding loop around this object to run them",
                RuntimeWarning,
                stacklevel=2,
            )
        return getattr(self.original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # A new class too is this object's: fully_shard and parametrisations set one.
        if name in _OWN or name.startswith("__"):
            object.__setattr__(self, name, value)
        elif name == "plan":
            raise AttributeError(
                "a FusedModel's plan is made from specs; compile again to change it", name=name, obj=self
            )
        else:
            setattr(self.original, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.original, name)

    @property
    def training(self) -> bool:
        """The model's mode."""
        return bool(self.original.training)

    @training.setter
    def training(self, mode: bool) -> None:
        if "original" in vars(self):  # nn.Module's own __init__ comes before
            self.original.training = mode

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.original)})

    def train(self, mode: bool = True) -> FusedModel:
        """Set the model's mode."""
        self.original.train(mode)
        return self

    def _apply(self, *args: Any, **kwargs: Any) -> FusedModel:  # to, half, cuda, ...
        self.original._apply(*args, **kwargs)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's, with its names."""
        return self.original.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's, with its names."""
        return self.original.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:  # as part of another module
        self.original._load_from_state_dict(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:  # copies and pickles compile for themselves
        return FusedModel, (self.original, dict(self._arguments))

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedModel:
        return FusedModel(copy.deepcopy(self.original, memo), self._arguments)

    def __repr__(self) -> str:
        return f"FusedModel({type(self.original).__name__}, {self.plan.target}, {counted(self.report.graphs, 'graph')})"


@contextmanager
def _unwrapped() -> Iterator[None]:
    """What ranks disagree on, and a layer that can no longer be read, come out as the error that they are."""
    try:
        yield
    except BackendCompilerFailed as error:
        if isinstance(error.inner_exception, LayerfuseError):
            raise error.inner_exception from None
        raise


def compile(  # noqa: A001 (torch.compile's own name)
    model: nn.Module,
    *,
    specs: Iterable[Placed] | None = None,
    target: Target | None = None,
    config: FusionConfig | None = None,
    engine: Engine | str | None = None,
    strict: bool = False,
    registry: Any = None,
    parallel: Any = None,
    shadow: int | None = None,
    **torch_compile_kwargs: Any,
) -> FusedModel:
    """torch.compile with the fusions that the model's specs call for.

    Args:
        model: any module; only the layers that specs describe are touched. Of a FusedModel its `original` is taken.
        specs: specs, or (path, spec) pairs; read off the model by the registry if not given. A spec without a path is
            looked for in the whole model.
        target: where it will run; if not given, the CPU for a model on the CPU, else this machine's GPU.
        config: which fusions; if not given, the default as changed by `LAYERFUSE_FUSIONS`.
        engine: what an engine around it will not let happen; see `plan`.
        strict: raise where an expected fusion did not run in a call, or where something of the model is known to no
            adapter (`registry.unknown_in`). The same as `config.strict`.
        registry: the registry that reads the specs; the default one if not given.
        parallel: the `Parallel` that every layer was sharded by, where the layers do not say it. What a `tensor_parallel` block
            around this call says holds for all later readings too.
        shadow: compare so many calls of every fused op at each site with the op's reference, on the tensors of the call
            (`report.shadow`); if not given, what `LAYERFUSE_SHADOW` says, and 0 without it.
        torch_compile_kwargs: passed on to torch.compile: dynamic, fullgraph, mode, options, disable.

    Returns:
        A module that behaves as the model, with `report`, `plan`, `audit` and `original`.

    Raises:
        ArgumentError: an argument is of another type, the model holds a FusedModel, or `backend` was given; to use the fusions
            in another one, put `fusion.Pipeline(plan)` in its slot for graph passes.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model: expected a torch.nn.Module, got {shown(model)}")
    if "backend" in torch_compile_kwargs:
        raise ArgumentError(
            "fusion.compile compiles with Inductor and takes no backend; to use the fusions elsewhere, put "
            "fusion.Pipeline(plan) where that backend takes an FX graph pass"
        )
    if isinstance(model, FusedModel):
        model = model.original
    asked = Asked(
        specs=specs,
        target=target,
        config=config,
        engine=engine,
        strict=strict,
        registry=registry,
        parallel=parallel,
    )
    arguments = {"asked": asked, "shadow": calls_asked(shadow), "torch": torch_compile_kwargs}
    return FusedModel(model, arguments)


def _prepare(fused: FusedModel) -> None:
    """Plan, and make what compiles."""
    model, arguments = fused.original, fused._arguments
    refuse_inner(model)
    live = LivePlan(model, arguments["asked"])
    pipeline = live.pipeline

    def look_again() -> bool:
        """Plan anew where the model says something else now."""
        refuse_inner(model)
        again = live.look_again(model)
        if again:
            counter.replan(pipeline.plan, live.seen.around)
        return again

    if arguments["shadow"]:
        pipeline.report.shadow = Shadow(arguments["shadow"])
    counter = CallCounter(model, pipeline.plan, pipeline.report, live.seen.around, look_again, pipeline.report.shadow)
    fused.report, fused._pipeline, fused._counter = pipeline.report, pipeline, counter
    fused._strict = live.asked.is_strict
    backend = inductor_with(pipeline, model, counter=counter, before=look_again)
    fused._compiled = torch.compile(model, backend=backend, **arguments["torch"])
    if arguments["torch"].get("disable"):
        counter.off = "fusion.compile was given disable=True: nothing is compiled"


def refuse_inner(model: nn.Module) -> None:
    """Refuse a model that holds a FusedModel.

    Raises:
        ArgumentError: it does; what runs there is counted there.
    """
    inner = next((path for path, module in model.named_modules() if isinstance(module, FusedModel)), None)
    if inner is not None:
        raise ArgumentError(
            f"model: its {inner} is compiled with fusions already, and what runs there is counted there. Either leave this model "
            f"uncompiled, or put the model itself back: model.set_submodule({inner!r}, model.get_submodule({inner!r}).original)"
        )


def inductor_with(
    pipeline: Pipeline | Callable[[torch.fx.Graph], GraphRecord | None],
    model: nn.Module | None = None,
    lower: Callable[..., Any] | None = None,
    counter: CallCounter | None = None,
    before: Callable[[], object] = lambda: None,
) -> Callable[..., Any]:
    """A torch.compile backend: Inductor, with the pipeline run on each inference or forward graph.

    Args:
        pipeline: rewrites a graph in place.
        model: norms are assigned to sites by the identity of its weights, which survives graph breaks.
        lower: what compiles the rewritten graph, called as `compile_fx_inner` is; Inductor if not given. One that
            returns the graph module itself runs it op by op, which is quick to compile.
        counter: counts the calls of the compiled graphs.
        before: called before each graph is compiled.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    lower = compile_fx_inner if lower is None else lower
    rewrite = pipeline.rewrite if isinstance(pipeline, Pipeline) else pipeline

    def backend(
        gm: torch.fx.GraphModule,
        inputs: list[Any],
        *,
        mode: str | None = None,
        options: dict[str, Any] | None = None,
        **_: Any,
    ) -> Any:
        before()
        parameters = parameters_of(gm, model)
        records: list[GraphRecord] = []

        def inner_compile(graph_module: torch.fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
            if not kwargs.get("is_backward"):
                mark(graph_module.graph, parameters)
                groups = groups_in(graph_module.graph)
                record = rewrite(graph_module.graph)
                if record is not None:
                    records.append(record)
                if record is not None and isinstance(pipeline, Pipeline):
                    agree_on_graph(groups, pipeline.plan, record)
                graph_module.recompile()
            return lower(graph_module, example_inputs, **kwargs)

        patches = dict(torch._inductor.list_mode_options(mode)) if mode else {}
        patches.update({name.replace("-", "_"): value for name, value in (options or {}).items()})
        # A hit in AOTAutograd's own cache would skip inner_compile, and with it the rewriting and the report.
        with functorch_config.patch(enable_autograd_cache=False):
            compiled = compile_fx(gm, inputs, inner_compile=inner_compile, config_patches=patches or None)
        if counter is None or not any(record.uses or record.strange for record in records):
            return compiled
        for record in records:
            compiled = counter.counted(record, compiled)
        return compiled

    return backend
