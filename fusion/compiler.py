"""The way into torch.compile: a model in, the same model compiled with its fusions out, and a report.

The passes run on the graph that AOTAutograd hands to Inductor, before Inductor computes its cache key. So the key
covers the rewritten graph, no stale graph can be served, and the report is complete on a cache hit too.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch._dynamo import config as dynamo_config

from .config import FusionConfig
from .parameters import mark, parameters_of
from .passes import Pipeline
from .plan import Placed, Plan, plan
from .report import Report
from .target import Target


class _FloatsAsConstants:
    """Sets Dynamo's `specialize_float` while any thread is inside, and restores it when the last one leaves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = False

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before = dynamo_config.specialize_float
                dynamo_config.specialize_float = True
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                dynamo_config.specialize_float = self._before


_floats_as_constants = _FloatsAsConstants()


class FusedModel:
    """A compiled model. Calls and attributes are those of the model it was made from.

    `report` fills as graphs are compiled: on the first call, and on every recompilation.
    """

    def __init__(
        self,
        model: nn.Module,
        compiled: Callable[..., Any],
        pipeline: Pipeline,
        *,
        strict: bool,
    ) -> None:
        self.model = model
        self.report: Report = pipeline.report
        self.plan: Plan = pipeline.plan
        self._compiled = compiled
        self._strict = strict
        self._checked = -1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model.

        Raises:
            FusionMissedError: in strict mode, after a call that left an expected fusion out.
        """
        # Dynamo traces a module's floats as graph inputs, always with dynamic=True and otherwise as soon as one changes
        # between layers; an epsilon that is an input cannot be compared with the spec's. The call is where it compiles.
        with _floats_as_constants:
            result = self._compiled(*args, **kwargs)
        if self._strict and self._checked != len(self.report.records):
            self.report.check()
            self._checked = len(self.report.records)
        return result

    def __getattr__(self, name: str) -> Any:
        # Only names that this object lacks come here; they are the model's business. Dunders are Python's, and while
        # a copy is being made there is no model yet.
        if name.startswith("__") or "model" not in vars(self):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}", name=name, obj=self)
        if name == "generate":
            warnings.warn(
                "generate is the model's own method and calls the model itself, without the fusions; "
                "write the decoding loop around this object to run them",
                RuntimeWarning,
                stacklevel=2,
            )
        return getattr(self.model, name)

    def __reduce__(self) -> Any:
        raise TypeError("a FusedModel holds compiled code and cannot be copied or pickled; copy its .model and compile")

    def __repr__(self) -> str:
        return f"FusedModel({type(self.model).__name__}, {self.plan.target}, {self.report.graphs} graphs)"


def compile(  # noqa: A001 (torch.compile's own name)
    model: nn.Module,
    *,
    specs: Iterable[Placed] | None = None,
    target: Target | None = None,
    config: FusionConfig | None = None,
    strict: bool = False,
    registry: Any = None,
    **torch_compile_kwargs: Any,
) -> FusedModel:
    """torch.compile with the fusions that the model's specs call for.

    Args:
        model: any module; only the layers that specs describe are touched.
        specs: (path, spec) pairs; read off the model by the registry if not given.
        target: where it will run; if not given, the CPU for a model on the CPU, else this machine's GPU.
        config: which fusions; if not given, the default as changed by `LAYERFUSE_FUSIONS`.
        strict: raise where an expected fusion did not happen, or where a layer that looks like attention is known to no
            adapter. The same as `config.strict`.
        registry: the registry that reads the specs; the default one if not given.
        torch_compile_kwargs: passed on to torch.compile: dynamic, fullgraph, mode, options, disable.

    Returns:
        An object that is called like the model, with `report`, `plan` and `model`.

    Raises:
        TypeError: `backend` was given; to use the passes in another one, put `passes.Pipeline(plan)` in its slot for
            graph passes.
    """
    if "backend" in torch_compile_kwargs:
        raise TypeError(
            "fusion.compile compiles with Inductor and takes no backend; to use the fusions elsewhere, put "
            "fusion.passes.Pipeline(plan) where that backend takes an FX graph pass"
        )
    unknown: dict[str, str] = {}
    if specs is None:
        specs, unknown = _read_specs(model, registry)
    config = FusionConfig.from_environment() if config is None else config
    made = plan(specs, _target_of(model) if target is None else target, config)
    pipeline = Pipeline(made)
    pipeline.report.unknown.update(unknown)
    compiled = torch.compile(model, backend=inductor_with(pipeline, model), **torch_compile_kwargs)
    return FusedModel(model, compiled, pipeline, strict=strict or config.strict)


def inductor_with(
    pipeline: Callable[[torch.fx.Graph], None],
    model: nn.Module | None = None,
    lower: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """A torch.compile backend: Inductor, with the pipeline run on each inference or forward graph.

    Args:
        pipeline: rewrites a graph in place.
        model: ties norms to layers by the identity of their weights, which survives graph breaks.
        lower: what compiles the rewritten graph, called as `compile_fx_inner` is; Inductor if not given. One that
            returns the graph module itself runs it op by op, which is quick to compile.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    lower = compile_fx_inner if lower is None else lower

    def backend(
        gm: torch.fx.GraphModule,
        inputs: list[Any],
        *,
        mode: str | None = None,
        options: dict[str, Any] | None = None,
        **_: Any,
    ) -> Any:
        parameters = parameters_of(gm, model)

        def inner_compile(graph_module: torch.fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
            if not kwargs.get("is_backward"):
                mark(graph_module.graph, parameters)
                pipeline(graph_module.graph)
                graph_module.recompile()
            return lower(graph_module, example_inputs, **kwargs)

        patches = dict(torch._inductor.list_mode_options(mode)) if mode else {}
        patches.update({name.replace("-", "_"): value for name, value in (options or {}).items()})
        # A hit in AOTAutograd's own cache would skip inner_compile, and with it the passes and the report.
        with functorch_config.patch(enable_autograd_cache=False):
            return compile_fx(gm, inputs, inner_compile=inner_compile, config_patches=patches or None)

    return backend


def _target_of(model: nn.Module) -> Target:
    first = next(model.parameters(), None)
    return Target.named("cpu") if first is None or first.device.type == "cpu" else Target.detect()


def _read_specs(model: nn.Module, registry: Any) -> tuple[Iterable[Placed], dict[str, str]]:
    if registry is None:
        from .. import registry as default

        registry = default
    return registry.specs_in(model), dict(registry.unknown_in(model))
