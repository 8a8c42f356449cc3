"""What AITER must give for the norms and gated activations, in layerfuse's own plain torch, at small sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from check_tools import EPSILON, FP8, LEADING, pair, random, same, same_quantised, same_static, weight
from torch import Tensor

from layerfuse.fusion.ops.norm import normalise, normalise_wide
from layerfuse.fusion.ops.quantisation import quantise

WIDTH = 384
"""No power of two: one scale for such a row is where Triton's block is wider than the row."""

SCALE = torch.tensor([0.02])
LAYOUTS = ((64, False), (64, True))
INFINITY = float("inf")


def rms_norm(call: Callable[..., Any], offset: float = 0.0) -> None:
    for leading in LEADING:
        x, _ = pair(*leading)
        same(call(x, weight(256), EPSILON, offset), normalise(x, weight(256), EPSILON, offset))


def add_rms_norm(call: Callable[..., Any], offset: float = 0.0) -> None:
    for leading in LEADING:
        x, residual, wide = _added(*leading)
        out, residual_out = call(x, residual, weight(WIDTH), EPSILON, offset)
        same(residual_out, wide.to(x.dtype))
        same(out, normalise_wide(wide, weight(WIDTH).float(), EPSILON, offset).to(x.dtype))


def add_rms_norm_pad(call: Callable[..., Any]) -> None:
    for leading in LEADING:
        for padded in (WIDTH, 500):
            x, residual, wide = _added(*leading)
            out, residual_out = call(x, residual, weight(WIDTH), EPSILON, 0.0, padded)
            same(residual_out, wide.to(x.dtype))
            normed = normalise_wide(wide, weight(WIDTH).float(), EPSILON).to(x.dtype)
            same(out, torch.nn.functional.pad(normed, (0, padded - WIDTH)))


def _added(*leading: int) -> tuple[Tensor, Tensor, Tensor]:
    """x and a residual, rows apart, and their sum in float32."""
    x, _ = pair(*leading, q=WIDTH)
    residual = random(*leading, WIDTH + 8, seed=2)[..., :WIDTH]
    return x, residual, x.float() + residual.float()


def norm_quant(call: Callable[..., Any], op: str, offset: float = 0.0) -> None:
    """Each of the twelve norms that quantise to fp8, told apart by its name."""
    for leading in LEADING:
        for group, columns in LAYOUTS if "group" in op else ((None, False),):
            x, residual, wide = _added(*leading)
            if not op.startswith("add_"):
                wide = x.float()
            given = (residual,) if op.startswith("add_") else ()
            options = (SCALE, FP8) if "static" in op else (FP8, False)
            if group is not None:
                options = (FP8, group, columns, False, False)
            found = call(x, *given, weight(WIDTH), EPSILON, offset, *options)
            results = list(found if isinstance(found, tuple) else (found,))
            normed = normalise_wide(wide, weight(WIDTH).float(), EPSILON, offset)
            if "static" in op:
                same_static(results.pop(0), normed, SCALE)
            else:
                same_quantised((results.pop(0), results.pop(0)), normed, group, columns)
            if op.endswith("_with_norm"):
                same(results.pop(0), normed.to(x.dtype))
            if given:
                same(results.pop(0), wide.to(x.dtype))
            assert not results


def mla_dual_rms_norm(call: Callable[..., Any]) -> None:
    for leading in LEADING:
        q, kv = pair(*leading)
        out, kv_out = call(q, kv, weight(256), weight(128), EPSILON, 1e-6, 0.0, 0.0)
        same(out, normalise(q, weight(256), EPSILON))
        same(kv_out, normalise(kv, weight(128), 1e-6))


