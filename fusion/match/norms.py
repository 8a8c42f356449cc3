"""Finding norms in a graph: every place where an RMSNorm is computed, and what only resembles one.

Nothing is rewritten here, and nothing is known of layers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from .arithmetic import ADDS, aten, convert, squared, unrounded
from .found import FoundNorm, PartialMatch
from .index import GraphIndex
from .norm_ops import norm_ops
from .values import is_last, last_width, value
from .written_out import read_norm

_ON_THE_WAY = (aten.mul.Tensor, convert)
"""What may lie between a norm's reciprocal root and its result."""


def find_norms(index: GraphIndex) -> tuple[list[FoundNorm], list[PartialMatch]]:
    """The norms of a graph in its order, and what resembles one."""
    found: dict[Node, FoundNorm] = {}
    near: list[PartialMatch] = []
    for root in index.graph.find_nodes(op="call_function", target=aten.rsqrt.default):
        norm = read_norm(root)
        if norm is not None:
            found[norm.out] = norm
        elif (resembling := _from_rsqrt(root)) is not None:
            near.append(resembling)
    for each in norm_ops(index):
        if isinstance(each, FoundNorm):
            found.setdefault(each.out, each)
        else:
            near.append(each)
    return sorted(found.values(), key=lambda norm: norm.out), near


# ---- what resembles a norm -------------------------------------------------------------------------------------------


def _from_rsqrt(rsqrt: Node) -> PartialMatch | None:
    add = rsqrt.args[0]
    if not isinstance(add, Node) or add.target not in ADDS:
        return None
    mean, epsilon = add.args[0], add.args[1]
    if not isinstance(mean, Node) or mean.target is not aten.mean.dim:
        return None
    shared = next((why for node in (rsqrt, add, mean) if (why := _other_reader(node)) is not None), None)
    return PartialMatch(
        root=rsqrt,
        width=last_width(mean.args[0]),
        epsilon=epsilon if isinstance(epsilon, Node) else float(epsilon) if isinstance(epsilon, float | int) else None,
        shared=shared,
        x=_normed_by(mean),
        weights=tuple(weight for node in _results(rsqrt) for weight in _vectors(node)),
    )


def _normed_by(mean: Node) -> Node | None:
    """What a mean of squares over the last dimension is of, before it is widened."""
    square, dims = mean.args[:2]
    x = unrounded(squared(square))
    return x if isinstance(x, Node) and is_last(dims, value(x)) else None


def _results(root: Node) -> list[Node]:
    """What may be the result of a norm, the farthest from its reciprocal root first."""
    found: list[Node] = []
    step = [root]
    for _ in range(4):
        step = [user for node in step for user in node.users if user.target in _ON_THE_WAY]
        found += step
    return list(dict.fromkeys(reversed(found)))


def _vectors(node: Node) -> Iterator[Node]:
    for source in node.all_input_nodes:
        val = value(source)
        if isinstance(val, torch.Tensor) and val.dim() == 1:
            yield source


def _other_reader(node: Node) -> str | None:
    if len(node.users) < 2:
        return None
    if any(user.op == "output" for user in node.users):
        return (
            f"its intermediate {node} is a result of the graph, saved for the backward pass; fuse for inference, "
            "under torch.no_grad() or torch.inference_mode()"
        )
    return f"its intermediate {node} has {len(node.users)} readers, and a fused op does not compute it"
