"""Several ranks rewrite their graphs: what a fused all-reduce needs beyond its own rank.

Every rank must fuse the same all-reduces, and the GPU must have a kernel for them: the reference is for checking.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph

from .. import backends
from ..catalog import FUSIONS
from ..chain import Form
from ..declare import REFERENCE
from ..match.calls import call_of
from ..match.collectives import ALL_REDUCES
from ..match.errors import Unmatched
from ..match.index import GraphIndex
from ..ops.agreement import agree
from ..ops.library import case_maker, case_type
from ..planning import Plan
from ..report import GraphRecord

REDUCED = "all_reduce_add_rms_norm"
"""The plainest of the fused all-reduces: where it has a kernel, those with more behind the norm have it too."""


def groups_in(graph: Graph) -> tuple[str, ...]:
    """The process groups that a graph reduces over, in its order."""
    found: dict[str, None] = {}
    for call in map(call_of, GraphIndex(graph).calls(ALL_REDUCES)):
        op = ALL_REDUCES[call.name]
        with suppress(Unmatched):  # a group that no fused op can name either
            found[op.group_name(call[op.group])] = None
    return tuple(found)


def agree_on_graph(groups: Sequence[str], plan: Plan, record: GraphRecord) -> None:
    """Compare over each group which of a graph's all-reduces were fused. Ranks of a group compile the same graphs in turn.

    A graph that is compiled anew with the same decisions is not compared again: a rank may have to do that alone.

    Raises:
        RankDisagreementError: on every rank of the group, where they differ.
    """
    forms = {form.op.name for fusion in FUSIONS.values() if fusion.across_ranks for form in fusion.forms}
    lines = [
        f"{use.site}: {use.form if use.form in forms else 'its all-reduce is left as it is'}"
        for use in record.uses
        if use.form in forms or plan.site[use.site].reduced > 1
    ]
    for group in groups:
        agree(group, "the all-reduces of a graph", "\n".join(lines) or "none of them is fused")


def asks_ranks(plan: Plan) -> bool:
    """Whether it depends on what the ranks of a group find out together which chains of a plan are fused."""
    reduces = any(FUSIONS[decision.fusion].across_ranks for decision in plan.expected())
    return reduces and plan.target.vendor != "cpu"


def kernels_here(plan: Plan, group: str, dtype: torch.dtype, device: torch.device) -> tuple[str, ...]:
    """For each width of a plan's fused all-reduces, whether a kernel takes them here: what `check_kernel` will find.

    Sets up what such a kernel needs: all ranks of the group make this call. The answer is a part of the key of what is compiled.

    Args:
        plan: any.
        group: the name of the tensor-parallel group.
        dtype: of the model's activations.
        device: where it runs; nothing is asked on a CPU.
    """
    if device.type == "cpu" or not asks_ranks(plan):
        return ()
    fused = [decision for decision in plan.expected() if FUSIONS[decision.fusion].across_ranks]
    op, said = FUSIONS[REDUCED].op, []
    for width in sorted({plan.site[decision.site].norms[0].width for decision in fused}):
        case = case_type(op)(dtype=dtype, width=width, weight_dtype=dtype, group=group, weight_offset=0.0)
        said.append(f"{width} columns: {_kernel_for(op.name, case, device)[0]}")
    return tuple(said)


def _kernel_for(op: str, case: Hashable, device: torch.device) -> tuple[str | None, list[str]]:
    """The kernel that takes a case on this device, or None with the reasons why none does."""
    try:
        name, problem = backends.prepare(op, device, case)
    except backends.BackendError as error:
        return None, [str(error)]
    if name == REFERENCE:
        return None, [f"{name}: {why}" for name, why in backends.survey(op, device.type, case) if why is not None]
    return (name, []) if problem is None else (None, [f"{name}: {problem}"])


def check_kernel(form: Form, values: Sequence[Any]) -> None:
    """Check that some kernel takes a fused all-reduce on this device. `values`: the op's arguments, traced.

    Raises:
        Unmatched: none does; the shorter chain is faster than the reference.
    """
    device = values[0].device
    if device.type == "cpu" or not any(step.across_ranks for step in form.chain):
        return
    case = case_maker(form.op)(*values)
    with unset_fake_temporarily():  # setting a backend up makes real tensors
        name, reasons = _kernel_for(form.op.name, case, device)
    if name is None:
        raise Unmatched(f"no kernel of {form.op.name} runs here: {'; '.join(reasons)}")
