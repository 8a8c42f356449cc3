"""The linears of a layer, each read into its `LinearSpec`: the sizes by the class of the module, in four vocabularies.

transformers and torch declare the model's sizes, and a shard of the weight tells the rank's. vLLM and SGLang hold both.
ATOM holds the rank's, and the size of the group. A merged linear counts what is copied to several ranks once per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache
from types import NoneType
from typing import Any, TypeAlias

from .errors import FOREIGN, SpecError, UnreadableError
from .linear_quant import describe_linear_quant, plain_dtype, says_nothing
from .linear_quant_readings import Holders, holders_of, maybe
from .linear_specs import LinearSpec, linear_spec
from .linear_weights import plain_weight, weight_of
from .parallel import is_dtensor, shards_of_linear

Held: TypeAlias = Mapping[str, Any]
Sizes: TypeAlias = tuple[int | None, int | None, int | None, int | None, tuple[int, ...], str | None]
"""In and out features, each the model's and this rank's; this rank's outputs; the style."""

_WHOLE = frozenset({int, NoneType})
_UNSAID: Sizes = (None, None, None, None, (), None)


def linear_of(path: str, together: tuple[str, ...], linear: Any) -> LinearSpec:
    """What a linear is: it decides no layer's spec, so that what it does not say is None.

    Args:
        path: of its module, below the layer.
        together: the paths of all that read the same tensor, this one's among them.
        linear: the module.
    """
    return plain_linear(path, together, linear) or other_linear(path, together, linear)


def other_linear(path: str, together: tuple[str, ...], linear: Any) -> LinearSpec:
    """As `linear_of`, of all that are not plain."""
    dtype = plain_dtype(linear)
    if dtype is not None:
        weight, activation, takes = plain_weight(dtype), None, False
    else:
        holders = _holders_of(linear)
        weight, activation = weight_of(linear, holders), describe_linear_quant(linear, holders)
        takes = _takes_quantised(linear)
    try:
        return linear_spec(path, together, _sizes(linear), weight, activation, takes)
    except SpecError:  # sizes that contradict each other say nothing
        return linear_spec(path, together, _UNSAID, weight, activation, takes)


def _holders_of(linear: Any) -> Holders | None:
    try:
        return holders_of(linear)
    except FOREIGN:  # of which each that asks has words of its own
        return None


def is_whole(linear: Any) -> bool:
    """Whether this is torch's own linear with nothing attached, and its weight has all features that it declares."""
    return plain_linear("", (), linear) is not None


def plain_linear(path: str, together: tuple[str, ...], linear: Any) -> LinearSpec | None:
    """The spec of such a linear: most are, and a layer is read often. None of all others."""
    try:
        held = linear.__dict__
        if (
            held["_modules"]
            or "quant_method" in held
            or "scheme" in held
            or "quantization_scheme" in held
            or "weight" in held
        ):
            return None
        weight = held["_parameters"]["weight"]
        read, given = held["in_features"], held["out_features"]
        if not type(read) is type(given) is int:
            return None
        return _whole(path, together, linear.__class__, weight.__class__, weight.dtype, weight.shape, read, given)
    except FOREIGN:  # of which the full reading has words
        return None


@lru_cache(maxsize=16384)
def _whole(
    path: str, together: tuple[str, ...], cls: Hashable, of_weight: Any, dtype: Any, shape: Any, read: int, given: int
) -> LinearSpec | None:
    is_torchs = says_nothing(cls) and says_nothing(of_weight) and _reading(cls) is _declared
    if not is_torchs or dtype.itemsize < 2 or hasattr(of_weight, "device_mesh"):
        return None
    if shape != (given, read):
        return None
    sizes = (read, read, given, given, (given,), "replicated")
    return linear_spec(path, together, sizes, plain_weight(dtype), None, False)


def _sizes(linear: Any) -> Sizes:
    try:
        sizes = _reading(linear.__class__)(linear, vars(linear))
    except FOREIGN:
        return _UNSAID
    return sizes if _WHOLE.issuperset(map(type, sizes[:4] + sizes[4])) else _UNSAID


def _takes_quantised(linear: Any) -> bool:
    """vllm/model_executor/layers/fusion/quant_activation.py, `get_input_quant_key`: who adds to a linear (LoRA) wants it as it is."""
    try:
        told = vars(linear).get("_input_quant_key") is not None
        return told and maybe(linear, "requires_unquantized_input") is not True
    except FOREIGN:
        return False


# ---- transformers, torch


