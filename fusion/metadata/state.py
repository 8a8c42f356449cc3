"""What a gated delta net keeps of each sequence: the last inputs of its convolution, and one matrix per value head.

The shapes are vLLM's (`MambaStateShapeCalculator.gated_delta_net_state_shape` and `kda_state_shape` in
`vllm/model_executor/layers/mamba/mamba_utils.py`); for KDA, releases that keep three convolution states (q, k, v) hold
as many bytes. ATOM stores each recurrent matrix transposed.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from attrs import frozen

from ...adapters.arguments import check_counts, check_word, expect
from ...adapters.specs import GatedDeltaNetSpec
from .buffers import BufferSpec, total_bytes

StateDtype = Literal["bf16", "fp32"]


@frozen(kw_only=True)
class StatePlan:
    """The state of one layer for one sequence, on one rank."""

    conv: BufferSpec
    "(conv_dim, taps - 1): the inputs that the next step's convolution still sees. Engines may store it transposed."
    recurrent: BufferSpec
    "(local value heads, head_v_dim, head_k_dim): what the delta rule updates."
    max_sequences: int

    @property
    def bytes_per_sequence(self) -> int:
        """Of one layer; it does not grow with the sequence."""
        return total_bytes((self.conv, self.recurrent))

    @property
    def bytes(self) -> int:
        """Of one layer and all sequences."""
        return self.bytes_per_sequence * self.max_sequences

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "conv": self.conv.to_dict(),
            "recurrent": self.recurrent.to_dict(),
            "max_sequences": self.max_sequences,
            "bytes_per_sequence": self.bytes_per_sequence,
            "bytes": self.bytes,
        }


def plan_state(
    spec: GatedDeltaNetSpec,
    *,
    batch: int = 1,
    speculated: int = 0,
    conv_dtype: StateDtype = "bf16",
    recurrent_dtype: StateDtype = "fp32",
) -> StatePlan:
    """The state of a gated delta net.

    Args:
        spec: the layer on its rank, whose local heads are what is kept.
        batch: most sequences.
        speculated: tokens that are speculated per step: the convolution keeps that many inputs more, to go back.
        conv_dtype: of the convolution's inputs: that of the activations.
        recurrent_dtype: of the matrices, which engines let their users set.

    Raises:
        ArgumentValueError: a number or dtype that cannot be.
        ArgumentError: `spec` is no gated delta net's.
    """
    expect("spec", spec, GatedDeltaNetSpec, "the spec of a gated delta net")
    check_counts(batch=batch)
    check_counts(least=0, speculated=speculated)
    for name, dtype in (("conv_dtype", conv_dtype), ("recurrent_dtype", recurrent_dtype)):
        check_word(name, dtype, get_args(StateDtype))
    return StatePlan(
        conv=BufferSpec(
            name="conv_state", shape=(spec.conv_dim, spec.conv_kernel_size - 1 + speculated), dtype=conv_dtype
        ),
        recurrent=BufferSpec(
            name="recurrent_state",
            shape=(spec.num_local_v_heads, spec.head_v_dim, spec.head_k_dim),
            dtype=recurrent_dtype,
        ),
        max_sequences=batch,
    )
