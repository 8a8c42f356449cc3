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
    expect_bool,
    expect_int,
    expect_like,
    expect_rows,
    expect_unit_stride,
    expect_weight,
)

MODULE = "aiter.ops.rmsnorm"
WIDEST = 8192


def kernel_of(call: Call, x: Tensor, sensitive: int) -> str:
    """Which kernel a Python function of `aiter.ops.rmsnorm` chooses: `ck`, `hip` or `opus`."""
    if call.until("v0.1.10") or (call.release == "v0.1.10.post2" and "with_add" in call.name):
        return "ck"
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


def _model_sensitive(call: Call) -> int:
    value: int = call["use_model_sensitive_rmsnorm"]
    expect_int(value, "use_model_sensitive_rmsnorm")
    return value


def _gemma(call: Call, kernel: str) -> bool:
    gemma: bool = call.get("gemma_norm", False)
    expect_bool(gemma, "gemma_norm")
    expect(not (gemma and kernel == "ck"), "gemma_norm is silently dropped where the CK kernel is chosen")
    return gemma


@body(f"{MODULE}:rms_norm", f"{MODULE}:rmsnorm2d_fwd")
def rms_norm(call: Call) -> Tensor:
    """Allocates its result."""
    x, sensitive = call["input"], _model_sensitive(call)
    kernel = kernel_of(call, x, sensitive)
    if call.name == "rms_norm" and call.until("v0.1.17"):
        kernel = "ck"
    if call.name == "rmsnorm2d_fwd" and kernel == "ck" and call.release == "v0.1.10.post1":
        raise TypeError("rmsnorm2d_fwd_ck() takes 4 positional arguments but 5 were given")
    _check_input(x, call["weight"], kernel)
    out = torch.empty_like(x)
    check(kernel != "opus" or out.is_contiguous(), "rms_norm_opus: bad out", AssertionError)
    return out.copy_(_normed(x, call["weight"], call["epsilon"], False, sensitive))


def _with_add(call: Call, kernel: str, gemma: bool, sensitive: int) -> None:
    x, weight, out = call["input"], call["weight"], call["out"]
    residual_in, residual_out = call["residual_in"], call["residual_out"]
    _check_input(x, weight, kernel, out=out, residual_in=residual_in, residual_out=residual_out)
    total = x.float() + residual_in.float()
    residual_out.copy_(total)
    out.copy_(_normed(total, weight, call["epsilon"], gemma, sensitive))


@body(f"{MODULE}:rmsnorm2d_fwd_with_add")
def rmsnorm2d_fwd_with_add(call: Call) -> None:
    """Writes the norm of the unrounded sum, and the rounded sum."""
    sensitive = _model_sensitive(call)
    kernel = kernel_of(call, call["input"], sensitive)
    _with_add(call, kernel, _gemma(call, kernel), sensitive)


@body(f"{MODULE}:rmsnorm")
def rmsnorm(call: Call) -> None:
    """The HIP kernel itself."""
    x, weight = call["input"], call["weight"]
    _check_input(x, weight, "hip", out=call["out"])
    call["out"].copy_(_normed(x, weight, call["epsilon"], _gemma(call, "hip"), 0))


@body(f"{MODULE}:add_rmsnorm")
def add_rmsnorm(call: Call) -> None:
    """The HIP kernel itself, with the residual."""
    _with_add(call, "hip", _gemma(call, "hip"), 0)


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
    check(threads & (threads - 1) == 0, "reduce_thread_size is not power of 2")
    expect(width % group_size == 0, f"a width of {width} is no multiple of group_size {group_size}, which is unchecked")


def _store(call: Call, normed: Tensor, scale: Tensor, adding: bool, kernel: str) -> None:
    """Quantises to `out`, and writes scales flat: per row, or per group in either order."""
    out, group_size, shuffle = call["out"], call.get("group_size", 0), call.get("shuffle_scale", False)
    expect_int(group_size, "group_size")
    expect_bool(shuffle, "shuffle_scale")
    rows, width = normed.shape
    call.check_fp8(out)
    if out.dtype not in LARGEST:
        raise NotImplementedError(f"the stand-in does not quantise to {out.dtype}")
    expect(out.shape == normed.shape, f"out has shape {tuple(out.shape)}, but {tuple(normed.shape)} is written")
    expect_unit_stride(out=out)
    if kernel == "ck":
        check(group_size == 0 and not shuffle, "CK takes neither group_size nor shuffle_scale", AssertionError)
    if group_size:
        _check_groups(call, width, group_size, adding)
    as_bytes = scale.element_size() == 1 and call.since("v0.1.17-longctx") and kernel == "hip"
    check(not as_bytes or group_size != 0, "e8m0 byte scale requires group_size != 0")
    expect(as_bytes or scale.dtype == torch.float32, f"the scale is {scale.dtype}, but float32 is written")
    count = rows * (width // group_size if group_size else 1)
    expect(scale.is_contiguous() and scale.numel() == count, f"the scale has no {count} elements in a row")
    values, scales = quantise(normed, out.dtype, group_size or None, False, as_bytes)
    out.copy_(values)
    if as_bytes:
        scales = exponents(scales)
    scale.view(-1).copy_((scales.t() if shuffle else scales).reshape(-1))


def _dynamic(call: Call, scale: Tensor, kernel: str, sensitive: int, adding: bool) -> None:
    x, weight = call["input"], call["weight"]
    if kernel == "opus":
        check(x.is_contiguous(), "input must be contiguous", AssertionError)
    residuals = {name: call[name] for name in ("residual_in", "residual_out") if adding}
    _check_input(x, weight, kernel, **residuals)
    expect(x.dim() == 2, "the stand-in quantises two dimensions only")
    wide = x.float()
    if adding:
        wide = wide + call["residual_in"].float()
        call["residual_out"].copy_(wide)
    normed = _normed(wide, weight, call["epsilon"], _gemma(call, kernel), sensitive)
    _store(call, normed, scale, adding, kernel)


@body(f"{MODULE}:rmsnorm2d_fwd_with_dynamicquant", f"{MODULE}:rmsnorm2d_fwd_with_add_dynamicquant")
def rmsnorm2d_fwd_with_dynamicquant(call: Call) -> None:
    """Per token, or per group where HIP's kernel is chosen."""
    sensitive = _model_sensitive(call)
    kernel = kernel_of(call, call["input"], sensitive)
    if kernel == "opus" and (call["group_size"] or call["shuffle_scale"]):
        check(
            call["input"].shape[-1] <= WIDEST, "group quantisation needs a hidden size of at most 8192", AssertionError
        )
        kernel = "hip"
    _dynamic(call, call["yscale"], kernel, sensitive, "with_add" in call.name)


@body(f"{MODULE}:rmsnorm_quant", f"{MODULE}:add_rmsnorm_quant")
def rmsnorm_quant(call: Call) -> None:
    """The HIP kernels themselves."""
    _dynamic(call, call["scale"], "hip", 0, call.name == "add_rmsnorm_quant")