def _declared(linear: Any, held: Held) -> Sizes:
    read, given = held["in_features"], held["out_features"]
    weight = held["_parameters"]["weight"]
    if weight.shape == (given, read) and not is_dtensor(weight):
        return read, read, given, given, (given,), "replicated"
    try:
        columns, rows = (shards_of_linear(linear, (side,)).size for side in (0, 1))
    except UnreadableError:
        return read, None, given, None, (), None
    style = "column" if columns > 1 else "row" if rows > 1 else "replicated"
    return read, read // rows, given, given // columns, (given // columns,), style


# ---- vLLM, SGLang


def _engines(linear: Any, held: Held) -> Sizes:
    """A linear of theirs that is cut as its class says; one for which tensor parallelism is off is not cut."""
    read, given = held["input_size"], held["output_size"]
    style = _style(linear.__class__)
    if style == "replicated" or held.get("disable_tp") or held.get("parallel_group") == "replicated":
        return read, read, given, given, tuple(held.get("output_sizes", (given,))), "replicated"
    if style == "row":
        return read, held.get("input_size_per_partition"), given, given, (given,), style
    outputs = tuple(held["output_partition_sizes"])
    total = _counted_once(linear, held, tuple(held.get("output_sizes", (given,))), outputs)
    return read, read, total, sum(outputs), outputs, style


def _counted_once(linear: Any, held: Held, sizes: tuple[int, ...], outputs: tuple[int, ...]) -> int | None:
    """What the model's linears give, from sizes that count copies once per rank; None where a class copies in its own way."""
    if sizes == outputs:  # one rank
        return sum(outputs)
    name = type(linear).__name__
    if name == "QKVParallelLinear":
        queries, keys, values = sizes
        return int(queries + (keys + values) // held["num_kv_head_replicas"])
    copied: set[int] = {*_COPIED.get(name, ()), *held.get("replicated_shard_ids", ())}
    if "replicated_shard_id" in held:
        copied.add(held["replicated_shard_id"])
    if not copied and name not in _PLAINLY_CUT:
        return None
    each = [part if at in copied else size for at, (size, part) in enumerate(zip(sizes, outputs, strict=True))]
    return sum(each[: _BEFORE_PADDING.get(name)])


_PLAINLY_CUT = frozenset({"ColumnParallelLinear", "MergedColumnParallelLinear"})
_COPIED: dict[str, tuple[int, ...]] = {"KimiK3MergedQKVGateLinear": (0, 1)}
"""Which outputs of a merged linear every rank holds, where it does not say so itself."""
_BEFORE_PADDING = {"_KimiGDNMergedColumnParallelLinear": 6}
"""How many outputs are a model's: Kimi-K3's query, key, value, gate, decay and beta, behind which each rank may have rows of zeros."""

# ---- ATOM


def _atom(linear: Any, held: Held) -> Sizes:
    """atom/model_ops/linear.py, `LinearBase`: what it calls the size is this rank's."""
    read, given, style = held["input_size"], held["output_size"], _style(linear.__class__)
    outputs = tuple(held.get("output_partition_sizes", (given,)))
    ranks = 1 if style == "replicated" else held["tp_size"]
    if style == "row":
        return read * ranks, read, given, given, (given,), style
    total = _counted_once(linear, held, tuple(part * ranks for part in outputs), outputs)
    return read, read, total, given, outputs, style


# ---- which class speaks which vocabulary

_STYLES = {
    "RowParallelLinear": "row",
    **dict.fromkeys(("ColumnParallelLinear", "MergedColumnParallelLinear", "QKVParallelLinear"), "column"),
    **dict.fromkeys(("ReplicatedLinear", "MergedReplicatedLinear"), "replicated"),
}
_READINGS: dict[str, Callable[[Any, Held], Sizes]] = {
    f"{engine}:{name}": reading
    for engine, reading in (("vllm", _engines), ("sglang", _engines), ("atom", _atom))
    for name in _STYLES
}


@lru_cache(maxsize=512)
def _reading(cls: Hashable) -> Callable[[Any, Held], Sizes]:
    assert isinstance(cls, type)
    names = (f"{base.__module__.partition('.')[0]}:{base.__name__}" for base in cls.__mro__)
    return next((_READINGS[name] for name in names if name in _READINGS), _declared)


@lru_cache(maxsize=512)
def _style(cls: Hashable) -> str:
    assert isinstance(cls, type)
    return next(_STYLES[base.__name__] for base in cls.__mro__ if base.__name__ in _STYLES)
