"""A mixture of experts, read into its `ExpertsSpec` by the class of what holds the experts, in four vocabularies.

transformers holds all experts in two tensors, whose shape is this rank's; the router has the model's number of them. vLLM, SGLang and
ATOM run them in one module that knows its share of whole experts and of the columns of each, and may count copies and shared ones.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar

from .base import Facts
from .consumers import children_of
from .conversions import whole
from .errors import FOREIGN
from .layer_specs import ExpertsSpec, GatedMLPSpec
from .linear_quant import describe_linear_quant
from .linear_quant_readings import HOLDERS, holders_of, stored
from .linear_specs import LinearSpec, WeightSpec, linear_spec
from .linear_weights import plain_weight, weight_of
from .linears import linear_of
from .parallel import is_dtensor
from .spec_fields import made
from .vocabulary_mlps import ATOM_MLP, SGLANG_MLP, TRANSFORMERS_MLP, VLLM_MLP

T = TypeVar("T")
Sizes: TypeAlias = tuple[Any, Any, Any, Any, Any]
"""What `_SIZED` names, in that order."""
Shared: TypeAlias = Callable[[str, str, Any], GatedMLPSpec]
"""Reads shared experts: their path, the engine, their module."""

_SIZED = (
    "num_experts",
    "num_local_experts",
    "experts_per_token",
    "intermediate_size",
    "local_intermediate_size",
)
_UNSAID: dict[str, Any] = dict.fromkeys((*_SIZED, "weight", "activation", "router", "shared"))
_ALL_WHOLE = frozenset({int})
_ROUTERS = ("gate", "router")
_SHARED = ("shared_experts", "shared_expert", "shared_mlp")


def experts_of(path: str, mixture: Any, shared: Shared) -> ExpertsSpec | None:
    """What the module in the place of an MLP is, if it is a mixture. It decides no layer's spec, so that what it does not say is None.

    Args:
        path: of the module, below the layer.
        mixture: the module.
        shared: reads its shared experts.
    """
    try:
        children = children_of(mixture)
        experts = children.get("experts")
        engine = None if experts is None else _engine(experts.__class__)
    except FOREIGN:
        return None
    if engine is None:
        return None
    values = _UNSAID.copy()
    values["path"] = path
    values["weight"], values["activation"] = _tried(_held, experts) or (None, None)
    name, module = _first(_SHARED, children)
    if name is not None:
        values["shared"] = _tried(shared, f"{path}.{name}", engine, module)
    name, scores = _first(_ROUTERS, children)
    if name is not None:
        values["router"] = _tried(_router, f"{path}.{name}", scores)
    parts = (id(values["shared"]),)
    try:
        sizes = _SIZES[engine](mixture, experts, scores, values["router"])
        if _ALL_WHOLE.issuperset(map(type, sizes)):
            values.update(zip(_SIZED, sizes, strict=True))
        else:
            values.update(zip(_SIZED, map(whole, sizes), strict=True))
        return made(ExpertsSpec, values, parts)
    except FOREIGN:
        return made(ExpertsSpec, {**values, **dict.fromkeys(_SIZED)}, parts)


def _tried(read: Callable[..., T], *given: Any) -> T | None:
    try:
        return read(*given)
    except FOREIGN:
        return None


def _first(names: tuple[str, ...], children: Mapping[str, Any]) -> tuple[str | None, Any]:
    """The first of these that is there."""
    for name in names:
        child = children.get(name)
        if child is not None:
            return name, child
    return None, None


def _router(path: str, router: Any) -> LinearSpec:
    """A linear of an engine, or of transformers, whose routers are modules of their own around a weight."""
    held = vars(router)
    if "in_features" in held or "input_size" in held:
        return linear_of(path, (path,), router)
    weight = stored(router, "weight")
    return _scores(path, weight.shape, weight.dtype)


@lru_cache(maxsize=512)
def _scores(path: str, shape: Any, dtype: Any) -> LinearSpec:
    given, read = shape
    return linear_spec(
        path, (path,), (read, read, given, given, (given,), "replicated"), plain_weight(dtype), None, False
    )


def _held(experts: Any) -> tuple[WeightSpec | None, Any]:
    """How the experts hold their weights, and what their kernel does to what it reads."""
    holder = stored(experts, "routed_experts") or experts  # vLLM runs them by another module
    weight = stored(holder, "down_proj")
    if weight is not None and weight.dtype.itemsize > 1 and _is_alone(holder):
        return plain_weight(weight.dtype), None
    holders = holders_of(holder)
    return weight_of(holder, holders), describe_linear_quant(holder, holders)


def _is_alone(holder: Any) -> bool:
    """Whether nothing of a quantisation is attached."""
    held: Mapping[str, Any] = vars(holder)
    modules, parameters = held["_modules"].keys(), held["_parameters"].keys()
    if held.keys().isdisjoint(HOLDERS) and modules.isdisjoint(HOLDERS) and parameters.isdisjoint(HOLDERS):
        return True
    return all(stored(holder, name) is None for name in HOLDERS)


# ---- the vocabularies


def _transformers(mixture: Any, experts: Any, scores: Any, _: Any) -> Sizes:
    """The experts of a rank are those in its tensors; what of their width it has, the third side tells, whichever is the hidden size."""
    if scores is None:  # held as an attribute
        scores = next(stored(mixture, name) for name in _ROUTERS if stored(mixture, name) is not None)
    held_there = stored(scores, "weight")
    total, hidden = (scores.weight if held_there is None else held_there).shape  # or behind a wrapper
    weight, held = stored(experts, "down_proj"), vars(experts)
    width = held["intermediate_dim"] if "intermediate_dim" in held else held["intermediate_size"]
    local, *sides = weight.to_local().shape if is_dtensor(weight) else weight.shape
    packed = 1 if weight.dtype.is_floating_point else 2  # two of four bits in a byte
    return total, local, scores.top_k, width, packed * sides[0] * sides[1] // hidden


def _vllm(_: Any, experts: Any, __: Any, ___: Any) -> Sizes:
    """vllm/model_executor/layers/fused_moe/config.py, `FusedMoEConfig`: experts are counted with their copies but as `logical` ones."""
    config = experts.moe_config
    width = config.intermediate_size_per_partition_unpadded
    if width is None:
        width = config.intermediate_size_per_partition
    return (
        config.num_logical_experts,
        config.num_local_experts,
        config.experts_per_token,
        width * config.moe_parallel_config.tp_size,
        width,
    )


def _sglang(_: Any, experts: Any, __: Any, router: LinearSpec | None) -> Sizes:
    """sglang/srt/layers/moe/fused_moe_triton/layer.py, `FusedMoE`: shared experts may be run as routed ones, and experts be copied."""
    total = experts._num_global_routed
    if router is not None and router.out_features is not None:
        total = min(total, router.out_features)
    width = experts.intermediate_size_per_partition
    # It rounds the width up for one kernel, and does not keep what it was.
    whole_width = None if experts.use_flashinfer_trtllm_moe else width * experts.moe_tp_size
    return total, experts._num_local_routed, experts.top_k - experts.num_fused_shared_experts, whole_width, width


def _atom(_: Any, experts: Any, __: Any, ___: Any) -> Sizes:
    """atom/model_ops/moe.py, `FusedMoE`; fused_moe/expert_layout.py, `MoEExpertLayout`: shared experts may be among the local ones."""
    layout, width = experts.expert_layout, experts.intermediate_size_per_partition
    fused = layout.num_fused_shared_experts
    # Counted among all experts, they may be on any rank.
    local = None if layout.shared_is_routed else experts.local_num_experts - fused
    return layout.num_routed, local, experts.top_k, width * experts.moe_parallel_config.tp_size, width


_SIZES: Mapping[str, Callable[[Any, Any, Any, LinearSpec | None], Sizes]] = {
    "transformers": _transformers,
    "vllm": _vllm,
    "sglang": _sglang,
    "atom": _atom,
}
_TOLD: Mapping[str, tuple[str, ...]] = {
    "transformers": (
        "{router}.weight.shape.0",
        "experts.down_proj.shape.0",
        "{router}.top_k",
        "experts.{width}",
        "experts.down_proj.shape, the side that is no hidden_size",
    ),
    "vllm": (
        "experts.moe_config.num_logical_experts",
        "experts.moe_config.num_local_experts",
        "experts.moe_config.experts_per_token",
        "experts.moe_config.intermediate_size_per_partition of every rank",
        "experts.moe_config.intermediate_size_per_partition, before padding",
    ),
    "sglang": (
        "experts._num_global_routed, and {router}",
        "experts._num_local_routed",
        "experts.top_k, without experts.num_fused_shared_experts",
        "experts.intermediate_size_per_partition of every rank",
        "experts.intermediate_size_per_partition",
    ),
    "atom": (
        "experts.expert_layout.num_routed",
        "experts.local_num_experts, without experts.expert_layout.num_fused_shared_experts",
        "experts.top_k",
        "experts.intermediate_size_per_partition of every rank",
        "experts.intermediate_size_per_partition",
    ),
}
"""Where `_SIZES` reads each of `_SIZED`, below the mixture, in words for people."""


def told_of(mixture: Any) -> dict[str, str]:
    """Where each field of a mixture's `ExpertsSpec` is read, below its module. It is one that `experts_of` has read."""
    children, held = children_of(mixture), {**vars(mixture), **children_of(mixture)}
    experts = children["experts"]
    router = next((name for name in _ROUTERS if held.get(name) is not None), "router")
    width = "intermediate_dim" if "intermediate_dim" in vars(experts) else "intermediate_size"
    places = [each.format(router=router, width=width) for each in _TOLD[_engine(experts.__class__) or ""]]
    shared, _ = _first(_SHARED, children)
    whole = {"weight": "experts", "activation": "experts", "router": router, "shared": shared or "shared_experts"}
    return {**dict(zip(_SIZED, places, strict=True)), **whole}


SHARED: Mapping[str, Facts] = {
    "transformers": TRANSFORMERS_MLP,
    "vllm": VLLM_MLP,
    "sglang": SGLANG_MLP,
    "atom": ATOM_MLP,
}
"""Where each engine's shared experts hold what: they are MLPs as any other, of a class of the model's own."""


@lru_cache(maxsize=512)
def _engine(cls: Hashable) -> str | None:
    assert isinstance(cls, type)
    packages = (base.__module__.partition(".")[0] for base in cls.__mro__)
    return next((package for package in packages if package in _SIZES), None)
