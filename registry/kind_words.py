"""Words that several kinds of layer in a models.toml entry are said with: which layers, how a rope turns, how a gate works."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypeVar, cast

import attrs
from attrs import frozen

Spec = TypeVar("Spec")


def whole(spec: Callable[..., Spec], kind: Any, **others: Any) -> Spec:
    """The spec of one layer of this kind on one rank, whose local sizes are the model's.

    Args:
        spec: its class. Fields that the kind has too are the kind's, as `num_local_heads` is its `num_heads`.
        kind: an attrs object.
        others: fields that the kind has not, or says in other words.

    Raises:
        SpecError: the values are illegal, or contradict each other.
    """
    said, of = attrs.asdict(kind, recurse=False), cast("Any", spec)
    names = {field.name: field.name.replace("local_", "") for field in attrs.fields(of)}
    return spec(**{**{name: said[word] for name, word in names.items() if word in said}, **others})


@frozen(kw_only=True)
class Every:
    """Layers at regular distances: `start`, `start + step`, ..."""

    step: int
    "Distance between two of them, at least 1."
    start: int = 0
    "The first, 0-based."


At: TypeAlias = Literal["all", "rest"] | list[int] | Every


@frozen(kw_only=True)
class Yarn:
    """What of a `rope_scaling` of type yarn changes the softmax scale (DeepSeek's mscale)."""

    factor: float
    "Context extension factor."
    mscale_all_dim: float
    "Weight of the correction; 0 switches it off."

    @property
    def mscale(self) -> float:
        """Factor on each of query and key: 0.1 * mscale_all_dim * ln(factor) + 1 (YaRN, arXiv 2309.00071)."""
        if self.factor <= 1 or self.mscale_all_dim == 0:
            return 1.0
        return 0.1 * self.mscale_all_dim * math.log(self.factor) + 1.0


@frozen(kw_only=True)
class RopeWords:
    """A rotary position embedding: of latent attention over all of its rope columns, of others over all of a head unless it says less."""

    interleaved: bool
    "true: columns 2i and 2i + 1 are a pair (DeepSeek). false: columns i and i + width / 2 are."
    attention_scaling: float = 1.0
    "Factor on cos and sin, where there is one: yarn's with an mscale that is not mscale_all_dim, longrope's."
    width: int | None = None
    "Columns of each query and key head that are turned, the first ones, where that is not all of them; of grouped-query attention alone."


Rope: TypeAlias = RopeWords | Literal["none"] | None


@frozen(kw_only=True)
class GateWords:
    """The gated norm of a delta net, where it cannot be derived."""

    activation: Literal["silu", "sigmoid"]
    "What the gate passes through."
    norm_before_gate: bool
    "True: norm(x) * act(gate)."
    group_size: int | Literal["none"]
    'Elements per variance group; "none": the whole head is one group.'


StreamNorms: TypeAlias = Literal["none", "one"] | None
"""How many norms read the residual stream in a layer, where it is not one for its attention and one for its MLP."""
