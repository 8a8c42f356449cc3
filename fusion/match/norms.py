"""Finding norms in a graph: every place where an RMSNorm is computed, and what only resembles one.

Nothing is rewritten here, and nothing is known of layers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch._inductor.pattern_matcher import Match, is_match
from torch.fx import Graph, Node

from .activations import unrounded
from .found import FoundNorm, PartialMatch, epsilon_in_words
from .norm_ops import norm_ops
from .patterns import Form, decomposed
from .values import is_last, last_width, same, value

aten = torch.ops.aten
_convert = torch.ops.prims.convert_element_type.default
_ADDS = (aten.add.Tensor, aten.add.Scalar)
_SQUARES = (aten.pow.Tensor_Scalar, aten.mul.Tensor)
_ON_THE_WAY = (aten.mul.Tensor, _convert)
"""What may lie between a norm's reciprocal root and its result."""


def find_norms(graph: Graph) -> tuple[list[FoundNorm], list[PartialMatch]]:
    """The norms of a graph in its order, and what resembles one."""
    found: dict[Node, FoundNorm] = {}
    near: list[PartialMatch] = []
    for root in graph.find_nodes(op="call_function", target=aten.rsqrt.default):
        norm = _first_match(root, decomposed())
        if norm is not None:
            found[norm.out] = norm
        elif (resembling := _from_rsqrt(root)) is not None:
            near.append(resembling)
    for each in norm_ops(graph):
        if isinstance(each, FoundNorm):
            found.setdefault(each.out, each)
        else:
            near.append(each)
    return sorted(found.values(), key=lambda norm: norm.out), near


def _results(root: Node) -> list[Node]:
    """What may be the result of a norm, the farthest from its reciprocal root first."""
    found: list[Node] = []
    step = [root]
    for _ in range(4):
        step = [user for node in step for user in node.users if user.target in _ON_THE_WAY]
        found += step
    return list(dict.fromkeys(reversed(found)))


def _first_match(root: Node, forms: tuple[Form, ...]) -> FoundNorm | None:
    for out in _results(root):
        for form in forms:
            if out.target not in form.pattern.fns:
                continue
            match = form.pattern.match(out)
            # A norm of this norm's result is farther, and has a root of its own.
            if is_match(match) and root in match.nodes:
                norm = _checked(match, form)
                if norm is not None:
                    return norm
    return None


def _checked(match: Match, form: Form) -> FoundNorm | None:
    bound = match.kwargs
    epsilon, out = bound["epsilon"], match.nodes[-1]
    x, weight, result = (value(node) for node in (bound["x"], bound["weight"], out))
    if not all(isinstance(v, torch.Tensor) for v in (x, weight, result)):
        return None
    if isinstance(epsilon, bool) or not isinstance(epsilon, float | int):
        return None
    width = last_width(bound["x"])
    if width is None or weight.dim() != 1 or not same(weight.shape[0], width):
        return None
    if bound.get("width", width) != width:
        return None
    if "dim" in bound:
        if not is_last(bound["dim"], x):
            return None
        # The plain form accumulates in x's own dtype; below float32 that is a different norm.
        low = x.dtype in (torch.bfloat16, torch.float16)
        if low != ("back" in bound) or not (low or x.dtype in (torch.float32, torch.float64)):
            return None
        if low and bound["back"] != x.dtype:
            return None
    # A float32 weight on a bfloat16 input widens the result in some forms; a fused op keeps the input's dtype.
    if result.dtype != x.dtype or weight.device != x.device:
        return None
    return FoundNorm(
        width=width,
        epsilon=float(epsilon),
        weight_offset=form.weight_offset,
        form=form.name,
        x=bound["x"],
        weight=bound["weight"],
        out=out,
        nodes=tuple(match.nodes),
    )


# ---- what resembles a norm -------------------------------------------------------------------------------------------


def _from_rsqrt(rsqrt: Node) -> PartialMatch | None:
    add = rsqrt.args[0]
    if not isinstance(add, Node) or add.target not in _ADDS:
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
    if not isinstance(square, Node) or square.target not in _SQUARES:
        return None
    x, by = map(unrounded, square.args)
    if by is not x and (square.target, by) != (_SQUARES[0], 2):
        return None
    return x if isinstance(x, Node) and is_last(dims, value(x)) else None


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


__all__ = ["FoundNorm", "PartialMatch", "epsilon_in_words", "find_norms"]
