"""The fusion passes on a traced model, without Inductor's code generation: the same graphs and counts, in a second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import frozen


@frozen
class TracedModel:
    """Called like the model. `plan` and `report` are as those of `fusion.compile`."""

    plan: Any
    report: Any
    run: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; the first call traces it."""
        return self.run(*args, **kwargs)


def traced(model: Any, specs: Any, config: Any = None, target: Any = None) -> TracedModel:
    """The model with the passes applied to the graphs that Inductor would be given, which are then interpreted.

    Args:
        model: a module.
        specs: its layers', as (path, spec).
        config: a FusionConfig; what is on by default if not given.
        target: a Target; the CPU if not given.
    """
    import torch

    from ..fusion import Target, plan
    from ..fusion.compiler import inductor_with
    from ..fusion.live_plan import module_index_of
    from ..fusion.rewrite import Pipeline

    made = plan(specs, target or Target.named("cpu"), config)
    pipeline = Pipeline(made, around=module_index_of(model))
    backend = inductor_with(pipeline, model, lower=_interpreted)
    return TracedModel(made, pipeline.report, torch.compile(model, backend=backend))


def _interpreted(graph_module: Any, _: Any, **__: Any) -> Any:
    return graph_module
