"""Products with few tokens, where a GEMM waits for its weights: layerfuse's linears beside what engines call.

In fp8 with blocks of 128 x 128 these are `group_quant_linear` and `block_scaled_linear`, with --bfloat16 `few_token_linear`, with --channels
`scaled_linear` of fp8 with a scale per token and per column of the product. Shapes are the
five linears of a rank of eight of DeepSeek-V3, then the four of Qwen3-4B, then the four of a rank of four of Llama-3.3-70B. Each entrant multiplies with so many weights in turn, in one CUDA
graph, that none is in the L2 cache. With "in front" the activations come in bfloat16 and the entrant's engine quantises them first.
Where launches overlap, the kernel in front is the same product with another weight, which lets the next one start.
"""

from __future__ import annotations

import argparse
import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerfuse.bench.files import save
from layerfuse.bench.rank_group import said
from layerfuse.bench.timing import Graph, time_graphs
from layerfuse.fusion import ops
from layerfuse.fusion.ops.linear import MOST
from layerfuse.fusion.ops.quantisation import quantise

SHAPES = (
    (2112, 7168),
    (3072, 1536),
    (7168, 2048),
    (4608, 7168),
    (7168, 2304),
    (6144, 2560),
    (2560, 4096),
    (19456, 2560),
    (2560, 9728),
    (2560, 8192),
    (8192, 2048),
    (14336, 8192),
    (8192, 7168),
    (4096, 7168),
    (7168, 4608),
    (24576, 1536),
    (5120, 8192),
    (10240, 5120),
    (7168, 8192),
    (5120, 12800),
    (9216, 7168),
    (7168, 9216),
    (7168, 16384),
    (25600, 5120),
    (5120, 25600),
    (18432, 7168),
    (7168, 18432),
    (51200, 5120),
    (36864, 7168),
)
"""Columns and depth: q_a and kv_a, q_b, o, gate and up, down of DeepSeek-V3; q, k and v, o, gate and up, down of Qwen3-4B, and of Llama-3.3-70B; then
large ones of DeepSeek-V3 and Qwen3-32B over fewer ranks."""
OF_BLOCKS, OF_CHANNELS = "0,1,2,3,4", "9,10,11,12"
TOKENS = (1, 8, 16, 64)
BLOCK = 128
"""Columns of an activation's scale, and both sides of a weight's (DeepSeek-V3, arXiv 2412.19437, section 3.3.2)."""
FP8, LARGEST = torch.float8_e4m3fn, 448.0
FEWEST_WEIGHTS, MOST_CACHED = 24, 200_000_000
MOST_HELD = 3_000_000_000
"""Bytes of all weights of a shape."""
MOST_ERROR = 0.02
"""Of all results together, relative to float64. Rounding the result to bfloat16 makes 0.0017."""

Calls = list[Callable[[], Tensor]]
Weight = tuple[Tensor, Tensor]
"""Values (columns, depth) and scales (blocks of columns, blocks of depth)."""


class Peer(NamedTuple):
    """What an engine calls."""

    multiply: Callable[..., Tensor]
    """Of what `quantise` gives and what `load` gives."""
    quantise: Callable[[Tensor], tuple[Tensor, ...]]
    """Activations, at each call."""
    load: Callable[[Tensor, Tensor], tuple[Any, ...]] = lambda *weight: weight
    """Weights, once."""


def _vllm_quantised(**given: bool) -> Callable[[Tensor], tuple[Tensor, ...]]:
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    return partial(per_token_group_quant_fp8, group_size=BLOCK, use_ue8m0=False, **given)


def _cutlass() -> Peer:
    from vllm._custom_ops import cutlass_scaled_mm

    return Peer(
        lambda x, scales, weight, weight_scales: cutlass_scaled_mm(
            x, weight.T, out_dtype=torch.bfloat16, scale_a=scales, scale_b=weight_scales.T
        ),
        _vllm_quantised(column_major_scales=True),
    )


