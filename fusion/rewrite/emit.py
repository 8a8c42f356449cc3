"""Putting one fused op in the place of a chain: its steps are matched, checked, and then replaced all at once.

Nothing changes in the graph before every check has passed.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from ...adapters.specs import NormSpec
from ..chain import Form, Fusion
from ..compose import quantised_step
from ..declare import REQUIRED, Rows, StaticScale
from ..match.adds import find_add
from ..match.errors import Unmatched
from ..match.norms import FoundNorm
from ..match.pads import find_pads, is_padded
from ..match.patterns import find_op
from ..match.values import is_contiguous, same_shape, value
from ..planning import Plan
from ..sites import Site
from ..steps import Add, AllReduce, GatedNorm, Norm, Pad, Quant, SiluMul
from .binding import Binding, needed_by, val_of
from .gated import bind_gated_norm, bind_product, main_result
from .hoisting import check_writes, hoist
from .layouts import Made, view
from .pad_results import PaddedResults
from .quant_choice import all_of, some_of
from .ranks import check_kernel
from .reduced import bind_all_reduce
from .uses import SiteUse

_COPIED_META = ("nn_module_stack", "stack_trace", "source_fn_stack", "original_aten", "from_node", "seq_nr")


def replace(fusion: Fusion, use: SiteUse, plan: Plan, moved: dict[Node, Node]) -> tuple[Form, str | None]:
    """Replace a site's chain by the fusion's op, in the form that the graph calls for.

    Args:
        fusion: what to put there.
        use: the site, and what of it was found in the graph.
        plan: says how the site is quantised, and for which target.
        moved: nodes that earlier replacements took out -> what stands for them; added to.

    Returns:
        The form, and why a padding of the norm stayed behind it; None where none did.

    Raises:
        Unmatched: a step is not there, or the graph forbids the replacement. Nothing has been replaced then.
    """
    problem = Unmatched(f"{fusion.name} has no form")
    left: str | None = None
    for form in fusion.forms:
        pads = any(isinstance(step, Pad) for step in form.chain) and is_padded(use.norms[0].out)
        try:
            _replace(form, use, plan, moved)
        except Unmatched as reason:
            problem = reason
            left = str(reason) if pads else left
        else:
            return form, left
    raise problem


def why_not_there(fusion: Fusion, use: SiteUse, plan: Plan, moved: dict[Node, Node]) -> str | None:
    """Which step of the fusion is not in the graph, as `replace` would say it, or None where all are. The graph stays as it is."""
    problem: str | None = None
    for form in fusion.forms:
        try:
            _bind(form, use, plan, moved)
        except Unmatched as reason:
            problem = str(reason)
        else:
            return None
    return problem


def _replace(form: Form, use: SiteUse, plan: Plan, moved: dict[Node, Node]) -> None:
    bound = _bind(form, use, plan, moved)
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
        result.meta = dict(node.meta)
        node.replace_all_uses_with(result)
        moved[node] = result
    more = [] if bound.finish is None else list(bound.finish(results))
    erase_unused((*more, *bound.nodes))


def _bind(form: Form, use: SiteUse, plan: Plan, moved: dict[Node, Node]) -> Binding:
    bound = Binding()
    _check_ops(form, use)
    norms, ends = iter(zip(use.norms, use.site.norms, strict=True)), any(isinstance(s, Quant | Pad) for s in form.chain)
    inner = quantised_step(form.chain) if ends else None
    reduce = next((step for step in form.chain if isinstance(step, AllReduce)), None)
    for step in form.chain:
        if isinstance(step, Norm):
            _bind_norm(bound, step, *next(norms), inner=step is inner and not step.kept, moved=moved)
        elif isinstance(step, GatedNorm):
            bind_gated_norm(bound, step, *next(norms), use.site, inner=step is inner, moved=moved)
        elif isinstance(step, SiluMul):
            bind_product(bound, step, use, inner=step is inner, moved=moved)
    for step in form.chain:
        if isinstance(step, Add):
            # Of what the norm reads, which is bound by now.
            found = use.norms[0].add or find_add(bound.args[step.x])
            if reduce is None:
                bound.args |= {
                    step.x: moved.get(found.x, found.x),
                    step.residual: moved.get(found.residual, found.residual),
                }
            else:
                bind_all_reduce(
                    bound, reduce, step, found, found.out or min(use.norms[0].nodes), moved, use.site.reduced
                )
            if found.out is not None:
                bound.outs[step.out] = found.out
                bound.nodes.append(found.out)
        elif isinstance(step, Quant):
            main = quantised_step(form.chain)
            kept = isinstance(main, Norm) and main.kept
            _bind_quant(bound, step, main_result(bound, use), plan, use.site, kept=kept)
        elif isinstance(step, Pad):
            _bind_pad(bound, step, use.norms[0])
    return bound


def _check_ops(form: Form, use: SiteUse) -> None:
    """What an engine's op does beside the norm must be in the chain, and more of the chain must be left."""
    for norm in use.norms:
        if norm.add is not None and not any(isinstance(step, Add) for step in form.chain):
            raise Unmatched(f"{norm.out} adds a residual itself ({norm.form}), and {form.op.name} does not")
        if norm.quant is not None and len(use.norms) == 1:
            raise Unmatched(f"the engine's own op norms and quantises already ({norm.form})")


