"""End to end under tensor parallelism: one rank's part of a decoder layer at decode, with and without the fused all-reduces.

    python benchmarks/decode_layer_tp.py [deepseek-v3] [gpt-oss-120b] --ranks 2 --tokens 1,8,64 [--save]

One process per GPU. A step is a layer as it stands in a stack: all-reduce of what the layer before left, residual add, norm,
attention, the same again, MLP. The layers are `decode_layer`'s DeepSeek-V3 (dense MLP, fp8) and `gpt_oss_layer`; their heads and
intermediate sizes are divided by the ranks. The cache is empty.

Unfused: NCCL's all-reduce as a functional collective, and as opaque ops torch's one- and two-shot all-reduce over symmetric
memory, with `--vllm` vLLM's custom one too (`tp_reductions`); each with Inductor plain and with combo kernels. The best of all is
what the others are divided by. Fused: the `all_reduce_*` fusions alone, and all fusions. Every arm's numbers are held to the
first one's. CUDA graphs take turns, ranks start together, a time is that of the slowest rank. What fails on all ranks alike is a
printed reason; anything else that fails ends the run.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import block_gemm
import decode_layer_tp
import mxfp4_experts
import torch
import torch.distributed as dist
import tp_reductions
from decode_layer import VARIANTS, Step, deepseek, graph_of, in_turns, per_call
from environment import save
from gpt_oss_layer import gpt_oss
from torch import Tensor

from layerfuse import fusion, registry
from layerfuse.adapters.errors import LayerfuseError
from layerfuse.adapters.specs import Parallel, ResidualSpec
from layerfuse.bench.ranks import Ranks
from layerfuse.bench.team import team
from layerfuse.fusion import FusionConfig, Target
from layerfuse.fusion.backends.symm_mem.workspaces import why_not
from layerfuse.fusion.catalog import FUSIONS

LAYERS: dict[str, Callable[..., tuple[Step, Any, FusionConfig]]] = {"deepseek-v3": deepseek, "gpt-oss-120b": gpt_oss}
TOLERANCES = {"deepseek-v3": (0.06, 0.2), "gpt-oss-120b": (0.01, 0.05)}
"""How far stream and result may be from those of the first arm, relative to them. A sum that was rounded before it is normed moves some
values by a step of e4m3, which is 6 to 12 %; half a sum is off by 0.4 and more."""
REDUCED = dict.fromkeys((name for name in FUSIONS if name.startswith("all_reduce_")), True)
SITES = 2
"""All-reduces of a step."""


class Arm(NamedTuple):
    """How a step is compiled."""

    label: str
    opaque: bool
    level: int
    switches: dict[str, bool]

    @property
    def reduced(self) -> bool:
        """Whether the all-reduces are to be fused."""
        return any(self.switches.values())


ARMS = {
    "nccl": Arm("NCCL", False, 0, {}),
    "opaque": Arm("", True, 0, {}),
    "all_reduce": Arm("fused all-reduces", False, 0, REDUCED),
    "all": Arm("all fusions", False, 2, REDUCED),
    "others": Arm("all other fusions", True, 2, dict.fromkeys(REDUCED, False)),
}
"""`others` shows what of `all` is not the all-reduce's."""


kept: list[Any] = []
"""Graphs whose memory other ranks have mapped, to the end: it may not come back at the same address."""


def line_up() -> None:
    """Before a timing: late enough on a GPU for the host to queue more behind it."""
    if torch.cuda.is_initialized():
        torch.cuda._sleep(400_000)
    team().line_up()


