"""Layers of engines that cannot be built here: modules whose class, attributes and children are those that were read in
the engines' sources, and nothing else. No code of an engine is in them.

`standins_atom` follows ROCm/ATOM at ffdf3bb5; the tables of which attribute holds a
total and which this rank's share are in docs/engines.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import frozen
from torch import nn

from layerfuse.registry import ModelEntry
from layerfuse.registry.kinds import SHARED_EXPERTS


@functools.cache
def layer_class(key: str, *bases: type) -> type[nn.Module]:
    """An empty class with the module and name of `package.module:ClassName`."""
    module, _, name = key.partition(":")
    return type(name, bases or (nn.Module,), {"__module__": module})


def module(key: str, *bases: type, **held: Any) -> Any:
    """One instance of such a class that holds these attributes and children."""
    made: Any = layer_class(key, *bases)()
    for name, value in held.items():
        setattr(made, name, value)
    return made


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, device="meta"), requires_grad=False)


@frozen
class Rank:
    """Where a layer is built: the engine's tensor-parallel size and this rank."""

    size: int
    rank: int

    def share(self, total: int) -> int:
        assert total % self.size == 0, f"{total} heads on {self.size} ranks"
        return total // self.size

    def kv_share(self, total: int) -> int:
        return max(1, total // self.size)


def rotary(key: str, kind: Any, *tables: str) -> Any:
    """A rotary module of an engine, with its tables of cos and sin; only DeepSeek's for yarn holds what they are scaled by."""
    latent = kind.family == "mla"
    said = {"mscale": kind.rope.attention_scaling} if latent and kind.yarn is not None else {}
    head = kind.qk_rope_head_dim if latent else kind.head_dim
    return module(
        key,
        head_size=head,
        rotary_dim=kind.rope.width or head,
        is_neox_style=not kind.rope.interleaved,
        **{table: torch.empty(0, device="meta") for table in tables},
        **said,
    )


def yarn_mscale(kind: Any) -> float:
    """The engines multiply the scale by it twice, in this order, to the last bit."""
    return float(kind.yarn.mscale) if kind.yarn else 1.0


def decoder_indices(entry: ModelEntry) -> list[int]:
    """The first decoder layer of each kind, and the last of all."""
    kinds = entry.kind_at()
    return sorted({kinds.index(kind) for kind in entry.layers} | {len(kinds) - 1})


def text_model(
    entry: ModelEntry,
    rank: Rank,
    decoder: Callable[[ModelEntry, Any, int, Rank, str], Any],
    key: str,
    norm: Callable[[int, float], nn.Module],
    mlp: Callable[[ModelEntry, Any, Rank], nn.Module],
) -> nn.Module:
    """A model of the class `key` with some of its decoder layers, under their real names: `model.layers.N`.

    The others are what engines put where another rank of a pipeline has the layer.
    """
    kinds = entry.kind_at()
    layers = nn.ModuleList([module("engine.utils:PPMissingLayer") for _ in kinds])
    for index in decoder_indices(entry):
        layers[index] = decoder(entry, entry.layers[kinds[index]], index, rank, f"model.layers.{index}")
        _add_mlps(layers[index], entry, index, functools.partial(mlp, entry, rank=rank))
    return _holding(model=module(key, layers=layers, norm=norm(entry.hidden_size, entry.rms_norm_eps)))


def _add_mlps(layer: Any, entry: ModelEntry, index: int, mlp: Callable[[Any], nn.Module]) -> None:
    name = entry.mlp_at()[index]
    if name is None:
        return
    made = [mlp(entry.mlps[name]) for _ in range(entry.attentions_per_layer)]
    if len(made) > 1:
        layer.mlps = nn.ModuleList(made)
    elif name == SHARED_EXPERTS:
        layer.mlp = _holding(**{"shared_expert" if entry.adapter == "qwen3_next" else name: made[0]})
    else:
        layer.mlp = made[0]


def multimodal(text: nn.Module, vision_key: str) -> nn.Module:
    """A wrapper whose vision tower has attention with heads of its own."""
    tower = module(vision_key, num_heads=16, head_dim=72, scaling=72**-0.5, num_attention_heads_per_partition=16)
    return _holding(vision_tower=_holding(layers=nn.ModuleList([_holding(attn=tower)])), language_model=text)


def _holding(**children: nn.Module) -> nn.Module:
    made = nn.Module()
    for name, child in children.items():
        setattr(made, name, child)
    return made


Build = Callable[[ModelEntry, Rank], nn.Module]
Models = Mapping[str, Build]
"""Entry name -> how its stand-in is built."""
