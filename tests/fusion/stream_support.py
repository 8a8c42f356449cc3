"""What the tests of the residual stream's fusions share: one add and norm, and what may read the norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fusion_support import Layer, Traced, trace
from quant_support import CPU_FP8, config
from torch import Tensor, nn

from layerfuse.adapters.specs import WHOLE, NormSpec, ResidualSpec

WIDTH = 256
SITE = "layer:input"
EPSILON = 1e-6


def stream_spec(offset: float = 0.0, epsilon: float = EPSILON, width: int = WIDTH) -> ResidualSpec:
    norm = NormSpec(width=width, epsilon=epsilon, weight_offset=offset, module="norm")
    other = NormSpec(width=width, epsilon=epsilon, module="other")
    return ResidualSpec(
        hidden_size=width, layer_index=1, parallel=WHOLE, input_norms=(norm,), post_attention_norms=(other,)
    )


class Norm(nn.Module):
    """As transformers writes it, in bfloat16: `after_weight` rounds once, as Gemma and torch do."""

    def __init__(self, width: int = WIDTH, offset: float = 0.0, after_weight: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.rand(width) + 0.5 - offset).bfloat16())
        self.offset, self.after_weight = offset, after_weight

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
        weight = self.weight + self.offset if self.offset else self.weight
        return ((wide if self.after_weight else wide.to(x.dtype)) * weight).to(x.dtype)


class Stream(nn.Module):
    """`norm(x + residual)`, and what reads it."""

    def __init__(self, reads: Callable[[Tensor], Any], norm: nn.Module | None = None, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = norm or Norm(width)
        self.reads = reads

    def forward(self, x: Tensor, residual: Tensor) -> Any:
        total = x + residual
        given = self.reads(self.norm(total))
        return (*(given if isinstance(given, tuple) else (given,)), total)


def rows(count: int = 5, dtype: torch.dtype = torch.bfloat16, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    x, residual = torch.randn(count, width).to(dtype), torch.randn(count, width).to(dtype)
    return x, residual


class _Checked(torch.fx.Interpreter):
    """Runs a graph op by op, and holds every tensor against what the graph says of it: Inductor relies on that."""

    def run_node(self, n: torch.fx.Node) -> Any:
        given, said = super().run_node(n), n.meta.get("val")
        if isinstance(given, Tensor) and isinstance(said, Tensor) and all(isinstance(s, int) for s in said.shape):
            strides = [stride for stride, size in zip(said.stride(), said.shape, strict=True) if size > 1]
            found = [stride for stride, size in zip(given.stride(), given.shape, strict=True) if size > 1]
            assert (given.shape, given.dtype, found) == (said.shape, said.dtype, strides), f"{n}: {n.meta['val']}"
        return given


def checked(gm: Any, _inputs: Any, **_: Any) -> Any:
    return lambda *given: _Checked(gm).run(*given)


def run(module: nn.Module, quant: str | None, *given: Tensor, **changes: Any) -> Traced:
    """Compiled op by op with everything expected at the site's two fusions."""
    settings: dict[str, Any] = {
        "specs": [("layer", stream_spec(width=given[0].shape[-1]))],
        "config": None if quant is None else config(quant),
        "target": CPU_FP8,
        "lower": checked,
        **changes,
    }
    return trace(Layer(module), *given, **settings)


def form_of(traced: Traced) -> str | None:
    """The op that the site's use became."""
    (use,) = [use for graph in traced.report.records for use in graph.uses if use.site == SITE]
    return use.form


def exact_norm(module: Any, x: Tensor, residual: Tensor) -> Tensor:
    """The norm of the sum in float64, rounded nowhere."""
    wide = x.double() + residual.double()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)
    return wide * (module.norm.weight.detach().double() + getattr(module.norm, "offset", 0.0))
