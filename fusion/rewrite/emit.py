"""Putting one fused op in the place of a chain: its steps are matched, checked, and then replaced all at once.

Nothing changes in the graph before every check has passed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from attrs import define, field
from torch.fx import Node

from ..chain import Fusion, Quant
from ..declare import REQUIRED, Rows
from ..match.adds import find_add
from ..match.errors import Unmatched
from ..match.norms import FoundNorm
from ..match.patterns import find_op
from ..match.quants import find_quants
from ..match.values import is_contiguous, same_shape, value
from ..plan import Plan
from ..sites import Site
from .hoisting import hoist, mutation_between
from .quant_results import Results, why_not_as_planned

_COPIED_META = ("nn_module_stack", "stack_trace", "source_fn_stack", "original_aten", "from_node", "seq_nr")


@define(kw_only=True, eq=False)
class Binding:
    """What a chain is in a graph: the op's arguments, and what takes the place of its results."""

    args: dict[str, Any] = field(factory=dict)
    "Argument -> node or constant."
    outs: dict[str, Node] = field(factory=dict)
    "Result -> the node that it replaces, of the same shape and dtype, contiguous."
    nodes: list[Node] = field(factory=list)
    "Everything that may be unread afterwards."
    last: list[Node] = field(factory=list)
    "Further nodes up to which nothing may write in place."
    finish: Callable[[dict[str, Node]], Iterable[Node]] | None = None
    "Replaces what is read in other shapes and layouts; returns nodes that may be unread afterwards."


def replace(fusion: Fusion, norms: tuple[FoundNorm, ...], plan: Plan, site: Site, moved: dict[Node, Node]) -> None:
    """Replace a site's chain by the fusion's op.

    Args:
        fusion: what to put there.
        norms: the site's, in order.
        plan: says how the site is quantised, and for which target.
        site: where it is.
        moved: nodes that earlier replacements took out -> what stands for them; added to.

    Raises:
        Unmatched: a step is not there, or the graph forbids the replacement. Nothing has been replaced then.
    """
    bound = _bind(fusion, norms, plan, site, moved)
    _check_alike(bound, fusion)
    first, last = _span(bound)
    writer = mutation_between(first, last)
    if writer is not None:
        raise Unmatched(f"{writer} writes in place between {first} and {last}, which would become one op")
    op = find_op(f"layerfuse::{fusion.op.name}")
    args = [bound.args.get(argument.name, argument.default) for argument in fusion.op.args]
    if REQUIRED in args or op is None:
        raise Unmatched(f"{fusion.name} binds no value for an argument of {fusion.op.name}")
    try:
        with torch.no_grad():
            val = op(*(value(arg) if isinstance(arg, Node) else arg for arg in args))
    except (TypeError, ValueError, RuntimeError) as error:
        raise Unmatched(str(error).partition("\n")[0]) from None
    reason = hoist((arg for arg in args if isinstance(arg, Node)), before=first)
    if reason is not None:
        raise Unmatched(reason)
    results = _call(op, args, val, fusion, first)
    for name, node in bound.outs.items():
        results[name].meta = dict(node.meta)
        node.replace_all_uses_with(results[name])
        moved[node] = results[name]
    more = [] if bound.finish is None else list(bound.finish(results))
    erase_unused((*more, *bound.nodes))


def _bind(fusion: Fusion, norms: tuple[FoundNorm, ...], plan: Plan, site: Site, moved: dict[Node, Node]) -> Binding:
    bound = Binding()
    inner = fusion.norms[0] if fusion.quant is not None else None
    for step, norm, spec in zip(fusion.norms, norms, site.norms, strict=True):
        if norm.weight_offset and step.weight_offset is None:
            raise Unmatched(f"{norm.out} adds {norm.weight_offset:g} to its weight, which {fusion.op.name} does not")
        # The spec's epsilon: a graph may have it rounded to float32.
        bound.args |= {step.x: moved.get(norm.x, norm.x), step.weight: norm.weight, step.epsilon: spec.epsilon}
        if step.weight_offset is not None:
            bound.args[step.weight_offset] = norm.weight_offset
        bound.nodes += norm.nodes
        if step is not inner:
            bound.outs[step.out] = norm.out
    if fusion.add is not None:
        found = find_add(bound.args[fusion.norms[0].x])
        bound.args |= {fusion.add.x: found.x, fusion.add.residual: found.residual}
        bound.outs[fusion.add.out] = found.out
        bound.nodes.append(found.out)
    if fusion.quant is not None:
        _bind_quant(bound, fusion.quant, norms[0], plan, site)
    return bound


