"""The buffers of AITER's fp8 prefill, whose head counts follow another rule: its reduction supports a fixed list.

Prefill works on expanded keys and values, one head each, so a padded head is padded in q, k and v alike.
"""

from __future__ import annotations

from typing import Any

from attrs import field, frozen

from ...adapters.specs import MLAKernelSpec, MLASpec
from ..backends.aiter.releases import OLDEST, ReleaseRange, is_after
from .buffers import BufferSpec, largest, specs_of, total_bytes
from .dtypes import Dtype
from .heads import MLAHeadPlan
from .sizes import ps_metadata_shapes

REDUCES = (
    (OLDEST, (1, 2, 4, 8, 10, 16, 32, 40, 64, 128)),
    ("v0.1.20", (1, 2, 4, 8, 10, 16, 32, 40, 48, 64, 96, 128)),
)
"""Head counts that the reduction supports at a value width of 128, and since when (`csrc/kernels/mla/reduce.cu`)."""

WIDTHS = (192, 128)
"""qk and v width of a head that the fp8 prefill kernel is compiled for (`hsa/*/mla`, `mla_pfl_qh192_vh128`)."""

TILE = 256
"""Queries of a tile, which is what a head count of one per key head makes of AITER's granularity."""


@frozen(kw_only=True)
class PrefillPlan:
    """The buffers of fp8 prefill."""

    heads: MLAHeadPlan
    "For q, k and v."
    max_query_length: int
    buffers: tuple[BufferSpec, ...] = field(repr=False)
    scratch: tuple[BufferSpec, ...] = field(repr=False)

    @property
    def total_bytes(self) -> int:
        """Of buffers and scratch."""
        return total_bytes((*self.buffers, *self.scratch))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "heads": self.heads.to_dict(),
            "max_query_length": self.max_query_length,
            "buffers": [buffer.to_dict() for buffer in self.buffers],
            "scratch": [buffer.to_dict() for buffer in self.scratch],
        }


def plan_prefill(
    spec: MLASpec | MLAKernelSpec,
    releases: ReleaseRange,
    batch: int,
    length: int | None,
    kv: Dtype,
    cu_count: int,
) -> PrefillPlan | str:
    """The plan, or a sentence why there is none."""
    widths = (spec.qk_nope_head_dim + spec.qk_rope_head_dim, spec.v_head_dim)
    if length is None:
        return "no length of a prefill step was given"
    if kv != "fp8":
        return "it is a kernel for fp8, and the cache is bf16"
    if widths != WIDTHS:
        return "its kernel takes heads of {} and {}, this layer's are {} and {}".format(*WIDTHS, *widths)
    known = [counts for since, counts in REDUCES if not is_after(since, releases.first)][-1]
    count = next((count for count in known if count >= spec.num_local_heads), None)
    if count is None:
        return f"{spec.num_local_heads} heads, and its reduction supports at most {known[-1]}"
    shapes = largest([ps_metadata_shapes(batch, count, length, TILE, cu_count)])
    rows = shapes["reduce_partial_map"][0] * TILE
    return PrefillPlan(
        heads=MLAHeadPlan(
            num_heads=spec.num_local_heads,
            kernel_heads=count,
            reason=f"the reduction of {releases.first} supports {', '.join(map(str, known))} heads",
        ),
        max_query_length=length,
        buffers=specs_of(shapes),
        scratch=(
            BufferSpec(name="partial_output", shape=(rows, count, spec.v_head_dim), dtype="fp32"),
            BufferSpec(name="partial_lse", shape=(rows, count), dtype="fp32"),
            BufferSpec(name="final_lse", shape=(batch * length, count), dtype="fp32"),
        ),
    )
