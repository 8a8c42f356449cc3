"""The spec of one linear: its size in the whole model and on this rank, how its weight is held, what it does to what it reads.

It says what the launch of a matrix product must know, and what may be fused in front of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from attrs import frozen

from .activation_quant import ActivationQuant
from .spec_fields import NESTED, Checked, of_kind, optional_count


@frozen(kw_only=True, cache_hash=True)
class WeightSpec(Checked):
    """How a linear holds its weight."""

    dtype: str = of_kind("text")
    "Of one element, in torch's words (`bfloat16`, `float8_e4m3fn`); of packed ones, what is packed (`int4`, `float4_e2m1fn`)."
    scheme: str = of_kind("weight_scheme")
    """What shares a scale: nothing (`plain`), the whole weight (`tensor`), one output feature (`channel`), a `block` of both
    dimensions, a `group` of input features of one output feature, or such a group with an exponent for its scale (`mx`)."""
    block: tuple[int, int] | None = of_kind("block")
    "Output and input features that share a scale, of the last three schemes; None for the others."

    def _contradictions(self) -> Iterator[str]:
        if (self.block is None) == (self.scheme in ("block", "group", "mx")):
            yield f"block: a weight of the scheme {self.scheme} has {'one' if self.block is None else 'none'}, got {self.block}"
        elif self.block is not None and (len(self.block) != 2 or min(self.block) < 1):
            yield f"block: expected output and input features, each at least 1, got {self.block}"


def weight_in_words(weight: WeightSpec) -> str:
    """How a weight is held, for people: `int4, one scale per group of 1 x 32`."""
    block = "" if weight.block is None else f" of {' x '.join(map(str, weight.block))}"
    shares = "MX group" if weight.scheme == "mx" else weight.scheme
    return weight.dtype if weight.scheme == "plain" else f"{weight.dtype}, one scale per {shares}{block}"


@frozen(kw_only=True, cache_hash=True)
class LinearSpec(Checked):
    """One linear of a layer, which may be several of the model's that an engine has merged (query, key, value; gate, up).

    A size is None where the module does not say it: a packed weight tells no shard of it.
    """

    path: str = of_kind("text")
    "Of its module, below the layer it was read off."
    in_features: int | None = optional_count()
    "Columns that it reads in the whole model."
    local_in_features: int | None = optional_count()
    "The same on this rank."
    out_features: int | None = optional_count()
    "Columns that it gives in the whole model: what engines copy to several ranks, such as KV heads, is counted once."
    local_out_features: int | None = optional_count()
    "The same on this rank, with its copies: over all ranks they may add up to more than the total."
    local_outputs: tuple[int, ...] = of_kind("counts")
    "Columns on this rank of each of those that are merged in it, in order; one number of a linear that is alone, none where it is not said."
    style: str | None = of_kind("linear_style")
    """Which side of it ranks share: what it gives (`column`), what it reads (`row`), or none (`replicated`: every rank holds all
    of it, also of a linear that knows nothing of ranks). None: nothing says it."""
    weight: WeightSpec | None = of_kind("optional_weight")
    "How it holds its weight; None: in a way that is not known here."
    activation: ActivationQuant | str | None = of_kind("linear_activation")
    """What it does to what it reads: quantises it in front of its product; None: nothing; a sentence where ActivationQuant has no
    words for it, as where a kernel quantises inside of its product."""
    takes_quantised: bool = of_kind("flag")
    "Whether it may be handed what it reads quantised as `activation` says, and then leaves that out: where the linear itself says so (vLLM)."
    shares_input: tuple[str, ...] = of_kind("paths")
    "Paths of the other linears that read the same tensor."

    def _contradictions(self) -> Iterator[str]:
        read, local_read = self.in_features, self.local_in_features
        given, local_given = self.out_features, self.local_out_features
        if read is not None and local_read is not None:
            if self.style != "row" and local_read != read:
                yield f"local_in_features: expected {read} (ranks share none of what it reads), got {local_read}"
            elif read % local_read:
                yield f"local_in_features: {local_read} is no even share of in_features {read}"
        if given is not None and local_given is not None:
            if self.style == "column" and local_given > given:
                yield f"local_out_features: expected at most out_features {given}, got {local_given}"
            elif self.style != "column" and local_given != given:
                yield f"local_out_features: expected {given} (ranks share none of what it gives), got {local_given}"
        if self.local_outputs and sum(self.local_outputs) != local_given:
            yield f"local_outputs: {self.local_outputs} do not add up to local_out_features {local_given}"

    def problem_over(self, ranks: int) -> str | None:
        """Why its total and local sizes cannot be those of so many ranks, as a sentence, or None where they can."""
        for side, total, local, shared in (
            ("in", self.in_features, self.local_in_features, self.style == "row"),
            ("out", self.out_features, self.local_out_features, self.style == "column"),
        ):
            if total is None or local is None:
                continue
            held = local * ranks if shared else local
            copies = shared and side == "out" and held > total
            if held != total and not copies:
                return f"{self.path}: local_{side}_features {local} on each of {ranks} ranks are not {side}_features {total}"
        return None


NESTED.update(
    optional_weight=WeightSpec,
    linears=LinearSpec,
    optional_linear=LinearSpec,
    linear_activation=ActivationQuant,
)


@lru_cache(maxsize=4096)
def weight_spec(dtype: str, scheme: str, block: tuple[int, int] | None) -> WeightSpec:
    """The spec of these values, made once: a layer is read often, and few weights differ."""
    return WeightSpec(dtype=dtype, scheme=scheme, block=block)


PLAIN = weight_spec("bfloat16", "plain", None)
"""What linears that are not quantised hold."""
NOT_READ = "not known: how the linears are quantised, as what the config says of it is not read"
NOT_QUANTISED = "they are not quantised in the published checkpoint"
"""What a published checkpoint says of linears whose weights are plain, too: in the place of a quantisation."""


@lru_cache(maxsize=16384)
def linear_spec(
    path: str,
    together: tuple[str, ...],
    sizes: tuple[Any, ...],
    weight: WeightSpec | None,
    activation: ActivationQuant | str | None,
    takes_quantised: bool,
) -> LinearSpec:
    """The spec of these values, made once.

    Args:
        path: of the linear, which is one of `together`, those that read the same tensor.
        together: their paths.
        sizes: in and out features, each the model's and this rank's; the outputs of this rank; the style.
        weight: how the weight is held.
        activation: as `LinearSpec.activation`.
        takes_quantised: as `LinearSpec.takes_quantised`.

    Raises:
        SpecError: the values contradict each other.
    """
    read, local_read, given, local_given, outputs, style = sizes
    return LinearSpec(
        path=path,
        in_features=read,
        local_in_features=local_read,
        out_features=given,
        local_out_features=local_given,
        local_outputs=outputs,
        style=style,
        weight=weight,
        activation=activation,
        takes_quantised=takes_quantised,
        shares_input=tuple(other for other in together if other != path),
    )
