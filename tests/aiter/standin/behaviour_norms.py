"""The RMSNorm family of `aiter.ops.rmsnorm`, with the kernel that each release chooses and what that kernel assumes."""

from __future__ import annotations

import torch
from torch import Tensor

from layerfuse.fusion.ops.norm import normalise_wide
from layerfuse.fusion.ops.quantisation import quantise

from .behaviour import LARGEST, Call, body
from .behaviour_mx import exponents
from .misuse import (
    SIXTEEN_BIT,
    check,
    expect,
    expect_like,
    expect_rows,
    expect_unit_stride,
    expect_weight,
    is_power_of_two,
)

MODULE = "aiter.ops.rmsnorm"
WIDEST = 8192


def kernel_of(call: Call, x: Tensor, sensitive: int) -> str:
    """Which kernel a Python function of `aiter.ops.rmsnorm` chooses: `ck`, `hip` or `opus`."""
    if call.until("v0.1.17"):
        return "ck" if sensitive > 0 or x.shape[-1] > WIDEST else "hip"
    narrow = x.dim() == 2 and x.element_size() == 2 and x.shape[-1] <= WIDEST
    return "hip" if sensitive == 0 and narrow else "opus"


def _check_input(x: Tensor, weight: Tensor, kernel: str, **others: Tensor | None) -> None:
    """What the chosen kernel checks, and what it assumes, of its inputs and its 16-bit outputs."""
    given = {name: tensor for name, tensor in others.items() if tensor is not None}
    expect_rows(x, "input")
    if kernel == "opus":
        check(weight.dtype == x.dtype, "weight dtype must match input dtype", AssertionError)
        check(
            weight.is_contiguous() and weight.numel() == x.shape[-1], "weight must fit the hidden size", AssertionError
        )
        for name, tensor in given.items():
            check(tensor.is_contiguous() and tensor.dtype == x.dtype, f"{name} must be contiguous", AssertionError)
        if "residual_in" in given and x.dim() > 2:
            rows = x.is_contiguous() or x.stride() == x.flatten(0, -2).unflatten(0, x.shape[:-1]).stride()
            expect(rows, "input's rows are not evenly apart, but are read by one stride")
        return
    check(x.dtype in SIXTEEN_BIT, f"not support input type: {x.dtype}")
    if kernel == "hip":
        expect(x.dim() == 2, f"input has {x.dim()} dimensions: the kernel takes size(1) for the width")
        check(x.shape[1] <= WIDEST, f"not support n: {x.shape[1]}")
    elif x.dim() != 2:
        expect(x.is_contiguous(), "input of more than two dimensions must be contiguous: only stride(0) is read")
    expect_unit_stride(input=x)
    expect_weight(weight, x, "weight")
    for name, tensor in given.items():
        expect_like(tensor, x, name)


def _normed(x: Tensor, weight: Tensor, epsilon: float, gemma: bool, sensitive: int) -> Tensor:
    """The norm before its last rounding; T5-like rounding rounds once before the weight."""
    offset = 1.0 if gemma else 0.0
    if not sensitive:
        return normalise_wide(x.float(), weight.float(), epsilon, offset)
    unit = normalise_wide(x.float(), torch.ones_like(weight).float(), epsilon)
    return unit.to(weight.dtype).float() * (weight.float() + offset)


def _gemma(call: Call, kernel: str) -> bool:
    gemma: bool = call.get("gemma_norm", False)
    expect(not (gemma and kernel == "ck"), "gemma_norm is silently dropped where the CK kernel is chosen")
    return gemma


@body(f"{MODULE}:rmsnorm2d_fwd_with_add")
def rmsnorm2d_fwd_with_add(call: Call) -> None:
    """Writes the norm of the unrounded sum, and the rounded sum."""
    sensitive = call["use_model_sensitive_rmsnorm"]
    x, weight, out = call["input"], call["weight"], call["out"]
    kernel = kernel_of(call, x, sensitive)
    gemma, residual_in, residual_out = _gemma(call, kernel), call["residual_in"], call["residual_out"]
    _check_input(x, weight, kernel, out=out, residual_in=residual_in, residual_out=residual_out)
    total = x.float() + residual_in.float()
    residual_out.copy_(total)
    out.copy_(_normed(total, weight, call["epsilon"], gemma, sensitive))


def _per_thread(width: int, grouped_add: bool, arch: str) -> int:
    """Elements per thread, by width; the adding kernel with groups takes fewer, the fewer the more CUs there are."""
    for most, size in ((2048, 8), (4096, 16), (6144, 24)):
        if width <= most:
            return size
    return 8 if grouped_add and arch in ("gfx942", "gfx950") else 32


def _check_groups(call: Call, width: int, group_size: int, adding: bool) -> None:
    per_thread = _per_thread(width, adding, call.arch)
    fits = group_size % per_thread == 0 and group_size <= 64 * per_thread
    check(fits, f"group_size not support: {group_size}")
    threads = group_size // per_thread
    check(is_power_of_two(threads), "reduce_thread_size is not power of 2")
    expect(width % group_size == 0, f"a width of {width} is no multiple of group_size {group_size}, which is unchecked")


def _store(call: Call, normed: Tensor, adding: bool) -> None:
    """Quantises to `out`, and writes scales flat: per row, or per group in either order."""
    out, scale, group_size, shuffle = (call[name] for name in ("out", "scale", "group_size", "shuffle_scale"))
    rows, width = normed.shape
    call.check_fp8(out)
    if out.dtype not in LARGEST:
        raise NotImplementedError(f"the stand-in does not quantise to {out.dtype}")
    expect(out.shape == normed.shape, f"out has shape {tuple(out.shape)}, but {tuple(normed.shape)} is written")
    expect_unit_stride(out=out)
    if group_size:
        _check_groups(call, width, group_size, adding)
    as_bytes = scale.element_size() == 1 and call.since("v0.1.17-longctx")
    check(not as_bytes or group_size != 0, "e8m0 byte scale requires group_size != 0")
    expect(as_bytes or scale.dtype == torch.float32, f"the scale is {scale.dtype}, but float32 is written")
    count = rows * (width // group_size if group_size else 1)
    expect(scale.is_contiguous() and scale.numel() == count, f"the scale has no {count} elements in a row")
    values, scales = quantise(normed, out.dtype, group_size or None, False, as_bytes)
    out.copy_(values)
    if as_bytes:
        scales = exponents(scales)
    scale.view(-1).copy_((scales.t() if shuffle else scales).reshape(-1))


@body(f"{MODULE}:rmsnorm_quant", f"{MODULE}:add_rmsnorm_quant")
def rmsnorm_quant(call: Call) -> None:
    """The HIP kernels themselves."""
    x, weight, adding = call["input"], call["weight"], call.name == "add_rmsnorm_quant"
    _check_input(x, weight, "hip", **{name: call[name] for name in ("residual_in", "residual_out") if adding})
    wide = x.float()
    if adding:
        wide = wide + call["residual_in"].float()
        call["residual_out"].copy_(wide)
    _store(call, _normed(wide, weight, call["epsilon"], _gemma(call, "hip"), 0), adding)
