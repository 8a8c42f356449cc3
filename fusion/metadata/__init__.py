"""Attention metadata from specs: heads, buffers and state, planned before any layer exists. Planning needs no torch."""

from __future__ import annotations

from .errors import HeadCountError, HeadsRefusedError
from .heads import MLAHeadPlan, how_padded, plan_heads

__all__ = ["HeadCountError", "HeadsRefusedError", "MLAHeadPlan", "how_padded", "plan_heads"]