class Layer:
    """A model's layer on this rank, built once."""

    def __init__(self, name: str, device: str) -> None:
        torch.manual_seed(0)
        self.name, self.device = name, device
        self.parallel = Parallel(size=team().size, rank=team().rank)
        self.step, self.rotary, self.config = LAYERS[name](device, device == "cpu", self.parallel)
        # The layer is built with the widths of one rank, and says so; that its sums go over all of them is said here.
        said: Any = {"parallel": self.parallel, "mlp_ranks": team().size}
        self.specs = [
            (path, attrs.evolve(spec, **said) if isinstance(spec, ResidualSpec) else spec)
            for path, spec in registry.specs_in(self.step, parallel=Parallel(size=1, rank=0))
        ]

    def inputs(self, tokens: int) -> tuple[Tensor, ...]:
        """This rank's part of what the layer before gave, and the stream, which is every rank's."""
        hidden, device = self.step.layer.hidden_size, self.device
        torch.manual_seed(tokens)
        residual = torch.randn(tokens, 1, hidden, device=device).bfloat16()
        torch.manual_seed(1000 * tokens + team().rank)
        x = torch.randn(tokens, 1, hidden, device=device).bfloat16()
        return x, residual, *self.rotary(x, torch.zeros(tokens, 1, dtype=torch.long, device=device))

    def choose_kernels(self, tokens: int) -> str:
        """The same ones on all ranks."""
        if self.device == "cpu":
            return "plain torch"
        if self.name == "deepseek-v3":
            said = block_gemm.try_out(tokens)
            every = team().gather(block_gemm.chosen[tokens])
            if len(set(every)) > 1:
                block_gemm.chosen[tokens] = "triton"
            return said
        every = team().gather(mxfp4_experts.try_out(self.step.layer.mlp.experts, tokens, top_k=4))
        for kernel in mxfp4_experts.KERNELS:
            problems = [said.get(kernel, "not tried") for said in every]
            if not any(problems):
                mxfp4_experts.chosen[:] = [kernel]
                return f"experts by {kernel}, {mxfp4_experts.fastest[tokens]}; {every[0]}"
        raise SystemExit(f"no kernel for the experts runs: {every}")

    def compiled(self, arm: Arm, options: dict[str, Any]) -> Any:
        """The step as an arm compiles it."""
        reduce = tp_reductions.opaque if arm.opaque else tp_reductions.functional()
        quant = self.config.quant if arm.level or arm.switches else ()
        return fusion.compile(
            Step(self.step.layer, self.step.mixer, reduce),
            specs=self.specs,
            config=FusionConfig(level=arm.level, switches=arm.switches, quant=quant),
            target=None if self.device == "cuda" else Target(arch="cpu", vendor="cpu", fp8="e4m3fn"),
            fullgraph=True,
            dynamic=False,
            **options,
        )


layer_of = lru_cache(maxsize=1)(Layer)
"""That of the latest model, for all numbers of tokens."""


