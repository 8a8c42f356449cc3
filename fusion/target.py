"""What the kernels will run on, as data: architecture, vendor, fp8 format.

Planning needs no GPU: a target is named, and only `Target.detect` asks torch what this machine has.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import attrs
from attrs import field, frozen

from ..adapters.arguments import check_word
from ..adapters.errors import ArgumentError, ArgumentValueError, UnknownNameError, did_you_mean, shown

if TYPE_CHECKING:
    from torch import nn


class UnknownTargetError(UnknownNameError):
    """A target name that is neither an architecture nor a GPU. `known` holds the names that are declared."""

    def __str__(self) -> str:
        return (
            f"no target is called {shown(self.name)}{did_you_mean(self.name, self.known) or '.'} Known: "
            f"{', '.join(TARGETS)}, every other smNN of NVIDIA and gfxNNN of AMD, and the GPUs {', '.join(GPUS)}. "
            "For another one, build Target(arch=..., vendor=...) yourself."
        )


_LONGEST = 10
"""No architecture's name has more letters, and digits become numbers here."""


def _text(_instance: Target, attribute: attrs.Attribute[Any], value: object) -> None:
    if type(value) is not str and (value is not None or attribute.default is attrs.NOTHING):
        raise ArgumentError(f"Target.{attribute.name}: expected a text, got {shown(value)}")
    if type(value) is str and not re.fullmatch(r"[\w.+:-]{1,40}", value):
        raise ArgumentValueError(f"Target.{attribute.name}: expected a short name, without blanks, got {shown(value)}")


VENDORS = ("amd", "nvidia", "cpu")


def _vendor(_instance: Target, _attribute: object, value: str) -> None:
    check_word("Target.vendor", value, VENDORS)


FP8_FORMATS = ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")
"""The float8 formats by torch's names. Ops write the first two; a plan for another says so."""


def _fp8(_instance: Target, _attribute: object, value: Any) -> None:
    if type(value) is not str and value is not None:
        raise ArgumentError(f"Target.fp8: expected a text, got {shown(value)}")
    if value is not None and value not in FP8_FORMATS:
        raise ArgumentValueError(
            f"Target.fp8: expected None or one of {', '.join(FP8_FORMATS)}, got {shown(value)}"
            f"{did_you_mean(value, FP8_FORMATS)}"
        )


@frozen(kw_only=True)
class Target:
    """One kind of device. Two targets with equal fields are the same target."""

    arch: str = field(validator=_text)
    "As the toolchain spells it: gfx950, gfx942, sm90, cpu."
    vendor: str = field(validator=_vendor)
    "amd, nvidia or cpu."
    fp8: str | None = field(default=None, validator=_fp8)
    "The float8 format its matrix units take: e4m3fn (OCP), e4m3fnuz (gfx940 to gfx942), or None."
    aiter: str | None = field(default=None, validator=_text)
    "The release of AITER that runs there, where limits differ by release; None: the newest that is recorded."

    @property
    def mx(self) -> bool:
        """Whether its matrix units take the MX formats: NVIDIA from sm100 on, AMD gfx950 and gfx1250."""
        number = re.sub(r"\D", "", self.arch)
        return self.arch.startswith(("gfx950", "gfx125")) or (self.vendor == "nvidia" and int(number or 0) >= FIRST_MX)

    @property
    def nvfp4(self) -> bool:
        """Whether its matrix units take NVFP4: NVIDIA from sm100 on."""
        return self.vendor == "nvidia" and self.mx

    @property
    def name(self) -> str:
        """The name to give `Target.named`."""
        return self.arch

    @classmethod
    def named(cls, name: str) -> Target:
        """The target of an architecture, or of a GPU by its name (h100 is sm90). Capital letters do not matter.

        Args:
            name: one of `TARGETS`, any other smNN or gfxNNN, newer ones included, or one of `GPUS`.

        Raises:
            UnknownTargetError: no architecture is spelled like that; the message holds the closest name.
        """
        if not isinstance(name, str) or len(name) > _LONGEST:
            raise UnknownTargetError(name, (*TARGETS, *GPUS))
        given, name = name, name.lower()
        name = GPUS.get(name, name)
        if name == "cpu":
            return cls(arch="cpu", vendor="cpu")
        if re.fullmatch(r"sm[1-9]\d+[a-z]?", name):
            return cls(arch=name, vendor="nvidia", fp8="e4m3fn" if int(re.sub(r"\D", "", name)) >= FIRST_FP8 else None)
        if re.fullmatch(r"gfx[1-9][0-9a-f]{2,3}", name):
            return cls(arch=name, vendor="amd", fp8=_amd_fp8(name))
        raise UnknownTargetError(given, (*TARGETS, *GPUS))

    @classmethod
    def detect(cls) -> Target:
        """The target of torch's current device on this machine, `cpu` without a GPU. Imports torch."""
        import torch

        if not torch.cuda.is_available():
            return cls.named("cpu")
        if torch.version.hip:
            return cls.named(torch.cuda.get_device_properties(torch.cuda.current_device()).gcnArchName.split(":")[0])
        return cls.named("sm{}{}".format(*torch.cuda.get_device_capability()))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"arch": self.arch, "vendor": self.vendor, "fp8": self.fp8, "aiter": self.aiter}

    def __str__(self) -> str:
        return self.arch


def target_of(model: nn.Module) -> Target:
    """What a loaded model runs on: torch's current device where a parameter is on another device than the CPU, else `cpu`."""
    elsewhere = any(parameter.device.type != "cpu" for parameter in model.parameters())
    return Target.detect() if elsewhere else Target.named("cpu")


FIRST_FP8 = 89
"""NVIDIA's first compute capability with fp8 (Ada), and the first for which Triton converts to e4m3fn."""


FIRST_MX = 100
"""NVIDIA's first compute capability with MX formats (Blackwell)."""


def _amd_fp8(arch: str) -> str | None:
    """CDNA3 (gfx940 to gfx942) has the FNUZ formats; CDNA4 (gfx950) and RDNA4 (gfx12), and what follows, OCP's."""
    if arch in ("gfx940", "gfx941", "gfx942"):
        return "e4m3fnuz"
    number = int(arch.removeprefix("gfx"), 16)
    family = int(arch.removeprefix("gfx")[:-2], 16)
    return "e4m3fn" if (family == 9 and number >= 0x950) or family >= 0x12 else None


TARGETS = ("gfx950", "gfx942", "gfx90a", "sm120", "sm100", "sm90", "sm89", "sm80", "cpu")
"""The targets that help texts name."""

GPUS = {
    "a100": "sm80",
    "l40s": "sm89",
    "h20": "sm90",
    "h100": "sm90",
    "h200": "sm90",
    "gh200": "sm90",
    "b200": "sm100",
    "gb200": "sm100",
    "b300": "sm103",
    "gb300": "sm103",
    "mi250x": "gfx90a",
    "mi300x": "gfx942",
    "mi325x": "gfx942",
    "mi350x": "gfx950",
    "mi355x": "gfx950",
}
"""The architectures of the usual GPUs, by the names that they are sold under."""