def _bind_quant(bound: Binding, step: Quant, norm: FoundNorm, plan: Plan, site: Site) -> None:
    quant = plan.config.quant_at(site)
    if quant is None:
        raise Unmatched("the plan declares no quantisation here")
    like = value(norm.out)
    if like.dtype == torch.float64:
        raise Unmatched(f"{norm.out} is torch.float64; quantisation starts from float32, bfloat16 or float16")
    found = find_quants(norm.out)
    results = [Results(each, like) for each in found]
    for each, result in zip(found, results, strict=True):
        reason = why_not_as_planned(each, result, like.shape[-1], quant, plan.target)
        if reason is not None:
            raise Unmatched(reason)
    inside = sorted({node for each in found for node in each.nodes})
    bound.last += [norm.out, inside[-1]]
    bound.args |= {step.dtype: found[0].dtype, step.use_ue8m0: quant.use_ue8m0}
    if quant.group_size is not None:
        bound.args |= {step.group_size: quant.group_size, step.column_major: quant.column_major}
    bound.nodes += inside

    def finish(given: dict[str, Node]) -> list[Node]:
        return [node for result in results for node in result.replace(given[step.out], given[step.scales])]

    bound.finish = finish


def _check_alike(bound: Binding, fusion: Fusion) -> None:
    """What the op's own check would say less clearly, and what only the graph knows."""
    rows = [bound.args[argument.name] for argument in fusion.op.args if isinstance(argument, Rows)]
    one = value(rows[0])
    for other in map(value, rows[1:]):
        if one.dtype != other.dtype or one.device != other.device:
            raise Unmatched(f"the inputs differ: {one.dtype} on {one.device} and {other.dtype} on {other.device}")
        if not same_shape(one.shape[:-1], other.shape[:-1]):
            raise Unmatched(f"the leading dimensions differ: {tuple(one.shape[:-1])} and {tuple(other.shape[:-1])}")
    for node in bound.outs.values():
        # Views that follow were traced on these strides; the op's results are contiguous.
        if not is_contiguous(value(node)):
            raise Unmatched(f"{node} is not contiguous, as it comes from a transposed tensor")


def _span(bound: Binding) -> tuple[Node, Node]:
    """The first and the last of the nodes that the op replaces."""
    ends = sorted([*bound.outs.values(), *bound.last])
    return ends[0], ends[-1]


def _call(op: Any, args: list[Any], val: Any, fusion: Fusion, before: Node) -> dict[str, Node]:
    """One call of the op in front of a node, and its results by name."""
    graph, values = before.graph, val if isinstance(val, tuple) else (val,)
    meta = {key: before.meta[key] for key in _COPIED_META if key in before.meta}
    with graph.inserting_before(before):
        called = graph.call_function(op, tuple(args))
        results = [called]
        if isinstance(val, tuple):
            results = [graph.call_function(operator.getitem, (called, i)) for i in range(len(values))]
    called.meta = {**meta, "val": val}
    for result, each in zip(results, values, strict=True):
        result.meta = {**meta, "val": each}
    return {declared.name: result for declared, result in zip(fusion.op.results, results, strict=True)}


def erase_unused(nodes: Iterable[Node]) -> None:
    """Take those of the nodes out of their graph that nothing reads."""
    for node in sorted(set(nodes), reverse=True):
        if not node.users:
            node.graph.erase_node(node)
