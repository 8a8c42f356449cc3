"""Which norms of a decoder layer read the residual stream, and how what its blocks give joins it: seen, not guessed by name.

The layer's own forward runs on the meta device with its attention and MLP replaced by blocks that compute nothing. What is
called with what, and what is added, shows where each norm stands.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from attrs import define, field, frozen
from torch import nn
from torch.overrides import TorchFunctionMode

_ATTENTION_GIVES: tuple[Callable[[Any], Any], ...] = (lambda x: (x, None), lambda x: x, lambda x: (x, None, None))
_MLP_GIVES: tuple[Callable[[Any], Any], ...] = (lambda x: x, lambda x: (x, None))
"""What blocks of transformers return beside the tensor: attention weights, a cache, a router's logits."""

_ADDS = ("add", "add_", "__add__", "__radd__", "__iadd__")


@frozen
class Stream:
    """What a decoder layer's forward does with its residual stream."""

    input_norms: tuple[str, ...]
    "Children that norm the stream for the attention; none where the layer's norms stand elsewhere."
    post_attention_norms: tuple[str, ...]
    "The same for the MLP."
    added_as_given: bool
    "Whether what both blocks give is added as it is."


USUAL = Stream(("input_layernorm",), ("post_attention_layernorm",), True)
"""What most decoder layers do."""


def stream_of(layer: nn.Module, hidden_size: int) -> Stream | None:
    """What this layer does with the stream, or None where it does something that no spec describes, or cannot be run.

    Args:
        layer: a decoder layer on the meta device, of one attention and one MLP; it is copied.
        hidden_size: width of the stream.
    """
    for attention, mlp in product(_ATTENTION_GIVES, _MLP_GIVES):
        try:
            return _watched(copy.deepcopy(layer), hidden_size, attention, mlp)
        except Exception:  # its forward expects something else of its blocks: the next
            continue
    return None


def weight_offset(norm: nn.Module, width: int) -> float | None:
    """What this norm adds to its weight, from what comes of a weight of zeros; None where that is no offset."""
    try:
        own = copy.deepcopy(norm).to_empty(device="cpu")
        with torch.no_grad():
            for tensor in (*own.parameters(), *own.buffers()):
                tensor.zero_()
            found = own(torch.ones(1, width)).float()
        offset = round(float(found[0, 0]), 3)
        return offset if bool((found - offset).abs().max() < 1e-2) else None
    except Exception:  # another kind of module
        return None


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm by the name of its class."""
    return "norm" in type(module).__name__.lower()


class _Block(nn.Module):  # type: ignore[misc]
    """Stands in for an attention or an MLP: says what it was given, and gives a new tensor."""

    def __init__(self, name: str, seen: _Seen, form: Callable[[Any], Any]) -> None:
        super().__init__()
        self.name, self.seen, self.form = name, seen, form

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        made = torch.empty_like(given)
        self.seen.blocks.append((self.name, given, made))
        return self.form(made)


@define(eq=False)
class _Seen:
    """What happened in one forward pass. Tensors are told apart by identity."""

    norms: list[tuple[str, Any, Any]] = field(factory=list)
    "Name, what it was given, what it gave; blocks too."
    blocks: list[tuple[str, Any, Any]] = field(factory=list)
    added: list[Any] = field(factory=list)
    "What was added."
    sums: list[Any] = field(factory=list)
    "What came of it."


class _Adds(TorchFunctionMode):  # type: ignore[misc]
    def __init__(self, seen: _Seen) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in _ADDS and isinstance(made, torch.Tensor):
            self.seen.added += [value for value in args if isinstance(value, torch.Tensor)]
            self.seen.sums.append(made)
        return made


def _watched(layer: nn.Module, hidden_size: int, attention: Any, mlp: Any) -> Stream | None:
    seen = _Seen()
    inside = []
    for name, child in list(layer.named_children()):
        if is_norm(child):
            child.register_forward_hook(lambda _, args, made, name=name: seen.norms.append((name, args[0], made)))
        elif next(child.parameters(), None) is not None:
            is_attention = "attn" in name or "attention" in name
            inside += [] if is_attention else list(_norms_of(child, hidden_size))
            setattr(layer, name, _Block(name, seen, attention if is_attention else mlp))
    stream = torch.empty(1, 2, hidden_size, device="meta")
    wanted = list(inspect.signature(layer.forward).parameters.values())[1:]
    with torch.no_grad(), _Adds(seen):
        made = layer(stream, **{p.name: None for p in wanted if p.default is p.empty and p.kind in (1, 3)})
    made = made[0] if isinstance(made, tuple) else made
    if made.shape != stream.shape:
        raise ValueError("the layer took what its blocks gave for something else")
    if len(seen.blocks) != 2:
        return None
    (_, to_attention, of_attention), (_, to_mlp, of_mlp) = seen.blocks
    streams = [stream, *seen.sums]
    reads = [one for one in seen.norms if any(one[1] is tensor for tensor in streams)]
    before = tuple(name for name, given, made in reads if made is to_attention and given is stream)
    after = tuple(name for name, given, made in reads if made is to_mlp and given is not stream)
    # A norm for each block, or blocks that read the stream itself; nothing else is what a spec describes.
    plain = not reads and to_attention is stream and any(to_mlp is one for one in seen.sums)
    if not plain and not (len(before) == len(after) == 1 and len(reads) == 2):
        return None
    as_given = not inside and all(any(value is made for value in seen.added) for made in (of_attention, of_mlp))
    return Stream(before, after, as_given and not plain)


def _norms_of(block: nn.Module, width: int) -> Iterator[str]:
    """Norms inside an MLP that are as wide as the stream: A.X-K1's mixture norms what it gives."""
    for name, module in block.named_modules():
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if is_norm(module) and weight is not None and weight.shape[-1] == width:
            yield name
