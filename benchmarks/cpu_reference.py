"""Each op's reference on one core against the eager chain that it replaces: about a minute, no GPU.

    python benchmarks/cpu_reference.py [WORD ...] [--tokens 1,8,64,512] [--save]

Widths are those of DeepSeek-V3, Qwen3-Next and gpt-oss. `op` is the op as users call it, which on a CPU is its reference behind
torch's dispatcher and our checks; `reference` is the function alone. What is slower than eager is marked. `--save` writes
`benchmarks/results/cpu_reference.json`.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from environment import save

from layerfuse import registry
from layerfuse.bench import inputs
from layerfuse.bench.arithmetic import EAGER, compose
from layerfuse.bench.cases import Case, forms
from layerfuse.bench.choosing import Options, make_case
from layerfuse.fusion import backends
from layerfuse.fusion.ops.library import public

TOKENS = (1, 8, 64, 512)
ROUNDS = 25
SECONDS = 0.0015
"""Of one round of one function, so that the clock does not count."""
SETS = 2


def case_of(name: str) -> Case:
    """DeepSeek-V3's widths; Qwen3-Next's heads; a gated MLP of 2304 columns, DeepSeek-V3's on eight ranks."""
    if name.startswith("mla_"):
        return make_case(name, registry=registry.default, widths=(1536, 512, 64))
    if name.startswith("gated_"):
        return make_case(name, registry=registry.default, widths=(128,), options=Options(heads=32))
    width = 2304 if name.startswith("silu_") else 2880 if name.endswith("_pad") else 7168
    return make_case(name, registry=registry.default, widths=(width,))


def in_turns(functions: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Microseconds of a call in the quickest round, all taking turns: what else runs on the machine only adds."""
    calls = {}
    for name, function in functions.items():
        for _ in range(3):
            function()
        begun = time.perf_counter()
        function()
        calls[name] = max(1, int(SECONDS / max(time.perf_counter() - begun, 1e-6)))
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(ROUNDS):
        for name, function in functions.items():
            begun = time.perf_counter()
            for _ in range(calls[name]):
                function()
            times[name].append((time.perf_counter() - begun) / calls[name] * 1e6)
    return {name: min(several) for name, several in times.items()}


def measured(name: str, tokens: int) -> dict[str, Any]:
    """One op with one number of tokens."""
    case = case_of(name)
    fusion, form = forms()[name]
    work = inputs.make(case, tokens, torch.device("cpu"), SETS)
    arguments = [work.arguments(rows) for rows in work.sets]

    def over(function: Callable[..., Any]) -> None:
        for given in arguments:
            function(*given)

    functions = {"eager": compose(form, EAGER), "op": public(form.op, fusion.backends), "reference": form.op.reference}
    times = in_turns({name: functools.partial(over, function) for name, function in functions.items()})
    return {"op": name, "tokens": tokens, **{f"{name}_us": us / SETS for name, us in times.items()}}


def main() -> None:
    """Measure what the words name, or everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="ops whose name holds one of these")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    backends.force("reference")
    names = [name for name in forms() if not given.words or any(word in name for word in given.words)]
    rows = []
    print(f"{'op':45} tokens   eager      op  reference  op / eager")
    with torch.inference_mode():
        for name in names:
            for tokens in map(int, given.tokens.split(",")):
                row = measured(name, tokens)
                rows.append(row)
                ratio = row["op_us"] / row["eager_us"]
                slow = "  slower" if ratio > 1 else ""
                print(f"{name:45} {tokens:6} {row['eager_us']:7.1f} {row['op_us']:7.1f} {row['reference_us']:10.1f} "
                      f"{ratio:11.2f}{slow}", flush=True)  # fmt: skip
    late = [f"{row['op']} at {row['tokens']}" for row in rows if row["tokens"] >= 8 and row["op_us"] > row["eager_us"]]
    print(f"slower than eager from 8 tokens on: {', '.join(late) or 'none'}")
    if given.save:
        print(f"written to {save('cpu_reference', {'threads': 1, 'cases': rows})}")


if __name__ == "__main__":
    main()
