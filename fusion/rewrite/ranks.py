"""Several ranks rewrite their graphs: what a fused all-reduce needs beyond its own rank.

Every rank must fuse the same all-reduces, and the GPU must have a kernel for them: the reference is for checking.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph

from .. import backends
from ..catalog import FUSIONS
from ..chain import Form
from ..match.calls import call_of, name_of_op
from ..match.collectives import ALL_REDUCES
from ..match.errors import Unmatched
from ..ops.agreement import agree
from ..ops.library import case_maker
from ..plan import Plan
from ..report import GraphRecord
from ..steps import AllReduce


def groups_in(graph: Graph) -> tuple[str, ...]:
    """The process groups that a graph reduces over, in its order."""
    found: dict[str, None] = {}
    for node in graph.nodes:
        op = ALL_REDUCES.get(name_of_op(node) or "") if node.op == "call_function" else None
        if op is not None:
            try:
                found[op.group_name(call_of(node)[op.group])] = None
            except Unmatched:
                continue  # a group that no fused op can name either
    return tuple(found)


def agree_on_graph(groups: Sequence[str], plan: Plan, record: GraphRecord) -> None:
    """Compare over each group which of a graph's all-reduces were fused. Ranks of a group compile the same graphs in turn.

    A graph that is compiled anew with the same decisions is not compared again: a rank may have to do that alone.

    Raises:
        RankDisagreementError: on every rank of the group, where they differ.
    """
    forms = {form.op.name for fusion in FUSIONS.values() if fusion.all_reduce is not None for form in fusion.forms}
    lines = [
        f"{use.site}: {use.form if use.form in forms else 'its all-reduce is left as it is'}"
        for use in record.uses
        if use.form in forms or plan.site[use.site].reduced > 1
    ]
    for group in groups:
        agree(group, "the all-reduces of a graph", "\n".join(lines) or "none of them is fused")


def check_kernel(form: Form, values: Sequence[Any]) -> None:
    """Check that some kernel takes a fused all-reduce on this device. `values`: the op's arguments, traced.

    Raises:
        Unmatched: none does; the shorter chain is faster than the reference.
    """
    device = values[0].device
    if device.type == "cpu" or not any(isinstance(step, AllReduce) for step in form.chain):
        return
    case = case_maker(form.op)(*values)
    with unset_fake_temporarily():  # setting a backend up makes real tensors
        name, problem = backends.prepare(form.op.name, device, case)
        reasons = [f"{name}: {problem}"]
        if name == "reference":
            several = backends.survey(form.op.name, device.type, case)
            reasons = [f"{name}: {why}" for name, why in several if why is not None]
        elif problem is None:
            return
    raise Unmatched(f"no kernel of {form.op.name} runs here: {'; '.join(reasons)}")
