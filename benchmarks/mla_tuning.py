"""Launch shapes of the ops of an MLA decode layer: all that come into question, beside a copy, on one GPU.

    python benchmarks/mla_tuning.py --ops latents --forms bf16      a part, about a minute
    python benchmarks/mla_tuning.py                                 all of it

DeepSeek-V3's widths. Writes `benchmarks/results/mla_tuning-OP-FORM.json`; the rules in `fusion/backends/triton/tuning.py` come from it.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import mla_ops
import torch
from environment import save
from mla_chain import DEVICE, FORMS, LONGEST_US, PAGE, captured, in_turns

from layerfuse.fusion.backends.triton import absorb, launcher, tuning

OPS = {
    "latents": "mla_norm_rope_cache",
    "query": "mla_query_concat",
    "rope": "mla_query_rope",
    "absorb": "mla_query_absorb",
}
LATENT_TOKENS = (1, 8, 64, 256, 512, 1024, 4096, 16384)
QUERY_TOKENS = {16: (1, 8, 64, 512, 4096, 16384), 128: (1, 8, 64, 512, 2048)}


def latent_shapes() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Launches of `mla_norm_rope_cache`: name -> split, warps, chunk, hold."""
    for split, warps, hold in itertools.product((True, False), (1, 2, 4), (False, True)):
        for chunk in (512, 1024, 2048):
            if 4 <= chunk // (32 * warps) <= 32:
                yield f"split {int(split)} warps {warps} chunk {chunk} hold {int(hold)}", (split, warps, chunk, hold)


def query_shapes(most: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Launches of the query ops: name -> rows, warps, chunk."""
    for rows, warps, chunk in itertools.product((1, 2, 4, 8, 16, 32), (1, 2, 4, 8), (64, 256, 512)):
        if 2 <= rows * chunk // (32 * warps) <= 64 and (chunk == 64) == (most == 64):
            yield f"rows {rows} warps {warps} chunk {chunk}", (rows, warps, chunk)


def absorb_shapes(tokens: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Launches of `mla_query_absorb`: name -> columns, warps, heads roped together. And none: torch's GEMM into the buffer that is roped."""
    yield "torch's GEMM", ()
    for columns, warps, together in itertools.product((32, 64, 128, 256), (2, 4, 8), (4, 16)):
        if 512 <= columns * max(16, tokens) // warps <= 4096:
            yield f"columns {columns} warps {warps} heads {together}", (columns, warps, together)


def with_shape(op: str, shape: tuple[Any, ...] | None, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, its op launched in that shape; None: as the rule has it."""

    def call(*args: Any) -> Any:
        name = {"latents": "launch_latents", "absorb": "launch_absorb"}.get(op, "launch_query")
        before = getattr(tuning, name)

        def chosen(*about: Any) -> tuning.Launch:
            plan = before(*about)
            if shape is None or op == "absorb":
                return shape or plan
            if op == "latents":
                split, warps, chunk, hold = shape
                return plan._replace(split=split, warps=warps, chunk=chunk, tail=0, hold=hold)
            rows, warps, chunk = shape
            return plan._replace(rows=rows, warps=warps, chunk=chunk)

        setattr(tuning, name, chosen)
        launcher._compiled.clear()
        most = absorb.most
        if op == "absorb" and shape is not None:  # none: torch's GEMM; else ours, for any tokens
            absorb.most = lambda *_: len(shape) << 10  # type: ignore[assignment]
        try:
            return function(*args)
        finally:
            setattr(tuning, name, before)
            launcher._compiled.clear()
            absorb.most = most

    return call


def measured(op: str, form: str, tokens: int, heads: int, rounds: int) -> dict[str, Any]:
    """All shapes of one case, in microseconds."""
    dtype = FORMS[form][1] or torch.bfloat16
    sets = [mla_ops.given_of(tokens, heads, dtype, PAGE, DEVICE) for _ in range(8 if tokens * heads <= 65536 else 3)]
    name = OPS[op]
    each, moved = mla_ops.op_ways(sets[0], None)[name]
    repeats = max(1, min(40, math.ceil(LONGEST_US / (len(sets) * max(1.3, moved / 4e6)))))
    pairs = [torch.empty(2, moved // 2, dtype=torch.uint8, device=DEVICE) for _ in sets]
    graphs = {
        name: captured([functools.partial(way, given) for given in sets], repeats)[0]
        for name, way in each.items()
        if name != "op"
    }
    graphs |= {"copy": captured([functools.partial(pair[1].copy_, pair[0]) for pair in pairs], repeats)[0]}
    shapes = (
        latent_shapes()
        if op == "latents"
        else absorb_shapes(tokens)
        if op == "absorb"
        else query_shapes(64 if op == "rope" else 512)
    )
    for label, shape in (("rule", None), *shapes):
        calls = [functools.partial(each["op"], given) for given in sets]
        graphs[label] = with_shape(op, shape, lambda calls=calls: captured(calls, repeats)[0])()
    middle = {n: statistics.median(v) for n, v in in_turns(graphs, len(sets) * repeats, rounds).items()}
    best = min((n for n in middle if n not in ("copy", "rule", *each)), key=middle.__getitem__)
    print(
        f"{op} {form} {heads} heads {tokens} tokens: copy {middle['copy']:.2f} rule {middle['rule']:.2f} "
        f"({middle['rule'] / middle['copy']:.2f}) best {best} {middle[best]:.2f} ({middle[best] / middle['copy']:.2f})",
        flush=True,
    )
    return {"tokens": tokens, "heads": heads, "bytes": moved, "us": middle}


def main() -> None:
    """Measure what was asked for; a file for each op and form."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ops", nargs="+", choices=OPS, default=[*OPS])
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=[*FORMS])
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print("nothing measured: this needs a GPU that torch can see")
        return
    with torch.inference_mode():
        for op, form in itertools.product(asked.ops, asked.forms):
            if (op, form) == ("rope", "fp8"):
                continue  # what it turns stays in bfloat16
            cases = (
                [(tokens, 16) for tokens in LATENT_TOKENS]
                if op == "latents"
                else [
                    (tokens, heads)
                    for heads, several in QUERY_TOKENS.items()
                    for tokens in ((1, 8, 16, 24, 32, 64) if op == "absorb" else several)
                ]
            )
            found = []
            for tokens, heads in cases:
                found.append(measured(op, form, tokens, heads, asked.rounds))
                save(f"mla_tuning-{op}-{form}", {"gpu": torch.cuda.get_device_name(), "cases": found})


if __name__ == "__main__":
    main()
