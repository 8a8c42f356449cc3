"""The all-reduces of AITER that layerfuse calls: methods of its communicator, and QuickReduce."""

from __future__ import annotations

from .conventions import Binding, Function
from .conventions import Convention as C  # noqa: N817 - it stands in front of every line below
from .releases import NEWEST

_AR_HEAD = "input, residual_inp, weight, eps"
AR = "aiter.dist.device_communicators.custom_all_reduce:CustomAllreduce"
QR = "aiter.ops.quick_all_reduce"

ALL_REDUCE_BINDINGS: tuple[Binding, ...] = (
    Binding(
        name="all_reduce_rms_norm",
        calls="all_reduce.rms_norm",
        functions=(
            Function(
                f"{AR}.custom_fused_ar_rms",
                (
                    C("v0.1.6.post2", "input, weight, eps", refused="it takes no residual"),
                    C("v0.1.7.post2", _AR_HEAD),
                    C("v0.1.10.post2", f"{_AR_HEAD}, use_1stage"),
                    C("v0.1.16", f"{_AR_HEAD}, use_1stage, out_hidden_dim="),
                    C("v0.1.17-rc0", f"{_AR_HEAD}, use_1stage, out_hidden_dim=, gemma_norm="),
                ),
            ),
        ),
    ),
    Binding(
        name="all_reduce_rms_norm_group_quant",
        calls="all_reduce.rms_norm_group_quant",
        functions=(
            Function(
                f"{AR}.custom_fused_ar_rms_per_group_quant",
                (
                    C(
                        "v0.1.14-rc0",
                        f"{_AR_HEAD}, group_size=, use_1stage=, emit_bf16=",
                        again=("v0.1.17-longctx", "v0.1.19.post1"),
                    ),
                    C(
                        "v0.1.17-rc0",
                        f"{_AR_HEAD}, group_size=, use_1stage=, emit_bf16=, transpose_scale=",
                        again=("v0.1.19.post2", NEWEST),
                    ),
                ),
            ),
        ),
    ),
    Binding(
        name="qr_handles",
        calls="quick_reduce.handles",
        functions=(Function(f"{QR}:qr_get_handle", (C("v0.1.5.post2", "fa"), C("v0.1.19.post1", "fa, out_ptr"))),),
        needs=(
            Function(
                f"{QR}:qr_open_handles", (C("v0.1.5.post2", "fa, handles"), C("v0.1.19.post1", "fa, handle_ptrs"))
            ),
        ),
    ),
    Binding(
        name="qr_all_reduce_rms_norm",
        calls="quick_reduce.all_reduce_rms_norm",
        functions=(
            Function(
                f"{QR}:qr_all_reduce_rmsnorm",
                (
                    C(
                        "v0.1.17-longctx",
                        "fa, inp, residual_inp, residual_out, out, weight, eps, hidden_dim, quant_level, cast_bf2half=",
                    ),
                ),
            ),
        ),
    ),
)
