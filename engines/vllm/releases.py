"""What is known of vLLM's releases without vLLM: which models each does not compile. Data, for plans made beforehand."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen

from ...adapters.errors import LayerfuseError, cut
from ...fusion.engine import Engine
from ...fusion.target import Target
from . import native_fusions
from .switches import BATCH_INVARIANT, INVARIANT, is_set


class UnknownReleaseOfVllmError(LayerfuseError, LookupError):
    """A release of vLLM of which nothing is recorded."""


@frozen(kw_only=True)
class Release:
    """One release, as far as plans go. A test holds each to the release itself."""

    name: str
    breakable: frozenset[str]
    "Architectures that run in breakable CUDA graphs on NVIDIA's GPUs, and are not compiled: of those in models.toml."
    seams: frozenset[str]
    "Fusions that can go in at module level where nothing is compiled (`seams.SEAMS`)."
    without: frozenset[str]
    """Architectures of models.toml that it has no code of its own for, so that it can run transformers' alone. Mistral 4 it reads in
    Mistral's own format, and runs by DeepSeek's code."""


_EVERYWHERE = (
    "add_rms_norm",
    "gated_rms_norm",
    *native_fusions.quantised("add_rms_norm", "rms_norm", "gated_rms_norm", "silu_mul"),
)

_NOWHERE = ("BambaForCausalLM", "Olmo2ForCausalLM", "SmolLM3ForCausalLM", "SolarOpenForCausalLM", "YoutuForCausalLM")
"""Architectures that no release has code of its own for."""

RELEASES = {
    release.name: release
    for release in (
        Release(
            name="0.26",
            breakable=frozenset(),
            seams=frozenset(_EVERYWHERE),
            without=frozenset({*_NOWHERE, "KimiK3ForConditionalGeneration"}),
        ),
        Release(
            name="0.33",
            breakable=frozenset(
                {
                    "DeepseekV32ForCausalLM",
                    "GlmMoeDsaForCausalLM",
                    "KimiK3ForConditionalGeneration",
                    "KimiLinearForCausalLM",
                }
            ),
            seams=frozenset({*_EVERYWHERE, "mla_dual_rms_norm", *native_fusions.quantised("mla_dual_rms_norm")}),
            without=frozenset({*_NOWHERE, "CwmForCausalLM", "SeedOssForCausalLM"}),
        ),
    )
}
"""By their first two numbers, the oldest first."""

NEWEST = next(reversed(RELEASES))


def engine_of(
    architectures: Iterable[str],
    *,
    target: Target,
    ranks: int = 1,
    release: str | None = None,
    enforce_eager: bool = False,
) -> Engine:
    """What a plan needs to know of vLLM.

    The environment is read as vLLM reads it: VLLM_BATCH_INVARIANT, and VLLM_ROCM_USE_AITER.

    Args:
        architectures: of the model, as its config names them.
        target: of the plan: breakable CUDA graphs are a default on NVIDIA's only.
        ranks: the tensor-parallel size.
        release: the first two numbers, or more; the newest recorded one if not given.
        enforce_eager: vLLM's option of that name.

    Raises:
        UnknownReleaseOfVllmError: nothing is recorded of this release.
    """
    name = NEWEST if release is None else ".".join(release.split(".")[:2])
    if name not in RELEASES:
        raise UnknownReleaseOfVllmError(f"nothing is recorded of vLLM {cut(name)}; known: {', '.join(RELEASES)}")
    if is_set(BATCH_INVARIANT):
        return Engine(name="vllm", refuses={"*": INVARIANT})
    architectures = tuple(architectures)
    if architectures and RELEASES[name].without.issuperset(architectures):
        return Engine(name="vllm", refuses={"*": native_fusions.by_transformers(f"vLLM {name}", architectures[0])})
    place = native_fusions.Place(
        vendor=target.vendor, arch=target.arch, ranks=ranks, aiter=is_set("VLLM_ROCM_USE_AITER")
    )
    known = sorted(RELEASES[name].breakable.intersection(architectures))
    if enforce_eager:
        reason = "enforce_eager is set: vLLM compiles nothing"
    elif known and target.vendor == "nvidia":
        reason = f"vLLM {name} runs {known[0]} in breakable CUDA graphs by default, and does not compile it"
    else:
        return native_fusions.compiled(place)
    return native_fusions.uncompiled(reason, architectures, place, RELEASES[name].seams)
