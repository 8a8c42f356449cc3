"""The calls of an engine's own classes in whose place a fused op is called: of a norm, of a product, of two norms together.

Each is given its instance, the seam, the site, what runs the op or the engine's own, and whether all is still as it was when the op was put in.
"""

from __future__ import annotations

import functools
import logging
import math
import sys
from collections.abc import Callable
from contextvars import ContextVar
from types import MethodType
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from ..adapters.specs import GatedDeltaNetSpec, GatedMLPSpec, GatedNormSpec
from ..fusion.catalog import FUSIONS
from ..fusion.sites import Site
from .hooks import Hook
from .host import here
from .native import Native, held_methods, native, native_call, native_function
from .process import once
from .seams import Seam

Run: TypeAlias = Callable[..., Any]
"""Given the arguments of a fused op, those of what the engine runs, and that: calls one of the two."""

Miss: TypeAlias = Callable[[str], object]
"""Told why an op was not called."""

Same: TypeAlias = Callable[[], bool]
"""Whether nothing has been put in the place of the engine's code since ours stands there."""

GONE = "layerfuse: a fused op is not called any more: %s"
"""What is said when something else was put in the place of what an op stands in."""

_reduces: WeakKeyDictionary[nn.Module, Callable[..., Any]] = WeakKeyDictionary()
"""Norm -> what stands for a module's function where that is given the norm."""

_inside: ContextVar[Callable[..., Any] | None] = ContextVar("layerfuse_inside", default=None)
"""What stands for a module's function while an instance runs."""


