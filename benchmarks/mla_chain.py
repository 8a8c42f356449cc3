"""An MLA decode layer without its attention kernel, with and without the fused ops between its GEMMs, on this GPU.

    python benchmarks/mla_chain.py                              all of it, some minutes
    python benchmarks/mla_chain.py --heads 16 --tokens 1 8 64   a part
    python benchmarks/mla_chain.py --only layer                 a whole attention layer, with torch's attention to 1024 tokens
    python benchmarks/mla_chain.py --only ops                   each op alone, beside a copy of its bytes
    python benchmarks/mla_chain.py --only ops --aiter FOLDER    and beside AITER's Triton ops, of a checkout of ROCm/aiter

DeepSeek-V3's widths, random weights in bfloat16, several layers after each other so that no weight stays in the cache, CUDA graphs
replayed in turns, every result checked. Writes `benchmarks/results/mla_PART-HEADS-heads.json`, anew after each case.

The ways: `inductor` and `combo`, torch.compile of plain torch, the latter with combo kernels (vLLM's default); `ops`, the fused ops
between torch's GEMMs; `buffer`, where the absorbing GEMM writes into the query's columns; `absorb`, where it is one op with all behind it; `dual norm`, the fused norms alone, compiled
with combo kernels; `gemms`, the GEMMs and nothing else.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import statistics
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mla_ops
import torch
from environment import save
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from layerfuse import MLASpec, registry
from layerfuse.bench import aiter_checkout
from layerfuse.fusion import ops
from layerfuse.fusion.ops.rope import read_entries
from layerfuse.testing import MLADecodeLayer, mla_decode_layer

TP = {16: 8, 128: 1}
"""Heads on the rank to the tensor-parallel size of DeepSeek-V3."""
LAYERS = {16: 4, 128: 2}
"""Layers in a graph: their weights are far larger than a cache, 73 and 460 MB each."""
FORMS = {"bf16": ("plain", None), "fp8": ("fp8", torch.float8_e4m3fn)}
"""Cache and query."""
PAGE, PAGES = 64, 64
DEVICE = "cuda"
TOLERANCE = {"bf16": 1e-2, "fp8": 4e-2}
"""Of the norm of the difference, relative."""
OP_TOKENS = (1, 8, 64, 512, 4096, 16384)
LENGTH = 1024
"""Tokens in the cache of each sequence, in a whole layer."""
LONGEST_US = 400.0
"""A graph lasts at least about this long: its own launch takes some microseconds."""

Chain = Callable[[MLADecodeLayer, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def spec_of(heads: int) -> MLASpec:
    """DeepSeek-V3's attention on a rank with so many heads."""
    return next(spec for _, spec in registry.model("deepseek-v3").specs(tp=TP[heads]) if isinstance(spec, MLASpec))


def chain(
    layer: MLADecodeLayer, hidden: Tensor, positions: Tensor, slots: Tensor, attended: Tensor
) -> tuple[Tensor, Tensor]:
    """A decode step but for the attention kernel, whose result is given."""
    return layer.query(hidden, positions, slots), layer.projected(attended)


def gemms(
    layer: MLADecodeLayer, hidden: Tensor, positions: Tensor, slots: Tensor, attended: Tensor
) -> tuple[Tensor, Tensor]:
    """The GEMMs of `chain`, on numbers that mean nothing."""
    del positions, slots
    q = torch.nn.functional.linear(hidden, layer.down)[:, : layer.q_weight.shape[0]]
    nope, _ = layer._heads(q)
    return layer._absorbed(nope), layer.projected(attended)


@torch.library.custom_op("layerfuse_bench::attended", mutates_args=())
def attention(query: Tensor, entries: Tensor, value_width: int, scale: float) -> Tensor:
    """Torch's attention of (tokens, heads, width) to (tokens, LENGTH, width): (tokens, heads, value_width). No compiler looks into it."""
    # Heads stand where a sequence's queries do: they share keys and values. Torch's own choice takes one program per sequence for
    # these widths, six times as long as its plain GEMMs.
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(
            query[:, None], entries[:, None], entries[:, None, :, :value_width], scale=scale
        )[:, 0].contiguous()


@attention.register_fake
def _(query: Tensor, entries: Tensor, value_width: int, scale: float) -> Tensor:
    del entries, scale
    return query.new_empty(*query.shape[:-1], value_width)


