"""A norm that is written out, read forwards from its reciprocal root, factor by factor.

Where it rounds is a word, a letter for each factor and rounding, and the words that a norm may have are lines in `FORMS`.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import define
from torch.fx import Node

from .arithmetic import ADDS, aten, between, is_rounding, narrow, operands, rounded_to, squared, what_is
from .errors import Unmatched
from .found import FoundNorm
from .provenance import ROW_PRESERVING
from .values import is_last, last_width, same, value

FORMS = {
    "xwr": "rounded after the weight",  # torch.nn.RMSNorm, Gemma, Qwen3-Next
    "xrw": "rounded before the weight",  # transformers' Llama family and vLLM
    "xrwr": "rounded before a float32 weight",
}
"""Norms of rows that were widened to float32. x: times the rows. w: times the weight. r: rounded to the rows' own dtype."""

PLAIN = {"xw": "plain"}
"""Norms of float32 and float64 rows, where nothing is converted."""


@define(kw_only=True, eq=False)
class Reading:
    """A norm that is being read: what is known so far of `out`, a product of its factors."""

    out: Node
    normed: Node
    "What the mean square is of."
    inside: torch.dtype
    "What it is computed in."
    epsilon: float
    width: int
    word: str = ""
    weight: Node | None = None
    weight_offset: float = 0.0
    through_views: bool = False
    "Whether views of whole rows may stand between its factors: Mamba-2's norm with one group has two."

    @property
    def is_whole(self) -> bool:
        """Whether `out` has both factors of a norm."""
        return self.weight is not None and "x" in self.word

    def next(self) -> Any | None:
        """Take in what reads `out`. Returns the factor where it is none of a norm's.

        Raises:
            Unmatched: `out` has several readers, or one that is neither a product nor a rounding.
        """
        readers = list(self.out.users)
        if len(readers) != 1:
            names = ", ".join(map(str, readers[:3]))
            raise Unmatched(f"{len(readers)} nodes read {self.out}, the norm before its gate ({names})")
        (reader,) = readers
        if is_rounding(reader):
            self.out = reader
            self.word += "r" if value(reader).dtype == value(narrow(self.normed)).dtype else "?"
            return None
        if self.through_views and reader.target in ROW_PRESERVING and same(last_width(reader), self.width):
            self.out = reader
            return None
        others = [other for one, other in operands(reader, aten.mul.Tensor) if one is self.out]
        if len(others) != 1:
            raise Unmatched(f"{what_is(reader)} reads the norm {self.out}, and is no product with a gate")
        self.out, factor = reader, others[0]
        if "x" not in self.word and narrow(factor) is narrow(self.normed):
            self.word += "x"
        elif self.weight is None and self._is_weight(factor):
            self.word += "w"
        else:
            return factor
        return None

    def _is_weight(self, factor: Any) -> bool:
        """Whether a factor is the norm's weight; with one added to it, it is a zero-centred one."""
        weight, offset = narrow(factor), 0.0
        if isinstance(weight, Node) and weight.target in ADDS and weight.args[1] == 1:
            weight, offset = narrow(weight.args[0]), 1.0
        val = value(weight)
        if not isinstance(val, torch.Tensor) or val.dim() != 1 or not same(val.shape[0], self.width):
            return False
        self.weight, self.weight_offset = weight, offset
        return True


def reading_of(root: Node) -> Reading | None:
    """A norm from its `rsqrt(mean(x^2) + epsilon)`; None where that is something else."""
    shifted = root.args[0]
    if not isinstance(shifted, Node) or shifted.target not in ADDS:
        return None
    mean, epsilon = shifted.args[:2]
    if not isinstance(mean, Node) or mean.target is not aten.mean.dim or not _is_epsilon(epsilon):
        return None
    square, dims, *keeps = mean.args
    normed, width = squared(square), last_width(square)
    if not isinstance(normed, Node) or width is None or keeps != [True] or not is_last(dims, value(square)):
        return None
    return Reading(out=root, normed=normed, inside=value(square).dtype, epsilon=float(epsilon), width=width)


def read_norm(root: Node) -> FoundNorm | None:
    """The norm of a row that has this reciprocal root; None where there is none in a known form."""
    reading = reading_of(root)
    if reading is None or any(len(node.users) != 1 for node in _statistics(root)):
        return None
    try:
        while not reading.is_whole:
            if reading.next() is not None:
                return None
    except Unmatched:
        return None
    return _found(reading)


def _found(reading: Reading) -> FoundNorm | None:
    x, word, forms = narrow(reading.normed), reading.word, FORMS
    out = rounded_to(value(x).dtype, reading.out)
    if x is reading.normed or out is None:  # nothing is widened, or nothing is rounded behind it
        x, out, forms = reading.normed, reading.out, PLAIN
    elif out is not reading.out:
        word += "r"
    # Below float32 the mean square is another one, and a fused op gives the dtype of the rows.
    exact = reading.inside.itemsize >= 4 if x is reading.normed else reading.inside == torch.float32
    weight, given, result = reading.weight, value(x), value(out)
    if word not in forms or weight is None or not exact or result.dtype != given.dtype:
        return None
    if value(weight).device != given.device:
        return None
    return FoundNorm(
        width=reading.width,
        epsilon=reading.epsilon,
        weight_offset=reading.weight_offset,
        form=forms[word],
        x=x,
        weight=weight,
        out=out,
        nodes=between(out, {x, weight}),
    )


def _is_epsilon(given: Any) -> bool:
    return isinstance(given, float | int) and not isinstance(given, bool)


def _statistics(root: Node) -> list[Node]:
    """What a norm computes of each row."""
    shifted = root.all_input_nodes[0]
    mean = shifted.all_input_nodes[0]
    return [root, shifted, mean, mean.all_input_nodes[0]]
