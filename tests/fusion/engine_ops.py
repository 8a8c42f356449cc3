"""Ops of vLLM and SGLang under their real schemas, in plain torch: those that write into their arguments, and `op` for others.

Where an engine has defined an op itself, its own stays: the tests need what the graph says, and run it where it can run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerfuse.fusion.match.calls import find_op

_LIBRARIES: dict[str, torch.library.Library] = {}
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 224.0}


def op(
    schema: str, fake: Callable[..., Any] | None = lambda *_, **__: None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Defines the op that a function is in plain torch. A fake of None: the function is its own."""
    name = schema.partition("(")[0]
    space, short = name.split("::")

    def define(function: Callable[..., Any]) -> Callable[..., Any]:
        if find_op(name) is None:
            library = _LIBRARIES.setdefault(space, torch.library.Library(space, "FRAGMENT"))
            library.define(schema.replace(f"{space}::", ""))
            library.impl(short, function, "CPU" if fake else "CompositeExplicitAutograd")
            if fake:
                torch.library.register_fake(name, fake, lib=library)
        return function

    return define


def normed(x: Tensor, weight: Tensor, epsilon: float, offset: float = 0.0) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * (weight.float() + offset)


def _quantise(x: Tensor, values: Tensor, scales: Tensor, floor: float, largest: float, ue8m0: bool = False) -> None:
    grouped = x.float().unflatten(-1, (scales.shape[-1], -1))
    scale = (grouped.abs().amax(-1).clamp(min=floor)) / largest
    scale = torch.exp2(torch.ceil(torch.log2(scale))) if ue8m0 else scale
    values.copy_((grouped / scale.unsqueeze(-1)).clamp(-largest, largest).flatten(-2).to(values.dtype))
    scales.copy_(scale)


@op(
    "_C::per_token_group_fp8_quant(Tensor input, Tensor! output_q, Tensor! output_s, int group_size, float eps, "
    "float fp8_min, float fp8_max, bool scale_ue8m0, bool dummy_is_scale_transposed, bool dummy_is_tma_aligned) -> ()"
)
def per_token_group_fp8_quant(
    x: Tensor, values: Tensor, scales: Tensor, size: int, eps: float, low: float, high: float, ue8m0: bool, *_: bool
) -> None:
    _quantise(x, values, scales, eps, high, ue8m0)


@op("_C::dynamic_per_token_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale, Tensor? scale_ub) -> ()")
def dynamic_per_token_scaled_fp8_quant(values: Tensor, x: Tensor, scales: Tensor, bound: Tensor | None) -> None:
    _quantise(x, values, scales, 1 / 512, LARGEST[values.dtype])


