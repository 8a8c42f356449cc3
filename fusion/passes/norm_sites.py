"""Finding norms in a graph: every place where an RMSNorm of one of the given widths and epsilons is computed.

Nothing is rewritten here. A site holds the nodes of one norm, checked for shapes and dtypes.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from attrs import frozen
from torch._inductor.pattern_matcher import Match, PatternMatcherPass, register_graph_pattern
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .patterns import decomposed, loaded_ops, one_op

Norm = tuple[int, float]
"""Width and epsilon."""


@frozen(kw_only=True, eq=False)
class NormSite:
    """One norm in a graph."""

    width: int
    epsilon: float
    form: str
    x: Node
    weight: Node
    out: Node
    nodes: tuple[Node, ...]
    "All nodes that compute it, inputs excluded, `out` last."


def value(node: Any) -> Any:
    """The fake tensor (or None) that tracing left on a node."""
    return node.meta.get("val") if isinstance(node, Node) else None


def same(a: Any, b: Any) -> bool:
    """Whether two sizes are equal for every input, without adding a guard."""
    return bool(statically_known_true(a == b))


@lru_cache(maxsize=64)
def _matcher(norms: tuple[Norm, ...], _ops: tuple[str, ...]) -> tuple[PatternMatcherPass, list[NormSite]]:
    matcher = PatternMatcherPass(pass_name="layerfuse_norm_sites")
    found: list[NormSite] = []
    for width, epsilon in norms:
        for form in (*one_op(width, epsilon), *decomposed(epsilon)):

            def check(match: Match, width: int = width) -> bool:
                return _fits(match, width)

            def take(
                match: Match, width: int = width, epsilon: float = epsilon, name: str = form.name, **bound: Any
            ) -> None:
                found.append(
                    NormSite(
                        width=width,
                        epsilon=epsilon,
                        form=name,
                        x=bound["x"],
                        weight=bound["weight"],
                        out=match.nodes[-1],
                        nodes=tuple(match.nodes),
                    )
                )

            register_graph_pattern(form.pattern, extra_check=check, pass_dict=matcher)(take)
    return matcher, found


def find_norm_sites(graph: Graph, norms: Iterable[Norm]) -> list[NormSite]:
    """The norms of these widths and epsilons, in graph order. `graph` must be owned by a GraphModule."""
    matcher, found = _matcher(tuple(sorted(set(norms))), loaded_ops())
    found.clear()
    matcher.apply(graph)
    # Two forms can match one node (a plain op without its optional argument): the first one counts.
    sites = {site.out: site for site in reversed(found)}
    found.clear()
    return sorted(sites.values(), key=lambda site: site.out)


def _fits(match: Match, width: int) -> bool:
    x, weight, out = (value(n) for n in (match.kwargs["x"], match.kwargs["weight"], match.nodes[-1]))
    if not all(isinstance(v, torch.Tensor) for v in (x, weight, out)):
        return False
    if x.dim() < 1 or not same(x.shape[-1], width) or weight.dim() != 1 or not same(weight.shape[0], width):
        return False
    if "dim" in match.kwargs:
        # One dimension, the last, however it is counted.
        if list(match.kwargs["dim"]) not in ([-1], [x.dim() - 1]):
            return False
        # The plain form accumulates in x's own dtype; below float32 that is a different norm.
        low = x.dtype in (torch.bfloat16, torch.float16)
        if low != ("back" in match.kwargs) or not (low or x.dtype in (torch.float32, torch.float64)):
            return False
        if low and match.kwargs["back"] != x.dtype:
            return False
    # A float32 weight on a bfloat16 input widens the result in some forms; the fused op keeps the input's dtype.
    return bool(out.dtype == x.dtype and weight.device == x.device)
