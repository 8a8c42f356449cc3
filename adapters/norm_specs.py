"""The specs of the parts: the parallelism of a layer, its norms, and how its heads are shared by ranks."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import frozen

from .activation_quant import ActivationQuant
from .errors import SpecError, shown
from .linear_specs import LinearSpec
from .spec_fields import NESTED, Checked, as_float, count, of_kind, optional_count, problem_of


@frozen(kw_only=True, cache_hash=True)
class Parallel(Checked):
    """The tensor-parallel degree this layer was actually sharded by, which need not be the engine's global one."""

    size: int = count()
    "Ranks that share the layer's heads; 1 when the layer is whole or replicated."
    rank: int | None = of_kind("rank")
    "This rank, 0-based, or None where a sharded layer does not say which shard it is."

    def __attrs_post_init__(self) -> None:
        problem = problem_of("count", self.size)
        if problem is not None:
            raise SpecError("Parallel", [f"size: {problem}"])
        if self.rank is None:
            if self.size == 1:
                raise SpecError("Parallel", ["rank: the only rank of a size of 1 is 0, got None"])
        elif type(self.rank) is not int or not 0 <= self.rank < self.size:
            raise SpecError(
                "Parallel", [f"rank: expected 0 to {self.size - 1}, or None if unknown, got {shown(self.rank)}"]
            )


WHOLE = Parallel(size=1, rank=0)
"""A layer that is not sharded."""


@frozen(kw_only=True, cache_hash=True)
class NormSpec(Checked):
    """One RMSNorm over the last dimension: `x / sqrt(mean(x^2) + epsilon) * (weight + weight_offset)`."""

    width: int = count()
    "Elements that share one variance: the last dimension of input and weight."
    epsilon: float = of_kind("positive", converter=as_float)
    "As the norm module holds it. Engines disagree with the config, and with each other, about it."
    weight_offset: float = of_kind("number", converter=as_float, default=0.0)
    "Added to the stored weight: 1.0 for zero-centred norms (Gemma, Qwen3-Next), else 0.0."
    module: str | None = of_kind("module_path", default=None, eq=False, repr=False)
    """Path of the norm's module below the layer it was read off (`q_a_layernorm`), or None where it was not read off one.
    It says where the spec comes from and not what the norm is: equal norms may differ in it."""
    quant: ActivationQuant | None = of_kind("activation_quant", default=None, eq=False, repr=False)
    """How the linears that read this norm's result quantise it, or None: they do not, disagree, or were not read. It is a
    fact about those linears and not about the norm, so equal norms may differ in it too."""
    unquantised: str | None = of_kind("optional_text", default=None, eq=False, repr=False)
    """What each of those linears does, as a sentence, where some quantise and `quant` cannot say how: they differ, or do it in a
    way for which it has no words."""
    consumers: tuple[LinearSpec, ...] = of_kind("linears", default=(), eq=False, repr=False)
    "Those linears, as far as the layer has them; empty where they were not read. Who else reads the result takes it as it is."
    producers: tuple[LinearSpec, ...] = of_kind("linears", default=(), eq=False, repr=False)
    "The linear of the same layer whose result joins the residual stream in front of this norm; empty where that was not read."


@frozen(kw_only=True, cache_hash=True)
class GatedNormSpec(NormSpec):
    """An RMSNorm whose output (or input) is multiplied by an activated gate of the same shape."""

    activation: str = of_kind("activation")
    "What the gate passes through. Not the layer's `activation`, which is that of the convolution."
    norm_before_gate: bool = of_kind("flag")
    "True: norm(x) * act(gate). False: norm(x * act(gate))."
    group_size: int | None = optional_count()
    "Elements per variance group, or None where the whole width is one group."

    def _contradictions(self) -> Iterator[str]:
        if self.group_size is not None and self.width % self.group_size:
            yield f"group_size {self.group_size} does not divide the width {self.width}"


@frozen(kw_only=True, cache_hash=True)
class LayerNormSpec(NormSpec):
    """One LayerNorm over the last dimension (arXiv 1607.06450): `(x - mean(x)) / sqrt(var(x) + epsilon) * weight + bias`.

    It stands in the fields of plain norms. No fusion of the library takes it, and plans say so.
    """

    has_weight: bool = of_kind("flag")
    "Whether it multiplies by a weight: OLMo's does not."
    has_bias: bool = of_kind("flag")
    "Whether it adds a bias: Cohere's and MPT's do not."


NESTED.update(
    parallel=Parallel,
    norm=NormSpec,
    norms=NormSpec,
    optional_norm=NormSpec,
    gated_norm=GatedNormSpec,
    optional_gated_norm=GatedNormSpec,
    activation_quant=ActivationQuant,
)

# ---- how heads are shared by ranks -----------------------------------------------------------------------------------


def shard_heads(total: int, size: int, what: str = "heads") -> int:
    """Heads per rank where every rank must get the same whole number of them.

    Raises:
        SpecError: the ranks do not divide the heads (or `what` they share instead).
    """
    if total % size:
        raise SpecError(f"{what} per rank", [f"{shown(total)} {what} cannot be shared equally by {size} ranks"])
    return total // size


def shard_kv_heads(total: int, size: int) -> int:
    """KV heads per rank; with more ranks than heads each head is replicated, so that no rank holds fewer than one.

    Raises:
        SpecError: neither number divides the other.
    """
    if size > total:
        if size % total:
            raise SpecError(
                "KV heads per rank", [f"{shown(total)} KV heads cannot be replicated evenly over {size} ranks"]
            )
        return 1
    if total % size:
        raise SpecError("KV heads per rank", [f"{shown(total)} KV heads cannot be shared equally by {size} ranks"])
    return total // size


@frozen(kw_only=True)
class HeadPair:
    """A total count, its per-rank partner, and the rule that ties them."""

    total: str
    local: str
    replicates: bool
    "True for KV heads: more ranks than heads means copies, not an error."
    what: str = "heads"
    "What is counted, in errors."

    def local_of(self, total: int, size: int) -> int:
        """This rank's count, from the model's."""
        return shard_kv_heads(total, size) if self.replicates else shard_heads(total, size, self.what)
