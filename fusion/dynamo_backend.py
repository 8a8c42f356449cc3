"""The fusions as a backend of torch.compile's own: `torch.compile(model, backend="layerfuse")`.

Dynamo gives a backend a graph and no model. But it compiles while the model is called, and the compiled module that is being called says
which model it is. What a call ran cannot be known from here: that is `fusion.compile`.
"""

from __future__ import annotations

import traceback
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from ..adapters.arguments import expect
from ..adapters.errors import ArgumentError, ArgumentValueError, did_you_mean, shown
from .compiler import inductor_with, refuse_inner
from .live_plan import Asked, LivePlan
from .report import FusionMissedError, Missed, Report, with_fallback

_OURS = ("model", *(each.name for each in attrs.fields(Asked) if each.name != "within"))
"""The options that are not Inductor's."""

_plans: WeakKeyDictionary[nn.Module, LivePlan] = WeakKeyDictionary()
"""Of the models that were compiled so far."""


def layerfuse(
    gm: torch.fx.GraphModule, inputs: list[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Any:
    """Compile a graph of a model with Inductor and the fusions that the model's specs call for.

    Args:
        gm: as Dynamo gives it.
        inputs: the same.
        mode: Inductor's.
        options: Inductor's, and beside them the arguments of `fusion.compile`: specs, target, config, engine, strict, registry, parallel.
            With `strict` a graph that lacks an expected fusion is an error, which Dynamo raises as a BackendCompilerFailed. `model`: which
            model it is, where a function is compiled that calls one.

    Raises:
        ArgumentError: an option is of another type or of neither's, or it cannot be told whose graph it is.
        FusionMissedError: strict, and a fusion that was expected in the graph is not in it.
    """
    given = dict(options or {})
    ours = {name: given.pop(name) for name in _OURS if name in given}
    _check_inductors(given)
    model = ours.pop("model", None)
    if model is None:
        model = _called()
    expect("options['model']", model, nn.Module, "the torch.nn.Module that the function calls")
    refuse_inner(model)
    live, asked = _plans.get(model), Asked(**ours)
    if live is None or live.asked != asked:
        live = _plans[model] = LivePlan(model, asked)
    else:
        live.look_again(model)
    report = live.pipeline.report
    before = report.graphs
    compiled = inductor_with(live.pipeline, model)(gm, inputs, mode=mode, options=given)
    if live.asked.is_strict:
        _check(report, before)
    return compiled


def report_of(model: nn.Module) -> Report:
    """What became of the fusions of a model that was compiled with `backend="layerfuse"`: by graph, as its calls are not counted.

    Args:
        model: what torch.compile gave, or the model itself.

    Raises:
        ArgumentError: it is no module, or no graph of it was compiled so.
    """
    expect("model", model, nn.Module, "a model that was compiled with backend='layerfuse'")
    if isinstance(model, OptimizedModule):
        model = model._orig_mod
    if model not in _plans:
        raise ArgumentError(
            f"model: no graph of this {type(model).__name__} was compiled with backend='layerfuse'. It was not called yet, or it runs "
            "the graphs of another model of its class"
        )
    return _plans[model].pipeline.report


def _check_inductors(given: dict[str, Any]) -> None:
    """Refuse what is no option of Inductor's either."""
    from torch._inductor import config

    inductor = config.get_config_copy()
    unknown = next((name for name in given if str(name).replace("-", "_") not in inductor), None)
    if unknown is not None:
        raise ArgumentValueError(
            f"options: neither layerfuse nor Inductor has an option {shown(unknown)}"
            f"{did_you_mean(unknown, [*_OURS, *inductor]) or '.'} layerfuse's are {', '.join(_OURS)}; Inductor's are those of "
            "torch._inductor.config"
        )


def _called() -> nn.Module:
    """The innermost compiled module that is being called."""
    for frame, _ in traceback.walk_stack(None):
        caller = frame.f_locals.get("self")
        if isinstance(caller, OptimizedModule):
            return caller._orig_mod
        if isinstance(caller, nn.Module) and caller._compiled_call_impl is not None:  # nn.Module.compile
            return caller
    raise ArgumentError(
        "backend='layerfuse' cannot tell which model a function runs: compile the model itself, or say it with "
        "torch.compile(function, backend='layerfuse', options={'model': model})"
    )


def _check(report: Report, before: int) -> None:
    """Raise for what the graphs behind so many lack."""
    missed: Missed = {}
    for record in report.records[before:]:
        for use in record.uses:
            for fusion, reason in use.missed.items():
                missed.setdefault(fusion, {})[use.site] = with_fallback(reason, use.fused)
    if missed or report.unknown or report.unfound:
        raise FusionMissedError(missed, report.unknown, report.unfound)
