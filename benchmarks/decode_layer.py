"""End to end: one decoder layer at decode, compiled with and without the fusions, as replayed CUDA graphs.

    python benchmarks/decode_layer.py [deepseek-v3] [qwen3-next] --tokens 1,8,64 [--each] [--save]

DeepSeek-V3: a layer with a dense MLP, every linear in fp8 with block scales (`block_gemm`), those
that read one hidden state merged as engines merge them. Qwen3-Next: a delta net and the
dense MLP of its configuration in bfloat16; the recurrence is one opaque op, flash-linear-attention's where it is installed.
The classes are transformers'. The cache is empty, so that what is timed are projections, norms and what lies between; the
residual is added in front, as in a stack of layers. Against it: torch.compile, the better of plain and combo kernels.
`--each` also switches every fusion that ran on alone: what each contributes. Graphs take turns; medians and ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from block_gemm import layout, replace, try_out
from environment import save
from torch import Tensor, nn

from layerfuse import fusion, registry
from layerfuse.adapters.specs import Parallel
from layerfuse.fusion import ActivationQuant, FusionConfig, Target
from layerfuse.testing import config_of

ROUNDS = 60
ALONE = Parallel(size=1, rank=0)
COMBO = {"combo_kernels": True}
VARIANTS: dict[str, dict[str, Any]] = {"plain": {}, "combo": {"options": COMBO}}


class Step(nn.Module):
    """A decoder layer between two others: what the one before gave is added in front, the last add is left to the next."""

    def __init__(
        self, layer: nn.Module, mixer: Callable[..., Any], reduce: Callable[[Tensor], Tensor] = lambda part: part
    ) -> None:
        super().__init__()
        self.layer = layer
        self.mixer, self.reduce = mixer, reduce

    def forward(self, x: Tensor, residual: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, 1, hidden_size) twice, to the same. `reduce` makes of a rank's part what joins the residual."""
        residual = residual + self.reduce(x)
        mixed = self.mixer(self.layer.input_layernorm(residual), cos, sin)
        residual = residual + self.reduce(mixed)
        result = self.layer.mlp(self.layer.post_attention_layernorm(residual))
        return result[0] if isinstance(result, tuple) else result, residual


def scaled(layer: nn.Module) -> nn.Module:
    """Norm weights around one, so that a result shows them; linears that keep the size of a row."""
    for name, parameter in layer.named_parameters():
        if parameter.dim() == 1 and "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
        elif parameter.dim() == 2:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return layer.eval().requires_grad_(False)


def of_this_rank(parallel: Parallel, *linears: nn.Module) -> None:
    """Other weights on each rank where its parts of sums come from. All else is drawn alike."""
    for linear in linears if parallel.size > 1 else ():
        generator = torch.Generator(linear.weight.device).manual_seed(1 + (parallel.rank or 0))
        nn.init.normal_(linear.weight, std=linear.weight.shape[1] ** -0.5, generator=generator)


def deepseek(device: str, tiny: bool, parallel: Parallel = ALONE) -> tuple[Step, Any, FusionConfig]:
    """The layer in fp8, or one rank's part of it."""
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as source

    config = config_of(registry.model("deepseek-v3"))
    config._attn_implementation = "sdpa"
    if tiny:
        config.num_attention_heads = config.num_key_value_heads = max(2, parallel.size)
        config.hidden_size, config.intermediate_size = 512, 512
    config.num_attention_heads //= parallel.size
    config.num_key_value_heads //= parallel.size
    config.intermediate_size //= parallel.size
    with torch.device(device):
        layer = scaled(source.DeepseekV3DecoderLayer(config, layer_idx=1).to(torch.bfloat16))
        rotary = source.DeepseekV3RotaryEmbedding(config)
    attention = layer.self_attn
    of_this_rank(parallel, attention.o_proj, layer.mlp.down_proj)
    for module, names in (
        (attention, ("q_a_proj", "kv_a_proj_with_mqa")),
        (attention, ("q_b_proj",)),
        (attention, ("kv_b_proj",)),
        (attention, ("o_proj",)),
        (layer.mlp, ("gate_proj", "up_proj")),
        (layer.mlp, ("down_proj",)),
    ):
        replace(module, *names)
    step = Step(layer, lambda hidden, cos, sin: attention(hidden, (cos, sin), None)[0])
    return step, rotary, FusionConfig(level=2, quant=ActivationQuant(group_size=128, column_major=layout == ["column"]))


