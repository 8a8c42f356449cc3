"""Attention metadata from specs: heads, buffers and state, planned before any layer exists. Planning needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._lazy import attach
from .buffers import BufferSpec, byte_text
from .errors import (
    HeadCountError,
    HeadsRefusedError,
    MixedGroupError,
    NoSuchLayerError,
    PlanExceededError,
    UnknownReleaseError,
)
from .groups import LayerGroup, group_layers
from .heads import MLAHeadPlan, how_padded, plan_heads
from .native import releases_named
from .plan import MLAMetadataPlan, plan_metadata
from .prefill import PrefillPlan
from .state import StatePlan, plan_state

if TYPE_CHECKING:
    from .tensors import MetadataBuffers, allocate

_NEEDS_TORCH = {"MetadataBuffers": ".tensors", "allocate": ".tensors"}

__all__ = [
    "BufferSpec",
    "HeadCountError",
    "HeadsRefusedError",
    "LayerGroup",
    "MLAHeadPlan",
    "MLAMetadataPlan",
    "MetadataBuffers",
    "MixedGroupError",
    "NoSuchLayerError",
    "PlanExceededError",
    "PrefillPlan",
    "StatePlan",
    "UnknownReleaseError",
    "allocate",
    "byte_text",
    "group_layers",
    "how_padded",
    "plan_heads",
    "plan_metadata",
    "plan_state",
    "releases_named",
]

_getattr, _dir = attach(__name__, _NEEDS_TORCH)
__getattr__, __dir__ = _getattr, lambda: sorted({*_dir(), *__all__})