class Case:
    """One layer at one number of tokens: its arms, then their times."""

    def __init__(self, layer: Layer, tokens: int, step: Callable[[str, int], None]) -> None:
        self.layer, self.tokens, self.title = layer, tokens, f"{layer.name}, {tokens} tokens"
        self.begin: Callable[[str], None] = lambda what: step(f"{self.title}, {what}", 0)
        self.say: Callable[[str], None] = lambda line: step(line, 1)
        self.arguments = layer.inputs(tokens)
        self.replays: dict[str, Callable[[], None]] = {}
        kept.append(self.replays)
        self.results: dict[str, tuple[Tensor, Tensor]] = {}
        self.executed: dict[str, dict[str, int]] = {}
        self.groups: dict[str, list[str]] = {"unfused": []}
        self.failures: list[str] = []
        self.kernels = layer.choose_kernels(tokens)
        torch._dynamo.reset()
        self.say(f"{self.title}, {team().size} ranks; {self.kernels}")
        self.reductions = tp_reductions.set_up(self.arguments[0], self.say)

    def add(self, arm: Arm, variant: str, options: dict[str, Any]) -> None:
        """Compile and capture an arm; an opaque one once per all-reduce that runs here."""
        compiled = self.layer.compiled(arm, options)
        for kind, reduction in self.reductions.items() if arm.opaque else [("", None)]:
            tp_reductions.chosen[:] = [reduction] if reduction is not None else []
            label = ", ".join(filter(None, (arm.label, kind, variant)))
            self.begin(label)
            begun = time.perf_counter()
            made, reason = tp_reductions.attempt(label, lambda compiled=compiled: graph_of(compiled, self.arguments))
            if reason is None and reduction is not None:
                _, reason = tp_reductions.attempt(f"{label}, captured", reduction.captured)
            if reason is None:
                self.executed[label] = per_call(compiled.report)
                reason = self._not_fused(arm, compiled, label)
            if reason is not None:
                self.failures.append(f"{self.title}, {label}: {reason}")
                self.say(f"  FAILED: {label}: {reason}")
                continue
            self.replays[label], self.results[label] = made
            self.groups.setdefault(arm.label if arm.reduced or arm.level else "unfused", []).append(label)
            ran = ", ".join(f"{fused} x{count}" for fused, count in self.executed[label].items())
            self.say(f"  {label}: {ran or 'nothing fused'} ({time.perf_counter() - begun:.1f} s)")

    def _not_fused(self, arm: Arm, compiled: Any, label: str) -> str | None:
        """What an arm with fused all-reduces did without, on any rank."""
        if not arm.reduced:
            return None
        found = sum(count for fused, count in self.executed[label].items() if fused.startswith("all_reduce_"))
        mine = None if found == SITES else f"{found} of {SITES} all-reduces ran fused\n{compiled.report}"
        if self.layer.device == "cuda":
            mine = mine or why_not(dist.group.WORLD.group_name)
        return next((said for said in team().gather(mine) if said is not None), None)

    def measured(self) -> dict[str, Any]:
        """Times and numbers of what was added."""
        self.begin("timing")
        if self.layer.device == "cpu":
            tp_reductions.chosen[:] = list(self.reductions.values())[:1]
        off = self._differences()
        times = in_turns(self.replays, self.layer.device == "cuda", line_up=line_up)
        us = {label: statistics.median(several) for label, several in team().slowest(times).items()}
        best = {group: min(labels, key=us.__getitem__) for group, labels in self.groups.items() if labels}
        base = us[best["unfused"]] if "unfused" in best else None
        ratios = {group: base / us[label] for group, label in best.items()} if base else {}
        self.say("  " + "; ".join(f"{label} {one:.1f} us" for label, one in us.items()))
        for group, label in best.items():
            ratio = f", {ratios[group]:.3f}" if ratios and group != "unfused" else ""
            self.say(f"{self.title}: {group}: {us[label]:.1f} us ({label}){ratio}")
        return {
            "model": self.layer.name, "tokens": self.tokens, "ranks": team().size, "kernels": self.kernels, "us": us,
            "best": best, "ratios": ratios, "executed_per_call": self.executed, "differences": off,
            "failures": self.failures,
        }  # fmt: skip

    def _differences(self) -> dict[str, Any]:
        """How far each arm's numbers are from the first one's on any rank, and whether all ranks hold the same stream.

        Of the result the middle token counts: a router may choose otherwise where two experts score alike.
        """
        found: dict[str, Any] = {}
        reference: tuple[Tensor, Tensor] | None = None
        for label, replay in self.replays.items():
            replay()
            # On a CPU a replay is a call, and what came out of the first one stays.
            result, residual = (each.flatten(0, 1).float() for each in self.results[label])
            reference = reference or (result, residual)
            stream = float((residual - reference[1]).norm() / reference[1].norm())
            rows = (result - reference[0]).norm(dim=-1) / reference[0].norm(dim=-1)
            every = team().gather((stream, float(rows.median()), residual.double().sum().item()))
            stream, middle = (max(each[i] for each in every) for i in range(2))
            alike = len({each[2] for each in every}) == 1
            found[label] = {"stream": stream, "result": middle, "ranks_alike": alike}
            # A NaN is no less than anything.
            within = TOLERANCES[self.layer.name]
            if not (stream < within[0] and middle < within[1] and alike):
                self.failures.append(f"{self.title}, {label}: wrong numbers: {found[label]}")
                self.say(f"  FAILED: {label}: wrong numbers: {found[label]}")
        return found


