"""What is measured, as data: the fusion, its widths and epsilons, its dtypes and options, and the bytes it must move.

All of it follows from the fusion's declaration and a site of a declared model, or widths given by hand. Nothing here
needs torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from attrs import frozen

from ..adapters.errors import shown
from ..fusion.catalog import FUSIONS
from ..fusion.chain import Form, Fusion
from ..fusion.declare import (
    ELEMENTS,
    BlockScale,
    Index,
    Like,
    Padded,
    Quantised,
    Result,
    Rows,
    StaticScale,
    Table,
    Weight,
)
from ..fusion.sites import DECODE, EXPERTS, LINEAR, OWN_PLACE
from .errors import BenchError, UnknownFusionError

if TYPE_CHECKING:
    from ..fusion.declare import Argument, Op

ITEM_SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of one element of a dtype."""

INDEX_SIZE = 8
"""Bytes of one position of a token."""

EPSILON = 1e-6
"""Of every norm, where widths are given instead of a model."""

_S = TypeVar("_S")


@frozen(kw_only=True)
class Case:
    """One form of a fusion with one set of widths, dtypes and options; only the number of tokens is open."""

    fusion: str
    op: str
    "Of the form: the fusion's own, or that of another of its forms."
    name: str
    "The model, or the widths."
    widths: dict[str, int]
    "By the op's names for them, in its order."
    heads: int | None
    "Rows are (tokens, heads, width); None: (tokens, width)."
    row_width: int | None
    """Columns in a row of the projection that all rows are views of, from its first column on; what follows them is not
    touched. None: every argument is a contiguous tensor of its own."""
    padded_width: int | None
    "Columns of the padded result; None where nothing is padded."
    epsilons: dict[str, float]
    "By argument."
    weight_offsets: dict[str, float]
    "By argument."
    activation: str | None
    "Of the gate of a gated norm; None elsewhere."
    norm_before_gate: bool | None
    limit: float | None
    "What a gated MLP clamps to; None where it clamps nothing."
    dtype: str
    "bf16, fp16 or fp32."
    weight_dtype: str
    "Likewise."
    quant: str | None
    "The scheme of a format, or None."
    fp8: str | None
    "e4m3fn or e4m3fnuz; None where nothing is quantised to it."
    group_size: int | None
    "Columns per scale; None for one scale per token, or where nothing is quantised."
    column_major: bool
    tma_aligned: bool
    ue8m0: bool
    ranks: int = 1
    "How many sum the rows, one GPU or process each."
    kv_heads: int | None = None
    "Heads of the key, where it has as many as it likes; None elsewhere."
    turned: int | None = None
    "Columns of each head that a rope turns; None where there is none."

    @property
    def declared(self) -> Fusion:
        """The fusion's declaration.

        Raises:
            KeyError: the package that declares it is not installed here.
        """
        return FUSIONS[self.fusion]

    @property
    def form(self) -> Form:
        """The chain that is measured, and its op."""
        return next(form for form in self.declared.forms if form.op.name == self.op)

    def heads_of(self, rows: Rows) -> int | None:
        """Heads of an argument of kind `Rows`; None where it is (tokens, width)."""
        return self.kv_heads if rows.own_heads and rows.like is not None else self.heads

    def width_of(self, name: str) -> int:
        """Columns of an argument of kind `Rows`, its heads joined."""
        rows = rows_of(self.form.op, name)
        return self.widths[rows.width] * (self.heads_of(rows) or 1)

    def shape_of(self, result: Result, tokens: int) -> tuple[int, ...]:
        """Of one result."""
        width = self.width_of(result.of)
        if isinstance(result, Like):
            heads = self.heads_of(rows_of(self.form.op, result.of))
            return (tokens, width) if heads is None else (tokens, heads, width // heads)
        if isinstance(result, Padded):
            return tokens, self.padded_width or width
        if isinstance(result, Quantised):
            return tokens, width // (ELEMENTS[result.dtype].per if result.dtype else 1)
        if isinstance(result, BlockScale):
            return tokens, width // result.columns
        return tokens, 1 if self.group_size is None else -(-width // self.group_size)

    def bytes_read(self, tokens: int) -> int:
        """The rows of every token with its row of a rope's tables, the weights and a scale that is given, each once."""
        op, size = self.form.op, ITEM_SIZES[self.dtype]
        rows = sum(self.width_of(rows.name) for rows in op.rows)
        weights = sum(self.widths[rows_of(op, each.of).width] for each in op.args if isinstance(each, Weight))
        if self.turned is not None:
            rows += len(names_of(op, Table)) * self.turned // 2
        index = INDEX_SIZE * len(names_of(op, Index))
        return (
            tokens * (rows * size + index)
            + weights * ITEM_SIZES[self.weight_dtype]
            + 4 * len(names_of(op, StaticScale))
        )

    def bytes_written(self, tokens: int) -> int:
        """All results of every token, the scales included, each once."""
        written = 0
        for result in self.form.op.results:
            elements = 1
            for size in self.shape_of(result, tokens):
                elements *= size
            written += elements * ITEM_SIZES.get(self.dtype_of(result), 1)
        return written

    def dtype_of(self, result: Result) -> str:
        """Of one result: that of the rows, the fp8 format, another that holds what is quantised or its scales, or fp32."""
        if isinstance(result, Like | Padded):
            return self.dtype
        if isinstance(result, Quantised | BlockScale):
            return result.dtype.removeprefix("float8_") or self.fp8 or ""
        return "fp32"

    def bytes_moved(self, tokens: int) -> int:
        """What the op must read and write."""
        return self.bytes_read(tokens) + self.bytes_written(tokens)


def forms() -> dict[str, tuple[Fusion, Form]]:
    """What can be measured on one rank: each fusion by its name, and its other forms by the names of their ops."""
    return _forms(over_ranks=False)


def forms_over_ranks() -> dict[str, tuple[Fusion, Form]]:
    """Likewise what runs on several ranks at once."""
    return _forms(over_ranks=True)


def _forms(*, over_ranks: bool) -> dict[str, tuple[Fusion, Form]]:
    found: dict[str, tuple[Fusion, Form]] = {}
    for name, fusion in FUSIONS.items():
        if measured_elsewhere(fusion) is not None:
            continue
        for form in fusion.forms if fusion.across_ranks is over_ranks else ():
            found[name if form.op is fusion.op else form.op.name] = (fusion, form)
    return found


_SCRIPTS = {
    LINEAR: "few_token_gemm.py",
    EXPERTS: "few_token_experts.py",
    DECODE: "vllm_engine.py and sglang_engine.py",
    "mla_decode_group_quant": "vllm_engine.py",
}
"""In bench/scripts, by the role of what only engines have a place for, or the name of what not all of them have one for."""


def measured_elsewhere(fusion: Fusion) -> str | None:
    """What measures a fusion that stands in engines alone; None where `bench.run` does."""
    own = next((role for role in fusion.roles if role in OWN_PLACE), None)
    if own is None:
        return None
    return (
        f"bench/scripts: {_SCRIPTS.get(fusion.name, _SCRIPTS[own])}"
        if fusion.owner == "layerfuse"
        else f"what {fusion.owner} has for it"
    )


def known_form(name: str) -> tuple[Fusion, Form]:
    """A fusion, and which of its forms is called this.

    Raises:
        UnknownFusionError: there is none.
        BenchError: it is one that only engines have a place for.
    """
    known = forms() | forms_over_ranks()
    if isinstance(name, str) and name in FUSIONS and name not in known:
        raise BenchError(
            f"{name} stands in engines alone, and is measured by {measured_elsewhere(FUSIONS[name])} "
            "(`layerfuse bench --list` says what is measured here)"
        )
    if not isinstance(name, str) or name not in known:
        raise UnknownFusionError(name, known)
    return known[name]


def step_of(form: Form, kind: type[_S]) -> _S | None:
    """The first step of this kind in the chain, or None."""
    return next((step for step in form.chain if isinstance(step, kind)), None)


def rows_of(op: Op, name: str) -> Rows:
    """The argument of this name, which is rows."""
    return next(rows for rows in op.rows if rows.name == name)


def names_of(op: Op, kind: type[Argument]) -> tuple[str, ...]:
    """The names of an op's arguments of one kind."""
    return tuple(argument.name for argument in op.args if isinstance(argument, kind))


TOKENS = {
    ("cuda", False): (1, 8, 64, 256, 1024, 4096, 16384, 65536),
    ("cuda", True): (1, 64, 1024, 16384),
    ("cpu", False): (1, 16, 256, 1024),
    ("cpu", True): (1, 64),
}
"""From the device and whether to be quick: how many tokens, unless told otherwise."""

MOST_TOKENS = 1 << 20


def whole_numbers(what: str, given: object) -> list[int]:
    """Whole numbers, in a list or a tuple.

    Raises:
        BenchError: something else; no flag is a number.
    """
    if not isinstance(given, list | tuple) or any(type(number) is not int for number in given):
        raise BenchError(f"{what} are whole numbers in a list, got {shown(given)}")
    return list(given)


def check_tokens(tokens: Sequence[int]) -> tuple[int, ...]:
    """The numbers of tokens, each once and in order.

    Raises:
        BenchError: none, or one that is out of range.
    """
    given = whole_numbers("tokens", tokens)
    wrong = [count for count in given if not 1 <= count <= MOST_TOKENS]
    if wrong or not given:
        raise BenchError(
            f"tokens are numbers from 1 to {MOST_TOKENS}, got {', '.join(map(shown, wrong[:20])) or 'none'}"
        )
    return tuple(sorted(set(tokens)))
