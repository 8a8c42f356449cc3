"""The names that a model has for its weights while it is called: graphs that sibling layers share are told apart by them.

A weight is looked up by identity, and the answer is held against the model. Identity alone would not do: a weight that is
gone (loaded anew with `assign=True`, offloaded) leaves its own to another.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import nn

_Slot: TypeAlias = tuple[dict[str, Any], str]
"""A module's parameters, and the name of one."""


class _Found(threading.local):
    """What was found in this thread's call of the model."""

    def __init__(self) -> None:
        self.names: dict[int, tuple[str, ...]] = {}
        self.looked = False
        "Whether the modules were looked up in this call."


class HeldWeights:
    """Looks up those weights of a model whose names are watched."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names: tuple[str, ...] = ()
        self._slots: dict[str, _Slot] = {}
        self._places: list[tuple[dict[str, Any], str, nn.Module]] = []
        "Where each module on the way to a slot was found: the children of the one around it, its name there, and itself."
        self._found = _Found()

    def watch(self, names: Iterable[str]) -> None:
        """Know the weights of these names, and of no others; those that the model lacks are passed over."""
        names = tuple(dict.fromkeys(names))
        if names != self._names:
            self._names = names
            self._look_up()

    def start(self) -> None:
        """A call of the model begins: weights may be tied, or be others, since the last one."""
        self._found.names, self._found.looked = {}, False
        # As may modules: two layers that change one of their norms leave every weight where it was.
        if any(children.get(name) is not module for children, name, module in self._places):
            self._look_up()

    def forget(self) -> None:
        """Ask anew, in the same call: a weight may be in more places than it was."""
        self._found.names = {}

    def names_of(self, weight: torch.Tensor) -> tuple[str, ...]:
        """Those watched names that the model has for a weight now."""
        found, slots = self._found, self._slots
        names = found.names.get(id(weight), ())
        if names and all(name in slots and _held(slots[name]) is weight for name in names):
            return names
        found.names = self._by_identity()
        if id(weight) not in found.names and not found.looked:
            # Another module may stand where the one that was known did.
            found.looked = True
            self._look_up()
            found.names = self._by_identity()
        return found.names.get(id(weight), ())

    def _look_up(self) -> None:
        slots: dict[str, _Slot] = {}
        places: list[tuple[dict[str, Any], str, nn.Module]] = []
        found = {"": self._model}
        for name in self._names:
            path, _, last = name.rpartition(".")
            try:
                parameters = _module(path, found, places)._parameters
            except AttributeError:
                continue
            if isinstance(parameters, dict):  # TorchScript's modules run no graph of ours, and keep none
                slots[name] = parameters, last
        self._slots, self._places = slots, places

    def _by_identity(self) -> dict[int, tuple[str, ...]]:
        names: dict[int, tuple[str, ...]] = {}
        for name, slot in self._slots.items():
            held = id(_held(slot))
            names[held] = (*names.get(held, ()), name)
        return names


def _held(slot: _Slot) -> Any:
    parameters, name = slot
    return parameters.get(name)


def _module(path: str, found: dict[str, nn.Module], places: list[tuple[dict[str, Any], str, nn.Module]]) -> nn.Module:
    """The module at a path below those that were found, and where it and those around it are."""
    if path not in found:
        outer, _, name = path.rpartition(".")
        around = _module(outer, found, places)
        found[path] = around.get_submodule(name)
        # Wrappers pass names on to what they wrap; TorchScript's modules keep no dict.
        if isinstance(around._modules, dict) and name in around._modules:
            places.append((around._modules, name, found[path]))
    return found[path]
