"""Finding the all-reduce in front of a residual add: this rank's part of the sum, and the process group that it goes over.

Views, copies and waits in between are looked through, as long as nothing but the add reads them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from attrs import frozen
from torch.fx import Node

from .adds import FoundAdd
from .arithmetic import aten, convert
from .calls import call_of, name_of_op
from .errors import Unmatched
from .provenance import ROW_PRESERVING
from .values import same_shape, value

_WAIT = "_c10d_functional::wait_tensor"


class AllReduceOp(NamedTuple):
    """Where the parts of an all-reduce are among the arguments of an op."""

    group: int
    group_name: Callable[[Any], str]
    "From what the graph says of the group to its name in torch.distributed."
    reduce: int | None = None
    "The argument that says how; None: it sums."
    in_place: bool = False


@frozen(kw_only=True, eq=False)
class FoundAllReduce:
    """An all-reduce, or the sum of several over one group, which is the all-reduce of their parts' own sum."""

    parts: tuple[Node, ...]
    "What this rank gives to the sum, in whatever leading dimensions."
    residual: Node
    "What the add adds to it."
    group: str
    launches: tuple[Node, ...]
    nodes: tuple[Node, ...]
    "Everything from the launches to the add, which reads it alone."


def find_all_reduce(add: FoundAdd) -> FoundAllReduce:
    """The all-reduce on one side of an add, what joins the stream first.

    Raises:
        Unmatched: neither side is the sum over a process group, or one is and cannot be replaced.
    """
    if add.x is add.residual:
        raise Unmatched(f"{add.x} is added to itself")
    problem: Unmatched | None = None
    for x, residual in ((add.x, add.residual), (add.residual, add.x)):
        try:
            found = _reduced(x)
        except Unmatched as reason:
            problem = problem or reason
            continue
        if found is not None:
            return FoundAllReduce(residual=residual, **found._asdict())
    origins = [[*_path(side)][-1] for side in (add.x, add.residual)]
    given = (
        "; both are inputs of the graph: it is in another one" if all(o.op == "placeholder" for o in origins) else ""
    )
    raise problem or Unmatched(
        f"nothing is reduced in front of the add: neither {add.x} nor {add.residual} is the result of an all-reduce{given}"
    )


class _Reduced(NamedTuple):
    parts: tuple[Node, ...]
    group: str
    launches: tuple[Node, ...]
    nodes: tuple[Node, ...]


def _reduced(node: Node) -> _Reduced | None:
    """The all-reduce that a tensor is the result of; None where it is none."""
    path = [*_path(node)]
    last = path[-1]
    if last.target is aten.add.Tensor:
        return _sum_of_several(path)
    if last.target is convert and _launch(last.args[0]) is not None:
        before, after = value(last.args[0]).dtype, value(last).dtype
        raise Unmatched(f"{_launch(last.args[0])} sums in {before}, and the add is in {after}")
    op = ALL_REDUCES.get(name_of_op(last) or "")
    if op is None:
        return None
    waits = _check_readers(path, last)
    call = call_of(last)
    how = "sum" if op.reduce is None else str(call[op.reduce]).lower()
    if how != "sum":
        raise Unmatched(f"{last} reduces by {how}, and the fused op sums")
    part = call[0]
    if op.in_place:
        _check_owned(part, last)
    return _Reduced((part,), op.group_name(call[op.group]), (last,), (*path, *waits))


def _path(node: Node) -> Iterator[Node]:
    """A tensor and those before it with the same elements in the same order, back to what computes them."""
    while True:
        yield node
        before: Any = None
        if node.target in ROW_PRESERVING or name_of_op(node) == _WAIT:
            before = node.args[0]
        elif node.target is aten.copy.default and _alike(node.args[1], node):
            # What is left of a sum that was copied back into the tensor that held the part.
            before = node.args[1]
        if not isinstance(before, Node):
            return
        node = before


def _launch(node: Any) -> Node | None:
    """The all-reduce behind a tensor, whoever reads it on the way."""
    if not isinstance(node, Node):
        return None
    *_, last = _path(node)
    return last if name_of_op(last) in ALL_REDUCES else None


