"""QuickReduce with one rank: handles in both forms of their exchange, the sum, and the sum with its norm."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from layerfuse.fusion.ops.norm import normalise_wide

from .behaviour import Call, body
from .misuse import SIXTEEN_BIT, check, expect, expect_bool, expect_int, expect_rows

MODULE = "aiter.ops.quick_all_reduce"
ADDRESS = 0x5152
HANDLE = bytes(range(64))
TILE = 256 * 8 * 16
MOST_BYTES = 2**31
POINTERS_SINCE = "v0.1.19.post1"
INT3_SINCE = "v0.1.17-longctx"


@body(f"{MODULE}:init_custom_qr")
def init_custom_qr(call: Call) -> int:
    """The address of the communicator."""
    expect_int(call["rank"], "rank")
    check(call["world_size"] in (2, 4, 8), "All Reduce not supported for this world_size", ValueError)
    return ADDRESS


def _communicator(call: Call) -> None:
    expect(call["fa"] == ADDRESS, f"fa is {call['fa']!r}, no communicator's address")


@body(f"{MODULE}:qr_destroy")
def qr_destroy(call: Call) -> None:
    """Frees the communicator."""
    _communicator(call)


@body(f"{MODULE}:qr_max_size")
def qr_max_size(call: Call) -> int:
    """Bytes of the largest tensor."""
    return MOST_BYTES


@body(f"{MODULE}:qr_get_handle")
def qr_get_handle(call: Call) -> Tensor | None:
    """The 64 bytes of this rank: a CPU tensor, or since v0.1.19.post1 written to an address of the host."""
    _communicator(call)
    if not call.since(POINTERS_SINCE):
        return torch.frombuffer(bytearray(HANDLE), dtype=torch.uint8)
    expect_int(call["out_ptr"], "out_ptr")
    expect(call["out_ptr"] > 4096, f"out_ptr is {call['out_ptr']}, no address")
    ctypes.memmove(call["out_ptr"], HANDLE, len(HANDLE))
    return None


@body(f"{MODULE}:qr_open_handles")
def qr_open_handles(call: Call) -> None:
    """Everyone's 64 bytes: CPU tensors, or since v0.1.19.post1 addresses of the host."""
    _communicator(call)
    pointers = call.since(POINTERS_SINCE)
    handles = call["handle_ptrs" if pointers else "handles"]
    check(isinstance(handles, list) and bool(handles), "handles must be a list", TypeError)
    for handle in handles:
        check(isinstance(handle, int if pointers else Tensor), f"a handle is {type(handle).__name__}", TypeError)
        if pointers:
            expect(handle > 4096, f"a handle is {handle}, no address")
            found = ctypes.string_at(handle, len(HANDLE))
        else:
            expect(handle.device.type == "cpu" and handle.is_contiguous(), "a handle is read on the host, densely")
            found = bytes(handle.view(torch.uint8).tolist())
        expect(found[: len(HANDLE)] == HANDLE, "a handle is not what qr_get_handle gave")


def _check_level(call: Call, fused: bool) -> None:
    level = call["quant_level"]
    expect_int(level, "quant_level")
    expect_bool(call["cast_bf2half"], "cast_bf2half")
    most = 4 if call.since(INT3_SINCE) and not fused else 3
    expect(0 <= level <= most, f"quant_level {level} silently falls through to no quantisation")


def _check_pair(inp: Tensor, out: Tensor) -> None:
    check(inp.dtype == out.dtype, "inp/out dtype mismatch", ValueError)
    check(inp.numel() == out.numel(), "inp/out numel mismatch", ValueError)
    check(inp.dtype in SIXTEEN_BIT, "quick allreduce only supports float16 and bfloat16")
    expect(inp.is_contiguous() and out.is_contiguous(), "inp or out is not contiguous, but is taken as if it were")
    expect_rows(inp, "inp")


@body(f"{MODULE}:qr_all_reduce")
def qr_all_reduce(call: Call) -> None:
    """Writes the sum to `out`."""
    _communicator(call)
    _check_level(call, fused=False)
    _check_pair(call["inp"], call["out"])
    call["out"].view(-1).copy_(call["inp"].view(-1))


@body(f"{MODULE}:qr_all_reduce_rmsnorm")
def qr_all_reduce_rmsnorm(call: Call) -> None:
    """Writes the sum with the residual, rounded, and its norm."""
    _communicator(call)
    _check_level(call, fused=True)
    inp, weight, hidden = call["inp"], call["weight"], call["hidden_dim"]
    names = ("residual_inp", "residual_out", "out")
    check(all(call[name].dtype == inp.dtype for name in (*names, "weight")), "dtype mismatch", ValueError)
    check(all(call[name].numel() == inp.numel() for name in names), "numel mismatch", ValueError)
    check(weight.numel() == hidden and hidden > 0, "weight numel != hidden_dim", ValueError)
    check(inp.numel() % hidden == 0, "numel not divisible by hidden_dim", ValueError)
    for name in names:
        _check_pair(inp, call[name])
    expect(weight.is_contiguous(), "weight is not contiguous, but is read as if it were")
    check(TILE % (hidden * inp.element_size()) == 0, f"QR fused RMSNorm: rows of {hidden} do not divide the tile")
    total = inp.float().view(-1, hidden) + call["residual_inp"].float().view(-1, hidden)
    call["residual_out"].view(-1, hidden).copy_(total)
    call["out"].view(-1, hidden).copy_(normalise_wide(total, weight.float(), call["eps"]))
