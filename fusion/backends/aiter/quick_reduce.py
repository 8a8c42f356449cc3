"""AITER's QuickReduce: the exchange of its buffers' handles, whose ABI changed at v0.1.19.post1, and its fused norm."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .errors import AiterCallError, AiterUnavailableError
from .resolved import Resolved
from .tensors import empty_like, flat_like, no_offset, packed_rows, same_shape, vector

Exchange = Callable[[Tensor], Sequence[Tensor]]

HANDLE_BYTES = 64
"""sizeof(hipIpcMemHandle_t)."""


def handles(found: Resolved) -> Callable[[int, Exchange], None]:
    """`qr_handles(fa, exchange)`: give every rank's handle to every rank, and open them.

    fa: what `init_custom_qr` returned. exchange: from this rank's handle, a uint8 CPU tensor of 64 bytes, to those of
    all ranks in order, as torch.distributed.all_gather_object gives them.

    Raises:
        AiterUnavailableError: when binding, where the two functions of the exchange do not fit each other.
    """
    get = found.function
    open_, open_names = found.beside["qr_open_handles"]
    by_pointer = "out_ptr" in found.names

    def as_tensors(fa: int, exchange: Exchange) -> None:
        open_(fa=fa, handles=list(exchange(get(fa=fa))))

    def as_pointers(fa: int, exchange: Exchange) -> None:
        handle = torch.zeros(HANDLE_BYTES, dtype=torch.uint8)
        get(fa=fa, out_ptr=handle.data_ptr())
        everyone = [each.contiguous() for each in exchange(handle)]  # kept alive until the pointers were read
        open_(fa=fa, handle_ptrs=[each.data_ptr() for each in everyone])

    if by_pointer is not ("handle_ptrs" in open_names):
        reason = "qr_get_handle and qr_open_handles are of different releases: one hands over pointers, one tensors"
        raise AiterUnavailableError(found.binding, reason)
    return as_pointers if by_pointer else as_tensors


def all_reduce_rms_norm(
    found: Resolved,
) -> Callable[[int, Tensor, Tensor, Tensor, float, float, int, bool], tuple[Tensor, Tensor]]:
    """`qr_all_reduce_rms_norm(fa, x, residual, weight, epsilon, weight_offset, quant_level, cast_bf2half)`.

    x: (..., width), float16 or bfloat16; residual: like x. quant_level: 0 none, 1 fp8, 2 int6, 3 int4 on the wire.
    Returns (norm of the sum, rounded sum).

    Raises:
        AiterCallError: any offset, another level, or a weight or residual that does not fit.
    """
    name, function = found.binding, found.function

    def call(
        fa: int,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        epsilon: float,
        weight_offset: float,
        quant_level: int,
        cast_bf2half: bool,
    ) -> tuple[Tensor, Tensor]:
        no_offset(name, weight_offset)
        if not 0 <= quant_level <= 3:
            raise AiterCallError(
                name, f"quant_level {quant_level}: 0 to 3; above them AITER does not quantise, without an error"
            )
        same_shape(name, "residual", residual, x)
        out, residual_out = empty_like(x), empty_like(x)
        if x.numel():
            function(
                fa=fa,
                inp=packed_rows(x),
                residual_inp=packed_rows(residual),
                residual_out=flat_like(residual_out),
                out=flat_like(out),
                weight=vector(name, "weight", weight, x),
                eps=epsilon,
                hidden_dim=x.shape[-1],
                quant_level=quant_level,
                cast_bf2half=cast_bf2half,
            )
        return out, residual_out

    return call