def _deep_gemm() -> Peer:
    from vllm.model_executor.layers.quantization.utils.fp8_utils import deepgemm_post_process_fp8_weight_block
    from vllm.utils.deep_gemm import fp8_gemm_nt

    def multiply(x: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
        out = torch.empty(len(x), len(weight), dtype=torch.bfloat16, device=x.device)
        fp8_gemm_nt((x, scales), (weight, weight_scales), out, is_deep_gemm_e8m0_used=False)
        return out

    load = partial(deepgemm_post_process_fp8_weight_block, quant_block_shape=(BLOCK, BLOCK), use_e8m0=False)
    return Peer(multiply, _vllm_quantised(column_major_scales=True, tma_aligned_scales=True), load)


def _vllm_triton() -> Peer:
    from vllm.model_executor.layers.quantization.utils.fp8_utils import w8a8_triton_block_scaled_mm as multiply

    return Peer(
        lambda x, scales, weight, weight_scales: multiply(
            x, weight, scales, weight_scales, [BLOCK, BLOCK], torch.bfloat16
        ),
        _vllm_quantised(column_major_scales=False),
    )


def _flashinfer() -> Peer:
    # Its kernel reads scales as DeepGEMM's does, by columns of a multiple of four, whatever its docstring says.
    from flashinfer.gemm import fp8_blockscale_gemm_sm90 as multiply

    return Peer(
        lambda x, scales, weight, weight_scales: multiply(x, weight, scales, weight_scales),
        _vllm_quantised(column_major_scales=True, tma_aligned_scales=True),
    )


def _flashinfer_inside() -> Peer:
    from flashinfer.gemm import fp8_blockscale_gemm_sm90 as multiply

    return Peer(lambda x, weight, weight_scales: multiply(x, weight, None, weight_scales), lambda x: (x,))


def _channel_cutlass() -> Peer:
    from vllm._custom_ops import cutlass_scaled_mm, scaled_fp8_quant

    return Peer(
        lambda x, scales, weight, weight_scales: cutlass_scaled_mm(
            x, weight.T, out_dtype=torch.bfloat16, scale_a=scales, scale_b=weight_scales
        ),
        partial(scaled_fp8_quant, use_per_token_if_dynamic=True),
    )


def _channel_torch() -> Peer:
    return Peer(
        lambda x, scales, weight, weight_scales: torch._scaled_mm(
            x, weight.T, scale_a=scales, scale_b=weight_scales.T, out_dtype=torch.bfloat16
        ),
        ops.quantise_per_token,
    )


CUTLASS = "vLLM CUTLASS"
PEERS: dict[str, Callable[[], Peer]] = {
    CUTLASS: _cutlass, "DeepGEMM": _deep_gemm, "FlashInfer": _flashinfer, "vLLM Triton": _vllm_triton,
    "FlashInfer, bfloat16 in": _flashinfer_inside,
}  # fmt: skip
SCALED_MM = "vLLM cutlass_scaled_mm"
CHANNEL_PEERS: dict[str, Callable[[], Peer]] = {SCALED_MM: _channel_cutlass, "torch._scaled_mm": _channel_torch}
OURS = ("layerfuse", "layerfuse, bfloat16 in", "layerfuse, quantisation in front")
CUBLAS = "cuBLAS"


@cache
def _made(name: str) -> Peer | Exception:
    try:
        return (PEERS | CHANNEL_PEERS)[name]()
    except Exception as problem:  # whatever is not installed here
        return problem


def peer(name: str) -> Peer:
    """Made once; raises what its making raised, each time."""
    made = _made(name)
    if isinstance(made, Exception):
        raise made
    return made


def entrants(names: Sequence[str], x: Tensor, weights: list[Weight]) -> Iterator[tuple[str, Callable[[], Calls]]]:
    """Name, and what makes the calls. x: (tokens, depth) in bfloat16."""
    for name in names:
        for in_front in (False, True) if ", bfloat16 in" not in name else (False,):
            yield (
                f"{name}, quantisation in front" if in_front else name,
                partial(_peer_calls, name, in_front, x, weights),
            )
    yield OURS[0], lambda: _quantised_calls(x, weights)
    yield OURS[1], lambda: [partial(ops.group_quant_linear, x, *weight, steady=True) for weight in weights]


def _quantised_calls(x: Tensor, weights: list[Weight]) -> Calls:
    given = ops.quantise_group(x, FP8, BLOCK, column_major=True, tma_aligned=True)
    return [partial(ops.block_scaled_linear, *given, *weight, steady=True) for weight in weights]


def _peer_calls(name: str, in_front: bool, x: Tensor, weights: list[Weight]) -> Calls:
    multiply, quantise, load = peer(name)
    loaded = [load(*weight) for weight in weights]
    if in_front:
        return [lambda weight=weight: multiply(*quantise(x), *weight) for weight in loaded]
    given = quantise(x)
    return [partial(multiply, *given, *weight) for weight in loaded]


def plain_entrants(names: Sequence[str], x: Tensor, weights: list[Tensor]) -> Iterator[tuple[str, Callable[[], Calls]]]:
    """As `entrants`, of weights in bfloat16."""
    yield CUBLAS, lambda: [partial(torch.nn.functional.linear, x, weight) for weight in weights]
    if any("vLLM" in name for name in names) and len(x) <= MOST:
        yield "vLLM fused_a_gemm", lambda: [partial(_fused_a, x, weight) for weight in weights]
    yield OURS[0], lambda: [partial(ops.few_token_linear, x, weight, steady=True) for weight in weights]


def channel_entrants(
    names: Sequence[str], x: Tensor, weights: list[Weight]
) -> Iterator[tuple[str, Callable[[], Calls]]]:
    """As `entrants`, of weights with a scale per column of the product."""
    for name in names:
        for in_front in (False, True):
            shown = f"{name}, quantisation in front" if in_front else name
            yield shown, partial(_peer_calls, name, in_front, x, weights)
    if len(x) > MOST:
        return
    given = ops.quantise_per_token(x)
    yield OURS[0], lambda: [partial(ops.scaled_linear, *given, *weight, steady=True) for weight in weights]
    yield OURS[2], lambda: [partial(_quantised_in_front, x, weight) for weight in weights]


def _quantised_in_front(x: Tensor, weight: Weight) -> Tensor:
    found: Tensor = ops.scaled_linear(*ops.quantise_per_token(x), *weight, steady=True)
    return found


def _fused_a(x: Tensor, weight: Tensor) -> Tensor:
    from vllm._custom_ops import dsv3_fused_a_gemm

    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    dsv3_fused_a_gemm(out, x, weight.T)
    return out


def dequantised(values: Tensor, scales: Tensor, rows_per_scale: int) -> Tensor:
    """In float32; `rows_per_scale`: 1 for activations, 128 for weights."""
    wide = scales.repeat_interleave(BLOCK, -1)[:, : values.shape[1]]
    return values.float() * wide.repeat_interleave(rows_per_scale, 0)[: values.shape[0]]


def right_channels(x: Tensor, weights: list[Weight]) -> Tensor:
    """As `right_results`, of activations that are quantised with one scale per token."""
    values, scales = ops.quantise_per_token(x)
    rows = values.double() * scales
    return torch.stack([rows @ (values.double() * scales).t() for values, scales in weights])


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens, depth) to e4m3 and float32 scales, column by column."""
    return quantise(x.float(), FP8, BLOCK, column_major=True, use_ue8m0=False)


def drawn(columns: int, depth: int, device: str) -> Weight:
    """A random weight, quantised in blocks of 128 x 128, of which the last may be cut off."""
    wide = torch.randn(columns, depth, device=device) * depth**-0.5
    blocks = (
        torch.nn.functional.pad(wide, (0, 0, 0, -columns % BLOCK)).unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    )
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-10) / LARGEST
    values = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1)[:columns]
    return values.to(FP8), scales


def drawn_channels(columns: int, depth: int, device: str) -> Weight:
    """A random weight, quantised with a scale per column of the product, (columns, 1)."""
    wide = torch.randn(columns, depth, device=device) * depth**-0.5
    scales = wide.abs().amax(1, keepdim=True) / LARGEST
    return (wide / scales).to(FP8), scales


def right_results(values: Tensor, scales: Tensor, weights: list[Weight]) -> Tensor:
    """(weights, tokens, columns) in float64, of quantised activations."""
    wide = dequantised(values, scales, 1).double()
    return torch.stack([wide @ dequantised(*weight, BLOCK).double().t() for weight in weights])


def relative_error(got: Tensor, right: Tensor) -> float:
    """Of all of them together; not a number counts as infinite."""
    error = float((got.double() - right).norm() / right.norm())
    return math.inf if math.isnan(error) else error


class Row(NamedTuple):
    """One entrant with so many tokens: the median and quartiles in microseconds, or why there are none."""

    us: float | None = None
    low: float | None = None
    high: float | None = None
    error: float | None = None
    from_first: float | None = None
    "The largest difference of a result from CUTLASS's or cuBLAS's."
    problem: str = ""


def compared(several: Iterable[tuple[str, Callable[[], Calls]]], right: Tensor, rounds: int) -> dict[str, Row]:
    """By entrant. Results are compared after all replays, and with those of the first."""
    graphs, first, rows = {}, {}, dict[str, Row]()
    held: list[Calls] = []  # a graph does not hold what its calls read
    for name, made in several:
        try:
            held.append(made())
            graphs[name] = Graph(held[-1], 1)  # type: ignore[arg-type]
            graphs[name].start()
            first[name] = torch.stack(graphs[name].results)  # type: ignore[arg-type]
        except Exception as problem:  # whatever is not installed here, or does not run
            graphs.pop(name, None)
            rows[name] = Row(problem=said(problem))
    reference = next((first[name] for name in (CUTLASS, CUBLAS, SCALED_MM) if name in first), None)
    for name, timing in time_graphs(graphs, rounds).items():
        got = torch.stack(graphs[name].results)  # type: ignore[arg-type]
        error = relative_error(got, right)
        problem = f"off by {error:.3g}" if error > MOST_ERROR else ""
        if name in OURS and not torch.equal(got, first[name]):
            problem = "replays differ"
        away = None if reference is None else float((got.float() - reference.float()).abs().max())
        error = error if math.isfinite(error) else None
        rows[name] = Row(timing.us, timing.low, timing.high, error, away, problem)
    return rows


def copy_speed() -> float:
    """Bytes per microsecond, read and written."""
    source, copy = torch.empty(2, 1 << 30, dtype=torch.uint8, device="cuda")
    graph = Graph([lambda: copy.copy_(source)], 4)  # type: ignore[arg-type,return-value]
    return 2 * source.numel() / time_graphs({"copy": graph}, rounds=9)["copy"].us


def lines(rows: dict[int, dict[str, Row]], floors: dict[int, float]) -> Iterator[str]:
    """A shape's table: an entrant per line, a column per number of tokens, then what there is to say."""
    yield f"{'floor':40}" + "".join(f"{floor:8.1f}" for floor in floors.values())
    for name in dict.fromkeys(name for several in rows.values() for name in several):
        each = [several.get(name) for several in rows.values()]  # some enter for few tokens alone
        times = [row.us if row and row.us and not row.problem else math.nan for row in each]
        notes = dict.fromkeys(row.problem for row in each if row and row.problem)
        yield f"{name:40}" + "".join(f"{us:8.1f}" for us in times) + "  " + " | ".join(notes)