@op("_C::static_scaled_fp8_quant(Tensor! result, Tensor input, Tensor scale, (int, int)? group_shape=None) -> ()")
def static_scaled_fp8_quant(values: Tensor, x: Tensor, scale: Tensor, shape: Any = None) -> None:
    largest = LARGEST[values.dtype]
    if scale.dim() == 2:
        scale = scale.repeat_interleave(x.shape[-1] // scale.shape[-1], -1)
    values.copy_((x.float() * scale.reciprocal()).clamp(-largest, largest).to(values.dtype))


@op("_C::rms_norm(Tensor! result, Tensor input, Tensor weight, float epsilon) -> ()")
def rms_norm(out: Tensor, x: Tensor, weight: Tensor, epsilon: float) -> None:
    out.copy_(normed(x, weight, epsilon))


@op("_C::fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor weight, float epsilon) -> ()")
def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> None:
    residual.add_(x)
    x.copy_(normed(residual, weight, epsilon))


@op(
    "_C::rms_norm_per_block_quant(Tensor! result, Tensor input, Tensor weight, Tensor! scale, float epsilon, "
    "Tensor? scale_ub, Tensor!? residual, int group_size, bool is_scale_transposed) -> ()"
)
def rms_norm_per_block_quant(
    values: Tensor, x: Tensor, weight: Tensor, scales: Tensor, epsilon: float, bound: Any, residual: Any, *_: Any
) -> None:
    if residual is not None:
        x = residual.add_(x)
    _quantise(normed(x, weight, epsilon), values, scales, 1 / 512, LARGEST[values.dtype])


@op(
    "_C::rms_norm_dynamic_per_token_quant(Tensor! result, Tensor input, Tensor weight, Tensor! scale, float epsilon, "
    "Tensor? scale_ub, Tensor!? residual) -> ()"
)
def rms_norm_dynamic_per_token_quant(
    values: Tensor, x: Tensor, weight: Tensor, scales: Tensor, epsilon: float, bound: Any, residual: Any
) -> None:
    rms_norm_per_block_quant(values, x, weight, scales, epsilon, bound, residual)


@op("_C::rms_norm_static_fp8_quant(Tensor! result, Tensor input, Tensor weight, Tensor scale, float epsilon) -> ()")
def rms_norm_static_fp8_quant(values: Tensor, x: Tensor, weight: Tensor, scale: Tensor, epsilon: float) -> None:
    static_scaled_fp8_quant(values, normed(x, weight, epsilon), scale)


@op("vllm::rocm_aiter_per_tensor_quant(Tensor! out, Tensor x, Tensor! scale, bool is_dynamic) -> ()")
def rocm_aiter_per_tensor_quant(values: Tensor, x: Tensor, scale: Tensor, dynamic: bool) -> None:
    if dynamic:
        scale.fill_(float(x.abs().max()) / LARGEST[values.dtype])
    static_scaled_fp8_quant(values, x, scale)


@op(
    "vllm_ir::fused_add_rms_norm(Tensor x, Tensor x_residual, Tensor? weight, float epsilon, int? variance_size=None) "
    "-> (Tensor, Tensor)",
    fake=lambda x, *_: (torch.empty_like(x), torch.empty_like(x)),
)
def ir_fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, size: Any = None) -> Any:
    total = x + residual
    return normed(total, weight, epsilon).to(x.dtype), total


def scale_buffer(rows: Any, groups: int, layout: str) -> Tensor:
    """Uninitialised scales as vLLM's `per_token_group_quant_fp8` lays them out."""
    if layout == "row":
        return torch.empty((rows, groups), dtype=torch.float32)
    if layout == "column":
        return torch.empty((groups, rows), dtype=torch.float32).permute(-1, -2)
    return torch.empty_strided((rows, groups), (1, -(rows // -4) * 4), dtype=torch.float32)


@op(
    "_C::rotary_embedding(Tensor positions, Tensor! query, Tensor!? key, int head_size, Tensor cos_sin_cache, bool is_neox, "
    "int rope_dim_offset=0, bool inverse=False) -> ()"
)
def rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor | None, size: int, table: Tensor, halves: bool, *_: Any
) -> None:
    cos, sin = table[positions].float().unsqueeze(1).chunk(2, -1)
    for x in (query,) if key is None else (query, key):
        rows = x.view(positions.shape[0], -1, size)
        first, second = rows.float().chunk(2, -1) if halves else (rows.float()[..., i::2] for i in (0, 1))
        parts = first * cos - second * sin, second * cos + first * sin
        rows.copy_(torch.cat(parts, -1) if halves else torch.stack(parts, -1).flatten(-2))


@op(
    "_C_cache_ops::concat_and_cache_mla(Tensor kv_c, Tensor k_pe, Tensor! kv_cache, Tensor slot_mapping, str kv_cache_dtype, "
    "Tensor scale, bool skip_scale=False) -> ()"
)
def concat_and_cache_mla(
    latent: Tensor, rope: Tensor, cache: Tensor, slots: Tensor, form: str, scale: Tensor, _: bool = False
) -> None:
    entries = torch.cat([latent, rope], -1)
    if form != "auto":
        entries = (entries.float() / scale).clamp(-448.0, 448.0)
    for entry, slot in zip(entries.to(cache.dtype), slots.tolist(), strict=True):
        if slot >= 0:
            cache[slot // cache.shape[1], slot % cache.shape[1]] = entry


@op(
    "vllm::unified_mla_kv_cache_update(Tensor kv_c_normed, Tensor k_pe, str layer_name, str kv_cache_dtype, Tensor k_scale) "
    "-> Tensor",
    fake=lambda latent, *_: latent.new_empty(0),
)
def unified_mla_kv_cache_update(latent: Tensor, _k: Tensor, _name: str, _form: str, _scale: Tensor) -> Tensor:
    return latent.new_empty(0)
