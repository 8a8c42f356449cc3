"""What the tests of gated norms and of gated MLPs share: the ways in which models write them, specs, and the exact result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fusion_support import HIDDEN
from quant_support import dequantise
from torch import Tensor, nn
from torch.nn import functional as F

from layerfuse.adapters.specs import WHOLE, GatedDeltaNetSpec, GatedMLPSpec, GatedNormSpec

HEADS, WIDTH = 4, 128
INNER = 256
GATED = "gated_rms_norm"
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


def delta_net(
    activation: str = "silu", *, epsilon: float = 1e-6, before: bool = True, offset: float = 0.0, index: int = 0
) -> GatedDeltaNetSpec:
    norm = GatedNormSpec(
        width=WIDTH, epsilon=epsilon, weight_offset=offset, activation=activation, norm_before_gate=before,
        group_size=None, module="norm",
    )  # fmt: skip
    return GatedDeltaNetSpec(
        hidden_size=HIDDEN, layer_index=index, parallel=WHOLE, num_k_heads=HEADS, num_v_heads=HEADS,
        num_local_k_heads=HEADS, num_local_v_heads=HEADS, head_k_dim=WIDTH, head_v_dim=WIDTH, conv_kernel_size=4,
        output_norm=norm,
    )  # fmt: skip


def mlp(limit: float | None = None, activation: str = "silu", width: int = INNER, index: int = 0) -> GatedMLPSpec:
    return GatedMLPSpec(
        hidden_size=HIDDEN, layer_index=index, parallel=WHOLE, intermediate_size=width, local_intermediate_size=width,
        activation=activation, swiglu_limit=limit,
    )  # fmt: skip


# ---- gated norms, as models write them -------------------------------------------------------------------------------


class GatedNorm(nn.Module):
    """Everything in float32, rounded at the end, as vLLM writes it. The other forms differ in a line or two."""

    def __init__(
        self, activation: Callable[[Tensor], Tensor] = F.silu, before: bool = True, epsilon: float = 1e-6
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.activation, self.before, self.epsilon = activation, before, epsilon

    def unit(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        wide, factor = x.float(), self.activation(gate.float())
        if not self.before:
            return (self.unit(wide * factor) * self.weight.float()).to(x.dtype)
        return (self.unit(wide) * self.weight.float() * factor).to(x.dtype)


class RoundedBefore(GatedNorm):
    """Rounded before the weight, as Qwen3-Next does: with a float32 weight the product is float32."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        normed = self.weight * self.unit(x.float()).to(x.dtype)
        return (normed * self.activation(gate.float())).to(x.dtype)


class Rounded(GatedNorm):
    """Gate and norm in the model's dtype, with the gate's factor first."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.activation(gate) * (self.unit(x.float()).to(x.dtype) * self.weight)


class ZeroCentred(GatedNorm):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        normed = self.unit(x.float()) * (1.0 + self.weight.float())
        return (normed * self.activation(gate.float())).to(x.dtype)


class Factors(GatedNorm):
    """One factor after the other, the weight last: y * z * sigmoid(z)."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        wide = gate.float()
        return (wide.sigmoid() * (self.unit(x.float()) * wide) * self.weight.float()).to(x.dtype)


