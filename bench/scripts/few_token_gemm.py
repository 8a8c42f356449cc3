"""Products with few tokens, where a GEMM waits for its weights: layerfuse's linears beside what engines call.

    python bench/scripts/few_token_gemm.py --table --out FILE

In fp8 with blocks of 128 x 128 these are `group_quant_linear` and `block_scaled_linear`, with --bfloat16 `few_token_linear`, with --channels
`scaled_linear` of fp8 with a scale per token and per column of the product. Shapes are the
five linears of a rank of eight of DeepSeek-V3, then the four of Qwen3-4B, then the four of a rank of four of Llama-3.3-70B. Each entrant multiplies with so many weights in turn, in one CUDA
graph, that none is in the L2 cache. With "in front" the activations come in bfloat16 and the entrant's engine quantises them first.
Where launches overlap, the kernel in front is the same product with another weight, which lets the next one start.
With "behind a norm" a norm stands in front of each product, which quantises where that is one launch, and its own time is taken off.

--table compiles everything at once in processes of their own, then times the five linears of DeepSeek-V3's rank of eight in fp8 and in bfloat16, and
adds up their medians: beside what the weights take at the data sheet's speed of the memory, and beside the fastest peer of each shape.
"""

from __future__ import annotations

import argparse
import gc
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
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
DATA_SHEET = {"H100": 3.35e6, "H200": 4.8e6}
"""Part of a GPU's name -> bytes that its memory gives in a microsecond, of NVIDIA's data sheets (SXM)."""
EPSILON = 1e-6
DEVICE = "cuda"
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
    behind_norm: Callable[[Tensor, Tensor], tuple[Tensor, ...]] | None = None
    """Activations and the norm's weight to what `multiply` takes, at each call: one launch, or the norm and what quantises."""


def _vllm_quantised(**given: bool) -> Callable[[Tensor], tuple[Tensor, ...]]:
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    return partial(per_token_group_quant_fp8, group_size=BLOCK, use_ue8m0=False, **given)


def _vllm_norm(x: Tensor, weight: Tensor) -> Tensor:
    from vllm._custom_ops import rms_norm

    out = torch.empty_like(x)
    rms_norm(out, x, weight, EPSILON)
    return out