def dual_quant(call: Callable[..., Any], op: str, offset: float = 0.0) -> None:
    """Each of the six norms of two latents that quantise the first."""
    for leading in LEADING:
        for group, columns in LAYOUTS if "group" in op else ((None, False),):
            q, kv = pair(*leading, q=WIDTH, kv=512)  # a kv narrower than q is refused of the static form
            options = (SCALE, FP8) if "static" in op else (FP8, False)
            if group is not None:
                options = (FP8, group, columns, False, False)
            found = call(q, kv, weight(WIDTH), weight(512), EPSILON, 1e-6, offset, offset, *options)
            *results, kv_out = found
            same(kv_out, normalise(kv, weight(512), 1e-6, offset))
            normed = normalise_wide(q, weight(WIDTH), EPSILON, offset)
            if "static" in op:
                same_static(results.pop(0), normed, SCALE)
            else:
                same_quantised((results.pop(0), results.pop(0)), normed, group, columns)
            if op.endswith("_with_norm"):
                same(results.pop(0), normed.to(q.dtype))
            assert not results


# ---- gated


def _gated(x: Tensor, z: Tensor, by: Tensor, activation: str = "silu", before: bool = True) -> Tensor:
    gate = z.float().sigmoid() * (z.float() if activation == "silu" else 1.0)
    return normalise_wide(x, by, EPSILON) * gate if before else normalise_wide(x.float() * gate, by.float(), EPSILON)


def _heads(*leading: int) -> tuple[Tensor, Tensor]:
    whole = random(*leading, 3, 128 * 2 + 64)
    return whole[..., :128], whole[..., 128:256]


def gated_rms_norm_group_quant(call: Callable[..., Any], columns: bool = False) -> None:
    for leading in LEADING:
        x, z = _heads(*leading)
        found = call(x, z, weight(128), EPSILON, 0.0, "silu", True, FP8, 128, columns, False, False)
        same_quantised(found, _gated(x, z, weight(128)).flatten(-2), 128, columns)


def gated_group_quant_of_triton(call: Callable[..., Any]) -> None:
    """What only Triton's takes: groups within a head, sigmoid, a gate before the norm, scales that are powers of two."""
    for leading in LEADING:
        for activation in ("silu", "sigmoid"):
            for before in (False, True):
                for ue8m0 in (False, True):
                    x, z = _heads(*leading)
                    found = call(x, z, weight(128), EPSILON, 0.0, activation, before, FP8, 64, False, False, ue8m0)
                    values = _gated(x, z, weight(128), activation, before).flatten(-2)
                    same_quantised(found, values, 64, ue8m0=ue8m0)


def gated_rms_norm_per_token_quant(call: Callable[..., Any]) -> None:
    for leading in LEADING:
        x, z = _heads(*leading)
        found = call(x, z, weight(128), EPSILON, 0.0, "silu", True, FP8, False)
        same_quantised(found, _gated(x, z, weight(128)).flatten(-2), None)


def _halves(*leading: int, width: int) -> list[tuple[Tensor, Tensor]]:
    """A gate and an up that are the halves of one tensor, of a wider one, and of none."""
    whole, wider = random(*leading, 2 * width), random(*leading, 2 * width + 64)
    apart = random(*leading, width), random(*leading, width, seed=3)
    return [(whole[..., :width], whole[..., width:]), (wider[..., :width], wider[..., width : 2 * width]), apart]


def silu_values(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    return torch.nn.functional.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)


def silu_mul_static_quant(call: Callable[..., Any]) -> None:
    for leading in LEADING:
        for gate, up in _halves(*leading, width=WIDTH):
            same_static(call(gate, up, INFINITY, SCALE, FP8), silu_values(gate, up, INFINITY), SCALE)


def silu_mul_per_token_quant(call: Callable[..., Any], width: int = 256, limit: float = INFINITY) -> None:
    for leading in LEADING:
        for gate, up in _halves(*leading, width=width):
            same_quantised(call(gate, up, limit, FP8, False), silu_values(gate, up, limit), None)