def attended(layer: MLADecodeLayer, query: Tensor) -> Tensor:
    """Torch's attention of each token to its own LENGTH entries, in pages that follow each other: (tokens, heads, latent)."""
    entries = layer.cache.view(-1, LENGTH, layer.cache.shape[-1])[: query.shape[0]]
    result: Tensor = attention(query, entries, layer.spec.kv_lora_rank, layer.spec.softmax_scale)
    return result


def whole(
    layer: MLADecodeLayer, hidden: Tensor, positions: Tensor, slots: Tensor, given: Tensor
) -> tuple[Tensor, Tensor]:
    """A decode step with its attention."""
    del given
    query = layer.query(hidden, positions, slots)
    return query, layer.projected(attended(layer, query))


class DualNorm(MLADecodeLayer):
    """Plain, but for the fused norms."""

    def _plain_query(self, q: Tensor, kv: Tensor, k_rope: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        epsilons = self.spec.q_norm.epsilon, self.spec.kv_norm.epsilon
        q, kv = ops.mla_dual_rms_norm(q, kv, self.q_weight, self.kv_weight, *epsilons)
        nope, rope = self._heads(q)
        self._write(kv, self._turned(k_rope, positions), slots)
        query = torch.cat([self._absorbed(nope), self._turned(rope, positions)], -1)
        if self.query_dtype == self.dtype:
            return query
        return (query.float() / self.query_scale).clamp(-448, 448).to(self.query_dtype)


def ways(form: str, attends: bool = False) -> dict[str, tuple[str, type | None, Chain]]:
    """Name -> the layer's way, its class, and the function. What attends is compiled, our ops in it too."""
    if attends:
        one, two, three = (types.FunctionType(whole.__code__.replace(), whole.__globals__) for _ in range(3))
        merging = {"options": {"combo_kernels": True}}
        return {
            "inductor": ("plain", None, torch.compile(one, fullgraph=True)),
            "combo": ("plain", None, torch.compile(two, fullgraph=True, **merging)),
            "absorb": ("absorb", None, torch.compile(three, fullgraph=True, **merging)),
        }
    # Each has a code object of its own: Dynamo keeps what it compiled with that, and counts recompilations there.
    plain, merged, norms = (types.FunctionType(chain.__code__.replace(), chain.__globals__) for _ in range(3))
    found: dict[str, tuple[str, type | None, Chain]] = {
        "inductor": ("plain", None, torch.compile(plain, fullgraph=True)),
        "combo": ("plain", None, torch.compile(merged, fullgraph=True, options={"combo_kernels": True})),
        "dual norm": ("plain", DualNorm, torch.compile(norms, fullgraph=True, options={"combo_kernels": True})),
        "ops": ("ops", None, chain),
        "buffer": ("buffer", None, chain),
        "absorb": ("absorb", None, chain),
        "gemms": ("plain", None, gemms),
    }
    if form == "fp8":
        found.pop("buffer")
    return found


def forget(cache: Tensor, before: Tensor) -> None:
    """Set a cache to what was in it, so that only replays have written what is compared."""
    cache.copy_(before)


def layers_for(spec: MLASpec, way: str, form: str, count: int, pages: int = PAGES) -> list[MLADecodeLayer]:
    """Several layers of different weights; those of all ways are alike."""
    cache, query_dtype = FORMS[form]
    made = [
        mla_decode_layer(
            spec, pages=pages, page_size=PAGE, cache=cache, way=way, query_dtype=query_dtype, device=DEVICE, seed=seed
        )
        for seed in range(count)
    ]
    for layer in made:
        layer.cache_scale.fill_(0.0625)
        layer.query_scale.fill_(0.0625)
    return made


def captured(calls: list[Callable[[], Any]], repeats: int) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
    """A CUDA graph of all calls, repeated, and what the first of each gave."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call() for call in calls]
        for _ in range(repeats - 1):
            for call in calls:
                call()
    return graph, results


def in_turns(graphs: dict[str, torch.cuda.CUDAGraph], calls: int, rounds: int) -> dict[str, list[float]]:
    """Microseconds per call of each replay, the graphs taking turns."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graph.replay()
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop) * 1000 / calls)
    return times


def difference(got: Tensor, wanted: Tensor) -> float:
    """The norm of the difference, relative."""
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


def measured(heads: int, tokens: int, form: str, rounds: int, attends: bool = False) -> dict[str, Any]:
    """One case, all ways in one run."""
    torch._dynamo.reset()
    # What dynamo gave up on would be timed as if compiled.
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        return _measured(heads, tokens, form, rounds, attends)


