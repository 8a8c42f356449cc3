"""Values in another notation: what stands after `as` where a path does not say a field in the spec's own terms."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache
from types import NoneType
from typing import Any

from .errors import FOREIGN, UnreadableError, shown


def whole(value: Any) -> Any:
    """An integer of any library (numpy's, a tensor without dimensions) as int. All else, a flag too, is left to be refused."""
    if type(value) in (int, bool, NoneType):
        return value
    try:
        return operator.index(value) if is_one_number(value) else value
    except FOREIGN:  # no integer, or without data; the spec refuses it by name
        return value


def is_one_number(value: Any) -> bool:
    """Whether this has no dimensions and is no flag: arrays of one element, and flags of numpy, convert to numbers too."""
    several = hasattr(value, "shape") and value.shape != ()
    return not several and not (hasattr(value, "dtype") and "bool" in str(value.dtype))


def _present(value: Any) -> bool:
    return value is not None


def _window_before(value: Any) -> Any:
    """SGLang and flash-attention count the tokens *before* the current one: 127 is a window of 128, -1 is off."""
    value = whole(value)
    return value + 1 if type(value) is int and value >= 0 else value


def _nothing(_: Any) -> None:
    return None


def _negated(value: Any) -> Any:
    """What is no flag is left for the spec to refuse by name."""
    return not value if type(value) is bool else value


def _rope_scaling(config: Any) -> float:
    rope = config.rope_parameters
    return rope_attention_scaling(rope, config.max_position_embeddings if _kind_of_rope(rope) == "longrope" else None)


def _rope_width(config: Any) -> int:
    """Columns of a head that are turned, as transformers has it (`modeling_rope_utils`): all of them unless a config says which part."""
    rope = config.rope_parameters
    part = rope.get("partial_rotary_factor", 1.0)
    try:
        head_dim = config.head_dim
    except AttributeError:  # of Qwen3's mixtures
        head_dim = None
    if head_dim is None:
        head_dim = config.hidden_size // config.num_attention_heads
    return int(head_dim * part)


def rope_attention_scaling(rope: Mapping[str, Any], longest: int | None) -> float:
    """What cos and sin are multiplied with, as transformers has it (`modeling_rope_utils.ROPE_INIT_FUNCTIONS`).

    Args:
        rope: a config's `rope_parameters`, or its `rope_scaling`.
        longest: the config's `max_position_embeddings`.

    Raises:
        UnreadableError: a type of rope that is not known here.
    """
    kind = _kind_of_rope(rope)
    if kind in ("default", "linear", "dynamic", "proportional", "llama3"):
        return 1.0
    said: Any = rope.get("attention_factor")
    factor: Any = rope.get("factor")
    if kind not in ("yarn", "longrope"):
        raise UnreadableError(f"rope_type {shown(kind)}: what it multiplies cos and sin with is not known here")
    if said is not None:
        return float(said)
    if kind == "yarn":
        weight, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
        one = _yarn_mscale(factor, weight) / _yarn_mscale(factor, all_dim) if weight and all_dim else None
        return _yarn_mscale(factor, 1.0) if one is None else one
    original: Any = rope.get("original_max_position_embeddings")
    ratio = longest / original if longest and original and factor is None else factor
    return 1.0 if ratio is None or ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(original))


