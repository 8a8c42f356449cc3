"""Layers that differ only in their index, taken together: 61 equal layers are one kind."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import attrs
from attrs import frozen

from ..adapters.linear_specs import weight_in_words
from ..adapters.specs import (
    FAMILY_OF,
    ExpertsSpec,
    FinalNormSpec,
    GatedDeltaNetSpec,
    GatedMLPSpec,
    GatedNormSpec,
    GQASpec,
    LayerNormSpec,
    Mamba2Spec,
    MLASpec,
    MLPSpec,
    NormSpec,
    ResidualSpec,
)


@frozen(kw_only=True)
class Kind:
    """Layers with the same spec."""

    name: str
    "The kind's name in models.toml, or its family."
    family: str
    spec: Any
    "Of the first of them."
    paths: tuple[str, ...]
    indices: tuple[int, ...]


def kinds_of(specs: Iterable[tuple[str, Any]]) -> list[Kind]:
    """The kinds of layer among (path, spec) pairs, in order of appearance."""
    groups: dict[tuple[str, Any], list[tuple[str, Any]]] = {}
    for path, spec in specs:
        groups.setdefault((_name(path, spec), attrs.evolve(spec, layer_index=0)), []).append((path, spec))
    return [
        Kind(
            name=name,
            family=FAMILY_OF[type(same)],
            spec=layers[0][1],
            paths=tuple(path for path, _ in layers),
            indices=tuple(spec.layer_index for _, spec in layers if spec.layer_index is not None),
        )
        for (name, same), layers in groups.items()
    ]


def mixtures_of(specs: Iterable[tuple[str, Any]]) -> list[Kind]:
    """The mixtures of experts in these decoder layers, which are a part of their residual's spec."""
    groups: dict[ExpertsSpec, list[int]] = {}
    for _, spec in specs:
        if isinstance(spec, ResidualSpec) and spec.experts is not None:
            shared = None if spec.experts.shared is None else attrs.evolve(spec.experts.shared, layer_index=None)
            groups.setdefault(attrs.evolve(spec.experts, shared=shared), []).append(spec.layer_index)
    return [Kind(name="experts", family="experts", spec=s, paths=(), indices=tuple(at)) for s, at in groups.items()]


def _name(path: str, spec: Any) -> str:
    # A declared model's layers are called layers.3.<kind>; a real model's paths end in the module's name.
    parts = path.split(".")
    declared = len(parts) in (3, 4) and parts[0] == "layers" and parts[1].isdigit()
    return parts[2] if declared else FAMILY_OF[type(spec)]


def ranges(indices: Iterable[int]) -> str:
    """`0-2, 5, 7-60`, or with a step where they are regular: `3, 7, ... 59`."""
    numbers = sorted(indices)
    steps = {b - a for a, b in pairwise(numbers)}
    if len(numbers) > 3 and len(steps) == 1 and steps != {1}:
        return f"{numbers[0]}, {numbers[1]}, ... {numbers[-1]}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    if len(runs) > 12:
        return f"{_run(runs[0])}, {_run(runs[1])}, ... {_run(runs[-1])}"
    return ", ".join(map(_run, runs))


def _run(run: list[int]) -> str:
    first, last = run
    return str(first) if first == last else f"{first}-{last}"


