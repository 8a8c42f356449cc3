"""Errors of attention metadata: heads without a kernel, groups of unequal layers, steps beyond the plan."""

from __future__ import annotations

from collections.abc import Sequence

from ...adapters.errors import LayerfuseError, UnknownNameError, cut, did_you_mean, shown


class HeadsRefusedError(LayerfuseError, ValueError):
    """No kernel of the release takes this layer. `layer` and `reason` are parts of a sentence, `release` is a name."""

    def __init__(self, layer: str, release: str, reason: str) -> None:
        self.layer = layer
        self.release = release
        self.reason = reason
        super().__init__(layer, release, reason)

    def __str__(self) -> str:
        return f"{self.layer}, AITER {self.release}: {self.reason}"


class HeadCountError(LayerfuseError, ValueError):
    """A tensor that is not of the head count that was planned for."""

    def __init__(self, what: str, expected: int, found: Sequence[int]) -> None:
        self.what = what
        self.expected = expected
        self.found = tuple(found)
        super().__init__(what, expected, self.found)

    def __str__(self) -> str:
        return f"{self.what}: expected (tokens, {self.expected}, ...) as planned, got {self.found}"


class PlanExceededError(LayerfuseError, ValueError):
    """A step with more sequences or query tokens than were planned for, or index tensors of unequal length."""

    def __init__(
        self, planned: int, sequences: int, indptr: tuple[int, int], tokens: tuple[int, int] | None = None
    ) -> None:
        self.planned = planned
        self.sequences = sequences
        self.indptr = indptr
        self.tokens = tokens
        super().__init__(planned, sequences, indptr, tokens)

    def __str__(self) -> str:
        if self.tokens is not None:
            return (
                f"the buffers were planned for {self.tokens[0]} query tokens, and q has {self.tokens[1]}. Plan a larger "
                "batch or max_query_length"
            )
        return (
            f"the buffers were planned for {self.planned} sequences, and this step has {self.sequences}, with index "
            f"tensors of {self.indptr[0]} and {self.indptr[1]} entries (one more than the sequences). Plan a larger batch"
        )


class MixedGroupError(LayerfuseError, ValueError):
    """Two layers in one group that cannot share buffers. `layers` are their names, `differences` one clause each."""

    def __init__(self, group: str, layers: tuple[str, str], differences: Sequence[str]) -> None:
        self.group = group
        self.layers = layers
        self.differences = tuple(differences)
        super().__init__(group, layers, self.differences)

    def __str__(self) -> str:
        first, other = (cut(layer, 200) for layer in self.layers)
        return (
            f"group {shown(self.group)}: {first} and {other} cannot share metadata buffers: {'; '.join(self.differences)}. "
            "Give each its own group, or leave the grouping to group_layers"
        )


class UnknownReleaseError(UnknownNameError):
    """A release of AITER that is not supported, or none at all. `known` lists the supported ones, oldest first."""

    def __str__(self) -> str:
        near = did_you_mean(self.name, self.known) or "."
        return (
            f"nothing is recorded of a release {shown(self.name)} of AITER{near} "
            f"Known: {self.known[0]}, the oldest that a supported engine pins, to {self.known[-1]}."
        )


class NoSuchLayerError(LayerfuseError, KeyError):
    """A group of the caller's names a layer that is not there, or that needs no metadata."""

    def __str__(self) -> str:
        return str(self.args[0])
