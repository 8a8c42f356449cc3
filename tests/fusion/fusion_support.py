"""What the fusion tests share: specs with the true MLA split dims, small modules of the shapes that engines have, and a
quick compile that runs the rewritten graph op by op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import attrs
import torch
from torch import nn

from layerfuse.adapters.specs import WHOLE, GQASpec, MLASpec, NormSpec
from layerfuse.fusion import FusionConfig, Report, Target, plan
from layerfuse.fusion.call_counter import CallCounter
from layerfuse.fusion.compiler import inductor_with
from layerfuse.fusion.live_plan import module_index_of
from layerfuse.fusion.report import GraphRecord
from layerfuse.fusion.rewrite import Pipeline

Q, KV, ROPE, NOPE, V = 1536, 512, 64, 128, 128
HIDDEN = 64
FUSION = "mla_dual_rms_norm"
TOLERANCE = {
    # The fused op rounds once where transformers rounds twice: one unit in the last place of the low precision.
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1.6e-2},
}


def mla_spec(
    index: int = 0,
    *,
    q_lora_rank: int | None = Q,
    epsilon: float = 1e-6,
    kv_epsilon: float | None = None,
    **changes: Any,
) -> MLASpec:
    fields: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "layer_index": index,
        "parallel": WHOLE,
        "num_heads": 2,
        "num_local_heads": 2,
        "q_lora_rank": q_lora_rank,
        "kv_lora_rank": KV,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": V,
        "q_norm": None if q_lora_rank is None else NormSpec(width=q_lora_rank, epsilon=epsilon),
        "kv_norm": NormSpec(width=KV, epsilon=epsilon if kv_epsilon is None else kv_epsilon),
        "softmax_scale": 192**-0.5,
    }
    return MLASpec(**{**fields, **changes})


def with_modules(spec: MLASpec, q_module: str = "q_norm", kv_module: str = "kv_norm") -> MLASpec:
    """The same, with norms that say which modules they were read from, as those of a real model do."""
    q_norm = None if spec.q_norm is None else attrs.evolve(spec.q_norm, module=q_module)
    return attrs.evolve(spec, q_norm=q_norm, kv_norm=attrs.evolve(spec.kv_norm, module=kv_module))


def gqa_spec(index: int = 0) -> GQASpec:
    return GQASpec(
        hidden_size=HIDDEN,
        layer_index=index,
        parallel=WHOLE,
        num_heads=4,
        num_local_heads=4,
        num_kv_heads=2,
        num_local_kv_heads=2,
        head_dim=16,
        v_head_dim=16,
        softmax_scale=0.25,
        sliding_window=None,
        has_sinks=True,
    )


@dataclass
class Traced:
    """What came of a quick compile."""

    output: Any
    report: Report
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)

    @property
    def fused(self) -> int:
        """Fused ops in all rewritten graphs, counted in the graphs themselves."""
        return sum(text.count("layerfuse.mla_dual_rms_norm") for text in self.after)


def trace(
    function: Callable[..., Any],
    *args: Any,
    specs: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    grad: bool = False,
    config: FusionConfig | None = None,
    by_weight: bool = True,
    by_path: bool = False,
    target: Target | None = None,
    lower: Callable[..., Any] = lambda gm, _inputs, **_: gm,
    **compile_kwargs: Any,
) -> Traced:
    """Compile with the rewriting, run op by op, and keep the graphs' texts.

    A module is tied by its weights and its call is counted, as `fusion.compile` does. With `by_weight` False only what
    tracing leaves on the nodes is there to go by, as in a slot of another compiler; with `by_path` the model's own paths
    too, as in vLLM's.
    """
    torch._dynamo.reset()
    made = plan(specs, target or Target.named("cpu"), config)
    model = function if by_weight and isinstance(function, nn.Module) else None
    around = module_index_of(function) if isinstance(function, nn.Module) and (by_weight or by_path) else None
    pipeline = Pipeline(made, around=around)
    counter = None if model is None or around is None else CallCounter(model, made, pipeline.report, around)
    traced = Traced(None, pipeline.report)

    def recorded(graph: torch.fx.Graph) -> GraphRecord:
        traced.before.append(graph_text(graph))
        record = pipeline.rewrite(graph)
        graph.lint()
        traced.after.append(graph_text(graph))
        return record

    backend = inductor_with(recorded, model, lower=lower, counter=counter)
    compiled = torch.compile(function, backend=backend, **compile_kwargs)
    with torch.set_grad_enabled(grad), nullcontext() if counter is None else counter.call():
        traced.output = compiled(*args, **(kwargs or {}))
    return traced


def graph_text(graph: torch.fx.Graph) -> str:
    """The graph as text that does not depend on node names: values numbered, ops by name, shapes and dtypes."""
    numbers: dict[torch.fx.Node, str] = {}

    def show(value: Any) -> str:
        if isinstance(value, torch.fx.Node):
            return numbers[value]
        if isinstance(value, list | tuple):
            return "[" + ", ".join(map(show, value)) + "]"
        return str(value)

    lines = []
    for node in graph.nodes:
        numbers[node] = f"%{len(numbers)}"
        args = ", ".join([*map(show, node.args), *(f"{k}={show(v)}" for k, v in node.kwargs.items())])
        val = node.meta.get("val")
        type_ = ""
        if isinstance(val, torch.Tensor):
            type_ = f"  {str(val.dtype).removeprefix('torch.')}[{', '.join(map(str, val.shape))}]"
        target = str(node.target).removesuffix(".default") if node.op == "call_function" else node.op
        target = "getitem" if "getitem" in target else target
        lines.append(f"{numbers[node]} = {target}({args}){type_}")
    return "\n".join(lines)


class LlamaNorm(nn.Module):
    """As transformers writes it: rounded before the weight."""

    def __init__(self, width: int, epsilon: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.weight * x.to(dtype)


class FlippedNorm(LlamaNorm):
    """The same with every product the other way round, and x*x for the square."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        normed = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + self.epsilon) * wide
        return normed.to(x.dtype) * self.weight


