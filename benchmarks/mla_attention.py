"""One MLA attention layer with published dimensions, compiled with and without the dual-norm fusion, on this GPU.

    python benchmarks/mla_attention.py

transformers' own class with random weights in bfloat16, Inductor in both, CUDA graphs replayed in turns. Writes
`benchmarks/results/mla_attention.json`.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from environment import save
from rich.console import Console
from rich.progress import track
from rich.table import Table

from layerfuse import fusion, registry
from layerfuse.testing import config_of

MODELS = ("deepseek-v3", "kimi-k2-instruct")
CASES = [("decode", 1, 0), ("decode", 8, 0), ("decode", 64, 0), ("decode", 1, 1024), ("decode", 8, 1024),
         ("decode", 64, 1024), ("prefill", 8192, 0)]  # fmt: skip
"""Kind, tokens, tokens already in the cache of each sequence."""
ROUNDS = 60


class Past:
    """A cache of fixed length that is read and not advanced: every step sees the same past."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.held: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(self, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Both with their past in front, along the second to last dimension."""
        if self.held is None:
            shapes = [(*x.shape[:-2], self.length, x.shape[-1]) for x in (key, value)]
            self.held = torch.randn(shapes[0]).to(key), torch.randn(shapes[1]).to(value)
        return torch.cat([self.held[0], key], -2), torch.cat([self.held[1], value], -2)


class Layer(torch.nn.Module):
    """The attention of one decoder layer, between tensors."""

    def __init__(self, attention: torch.nn.Module, past: Past | None) -> None:
        super().__init__()
        self.self_attn = attention
        self.past = past

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, hidden_size) to the same."""
        result: torch.Tensor = self.self_attn(hidden, (cos, sin), None, self.past)[0]
        return result


def graph_of(function: Any, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A CUDA graph of one call, and the tensor that it fills."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function(*arguments)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function(*arguments)
    return graph, result


def in_turns(graphs: dict[str, torch.cuda.CUDAGraph]) -> dict[str, list[float]]:
    """Microseconds of each replay, the graphs taking turns."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graph.replay()
            start.record()
            for _ in range(5):
                graph.replay()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop) * 200)
    return times


def measured(name: str, kind: str, tokens: int, past: int) -> dict[str, Any]:
    """One case of one model."""
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as source

    torch.manual_seed(0)
    torch._dynamo.reset()
    config = config_of(registry.model(name))
    config._attn_implementation = "sdpa"
    with torch.device("cuda"):
        attention = source.DeepseekV3Attention(config, layer_idx=0).to(torch.bfloat16).eval()
        for norm in (attention.q_a_layernorm, attention.kv_a_layernorm):
            torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
        rotary = source.DeepseekV3RotaryEmbedding(config)
    batch, length = (tokens, 1) if kind == "decode" else (1, tokens)
    hidden = torch.randn(batch, length, config.hidden_size, device="cuda", dtype=torch.bfloat16)
    positions = torch.arange(past, past + length, device="cuda").expand(batch, -1)
    layer = Layer(attention, Past(past) if past else None)
    with torch.inference_mode():
        arguments = (hidden, *rotary(hidden, positions))
        layer(*arguments)  # makes the past
        fused = fusion.compile(layer)
        plain = fusion.compile(layer, config=fusion.FusionConfig(level=0))
        graphs, results = {}, {}
        for variant, function in (("fused", fused), ("plain", plain)):
            graphs[variant], results[variant] = graph_of(function, arguments)
        times = in_turns(graphs)
    matched = len(fused.report.of("mla_dual_rms_norm").matched)
    if matched != 1:
        raise SystemExit(f"{name}: {fused.report}")
    difference = (results["fused"].float() - results["plain"].float()).norm() / results["plain"].float().norm()
    middle = {variant: statistics.median(values) for variant, values in times.items()}
    pairs = [plain / fused for plain, fused in zip(times["plain"], times["fused"], strict=True)]
    quartiles = statistics.quantiles(pairs, n=4)
    return {
        "model": name, "kind": kind, "tokens": tokens, "past": past,
        "fused_us": middle["fused"], "plain_us": middle["plain"], "plain_to_fused": statistics.median(pairs),
        "quartiles": [quartiles[0], quartiles[2]], "relative_difference": difference.item(),
        "backend": fusion.backends.chosen().get(("mla_dual_rms_norm", "cuda")),
    }  # fmt: skip


def main() -> None:
    """Measure every case and write it down."""
    if not torch.cuda.is_available():
        Console().print("nothing measured: this needs a GPU that torch can see")
        return
    cases = [(name, *case) for name in MODELS for case in CASES]
    results = [measured(*case) for case in track(cases, description="attention")]
    table = Table("model", "case", "past", "Inductor, us", "fused, us", "ratio", "quartiles", "difference")
    for r in results:
        table.add_row(
            r["model"], f"{r['kind']} {r['tokens']}", str(r["past"]), f"{r['plain_us']:.1f}", f"{r['fused_us']:.1f}",
            f"{r['plain_to_fused']:.3f}", "{:.3f} to {:.3f}".format(*r["quartiles"]), f"{r['relative_difference']:.1e}",
        )  # fmt: skip
    Console(width=140).print(table)
    written = save("mla_attention", {"gpu": torch.cuda.get_device_name(), "cases": results})
    Console().print(f"written to {written}")


if __name__ == "__main__":
    main()