def measured(given: argparse.Namespace) -> int:
    """Time all shapes; 1 where one of ours is wrong."""
    begun = time.monotonic()
    places = given.shapes or (OF_CHANNELS if given.channels else OF_BLOCKS)
    shapes = [SHAPES[int(each)] for each in places.split(",")]
    tokens = [int(each) for each in given.tokens.split(",")]
    peers = CHANNEL_PEERS if given.channels else PEERS
    names = [name for name in peers if any(each in name for each in given.peers.split(",") if each)]
    for name in names:
        _made(name)
    speed, wrong = copy_speed(), False
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "bytes_per_us": speed, "shapes": {}}
    print(
        f"{found['gpu']}: a copy moves {speed / 1e6:.2f} TB/s; begun after {time.monotonic() - begun:.0f} s",
        flush=True,
    )
    for columns, depth in shapes:
        if time.monotonic() - begun > given.limit:
            print(f"out of time before {columns} x {depth}")
            break
        torch.manual_seed(columns)
        count = max(min(FEWEST_WEIGHTS, MOST_HELD // (columns * depth)), -(-MOST_CACHED // (columns * depth)))
        x = torch.randn(max(tokens), depth, device="cuda").bfloat16()
        weights: list[Any]
        if given.bfloat16:
            weights = [(torch.randn(columns, depth, device="cuda") * depth**-0.5).bfloat16() for _ in range(count)]
            right = torch.stack([x.double() @ weight.double().t() for weight in weights])
            enter = partial(plain_entrants, names, weights=weights)
        elif given.channels:
            weights = [drawn_channels(columns, depth, "cuda") for _ in range(count)]
            right = right_channels(x, weights)
            enter = partial(channel_entrants, names, weights=weights)
        else:
            weights = [drawn(columns, depth, "cuda") for _ in range(count)]
            right = right_results(*quantised(x), weights)
            enter = partial(entrants, names, weights=weights)
        gc.collect()
        gc.freeze()  # or each graph looks through all that was imported
        rows, floors = dict[int, dict[str, Row]](), dict[int, float]()
        for each in tokens:
            if time.monotonic() - begun > given.limit:
                print(f"out of time before {each} tokens")
                break
            held = weights[0].nbytes if given.bfloat16 else weights[0][0].nbytes + weights[0][1].nbytes
            floors[each] = (held + each * ((1 + given.bfloat16) * depth + 2 * columns)) / speed
            rows[each] = compared(enter(x=x[:each]), right[:, :each], given.rounds)
        wrong |= any(by_name[name].problem for by_name in rows.values() for name in OURS if name in by_name)
        print(f"\n{f'{columns} x {depth}, us with':40}" + "".join(f"{each:8}" for each in rows) + " tokens")
        print("\n".join(lines(rows, floors)), f"\nafter {time.monotonic() - begun:.0f} s", flush=True)
        timed = {each: {name: row._asdict() for name, row in by.items()} for each, by in rows.items()}
        found["shapes"][f"{columns}x{depth}"] = {"floors": floors, "entrants": timed}
        if given.out:
            save(given.out, found)
    return int(wrong)


def main() -> int:
    """Time each entrant and print a table per shape, in microseconds."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--bfloat16", action="store_true", help="weights in bfloat16, beside cuBLAS")
    parser.add_argument("--channels", action="store_true", help="fp8 with a scale per token and per column")
    parser.add_argument("--shapes", help=f"places in {SHAPES}; else {OF_BLOCKS}, with --channels {OF_CHANNELS}")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="up to 64")
    parser.add_argument("--peers", default="vLLM,DeepGEMM,FlashInfer,torch", help="parts of names; empty: none")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--limit", type=float, default=150, help="seconds after which no further case is begun")
    parser.add_argument("--out", type=Path, help="a JSON file, written after each shape")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("nothing measured: the kernels take a GPU")
        return 0
    return measured(given)


if __name__ == "__main__":
    raise SystemExit(main())