class WideNorm(LlamaNorm):
    """Weight and result in float32, rounded once, with the input widened twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        variance = x.float().pow(2).mean(-1, keepdim=True)
        return (x.float() * torch.rsqrt(variance + self.epsilon) * self.weight.float()).type_as(x)


class CanonicalNorm(LlamaNorm):
    """Our own op."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.layerfuse.rms_norm(x, self.weight, self.epsilon, 0.0)


def torch_norm(width: int, epsilon: float = 1e-6) -> nn.RMSNorm:
    norm = nn.RMSNorm(width, eps=epsilon)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    return norm


NORMS: dict[str, Callable[..., nn.Module]] = {
    "llama": LlamaNorm,
    "flipped": FlippedNorm,
    "wide": WideNorm,
    "torch": torch_norm,
    "canonical": CanonicalNorm,
}


class FusedProjection(nn.Module):
    """vLLM's shape: one down-projection, split in two steps, rope on the rest."""

    def __init__(
        self, norm: Callable[..., nn.Module] = LlamaNorm, epsilon: float = 1e-6, kv_epsilon: float = 1e-6
    ) -> None:
        super().__init__()
        self.down = nn.Linear(HIDDEN, Q + KV + ROPE, bias=False)
        self.q_norm = norm(Q, epsilon)
        self.kv_norm = norm(KV, kv_epsilon)
        self.up = nn.Linear(Q, 32, bias=False)

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, rest = self.down(x).split([Q, KV + ROPE], dim=-1)
        kv, k_pe = rest.split([KV, ROPE], dim=-1)
        return q, kv, k_pe

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, kv, k_pe = self.split(x)
        return self.up(self.q_norm(q)), self.kv_norm(kv), torch.cat([-k_pe[..., 32:], k_pe[..., :32]], -1)


class TwoProjections(FusedProjection):
    """transformers' shape: the query goes on to its up-projection before the keys are projected at all."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.down = nn.Linear(HIDDEN, Q, bias=True)
        self.kv_down = nn.Linear(HIDDEN, KV + ROPE, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q = self.up(self.q_norm(self.down(x)))
        kv, k_pe = self.kv_down(x).split([KV, ROPE], dim=-1)
        return q, self.kv_norm(kv), k_pe * 2


class Layer(nn.Module):
    """Puts a module at a path that a spec can name."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *given: torch.Tensor) -> Any:
        return self.layer(*given)
