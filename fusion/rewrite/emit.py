"""Putting one fused op in the place of a chain: its steps are matched, checked, and then replaced all at once.

Nothing changes in the graph before every check has passed.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from ...adapters.errors import FOREIGN, said
from ..chain import LAYERFUSE, Form, Fusion
from ..declare import REQUIRED, Rows, StaticScale
from ..match.calls import find_op
from ..match.errors import Unmatched
from ..match.values import is_contiguous, same_shape, value
from ..planning import Plan
from ..steps import main_step
from .binding import Binding, needed_by, val_of
from .hoisting import check_writes, hoist
from .layouts import Made, view
from .ranks import check_kernel
from .uses import SiteMatch

_COPIED_META = ("nn_module_stack", "stack_trace", "source_fn_stack", "original_aten", "from_node", "seq_nr")


def replace(fusion: Fusion, use: SiteMatch, plan: Plan, moved: dict[Node, Node]) -> tuple[Form, str | None]:
    """Replace a site's chain by the fusion's op, in the form that the graph calls for.

    Args:
        fusion: what to put there.
        use: the site, and what of it was found in the graph.
        plan: says how the site is quantised, and for which target.
        moved: nodes that earlier replacements took out -> what stands for them; added to.

    Returns:
        The form, and why a step of another form, such as a padding, stayed behind it; None where none did.

    Raises:
        Unmatched: a step is not there, or the graph forbids the replacement. Nothing has been replaced then.
    """
    problem = Unmatched(f"{fusion.name} has no form")
    left: str | None = None
    for form in filter(lambda each: each.in_graphs, fusion.forms):
        stays = any(step.is_left(use) for step in form.chain)
        try:
            _replace(fusion, form, use, plan, moved)
        except Unmatched as reason:
            problem = reason
            left = str(reason) if stays else left
        else:
            return form, left
    raise problem


def why_not_there(fusion: Fusion, use: SiteMatch, plan: Plan, moved: dict[Node, Node]) -> str | None:
    """Which step of the fusion is not in the graph, as `replace` would say it, or None where all are. The graph stays as it is."""
    problem: str | None = None
    for form in filter(lambda each: each.in_graphs, fusion.forms):
        try:
            _bind(fusion, form, use, plan, moved)
        except Unmatched as reason:
            problem = str(reason)
        else:
            return None
    return problem


def _replace(fusion: Fusion, form: Form, use: SiteMatch, plan: Plan, moved: dict[Node, Node]) -> None:
    bound = _bind(fusion, form, use, plan, moved)
    _check_alike(bound, form)
    first, last = _span(bound)
    check_writes(first, last)
    if bound.check is not None:
        bound.check(first)
    op = find_op(f"layerfuse::{form.op.name}")
    args = [bound.args.get(argument.name, argument.default) for argument in form.op.args]
    if REQUIRED in args or op is None:
        raise Unmatched(f"the graph gives no value for an argument of {form.op.name}")
    narrow = [i for i, each in enumerate(form.op.args) if isinstance(each, StaticScale) and not _is_float32(args[i])]
    try:
        with torch.no_grad():
            values = [val_of(arg) for arg in args]
            val = op(*(each.float() if i in narrow else each for i, each in enumerate(values)))
    except (TypeError, ValueError, RuntimeError) as error:
        raise Unmatched(str(error).partition("\n")[0]) from None
    _check_results(fusion, form, bound, val)
    check_kernel(form, values)
    reason = hoist((node for arg in args for node in needed_by(arg)), before=first)
    if reason is not None:
        raise Unmatched(reason)
    for i in narrow:
        args[i] = _widened(args[i], first)
    results = _call(op, args, val, form, first)
    for name, node in bound.outs.items():
        result = results[name]
        if name in bound.views:
            with node.graph.inserting_before(first):
                result = view(node.graph, result, bound.views[name], {})
        if name in bound.orders:
            result = _ordered(node, result, bound.orders[name], first)
        result.meta = dict(node.meta)
        node.replace_all_uses_with(result)
        moved[node] = result
    more = [node for finish in bound.finish for node in finish(results)]
    erase_unused((*more, *bound.nodes))


def _bind(fusion: Fusion, form: Form, use: SiteMatch, plan: Plan, moved: dict[Node, Node]) -> Binding:
    bound = Binding(name=form.op.name, chain=form.chain, use=use, plan=plan, moved=moved)
    for step in bound.steps():
        try:
            step.bind(bound)
        except Unmatched:
            raise
        except FOREIGN as error:
            if fusion.owner == LAYERFUSE:
                raise
            raise Unmatched(f"{type(step).__name__} of {fusion.owner} raised {said(error)}") from None
    return bound


def _check_results(fusion: Fusion, form: Form, bound: Binding, val: Any) -> None:
    """What a step of another package may have named wrongly: each result takes the place of a tensor of its dtype and shape."""
    results = dict(zip((each.name for each in form.op.results), val if isinstance(val, tuple) else (val,), strict=True))
    main = main_step(form.chain)
    for step in form.chain:
        if step.is_ours or bound.finish or bound.is_inner(step):
            continue
        for name in step.outs:
            node = bound.outs.get(name)
            what = None if node is None else value(node)
            if not isinstance(what, torch.Tensor) or (node is bound.result and step is not main):
                raise Unmatched(f"{type(step).__name__} of {fusion.owner} does not say what {name} takes the place of")
            same = name in bound.views or same_shape(what.shape, results[name].shape)
            if not same or what.dtype != results[name].dtype:
                raise Unmatched(
                    f"{type(step).__name__} of {fusion.owner}: {name} is {results[name].dtype} {tuple(results[name].shape)}, and "
                    f"{node}, whose place it would take, {what.dtype} {tuple(what.shape)}"
                )


def _check_alike(bound: Binding, form: Form) -> None:
    """What the op's own check would say less clearly, and what only the graph knows."""
    rows = [argument for argument in form.op.args if isinstance(argument, Rows)]
    one, *others = (val_of(bound.args[argument.name]) for argument in rows)
    for other in others:
        if one.dtype != other.dtype or one.device != other.device:
            raise Unmatched(f"the inputs differ: {one.dtype} on {one.device} and {other.dtype} on {other.device}")
        end = -2 if rows[0].own_heads else -1
        if not same_shape(one.shape[:end], other.shape[:end]):
            raise Unmatched(f"the leading dimensions differ: {tuple(one.shape[:end])} and {tuple(other.shape[:end])}")
    for name, node in bound.outs.items():
        # Views that follow were traced on these strides; the op's results are contiguous.
        order = bound.orders.get(name)
        if not is_contiguous(value(node)) and (order is None or not is_contiguous(_back(value(node), order))):
            raise Unmatched(f"{node} is not contiguous, as it comes from a transposed tensor")


