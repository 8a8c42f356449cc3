"""Why a layer ran outside every compiled graph: a stance, a disabled function, or Dynamo's recompile limit."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._dynamo import eval_frame
from torch._dynamo.resume_execution import ContinueExecutionCache


def why_uncompiled(model: nn.Module, layer: str, hidden: str | None = None) -> str:
    """The cause, as a sentence.

    Args:
        model: the compiled model.
        layer: the path of a layer that was expected to run in a compiled graph.
        hidden: why it may be in one where nothing is rewritten, if so.
    """
    if dynamo_config.disable:
        return "torch._dynamo.config.disable is set: nothing is compiled"
    stance = eval_frame._stance.stance
    if stance not in ("default", "fail_on_recompile"):
        return f"torch.compiler.set_stance({stance!r}) is in force: what is not compiled yet runs uncompiled"
    forced = eval_frame._stance.backend
    if forced is not None:
        return f"torch.compiler.set_stance(force_backend={forced!r}) is in force: another backend compiles"
    modules = list(_around(model, layer))
    for path, module in modules:
        if _disabled(module):
            name = path or type(model).__name__
            return f"{name}.forward is kept out of compilation (torch.compiler.disable)"
    for path, module in modules:
        for code in _codes(module):
            count = _entries(code)
            for name, limit in (
                ("recompile_limit", dynamo_config.recompile_limit),
                ("accumulated_recompile_limit", dynamo_config.accumulated_recompile_limit),
            ):
                if count >= limit:
                    return (
                        f"Dynamo has reached its limit of {limit} recompilations of {type(module).__name__}.forward "
                        f"({path or 'the model'}), and runs further variants uncompiled; raise "
                        f"torch._dynamo.config.{name}, or compile with dynamic=True"
                    )
    for path, module in modules:
        if module._compiled_call_impl is not None:
            name = path or type(model).__name__
            return f"{name} has a compilation of its own (nn.Module.compile), which may run instead"
    return hidden or (
        "it ran in no compiled graph: the model did not call it in this call, or Dynamo skipped its frame "
        "(TORCH_LOGS=graph_breaks says why)"
    )


def _around(model: nn.Module, layer: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules that run a layer: itself, what it holds, then those around it, from the inside."""
    modules = dict(model.named_modules())
    if layer in modules:
        for name, module in modules[layer].named_modules():
            yield ".".join(filter(None, (layer, name))), module
    while layer:
        layer = layer.rpartition(".")[0]
        if layer in modules:
            yield layer, modules[layer]


def _disabled(module: nn.Module) -> bool:
    return any(vars(function).get("_torchdynamo_disable", False) for function in _unwrapped(module.forward))


def _unwrapped(function: Any) -> Iterator[FunctionType]:
    """A function and those that it wraps."""
    function = function.__func__ if inspect.ismethod(function) else function
    while inspect.isfunction(function):
        yield function
        function = vars(function).get("__wrapped__")


def _codes(module: nn.Module) -> Iterator[CodeType]:
    """The code of a module's forward, without decorators, and what Dynamo made of it after graph breaks."""
    made = ContinueExecutionCache.cache
    # TorchScript's classes have a descriptor there that answers for no class.
    pending = [function.__code__ for function in _unwrapped(inspect.getattr_static(type(module), "forward"))]
    while pending:
        code = pending.pop()
        yield code
        pending += made[code].values() if code in made else ()


def _entries(code: CodeType) -> int:
    """How often Dynamo has compiled a code object."""
    return len(torch._C._dynamo.eval_frame._debug_get_cache_entry_list(code))