def _vllm_norm_quantised(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The norm and its quantisation by vLLM's one kernel, with scales as DeepGEMM's kernel reads them."""
    from vllm._custom_ops import rms_norm_per_block_quant

    return rms_norm_per_block_quant(  # type: ignore[no-any-return]
        x, weight, EPSILON, FP8, [1, BLOCK], is_scale_transposed=True, tma_alignment=4
    )


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
    quantise = _vllm_quantised(column_major_scales=True, tma_aligned_scales=True)
    return Peer(multiply, quantise, load, _vllm_norm_quantised)


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

    return Peer(
        lambda x, weight, weight_scales: multiply(x, weight, None, weight_scales),
        lambda x: (x,),
        behind_norm=lambda x, weight: (_vllm_norm(x, weight),),
    )


def _marlin() -> Peer:
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp8

    def load(weight: Tensor, weight_scales: Tensor) -> tuple[Any, ...]:
        layer: Any = torch.nn.Module()
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        layer.weight_scale_inv = torch.nn.Parameter(weight_scales, requires_grad=False)
        layer.output_size_per_partition, layer.input_size_per_partition = weight.shape
        layer.weight_block_size, layer.orig_dtype = [BLOCK, BLOCK], torch.bfloat16
        marlin_utils_fp8.prepare_fp8_layer_for_marlin(layer, size_k_first=False)
        return layer.weight, layer.weight_scale_inv, *weight.shape

    def multiply(x: Tensor, weight: Tensor, weight_scales: Tensor, columns: int, depth: int) -> Tensor:
        return marlin_utils_fp8.apply_fp8_marlin_linear(  # type: ignore[no-any-return]
            x, weight, weight_scales, None, columns, depth, None
        )

    return Peer(multiply, lambda x: (x,), load)


def _torch_blocks() -> Peer:
    """The product of torch, by cuBLAS, whose weight scales lie in rows of a multiple of four."""

    def load(weight: Tensor, weight_scales: Tensor) -> tuple[Tensor, Tensor]:
        rows, columns = weight_scales.shape
        wide = weight_scales.new_zeros(rows, -(-columns // 4) * 4)
        wide[:, :columns] = weight_scales
        return weight, wide[:, :columns]

    return Peer(
        lambda x, scales, weight, weight_scales: torch._scaled_mm(
            x, weight.T, scale_a=scales, scale_b=weight_scales.T, out_dtype=torch.bfloat16
        ),
        _vllm_quantised(column_major_scales=True),
        load,
    )


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
    "FlashInfer, bfloat16 in": _flashinfer_inside, "vLLM Marlin, bfloat16 in": _marlin, "torch._scaled_mm of blocks": _torch_blocks,
}  # fmt: skip
SCALED_MM = "vLLM cutlass_scaled_mm"
CHANNEL_PEERS: dict[str, Callable[[], Peer]] = {SCALED_MM: _channel_cutlass, "torch._scaled_mm": _channel_torch}
OURS = ("layerfuse", "layerfuse, bfloat16 in", "layerfuse, quantisation in front", "layerfuse, behind a norm")
NORM = "a norm alone"
WEIGHTS_ALONE = "vLLM Marlin, bfloat16 in"
"""Reads activations as they are."""
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
    for name in BEHIND_NORM:
        if name in names:
            yield f"{name}, behind a norm", partial(_behind_norm, name, x, weights)
    yield NORM, lambda: [partial(_vllm_norm, x, torch.ones_like(x[0]))] * len(weights)
    yield OURS[0], lambda: _quantised_calls(x, weights)
    if len(x) <= MOST:
        yield OURS[1], lambda: [partial(ops.group_quant_linear, x, *weight, steady=True) for weight in weights]
    yield OURS[3], lambda: _behind_our_norm(x, weights)


BEHIND_NORM = ("DeepGEMM", "FlashInfer, bfloat16 in")
"""vLLM as it is installed, without FlashInfer and with it."""


FLASHINFER_BELOW = 32
"""Tokens from which vLLM's op of FlashInfer's kernel calls DeepGEMM's."""


def _ours(x: Tensor, weights: list[Weight]) -> list[Callable[[Tensor, Tensor], Tensor]]:
    """The products of (values, scales), more tokens than few by what vLLM calls for them: FlashInfer below 32, else DeepGEMM."""
    if len(x) <= MOST:
        return [
            lambda *given, weight=weight: ops.block_scaled_linear(*given, *weight, steady=True) for weight in weights
        ]
    multiply, _, load, _ = peer("FlashInfer" if len(x) < FLASHINFER_BELOW else "DeepGEMM")
    loaded = [load(*weight) for weight in weights]
    return [lambda *given, weight=weight: multiply(*given, *weight) for weight in loaded]


def _quantised_calls(x: Tensor, weights: list[Weight]) -> Calls:
    given = ops.quantise_group(x, FP8, BLOCK, column_major=True, tma_aligned=True)
    return [partial(product, *given) for product in _ours(x, weights)]


def _behind_our_norm(x: Tensor, weights: list[Weight]) -> Calls:
    norm = partial(ops.rms_norm_group_quant, x, torch.ones_like(x[0]), EPSILON, column_major=True, tma_aligned=True)
    return [lambda product=product: product(*norm()) for product in _ours(x, weights)]


def _behind_norm(name: str, x: Tensor, weights: list[Weight]) -> Calls:
    multiply, _, load, norm = peer(name)
    loaded, ones = [load(*weight) for weight in weights], torch.ones_like(x[0])
    return [lambda weight=weight: multiply(*norm(x, ones), *weight) for weight in loaded]


def _peer_calls(name: str, in_front: bool, x: Tensor, weights: list[Weight]) -> Calls:
    multiply, quantise, load, _ = peer(name)
    loaded = [load(*weight) for weight in weights]
    if in_front:
        return [lambda weight=weight: multiply(*quantise(x), *weight) for weight in loaded]
    given = quantise(x)
    return [partial(multiply, *given, *weight) for weight in loaded]


def plain_entrants(names: Sequence[str], x: Tensor, weights: list[Tensor]) -> Iterator[tuple[str, Callable[[], Calls]]]:
    """As `entrants`, of weights in bfloat16."""
    yield CUBLAS, lambda: [partial(torch.nn.functional.linear, x, weight) for weight in weights]
    if any("vLLM" in name for name in names) and len(x) <= MOST:
        for overlaps in (False, True):
            shown = "vLLM fused_a_gemm, overlapping" if overlaps else "vLLM fused_a_gemm"
            yield shown, lambda overlaps=overlaps: [partial(_fused_a, x, weight, overlaps) for weight in weights]
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


def _fused_a(x: Tensor, weight: Tensor, overlaps: bool) -> Tensor:
    from vllm._custom_ops import dsv3_fused_a_gemm

    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    dsv3_fused_a_gemm(out, x, weight.T, enable_pdl=overlaps)
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


def compared(
    several: Iterable[tuple[str, Callable[[], Calls]]], right: Tensor, rounds: int, unquantised: Tensor | None = None
) -> dict[str, Row]:
    """By entrant. Results are compared after all replays, and with those of the first. `unquantised`: what is right of `WEIGHTS_ALONE`."""
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
        if name == NORM:
            rows[name] = Row(timing.us, timing.low, timing.high)
            continue
        got = torch.stack(graphs[name].results)  # type: ignore[arg-type]
        error = relative_error(got, unquantised if name == WEIGHTS_ALONE and unquantised is not None else right)
        problem = f"off by {error:.3g}" if error > MOST_ERROR else ""
        if name in OURS and not torch.equal(got, first[name]):
            problem = "replays differ"
        away = None if reference is None else float((got.float() - reference.float()).abs().max())
        error = error if math.isfinite(error) else None
        rows[name] = Row(timing.us, timing.low, timing.high, error, away, problem)
    alone = rows.get(NORM, Row()).us
    for name, row in rows.items():
        if name.endswith("behind a norm") and row.us is not None and row.low is not None and row.high is not None:
            if alone is None:
                rows[name] = Row(problem="its norm was not timed")
            else:
                rows[name] = row._replace(us=row.us - alone, low=row.low - alone, high=row.high - alone)
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


class Drawn(NamedTuple):
    """Weights of one shape and what is right of them."""

    weights: list[Any]
    right: Tensor
    unquantised: Tensor | None
    enter: Callable[..., Iterator[tuple[str, Callable[[], Calls]]]]
    held: int
    "Bytes of one weight with its scales."


def drawn_for(kind: str, names: Sequence[str], x: Tensor, columns: int, count: int) -> Drawn:
    """So many weights (columns, depth of x) of `blocks`, `channels` or `bfloat16`, and who multiplies by them."""
    depth, device = x.shape[1], str(x.device)
    if kind == "bfloat16":
        plain = [(torch.randn(columns, depth, device=device) * depth**-0.5).bfloat16() for _ in range(count)]
        right = torch.stack([x.double() @ weight.double().t() for weight in plain])
        return Drawn(plain, right, None, partial(plain_entrants, names, weights=plain), plain[0].nbytes)
    weights = [(drawn_channels if kind == "channels" else drawn)(columns, depth, device) for _ in range(count)]
    held = sum(each.nbytes for each in weights[0])
    if kind == "channels":
        return Drawn(weights, right_channels(x, weights), None, partial(channel_entrants, names, weights=weights), held)
    exact = [x.double() @ dequantised(*weight, BLOCK).double().t() for weight in weights]
    unquantised = torch.stack(exact) if WEIGHTS_ALONE in names else None
    right = right_results(*quantised(x), weights)
    return Drawn(weights, right, unquantised, partial(entrants, names, weights=weights), held)


def names_of(kind: str, parts: str) -> list[str]:
    """The peers of a kind of weights that are asked for by parts of their names."""
    return [
        name
        for name in (CHANNEL_PEERS if kind == "channels" else PEERS)
        if any(each in name for each in parts.split(",") if each)
    ]


def kind_of(given: argparse.Namespace) -> str:
    """What is multiplied by."""
    return "bfloat16" if given.bfloat16 else "channels" if given.channels else "blocks"


def as_a_norm_gives(tokens: int, depth: int) -> Tensor:
    """(tokens, depth) in bfloat16, whose rows have a mean square of one."""
    x = torch.randn(tokens, depth, device=DEVICE)
    return (x * x.square().mean(1, keepdim=True).rsqrt()).bfloat16()


def compiled(given: argparse.Namespace) -> int:
    """Call everybody once, each number of tokens by itself: what is compiled for that is then on the disk."""
    for kind in ("blocks", "bfloat16") if given.table else (kind_of(given),):
        for columns, depth in shapes_of(given, kind):
            x = as_a_norm_gives(max(tokens_of(given)), depth)
            found = drawn_for(kind, names_of(kind, given.peers), x, columns, 1)
            for each in tokens_of(given):
                for _, made in found.enter(x=x[:each]):
                    with suppress(Exception):  # it is said where it is timed
                        for call in made():
                            call()
            torch.cuda.synchronize()
    return 0


def compile_at_once(given: argparse.Namespace) -> None:
    """`compiled` in a process for each shape."""
    asked = [sys.executable, __file__, "--table", "--compile", "--tokens", given.tokens, "--peers", given.peers]
    several = [subprocess.Popen([*asked, "--shapes", place]) for place in (given.shapes or OF_BLOCKS).split(",")]
    for each in several:
        each.wait()


def shapes_of(given: argparse.Namespace, kind: str) -> list[tuple[int, int]]:
    """Columns and depth of those that are asked for."""
    return [
        SHAPES[int(each)] for each in (given.shapes or (OF_CHANNELS if kind == "channels" else OF_BLOCKS)).split(",")
    ]


def tokens_of(given: argparse.Namespace) -> list[int]:
    """As asked for."""
    return [int(each) for each in given.tokens.split(",")]


Shapes = dict[str, dict[int, dict[str, Row]]]
"""Shape -> tokens -> entrant -> how long it took."""


Named = Callable[[str, int], bool]
"""Whether an entrant is meant, with so many tokens."""


def summed(shapes: Shapes, named: Named) -> dict[int, float]:
    """Tokens -> the medians of all shapes together, of the fastest entrant of each that is meant; not a number where a shape has none."""
    found: dict[int, float] = {}
    for tokens in dict.fromkeys(each for rows in shapes.values() for each in rows):
        found[tokens] = 0.0
        for rows in shapes.values():
            several = rows.get(tokens, {}).items()
            us = [row.us for name, row in several if named(name, tokens) and row.us is not None and not row.problem]
            found[tokens] += min(us, default=math.nan)
    return found


def is_peers(name: str, _tokens: int) -> bool:
    """Whether it is another one's from bfloat16, with its quantisation in front if it needs one."""
    return name not in OURS and name.endswith(("quantisation in front", "bfloat16 in"))


def is_policys(name: str, tokens: int) -> bool:
    """Whether it is what a linear in vLLM calls with layerfuse where nothing in front quantises: with many tokens vLLM's own."""
    if tokens <= MOST:
        return name == OURS[1]
    return name == ("FlashInfer, bfloat16 in" if tokens < FLASHINFER_BELOW else "DeepGEMM, quantisation in front")


def is_behind_a_norm(name: str, _tokens: int) -> bool:
    """Whether it is another one's behind a norm."""
    return name not in OURS and name.endswith("behind a norm")


def ratios(above: dict[int, float], below: dict[int, float]) -> dict[int, float]:
    """Tokens -> how many times as long the first took."""
    return {tokens: us / below[tokens] for tokens, us in above.items()}


def table(kind: str, shapes: Shapes, held: float, gpu: str) -> dict[str, dict[int, float]]:
    """What the goals are of.

    Args:
        kind: of the weights.
        shapes: what was timed.
        held: bytes of a weight of each shape together.
        gpu: its name.

    Returns:
        Line -> tokens -> microseconds of all shapes together, or a ratio.
    """
    names = dict.fromkeys(name for rows in shapes.values() for by_name in rows.values() for name in by_name)
    found = {name: summed(shapes, lambda each, _, name=name: each == name) for name in names}
    if kind == "bfloat16":
        best = summed(shapes, lambda name, _: name not in OURS)
        ours = {"layerfuse": summed(shapes, lambda name, _: name == OURS[0])}
    else:
        best = summed(shapes, is_peers)
        ours = {
            "layerfuse from bfloat16, as policy has it": summed(shapes, is_policys),
            "layerfuse from fp8, as a fusion in front gives it": summed(shapes, lambda name, _: name == OURS[0]),
            OURS[3]: summed(shapes, lambda name, _: name == OURS[3]),
        }
    found["the fastest peer of each shape, from bfloat16"] = best
    speed = next((each for part, each in DATA_SHEET.items() if part in gpu), math.nan)
    for name, times in ours.items():
        peers = summed(shapes, is_behind_a_norm) if name == OURS[3] else best
        found[f"the fastest peer / {name}"] = ratios(peers, times)
        if name != OURS[3]:
            floors = dict.fromkeys(times, held / speed)
            found[f"{name} / weights at the data sheet's speed"] = ratios(times, floors)
    return found


def measured(given: argparse.Namespace) -> int:
    """Time all shapes; 1 where one of ours is wrong."""
    begun = time.monotonic()
    if given.table:
        compile_at_once(given)
        print(f"compiled after {time.monotonic() - begun:.0f} s", flush=True)
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "bytes_per_us": copy_speed()}
    print(f"{found['gpu']}: a copy moves {found['bytes_per_us'] / 1e6:.2f} TB/s", flush=True)
    wrong, tokens = False, tokens_of(given)
    for kind in ("blocks", "bfloat16") if given.table else (kind_of(given),):
        timed_here = found.setdefault(kind if given.table else "shapes", {})
        shapes, held, wrong_here = timed(given, kind, begun, found, timed_here)
        wrong |= wrong_here
        if given.table:
            found[f"{kind}, all together"] = sums = table(kind, shapes, held, found["gpu"])
            print(f"\n{f'{kind}: {len(shapes)} shapes together, us with':80}" + "".join(f"{each:8}" for each in tokens))
            for name, by in sums.items():
                print(f"{name:80}" + "".join(f"{by.get(each, math.nan):8.2f}" for each in tokens), flush=True)
        if given.out:
            save(given.out, _without_nan(found))
    return int(wrong)