class RoundedProduct(GatedNorm):
    """Mamba's: the gated input is normed, rounded, and multiplied by the weight."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.weight * self.unit(x.float() * self.activation(gate.float())).to(x.dtype)


class OneOp(GatedNorm):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        normed = torch.ops.layerfuse.rms_norm(x, self.weight.to(x.dtype), self.epsilon, 0.0)
        return normed * self.activation(gate)


def by_hand(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def silu_by_hand(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


FORMS: dict[str, tuple[Callable[[], nn.Module], str, bool, float]] = {
    # name -> module, activation, norm before gate, weight offset
    "silu": (GatedNorm, "silu", True, 0.0),
    "sigmoid": (lambda: GatedNorm(torch.sigmoid), "sigmoid", True, 0.0),
    "sigmoid by hand": (lambda: GatedNorm(by_hand), "sigmoid", True, 0.0),
    "silu by hand": (lambda: GatedNorm(silu_by_hand), "silu", True, 0.0),
    "after the gate": (lambda: GatedNorm(before=False), "silu", False, 0.0),
    "after a sigmoid gate": (lambda: GatedNorm(torch.sigmoid, before=False), "sigmoid", False, 0.0),
    "rounded before the weight": (RoundedBefore, "silu", True, 0.0),
    "all rounded": (Rounded, "silu", True, 0.0),
    "all rounded, sigmoid": (lambda: Rounded(torch.sigmoid), "sigmoid", True, 0.0),
    "zero-centred": (ZeroCentred, "silu", True, 1.0),
    "zero-centred, sigmoid": (lambda: ZeroCentred(torch.sigmoid), "sigmoid", True, 1.0),
    "factor by factor": (Factors, "silu", True, 0.0),
    "rounded product": (RoundedProduct, "silu", False, 0.0),
    "one op": (OneOp, "silu", True, 0.0),
}


def exact(norm: Any, x: Tensor, gate: Tensor, activation: str, before: bool, offset: float) -> Tensor:
    """The gated norm in float64."""
    wide, factor = x.double(), ACTIVATIONS[activation](gate.double())
    given = wide if before else wide * factor
    unit = given * torch.rsqrt(given.pow(2).mean(-1, keepdim=True) + norm.epsilon) * (norm.weight.double() + offset)
    return unit * factor if before else unit


class Heads(nn.Module):
    """What is around a delta net's norm: the recurrence's result, and a gate that is a column range of a projection."""

    def __init__(self, norm: nn.Module, layout: str = "heads") -> None:
        super().__init__()
        self.norm, self.layout = norm, layout
        self.proj = nn.Linear(HIDDEN, 2 * HEADS * WIDTH, bias=False)

    def halves(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        core, gate = self.proj(hidden).split([HEADS * WIDTH, HEADS * WIDTH], -1)
        return core.sin().unflatten(-1, (HEADS, WIDTH)), gate

    def forward(self, hidden: Tensor) -> Tensor:
        core, gate = self.halves(hidden)
        if self.layout == "heads":
            gate = gate.unflatten(-1, (HEADS, WIDTH))
        elif self.layout == "flat":
            core, gate = core.reshape(-1, WIDTH), gate.reshape(-1, WIDTH)
        elif self.layout == "tokens":
            core, gate = core.flatten(0, -3), gate.flatten(0, -2).unflatten(-1, (HEADS, WIDTH))
        return self.norm(core, gate).reshape(*hidden.shape[:-1], HEADS * WIDTH)


# ---- gated MLPs, as models write them --------------------------------------------------------------------------------


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def flipped(gate: Tensor, up: Tensor) -> Tensor:
    return up * F.silu(gate)


def widened(gate: Tensor, up: Tensor) -> Tensor:
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)


def in_factors(gate: Tensor, up: Tensor) -> Tensor:
    return gate * torch.sigmoid(gate) * up


def clamped(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate.clamp(max=0.5)) * up.clamp(min=-0.5, max=0.5)


def clamped_in_order(gate: Tensor, up: Tensor) -> Tensor:
    return torch.clamp_min(torch.clamp_max(up.float(), 0.5), -0.5).to(up.dtype) * F.silu(gate.clamp(max=0.5))


PRODUCTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], float | None]] = {
    "silu(gate) * up": (swiglu, None),
    "up * silu(gate)": (flipped, None),
    "widened": (widened, None),
    "gate * sigmoid(gate) * up": (in_factors, None),
    "clamped": (clamped, 0.5),
    "clamped in another order": (clamped_in_order, 0.5),
}


class GatedMLP(nn.Module):
    """A gated MLP whose down projection takes quantised activations, which are dequantised before it here."""

    def __init__(
        self,
        quantise: Callable[[Tensor], tuple[Tensor, ...]] | None,
        product: Callable[[Tensor, Tensor], Tensor] = swiglu,
        merged: bool = True,
        width: int = INNER,
    ) -> None:
        super().__init__()
        self.quantise, self.product, self.merged = quantise, product, merged
        self.gate_up_proj = nn.Linear(HIDDEN, 2 * width, bias=False)
        self.gate_proj, self.up_proj = (nn.Linear(HIDDEN, width, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(width, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        halves = self.gate_up_proj(x).chunk(2, -1) if self.merged else (self.gate_proj(x), self.up_proj(x))
        product = self.product(*halves)
        return self.down_proj(product if self.quantise is None else dequantise(*self.quantise(product)).to(x.dtype))
