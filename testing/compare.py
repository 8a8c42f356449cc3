"""Two specs side by side, as sentences on what differs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import attrs

from ..adapters.specs import (
    FinalNormSpec,
    GatedDeltaNetSpec,
    LinearSpec,
    Mamba2Spec,
    MLPSpec,
    NormSpec,
    OtherMixerSpec,
    ResidualSpec,
)

SCALE_TOLERANCE = 1e-12
"""Relative. The softmax scale is computed by each engine in its own order of floating-point operations."""


def differences(declared: Any, read: Any, where: str = "") -> Iterator[str]:
    """One sentence for each field in which the spec read off a layer is not the declared one."""
    if type(declared) is not type(read):
        yield f"{where}: declared {_named(declared)}, read {_named(read)}"
    elif attrs.has(type(declared)):
        # What does not count for equality says where a spec comes from: a declared one comes from no module.
        for attribute in filter(lambda attribute: attribute.eq, attrs.fields(type(declared))):
            name = attribute.name
            path = f"{where}.{name}" if where else name
            yield from differences(getattr(declared, name), getattr(read, name), path)
    elif isinstance(declared, tuple) and len(declared) == len(read):
        for i, (one, other) in enumerate(zip(declared, read, strict=True)):
            yield from differences(one, other, f"{where}.{i}")
    elif declared != read and not (where.endswith("softmax_scale") and _close(declared, read)):
        yield f"{where}: declared {declared!r}, read {read!r}"


def _named(value: Any) -> str:
    return type(value).__name__ if attrs.has(type(value)) else repr(value)


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=SCALE_TOLERANCE)


def linears_of(spec: Any) -> Iterator[tuple[LinearSpec, str, int, int]]:
    """The linears around a spec's norms and products: each with its side that is known, and that side's width in the model and on this rank."""
    if isinstance(spec, MLPSpec):
        for linear in spec.consumers:
            yield linear, "in", spec.intermediate_size, spec.local_intermediate_size
        return
    for linear in spec.gives if isinstance(spec, ResidualSpec) else ():
        yield linear, "out", spec.hidden_size, spec.hidden_size
    for norm in norms_in(spec):
        heads, local_heads = 1, 1
        if isinstance(spec, GatedDeltaNetSpec):
            heads, local_heads = spec.num_v_heads, spec.num_local_v_heads
        width, local_width = heads * norm.width, local_heads * norm.width
        if isinstance(spec, Mamba2Spec):
            local_width = spec.local_intermediate_size
        for linear in norm.consumers:
            yield linear, "in", width, local_width
        for linear in norm.producers:
            yield linear, "out", norm.width, norm.width


def norms_in(spec: Any) -> Iterator[NormSpec]:
    """The norms that a spec holds."""
    for attribute in attrs.fields(type(spec)):
        held = getattr(spec, attribute.name)
        yield from (norm for norm in (held if isinstance(held, tuple) else (held,)) if isinstance(norm, NormSpec))


def misfit(linear: LinearSpec, side: str, width: int, local_width: int, ranks: int) -> str | None:
    """Why a linear does not go with what it reads or feeds, or its sizes not with so many ranks; None where they do."""
    total, local = linear.in_features, linear.local_in_features
    if side == "out":
        total, local = linear.out_features, linear.local_out_features
    if (total, local) != (width, local_width) and None not in (total, local):
        return f"{linear.path}: {side}_features {total}, {local} on this rank; expected {width}, {local_width}"
    return linear.problem_over(ranks)


def without_index(spec: Any) -> Any:
    """The spec of the same kind of layer, whichever its number."""
    return attrs.evolve(spec, layer_index=0)


def is_attention(spec: Any) -> bool:
    """Whether this is an attention layer, or the kernel layer of one."""
    return not (is_stream(spec) or isinstance(spec, MLPSpec))


def is_stream(spec: Any) -> bool:
    """Whether this is of the residual stream: a decoder layer's norms, or the final norm."""
    return isinstance(spec, (ResidualSpec, FinalNormSpec))


def _place(spec: Any) -> int:
    return 2 if isinstance(spec, MLPSpec) else int(isinstance(spec, Mamba2Spec | OtherMixerSpec))


def attention_first(pairs: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """(path, spec) pairs with each layer's MLPs behind its attentions and what stands beside those between them, as entries have them.

    A decoder layer may make its MLP first, as OLMo-hybrid's linear ones do: that says nothing of what it runs first.
    """
    layers = list(accumulate(is_stream(spec) for _, spec in pairs))
    order = sorted(range(len(pairs)), key=lambda i: (layers[i], _place(pairs[i][1])))
    return [pairs[i] for i in order]
