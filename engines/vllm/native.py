"""What vLLM's ops of its IR run: each chooses one of several implementations, and packages bring implementations of their own."""

from __future__ import annotations

import sys
from operator import attrgetter
from types import FunctionType
from typing import Any

from ..native import OBJECTS, Look, NotNativeError
from ..whose import HOLDERS, plain


def _op(look: Look, op: Any, place: str) -> None:
    """How an op is called, and the implementation that it chooses, of vLLM's own or of a provider from elsewhere."""
    if op in look.seen or "impls" not in vars(op):
        return
    look.seen.add(op)
    for each in filter(None, (op, vars(op).get("maybe_inplace"))):
        look.attribute(type(each), "__call__", each)
    chosen = vars(op).get("_priority_impls")
    if chosen is not None:
        kept = [*chosen]

        def other() -> str | None:
            now = op._priority_impls
            if now == kept:
                return None
            return f"{place} is computed by {' or '.join(each.provider for each in now) or 'native'} now"

        look.others.append(other)
    if not chosen:
        look.hold(op.impls, "native", op.impls["native"], place, op.impls)
    for impl in chosen or [op.impls["native"]]:
        where = f"the implementation {impl.provider!r} of {place}"
        function = plain(impl.impl_fn)
        if isinstance(function, FunctionType):
            look.function(function, where)
        look.hold(vars(impl), "impl_fn", impl.impl_fn, where, impl)
        look.attribute(type(impl), "func_impl_fn", impl)


OBJECTS["vllm.ir.op"] = _op
HOLDERS["vllm.ir.op", "IrOpImpl"] = attrgetter("impl_fn")


def why_not_ops() -> str | None:
    """Why vLLM's ops for norms, which graphs hold by name, do not compute what vLLM's own do; None where they do."""
    look, ops = Look(), sys.modules.get("vllm.ir.ops")
    try:
        for name in ("fused_add_rms_norm", "rms_norm"):
            if ops is not None and name in vars(ops):
                look.named(vars(ops), name, frozenset({name}))
    except NotNativeError as error:
        return str(error)
    return None


def why_not_all_reduce() -> str | None:
    """The same of its op for an all-reduce over the tensor-parallel ranks."""
    from vllm.distributed import parallel_state

    look, group = Look(), parallel_state.get_tp_group()
    try:
        look.named(vars(parallel_state), "all_reduce", frozenset({"all_reduce"}))
        look.attribute(type(group), "_all_reduce_out_place", group)
        if group.device_communicator is not None:
            look.attribute(type(group.device_communicator), "all_reduce", group.device_communicator)
    except NotNativeError as error:
        return str(error)
    return None
