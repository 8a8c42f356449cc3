"""Inference engines, as far as fusions are concerned: what they do not allow, and what is not faster there.

An engine is data. `plan` takes it as input, so that a plan holds inside that engine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import NoneType
from typing import TYPE_CHECKING, Any

import attrs
from attrs import field, frozen

from ..adapters.arguments import expect
from ..adapters.errors import ArgumentError, ArgumentValueError, LayerfuseError, did_you_mean, shown

if TYPE_CHECKING:
    from ..adapters.activation_quant import ActivationQuant


class UnknownFusionEngineError(LayerfuseError, LookupError):
    """An engine of an unknown name."""


def _own(reasons: Mapping[str, str]) -> Mapping[str, str]:
    """A dictionary of the engine's own, of what may be none: the validator says which field it is."""
    return dict(reasons) if isinstance(reasons, Mapping) else reasons


def _reasons(_instance: Engine, attribute: attrs.Attribute[Any], reasons: object) -> None:
    if not isinstance(reasons, dict):
        raise ArgumentError(
            f"Engine.{attribute.name}: expected a mapping from fusions or roles to reasons, got {shown(reasons)}"
        )
    for key, reason in reasons.items():
        if not isinstance(key, str) or not isinstance(reason, str):
            raise ArgumentError(f"Engine.{attribute.name}: expected texts, got {shown(reason)} for {shown(key)}")
        _check_key(attribute.name, key)


def _check_key(said: str, key: str) -> None:
    """A key that is of nothing would never say its reason, and the fusion that was meant would stand there."""
    from .catalog import FUSIONS
    from .sites import ROLES

    known = (*FUSIONS, *ROLES, "*")
    if key not in known:
        raise ArgumentValueError(
            f"Engine.{said}: no fusion or role is called {shown(key)}{did_you_mean(key, known) or '.'} Roles: "
            f"{', '.join(ROLES)}; '*' stands for everything in `refuses`. Fusions: {', '.join(FUSIONS)}."
            + "".join(f" Not usable: {why}" for why in FUSIONS.refused.values())
        )


def _name(_instance: Engine, _attribute: object, name: str) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
        raise ArgumentError(f"Engine.name: expected a name of at most {LONGEST_NAME} letters, got {shown(name)}")


def _sentence(_instance: Engine, attribute: attrs.Attribute[Any], value: object) -> None:
    expect(f"Engine.{attribute.name}", value, (str, NoneType), "a sentence or None")


LONGEST_NAME = 100