# Not inference_mode: what is set up on the way (symmetric memory) lives longer than this.
@torch.no_grad()
def measured(given: argparse.Namespace, name: str, tokens: int, step: Callable[[str, int], None]) -> dict[str, Any]:
    """One case, on each rank. `step` is told (line, 1) of what is to be printed and (text, 0) of what begins."""
    torch._dynamo.config.recompile_limit = 64
    block_gemm.layout[:] = [given.scales]
    tp_reductions.library[:] = [given.vllm] if given.vllm else []
    if given.experts:
        mxfp4_experts.KERNELS = {given.experts: mxfp4_experts.KERNELS[given.experts]}
    gc.collect()
    case = Case(layer_of(name, given.device), tokens, step)
    for arm, variant in product(given.arms.split(","), given.variants.split(",")):
        case.add(ARMS[arm], variant, VARIANTS[variant])
    return case.measured()


def main() -> int:
    """Measure all that was asked for, as far as the time goes; 1 where something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(LAYERS)}; default: all")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", default="1,8,64")
    parser.add_argument("--arms", default="nccl,opaque,all_reduce,all", help=f"of {', '.join(ARMS)}")
    parser.add_argument("--variants", default=None, help=f"of {', '.join(VARIANTS)}; default: all, plain on a CPU")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which no further case is begun")
    parser.add_argument("--experts", choices=[*mxfp4_experts.KERNELS], help="default: the first that runs")
    parser.add_argument(
        "--vllm", type=Path, help="a folder with vLLM's compiled library: measure its custom all-reduce too"
    )
    parser.add_argument("--scales", choices=("column", "row"), default="column", help="row: never cuBLASLt's GEMM")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/decode_layer_tp-N-ranks.json")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the script: tiny layers")
    given = parser.parse_args()
    given.variants = given.variants or (",".join(VARIANTS) if given.device == "cuda" else "plain")
    for chosen, known in (
        (given.models, LAYERS),
        (given.arms.split(","), ARMS),
        (given.variants.split(","), VARIANTS),
    ):
        unknown = [each for each in chosen if each not in known]
        if unknown:
            parser.error(f"{', '.join(unknown)}: expected some of {', '.join(known)}")
    there = torch.cuda.device_count() if given.device == "cuda" else given.ranks
    if there < given.ranks or given.ranks < 2:
        print(f"nothing measured: --ranks {given.ranks} takes 2 or more ranks and as many GPUs; torch sees {there}")
        return 2
    # As torch chooses it: the ranks of one op do with one, and a layer has more kernels to compile.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(32, os.cpu_count() or 1)))
    cases: list[dict[str, Any]] = []
    failures: list[str] = []
    with Ranks(given.ranks, given.device) as ranks:
        # Of a rank, as this process leaves the GPUs to them.
        gpu = ranks.call(torch.cuda.get_device_name)[0] if given.device == "cuda" else None
        until = time.monotonic() + given.limit
        for name, tokens in product(given.models or LAYERS, map(int, given.tokens.split(","))):
            if time.monotonic() > until:
                failures.append(f"{name}, {tokens} tokens: not begun: {given.limit:.0f} s were over")
                continue
            begun = time.perf_counter()
            try:
                case, *_ = ranks.call(
                    decode_layer_tp.measured, given, name, tokens,
                    step=lambda text, lines: print(text, flush=True) if lines else None,
                )  # fmt: skip
            except LayerfuseError as error:
                failures.append(f"{name}, {tokens} tokens: {error}")
                break
            cases.append(case)
            failures += case["failures"]
            print(f"  {time.perf_counter() - begun:.0f} s", flush=True)
            if given.save:
                written = save(
                    f"decode_layer_tp-{given.ranks}-ranks", {"gpu": gpu, "cases": cases, "failures": failures}
                )
                print(f"written to {written}", flush=True)
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
