"""What looks like a gated norm and is not the one that the spec says: left alone, with the reason, and counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fusion_support import HIDDEN, trace
from gated_support import FORMS, GATED, HEADS, WIDTH, GatedNorm, Heads, Rounded, RoundedBefore, delta_net
from torch import Tensor, nn
from torch.nn import functional as F
from torch.torch_version import TorchVersion


class PerHead(Heads):
    """One gate for all columns of a head."""

    def forward(self, hidden: Tensor) -> Tensor:
        core, gate = self.halves(hidden)
        return self.norm(core, gate.unflatten(-1, (HEADS, WIDTH))[..., :1])


class NotGated(GatedNorm):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return (self.unit(x.float()) * self.weight.float()).to(x.dtype) + gate


class ReadTwice(RoundedBefore):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        normed = self.weight * self.unit(x.float()).to(x.dtype)
        return (normed * self.activation(gate.float())).to(x.dtype) + normed.abs()


class Low(GatedNorm):
    """The mean square in the model's dtype."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.unit(x) * self.weight * self.activation(gate)


class LeftWide(GatedNorm):
    """The result is not rounded."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.unit(x.float()) * self.weight.float() * self.activation(gate.float())


class Steep(GatedNorm):
    """A swish that is not silu."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        wide = gate.float()
        return (self.unit(x.float()) * self.weight.float() * (wide * torch.sigmoid(1.702 * wide))).to(x.dtype)


class TwoGates(GatedNorm):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        wide = gate.float()
        return (self.unit(x.float()) * wide.sigmoid() * F.silu(wide.abs()) * self.weight.float()).to(x.dtype)


class FactorBehind(GatedNorm):
    """sigmoid(gate), and then the gate itself: a silu that is not gathered before the weight."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        wide = gate.float()
        return (self.unit(x.float()) * wide.sigmoid() * wide * self.weight.float()).to(x.dtype)


class Between(GatedNorm):
    """A factor of its own between a gate and its sigmoid."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        wide = gate.float()
        normed = self.unit(x.float()) * self.weight.float()
        return (normed * wide * self.activation(wide.flip(-1)) * wide.sigmoid()).to(x.dtype)


class BeforeTheWeight(GatedNorm):
    """The gate first, and a factor that is no part of the norm before the weight."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        wide = gate.float()
        return (self.unit(x.float() * self.activation(wide)) * wide.flip(-1) * self.weight.float()).to(x.dtype)


class Coarse(GatedNorm):
    """Rounded on the way to fewer bits than the model's."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        normed = self.unit(x.float()).to(torch.bfloat16).float() * self.weight.float()
        return (normed * self.activation(gate.float())).to(x.dtype)


LOOK_ALIKES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "tanh": (lambda: Heads(GatedNorm(torch.tanh)), {}, "aten.tanh.default), which is no silu or sigmoid"),
    "relu": (lambda: Heads(Rounded(torch.relu)), {}, "aten.relu.default), which is no silu or sigmoid"),
    "gelu": (lambda: Heads(GatedNorm(F.gelu)), {}, "which is no silu or sigmoid of a gate"),
    "a steeper swish": (lambda: Heads(Steep()), {}, "which is no silu or sigmoid of a gate"),
    "a gate per head": (lambda: PerHead(GatedNorm()), {}, "is broadcast to"),
    "no gate": (lambda: Heads(NotGated()), {}, "is no product with a gate"),
    "another activation": (lambda: Heads(GatedNorm(torch.sigmoid)), {}, "passes through sigmoid; the spec says silu"),
    "the gate first": (lambda: Heads(GatedNorm(before=False)), {}, "gates before it norms; the spec says that it norms"),
    "the norm first": (lambda: Heads(GatedNorm()), {"before": False}, "norms before it gates; the spec says that it gates"),
    "epsilon": (lambda: Heads(GatedNorm(epsilon=1.1e-6)), {}, "has epsilon 1.1e-06; the spec says 1e-06"),
    "epsilon, rounded": (lambda: Heads(RoundedBefore(epsilon=1.1e-6)), {}, "has epsilon 1.1e-06; the spec says 1e-06"),
    "zero-centred": (lambda: Heads(FORMS["zero-centred"][0]()), {}, "adds 1 to its weight; the spec says 0"),
    "not zero-centred": (lambda: Heads(GatedNorm()), {"offset": 1.0}, "adds 0 to its weight; the spec says 1"),
    "another reader": (lambda: Heads(ReadTwice()), {}, "2 nodes read"),
    "accumulated in bfloat16": (lambda: Heads(Low()), {}, "is normed in torch.bfloat16, and the fused op norms in float32"),
    "two gates": (lambda: Heads(TwoGates()), {}, "which is no silu or sigmoid of a gate"),
    "a factor behind": (lambda: Heads(FactorBehind()), {}, "which is no silu or sigmoid of a gate"),
    "a silu between": (lambda: Heads(Between()), {}, "which is no silu or sigmoid of a gate"),
    "a sigmoid between": (lambda: Heads(Between(torch.sigmoid)), {}, "which is no silu or sigmoid of a gate"),
    "a factor before the weight": (
        lambda: Heads(BeforeTheWeight()), {"before": False}, "which is no silu or sigmoid of a gate"
    ),
    "not rounded": (lambda: Heads(LeftWide()), {}, "is torch.float32, and its input"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_a_look_alike_is_left_alone_with_its_reason(name: str) -> None:
    make, changes, reason = LOOK_ALIKES[name]
    model = make().bfloat16()
    hidden = torch.randn(2, 3, HIDDEN, dtype=torch.bfloat16)
    traced = trace(model, hidden, specs=[("", delta_net(**changes))])
    assert traced.after == traced.before
    verdict = traced.report.of(GATED)
    assert (len(verdict.expected), verdict.matched, verdict.last_call) == (1, (), 0)
    assert reason in verdict.missed["output"]
    torch.testing.assert_close(traced.output, model(hidden))


@pytest.mark.skipif(TorchVersion(torch.__version__) < (2, 13), reason="Inductor takes such a rounding out by itself")
def test_a_rounding_to_fewer_bits_than_the_models_is_left_alone() -> None:
    traced = trace(Heads(Coarse()), torch.randn(2, 3, HIDDEN), specs=[("", delta_net())])
    assert traced.after == traced.before
    assert (
        "rounds to torch.bfloat16, and the fused op to torch.float32 only" in traced.report.of(GATED).missed["output"]
    )


def test_a_plain_norm_behind_a_gate_is_no_gated_norm() -> None:
    # As wide as the heads and gated by accident: its spec says that it is plain.
    from layerfuse.adapters.specs import WHOLE, FinalNormSpec, NormSpec

    norm = NormSpec(width=WIDTH, epsilon=1e-6, module="norm")
    spec = FinalNormSpec(hidden_size=WIDTH, layer_index=1, parallel=WHOLE, final_norm=norm)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.net = GatedNorm(), Heads(GatedNorm())

        def forward(self, hidden: Tensor) -> Tensor:
            total = hidden + hidden.sin()
            return self.norm(total, hidden).sum(-1), self.net(hidden[..., :HIDDEN])

    model = Model()
    traced = trace(model, torch.randn(2, 3, WIDTH), specs=[("", spec), ("net", delta_net())])
    assert traced.report.of(GATED).matched == ("net:output",)
    assert "layerfuse.gated_rms_norm(" in traced.after[0] and "layerfuse.add_rms_norm(" in traced.after[0]
