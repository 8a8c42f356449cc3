"""Why an expected norm was not found: what else in the graph looks like it, and what is wrong with it.

A near norm is anything that takes a reciprocal square root of a mean; it is described in one sentence.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from attrs import frozen
from torch.fx import Graph, Node

from ...adapters.specs import MLASpec, NormSpec
from .norm_sites import value
from .patterns import epsilon_literals, find_op, loaded_ops

aten = torch.ops.aten
_ADDS = (aten.add.Tensor, aten.add.Scalar)


@frozen(kw_only=True, eq=False)
class NearNorm:
    """Something that computes a norm, known form or not."""

    root: Node
    "The rsqrt, or the op itself."
    width: int | None
    epsilon: float | Node | None
    shared: str | None
    "Who else reads an intermediate of it, or None."

    def describe(self) -> str:
        """The norm in words."""
        return f"{self.root} norms width {self.width} with {_epsilon(self.epsilon)}"


def _epsilon(epsilon: float | Node | None) -> str:
    if isinstance(epsilon, Node):
        return (
            f"an epsilon that is an input of the graph ({epsilon}): dynamic=True traces a module's floats as inputs, "
            "unless torch._dynamo.config.specialize_float is True"
        )
    return "no epsilon" if epsilon is None else f"epsilon {epsilon!r}"


def near_norms(graph: Graph) -> Iterator[NearNorm]:
    """Everything in the graph that resembles an RMSNorm."""
    for node in graph.find_nodes(op="call_function", target=aten.rsqrt.default):
        near = _from_rsqrt(node)
        if near is not None:
            yield near
    for name in loaded_ops():
        for node in graph.find_nodes(op="call_function", target=find_op(name)):
            numbers = [a for a in node.args if isinstance(a, float)]
            yield NearNorm(root=node, width=_width(node.args[0]), epsilon=next(iter(numbers), None), shared=None)


def _from_rsqrt(rsqrt: Node) -> NearNorm | None:
    add = rsqrt.args[0]
    if not isinstance(add, Node) or add.target not in _ADDS:
        return None
    mean, epsilon = add.args[0], add.args[1]
    if not isinstance(mean, Node) or mean.target is not aten.mean.dim:
        return None
    shared = next((why for node in (rsqrt, add, mean) if (why := _other_reader(node)) is not None), None)
    return NearNorm(
        root=rsqrt,
        width=_width(mean.args[0]),
        epsilon=epsilon if isinstance(epsilon, Node) else float(epsilon) if isinstance(epsilon, float | int) else None,
        shared=shared,
    )


def _other_reader(node: Node) -> str | None:
    if len(node.users) < 2:
        return None
    if any(user.op == "output" for user in node.users):
        return (
            f"its intermediate {node} is a result of the graph, saved for the backward pass; fuse for inference, "
            "under torch.no_grad() or torch.inference_mode()"
        )
    return f"its intermediate {node} has {len(node.users)} readers, and a fused op does not compute it"


def _width(node: object) -> int | None:
    val = value(node)
    width = val.shape[-1] if isinstance(val, torch.Tensor) and val.dim() else None
    return width if isinstance(width, int) else None


def why_missing(spec: MLASpec, has_q: bool, has_kv: bool, near: list[NearNorm]) -> str:
    """Why one or both norms of a layer are not among its recognised sites."""
    sides = ((("query", spec.q_norm),) if not has_q else ()) + ((("key/value", spec.kv_norm),) if not has_kv else ())
    found = "" if not (has_q or has_kv) else f"found the {'query' if has_q else 'key/value'} norm only: "
    return found + "; ".join(_why(name, norm, near) for name, norm in sides if norm is not None)


def _why(name: str, norm: NormSpec, near: list[NearNorm]) -> str:
    wide = [n for n in near if n.width == norm.width]
    if not wide:
        widths = ", ".join(str(n.width) for n in near)
        seen = f"norms of width {widths} are" if widths else "no norm is"
        return f"no {name} norm of width {norm.width} in its part of the graph ({seen} there)"
    exact = [n for n in wide if n.epsilon in epsilon_literals(norm.epsilon)]
    if not exact:
        return f"the {name} norm {wide[0].root} has {_epsilon(wide[0].epsilon)}; the spec says {norm.epsilon!r}"
    shared = next((n.shared for n in exact if n.shared is not None), None)
    if shared is not None:
        return f"the {name} norm cannot be replaced: {shared}"
    return (
        f"the {name} norm {exact[0].root} is written in no known form, rounds to another dtype than its input's, or "
        "an intermediate of it has other readers"
    )
