"""What is found of norms: those that can be replaced, and those that only resemble one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import field, frozen
from torch.fx import Node

from ...adapters.specs import GatedNormSpec, NormSpec
from ..sites import Site
from .values import is_number, value

if TYPE_CHECKING:  # they register the ops of all fusions, of which one may be what is being imported
    from .adds import FoundAdd
    from .quants import FoundQuant


@frozen(kw_only=True, eq=False)
class FoundNorm:
    """One norm in a graph."""

    width: int
    epsilon: float
    weight_offset: float
    form: str
    x: Node
    weight: Node
    out: Node
    "The norm; where an op quantises it and gives nothing else, that op."
    nodes: tuple[Node, ...]
    "All nodes that compute it, inputs excluded, `out` last."
    kind: type[NormSpec] = NormSpec
    "Of the spec that describes it."
    add: FoundAdd | None = None
    "Where the op itself adds the residual; `x` is what it adds to it then."
    quant: FoundQuant | None = None
    "Where the op itself quantises, and gives the quantised norm only."

    def why_not(self, site: Site, place: int = 0, certain: bool = False) -> str | None:
        """How it differs from a norm of a site, as a sentence; None where it does not.

        Args:
            site: whose norm it may be.
            place: which of the site's norms.
            certain: whether it stands there for certain. A gated norm may then be found without its gate, of which no form is known.
        """
        spec = site.norms[place]
        if self.width != spec.width:
            return f"the norm {self.out} has width {self.width}; the spec says {spec.width}"
        if self.weight_offset != spec.weight_offset:
            return (
                f"the norm {self.out} adds {self.weight_offset:g} to its weight; the spec says {spec.weight_offset:g}"
            )
        if not is_number(self.epsilon, spec.epsilon):
            return f"the norm {self.out} has epsilon {self.epsilon!r}; the spec says {spec.epsilon!r}"
        if self.kind is type(spec) or (certain and self.kind is NormSpec and isinstance(spec, GatedNormSpec)):
            return None
        return f"the norm {self.out} is described by a {self.kind.__name__}; the spec is a {type(spec).__name__}"


@frozen(kw_only=True, eq=False)
class PartialMatch:
    """Something that computes a norm in no form that can be replaced."""

    root: Node
    "The reciprocal root, or the op itself."
    width: int | None
    epsilon: float | Node | None
    shared: str | None
    "Who else reads an intermediate of it, or None."
    x: Node | None = None
    "What it norms over the last dimension, where that can be told."
    weights: tuple[Node, ...] = field(default=())
    "Tensors of one dimension that its result is multiplied by."
    weight_offset: float | None = None
    "Where the form is known."
    ungated: str | None = None
    "Why it is no gated norm, where that was asked."

    @classmethod
    def of(cls, norm: FoundNorm) -> PartialMatch:
        """A norm of a known form that is not the one that was looked for."""
        return cls(
            root=norm.out,
            width=norm.width,
            epsilon=norm.epsilon,
            shared=None,
            x=norm.x,
            weights=(norm.weight,),
            weight_offset=norm.weight_offset,
        )

    def describe(self) -> str:
        """The norm in words."""
        return f"{self.root} norms width {self.width} with {epsilon_in_words(self.epsilon)}"


def epsilon_in_words(epsilon: float | Node | None) -> str:
    """An epsilon as reasons say it."""
    if isinstance(epsilon, Node) and not _is_float(epsilon):
        return f"an epsilon that is a tensor ({epsilon}), and a fused op takes a number"
    if isinstance(epsilon, Node):
        return (
            f"an epsilon that is an input of the graph ({epsilon}): dynamic=True traces a module's floats as inputs, "
            "unless torch._dynamo.config.specialize_float is True"
        )
    return "no epsilon" if epsilon is None else f"epsilon {epsilon!r}"


def _is_float(node: Node) -> bool:
    """Whether a node is a Python float that became an input: a symbol, or a tensor of float64 that is converted."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    val = value(node)
    return not isinstance(val, torch.Tensor) or (val.dtype == torch.float64 and val.dim() == 0)
