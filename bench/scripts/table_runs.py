"""What `tables` measures: runs of one GPU and of several, the columns of their tables, and the goals that were set for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from attrs import field, frozen

from layerfuse import registry
from layerfuse.bench.against import AGAINST, ALONE, BEHIND, LIBRARIES, ONE_SHOT, TWO_SHOT, VLLM
from layerfuse.bench.cases import Case, forms, forms_over_ranks
from layerfuse.bench.choosing import Options, make_case

COPY, AITER, FLA = "copy", "aiter triton", "fla"
COMPILERS = ("inductor", "inductor combo_kernels")
INDUCTOR, BEST, UNQUANTISED = "better Inductor", "best of the others", "without quantisation"
"""What a goal may name beside peers and the words of `bench.against.AGAINST`."""
BEST_UNFUSED, LIBRARY, ONE_SHOT_ALONE = AGAINST
MOST = 1 << 30


@frozen
class Goal:
    """Our time divided by another is at most this."""

    against: str
    ratio: float
    least: int = 1
    most: int = MOST
    "Tokens between which it holds, both included."


@frozen(kw_only=True)
class Run:
    """One table."""

    op: str
    widths: tuple[int, ...]
    tokens: tuple[int, ...]
    goals: tuple[Goal, ...] = ()
    slack: float = 0.0
    "How far off the goals it may be: widths that nobody tuned for."
    options: dict[str, Any] = field(factory=dict)

    def __str__(self) -> str:
        more = "".join(f" {name}={value}" for name, value in self.options.items())
        return f"{self.op} {','.join(map(str, self.widths))}{more}"

    def case(self, ranks: int = 1) -> Case:
        """What is measured."""
        options = Options(**self.options)
        return make_case(self.op, registry=registry.default, widths=self.widths, options=options, ranks=ranks)


@frozen(kw_only=True)
class Suite:
    """Runs that share a table."""

    title: str
    runs: Callable[[], Iterator[Run]]
    peers: tuple[str, ...]
    on_a_cpu: tuple[str, ...]
    "Instead, to try the script."
    columns: tuple[str, ...]
    "Whose times are shown."
    ratios: tuple[str, ...]
    "By whose times ours are divided."
    gpus: int = 1
    "At least."


# ---- one GPU

USERS = (Goal(VLLM, 1 / 1.1, 1, 64), Goal(VLLM, 1.0, 65), Goal(FLA, 1 / 1.1, 1, 64), Goal(FLA, 1.0, 65))
"""What users of NVIDIA GPUs have today."""
SINGLE = (*USERS, Goal(AITER, 1 / 1.15), Goal(COPY, 1.08, 4096))
ADD = (*USERS, Goal(BEST, 1.0, 1, 64), Goal(BEST, 1 / 0.98, 65))
ADD_GROUP = (*USERS, Goal(AITER, 1 / 1.2, 1, 64), Goal(INDUCTOR, 1 / 2.2, 1, 64), Goal(COPY, 1.05, 1024),
             Goal(INDUCTOR, 1 / 1.7, 1024))  # fmt: skip
PADDED = (Goal(AITER, 1 / 1.2, 1, 99), Goal(COPY, 1.02, 16384))
GATED = (Goal(AITER, 1 / 1.4, 1, 64), Goal(COPY, 1.25, 1, 64), Goal(AITER, 1 / 1.25, 1024), Goal(COPY, 1.08, 1024))

TOKENS, TWO = (1, 64, 1024, 16384), (64, 16384)
SIGMOID = {"heads": 32, "activation": "sigmoid"}
NAMED: tuple[tuple[str, int, tuple[Goal, ...], dict[str, Any]], ...] = (
    ("gated_rms_norm_group_quant", 128, GATED, SIGMOID),
    ("add_rms_norm_group_quant", 7168, ADD_GROUP, {}),
    ("add_rms_norm_pad", 2880, PADDED, {}),
    *(("add_rms_norm", width, ADD, {}) for width in (2880, 4096, 7168)),
    *((f"{name}_quant", 7168, SINGLE, {}) for name in (
        "add_rms_norm_per_token", "add_rms_norm_static", "rms_norm_per_token", "rms_norm_static", "rms_norm_group")),
    ("silu_mul_group_quant", 18432, SINGLE, {}),
    ("silu_mul_per_token_quant", 2304, SINGLE, {}),
    ("silu_mul_static_quant", 14336, SINGLE, {}),
    ("gated_rms_norm", 128, USERS, {"heads": 32}),
    ("gated_rms_norm", 128, USERS, SIGMOID),
)  # fmt: skip
"""The shapes that have goals of their own, in the order of what matters: op, width, goals and options."""
UNTUNED = (2304, 5120, 6144, 12288, 5001, 3072)
ON_ALL_WIDTHS = {
    "add_rms_norm_group_quant": ADD_GROUP, "add_rms_norm": ADD, "add_rms_norm_per_token_quant": SINGLE,
    "silu_mul_group_quant": SINGLE, "add_rms_norm_static_quant": SINGLE, "add_rms_norm_pad": PADDED,
}  # fmt: skip
HEADS: tuple[tuple[int, dict[str, Any]], ...] = (
    (128, {"heads": 16}), (64, {"heads": 48, "group_size": 64}), (256, {"heads": 8}),
)  # fmt: skip
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"tma_aligned": True}, {"ue8m0": True}, {"weight_dtype": "fp32"}, {"weight_offset": 1.0}, {"group_size": 32},
)  # fmt: skip
"""What changes how a kernel reads or writes."""


def on_one_gpu() -> Iterator[Run]:
    """The named shapes, widths that nobody tuned for, then every other form of the catalog once."""
    for op, width, goals, options in NAMED:
        yield Run(op=op, widths=(width,), tokens=TOKENS, goals=goals, options=options)
    for op, goals in ON_ALL_WIDTHS.items():
        for width in UNTUNED:
            yield Run(op=op, widths=(width,), tokens=TWO, goals=goals, slack=0.1)
    gated, *_ = NAMED
    for width, options in HEADS:
        yield Run(op=gated[0], widths=(width,), tokens=TWO, goals=GATED, slack=0.1, options=options)
    for options in LAYOUTS:
        yield Run(op="add_rms_norm_group_quant", widths=(7168,), tokens=TWO, options=options)
    for name, (fusion, form) in forms().items():
        if fusion.owner == "layerfuse" and name not in {op for op, *_ in NAMED}:
            widths = (1536, 512, 64) if name.startswith("mla_") else (128,) if name.startswith("gated") else (7168,)
            options = {"heads": 32} if name.startswith("gated") else {}
            yield Run(op=form.op.name, widths=widths, tokens=TWO, options=options)


# ---- several

PLAIN, GROUP = "all_reduce_add_rms_norm", "all_reduce_add_rms_norm_group_quant"
COUNTS, FEW = (1, 8, 32, 80, 256, 1024, 4096), (8, 80, 1024)
UNFUSED = (
    Goal(BEST_UNFUSED, 0.85, 1, 32), Goal(LIBRARY, 0.45, 1, 32), Goal(ONE_SHOT_ALONE, 1.15, 1, 32), Goal(BEST_UNFUSED, 0.9, 33, 80),
    Goal(BEST_UNFUSED, 1.0, 81, 1023), Goal(BEST_UNFUSED, 0.95, 1024, 1024), Goal(BEST_UNFUSED, 1.0, 1025),
)  # fmt: skip
QUANTISED = (Goal(UNQUANTISED, 1.05),)


def on_several_gpus() -> Iterator[Run]:
    """The shapes that have goals, in the order of what matters, then every other form."""
    for op, width, goals in (
        (PLAIN, 2880, UNFUSED), (PLAIN, 7168, UNFUSED), (GROUP, 7168, QUANTISED), (GROUP, 2880, QUANTISED),
    ):  # fmt: skip
        yield Run(op=op, widths=(width,), tokens=COUNTS, goals=goals)
    yield Run(op=PLAIN, widths=(5120,), tokens=COUNTS, goals=UNFUSED, slack=0.1)
    for op in forms_over_ranks():
        if op not in (PLAIN, GROUP):
            yield Run(op=op, widths=(2880 if op.endswith("_pad") else 7168,), tokens=FEW)


SUITES = {
    "gpu": Suite(
        title="Single ops in brief",
        runs=on_one_gpu,
        peers=("layerfuse (triton)", *COMPILERS, AITER, FLA, "flashinfer", VLLM, COPY),
        on_a_cpu=("layerfuse", "eager", COPY),
        columns=(COPY, *COMPILERS, AITER, VLLM, FLA, "flashinfer"),
        ratios=(COPY, INDUCTOR, AITER, VLLM),
    ),
    "all_reduce": Suite(
        title="Fused all-reduces in brief",
        runs=on_several_gpus,
        peers=("layerfuse (symm_mem)", "flashinfer fused", "flashinfer two-shot",
               *(f"{name}{end}" for name in (LIBRARIES["cuda"], ONE_SHOT, TWO_SHOT, VLLM)
                 for end in (f"{BEHIND}inductor", f"{BEHIND}layerfuse", ALONE))),
        on_a_cpu=("layerfuse (reference)", f"{LIBRARIES['cpu']}{BEHIND}layerfuse", f"{LIBRARIES['cpu']}{ALONE}"),
        columns=(BEST_UNFUSED, LIBRARY, ONE_SHOT_ALONE, TWO_SHOT + ALONE, VLLM + ALONE, "flashinfer fused"),
        ratios=(BEST_UNFUSED, LIBRARY, ONE_SHOT_ALONE, UNQUANTISED),
        gpus=2,
    ),
}  # fmt: skip
