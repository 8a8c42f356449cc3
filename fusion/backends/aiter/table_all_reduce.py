"""The all-reduces of AITER that layerfuse calls: methods of its communicator."""

from __future__ import annotations

from .conventions import Binding, Function
from .conventions import Convention as C  # noqa: N817 - it stands in front of every line below
from .releases import NEWEST, is_after

AR = "aiter.dist.device_communicators.custom_all_reduce:CustomAllreduce"

_HEAD = "inp, res_inp, *, res_out=, out="
_QUANT = f"{_HEAD}, scale_out=, w, eps, registered=, use_1stage=, post_per_token_quant="
_NORM = {
    "v0.1.6.post2": "inp, *, res_out=, out=, w, eps, registered=",
    "v0.1.7.post2": f"{_HEAD}, w, eps, registered=",
    "v0.1.10.post2": f"{_HEAD}, w, eps, registered=, use_1stage=",
    "v0.1.10.post3": _QUANT,
    "v0.1.16": f"{_QUANT}, out_hidden_dim=",
    "v0.1.17-rc0": f"{_QUANT}, out_hidden_dim=, gemma_norm=",
    "v0.1.17-longctx": f"{_QUANT}, out_hidden_dim=, gemma_norm=, emit_bf16=",
}
"""First release -> parameters of `fused_ar_rms`."""


def _norm(since: str, refused: str) -> tuple[Function, ...]:
    """`refused`: why the parameter lists from before `since` cannot be used."""
    known = tuple(C(first, text, refused=refused if is_after(since, first) else None) for first, text in _NORM.items())
    return (Function(f"{AR}.fused_ar_rms", known),)


_PER_GROUP = "inp, res_inp, *, w, eps, group_size=, registered=, use_1stage=, emit_bf16="
_GROUP = (
    Function(
        f"{AR}.fused_ar_rms_per_group_quant",
        (
            C("v0.1.14-rc0", _PER_GROUP, again=("v0.1.17-longctx", "v0.1.19.post1")),
            C("v0.1.17-rc0", f"{_PER_GROUP}, transpose_scale=", again=("v0.1.19.post2", NEWEST)),
        ),
    ),
)

ALL_REDUCE_BINDINGS: tuple[Binding, ...] = (
    Binding(
        name="all_reduce_add_rms_norm",
        calls="all_reduce.norm",
        functions=_norm("v0.1.7.post2", "it takes no residual"),
    ),
    Binding(
        name="all_reduce_add_rms_norm_pad",
        calls="all_reduce.norm_pad",
        functions=_norm("v0.1.16", "it does not pad: out_hidden_dim came with v0.1.16"),
    ),
    Binding(
        name="all_reduce_add_rms_norm_per_token_quant",
        calls="all_reduce.per_token",
        functions=_norm("v0.1.10.post3", "it does not quantise: post_per_token_quant came with v0.1.10.post3"),
    ),
    Binding(
        name="all_reduce_add_rms_norm_per_token_quant_with_norm",
        calls="all_reduce.per_token",
        functions=_norm(
            "v0.1.17-longctx", "it does not return the plain norm beside: emit_bf16 came with v0.1.17-longctx"
        ),
        keeps_norm=True,
    ),
    Binding(name="all_reduce_add_rms_norm_group_quant", calls="all_reduce.per_group", functions=_GROUP),
    Binding(
        name="all_reduce_add_rms_norm_group_quant_with_norm",
        calls="all_reduce.per_group",
        functions=_GROUP,
        keeps_norm=True,
    ),
)
