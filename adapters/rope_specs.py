"""The rotary position embedding of a layer, and how a cache of latents lies in memory."""

from __future__ import annotations

from attrs import frozen

from .spec_fields import NESTED, Checked, as_float, of_kind, width_or_zero


@frozen(kw_only=True, cache_hash=True)
class RopeSpec(Checked):
    """A rotary position embedding (RoFormer, arXiv 2104.09864): pairs of columns, each turned by an angle of the position.

    Equal ones turn the same columns alike. Where an engine keeps cos and sin, and how it lays out the turned pairs, does
    not count for equality.
    """

    width: int = width_or_zero()
    "Columns that are turned, in pairs; 0: the layer has the columns and turns none of them (Kimi-Linear, Kimi-K3)."
    interleaved: bool = of_kind("flag")
    "True: columns 2i and 2i + 1 are a pair (DeepSeek). False: columns i and i + width / 2 are (Llama, GPT-NeoX)."
    attention_scaling: float = of_kind("positive", converter=as_float)
    "Factor that cos and sin hold already (yarn's mscale over mscale_all_dim, longrope's): 1.0 for most models."
    interleaved_out: bool = of_kind("flag", default=True, eq=False, repr=False)
    """Whether the turned pairs of an interleaved rope are interleaved again. transformers writes the first ones of all pairs
    and then the second ones: the same products of query and key, and another content of the cache."""
    table: str = of_kind("rope_table", default="none", eq=False, repr=False)
    """Where cos and sin come from. `cos_sin`: one table of the module, a row per position, cos and then sin. `cos_and_sin`:
    two tables. `values`: they are computed for each token, outside the layer. `none`: there is no rope."""
    module: str | None = of_kind("module_path", default=None, eq=False, repr=False)
    "Path of the rope's module below the layer, or None where the layer has none."


NO_ROPE = RopeSpec(width=0, interleaved=False, attention_scaling=1.0)
"""No column is turned."""

NESTED.update(optional_rope=RopeSpec)
