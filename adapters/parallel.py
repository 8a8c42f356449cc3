"""By how many ranks a layer was sharded: what its projections say, and what the caller may add.

A size of 1 is never a guess: it is read off a weight that has its full shape, or said by someone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

from attrs import frozen

from .conversions import whole
from .errors import FOREIGN, UnreadableError, cut, said, shown
from .specs import Parallel

P = ParamSpec("P")
T = TypeVar("T")

_ambient: ContextVar[Parallel | None] = ContextVar("layerfuse_tensor_parallel", default=None)


@contextmanager
def tensor_parallel(size: int, rank: int | None = None) -> Iterator[Parallel]:
    """Say how the layers read inside the block were sharded, where they do not say it themselves.

    What a layer says always wins; this only fills silence. For one layer, pass `parallel=` to `spec_for` instead:
    there a contradiction is an error.

    Raises:
        SpecError: a size below 1, or a rank outside it.
    """
    parallel = Parallel(size=size, rank=0 if rank is None and size == 1 else rank)
    token = _ambient.set(parallel)
    try:
        yield parallel
    finally:
        _ambient.reset(token)


def ambient() -> Parallel | None:
    """What the innermost `tensor_parallel` block says."""
    return _ambient.get()


@frozen
class Shards:
    """What one source says of the sharding."""

    size: int
    rank: int | None


UNCUT = Shards(1, 0)
"""Of a weight that every rank holds whole."""

_WHOLE = frozenset({int})


def _asks(read: Callable[P, T]) -> Callable[P, T]:
    """What a layer's own code raises on the way is a reason why it tells nothing."""

    @wraps(read)
    def asked(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return read(*args, **kwargs)
        except UnreadableError:
            raise
        except FOREIGN as error:
            raise UnreadableError(f"reading its weight raised {said(error)}") from error

    return asked


@_asks
def shards_of_linear(linear: Any, dimensions: tuple[int, ...] = (0, 1)) -> Shards:
    """How the heads of a linear layer were shared out, from its weight against the features it declares.

    A DTensor's mesh is asked directly: its dimension called `tp` shares heads, FSDP's do not. A plain weight smaller than (out_features, in_features) in one dimension is a
    local shard, whose rank nothing tells.

    Args:
        linear: the module.
        dimensions: of its weight, along which a cut shares the heads; cut along another, every rank has all of them.

    Raises:
        UnreadableError: the weight explains neither, as packed quantised weights do not.
    """
    try:
        weight, declared = linear.weight, (whole(linear.out_features), whole(linear.in_features))
    except AttributeError as error:
        if _holds_transposed(linear):
            return UNCUT
        raise UnreadableError(f"{type(linear).__name__} has no {shown(error.name)}") from None
    if is_dtensor(weight):
        return _shards_of_mesh(weight, dimensions, _is_fsdps(linear))
    held = _shape_of(weight)
    if not _WHOLE.issuperset(map(type, declared)):
        raise UnreadableError(f"out_features and in_features are {shown(declared)}, which are no whole numbers")
    if held == declared:
        return UNCUT
    if _is_packed(weight):
        raise UnreadableError(f"a packed weight of {weight.dtype} and shape {held} tells nothing of {shown(declared)}")
    for kept, short in ((1, 0), (0, 1)):
        if len(held) == 2 and held[kept] == declared[kept] and held[short] > 0 and declared[short] % held[short] == 0:
            return Shards(declared[short] // held[short], None) if short in dimensions else UNCUT
    raise UnreadableError(f"a weight of shape {held} is no even shard of {shown(declared)}")


def _holds_transposed(linear: Any) -> bool:
    """Whether this is a whole Conv1D of transformers (GPT-2's linear), whose weight is (in, out) and called so nowhere."""
    held = vars(linear) if hasattr(linear, "nx") else {}
    return {"nx", "nf"} <= held.keys() and _shape_of(linear.weight) == (held["nx"], held["nf"])


def is_dtensor(weight: Any) -> bool:
    """Whether this is torch's DTensor, told without importing torch."""
    cls: Any = type(weight)
    return _has_mesh(cls)


def is_plain_tensor(part: Any) -> bool:
    """Whether this is a tensor that tells nothing of its shards."""
    cls: Any = type(part)
    return _is_tensor(cls) and not _has_mesh(cls) and not hasattr(part, "in_features")


@lru_cache(maxsize=512)
def _is_tensor(cls: Hashable) -> bool:
    return hasattr(cls, "data_ptr")


@lru_cache(maxsize=512)
def _has_mesh(cls: Hashable) -> bool:
    return hasattr(cls, "device_mesh")


def _shape_of(weight: Any) -> tuple[int, ...]:
    """The shape of a tensor; torch's dynamically quantised linears have a method in its place."""
    shape = weight.shape if hasattr(weight, "shape") else None
    if not isinstance(shape, tuple) or not _WHOLE.issuperset(map(type, shape)):
        raise UnreadableError(f"its weight is no tensor, but a {cut(type(weight).__name__)}")
    return tuple(shape)


def _is_packed(weight: Any) -> bool:
    """Whether one element may hold several weights: integers of 4-bit formats, and pairs of float4."""
    return not weight.dtype.is_floating_point or str(weight.dtype).endswith("_x2")


def _is_fsdps(module: Any) -> bool:
    """Whether FSDP shards this module: by the class that `fully_shard` gives it, or the mark on those inside."""
    by_class = any(
        base.__name__ == "FSDPModule" and base.__module__.startswith("torch.distributed.")
        for base in type(module).__mro__
    )
    return by_class or hasattr(module, "_is_fsdp_managed_module")


@_asks
def ranks_summed(part: Any) -> int:
    """Over how many ranks the result of a down projection, or of routed experts, is a partial sum.

    Args:
        part: a linear module, cut along its input features, or the weight of all experts, cut anywhere.

    Raises:
        UnreadableError: its weight does not tell.
    """
    weight = part.weight if hasattr(part, "in_features") else part
    if not is_dtensor(weight):
        if weight is part:
            raise UnreadableError(f"a plain {type(part).__name__} tells nothing of its shards")
        return shards_of_linear(part, (1,)).size
    mesh, names = weight.device_mesh, weight.device_mesh.mesh_dim_names
    if names is None:
        raise UnreadableError("its weight is on a mesh without dimension names")
    cut = [i for i, placement in enumerate(weight.placements) if placement.is_shard()]
    # A weight does not tell who cut it: FSDP gathers what it cuts, and calls its mesh what it likes.
    sharing = [i for i in cut if _SUMMED.search(names[i])]
    if not sharing and any(not _DATA_PARALLEL.search(names[i]) for i in cut):
        raise UnreadableError(f"its weight is cut along a mesh with the dimensions {names}: none is called tp or ep")
    if weight is not part:
        sharing = [i for i in sharing if weight.placements[i].dim % weight.dim() == 1]
    return math.prod(mesh.size(i) for i in sharing)


_SUMMED = re.compile(r"(^|_)(tp|ep)($|_)")
"""Mesh dimensions whose ranks sum what they give: tensor and expert parallelism."""

_DATA_PARALLEL = re.compile(r"dp|data|replicate|shard")
"""What is in the names of mesh dimensions along which data is shared and not heads: dp, fsdp, hsdp, dp_shard, ..."""


def _shards_of_mesh(weight: Any, dimensions: tuple[int, ...], fsdp: bool) -> Shards:
    """What a DTensor's mesh says. FSDP gathers what it cuts before use, so that every rank has all heads of its share."""
    mesh = weight.device_mesh
    names = mesh.mesh_dim_names
    cut = [i for i, placement in enumerate(weight.placements) if placement.is_shard()]
    sharing = [i for i in cut if names is not None and "tp" in names[i]]
    if not any("tp" in name for name in names or ()):
        unknown = [i for i in cut if names is None or not _DATA_PARALLEL.search(names[i])]
        # FSDP cuts a weight once; what is cut twice is cut by something else too.
        if unknown and not (fsdp and len(cut) == 1):
            found = "without dimension names" if names is None else f"with the dimensions {names}"
            raise UnreadableError(f"its weight is cut along a mesh {found}: call the tensor-parallel one 'tp'")
    sharing = [i for i in sharing if weight.placements[i].dim % weight.dim() in dimensions]
    if not sharing:
        return UNCUT
    if len(sharing) > 1:
        raise UnreadableError("its weight is cut along more than one tensor-parallel dimension of its mesh")
    return Shards(mesh.size(sharing[0]), mesh.get_local_rank(sharing[0]))
