"""Write down what a layer says about itself: plain attributes, parameter shapes and children, as JSON-ready data.

Knows no engine.  The dump tools of this folder use it to show, release by release, which names an engine uses: compare
the output of two releases to see which names and meanings changed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from torch import Tensor, nn

_TORCH_OWN = frozenset(vars(nn.Module()))
_WORTH_A_LOOK = frozenset({"impl", "tp_group"})
"""Objects, not modules, that hold numbers of the layer: its kernel, and the group that a projection is sharded over."""
_SCALARS = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class Layer:
    """Where one attention layer sits: the model, the decoder layer, and the name of the layer in it, "" for itself."""

    model: str
    decoder: str
    name: str = "self_attn"

    @property
    def path(self) -> str:
        return f"{self.decoder}.{self.name}" if self.name else self.decoder


def facts(module: nn.Module) -> dict[str, Any]:
    """Describe ``module`` and everything below it; a module that is reachable twice is described once."""
    return _facts(module, "", {})


def dump(
    engine: str,
    layers: Mapping[str, Any],
    models: Mapping[str, Any],
    build_model: Callable[..., nn.Module],
    words: list[str],
) -> None:
    """Print what every layer whose name contains one of ``words`` (all, without any) says at each degree."""
    wanted = {name: layer for name, layer in layers.items() if not words or any(word in name for word in words)}
    dumped = []
    for model_name in dict.fromkeys(layer.model for layer in wanted.values()):
        for tp in models[model_name].tp_sizes:
            rank = tp * 5 // 8  # not the first rank, and not the last
            model = build_model(model_name, tp=tp, rank=rank)
            for name, layer in wanted.items():
                if layer.model == model_name:
                    decoder = model.get_submodule(layer.decoder)
                    dumped.append(
                        {
                            "layer": name,
                            "path": layer.path,
                            "tp": tp,
                            "rank": rank,
                            "facts": facts(model.get_submodule(layer.path)),
                            "decoder": {
                                "class": class_name(type(decoder)),
                                "mro": mro(type(decoder)),
                                **_attributes(decoder),
                                "norms": {n: facts(child) for n, child in decoder.named_children() if "norm" in n},
                            },
                        }
                    )
    json.dump({engine: version(engine), "torch": version("torch"), "layers": dumped}, sys.stdout, indent=1)
    print()


def class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def mro(cls: type) -> list[str]:
    """The class and its ancestors up to, and without, those of torch and of Python."""
    return [class_name(c) for c in cls.__mro__ if c.__module__.split(".")[0] not in ("torch", "builtins", "abc")]


def _facts(module: nn.Module, path: str, seen: dict[int, str]) -> dict[str, Any]:
    seen[id(module)] = path
    described: dict[str, Any] = {"class": class_name(type(module)), "mro": mro(type(module))}
    described.update(_attributes(module))
    tensors = {
        name: list(tensor.shape)
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    }
    if tensors:
        described["tensors"] = tensors
    children: dict[str, Any] = {}
    for name, child in module._modules.items():
        child_path = f"{path}.{name}" if path else name
        if child is None:
            children[name] = None
        elif id(child) in seen:
            children[name] = {"same_as": seen[id(child)] or "(the layer itself)"}
        else:
            children[name] = _facts(child, child_path, seen)
    if children:
        described["children"] = children
    return described


def _attributes(thing: Any) -> dict[str, Any]:
    """Sort instance attributes into plain values, objects worth a look inside, and the rest by class name."""
    values: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    other: dict[str, str] = {}
    for name, value in sorted(vars(thing).items()):
        if name in _TORCH_OWN:
            continue
        plain, is_plain = _plain(value)
        if is_plain:
            values[name] = plain
        elif name in _WORTH_A_LOOK and hasattr(value, "__dict__"):
            objects[name] = {"class": class_name(type(value)), **_attributes(value)}
        else:
            other[name] = f"Tensor{list(value.shape)}" if isinstance(value, Tensor) else class_name(type(value))
    return {"values": values, **({"objects": objects} if objects else {}), **({"other": other} if other else {})}


def _plain(value: Any) -> tuple[Any, bool]:
    if isinstance(value, _SCALARS):
        return value, True
    if isinstance(value, tuple | list) and all(isinstance(item, _SCALARS) for item in value):
        return list(value), True
    return None, False
