"""Specs of what mixes tokens and is neither attention nor a delta net: Mamba-2, and all that no spec of its own describes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from attrs import frozen

from .layer_specs import LayerSpec
from .norm_specs import GatedNormSpec, HeadPair
from .spec_fields import count, of_kind


@frozen(kw_only=True)
class Mamba2Spec(LayerSpec):
    """A state-space layer of Mamba-2 (arXiv 2405.21060): heads with a state each, whose B and C are shared by groups of them."""

    pairs: ClassVar[tuple[HeadPair, ...]] = (
        HeadPair(total="num_heads", local="num_local_heads", replicates=False),
        HeadPair(total="num_groups", local="num_local_groups", replicates=True, what="groups"),
    )

    num_heads: int = count()
    "Heads of the whole model."
    num_local_heads: int = count()
    "Heads of this rank."
    head_dim: int = count()
    "Width of one head."
    ssm_state_size: int = count()
    "Width of the state of one channel: the state of a head is head_dim by this."
    num_groups: int = count()
    "Groups of heads that share B and C in the whole model, copies not counted."
    num_local_groups: int = count()
    "Groups this rank holds, at least 1: with more ranks than groups each has a copy."
    conv_kernel_size: int = count()
    "Taps of the short causal convolution; its state holds one token fewer."
    output_norm: GatedNormSpec | None = of_kind("optional_gated_norm")
    """The gated norm before the output projection, over the heads of the whole model: its `group_size` is the width of one group's
    heads. None: the gate alone stands there (Falcon-H1 without `mamba_rms_norm`)."""

    @property
    def intermediate_size(self) -> int:
        """Width of all heads of the whole model."""
        return self.num_heads * self.head_dim

    @property
    def local_intermediate_size(self) -> int:
        """Width of all heads of this rank."""
        return self.num_local_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of this rank's convolution: the heads, then B and C of its groups."""
        return self.local_intermediate_size + 2 * self.num_local_groups * self.ssm_state_size

    @property
    def gated_norm_shape(self) -> tuple[int, int]:
        """Last two dimensions of the gated norm's input on this rank: (1, local_intermediate_size), since each column has a weight of its own."""
        return (1, self.local_intermediate_size)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """One sequence's state on this rank: (local heads, head_dim, ssm_state_size)."""
        return (self.num_local_heads, self.head_dim, self.ssm_state_size)

    def _contradictions(self) -> Iterator[str]:
        yield from LayerSpec._contradictions(self)
        if self.num_heads % self.num_groups:
            yield f"num_heads: {self.num_heads} is no multiple of num_groups {self.num_groups}"
            return
        norm, group = self.output_norm, self.intermediate_size // self.num_groups
        if norm is not None and norm.width != self.intermediate_size:
            yield f"output_norm: width {norm.width} is not num_heads * head_dim = {self.intermediate_size}"
        elif norm is not None and norm.group_size != group:
            yield f"output_norm: group_size {norm.group_size} is not the {group} columns of one of {self.num_groups} groups"


@frozen(kw_only=True)
class OtherMixerSpec(LayerSpec):
    """What stands in the place of an attention and has no spec of its own: of its layer, the norms of the stream are known.

    Its heads, states and caches are not, so that no fusion and no metadata is planned inside of it.
    """

    mixer: str = of_kind("text")
    'What it is, in words: "mamba", "short convolution".'
