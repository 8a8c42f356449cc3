"""Which releases of AITER an installed build can be, told by what is in it.

Version strings do not tell: local builds say 0.1.0, and v0.1.17-longctx says 0.1.17. Each probe is something that
came, or came and went, with a known release; all of them together leave a closed interval.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from attrs import field, frozen

from .source import module_file, read_signature

RELEASES = (
    *("v0.1.5", "v0.1.5.post1", "v0.1.5.post2", "v0.1.5.post3", "v0.1.5.post4"),
    *("v0.1.6", "v0.1.6.post1", "v0.1.6.post2", "v0.1.6.post3"),
    *("v0.1.7", "v0.1.7.post1", "v0.1.7.post2", "v0.1.7.post3", "v0.1.7.post4", "v0.1.7.post5"),
    *("v0.1.8", "v0.1.9", "v0.1.9.post1", "v0.1.10", "v0.1.10.post1", "v0.1.10.post2", "v0.1.10.post3"),
    *("v0.1.11", "v0.1.11.post1", "v0.1.12", "v0.1.12.post1", "v0.1.12.post2"),
    *("v0.1.13.dev0", "v0.1.13-rc1", "v0.1.13-rc2", "v0.1.13-rc3", "v0.1.13-rc4", "v0.1.13-rc5"),
    *("v0.1.13", "v0.1.13.post1", "v0.1.14-rc0", "v0.1.14", "v0.1.14.post1"),
    *("v0.1.15-rc0", "v0.1.15", "v0.1.15.post1", "v0.1.15.post2", "v0.1.15.post3"),
    *("v0.1.16", "v0.1.16.post1", "v0.1.16.post2", "v0.1.16.post3", "v0.1.16.post4", "v0.1.16.post5", "v0.1.16.post6"),
    *("v0.1.17-rc0", "v0.1.17", "v0.1.17-longctx", "v0.1.18", "v0.1.19", "v0.1.19.post1", "v0.1.19.post2"),
    *("v0.1.20", "v0.1.20.post1"),
)
"""Every release that the bindings were written for, oldest first. v0.1.17-longctx was cut after v0.1.17."""

OLDEST, NEWEST = RELEASES[0], RELEASES[-1]
_ORDER = {release: i for i, release in enumerate(RELEASES)}


@frozen
class ReleaseRange:
    """A closed interval of releases. At its ends, older and newer ones than are known here may be meant too."""

    first: str = OLDEST
    last: str = NEWEST
    contradictory: bool = field(default=False, kw_only=True, eq=False)
    "Whether no release looks like the build, so that it had to be taken for any."

    def overlaps(self, other: ReleaseRange) -> bool:
        """Whether some release is in both."""
        return _ORDER[self.first] <= _ORDER[other.last] and _ORDER[other.first] <= _ORDER[self.last]

    def surely_from(self, release: str) -> bool:
        """Whether every release of the interval is this one or a later one."""
        return _ORDER[self.first] >= _ORDER[release]

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


def before(release: str) -> str:
    """The release just before this one."""
    return RELEASES[_ORDER[release] - 1]


@frozen
class Probe:
    """Something that a build has or has not."""

    since: str
    "The first release that has it."
    module: str
    function: str | None = None
    "None: the module itself."
    parameter: str | None = None
    "None: the function itself."
    but_not: tuple[str, str] | None = None
    "First and last release of a gap in which it was gone again."

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

    def allows(self, release: str, outcome: bool) -> bool:
        """Whether a build of this release would show this outcome."""
        has = _ORDER[release] >= _ORDER[self.since]
        if self.but_not is not None and release in ReleaseRange(*self.but_not):
            has = False
        return has is outcome


_AR = "aiter.dist.device_communicators.custom_all_reduce"
_QK_GROUP = "aiter.ops.fused_qk_rmsnorm_group_quant"
_ATTENTION = "aiter.ops.attention"
_OLD_FP8 = "aiter.ops.triton.fused_fp8_quant"

PROBES = (
    Probe("v0.1.5.post2", "aiter.ops.quick_all_reduce"),
    Probe("v0.1.6.post2", _AR),
    Probe("v0.1.6.post2", _ATTENTION, "get_mla_metadata_info_v1"),
    Probe("v0.1.7.post2", _AR, "CustomAllreduce.custom_fused_ar_rms", "residual_inp"),
    Probe("v0.1.7.post3", _ATTENTION, "get_mla_metadata_v1", "dtype_q"),
    Probe("v0.1.7.post5", _ATTENTION, "get_mla_metadata_info_v1", "intra_batch_mode"),
    Probe("v0.1.8", _ATTENTION, "get_mla_metadata_v1", "work_info_set"),
    Probe("v0.1.9", "aiter.mla", "mla_decode_fwd", "return_lse"),
    Probe("v0.1.9.post1", _OLD_FP8, "fused_rms_fp8_per_tensor_static_quant", "rmsnorm_convert_to_inp1_type"),
    Probe("v0.1.10", "aiter.ops.triton.quant.fused_fp8_quant"),
    Probe("v0.1.10.post1", "aiter.ops.rmsnorm", "add_rmsnorm"),
    Probe("v0.1.10.post1", _ATTENTION, "get_ps_metadata_info_v1"),
    Probe("v0.1.10.post2", "aiter.mla", "mla_decode_fwd", "page_size"),
    Probe("v0.1.10.post2", _ATTENTION, "get_mla_metadata_v1", "kv_last_page_lens"),
    Probe("v0.1.10.post3", _AR, "CustomAllreduce.fused_ar_rms", "post_per_token_quant"),
    Probe("v0.1.12", _QK_GROUP),
    Probe("v0.1.12.post1", "aiter.ops.gated_rmsnorm_fp8_group_quant"),
    Probe("v0.1.13.dev0", _QK_GROUP, "fused_qk_rmsnorm_group_quant", "gemma_norm"),
    Probe("v0.1.13-rc2", "aiter.ops.triton.quant.fused_fp8_quant", "fused_rms_gated_fp8_group_quant"),
    Probe("v0.1.14-rc0", _QK_GROUP, "fused_qk_rmsnorm_per_token_quant"),
    Probe("v0.1.14-rc0", _AR, "CustomAllreduce.fused_ar_rms_per_group_quant"),
    Probe("v0.1.16", _ATTENTION, "get_mla_metadata_info_v1", "max_split_per_batch"),
    Probe("v0.1.16", _AR, "CustomAllreduce.custom_fused_ar_rms", "out_hidden_dim"),
    Probe("v0.1.17-rc0", "aiter.ops.rmsnorm", "rmsnorm2d_fwd_with_add", "gemma_norm"),
    Probe("v0.1.17-rc0", "aiter.mla", "mla_decode_fwd", "g_kv_indptr"),
    Probe("v0.1.17-longctx", "aiter.ops.gated_rmsnorm_fp8_per_token_quant"),
    Probe("v0.1.17-longctx", _ATTENTION, "get_mla_metadata_v1", "mla_version"),
    Probe("v0.1.19.post1", "aiter.ops.quick_all_reduce", "qr_get_handle", "out_ptr"),
    Probe("v0.1.19.post1", "aiter.ops.triton.quant.fused_fp8_quant", "fused_rms_fp8_group_quant", "is_x_scale_strided"),
    Probe(
        *("v0.1.17-rc0", _AR, "CustomAllreduce.fused_ar_rms_per_group_quant", "transpose_scale"),
        but_not=("v0.1.17-longctx", "v0.1.19.post1"),
    ),
    Probe("v0.1.20", "aiter.mla", "mla_decode_fwd", "causal"),
)
"""In the order in which they appeared, so that the docs can list them."""


def release_range(folder: Path) -> ReleaseRange:
    """The releases that this build's files agree with.

    Where they contradict each other (a fork, a backport, files left over from another release) it can be any, so that
    every restriction is kept.
    """
    outcomes = [(probe, seen) for probe in PROBES if (seen := probe.look(folder)) is not None]
    possible = [r for r in RELEASES if all(probe.allows(r, seen) for probe, seen in outcomes)]
    return ReleaseRange(possible[0], possible[-1]) if possible else ReleaseRange(contradictory=True)
