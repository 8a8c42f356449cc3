"""The specs of inner kernel layers, which know what the kernel is handed and not what the layer around it is."""

from __future__ import annotations

from typing import Any

import attrs
from attrs import frozen

from .errors import InnerLayerError
from .layer_specs import GatedDeltaNetSpec, GQASpec, MLASpec, ResidualSpec
from .spec_fields import Checked, as_float, count, of_kind, optional_count, width_or_zero

_OUTER_FIELDS = frozenset(
    {a.name for spec in (MLASpec, GatedDeltaNetSpec, GQASpec, ResidualSpec) for a in attrs.fields(spec)}
    | {"qk_head_dim", "split_sizes", "gated_norm_shape", "conv_dim", "input_norm", "post_attention_norm"}
)


@frozen(kw_only=True)
class KernelSpec(Checked):
    """An inner layer that only launches the attention kernel.

    It holds what the kernel is handed, per rank. What it cannot know (norms, hidden size, the whole model's heads) is
    not a field here, and asking for it raises an InnerLayerError that names the layer to ask instead.
    """

    layer_index: int = of_kind("index")
    "0-based, as the layer itself counts."
    outer: str = of_kind("text")
    "The layer that knows the rest, in words."

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in _OUTER_FIELDS:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}", name=name, obj=self)
        raise InnerLayerError(name, type(self).__name__, self.outer)


@frozen(kw_only=True)
class MLAKernelSpec(KernelSpec):
    """The kernel layer inside an MLA layer (vLLM and ATOM `MLAAttention`)."""

    num_local_heads: int = count()
    "Query heads of this rank."
    q_lora_rank: int | None = optional_count()
    "As in MLASpec."
    kv_lora_rank: int = count()
    "As in MLASpec."
    qk_nope_head_dim: int = count()
    "As in MLASpec."
    qk_rope_head_dim: int = width_or_zero()
    "As in MLASpec."
    v_head_dim: int = count()
    "As in MLASpec."
    softmax_scale: float = of_kind("positive", converter=as_float)
    "As in MLASpec."

    @property
    def latent_width(self) -> int:
        """Width of one token's cache entry: kv_lora_rank + qk_rope_head_dim."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@frozen(kw_only=True)
class GQAKernelSpec(KernelSpec):
    """The kernel layer inside a softmax-attention layer (vLLM and ATOM `Attention`, SGLang `RadixAttention`).

    Inside SGLang's MLA layer it describes the absorbed form: one KV head, `head_dim` kv_lora_rank + rope.
    """

    num_local_heads: int = count()
    "Query heads of this rank."
    num_local_kv_heads: int = count()
    "Key/value heads of this rank."
    head_dim: int = count()
    "Width of one query or key head as the kernel sees it."
    v_head_dim: int = count()
    "Width of one value head as the kernel sees it."
    softmax_scale: float = of_kind("positive", converter=as_float)
    "Factor on the attention logits."
    sliding_window: int | None = of_kind("window")
    "Tokens a query sees, itself included, or None where it sees all."


@frozen(kw_only=True)
class GatedDeltaNetKernelSpec(KernelSpec):
    """The kernel layer inside a gated delta net (SGLang `RadixLinearAttention`)."""

    num_local_k_heads: int = count()
    "Key heads of this rank."
    num_local_v_heads: int = count()
    "Value heads of this rank."
    head_k_dim: int = count()
    "Width of one key head."
    head_v_dim: int = count()
    "Width of one value head."
