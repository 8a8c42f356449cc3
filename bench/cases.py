"""What is measured, as data: the fusion, its widths and epsilons, its dtypes and options, and the bytes it must move.

All of it follows from the fusion's declaration and a site of a declared model, or widths given by hand. Nothing here
needs torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import frozen

from ..fusion.catalog import FUSIONS
from ..fusion.chain import Fusion
from ..fusion.declare import Epsilon, Like, Quantised, Rows, Weight, WeightOffset
from .errors import BenchError

if TYPE_CHECKING:
    from ..fusion.declare import Op

ITEM_SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of one element of a dtype."""

EPSILON = 1e-6
"""Of every norm, where widths are given instead of a model."""


@frozen(kw_only=True)
class Case:
    """One fusion with one set of widths, dtypes and options; only the number of tokens is open."""

    fusion: str
    op: str
    name: str
    "The model, or the widths."
    widths: dict[str, int]
    "By the op's names for them, in its order."
    row_width: int | None
    """Columns in a row of the projection that all rows are views of, from its first column on; what follows them is not
    touched. None: every argument is a contiguous tensor of its own."""
    epsilons: dict[str, float]
    "By argument."
    weight_offsets: dict[str, float]
    "By argument."
    dtype: str
    "bf16, fp16 or fp32."
    quant: str | None
    "group, per_token or None."
    fp8: str | None
    "e4m3fn or e4m3fnuz; None where nothing is quantised."
    group_size: int | None
    "Columns per scale; None for one scale per token, or where nothing is quantised."
    column_major: bool
    ue8m0: bool

    @property
    def declared(self) -> Fusion:
        """The fusion's declaration.

        Raises:
            KeyError: the package that declares it is not installed here.
        """
        return FUSIONS[self.fusion]

    def width_of(self, name: str) -> int:
        """Columns of an argument of kind `Rows`."""
        return self.widths[rows_of(self.declared.op, name).width]

    def groups_of(self, name: str) -> int:
        """Scales per token of rows of this name."""
        return 1 if self.group_size is None else -(-self.width_of(name) // self.group_size)

    def bytes_read(self, tokens: int) -> int:
        """The rows of every token and the weights, each once."""
        op, size = self.declared.op, ITEM_SIZES[self.dtype]
        rows = sum(self.width_of(rows.name) for rows in op.rows)
        weights = sum(self.width_of(weight.of) for weight in op.args if isinstance(weight, Weight))
        return (tokens * rows + weights) * size

    def bytes_written(self, tokens: int) -> int:
        """All results of every token, the scales included, each once."""
        size, row = ITEM_SIZES[self.dtype], 0
        for result in self.declared.op.results:
            if isinstance(result, Like):
                row += self.width_of(result.of) * size
            elif isinstance(result, Quantised):
                row += self.width_of(result.of)
            else:
                row += self.groups_of(result.of) * 4
        return tokens * row

    def bytes_moved(self, tokens: int) -> int:
        """What the op must read and write."""
        return self.bytes_read(tokens) + self.bytes_written(tokens)


def rows_of(op: Op, name: str) -> Rows:
    """The argument of this name, which is rows."""
    return next(rows for rows in op.rows if rows.name == name)


def epsilons_of(op: Op) -> tuple[str, ...]:
    """The names of an op's epsilons."""
    return tuple(argument.name for argument in op.args if isinstance(argument, Epsilon))


def offsets_of(op: Op) -> tuple[str, ...]:
    """The names of an op's weight offsets."""
    return tuple(argument.name for argument in op.args if isinstance(argument, WeightOffset))


TOKENS = {
    ("cuda", False): (1, 8, 64, 256, 1024, 4096, 16384, 65536),
    ("cuda", True): (1, 64, 1024, 16384),
    ("cpu", False): (1, 16, 256, 1024),
    ("cpu", True): (1, 64),
}
"""From the device and whether to be quick: how many tokens, unless told otherwise."""

MOST_TOKENS = 1 << 20


def check_tokens(tokens: Sequence[int]) -> tuple[int, ...]:
    """The numbers of tokens, each once and in order.

    Raises:
        BenchError: none, or one that is out of range.
    """
    wrong = [count for count in tokens if not 1 <= count <= MOST_TOKENS]
    if wrong or not tokens:
        raise BenchError(f"tokens are numbers from 1 to {MOST_TOKENS}, got {', '.join(map(str, wrong)) or 'none'}")
    return tuple(sorted(set(tokens)))