def _measured(heads: int, tokens: int, form: str, rounds: int, attends: bool) -> dict[str, Any]:
    spec = spec_of(heads)
    generator = torch.Generator(DEVICE).manual_seed(1)
    hidden = torch.randn(tokens, spec.hidden_size, device=DEVICE, dtype=torch.bfloat16, generator=generator)
    latents = (tokens, spec.num_local_heads, spec.kv_lora_rank)
    attended = torch.randn(latents, device=DEVICE, dtype=torch.bfloat16, generator=generator)
    positions = torch.randint(0, 4096, (tokens,), device=DEVICE, generator=generator)
    slots = torch.randperm(PAGES * PAGE, device=DEVICE, generator=generator)[:tokens]
    pages, filled = PAGES, torch.zeros(())
    if attends:
        pages, slots = tokens * LENGTH // PAGE, torch.arange(tokens, device=DEVICE) * LENGTH + LENGTH - 1
        filled = torch.randn(pages, PAGE, spec.latent_width, device=DEVICE, generator=generator)
    given, count = (hidden, positions, slots, attended), LAYERS[heads]
    repeats = max(1, math.ceil(LONGEST_US / (count * (35.0 if heads == 16 else 110.0))))
    graphs, results, caches = {}, {}, {}
    truth = layers_for(spec, "plain", form, count, pages)
    for layer in truth:
        forget(layer.cache, filled)
    wanted = [(whole if attends else chain)(layer, *given) for layer in truth]
    entries = [entries_of(layer, slots) for layer in truth]
    for name, (way, cls, function) in ways(form, attends).items():
        layers = layers_for(spec, way, form, count, pages)
        for layer, same in zip(layers, truth, strict=True):
            if cls is not None:
                layer.__class__ = cls
            for one, other in zip(layer.parameters(), same.parameters(), strict=True):
                one.data = other.data  # one copy for all ways
            forget(layer.cache, filled)
        calls = [(lambda layer=layer, function=function: function(layer, *given)) for layer in layers]
        graphs[name], results[name] = captured(calls, repeats)
        for layer in layers:
            forget(layer.cache, filled)
        caches[name] = layers
    times = in_turns(graphs, count * repeats, rounds)
    wrong = {}
    for name in graphs:
        if name == "gemms":
            continue
        for i, layer in enumerate(caches[name]):
            found = {
                "query": difference(results[name][i][0].float(), wanted[i][0].float()),
                "out": difference(results[name][i][1], wanted[i][1]),
                "cache": difference(entries_of(layer, slots), entries[i]),
            }
            wrong[name] = {part: max(value, wrong.get(name, {}).get(part, 0.0)) for part, value in found.items()}
    bad = {name: parts for name, parts in wrong.items() if not max(parts.values()) < TOLERANCE[form]}
    if bad:
        raise SystemExit(f"{heads} heads, {tokens} tokens, {form}: wrong results: {bad}")
    middle = {name: statistics.median(values) for name, values in times.items()}
    return {
        "heads": heads, "tokens": tokens, "form": form, "us": middle, "differences": wrong,
        "quartiles": {n: [statistics.quantiles(v, n=4)[i] for i in (0, 2)] for n, v in times.items()},
    }  # fmt: skip


def entries_of(layer: MLADecodeLayer, slots: Tensor) -> Tensor:
    """What the layer's cache holds there."""
    spec = layer.spec
    return read_entries(layer.cache, slots, spec.kv_lora_rank, spec.qk_rope_head_dim, layer.cache_scale, layer.dtype)


# ---- each op alone ---------------------------------------------------------------------------------------------------