def rows_of(spec: Any) -> list[tuple[str, str]]:
    """A spec as (what, value) lines."""
    if isinstance(spec, MLASpec):
        rank = "none: queries are projected directly" if spec.q_lora_rank is None else str(spec.q_lora_rank)
        return [
            ("heads", f"{spec.num_heads} total, {spec.num_local_heads} local"),
            ("query latent", rank),
            ("key/value latent", f"{spec.kv_lora_rank}, cache entry {spec.latent_width} wide"),
            ("split sizes", " + ".join(map(str, spec.split_sizes))),
            (
                "head dims",
                f"query/key {spec.qk_head_dim} (nope {spec.qk_nope_head_dim} + rope {spec.qk_rope_head_dim}), "
                f"value {spec.v_head_dim}",
            ),
            ("query norm", "none" if spec.q_norm is None else norm_line(spec.q_norm)),
            ("key/value norm", norm_line(spec.kv_norm)),
            ("softmax scale", f"{spec.softmax_scale:.7g}"),
        ]
    if isinstance(spec, GatedDeltaNetSpec):
        return [
            ("key heads", f"{spec.num_k_heads} total, {spec.num_local_k_heads} local, {spec.head_k_dim} wide"),
            ("value heads", f"{spec.num_v_heads} total, {spec.num_local_v_heads} local, {spec.head_v_dim} wide"),
            ("convolution", f"{spec.conv_kernel_size} taps, {spec.conv_dim} local channels"),
            ("output norm", norm_line(spec.output_norm)),
        ]
    if isinstance(spec, Mamba2Spec):
        copies = ", copies of the model's" if spec.num_local_groups * spec.parallel.size > spec.num_groups else ""
        return [
            ("heads", f"{spec.num_heads} total, {spec.num_local_heads} local, {spec.head_dim} wide"),
            ("groups", f"{spec.num_groups} total, {spec.num_local_groups} local{copies}"),
            ("state", f"{spec.ssm_state_size} per channel"),
            ("convolution", f"{spec.conv_kernel_size} taps, {spec.conv_dim} local channels"),
            ("output norm", "none: the gate alone" if spec.output_norm is None else norm_line(spec.output_norm)),
        ]
    if isinstance(spec, GQASpec):
        replicas = f", each on {spec.num_kv_head_replicas} ranks" if spec.num_kv_head_replicas > 1 else ""
        width = f"{spec.head_dim}" + (f", value {spec.v_head_dim}" if spec.v_head_dim != spec.head_dim else "")
        return [
            ("heads", f"{spec.num_heads} total, {spec.num_local_heads} local"),
            ("key/value heads", f"{spec.num_kv_heads} total, {spec.num_local_kv_heads} local{replicas}{_whose(spec)}"),
            ("head dim", width),
            ("softmax scale", f"{spec.softmax_scale:.7g}"),
            ("sliding window", "off" if spec.sliding_window is None else f"{spec.sliding_window} tokens"),
            ("sinks", "one per head" if spec.has_sinks else "none"),
        ]
    if isinstance(spec, MLPSpec):
        limit = spec.swiglu_limit if isinstance(spec, GatedMLPSpec) else None
        clamp = "" if limit is None else f", gate and up clamped at {limit:g}"
        if isinstance(spec, GatedMLPSpec) and (spec.gate_multiplier, spec.down_multiplier) != (1, 1):
            clamp += f", gate times {spec.gate_multiplier:g}, result times {spec.down_multiplier:g}"
        return [
            ("width", f"{spec.intermediate_size} total, {spec.local_intermediate_size} local"),
            ("activation", spec.activation + clamp),
        ]
    if isinstance(spec, ExpertsSpec):
        local = "" if spec.num_local_experts is None else f", {spec.num_local_experts} local"
        return [
            ("experts", f"{spec.num_experts} total{local}, {spec.experts_per_token} per token"),
            ("width", str(spec.intermediate_size)),
            ("shared experts", "none" if spec.shared is None else f"{spec.shared.intermediate_size} wide"),
            *([] if spec.weight is None else [("weights", weight_in_words(spec.weight))]),
        ]
    if isinstance(spec, ResidualSpec):
        if spec.post_norms:
            return [("hidden size", str(spec.hidden_size)), ("norms behind the adds", _several(spec.post_norms))]
        shared = spec.parallel_residual and not spec.post_attention_norms
        if spec.is_one_block:
            return [("hidden size", str(spec.hidden_size)), ("its only norm", _several(spec.input_norms))]
        return [
            ("hidden size", str(spec.hidden_size)),
            ("input norm", _several(spec.input_norms)),
            ("post-attention norm", "the input norm" if shared else _several(spec.post_attention_norms)),
        ]
    if isinstance(spec, FinalNormSpec):
        return [("hidden size", str(spec.hidden_size)), ("norm", norm_line(spec.final_norm))]
    return [(a.name, str(getattr(spec, a.name))) for a in attrs.fields(type(spec)) if a.name != "layer_index"]


def _several(norms: tuple[NormSpec, ...]) -> str:
    if not norms:
        return "none reads the stream"
    different = list(dict.fromkeys(map(norm_line, norms)))
    return (f"{len(norms)} x " if len(norms) > 1 and len(different) == 1 else "") + "; ".join(different)


def norm_line(norm: NormSpec) -> str:
    """A norm in one line."""
    kind = "LayerNorm" if isinstance(norm, LayerNormSpec) else "RMSNorm"
    text = f"{kind} over {norm.width}, epsilon {norm.epsilon:g}"
    if isinstance(norm, LayerNormSpec) and not norm.has_bias:
        text += ", no bias" if norm.has_weight else ", no weight or bias"
    if norm.weight_offset:
        text += f", weight + {norm.weight_offset:g}"
    if isinstance(norm, GatedNormSpec):
        order = "norm before gate" if norm.norm_before_gate else "gate before norm"
        groups = "" if norm.group_size is None else f", groups of {norm.group_size}"
        text += f", {norm.activation} gate, {order}{groups}"
    return text


DERIVED = (
    "qk_head_dim",
    "latent_width",
    "split_sizes",
    "gated_norm_shape",
    "conv_dim",
    "state_shape",
    "num_kv_head_replicas",
)
"""Properties that the JSON of a spec lists beside its fields, where the spec has them."""


def _whose(spec: GQASpec) -> str:
    """Where keys and values come from, if not from projections of the layer's own."""
    if spec.shares_kv:
        return " (an earlier layer's)"
    return " (values are the keys)" if spec.values_are_keys else ""


def spec_dict(spec: Any) -> dict[str, Any]:
    """A spec as plain data: its fields, norms as tables, and its derived values."""
    hidden = ("layer_index", "parallel")
    fields = attrs.asdict(spec, filter=lambda attribute, _: attribute.eq and attribute.name not in hidden)
    derived = {name: getattr(spec, name) for name in DERIVED if name in dir(type(spec))}
    return {**fields, "derived": derived}
