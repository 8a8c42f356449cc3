"""Whether an MLP computes what the spec of a gated one says: seen in its own forward, not guessed by the names of its parts.

Its linears are replaced by some that give and take a few numbers, so that what stands between them shows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..adapters.errors import said
from ..adapters.specs import GatedMLPSpec

_ACTIVATIONS: Mapping[str, Callable[[Any], Any]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu2": lambda x: functional.relu(x).square(),
}


def why_not_gated(layer: nn.Module, spec: GatedMLPSpec) -> str | None:
    """Why this layer's forward is not known to be `down(act(gate) * up)`, clamped and multiplied as its spec says, and nothing else; None where it is.

    Args:
        layer: an MLP with a `down_proj`, and with `gate_proj` and `up_proj` or a `gate_up_proj` of both; it is copied.
        spec: what was read off it.
    """
    activation = _ACTIVATIONS.get(spec.activation)
    if activation is None:
        return f"it is not known how to check a {spec.activation} gate"
    gate, up = torch.linspace(-20, 20, 64)[None, None], torch.linspace(30, -25, 64)[None, None]
    down = _Linear(torch.linspace(-1, 1, 8)[None, None])
    try:
        own = copy.deepcopy(layer).eval()
    except Exception as error:  # as of what holds a lock
        return f"its forward could not be tried: {said(error)}"
    for name, made in {"gate_proj": gate, "up_proj": up, "gate_up_proj": torch.cat((gate, up), -1)}.items():
        if hasattr(own, name):
            setattr(own, name, _Linear(made))
    own.down_proj = down
    other = f"its forward is not down_proj({spec.activation}(gate) * up), which is all that specs describe of an MLP"
    try:
        with torch.no_grad():
            result = own(torch.zeros(1, 1, spec.hidden_size))
        limit, gate = spec.swiglu_limit, gate * spec.gate_multiplier
        gate, up = (gate, up) if limit is None else (gate.clamp(max=limit), up.clamp(-limit, limit))
        torch.testing.assert_close(down.given, [activation(gate) * up])
    except Exception:  # other parts, which take other widths, or another result
        return other
    return None if torch.equal(result, down.made * spec.down_multiplier) else other


class _Linear(nn.Module):  # type: ignore[misc]
    """Stands in for a linear: keeps what it is given, and gives what it was made with."""

    def __init__(self, made: Any) -> None:
        super().__init__()
        self.made = made
        self.given: list[Any] = []

    def forward(self, given: Any) -> Any:
        self.given.append(given)
        return self.made
