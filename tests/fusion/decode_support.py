"""What the tests of MLA decode chains share: a layer that decodes in plain torch, the same by the ops, and what they are compiled with."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from fusion_support import Traced, mla_spec, trace
from torch import Tensor, nn

from layerfuse.adapters import NO_ROPE, MLASpec, RopeSpec
from layerfuse.fusion import FUSIONS, FusionConfig, Target
from layerfuse.fusion.dynamo_floats import floats_as_constants
from layerfuse.testing import MLADecodeLayer, mla_decode_layer

WRITE, CONCAT, DUAL = "mla_norm_rope_cache", "mla_query_concat", "mla_dual_rms_norm"
SWITCHES = {name: True for name in FUSIONS if name.startswith((WRITE, CONCAT))}
INTERLEAVED = RopeSpec(width=64, interleaved=True, attention_scaling=1.0)
HALVES = RopeSpec(width=64, interleaved=False, attention_scaling=1.0)
ROPES = {"interleaved": INTERLEAVED, "halves": HALVES, "none": NO_ROPE}
FP8 = torch.float8_e4m3fn
SM90 = Target.named("sm90")
PAGES, PAGE, TOKENS = 6, 4, 3
SLOTS = [9, 2, 22]


def config(**changes: Any) -> FusionConfig:
    """All chains of decode layers, switched on."""
    return FusionConfig(switches=SWITCHES, **changes)


def decode_spec(index: int = 0, **changes: Any) -> MLASpec:
    return mla_spec(index, **{"rope": INTERLEAVED, **changes})


def decode_layer(spec: MLASpec, way: str = "plain", **changes: Any) -> MLADecodeLayer:
    """A layer with random weights and scales, and something in its cache."""
    given = {"pages": PAGES, "page_size": PAGE, "positions": 32, **changes}
    given["pages"] = PAGES if given["page_size"] else PAGES * PAGE
    layer = mla_decode_layer(spec, way=way, **given)
    layer.cache_scale.fill_(0.0625)
    layer.query_scale.fill_(0.03125)
    noise = torch.randn(layer.cache.shape, generator=torch.Generator().manual_seed(1))
    layer.cache.copy_(noise.to(layer.cache.dtype))
    return layer


def inputs(
    dtype: torch.dtype = torch.bfloat16, tokens: int = TOKENS, hidden: int = 64
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, positions and slots."""
    drawn = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(2)).to(dtype)
    return drawn, torch.arange(tokens) * 5 + 1, torch.tensor(SLOTS[:tokens])


class Decoding(nn.Module):
    """Layers one after the other, each with a cache of its own, up to their attention kernel."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden: Tensor, positions: Tensor, slots: Tensor) -> list[Tensor]:
        return [layer.query(hidden, positions, slots) for layer in self.layers]


def placed(*specs: MLASpec) -> list[tuple[str, MLASpec]]:
    return [(f"layers.{i}", attrs.evolve(spec, layer_index=i)) for i, spec in enumerate(specs)]


def compiled(model: nn.Module, *args: Any, specs: Any, **changes: Any) -> Traced:
    """Compiled with all chains and run op by op."""
    with floats_as_constants():
        return trace(model, *args, specs=specs, target=SM90, config=changes.pop("config", None) or config(), **changes)


def bytes_of(cache: Tensor) -> Tensor:
    return cache.view(torch.uint8)
