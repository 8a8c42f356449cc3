"""How checkpoints hold linears: the names and sizes of a layer's, and the tensors of a quantised one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from ..adapters.errors import shown
from ..adapters.specs import GatedDeltaNetSpec, GatedMLPSpec, GQASpec, MLASpec, WeightSpec
from .safetensors import Tensor

Sizes: TypeAlias = tuple[int, int]
"""What a linear gives and what it reads."""
Form: TypeAlias = Mapping[str, Sizes]
"""Linears of a layer by their names, in one way to cut them."""
FLOATS = ("BF16", "F16", "F32")


def forms(spec: Any) -> tuple[list[Form], Form]:
    """The ways in which checkpoints cut a layer's linears, and those that some have beside them."""
    hidden = spec.hidden_size
    if isinstance(spec, MLASpec):
        values = spec.num_heads * spec.v_head_dim
        queries = spec.num_heads * spec.qk_head_dim
        form = {
            "kv_a_proj_with_mqa": (spec.kv_lora_rank + spec.qk_rope_head_dim, hidden),
            "kv_b_proj": (spec.num_heads * (spec.qk_nope_head_dim + spec.v_head_dim), spec.kv_lora_rank),
            "o_proj": (hidden, values),
        }
        if spec.q_lora_rank is None:
            form["q_proj"] = (queries, hidden)
        else:
            form |= {"q_a_proj": (spec.q_lora_rank, hidden), "q_b_proj": (queries, spec.q_lora_rank)}
        return [form], {"g_proj": (values, hidden)}
    if isinstance(spec, GQASpec):
        queries, values = spec.num_heads * spec.head_dim, spec.num_heads * spec.v_head_dim
        keys, kv_values = spec.num_kv_heads * spec.head_dim, spec.num_kv_heads * spec.v_head_dim
        out, of_keys, of_values = (
            {"o_proj": (hidden, values)},
            {"k_proj": (keys, hidden)},
            {"v_proj": (kv_values, hidden)},
        )
        if spec.shares_kv:  # some checkpoints hold what no layer reads
            return [out | {"q_proj": (queries, hidden)}], of_keys | of_values
        if spec.values_are_keys:
            return [out | of_keys | {"q_proj": (queries, hidden)}], {}
        cut = out | of_keys | of_values
        return [
            cut | {"q_proj": (queries, hidden)},
            cut | {"q_proj": (queries + values, hidden)},  # with the output's gate
            out | {"qkv_proj": (queries + keys + kv_values, hidden)},
        ], {"g_proj": (values, hidden)}
    if isinstance(spec, GatedDeltaNetSpec):
        keys, values = spec.num_k_heads * spec.head_k_dim, spec.num_v_heads * spec.head_v_dim
        qkv = {
            "q_proj": (keys, hidden),
            "k_proj": (keys, hidden),
            "v_proj": (values, hidden),
            "o_proj": (hidden, values),
        }
        gates = {"b_proj": (spec.num_v_heads, hidden)}
        whole, out = {"in_proj_qkv": (2 * keys + values, hidden)}, {"out_proj": (hidden, values)}
        return [
            out | {"in_proj_qkvz": (2 * keys + 2 * values, hidden), "in_proj_ba": (2 * spec.num_v_heads, hidden)},
            out
            | whole
            | {"in_proj_z": (values, hidden)}
            | dict.fromkeys(("in_proj_a", "in_proj_b"), (spec.num_v_heads, hidden)),
            qkv | gates | {"g_proj": (values, hidden), "a_proj": (spec.num_v_heads, hidden)},  # Olmo
            qkv
            | gates
            | {"f_a_proj": (spec.head_v_dim, hidden), "f_b_proj": (keys, spec.head_v_dim)}
            | {"g_a_proj": (spec.head_v_dim, hidden), "g_b_proj": (values, spec.head_v_dim)},  # Kimi
        ], {}
    if isinstance(spec, GatedMLPSpec):
        inner = spec.intermediate_size
        down = {"down_proj": (hidden, inner)}
        split = down | {"gate_proj": (inner, hidden), "up_proj": (inner, hidden)}
        return [split, down | {"gate_up_proj": (2 * inner, hidden)}], {}
    return [], {}


def in_words(held: Mapping[str, Tensor]) -> str:
    """These tensors of one module."""
    return ", ".join(f"{what} {tensor}".strip() for what, tensor in held.items()) or "nothing"


def held_as(held: Mapping[str, Tensor], weight: WeightSpec | None, sizes: Sizes) -> Iterator[str]:
    """What in these tensors of a linear is not as it is declared."""
    given, read = sizes
    if weight is None:
        found = held.get("weight")
        if found is None or found.dtype not in FLOATS or "weight_scale_inv" in held or "weight_scale" in held:
            yield f"expected a weight that is not quantised, got {in_words(held)}"
        elif found.shape != sizes:
            yield f"expected a weight {list(sizes)}, got {found}"
        return
    rows, columns = weight.block or (1, 1)
    scales: dict[str, list[tuple[int, ...]]] = {
        "tensor": [(), (1,)],
        "channel": [(given, 1), (given,)],
        "plain": [],
    }
    groups = math.ceil(given / rows), math.ceil(read / columns)
    scale_shapes = scales.get(weight.scheme, [groups])
    stored: dict[str, list[tuple[str, str, tuple[int, ...]]]] = {
        "float8_e4m3fn": [("weight", "F8_E4M3", sizes)],
        "int8": [
            ("weight", "I8", sizes),
            ("weight_packed", "I32", (given, math.ceil(read / 4))),
            ("qweight", "I32", (math.ceil(read / 4), given)),  # GPTQ
        ],
        "int4": [
            ("weight_packed", "I32", (given, math.ceil(read / 8))),
            ("qweight", "I32", (math.ceil(read / 8), given)),  # GPTQ
            ("qweight", "I32", (read, math.ceil(given / 8))),  # AWQ
        ],
        "float4_e2m1fn": [
            ("weight_packed", "U8", (given, math.ceil(read / 2))),
            ("weight", "U8", (given, math.ceil(read / 2))),  # ModelOpt
        ],
    }
    ways = stored.get(weight.dtype)
    if ways is None:
        yield f"how a checkpoint holds {shown(weight.dtype)} is not known"
        return
    if not any(what in held and (held[what].dtype, held[what].shape) == (dtype, shape) for what, dtype, shape in ways):
        expected = " or ".join(f"{what} {dtype} {list(shape)}" for what, dtype, shape in ways)
        yield f"expected {expected}, got {in_words(held)}"
        return
    if "qweight" in held:
        scale, scale_shapes = held.get("scales"), [groups[::-1]]
    else:
        scale = held.get("weight_scale_inv") or held.get("weight_scale")
    if scale_shapes and (scale is None or scale.shape not in scale_shapes):
        yield f"expected scales {' or '.join(str(list(shape)) for shape in scale_shapes)}, got {scale or 'none'}"