def _kind_of_rope(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def _yarn_mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _inverse_root(value: Any) -> Any:
    value = whole(value)
    return value**-0.5 if type(value) is int and value > 0 else value


def _length(value: Any) -> int:
    try:
        return len(value)
    except TypeError:
        raise UnreadableError(f"{shown(value)} is no sequence, so it has no length") from None


def _name_index(per_layer: int) -> Callable[[Any], int]:
    @lru_cache(maxsize=4096)
    def of_text(value: str) -> int:
        numbers = [int(n) for n in re.findall(r"(?:^|\.)(\d{1,9})(?=\.|$)", value)]
        if len(numbers) == 1:
            return numbers[0]
        if len(numbers) == 2 and numbers[1] < per_layer:
            return numbers[0] * per_layer + numbers[1]
        raise UnreadableError(f"{shown(value)} holds no single layer number")

    def convert(value: Any) -> int:
        if not isinstance(value, str):
            raise UnreadableError(f"{shown(value)} holds no single layer number")
        # A text of a class of its own is not kept under a name that it may change.
        return of_text(value) if type(value) is str else of_text.__wrapped__(value)

    return convert


_ACTIVATIONS = {
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_python": "gelu",
    "relu_squared": "relu2",
    # Of torch and of transformers: activations.py
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "ReLUSquaredActivation": "relu2",
    "ReLU2": "relu2",
    "ReLU": "relu",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "QuickGELUActivation": "quick_gelu",
    "XIELUActivation": "xielu",
    "BloomGelu": "gelu_tanh",
    # Of the engines: layers/activation.py in vLLM and SGLang, model_ops/activation.py and models/kimi_k3.py in ATOM
    "SiluAndMul": "silu",
    "SituAndMul": "situ",
    "SwigluStepAndMul": "swiglu_step",
    "NewGELU": "gelu_tanh",
    "FastGELU": "gelu_tanh",
    "QuickGELU": "quick_gelu",
    "XIELU": "xielu",
}


_CLAMPED: dict[tuple[float, float], str] = {(1.0, 0.0): "silu", (1.702, 1.0): "swiglu_oai"}
"""Alpha and beta of vLLM's SiluAndMulWithClamp, which is x * sigmoid(alpha * x) * (up + beta)."""


def mlp_activation(value: Any) -> Any:
    """The activation that a name or a module means. One that is not known here is named, for the spec to refuse."""
    if isinstance(value, str):
        return _ACTIVATIONS.get(value, value)
    cls: Any = type(value)
    known, names = _activation_of(cls)
    if known is not None:
        return known
    if "GELU" in names or "GeluAndMul" in names:
        # vLLM's class of that name has no choice.
        how = value.approximate if hasattr(value, "approximate") else "none"
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(how, names[0])
    factors: Any = (value.alpha, value.beta)
    return _CLAMPED[factors] if factors in _CLAMPED else f"{names[0]} of {shown(value.alpha)}, {shown(value.beta)}"


@lru_cache(maxsize=512)
def _activation_of(cls: Hashable) -> tuple[str | None, tuple[str, ...]]:
    """The activation that every module of this class is, or None where its attributes say it; the names of the class and its bases."""
    assert isinstance(cls, type)
    names = tuple(base.__name__ for base in cls.__mro__)
    if not {"GELU", "GeluAndMul", "SiluAndMulWithClamp"}.isdisjoint(names):
        return None, names
    return next((_ACTIVATIONS[name] for name in names if name in _ACTIVATIONS), names[0]), names


def _parent_name(value: Any) -> str:
    if not isinstance(value, str) or "." not in value:
        raise UnreadableError(f"{shown(value)} is not the dotted name of a layer")
    return "the layer " + value.rpartition(".")[0]


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "present": _present,
    "not": _negated,
    "rope_scaling": _rope_scaling,
    "rope_width": _rope_width,
    "none": _nothing,
    "length": _length,
    "inverse_root": _inverse_root,
    "window_before": _window_before,
    "name_index": _name_index(1),
    "name_index_of_pairs": _name_index(2),
    "parent_name": _parent_name,
}
"""`present`: whether it is set at all. `not`: a flag that means the opposite. `rope_scaling`: of a transformers config, the
factor on cos and sin. `none`: no matter what is there, it shows that the field is None (an MLA kernel has
no sliding window). `length`: how many a sequence holds (the decoder layers of a model). `inverse_root`: 1 over the square root,
as the softmax scale of a head's width. `window_before`: a sliding window
counted without the current token. `name_index`: the one number in a dotted layer name. `name_index_of_pairs`: the same
where each decoder layer holds two attentions (`model.layers.3.self_attn.1` is 7). `parent_name`: a dotted name without its
last part, in words."""
