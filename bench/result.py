"""What came of a benchmark, as data: to JSON and back without loss."""

from __future__ import annotations

import re
from typing import Any

import attrs
from attrs import frozen

from .cases import Case
from .errors import BenchError

FORMAT = 3
"""Of the JSON; it grows when a key changes its meaning. 1 had widths and epsilons of two MLA latents, 2 no forms."""

COPY = "copy"
"""The peer that is the floor."""

NOT_ASKED_FOR = "not asked for"


@frozen(kw_only=True)
class Measured:
    """One peer with one number of tokens."""

    peer: str
    verdict: str
    "ok; wrong: its result is, so its time is none; failed: it raised; refused: it does not take this many tokens."
    us: float | None
    "Median microseconds per call; None unless ok."
    low: float | None
    "First quartile."
    high: float | None
    "Third quartile."
    rounds: int
    calls: int
    "In one round."
    error: float | None
    "Of norms, in units of the dtype's epsilon."
    quant_error: float | None
    "Of quantised values, in half steps of fp8."
    message: str
    "Why it is wrong, failed or refused; what is to be said of it where it is ok; or empty."


@frozen(kw_only=True)
class Row:
    """All peers with one number of tokens."""

    tokens: int
    sets: int
    "Of inputs, through which the calls rotate."
    bytes_read: int
    bytes_written: int
    "By one call, at least."
    caches: float | None
    "How many times the last-level cache all sets, with their results, would fill; None where its size is unknown."
    measured: tuple[Measured, ...]

    def of(self, peer: str) -> Measured | None:
        """What this peer measured."""
        return next((one for one in self.measured if one.peer == peer), None)

    def us(self, peer: str) -> float | None:
        """Median microseconds of a peer whose result was right."""
        found = self.of(peer)
        return None if found is None else found.us


@frozen(kw_only=True)
class Attendance:
    """A peer, and whether it took part."""

    name: str
    about: str
    present: bool
    why_not: str | None
    version: str | None
    rounds_between: bool = False
    "Of older results: whether it alone was held to the rounding of what is quantised, as all are now."


@frozen(kw_only=True)
class Host:
    """What one call costs the host."""

    peer: str
    us: float
    low: float
    high: float


@frozen(kw_only=True)
class Result:
    """One run."""

    case: Case
    ours: str | None
    "The peer that users of the op get; None where it did not take part."
    date: str
    device: str
    "torch's device type."
    method: str
    environment: dict[str, Any]
    peers: tuple[Attendance, ...]
    rows: tuple[Row, ...]
    host_tokens: int
    host: tuple[Host, ...]
    "Empty on a CPU, where the time of a call is the host's."
    seconds: float

    @property
    def present(self) -> tuple[str, ...]:
        """Who took part, ours first and the copy last."""
        return tuple(peer.name for peer in self.peers if peer.present)

    @property
    def slug(self) -> str:
        """The name of its files, without an ending."""
        case = self.case
        device = re.sub(r"\W+", "-", re.sub(r"\((R|TM)\)|@.*", "", self.environment["device"])).strip("-").lower()
        parts = [case.op, case.name, case.dtype]
        if case.ranks > 1:
            parts.append(f"{case.ranks}-ranks")
        if case.heads is not None:
            parts[1] += f"-heads{case.heads}" + (f"-{case.kv_heads}" if case.kv_heads is not None else "")
        if case.weight_dtype != case.dtype:
            parts.append(f"weights-{case.weight_dtype}")
        if any(case.weight_offsets.values()):
            parts.append("zero-centred")
        if case.activation not in (None, "silu"):
            parts.append(case.activation)
        if case.group_size not in (None, 128):
            parts.append(f"g{case.group_size}")
        if case.ue8m0:
            parts.append("ue8m0")
        if case.column_major:
            parts.append("tma-aligned" if case.tma_aligned else "column-major")
        return "-".join([*parts, device])

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"format": FORMAT, **attrs.asdict(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Result:
        """Back from `to_dict`.

        Raises:
            BenchError: it was written in another format.
        """
        from cattrs import Converter

        if data.get("format") != FORMAT:
            raise BenchError(f"this result has format {data.get('format')}, and format {FORMAT} is read; measure again")

        return Converter(forbid_extra_keys=True).structure({k: v for k, v in data.items() if k != "format"}, cls)
