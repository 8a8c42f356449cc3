"""Inputs of the ops of an MLA decode layer, caches among guard bytes, and what they must hold, in float64."""

from __future__ import annotations

from typing import Any

import torch
from attrs import define, frozen

from layerfuse.fusion import backends
from layerfuse.fusion.ops.cache_layout import entry_width

GPU = torch.cuda.is_available()
FP8_STEP = 2**-3

GUARD = 0xA5
"""What every byte holds that nobody may write."""


@frozen
class Widths:
    """Columns of one layer's latents."""

    q: int = 96
    kv: int = 64
    rope: int = 16


DEEPSEEK = Widths(1536, 512, 64)
SMALL = Widths()


@define
class Guarded:
    """A cache in the middle of a buffer of guard bytes, with gaps between its entries and its pages."""

    buffer: torch.Tensor
    cache: torch.Tensor

    @classmethod
    def of(
        cls,
        form: str,
        widths: Widths,
        *,
        pages: int,
        page_size: int | None,
        dtype: torch.dtype,
        gap: int = 16,
        device: str,
    ) -> Guarded:
        """`page_size` None: no pages. `gap`: elements between entries, and as many between pages."""
        kind = {"plain": dtype, "fp8": torch.float8_e4m3fn, "fp8_ds_mla": torch.uint8}[form]
        width = entry_width(form, widths.kv, widths.rope)
        stride = width + gap
        page = stride * (page_size or 1) + (gap if page_size else 0)
        item = torch.empty(0, dtype=kind).element_size()
        buffer = torch.full(((page * pages + 64) * item,), GUARD, dtype=torch.uint8, device=device)
        elements = buffer.view(kind)
        if page_size is None:
            return cls(buffer, elements.as_strided((pages, width), (stride, 1), 32))
        return cls(buffer, elements.as_strided((pages, page_size, width), (page, stride, 1), 32))

    def entry(self, slot: int) -> torch.Tensor:
        """The bytes of a slot's entry, a view."""
        cache = self.cache if self.cache.dim() == 2 else self.cache[slot // self.cache.shape[1]]
        return cache[slot if self.cache.dim() == 2 else slot % cache.shape[0]].view(torch.uint8)

    @property
    def slots(self) -> int:
        """How many there are."""
        return int(self.cache.shape[:-1].numel())

    def unwritten(self, slots: list[int]) -> bool:
        """Whether all bytes outside these slots' entries still are guard bytes."""
        left = self.buffer.clone()
        inner = left.view(self.cache.dtype).as_strided(self.cache.shape, self.cache.stride(), 32)
        masked = Guarded(left, inner)
        for slot in slots:
            masked.entry(slot).fill_(GUARD)
        return bool((left == GUARD).all())


def latents(widths: Widths, tokens: int, dtype: torch.dtype, device: str, seed: int = 0) -> dict[str, Any]:
    """The first arguments of `mla_norm_rope_cache` by name: views of one down-projection, as layers have them."""
    generator = torch.Generator().manual_seed(seed)
    down = torch.randn(tokens, widths.q + widths.kv + widths.rope, generator=generator).to(dtype).to(device)
    q, kv, k_rope = down.split([widths.q, widths.kv, widths.rope], -1)
    weights = [(torch.rand(width, generator=generator) + 0.5).to(dtype).to(device) for width in (widths.q, widths.kv)]
    cos, sin = tables(64, widths.rope, device)
    return {
        "q": q,
        "kv": kv,
        "k_rope": k_rope,
        "q_weight": weights[0],
        "kv_weight": weights[1],
        "q_epsilon": 1e-6,
        "kv_epsilon": 1e-5,
        "cos": cos,
        "sin": sin,
        "positions": torch.randint(0, 64, (tokens,), generator=generator).to(device),
    }


def tables(
    positions: int, rope: int, device: str, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """One table as vLLM has it, cos and then sin, by its two halves."""
    frequencies = 1.0 / 10000 ** (torch.arange(0, rope, 2).double() / rope)
    angles = torch.arange(positions).double()[:, None] * frequencies
    both = torch.cat([angles.cos(), angles.sin()], -1).to(dtype).to(device)
    cos, sin = both.chunk(2, -1)
    return cos, sin


def normed(x: torch.Tensor, weight: torch.Tensor, epsilon: float, offset: float = 0.0) -> torch.Tensor:
    """In float64."""
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt() * (weight.double() + offset)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, pairs: str) -> torch.Tensor:
    """By complex numbers, in float64; x: (tokens, ..., width)."""
    wide = x.double()
    if pairs == "none":
        return wide
    both = wide.unflatten(-1, (2, -1)).transpose(-1, -2) if pairs == "halves" else wide.unflatten(-1, (-1, 2))
    shape = (x.shape[0], *[1] * (x.dim() - 2), -1)
    factor = torch.complex(cos[positions].double(), sin[positions].double()).view(shape)
    parts = torch.view_as_real(torch.view_as_complex(both.contiguous()) * factor)
    return parts.flatten(-2) if pairs == "interleaved" else parts.transpose(-1, -2).flatten(-2)


def entry_values(entry: torch.Tensor, form: str, widths: Widths, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """What a slot's bytes say, in float64: the latent and beside it the rope columns."""
    if form == "plain":
        return entry.view(dtype).double()
    if form == "fp8":
        return entry.view(torch.float8_e4m3fn).double() * scale
    values, scales, rope = entry.split([widths.kv, widths.kv // 32, 2 * widths.rope])
    factor = scales.clone().view(torch.float32).double().repeat_interleave(128)
    return torch.cat([values.view(torch.float8_e4m3fn).double() * factor, rope.clone().view(torch.bfloat16).double()])


def assert_fp8(got: torch.Tensor, wanted: torch.Tensor, small: float) -> None:
    """Within one rounding to e4m3. Triton's interpreter drops the carry of a value that rounds up to a power of two."""
    wrong = (got - wanted).abs() > wanted.abs() * FP8_STEP + small
    if not GPU and backends.wanted_for("mla_query_concat") == "triton":
        assert wrong.double().mean() < 0.2
        got, wanted = got[wrong] * 2, wanted[wrong]
    torch.testing.assert_close(got, wanted, rtol=FP8_STEP, atol=small, equal_nan=True)