def norm(module: Any, seam: Seam, site: Site, run: Run, same: Same) -> None:
    """One norm: with a residual or a gate where the chain has one."""
    (spec,) = site.norms
    settings: tuple[Any, ...] = (spec.epsilon, spec.weight_offset)
    if isinstance(spec, GatedNormSpec):
        settings = (*settings, spec.activation, spec.norm_before_gate)
    own, second = _of_its_class(module), seam.second
    several = FUSIONS[seam.fusion].chain[0].adds or isinstance(spec, GatedNormSpec)
    # What is quantised are the rows of all heads.
    heads = site.spec.gated_norm_shape if seam.consumer is not None and isinstance(site.spec, GatedDeltaNetSpec) else ()

    def forward(x: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.keys() == {second} and not args:
            args, kwargs = (kwargs[second],), {}
        given, others = args[:several], args[several:]
        # Without the second tensor, or with options of the engine's, it is another computation.
        plain = len(given) == several and not kwargs and not (others and any(each is not None for each in others))
        if not plain or (several and (given[0] is None or given[0].numel() != x.numel())) or not same():
            return own(x, *args, **kwargs)
        if not heads and (not several or given[0].shape == x.shape):
            return run((x, *given, module.weight, *settings), (x, *given), own)
        # Kimi's delta nets give the gate without the leading dimension of 1; vLLM 0.26 gives heads as rows.
        shape = (-1, *heads) if heads and x.dim() == 2 else x.shape
        rows = (each.reshape(shape) for each in (x, *given))
        result = run((*rows, module.weight, *settings), (x, *given), own)
        return result if shape == x.shape else result.view(x.shape)

    _stand(module, forward)


def product(module: Any, _seam: Seam, site: Site, run: Run, same: Same) -> None:
    """`silu(gate) * up` of one tensor that holds both, within the limit of a class that clamps them."""
    own, limit = _of_its_class(module), site.spec.swiglu_limit if isinstance(site.spec, GatedMLPSpec) else None
    limit = math.inf if limit is None else limit

    def forward(x: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not same():
            return own(x, *args, **kwargs)
        return run((x, limit), (x,), own)

    _stand(module, forward)


def halves(x: Tensor, *others: Any) -> tuple[Any, ...]:
    """The arguments of an op for a product."""
    return (*x.chunk(2, dim=-1), *others)


def pair(
    module: Any,
    seam: Seam,
    site: Site,
    run: Run,
    same: Same,
    norms: Callable[[], tuple[nn.Module, ...]],
    miss: Miss,
) -> None:
    """Both `norms` of one site, as they are when it is called, that the instance calls a function for; `miss` is told where it calls that in another way."""
    q, kv = site.norms
    function: Any = seam.function
    original, own, switched = (
        _dispatched(function, lambda *_: _inside.get()),
        _of_its_class(module),
        is_switched(module, seam),
    )

    def plain(x: Any, y: Any, *others: Any) -> Any:
        if not switched:
            return original(x, y, *others)
        first, second = norms()
        return first(x), second(y)

    settings = (q.epsilon, kv.epsilon, q.weight_offset, kv.weight_offset)

    def fused(x: Any, y: Any, x_weight: Any, y_weight: Any, epsilon: float) -> Any:
        if epsilon != q.epsilon:
            why = f"{here().name} calls {function.path} with epsilon {epsilon} here; the spec says {q.epsilon}"
            miss(why)
            once(logging.WARNING, GONE, why)
            return plain(x, y, x_weight, y_weight, epsilon)
        return run((x, y, x_weight, y_weight, *settings), (x, y, x_weight, y_weight, epsilon), plain)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not same():
            if switched:
                setattr(module, str(seam.switch), False)
            return own(*args, **kwargs)
        before = _inside.set(fused)
        try:
            return own(*args, **kwargs)
        finally:
            _inside.reset(before)

    _stand(module, forward)
    if switched:
        setattr(module, str(seam.switch), True)


def reduced(module: Any, seam: Seam, site: Site, run: Run, same: Same, most: int | None) -> None:
    """The sum over the ranks, the residual add and a norm, which a function of the engine's does for that norm; up to `most` tokens."""
    (spec,) = site.norms
    function: Any = seam.function
    group = here().group()

    def fused(x: Tensor, residual: Tensor, norm: Any) -> Any:
        plain = x.shape == residual.shape and (most is None or x.shape[:-1].numel() <= most)
        if not plain or not same():
            return original(x, residual, norm)
        given = (x, residual, module.weight, spec.epsilon, group, spec.weight_offset)
        return run(given, (x, residual, norm), original)

    original = _dispatched(function, lambda *args: _reduces.get(args[-1]))
    _reduces[module] = fused


def neighbours(site: Site, run: Run, same: Same, norms: Callable[[], tuple[nn.Module, ...]], miss: Miss) -> None:
    """Both `norms` of one site where their inputs lie side by side in one tensor: the first one's call becomes that of the op.

    What it gives for the second waits for that one's call. `miss` is told where they do not lie so.
    """
    first, second = norms()
    q, kv = site.norms
    settings = (q.epsilon, kv.epsilon, q.weight_offset, kv.weight_offset)
    own, others = _of_its_class(first), _of_its_class(second)
    waiting: list[tuple[Tensor, Tensor]] = []

    def plain(x: Tensor, y: Tensor) -> tuple[Any, Any]:
        return own(x), others(y)

    def forward(x: Any, *args: Any, **kwargs: Any) -> Any:
        waiting.clear()
        y = None if args or kwargs else _behind(x, kv.width)
        if y is None or not same():
            return own(x, *args, **kwargs)
        given, waits = run((x, y, first.weight, second.weight, *settings), (x, y), plain)
        waiting.append((y, waits))
        return given

    def afterwards(y: Any, *args: Any, **kwargs: Any) -> Any:
        read, waits = waiting.pop() if waiting else (None, None)
        if read is not None and not args and not kwargs and _is_same(read, y):
            return waits
        miss(f"{here().name} called these norms on tensors that do not lie side by side")
        return others(y, *args, **kwargs)

    _stand(first, forward)
    _stand(second, afterwards)


def _behind(x: Tensor, width: int) -> Tensor | None:
    """The columns behind a tensor that is a part of a wider one, or None where it is none with so many."""
    if x.dim() != 2 or not len(x) or x.stride(1) != 1 or x.stride(0) < x.shape[1] + width:
        return None
    start = x.storage_offset() + x.shape[1]
    if start + (len(x) - 1) * x.stride(0) + width > x.untyped_storage().nbytes() // x.element_size():
        return None
    return x.as_strided((len(x), width), x.stride(), start)


def _is_same(one: Tensor, other: Tensor) -> bool:
    return (one.data_ptr(), one.shape, one.stride(), one.dtype) == (
        other.data_ptr(),
        other.shape,
        other.stride(),
        other.dtype,
    )


def is_switched(module: Any, seam: Seam) -> bool:
    """Whether the engine would call its norms by themselves, and has to be told to call the function."""
    return seam.switch is not None and not getattr(module, seam.switch)


def stood(module: Any, seam: Seam, norms: tuple[nn.Module, ...]) -> tuple[Native, ...]:
    """What the engine would run in place of a call.

    Raises:
        NotNativeError: some of it is not the engine's own.
    """
    if seam.callers:
        return held_methods(module, seam.callers), *map(native, norms)
    if seam.function is None:
        return (native(module),)
    native_function(seam.function.module, seam.function.path)
    if seam.reduces:
        return (native_call(module),)
    if not is_switched(module, seam):
        return ()
    return native(module, values=False), *map(native_call, norms)


def _stand(module: Any, forward: Callable[..., Any]) -> None:
    """Let the forward of a module be ours. A copy of it takes this along, and runs what its class has, with its own weight."""

    @functools.wraps(module.forward)
    def instead(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs) if self is module else type(self).forward(self, *args, **kwargs)

    module.forward = MethodType(instead, module)  # which copies are bound to anew


def _of_its_class(module: Any) -> Callable[..., Any]:
    """The forward of a module in which ours stands: what its class has when it is called."""

    def own(*args: Any, **kwargs: Any) -> Any:
        return type(module).forward(module, *args, **kwargs)

    return own


def _dispatched(function: Hook, standing_for: Callable[..., Callable[..., Any] | None]) -> Callable[..., Any]:
    """The function of an engine's that a place calls, from now on through what stands for it with such arguments, if anything does."""
    module: Any = sys.modules[function.module]
    name = function.path
    held: Any = vars(module)[name]
    known = vars(held).get("__layerfuse_original__")
    if known is not None:
        return known  # type: ignore[no-any-return]

    @functools.wraps(held)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        standing = standing_for(*args)
        return held(*args, **kwargs) if standing is None else standing(*args, **kwargs)

    setattr(dispatch, "__layerfuse_original__", held)  # noqa: B010 (functions have no such attribute by type)
    setattr(module, name, dispatch)
    return held  # type: ignore[no-any-return]
