"""What the kernels will run on, as data: architecture, vendor, fp8 flavour, capabilities.

Planning needs no GPU: a target is named, and only `Target.detect` asks torch what this machine has.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attrs import field, frozen

from ..adapters.errors import LayerfuseError, did_you_mean


class UnknownTargetError(LayerfuseError, LookupError):
    """A target name that nobody declared. `known` holds the names that exist."""

    def __init__(self, name: str, known: tuple[str, ...]) -> None:
        self.name = name
        self.known = known
        super().__init__(name, known)

    def __str__(self) -> str:
        return (
            f"no target is called {self.name!r}{did_you_mean(self.name, self.known) or '.'} "
            f"Known: {', '.join(self.known)}. For another one, build Target(arch=..., vendor=...) yourself."
        )


def _names(names: Iterable[str]) -> frozenset[str]:
    return frozenset(names)


@frozen(kw_only=True)
class Target:
    """One kind of device. Two targets with equal fields are the same target."""

    arch: str
    "As the toolchain spells it: gfx950, gfx942, sm90, cpu."
    vendor: str
    "amd, nvidia or cpu."
    fp8: str | None = None
    "The float8 format its matrix units take: e4m3fn (OCP), e4m3fnuz (gfx942), or None."
    capabilities: frozenset[str] = field(default=frozenset(), converter=_names)
    "What rules may ask for: triton, aiter, mxfp4."

    @property
    def name(self) -> str:
        """The name to give `Target.named`."""
        return self.arch

    def has(self, capability: str) -> bool:
        """Whether the device has a capability."""
        return capability in self.capabilities

    @classmethod
    def named(cls, name: str) -> Target:
        """The declared target of this name.

        Raises:
            UnknownTargetError: no such name; the message holds the closest one.
        """
        if name not in TARGETS:
            raise UnknownTargetError(name, tuple(TARGETS))
        return TARGETS[name]

    @classmethod
    def detect(cls) -> Target:
        """The target of torch's current device on this machine, `cpu` without a GPU. Imports torch.

        A GPU that is not declared is described by its own arch, with no fp8 flavour and Triton as its only capability.
        """
        import torch

        if not torch.cuda.is_available():
            return TARGETS["cpu"]
        if torch.version.hip:
            arch = str(torch.cuda.get_device_properties(torch.cuda.current_device()).gcnArchName).split(":")[0]
            vendor = "amd"
        else:
            arch = "sm{}{}".format(*torch.cuda.get_device_capability())
            vendor = "nvidia"
        return TARGETS.get(arch) or cls(arch=arch, vendor=vendor, capabilities=["triton"])

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "arch": self.arch,
            "vendor": self.vendor,
            "fp8": self.fp8,
            "capabilities": sorted(self.capabilities),
        }

    def __str__(self) -> str:
        return self.arch


TARGETS: dict[str, Target] = {
    target.arch: target
    for target in (
        Target(arch="gfx950", vendor="amd", fp8="e4m3fn", capabilities=["triton", "aiter", "mxfp4"]),
        Target(arch="gfx942", vendor="amd", fp8="e4m3fnuz", capabilities=["triton", "aiter"]),
        Target(arch="sm90", vendor="nvidia", fp8="e4m3fn", capabilities=["triton"]),
        Target(arch="cpu", vendor="cpu"),
    )
}
"""The declared targets. fp8 flavours: CDNA3 has the FNUZ formats, CDNA4 and Hopper the OCP ones."""
