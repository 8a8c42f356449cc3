"""Which layers can share metadata buffers: those that are equal in everything that the buffers and a call depend on.

A draft model of 4 heads beside a target of 8 gets a group of its own (vllm-project/vllm pull request 43543).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from attrs import frozen

from ...adapters.arguments import expect
from ...adapters.errors import ArgumentError, ArgumentValueError, shown
from ...adapters.layer_specs import LayerSpec
from ...adapters.specs import AnySpec, GatedDeltaNetSpec, KernelSpec, MLAKernelSpec, MLASpec
from ..planning import several
from .errors import MixedGroupError, NoSuchLayerError

Placed = tuple[str, AnySpec]
"""The path of a layer and its spec, as `registry.specs_in` yields them."""


@frozen(kw_only=True)
class LayerGroup:
    """Layers that one plan serves."""

    name: str
    spec: MLASpec | MLAKernelSpec | GatedDeltaNetSpec
    "Of the first layer; the others differ in nothing that counts."
    layers: tuple[str, ...]
    "Paths, in the order given."

    @property
    def is_mla(self) -> bool:
        """Whether it is planned by `plan_metadata`, and not by `plan_state`."""
        return not isinstance(self.spec, GatedDeltaNetSpec)


_MLA: dict[str, Callable[[Any], Hashable]] = {
    "local query heads": lambda spec: spec.num_local_heads,
    "kv_lora_rank": lambda spec: spec.kv_lora_rank,
    "qk_rope_head_dim": lambda spec: spec.qk_rope_head_dim,
    "softmax_scale": lambda spec: spec.softmax_scale,
    "prefill widths": lambda spec: (spec.qk_nope_head_dim, spec.v_head_dim),
}
_STATE: dict[str, Callable[[Any], Hashable]] = {
    "local key heads": lambda spec: spec.num_local_k_heads,
    "local value heads": lambda spec: spec.num_local_v_heads,
    "head_k_dim": lambda spec: spec.head_k_dim,
    "head_v_dim": lambda spec: spec.head_v_dim,
    "conv_kernel_size": lambda spec: spec.conv_kernel_size,
}


def _facts(spec: AnySpec) -> dict[str, Hashable] | None:
    """What must be equal in a group, or None for a layer that no metadata is planned for."""
    if isinstance(spec, MLASpec | MLAKernelSpec):
        return {"kind": "MLA", **{name: read(spec) for name, read in _MLA.items()}}
    if isinstance(spec, GatedDeltaNetSpec):
        return {"kind": "gated delta net", **{name: read(spec) for name, read in _STATE.items()}}
    return None


def group_layers(
    specs: Iterable[Placed] | Mapping[str, Iterable[Placed]], *, groups: Mapping[str, Iterable[str]] | None = None
) -> tuple[LayerGroup, ...]:
    """Layers by what must be equal, in the order of their first layer.

    Args:
        specs: (path, spec) pairs of one model, or several models by name: `{"target": ..., "draft": ...}`, whose layers
            are then called `target/path`. Layers without metadata (residual streams, softmax attention with a cache of
            its own) are passed over, so that Kimi-Linear's MLA and KDA layers make two groups.
        groups: group name -> paths, where the caller has groups already; each must be one that can be.

    Raises:
        MixedGroupError: a group of the caller's whose layers differ; the message names both layers.
        NoSuchLayerError: a group of the caller's names a layer that is not there, or that needs no metadata.
        ArgumentError: an argument is of another type.
    """
    placed = _placed(specs)
    facts = {path: what for path, spec in placed.items() if (what := _facts(spec)) is not None}
    if groups is not None:
        expect("groups", groups, Mapping, "paths by the names of groups")
        return tuple(_checked(name, _paths(name, paths), placed, facts) for name, paths in groups.items())
    found: dict[Hashable, list[str]] = {}
    for path, equal in facts.items():
        found.setdefault(tuple(equal.items()), []).append(path)
    return tuple(_group(tuple(paths), _planned(placed[paths[0]])) for paths in found.values())


def _placed(specs: Iterable[Placed] | Mapping[str, Iterable[Placed]]) -> dict[str, AnySpec]:
    if isinstance(specs, Mapping):
        return {f"{model}/{path}": spec for model, layers in specs.items() for path, spec in _pairs(layers)}
    return dict(_pairs(specs))


def _pairs(specs: Any) -> list[tuple[str, AnySpec]]:
    pairs = []
    for pair in several(specs):
        if not (
            isinstance(pair, tuple)
            and len(pair) == 2
            and isinstance(pair[0], str)
            and isinstance(pair[1], LayerSpec | KernelSpec)
        ):
            raise ArgumentError(f"specs: expected (path, spec) pairs in a list, got {shown(pair)}")
        pairs.append(pair)
    return pairs


def _paths(name: object, paths: object) -> tuple[str, ...]:
    if (
        not isinstance(name, str)
        or not isinstance(paths, list | tuple)
        or not all(isinstance(path, str) for path in paths)
    ):
        raise ArgumentError(f"groups: expected the paths of layers in a list, got {shown(paths)} for {shown(name)}")
    return tuple(paths)


def _checked(
    name: str, paths: tuple[str, ...], placed: Mapping[str, AnySpec], facts: Mapping[str, dict[str, Hashable]]
) -> LayerGroup:
    if not paths:
        raise ArgumentValueError(f"group {shown(name)} holds no layer")
    first = paths[0]
    for path in paths:
        if path not in facts:
            raise NoSuchLayerError(f"group {shown(name)}: {shown(path)} is no layer that metadata is planned for")
        differences = [
            f"{what} {facts[first].get(what)} and {value}"
            for what, value in facts[path].items()
            if facts[first].get(what) != value
        ]
        if facts[path]["kind"] != facts[first]["kind"]:
            differences = differences[:1]
        if differences:
            raise MixedGroupError(name, (first, path), differences)
    return LayerGroup(name=name, spec=_planned(placed[first]), layers=paths)


def _planned(spec: AnySpec) -> MLASpec | MLAKernelSpec | GatedDeltaNetSpec:
    if not isinstance(spec, MLASpec | MLAKernelSpec | GatedDeltaNetSpec):
        raise ArgumentError(f"no metadata is planned for a {type(spec).__name__}")
    return spec


def _group(paths: tuple[str, ...], spec: MLASpec | MLAKernelSpec | GatedDeltaNetSpec) -> LayerGroup:
    if isinstance(spec, GatedDeltaNetSpec):
        name = f"gated delta net, {spec.num_local_k_heads} key and {spec.num_local_v_heads} value heads"
    else:
        name = f"MLA, {spec.num_local_heads} heads"
    return LayerGroup(name=name, spec=spec, layers=paths)