def _sum_of_several(path: list[Node]) -> _Reduced | None:
    """The sum of shared and routed experts, say, where each was reduced by itself."""
    total = path[-1]
    a, b = total.args
    if any(len(_readers(node)) != 1 for node in path):
        # The residual stream, which others read: no sum that is looked into, unless both sides were reduced just before.
        if None not in (_launch(a), _launch(b)):
            _check_readers(path, total)
        return None
    if total.kwargs.get("alpha", 1) != 1:
        return None
    sides = [_reduced(side) if isinstance(side, Node) and _alike(side, total) else None for side in (a, b)]
    one, other = sides
    if one is None and other is None:
        return None
    if one is None or other is None:
        alone = next(side for side, found in zip((a, b), sides, strict=True) if found is None)
        reduced = (one or other).launches[0]  # type: ignore[union-attr]
        raise Unmatched(
            f"{alone} is added to the all-reduce {reduced} before the residual is, and is not reduced itself"
        )
    if one.group != other.group:
        raise Unmatched(f"{total} adds all-reduces over two groups, {one.group!r} and {other.group!r}")
    return _Reduced(
        (*one.parts, *other.parts), one.group, (*one.launches, *other.launches), (*path, *one.nodes, *other.nodes)
    )


def _alike(node: Any, other: Node) -> bool:
    one, wanted = value(node), value(other)
    return isinstance(one, torch.Tensor) and one.dtype == wanted.dtype and same_shape(one.shape, wanted.shape)


def _readers(node: Node) -> list[Node]:
    """What reads a tensor; waiting for it is not reading it."""
    return [user for user in node.users if user.users or name_of_op(user) != _WAIT]


def _check_readers(path: list[Node], launch: Node) -> list[Node]:
    """The waits for these tensors that nothing reads.

    Raises:
        Unmatched: something else reads one of them.
    """
    for node in path:
        several = len(_readers(node))
        if several != 1:
            raise Unmatched(f"{node} holds the sum {launch} and has {several} readers; the fused op does not give it")
    return [user for node in path for user in node.users if user not in _readers(node)]


def _check_owned(part: Node, launch: Node) -> None:
    """Check that nobody sees that a sum is no longer written over its part."""
    node = part
    while True:
        if node.op != "call_function" or len(node.users) != 1:
            who = "is an input of the graph" if node.op != "call_function" else "has other readers"
            raise Unmatched(f"{launch} writes the sum over {node}, which {who}")
        if not _is_view(node):
            return
        node = node.all_input_nodes[0]


def _is_view(node: Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return bool(node.all_input_nodes)  # taking a result apart
    return any(result.alias_info is not None for result in node.target._schema.returns)


def _torch_group(group: Any) -> str:
    if isinstance(group, str):
        return group
    raise Unmatched(f"the graph holds the process group as {group!r:.60}, and the fused op takes its name")


def _vllm_group(name: Any) -> str:
    """From vLLM's own name of a group to the one in torch.distributed. vLLM is never imported."""
    state = sys.modules.get("vllm.distributed.parallel_state")
    if state is None:
        raise Unmatched(f"{name!r} is a group of vLLM's, whose parallel_state is not loaded in this process")
    reference = state._groups.get(name)
    group = None if reference is None else reference()
    if group is None:
        raise Unmatched(f"vLLM has no group called {name!r}; known: {', '.join(state._groups) or 'none'}")
    return str(group.device_group.group_name)


ALL_REDUCES: dict[str, AllReduceOp] = {
    # torch.distributed.all_reduce, functional collectives and DTensor's redistribution from Partial to Replicate.
    "_c10d_functional::all_reduce": AllReduceOp(reduce=1, group=2, group_name=_torch_group),
    "_c10d_functional::all_reduce_": AllReduceOp(reduce=1, group=2, group_name=_torch_group, in_place=True),
    # vllm/distributed/parallel_state.py
    "vllm::all_reduce": AllReduceOp(group=1, group_name=_vllm_group),
}
"""The all-reduces that graphs hold."""
