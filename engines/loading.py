"""From what is asked for to what can happen in a loaded model, as far as it is the same in all engines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from ..adapters.errors import LayerfuseError
from ..adapters.specs import AnySpec
from ..fusion.rewrite.attribution import join
from ..fusion.sites import Site, linear_sites, stack_of
from .compiled_module import say_unfound, unfound_lines
from .process import of_each_class, once


class NotFusedError(LayerfuseError, RuntimeError):
    """`strict` is set, and of what is asked for nothing can happen in a model. `fusions` holds a reason for each; empty: for any."""

    def __init__(self, model: str, why: str, fusions: dict[str, str] | None = None) -> None:
        self.model, self.why, self.fusions = model, why, fusions or {}
        super().__init__(model, why, fusions)

    def __str__(self) -> str:
        told = [f"layerfuse is strict, and {line}" for line in unfound_lines(self.model, self.fusions)]
        told = told or [f"layerfuse is strict, and nothing is fused in {self.model}: {self.why}"]
        return "\n".join([*told, "Leave it out of `fusions`, or set `strict` to false, if that is acceptable."])


def device_of(module: nn.Module) -> torch.device:
    """Where a module's first parameter is."""
    first = next(module.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def nothing(model: nn.Module, why: str, stops: bool = False) -> None:
    """Say once that nothing is fused in a model.

    Raises:
        NotFusedError: it stops the engine.
    """
    if stops:
        raise NotFusedError(type(model).__name__, why)
    once(logging.WARNING, "layerfuse: nothing is fused in %s: %s", type(model).__name__, why)


def tell_unfound(model: nn.Module, unfound: dict[str, str], stops: bool) -> None:
    """Say which fusions that are asked for by name have no site in a model.

    Raises:
        NotFusedError: there is one, and that stops the engine.
    """
    name = type(model).__qualname__
    if unfound and stops:
        raise NotFusedError(name, "", unfound)
    say_unfound(name, unfound)


def say_unknown(unknown: Mapping[str, str]) -> None:
    """Say once where nothing is fused, as no adapter knows what stands there: layer -> class."""
    for of_a_class in of_each_class(unknown):
        once(logging.WARNING, "layerfuse: no adapter knows %s: nothing is fused there", of_a_class)


def linears_left(specs: Sequence[tuple[str, AnySpec]], why_left: Callable[[str, Site], str | None]) -> dict[str, str]:
    """Path of a linear of a loaded model -> why its product stays the engine's with few tokens too, as a sentence, as `why_left` has it."""
    found = {}
    for site in linear_sites(specs, {}, stack_of(specs), True):
        path = "" if site.linear is None else join(site.layer, site.linear.path)
        why = why_left(path, site)
        if why is not None:
            found[path] = why
    return found