@frozen(kw_only=True)
class Engine:
    """One engine, as far as fusions are concerned."""

    name: str = field(validator=_name)
    "As the measurements of a policy name it."
    release: str | None = field(default=None, validator=_sentence)
    "Its release, as far as it is known, as `0.33` or `0.33.0`. None: what was measured with any release is taken as of this one."
    refuses: Mapping[str, str] = field(factory=dict, converter=_own, validator=_reasons)
    """Fusion or role -> why the engine does not allow it, as a sentence; `*` stands for everything. For example
    {"*": "vLLM 0.33 does not compile this model"}."""
    does: Mapping[str, str] = field(factory=dict, converter=_own, validator=_reasons)
    """Fusion -> where the engine does the same itself, as a sentence: it is not applicable there, unless it is switched on by
    name or was measured faster."""
    does_groups: tuple[int, ...] | None = None
    "Columns that share a scale where it does a group quantisation of `does`; None: however many."
    keeps: Mapping[str, str] = field(factory=dict, converter=_own, validator=_reasons)
    "Fusion or role -> why there is nothing to fuse whatever is switched on, as a sentence."
    experts: str | None = field(default=None, validator=_sentence)
    """Why no quantised fusion stands in front of a mixture's experts, nor any in shared ones, as a sentence. None: nothing is known of them."""
    shared_apart: bool = False
    "Whether it calls shared experts by themselves, so that their linears are like any others."
    shared_routed: str | None = field(default=None, validator=_sentence)
    """Why shared experts that specs list are no MLP of their own but routed ones, as a sentence; one that begins with `not known:` says on what
    that depends. None: they are such an MLP."""
    shared_in_turn: bool = False
    "Whether it runs shared experts before or behind the routed ones, on the same stream, and never beside them."
    inside: str | None = field(default="no pass of its compiler does", validator=_sentence)
    """Why a quantisation that a linear does inside of its op (`ActivationQuant.inside`) stays there, as a sentence; None: it is taken
    out where a fusion does it."""
    linears: Mapping[str, str] | None = None
    """Path of a linear -> why its product stays the engine's with few tokens too, as a sentence. None: there is no place for another
    product than the engine's, and no linear is a site."""
    loaded: bool = False
    "Whether it has built the model, which then has no linear but those that specs list."
    block_linears: str | None = field(default=None, validator=_sentence)
    "Whose kernel multiplies by weights in fp8 blocks, as `policy.Measurement.linears` names it. None: not known."
    linears_apart: bool = False
    "Whether linears, those of shared experts too, have places of their own at module level: for their products, and for what the product in an MLP quantises."
    decodes: bool = False
    "Whether it has a place for all that stands around an MLA layer's attention in a decode step, so that such a layer has a site for it."
    uncompiled: str | None = field(default=None, validator=_sentence)
    """Why it does not compile the model, as a sentence; fusions can then go in at module level only. None: it does."""
    captures: bool = True
    """Whether it captures decode steps in CUDA graphs. Where it launches all ops of a model that it does not compile one by one, what was measured
    in graphs says nothing: the host has more to do than the GPU there."""

    @classmethod
    def named(cls, name: str) -> Engine:
        """An engine of which only the name is known, and whether anything of layerfuse runs inside of it.

        Raises:
            UnknownFusionEngineError: none of `NAMES`.
        """
        if not isinstance(name, str) or name not in NAMES:
            raise UnknownFusionEngineError(
                f"no engine is called {shown(name)}{did_you_mean(name, NAMES) or '.'} Known: {', '.join(NAMES)}. "
                "For another one, give plan() an Engine(name=...)."
            )
        return cls(name=name, refuses={"*": _UNKNOWN[name]} if name in _UNKNOWN else {})

    def why_not(self, fusion: str, role: str) -> str | None:
        """Why the engine does not let a fusion happen at a role, or None where it does."""
        return next((self.refuses[key] for key in (fusion, role, "*") if key in self.refuses), None)

    def why_kept(self, fusion: str, role: str) -> str | None:
        """Why there is nothing to fuse for this fusion at a role, or None."""
        return next((self.keeps[key] for key in (fusion, role) if key in self.keeps), None)

    def why_done(self, fusion: str, quant: ActivationQuant | None) -> str | None:
        """Where the engine does the same itself for what reads the site, quantised like this, or None."""
        if quant is not None and self.does_groups is not None and fusion.endswith("_group_quant"):
            return self.does.get(fusion) if quant.group_size in self.does_groups else None
        return self.does.get(fusion)

    def is_release(self, other: str) -> bool:
        """Whether another release counts as this one: it has the same first two numbers, or three of SGLang, whose releases differ in the third."""
        several = 3 if self.name == "sglang" else 2

        def numbers(release: str) -> list[str]:
            return re.findall(r"\d+", release)[:several]

        return self.release is None or numbers(self.release) == numbers(other)

    @property
    def compiled(self) -> bool:
        """Whether it compiles the model."""
        return self.uncompiled is None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON and for cache keys."""
        return attrs.asdict(self)


SPELT = {"transformers": "transformers", "vllm": "vLLM", "sglang": "SGLang", "atom": "ATOM"}
"""The engines that can be planned for by name, as they write themselves."""

NAMES = tuple(SPELT)

_UNKNOWN = {
    "sglang": "what can stand inside SGLang is in layerfuse.engines.sglang.facts.engine_of(), which the name alone does not say",
    "atom": "nothing of layerfuse runs inside ATOM yet: it has no plugin for it",
}
"""Those of which the name alone says too little for any fusion -> why."""
