"""How a cache of latents lies in memory, as data: what an entry holds, in which form, and where the entry of a slot is.

An entry is that of one token: the normed key/value latent and beside it the rope columns of the key, already turned.

| form | dtype of the cache | an entry of 512 + 64 columns |
|---|---|---|
| `plain` | that of the latent | 576 values |
| `fp8` | torch.float8_e4m3fn, float8_e4m3fnuz | 576 values, divided by one static scale |
| `fp8_ds_mla` | torch.uint8 | 656 bytes: 512 e4m3fn values in groups of 128, 4 float32 scales, 64 bfloat16 values |

`fp8_ds_mla` is vLLM's name (csrc/cache_kernels.cu, for FlashMLA's sparse kernels). Its rope columns are not quantised.
A cache is (slots, entry), or (pages, page size, entry): the entry of slot s is then row s % page size of page s // page size.
Pages and slots may have any strides; what lies between entries is never written.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen

from .quantisation import LARGEST

DS_GROUP = 128
"""Columns that share a scale in `fp8_ds_mla`."""


@frozen(kw_only=True)
class CacheLayout:
    """Where the entries of one cache lie. Strides count elements of the cache's dtype."""

    form: str
    "`plain`, `fp8` or `fp8_ds_mla`."
    page_size: int
    "Slots of a page; 1 for a cache without pages."
    slots: int
    "How many entries the cache has."
    page_stride: int
    "From one page to the next; of a cache without pages, from one slot to the next."
    slot_stride: int
    "From one slot of a page to the next; 0 without pages."


def entry_width(form: str, latent: int, rope: int) -> int:
    """Elements of an entry: bytes, for `fp8_ds_mla`."""
    return latent + latent // DS_GROUP * 4 + 2 * rope if form == "fp8_ds_mla" else latent + rope


def layout_of(cache: Any, latent: int, rope: int, dtype: torch.dtype, name: str = "cache") -> CacheLayout:
    """The layout of a cache tensor.

    Args:
        cache: (slots, entry) or (pages, page size, entry), last stride 1.
        latent: columns of the latent.
        rope: columns of the rope key.
        dtype: of the latent.
        name: of the cache, in errors.

    Raises:
        ValueError: it can hold no such entries; the message says what was expected.
    """
    if cache.dim() not in (2, 3):
        raise ValueError(
            f"{name} must be (slots, entry) or (pages, page size, entry), got {tuple(cache.shape)}; a dimension of heads has one "
            "head: squeeze it"
        )
    form = _form(cache.dtype, dtype)
    if form is None:
        raise ValueError(
            f"{name} is {cache.dtype}: expected {dtype} as the latent, an fp8 dtype ({', '.join(map(str, LARGEST))}), or "
            "torch.uint8 for fp8_ds_mla; a cache of bytes that holds fp8 goes in as cache.view(torch.float8_e4m3fn)"
        )
    if form == "fp8_ds_mla" and latent % DS_GROUP:
        raise ValueError(f"{name}: fp8_ds_mla has a scale per {DS_GROUP} columns, and the latent has {latent}")
    width = entry_width(form, latent, rope)
    if cache.shape[-1] != width:
        raise ValueError(
            f"{name} has entries of {cache.shape[-1]} elements; {form} entries of {latent} + {rope} columns have {width}"
        )
    if cache.stride(-1) != 1:
        raise ValueError(f"{name} has stride {cache.stride(-1)} along its entries, and kernels write them in one piece")
    if form == "fp8_ds_mla" and (any(s % 4 for s in cache.stride()[:-1]) or cache.storage_offset() % 4):
        raise ValueError(f"{name}: entries of fp8_ds_mla hold float32 scales, so they must start on 4 bytes")
    if cache.dim() == 2:
        return CacheLayout(form=form, page_size=1, slots=cache.shape[0], page_stride=cache.stride(0), slot_stride=0)
    return CacheLayout(
        form=form,
        page_size=max(cache.shape[1], 1),
        slots=cache.shape[0] * cache.shape[1],
        page_stride=cache.stride(0),
        slot_stride=cache.stride(1),
    )


def _form(cache: torch.dtype, latent: torch.dtype) -> str | None:
    if cache in LARGEST:
        return "fp8"
    return "fp8_ds_mla" if cache == torch.uint8 else "plain" if cache == latent else None
