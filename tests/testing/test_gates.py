"""Which MLPs are gated ones by what they compute, whatever their parts are called."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from layerfuse.adapters import WHOLE, GatedMLPSpec
from layerfuse.testing.gates import why_not_gated


class MLP(nn.Module):
    """Of 64 columns between its linears, on the meta device, with this between gate and up and the down projection."""

    def __init__(
        self, between: Callable[[Any, Tensor, Tensor], Tensor], *, merged: bool = False, factor: float = 1.0
    ) -> None:
        super().__init__()
        self.between, self.factor = between, factor
        with torch.device("meta"):
            if merged:
                self.gate_up_proj = nn.Linear(16, 128)
            else:
                self.gate_proj, self.up_proj = nn.Linear(16, 64), nn.Linear(16, 64)
            self.down_proj, self.norm = nn.Linear(64, 16), nn.RMSNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        parts = (
            self.gate_up_proj(x).chunk(2, -1) if hasattr(self, "gate_up_proj") else (self.gate_proj(x), self.up_proj(x))
        )
        return F.dropout(self.factor * self.down_proj(self.between(self, *parts)), 0.5, self.training)


def of(activation: str = "silu", limit: float | None = None, factors: tuple[float, float] = (1.0, 1.0)) -> GatedMLPSpec:
    return GatedMLPSpec(
        layer_index=0,
        hidden_size=16,
        parallel=WHOLE,
        intermediate_size=64,
        local_intermediate_size=64,
        activation=activation,
        swiglu_limit=limit,
        gate_multiplier=factors[0],
        down_multiplier=factors[1],
    )


def clamped(_: Any, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate.clamp(max=7.0)) * up.clamp(-7.0, 7.0)


SILU: Callable[[Any, Tensor, Tensor], Tensor] = lambda _, gate, up: F.silu(gate) * up  # noqa: E731
TANH: Callable[[Any, Tensor, Tensor], Tensor] = lambda _, gate, up: up * F.gelu(gate, approximate="tanh")  # noqa: E731


@pytest.mark.parametrize(
    ("layer", "spec"),
    [
        (MLP(SILU), of()),
        (MLP(SILU, merged=True), of()),
        (MLP(lambda _, gate, up: F.gelu(gate) * up), of("gelu")),
        (MLP(TANH), of("gelu_tanh")),
        (MLP(lambda _, gate, up: F.relu(gate) ** 2 * up, merged=True), of("relu2")),
        (MLP(clamped), of(limit=7.0)),
        (MLP(lambda _, gate, up: F.silu(0.5 * gate) * up, factor=3.0), of(factors=(0.5, 3.0))),
    ],
)
def test_what_a_spec_says_is_seen(layer: MLP, spec: GatedMLPSpec) -> None:
    assert why_not_gated(layer, spec) is None
    assert layer.training and layer.down_proj.weight.is_meta  # a copy of it was asked


@pytest.mark.parametrize(
    ("layer", "spec"),
    [
        (MLP(SILU), of("gelu_tanh")),
        (MLP(TANH), of("gelu")),
        (MLP(lambda _, up, gate: F.silu(gate) * up, merged=True), of()),
        (MLP(lambda _, gate, up: F.silu(gate) * (up + 1)), of()),
        (MLP(lambda _, gate, up: F.silu(0.5 * gate) * up), of()),
        (MLP(lambda self, gate, up: self.norm(F.silu(gate) * up)), of()),
        (MLP(clamped), of()),
        (MLP(SILU), of(limit=7.0)),
        (MLP(SILU, factor=2.0), of()),
        (MLP(SILU), of(factors=(0.5, 1.0))),
        (MLP(SILU), of(factors=(1.0, 2.0))),
    ],
)
def test_what_it_does_besides_is_seen_too(layer: MLP, spec: GatedMLPSpec) -> None:
    activation = spec.activation
    assert why_not_gated(layer, spec) == (
        f"its forward is not down_proj({activation}(gate) * up), which is all that specs describe of an MLP"
    )


def test_what_cannot_be_tried_is_not_said_to_compute_something_else() -> None:
    assert why_not_gated(MLP(SILU), of("situ")) == "it is not known how to check a situ gate"
    locked = MLP(SILU)
    locked.lock = threading.Lock()
    assert (
        why_not_gated(locked, of()) == "its forward could not be tried: TypeError: cannot pickle '_thread.lock' object"
    )