def silu_mul_group_quant(
    call: Callable[..., Any], group: int = 128, limit: float = INFINITY, columns: bool = False
) -> None:
    for leading in LEADING:
        for gate, up in _halves(*leading, width=WIDTH):
            found = call(gate, up, limit, FP8, group, columns, False, False)
            same_quantised(found, silu_values(gate, up, limit), group, columns)


# ---- MX


def mxfp8_quant(call: Callable[..., Any], op: str, offset: float = 0.0) -> None:
    for leading in LEADING:
        x, residual, wide = _added(*leading)
        given = (residual,) if op.startswith("add_") else ()
        values, scales, *summed = call(x, *given, weight(WIDTH), EPSILON, offset)
        normed = normalise_wide(wide if given else x.float(), weight(WIDTH).float(), EPSILON, offset)
        expected, powers = quantise(normed, torch.float8_e4m3fn, 32, False, True)
        assert scales.dtype == torch.uint8
        torch.testing.assert_close(_powers(scales), powers, rtol=0, atol=0)
        torch.testing.assert_close(values.float(), expected.float(), rtol=0.07, atol=1e-6)
        for one in summed:
            same(one, wide.to(x.dtype))
        assert len(summed) == len(given)


MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def mxfp4_quant(call: Callable[..., Any], op: str) -> None:
    """Each value is the nearest that the format has under its scale, which keeps the largest below 7."""
    for leading in LEADING:
        x, residual, wide = _added(*leading)
        given = (residual,) if op.startswith("add_") else ()
        values, scales, *summed = call(x, *given, weight(WIDTH), EPSILON, 0.0)
        assert values.dtype == scales.dtype == torch.uint8
        assert values.shape == (*leading, WIDTH // 2)
        assert scales.shape == (*leading, WIDTH // 32)
        normed = normalise_wide(wide if given else x.float(), weight(WIDTH).float(), EPSILON)
        codes = torch.stack((values & 15, values >> 4), dim=-1).flatten(-2).long()
        decoded = MAGNITUDES[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
        scaled = (normed.unflatten(-1, (-1, 32)) / _powers(scales).unsqueeze(-1)).flatten(-2)
        nearest = (scaled.abs().unsqueeze(-1) - MAGNITUDES).abs().amin(-1)
        torch.testing.assert_close((scaled - decoded).abs(), nearest, rtol=0, atol=1e-4)
        if scaled.numel():
            largest = scaled.unflatten(-1, (-1, 32)).abs().amax(-1)
            assert largest.max() < 7
            assert largest.min() >= 3.5
        for one in summed:
            same(one, wide.to(x.dtype))
        assert len(summed) == len(given)


def _powers(exponents: Tensor) -> Tensor:
    return torch.exp2(exponents.float() - 127)


PLAIN = (rms_norm, add_rms_norm, add_rms_norm_pad, mla_dual_rms_norm)
GATED = (gated_rms_norm_group_quant, gated_rms_norm_per_token_quant)
SILU = (silu_mul_static_quant, silu_mul_per_token_quant, silu_mul_group_quant)
QUANTS = [f"{per}_quant{kept}" for per in ("static", "per_token", "group") for kept in ("", "_with_norm")]
NORM_CASES: dict[str, Callable[[Callable[..., Any]], None]] = {
    **{function.__name__: function for function in (*PLAIN, *GATED, *SILU)},
    **{
        op: functools.partial(norm_quant, op=op)
        for what in QUANTS
        for op in (f"rms_norm_{what}", f"add_rms_norm_{what}")
    },
    **{f"mla_dual_rms_norm_{what}": functools.partial(dual_quant, op=what) for what in QUANTS},
    **{op: functools.partial(mxfp8_quant, op=op) for op in ("rms_norm_mxfp8_quant", "add_rms_norm_mxfp8_quant")},
    **{op: functools.partial(mxfp4_quant, op=op) for op in ("rms_norm_mxfp4_quant", "add_rms_norm_mxfp4_quant")},
}
"""Op -> what it must give."""
