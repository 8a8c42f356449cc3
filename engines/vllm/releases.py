"""What is known of vLLM's releases without vLLM: which models each does not compile. Data, for plans made beforehand."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen

from ...adapters.errors import LayerfuseError, cut
from ...fusion.engine import Engine


class UnknownReleaseOfVllmError(LayerfuseError, LookupError):
    """A release of vLLM of which nothing is recorded."""


@frozen(kw_only=True)
class Release:
    """One release, as far as plans go. A test holds each to the release itself."""

    name: str
    breakable: frozenset[str]
    "Architectures that run in breakable CUDA graphs on NVIDIA's GPUs, and are not compiled: of those in models.toml."


RELEASES = {
    release.name: release
    for release in (
        Release(name="0.26", breakable=frozenset()),
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
        ),
    )
}
"""By their first two numbers, the oldest first."""

NEWEST = next(reversed(RELEASES))


def engine_of(
    architectures: Iterable[str], *, vendor: str, release: str | None = None, enforce_eager: bool = False
) -> Engine:
    """What a plan needs to know of vLLM.

    Args:
        architectures: of the model, as its config names them.
        vendor: of the target: breakable CUDA graphs are a default on NVIDIA's only.
        release: the first two numbers, or more; the newest recorded one if not given.
        enforce_eager: vLLM's option of that name.

    Raises:
        UnknownReleaseOfVllmError: nothing is recorded of this release.
    """
    name = NEWEST if release is None else ".".join(release.split(".")[:2])
    if name not in RELEASES:
        raise UnknownReleaseOfVllmError(f"nothing is recorded of vLLM {cut(name)}; known: {', '.join(RELEASES)}")
    if enforce_eager:
        return Engine(name="vllm", refuses={"*": "enforce_eager is set: vLLM compiles nothing"})
    known = sorted(RELEASES[name].breakable.intersection(architectures))
    if known and vendor == "nvidia":
        how = f"vLLM {name} runs {known[0]} in breakable CUDA graphs by default, and does not compile it"
        return Engine(name="vllm", refuses={"*": how})
    return Engine(name="vllm")