def op_measured(
    tokens: int, heads: int, form: str, rounds: int, load: mla_ops.Load | None = None
) -> list[dict[str, Any]]:
    """Each op beside a device copy that moves the same bytes. Our results are checked in tests/fusion, AITER's here."""
    dtype = FORMS[form][1] or torch.bfloat16
    sets = [mla_ops.given_of(tokens, heads, dtype, PAGE, DEVICE) for _ in range(8 if tokens <= 4096 else 3)]
    rows = []
    if load is not None:
        mla_ops.check(load, sets[0], TOLERANCE[form])
    for name, (each, moved) in mla_ops.op_ways(sets[0], load).items():
        pairs = [torch.empty(2, moved // 2, dtype=torch.uint8, device=DEVICE) for _ in sets]
        calls: dict[str, list[Callable[[], Any]]] = {
            way: [functools.partial(function, given) for given in sets] for way, function in each.items()
        }
        calls["copy"] = [functools.partial(pair[1].copy_, pair[0]) for pair in pairs]
        repeats = max(1, min(40, math.ceil(LONGEST_US / (len(sets) * max(1.3, moved / 4e6)))))
        graphs = {way: captured(several, repeats)[0] for way, several in calls.items()}
        middle = {n: statistics.median(v) for n, v in in_turns(graphs, len(sets) * repeats, rounds).items()}
        rows.append({"op": name, "tokens": tokens, "heads": heads, "form": form, "bytes": moved, "us": middle})
    return rows


# ---- what is printed -------------------------------------------------------------------------------------------------


def chain_table(cases: list[dict[str, Any]]) -> Table:
    """Microseconds, and the better of Inductor's two over the better of ours."""
    names = [*cases[0]["us"]]
    table = Table("heads", "tokens", "form", *names, "Inductor's best / absorb", "/ gemms")
    for case in cases:
        us = case["us"]
        best, ours = min(us["inductor"], us["combo"]), us["absorb"]
        table.add_row(
            str(case["heads"]), str(case["tokens"]), case["form"],
            *(f"{us[name]:.1f}" if name in us else "-" for name in names), f"{best / ours:.3f}",
            f"{best / us['gemms']:.3f}" if "gemms" in us else "-",
        )  # fmt: skip
    return table


def ops_table(rows: list[dict[str, Any]]) -> Table:
    """Each op beside the copy, and AITER's beside it where they were asked for."""
    others = [way for way in (mla_ops.GEMM, "aiter", mla_ops.ONLY_TURNED) if any(way in row["us"] for row in rows)]
    more = [title for way in others for title in (f"{way}, us", f"{way} / op")]
    table = Table("op", "heads", "tokens", "form", "op, us", "copy, us", "op / copy", *more)
    for row in rows:
        us = row["us"]
        table.add_row(
            row["op"], str(row["heads"]), str(row["tokens"]), row["form"], f"{us['op']:.2f}", f"{us['copy']:.2f}",
            f"{us['op'] / us['copy']:.2f}",
            *(f"{us[way] / by:.2f}" if way in us else "-" for way in others for by in (1.0, us["op"])),
        )  # fmt: skip
    return table


def aiter_loader(checkout: Path | None) -> mla_ops.Load | None:
    """The loader of AITER's Triton ops, from a checkout or as installed; None where there is neither.

    Raises:
        SystemExit: the checkout that was asked for has no Triton ops.
    """
    why = aiter_checkout.why_not(checkout)
    if why is not None and checkout is not None:
        raise SystemExit(why)
    return None if why is not None else functools.partial(aiter_checkout.load, checkout, torch.float8_e4m3fn)


def main() -> None:
    """Measure what was asked for and write it down after each case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--heads", type=int, nargs="+", choices=TP, default=[*TP])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=[*FORMS])
    parser.add_argument("--only", choices=("chain", "layer", "ops"))
    parser.add_argument("--aiter", type=Path, help="a checkout of ROCm/aiter, whose Triton ops are timed beside ours")
    parser.add_argument("--rounds", type=int, default=40)
    asked = parser.parse_args()
    console = Console(width=150)
    if not torch.cuda.is_available():
        console.print("nothing measured: this needs a GPU that torch can see")
        return
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)  # attention in the dtype of its cache
    load = aiter_loader(asked.aiter)
    about = {"gpu": torch.cuda.get_device_name()}
    if load is not None:
        about["aiter"] = aiter_checkout.version(asked.aiter) or "a folder without a commit"

    found: dict[str, list[dict[str, Any]]] = {
        part: [] for part in ("chain", "layer", "ops") if asked.only in (None, part)
    }

    def keep(part: str, rows: list[dict[str, Any]]) -> None:
        found[part] += rows
        heads = rows[0]["heads"]
        save(f"mla_{part}-{heads}-heads", {**about, "cases": [row for row in found[part] if row["heads"] == heads]})

    with torch.inference_mode():
        for part, heads, form, tokens in itertools.product(("chain", "layer"), asked.heads, asked.forms, asked.tokens):
            if part in found and (part, form) != ("layer", "fp8"):  # torch attends to no scaled fp8
                keep(part, [measured(heads, tokens, form, asked.rounds, part == "layer")])
                console.print(chain_table(found[part][-1:]))
        for heads, form, tokens in itertools.product(asked.heads, asked.forms, OP_TOKENS):
            if "ops" in found and tokens * heads <= 16384 * 16:
                keep("ops", op_measured(tokens, heads, form, asked.rounds, load))
    for part, rows in found.items():
        if rows:
            console.print((ops_table if part == "ops" else chain_table)(rows))


if __name__ == "__main__":
    main()