def _bind_norm(
    bound: Binding, step: Norm, norm: FoundNorm, spec: NormSpec, *, inner: bool, moved: dict[Node, Node]
) -> None:
    if norm.quant is not None:
        _bind_quantised(bound, norm, inner=inner)
    if norm.weight_offset and step.weight_offset is None:
        raise Unmatched(f"{norm.out} adds {norm.weight_offset:g} to its weight, which the fused op does not")
    check_writes(min(norm.nodes), norm.out)
    x = _unwidened(norm.x) if inner else norm.x
    # The spec's epsilon: a graph may have it rounded to float32.
    bound.args |= {step.x: moved.get(x, x), step.weight: norm.weight, step.epsilon: spec.epsilon}
    if step.weight_offset is not None:
        bound.args[step.weight_offset] = norm.weight_offset
    bound.nodes += norm.nodes
    if not inner:
        bound.outs[step.out] = norm.out


def _unwidened(x: Node) -> Node:
    """What was widened to float32: torch 2.11 leaves out the rounding between a norm and its quantisation."""
    source = x.args[0] if x.target is torch.ops.prims.convert_element_type.default else None
    widened = isinstance(source, Node) and value(source).dtype in (torch.bfloat16, torch.float16)
    return source if widened and value(x).dtype == torch.float32 else x


def _bind_quantised(bound: Binding, norm: FoundNorm, *, inner: bool) -> None:
    """A norm whose op quantises it too."""
    if norm.quant is None or not inner:
        raise Unmatched(f"{norm.form} gives the norm quantised only")
    bound.quantised = (norm.x, norm.quant)


def _bind_pad(bound: Binding, step: Pad, norm: FoundNorm) -> None:
    found = find_pads(norm.out)
    plan = PaddedResults(found, norm.out)
    bound.args[step.width] = found.width
    bound.last += [norm.out, *found.pads]
    bound.finish = lambda given: plan.replace(given[step.out])


def _bind_quant(bound: Binding, step: Quant, out: Node, plan: Plan, site: Site, *, kept: bool) -> None:
    quant = plan.config.quant_at(site)
    if quant is None:
        raise Unmatched("the plan declares no quantisation here")
    if bound.quantised is not None:
        rows, already = bound.quantised
        chosen = all_of(rows, quant, plan.target, [already])
    else:
        bound.last.append(out)
        chosen = some_of(out, quant, plan.target) if kept else all_of(out, quant, plan.target, like=bound.like)
    first = chosen[0][0]
    inside = sorted({node for each, _ in chosen for node in each.nodes})
    bound.last += [inside[0], inside[-1]]
    bound.nodes += inside
    bound.args[step.dtype] = first.dtype
    if first.scale is not None:
        bound.args[step.scale] = first.scale
    else:
        bound.args[step.use_ue8m0] = quant.use_ue8m0
    if quant.group_size is not None:
        bound.args |= {step.group_size: quant.group_size, step.column_major: quant.column_major}
        if step.tma_aligned is not None:
            bound.args[step.tma_aligned] = quant.tma_aligned

    def finish(given: dict[str, Node]) -> list[Node]:
        return [node for _, result in chosen for node in result.replace(given[step.out], given.get(step.scales))]

    bound.finish = finish


def _check_alike(bound: Binding, form: Form) -> None:
    """What the op's own check would say less clearly, and what only the graph knows."""
    rows = [bound.args[argument.name] for argument in form.op.args if isinstance(argument, Rows)]
    one = val_of(rows[0])
    for other in map(val_of, rows[1:]):
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
