"""Which releases of AITER an installed build can be, told by what is in it.

Version strings do not tell: local builds say 0.1.0, and v0.1.17-longctx says 0.1.17. Each probe is something that came with a known
release; all of them together leave a closed interval.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from attrs import field, frozen

from .source import module_file, read_signature

RELEASES = (
    *("v0.1.16.post3", "v0.1.16.post4", "v0.1.16.post5", "v0.1.16.post6"),
    *("v0.1.17-rc0", "v0.1.17", "v0.1.17-longctx", "v0.1.18", "v0.1.19", "v0.1.19.post1", "v0.1.19.post2"),
    *("v0.1.20", "v0.1.20.post1"),
)
"""The supported releases, oldest first: from the oldest that a supported engine pins, vLLM 0.26's, to the newest that is recorded.
v0.1.17-longctx was cut after v0.1.17."""

OLDEST, NEWEST = RELEASES[0], RELEASES[-1]
_ORDER = {release: i for i, release in enumerate(RELEASES)}

TOO_OLD = (
    f"this AITER is older than {OLDEST}, the oldest that an engine layerfuse supports pins (vLLM 0.26): it has nothing of what "
    "came with v0.1.16; install a newer one"
)


@frozen
class ReleaseRange:
    """A closed interval of releases. At its last end newer ones than are recorded may be meant too."""

    first: str = OLDEST
    last: str = NEWEST
    contradictory: bool = field(default=False, kw_only=True, eq=False)
    "Whether no release looks like the build, so that it had to be taken for any."

    def overlaps(self, other: ReleaseRange) -> bool:
        """Whether some release is in both."""
        return _ORDER[self.first] <= _ORDER[other.last] and _ORDER[other.first] <= _ORDER[self.last]

    def __contains__(self, release: str) -> bool:
        return _ORDER[self.first] <= _ORDER[release] <= _ORDER[self.last]

    def __iter__(self) -> Iterator[str]:
        return iter(RELEASES[_ORDER[self.first] : _ORDER[self.last] + 1])

    def __str__(self) -> str:
        if self.contradictory:
            return "no release known here"
        if self.first == OLDEST:
            return "every release" if self.last == NEWEST else f"up to {self.last}"
        if self.last == NEWEST:
            return f"{self.first} or later"
        return self.first if self.first == self.last else f"{self.first} to {self.last}"


def is_after(release: str, other: str) -> bool:
    """Whether the one release is later than the other."""
    return _ORDER[release] > _ORDER[other]


@frozen
class Probe:
    """Something that builds have from a release on."""

    since: str
    "The first release that has it. The oldest: all supported ones do."
    module: str
    function: str | None = None
    "None: the module itself."
    parameter: str | None = None
    "None: the function itself."

    def look(self, folder: Path) -> bool | None:
        """Whether the build has it; None where the module is not there to be asked."""
        if module_file(folder, self.module) is None:
            return False if self.function is None else None
        if self.function is None:
            return True
        signature = read_signature(folder, f"{self.module}:{self.function}")
        if signature is None:
            return False
        return self.parameter is None or any(p.name == self.parameter for p in signature.parameters)


_AR = "aiter.dist.device_communicators.custom_all_reduce"
_ATTENTION = "aiter.ops.attention"
_TRITON = "aiter.ops.triton.quant"

PROBES = (
    # What came with v0.1.16, from which .post1 to .post3 differ in nothing that is called here. Of Triton's modules nothing is
    # concluded where they are missing: a later release may have moved them.
    Probe(OLDEST, f"{_TRITON}.fused_mxfp8_quant", "fused_rms_mxfp8_quant"),
    Probe(OLDEST, _ATTENTION, "get_mla_metadata_info_v1", "max_split_per_batch"),
    Probe(OLDEST, _AR, "CustomAllreduce.fused_ar_rms", "out_hidden_dim"),
    Probe("v0.1.17-rc0", "aiter.ops.rmsnorm", "rmsnorm2d_fwd_with_add", "gemma_norm"),
    Probe("v0.1.17-rc0", "aiter.mla", "mla_decode_fwd", "g_kv_indptr"),
    Probe("v0.1.17-longctx", "aiter.ops.gated_rmsnorm_fp8_per_token_quant"),
    Probe("v0.1.17-longctx", _ATTENTION, "get_mla_metadata_v1", "mla_version"),
    Probe("v0.1.19.post1", "aiter.ops.quick_all_reduce", "qr_get_handle", "out_ptr"),
    Probe("v0.1.19.post1", f"{_TRITON}.fused_fp8_quant", "fused_rms_fp8_group_quant", "is_x_scale_strided"),
    Probe("v0.1.20", "aiter.mla", "mla_decode_fwd", "causal"),
)
"""In the order in which they appeared."""


def release_range(folder: Path) -> ReleaseRange | None:
    """The supported releases that this build's files agree with; None for an older build, which has nothing that is probed for.

    Where they contradict each other (a fork, a backport, files left over from another release) it can be any, so that
    every restriction is kept.
    """
    outcomes = [(probe, seen) for probe in PROBES if (seen := probe.look(folder)) is not None]
    if not any(seen for _, seen in outcomes):
        return None
    possible = [r for r in RELEASES if all(seen is not is_after(probe.since, r) for probe, seen in outcomes)]
    return ReleaseRange(possible[0], possible[-1]) if possible else ReleaseRange(contradictory=True)