QWEN_INTERMEDIATE = 5120
"""Of Qwen/Qwen3-Next-80B-A3B-Instruct's configuration. The declared model says nothing of dense MLPs, as none of its layers has one."""


def qwen(device: str, tiny: bool) -> tuple[Step, Any, FusionConfig]:
    """The layer of a delta net in bfloat16, with a dense MLP."""
    from transformers.models.qwen3_next import modeling_qwen3_next as source

    config = config_of(registry.model("qwen3-next-80b-a3b"))
    config._attn_implementation = "sdpa"
    config.mlp_only_layers = [1]
    config.intermediate_size = QWEN_INTERMEDIATE
    if tiny:
        config.hidden_size, config.intermediate_size = 256, 256
        config.linear_num_value_heads, config.linear_num_key_heads = 4, 2
    recurrence = _recurrence()
    source.torch_chunk_gated_delta_rule = recurrence
    with torch.device(device):
        layer = scaled(source.Qwen3NextDecoderLayer(config, layer_idx=1).to(torch.bfloat16))
        rotary = source.Qwen3NextRotaryEmbedding(config)
    net = layer.linear_attn
    return Step(layer, lambda hidden, *_: net(hidden)), rotary, FusionConfig(level=2)


def _recurrence() -> Callable[..., Any]:
    """One step from an empty state, as one op."""
    try:
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as kernel
    except ImportError:
        kernel = None
    print(f"recurrence: {'flash-linear-attention' if kernel is not None else 'plain torch'}")

    @torch.library.custom_op("layerfuse_benchmarks::delta_step", mutates_args=())
    def delta_step(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        repeats = value.shape[2] // query.shape[2]
        query, key = (each.repeat_interleave(repeats, 2) for each in (query, key))
        if kernel is not None and value.is_cuda:
            out: Tensor = kernel(query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]
            return out.contiguous()
        query, key = (nn.functional.normalize(each.float(), dim=-1, eps=1e-6) for each in (query, key))
        inner = (query * key).sum(-1, keepdim=True) * query.shape[-1] ** -0.5
        return (inner * value.float() * beta.float().unsqueeze(-1)).to(value.dtype)

    delta_step.register_fake(lambda query, key, value, g, beta: torch.empty_like(value))  # noqa: ARG005

    def recurrence(query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **_: Any) -> Any:
        return delta_step(query, key, value, g, beta), None

    return recurrence


LAYERS = {"deepseek-v3": deepseek, "qwen3-next": qwen}


# ---- measuring


def graph_of(function: Callable[..., Any], arguments: tuple[Tensor, ...]) -> tuple[Callable[[], None], Any]:
    """What replays one call, and its result. On a CPU: the call."""
    for _ in range(3):
        result = function(*arguments)
    if not arguments[0].is_cuda:
        return lambda: function(*arguments), result
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function(*arguments)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Of this thread's calls: NCCL has others, which look at events.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = function(*arguments)
    return graph.replay, result


def in_turns(
    replays: dict[str, Callable[[], None]], cuda: bool, repeats: int = 5, line_up: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """Microseconds of each call, all taking turns. `line_up` is called before each start."""
    times: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(ROUNDS if cuda else 5):
        for name, replay in replays.items():
            replay()
            line_up()
            if cuda:
                start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                for _ in range(repeats):
                    replay()
                stop.record()
                stop.synchronize()
                times[name].append(start.elapsed_time(stop) * 1000 / repeats)
            else:
                begun = time.perf_counter()
                replay()
                times[name].append((time.perf_counter() - begun) * 1e6)
    return times


def per_call(report: Any) -> dict[str, int]:
    """How often each fusion ran in a call."""
    found: dict[str, int] = {}
    for (_, fused), count in report.executed.items():
        found[fused] = found.get(fused, 0) + round(count / max(report.calls, 1))
    return found


def measured(name: str, tokens: int, device: str, each: bool) -> dict[str, Any]:
    """One layer at one number of tokens."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    step, rotary, config = LAYERS[name](device, device == "cpu")
    if device == "cuda" and name == "deepseek-v3":
        print(f"GEMM at {try_out(tokens)}")
    hidden = step.layer.hidden_size
    x, residual = (torch.randn(tokens, 1, hidden, device=device).bfloat16() for _ in range(2))
    cos, sin = rotary(x, torch.zeros(tokens, 1, dtype=torch.long, device=device))
    arguments = (x, residual, cos, sin)
    replays: dict[str, Callable[[], None]] = {}
    results: dict[str, Any] = {}
    reports: dict[str, dict[str, int]] = {}

    def arm(label: str, wanted: FusionConfig, **options: Any) -> Any:
        torch._dynamo.reset()
        compiled = fusion.compile(
            step,
            config=wanted,
            target=target,
            parallel=ALONE,
            fullgraph=True,
            dynamic=False,
            **options,
        )
        replays[label], results[label] = graph_of(compiled, arguments)
        reports[label] = one_call = per_call(compiled.report)
        print(f"  {label}: " + (", ".join(f"{fused} x{count}" for fused, count in one_call.items()) or "nothing fused"),
              flush=True)  # fmt: skip
        return compiled

    target = None if device == "cuda" else Target(arch="cpu", vendor="cpu", fp8="e4m3fn")
    variants = VARIANTS if device == "cuda" else {"plain": {}}
    none = FusionConfig(level=0)
    last = None
    with torch.inference_mode():
        for variant, options in variants.items():
            arm(f"torch.compile, {variant}", none, **options)
            last = arm(f"all fusions, {variant}", config, **options)
        if each:
            for fused in reports[f"all fusions, {variant}"]:
                alone = FusionConfig(level=0, switches={fused: True}, quant=config.quant)
                for variant, options in variants.items():
                    arm(f"{fused}, {variant}", alone, **options)
        times = in_turns(replays, device == "cuda")
    print(last.report)
    return _gathered(name, tokens, times, results, reports)


def _gathered(name: str, tokens: int, times: dict[str, list[float]], results: Any, reports: Any) -> dict[str, Any]:
    middle = {label: statistics.median(several) for label, several in times.items()}
    best: dict[str, float] = {}
    for label, us in middle.items():
        arm = label.rpartition(", ")[0]
        best[arm] = min(us, best.get(arm, us))
    base = best.pop("torch.compile")
    first = results["torch.compile, plain"][0].float()
    off = {label: float((result[0].float() - first).norm() / first.norm()) for label, result in results.items()}
    print(f"{name}, {tokens} tokens: torch.compile {base:.1f} us"
          + "".join(f"; {arm} {us:.1f} us, {base / us:.3f}" for arm, us in best.items()), flush=True)  # fmt: skip
    return {"model": name, "tokens": tokens, "us": middle, "torch_compile_us": base,
            "ratios": {arm: base / us for arm, us in best.items()}, "executed_per_call": reports,
            "relative_difference": off}  # fmt: skip


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[*LAYERS, []], help="default: all")
    parser.add_argument("--tokens", default="1,8,64")
    parser.add_argument("--each", action="store_true", help="also every fusion alone")
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/decode_layer.json, in place of what it holds"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the script: tiny layers")
    parser.add_argument("--scales", choices=("column", "row"), default="column", help="row: never cuBLASLt's GEMM")
    given = parser.parse_args()
    layout[:] = [given.scales]
    if given.device == "cuda" and not torch.cuda.is_available():
        print("nothing measured: this needs a GPU that torch can see")
        return
    cases = [
        measured(name, tokens, given.device, given.each)
        for name in given.models or LAYERS
        for tokens in map(int, given.tokens.split(","))
    ]
    if given.save:
        gpu = torch.cuda.get_device_name() if given.device == "cuda" else None
        print(f"written to {save('decode_layer', {'gpu': gpu, 'cases': cases})}")


if __name__ == "__main__":
    main()