def _ordered(node: Node, result: Node, order: tuple[int, ...], first: Node) -> Node:
    """A result with its dimensions in the order of the node that it replaces; copied where that node lies in memory in this order, too."""
    back = _back(value(node), order)
    result.meta = {"val": back.contiguous()}
    with node.graph.inserting_before(first):
        turned = node.graph.call_function(torch.ops.aten.permute.default, (result, list(order)))
        if is_contiguous(back):
            return turned
        turned.meta = {"val": value(result).permute(order)}
        kept = {"memory_format": torch.contiguous_format}
        return node.graph.call_function(torch.ops.aten.clone.default, (turned,), kept)


def _back(val: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """A tensor with its dimensions in the order that they were in."""
    return val.permute([order.index(i) for i in range(len(order))])


def _span(bound: Binding) -> tuple[Node, Node]:
    """The first and the last of the nodes that the op replaces."""
    ends = sorted([*bound.outs.values(), *bound.last])
    return ends[0], ends[-1]


def _call(op: Any, args: list[Any], val: Any, form: Form, before: Node) -> dict[str, Node]:
    """One call of the op in front of a node, and its results by name."""
    graph, values = before.graph, val if isinstance(val, tuple) else (val,)
    meta = {key: before.meta[key] for key in _COPIED_META if key in before.meta}
    with graph.inserting_before(before):
        given = [arg.emit(graph, meta) if isinstance(arg, Made) else arg for arg in args]
        called = graph.call_function(op, tuple(given))
        results = [called]
        if isinstance(val, tuple):
            results = [graph.call_function(operator.getitem, (called, i)) for i in range(len(values))]
    called.meta = {**meta, "val": val}
    for result, each in zip(results, values, strict=True):
        result.meta = {**meta, "val": each}
    return dict(zip((declared.name for declared in form.op.results), results, strict=True))


def _is_float32(scale: Any) -> bool:
    return val_of(scale).dtype == torch.float32  # type: ignore[no-any-return]


def _widened(scale: Node, before: Node) -> Node:
    """A static scale of another float in float32, as kernels read it."""
    with before.graph.inserting_before(before):
        wide = before.graph.call_function(torch.ops.prims.convert_element_type.default, (scale, torch.float32))
    wide.meta["val"] = value(scale).float()
    return wide


def erase_unused(nodes: Iterable[Node]) -> None:
    """Take those of the nodes out of their graph that nothing reads."""
    for node in sorted(set(nodes), reverse=True):
        if node.op == "call_function" and not node.users:
            node.graph.erase_node(node)
