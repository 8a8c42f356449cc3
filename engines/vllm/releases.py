"""What is known of vLLM's releases without vLLM: which models each does not compile. Data, for plans made beforehand."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

import attrs
from attrs import frozen

from ...adapters.errors import LayerfuseError, cut, shown
from ...fusion.engine import Engine
from ...fusion.target import Target
from ..seams import quantised
from . import native_fusions
from .decode_facts import planned
from .switches import BATCH_INVARIANT, INVARIANT, block_switch, is_set


class UnknownReleaseOfVllmError(LayerfuseError, LookupError):
    """A release of vLLM of which nothing is recorded."""


@frozen(kw_only=True)
class Release:
    """One release, as far as plans go. A test holds each to the release itself."""

    name: str
    breakable: frozenset[str]
    "Architectures that run in breakable CUDA graphs on NVIDIA's GPUs by default, and are not compiled; of 0.26 those in models.toml."
    seams: frozenset[str]
    "Fusions that can go in at module level where nothing is compiled (`seams.SEAMS`)."
    without: frozenset[str]
    """Architectures of models.toml that it has no code of its own for, so that it can run transformers' alone. Mistral 4 it reads in
    Mistral's own format, and runs by DeepSeek's code."""
    inside: frozenset[str] = frozenset()
    "Archs of GPUs on which it asks FlashInfer's op first for linears with fp8 weights in blocks of 128, which quantises inside of itself."


_EVERYWHERE = {
    "add_rms_norm",
    "gated_rms_norm",
    *quantised("add_rms_norm", "rms_norm", "gated_rms_norm", "silu_mul"),
}
_FROM_033 = "mla_dual_rms_norm", "all_reduce_add_rms_norm"

_NOWHERE = {"BambaForCausalLM", "Olmo2ForCausalLM", "SmolLM3ForCausalLM", "SolarOpenForCausalLM", "YoutuForCausalLM"}
"""Architectures that no release has code of its own for."""

_BREAKABLE = frozenset({
    "AliceAIForCausalLM", "BeamForCausalLM", "DeepSeekV4MTPModel", "DeepseekV32ForCausalLM", "DeepseekV32MTPModel", "DeepseekV41ForCausalLM",
    "DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration", "Dots3NoteForCausalLM", "Dots3NoteMTPModel", "Glm5NextForCausalLM",
    "Glm5NextForConditionalGeneration", "Glm5NextMTPModel", "GlmMoeDsaForCausalLM", "HYV4ForCausalLM", "HYV4MTPModel", "InklingForCausalLM",
    "InklingForConditionalGeneration", "KimiK3ForConditionalGeneration", "KimiK3MTPModel", "KimiLinearForCausalLM",
    "MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration", "MuseSpark1xForCausalLM", "MuseSparkForConditionalGeneration",
    "Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration", "Qwen4ExpMTP", "Step5ForCausalLM", "Step5ForConditionalGeneration",
})  # fmt: skip

RELEASES = {
    release.name: release
    for release in (
        Release(
            name="0.26",
            breakable=frozenset(),
            seams=frozenset(_EVERYWHERE),
            without=frozenset(_NOWHERE | {"KimiK3ForConditionalGeneration"}),
        ),
        Release(
            name="0.33",
            breakable=_BREAKABLE,
            seams=frozenset(_EVERYWHERE.union(_FROM_033, quantised(*_FROM_033))),
            without=frozenset(_NOWHERE | {"CwmForCausalLM", "SeedOssForCausalLM"}),
            inside=frozenset({"sm90"}),
        ),
    )
}
"""By their first two numbers, the oldest first."""

NEWEST = next(reversed(RELEASES))

_RELEASE = re.compile(r"v?(\d+\.\d+)((?:\.|rc|\.?dev|\.?post|\+).*)?", re.ASCII)


def release_named(text: str | None) -> Release:
    """What is recorded of a release, by its first two numbers: `0.33`, `v0.33` and `0.33.1` are one. None: the newest.

    Raises:
        UnknownReleaseOfVllmError: nothing is recorded of it, or this is no release.
    """
    if text is None:
        return RELEASES[NEWEST]
    found = _RELEASE.fullmatch(text.strip())
    if found is None:
        raise UnknownReleaseOfVllmError(
            f"expected a release of vLLM, as {NEWEST} or {NEWEST}.1, got {shown(text)}; known: {', '.join(RELEASES)}"
        )
    if found[1] not in RELEASES:
        raise UnknownReleaseOfVllmError(f"nothing is recorded of vLLM {cut(found[1])}; known: {', '.join(RELEASES)}")
    return RELEASES[found[1]]


def about_release(text: str | None) -> str | None:
    """What a plan says where it was asked about a release that is recorded as another one; None where it was not.

    Raises:
        UnknownReleaseOfVllmError: as `release_named`.
    """
    known = release_named(text)
    numbers = "" if text is None else text.strip().removeprefix("v")
    if numbers in ("", known.name, f"{known.name}.0"):
        return None
    return f"Planned as vLLM {known.name}, by which layerfuse records it; {cut(numbers)} may differ in what it fuses itself."


def inside_as_installed(target: Target, release: str | None) -> str | None:
    """How vLLM as it is installed, FlashInfer with it, quantises inside of its linears with fp8 weights in blocks of 128.

    Returns:
        In the words of `plan --quant`, as `linear_quant_readings.flashinfer_or_deep_gemm` reads it off such a linear; None: it does not.

    Raises:
        UnknownReleaseOfVllmError: as `release_named`.
    """
    if target.arch not in release_named(release).inside or block_switch() is not None:
        return None
    powers_of_two = "" if os.environ.get("VLLM_USE_DEEP_GEMM_E8M0") == "0" else ",ue8m0"
    return f"group128,tma_aligned{powers_of_two},inside"


def engine_of(
    architectures: Iterable[str],
    *,
    target: Target,
    ranks: int = 1,
    release: str | None = None,
    enforce_eager: bool = False,
) -> Engine:
    """What a plan needs to know of vLLM.

    The environment is read as vLLM reads it: VLLM_BATCH_INVARIANT, VLLM_DISABLE_SHARED_EXPERTS_STREAM, VLLM_ROCM_USE_AITER, VLLM_USE_DEEP_GEMM,
    and VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER.

    Args:
        architectures: of the model, as its config names them.
        target: of the plan: breakable CUDA graphs are a default on NVIDIA's only.
        ranks: the tensor-parallel size.
        release: the first two numbers, or more; the newest recorded one if not given.
        enforce_eager: vLLM's option of that name.

    Raises:
        UnknownReleaseOfVllmError: nothing is recorded of this release.
    """
    recorded = release_named(release)
    name = recorded.name
    if is_set(BATCH_INVARIANT):
        return Engine(name="vllm", refuses={"*": INVARIANT}, decodes=True)
    architectures = tuple(architectures)
    if architectures and recorded.without.issuperset(architectures):
        return Engine(name="vllm", refuses={"*": native_fusions.by_transformers(f"vLLM {name}", architectures[0])})
    place = native_fusions.Place(
        vendor=target.vendor, arch=target.arch, ranks=ranks, aiter=is_set("VLLM_ROCM_USE_AITER")
    )
    known = sorted(recorded.breakable.intersection(architectures))
    if enforce_eager:
        reason: str | None = "enforce_eager is set: vLLM compiles nothing"
    elif known and target.vendor == "nvidia":
        reason = f"vLLM {name} runs {known[0]} in breakable CUDA graphs by default, and does not compile it"
    else:
        reason = None
    engine = (
        native_fusions.compiled(place)
        if reason is None
        else native_fusions.uncompiled(reason, architectures, place, recorded.seams)
    )
    return planned(attrs.evolve(engine, release=name, captures=not enforce_eager), architectures)