def _without_nan(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: _without_nan(each) for key, each in found.items()}
    return None if isinstance(found, float) and math.isnan(found) else found


def timed(
    given: argparse.Namespace, kind: str, begun: float, found: dict[str, Any], timed_here: dict[str, Any]
) -> tuple[Shapes, float, bool]:
    """All shapes of one kind, the bytes of a weight of each together, and whether one of ours is wrong. After each shape all that is found is written."""
    tokens, names = tokens_of(given), names_of(kind, given.peers)
    for name in names:
        _made(name)
    print(f"begun after {time.monotonic() - begun:.0f} s", flush=True)
    shapes: Shapes = {}
    held, wrong = 0.0, False
    for columns, depth in shapes_of(given, kind):
        if time.monotonic() - begun > given.limit:
            print(f"out of time before {columns} x {depth}")
            break
        torch.manual_seed(columns)
        count = max(min(FEWEST_WEIGHTS, MOST_HELD // (columns * depth)), -(-MOST_CACHED // (columns * depth)))
        x = as_a_norm_gives(max(tokens), depth)
        drawn_here = drawn_for(kind, names, x, columns, count)
        held += drawn_here.held
        gc.collect()
        gc.freeze()  # or each graph looks through all that was imported
        rows, floors = dict[int, dict[str, Row]](), dict[int, float]()
        for each in tokens:
            if time.monotonic() - begun > given.limit:
                print(f"out of time before {each} tokens")
                break
            moved = drawn_here.held + each * ((1 + (kind == "bfloat16")) * depth + 2 * columns)
            floors[each] = moved / found["bytes_per_us"]
            exact = None if drawn_here.unquantised is None else drawn_here.unquantised[:, :each]
            rows[each] = compared(drawn_here.enter(x=x[:each]), drawn_here.right[:, :each], given.rounds, exact)
        wrong |= any(bool(by_name[name].problem) for by_name in rows.values() for name in OURS if name in by_name)
        print(f"\n{f'{columns} x {depth}, us with':40}" + "".join(f"{each:8}" for each in rows) + " tokens")
        print("\n".join(lines(rows, floors)), f"\nafter {time.monotonic() - begun:.0f} s", flush=True)
        shapes[f"{columns}x{depth}"] = rows
        entered = {each: {name: row._asdict() for name, row in by.items()} for each, by in rows.items()}
        timed_here[f"{columns}x{depth}"] = {"floors": floors, "entrants": entered}
        if given.out:
            save(given.out, _without_nan(found))
    return shapes, held, wrong


def main() -> int:
    """Time each entrant and print a table per shape, in microseconds."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--bfloat16", action="store_true", help="weights in bfloat16, beside cuBLAS")
    parser.add_argument("--channels", action="store_true", help="fp8 with a scale per token and per column")
    parser.add_argument("--table", action="store_true", help="blocks, then bfloat16, compiled beforehand, and added up")
    parser.add_argument("--compile", action="store_true", help="call each once, and time nothing")
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
    return compiled(given) if given.compile else measured(given)


if __name__ == "__main__":
    raise SystemExit(main())
