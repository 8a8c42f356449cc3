"""`CustomAllreduce`: over the ranks of a gloo group, or without one over two ranks of which the other holds zeros."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from layerfuse.fusion.ops.norm import normalise_wide

from .behaviour import LARGEST, Call, body
from .misuse import SIXTEEN_BIT, StandInMisuse, check, expect, expect_like, expect_rows, expect_weight

CLASS = "aiter.dist.device_communicators.custom_all_reduce:CustomAllreduce"
MOST_BLOCKS = 80


@body(f"{CLASS}.__init__")
def construct(call: Call) -> None:
    """The attributes that others look at."""
    communicator, group = call["self"], call["group"]
    communicator._IS_CAPTURING = False
    communicator.disabled = True
    communicator.launches = []
    if group is not None:
        assert dist.get_backend(group) != dist.Backend.NCCL, "should be attached to a non-NCCL group"
        if dist.get_world_size(group) not in (2, 4, 6, 8):
            return
    communicator.disabled = False
    communicator.group = group
    communicator.device = torch.device(call["device"])
    communicator.fully_connected = True
    communicator.world_size = 2 if group is None else dist.get_world_size(group)
    communicator.rank = 0 if group is None else dist.get_rank(group)
    communicator.max_size = call["max_size"]
    communicator.enable_register_for_capturing = call["enable_register_for_capturing"]
    communicator._ptr = 1


def _weakly_contiguous(tensor: Tensor) -> bool:
    """Contiguous, or dense in some order of its dimensions."""
    storage = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
    return tensor.is_contiguous() or storage == tensor.numel() * tensor.element_size()


@body("CustomAllreduce.close")
def close(call: Call) -> None:
    """Gives the buffers back; whoever uses them afterwards reaches into freed memory."""
    if not call["self"].disabled:
        call["self"]._ptr = 0


@body("CustomAllreduce.should_custom_ar")
def should_custom_ar(call: Call) -> bool:
    """Whether the communicator takes this tensor, by its size."""
    communicator, tensor = call["self"], call["inp"]
    size = tensor.numel() * tensor.element_size()
    if communicator.disabled or size % 16 or not _weakly_contiguous(tensor):
        return False
    return bool(size <= (communicator.max_size / 2 if call["prefill_support"] else 8192 * 8192))


def _check_kernel(call: Call, x: Tensor, width: int, one_stage: bool, quantising: bool) -> None:
    """Whether a kernel of the release takes rows of this width, and this many."""
    pack, ranks = 16 // x.element_size(), call["self"].world_size
    rows = x.numel() // x.shape[-1]
    check(x.dtype in SIXTEEN_BIT or x.dtype == torch.float32, f"unsupported dtype {x.dtype}")
    check(rows * width % pack == 0, "fused allreduce rmsnorm: numel % pack_size must be 0")
    short = width % pack == 0 and width // pack <= 1024
    if one_stage and short:
        limited = call.until("v0.1.16.post6") and rows > MOST_BLOCKS
        check(not limited, f"allreduce_fusion_kernel_1stage: token_num {rows} exceeds {MOST_BLOCKS}")
        return
    expect(rows * width // pack % ranks == 0, f"packs that do not divide among {ranks} ranks are dropped")
    if quantising:
        expect(short, f"a width of {width} is only printed as not supported, and nothing is written")
        expect(width // pack % ranks == 0, f"a row's threads do not divide among {ranks} ranks")
        expect(
            width // pack % 32 == 0, f"{width // pack} threads: those that fill no warp of 32 are left out of the norm"
        )
        return
    check(width // pack >= 64, f"fused allreduce rmsnorm: n {width} too small")
    check(width <= 16384, f"fused allreduce rmsnorm: n {width} not supported")


def _sum(call: Call, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """The sum with the residual, in float32, over the columns that the weight covers."""
    width = weight.numel()
    expect_rows(x, "inp")
    expect(_weakly_contiguous(x), "inp is not contiguous, but is copied as if it were")
    check(x.shape[-1] >= width, "the last dim of inp must equal weight.numel()")
    expect_weight(weight, x[..., :width], "w")
    communicator = call["self"]
    expect(communicator._ptr != 0, "the communicator was closed, and its buffers freed")
    wide = x[..., :width].float()
    if communicator.group is not None:
        parts = [torch.empty_like(wide) for _ in range(communicator.world_size)]
        dist.all_gather(parts, wide.contiguous(), group=communicator.group)
        wide = torch.stack(parts).sum(0).to(x.dtype).float()
    expect(residual.shape == wide.shape, f"the residual {tuple(residual.shape)} does not fit {tuple(wide.shape)}")
    expect(residual.dtype == x.dtype, f"the residual is {residual.dtype}, but would be read as {x.dtype}")
    expect(residual.is_contiguous(), "the residual is not contiguous, but is read as if it were")
    return wide + residual.float()


def _check_registered(call: Call) -> None:
    """What is registered, and when: while a graph is captured, unless the communicator registers nothing."""
    communicator = call["self"]
    communicator.launches.append((call["use_1stage"], call["registered"]))
    registers = communicator._IS_CAPTURING and communicator.enable_register_for_capturing
    expect(registers or not call["registered"], "registered=True, but the input was never registered")


def _check_output(out: Tensor | None, like: Tensor, name: str) -> Tensor:
    """A given output, or a new one."""
    if out is None:
        return torch.empty_like(like, memory_format=torch.contiguous_format)
    expect_like(out, like, name)
    expect(out.is_contiguous(), f"{name} is not contiguous, but is written as if it were")
    return out


@body(f"{CLASS}.fused_ar_rms")
def fused_ar_rms(call: Call) -> tuple[Tensor, ...]:
    """(out, res_out); with a quantisation (fp8, res_out, scale[, bf16])."""
    x, weight = call["inp"], call["w"]
    quantising = call["post_per_token_quant"]
    _check_registered(call)
    total = _sum(call, x, weight, call["res_inp"])
    _check_kernel(call, x, weight.numel(), call["use_1stage"], quantising)
    res_out = _check_output(call["res_out"], total.to(x.dtype), "res_out").copy_(total)
    normed = normalise_wide(total, weight.float(), call["eps"], 1.0 if call.get("gemma_norm", False) else 0.0)
    if quantising:
        return _per_token(call, normed, res_out)
    expect(call["scale_out"] is None, "scale_out is given without post_per_token_quant: nothing is written to it")
    expect(not call.get("emit_bf16", False), "emit_bf16 is silently ignored without post_per_token_quant")
    padded = torch.nn.functional.pad(normed, (0, (call["out_hidden_dim"] or x.shape[-1]) - weight.numel()))
    out = _check_output(call["out"], padded.to(x.dtype), "out").copy_(padded)
    return out, res_out


def _quantise(values: Tensor, dtype: torch.dtype, group_size: int) -> tuple[Tensor, Tensor]:
    """fp8 and one scale per group. Zeros get a scale of 1: there is no smallest scale, unlike in the other kernels."""
    grouped, largest = values.unflatten(-1, (-1, group_size)), LARGEST[dtype]
    amax = grouped.abs().amax(-1)
    scales = torch.where(amax == 0, 1.0, amax / largest)
    return (grouped / scales.unsqueeze(-1)).clamp(-largest, largest).flatten(-2).to(dtype), scales


def _per_token(call: Call, normed: Tensor, res_out: Tensor) -> tuple[Tensor, ...]:
    expect(call["out_hidden_dim"] in (0, normed.shape[-1]), "out_hidden_dim is silently ignored here")
    values, scales = _quantise(normed, call.fp8, normed.shape[-1])
    out = _check_output(call["out"], values, "out")
    out.copy_(values)
    scale = _check_output(call["scale_out"], scales, "scale_out").copy_(scales)
    mirror = (normed.to(res_out.dtype),) if call.get("emit_bf16", False) else ()
    return out, res_out, scale, *mirror


def _check_group_size(group_size: Any, x: Tensor) -> None:
    check(isinstance(group_size, int), f"per-group quant group_size must be int, got {group_size!r}", TypeError)
    pack = 16 // x.element_size()
    threads = group_size // pack
    fits = group_size > 0 and group_size % pack == 0 and threads & (threads - 1) == 0 and threads <= 64
    check(fits and x.shape[-1] % group_size == 0, f"per-group quant: group_size={group_size} not supported", ValueError)


@body(f"{CLASS}.fused_ar_rms_per_group_quant")
def fused_ar_rms_per_group_quant(call: Call) -> tuple[Tensor, ...]:
    """(fp8, res_out, scales[, bf16]); transposed scales have strides (1, rows)."""
    x, weight, group_size = call["inp"], call["w"], call["group_size"]
    _check_group_size(group_size, x)
    _check_registered(call)
    check(x.shape[-1] == weight.numel(), "the last dim of inp must equal weight.numel()")
    total = _sum(call, x, weight, call["res_inp"])
    pack = 16 // x.element_size()
    check(weight.numel() % pack == 0 and weight.numel() // pack <= 1024, f"n {weight.numel()} not supported")
    _check_kernel(call, x, weight.numel(), call["use_1stage"], quantising=True)
    normed = normalise_wide(total, weight.float(), call["eps"])
    values, scales = _quantise(normed, call.fp8, group_size)
    if call.get("transpose_scale", False):
        if x.dim() != 2:
            raise StandInMisuse("transposed scales take two dimensions only")
        scales = scales.t().contiguous().t()
    mirror = (normed.to(x.dtype),) if call["emit_bf16"] else ()
    return values, total.to(x.dtype), scales, *mirror
