"""The recurrence of a delta net as one op of a compiled graph, for models whose own code unrolls it.

transformers' reference of the gated delta rule is a loop over 64 steps, which takes a compiler minutes.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..adapters.arguments import expect
from .match.calls import find_op

_TENSORS = ["query", "key", "value", "g", "beta"]
_OPTIONS: dict[str, Any] = {
    "initial_state": None,
    "output_final_state": False,
    "use_qk_l2norm_in_kernel": False,
    "cu_seqlens": None,
    "chunk_size": None,
}
"""What a call may give beside the tensors, by name, with what it is where it is not given."""
_SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, Tensor? initial_state, bool output_final_state, "
    "bool use_qk_l2norm_in_kernel, Tensor? cu_seqlens, int? chunk_size) -> (Tensor, Tensor)"
)
_kept: dict[Callable[..., Any], str] = {}


def keep_recurrences(model: nn.Module) -> tuple[str, ...]:
    """Let torch.compile take each recurrence that the model's delta nets call as one op, instead of tracing into it.

    The op runs the model's own function uncompiled, whichever kernels that uses, and does not break the graph around it.
    The choice holds for every torch.compile of the process, and is for inference: the op has no backward pass.

    Args:
        model: a model of transformers, whose delta nets call functions of their own module with `query`, `key`, `value`,
            `g`, `beta`, `initial_state` and `output_final_state`.

    Returns:
        The names of those functions; none where the model has no such delta net.
    """
    expect("model", model, nn.Module, "a torch.nn.Module")
    found = dict.fromkeys(function for module in dict.fromkeys(map(type, model.modules())) for function in _of(module))
    for function in found:
        if function not in _kept:
            _kept[function] = _keep(function)
    return tuple(_kept[function] for function in found)


def _of(module: type[nn.Module]) -> Iterator[Callable[..., Any]]:
    """The recurrences of the Python module that a class is defined in."""
    for _, function in inspect.getmembers(sys.modules.get(module.__module__), inspect.isfunction):
        names = list(inspect.signature(function).parameters)
        if names[: len(_TENSORS)] == _TENSORS and {"initial_state", "output_final_state"}.issubset(names):
            yield function


def _keep(function: Callable[..., Any]) -> str:
    """Make a recurrence an op, put that in its place wherever Dynamo traces a call of it, and return its name."""
    name = f"{function.__module__}.{function.__qualname__}"

    def run(*given: Any) -> tuple[Tensor, Tensor]:
        options = {word: each for word, each in zip(_OPTIONS, given[5:], strict=True) if each is not None}
        if "initial_state" in options:
            # Some write into the state that they are given, and an op may not.
            options["initial_state"] = options["initial_state"].clone()
        result, state = function(*given[:3], g=given[3], beta=given[4], **options)
        return result.contiguous(), given[2].new_empty(0) if state is None else state.contiguous()

    def fake(*given: Any) -> tuple[Tensor, Tensor]:
        query, key, value = given[:3]
        options = dict(zip(_OPTIONS, given[5:], strict=True))
        result = query.new_empty(value.shape)
        if not options["output_final_state"]:
            return result, value.new_empty(0)
        offsets = options["cu_seqlens"]
        sequences = value.shape[0] if offsets is None else offsets.shape[0] - 1
        shape = (sequences, value.shape[2], key.shape[-1], value.shape[-1])
        return result, value.new_empty(shape, dtype=torch.float32)

    words = re.sub(r"\W", "_", name)
    qualified = f"layerfuse_recurrence::{words}"
    torch.library.custom_op(qualified, run, mutates_args=(), schema=_SCHEMA).register_fake(fake)
    op: Any = find_op(qualified)  # what custom_op returns Dynamo does not know

    def traced(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *chunk_size: int, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        if chunk_size:
            options["chunk_size"] = chunk_size[0]
        result, state = op(query, key, value, g, beta, *[options.get(word, _OPTIONS[word]) for word in _OPTIONS])
        return result, state if options.get("output_final_state") else None

    torch.compiler.substitute_in_graph(function, skip_signature_check=True)(traced)
    return name


__all__ = ["keep_recurrences"]
