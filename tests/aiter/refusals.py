"""Calls that AITER answers wrongly, fails on or does not know, and the releases of which that is true: by hand."""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
LAST = "v0.1.20.post1"
EVER = ("v0.1.5", LAST)


@frozen
class Case:
    """A kind of call, the releases that refuse it, and words of the reason."""

    binding: str
    call: dict[str, Any]
    words: str = ""
    releases: tuple[tuple[str, str], ...] = (EVER,)

    def __str__(self) -> str:
        said = ",".join(f"{k}={str(v).removeprefix('torch.')}" for k, v in self.call.items())
        return f"{self.binding}-{said}"


def _dual(**other: Any) -> dict[str, Any]:
    return {"dtype": BF16, "width": 1536, "kv_width": 512, **other}


def _quant(**other: Any) -> dict[str, Any]:
    return _dual(quant_dtype=E4M3, group_size=128, column_major=True, use_ue8m0=False, **other)


def _norm(**other: Any) -> dict[str, Any]:
    return {"dtype": BF16, "weight_dtype": BF16, "width": 7168, "weight_offset": 0.0, **other}


TAKEN = (
    Case("mla_dual_rms_norm", _dual(), releases=()),
    Case("mla_dual_rms_norm", _dual(dtype=FP16, width=8192), releases=()),
    Case("mla_dual_rms_norm_per_token_quant", _dual(quant_dtype=E4M3, use_ue8m0=False), releases=()),
    Case("mla_dual_rms_norm_group_quant", _quant(), releases=()),
    Case("mla_dual_rms_norm_group_quant", _dual(quant_dtype=E4M3, group_size=128) | {"width": 5120}, releases=()),
    Case("rms_norm", _norm(), releases=()),
    Case("add_rms_norm", _norm(width=12288), releases=()),
    Case("rms_norm_quant", {"dtype": BF16, "width": 7168, "quant_dtype": E4M3, "group_size": 128}, releases=()),
    Case("rms_norm_quant", {"dtype": BF16, "width": 5120, "quant_dtype": E4M3}, releases=()),
    Case("gated_rms_norm_group_quant", {"dtype": BF16, "head_dim": 128, "activation": "silu"}, releases=()),
    Case("triton_gated_rms_norm_quant", {"dtype": BF16, "width": 128, "activation": "sigmoid"}, releases=()),
    Case("triton_add_rms_norm_pad", {"has_residual": True}, releases=()),
    Case("mla_decode", {"dtype": BF16, "num_heads": 16, "has_plan": True, "max_seqlen_q": 4}, releases=()),
    Case("mla_metadata_info", {"num_heads": 16}, releases=()),
    Case("all_reduce_rms_norm", {"dtype": BF16, "width": 7168, "world_size": 8}, releases=()),
    Case("all_reduce_rms_norm_group_quant", {"dtype": BF16, "width": 7168, "group_size": 128}, releases=()),
    Case("qr_all_reduce_rms_norm", {"dtype": BF16, "width": 4096, "world_size": 4}, releases=()),
)
"""What no release that has the function refuses."""

REFUSED = (
    Case("mla_dual_rms_norm", _dual(dtype=FP32), "float16 and bfloat16 only"),
    Case("mla_dual_rms_norm", _dual(width=8200), "more than 8192"),
    Case("mla_dual_rms_norm", _dual(kv_width=9216), "more than 8192"),
    Case("mla_dual_rms_norm", _dual(width=1535), "multiple of 16 bytes"),
    Case("mla_dual_rms_norm", _dual(kv_width=516), "multiple of 16 bytes"),
    Case("mla_dual_rms_norm", _dual(weight_dtype=FP32), "another dtype than the activations"),
    Case("mla_dual_rms_norm_per_token_quant", _dual(quant_dtype=E4M3, use_ue8m0=True), "power-of-two scales"),
    Case("mla_dual_rms_norm_per_token_quant", _dual(quant_dtype=FNUZ), "another GPU"),
    Case("mla_dual_rms_norm_per_token_quant", _dual(quant_dtype=E4M3, arch="gfx1201"), "RDNA"),
    Case("mla_dual_rms_norm_group_quant", _quant() | {"use_ue8m0": True}, "power-of-two scales"),
    Case("mla_dual_rms_norm_group_quant", _quant() | {"quant_dtype": FNUZ}, "another GPU"),
    Case("mla_dual_rms_norm_group_quant", _quant() | {"width": 1504}, "do not divide the width"),
    Case("mla_dual_rms_norm_group_quant", _quant() | {"group_size": 256}, "32, 64 or 128"),
    Case("rms_norm", _norm(width=8200), "four parameters with five", (("v0.1.10.post1", "v0.1.10.post1"),)),
    Case("rms_norm", _norm(dtype=FP32, weight_dtype=FP32), "float16 and bfloat16 only", (("v0.1.5", "v0.1.17"),)),
    Case("rms_norm", _norm(dtype=torch.float64, weight_dtype=torch.float64), "float16"),
    Case("rms_norm", _norm(weight_dtype=FP32), "another dtype than the activations"),
    Case("rms_norm", _norm(weight_offset=1.0), "came with v0.1.17-rc0", (("v0.1.5", "v0.1.16.post6"),)),
    Case("rms_norm", _norm(weight_offset=0.5), "weight offset"),
    Case("rms_norm", _norm(weight_offset=1.0, width=12288)),
    Case("add_rms_norm", _norm(weight_offset=1.0), "came with v0.1.17-rc0", (("v0.1.5", "v0.1.16.post6"),)),
    Case("add_rms_norm", _norm(weight_offset=1.0, width=12288), "weight offset", (("v0.1.5", "v0.1.17"),)),
    Case("rms_norm_quant", {"dtype": BF16, "width": 12288, "quant_dtype": E4M3}, "more than 8192"),
    Case("rms_norm_quant", {"dtype": BF16, "width": 5120, "quant_dtype": E4M3, "group_size": 128}, "4097 to 6144"),
    Case("rms_norm_quant", {"dtype": BF16, "width": 6144, "quant_dtype": E4M3, "group_size": 32}, "4097 to 6144"),
    Case("add_rms_norm_quant", {"dtype": BF16, "width": 6144, "quant_dtype": E4M3, "group_size": 64}, "4097 to 6144"),
    Case("add_rms_norm_quant", {"dtype": BF16, "width": 1504, "quant_dtype": E4M3, "group_size": 128}, "do not divide"),
    Case("gated_rms_norm_group_quant", {"dtype": BF16, "head_dim": 64}, "not 128 wide"),
    Case("gated_rms_norm_group_quant", {"dtype": BF16, "group_size": 64}, "other than 128"),
    Case("gated_rms_norm_group_quant", {"dtype": BF16, "activation": "sigmoid"}, "other than silu"),
    Case("gated_rms_norm_per_token_quant", {"dtype": BF16, "num_heads": 129}, "more than 128 heads"),
    Case("triton_gated_rms_norm_quant", {"dtype": BF16, "activation": "relu"}, "without a word"),
    Case("triton_gated_rms_norm_quant", {"dtype": BF16, "width": 65536}, "64 KiB"),
    Case("triton_gated_rms_norm_quant", {"dtype": BF16, "width": 192, "group_size": 128}, "do not divide"),
    Case("triton_rms_norm", {"dtype": BF16, "weight_offset": 1.0}, "knows none"),
    Case("triton_rms_norm_group_quant", {"dtype": BF16, "group_size": 96}, "power of two"),
    Case("triton_rms_norm_group_quant", {"dtype": BF16, "quant_dtype": FNUZ}, "another GPU"),
    Case("triton_rms_norm_group_quant", {"dtype": BF16, "use_ue8m0": True}, "power-of-two scales"),
    Case("rms_norm_quant", {"dtype": BF16, "use_ue8m0": True}, "power-of-two scales"),
    Case("gated_rms_norm_group_quant", {"dtype": BF16, "use_ue8m0": True}, "power-of-two scales"),
    Case("triton_act_mul_group_quant", {"dtype": BF16, "width": 4095}, "odd width"),
    Case("triton_act_mul_group_quant", {"dtype": BF16, "activation": "relu"}, "other than silu, gelu"),
    Case("triton_add_rms_norm_pad", {"has_residual": False}, "no residual"),
    Case("mla_decode", {"dtype": BF16, "num_heads": 12}, "head counts"),
    Case("mla_decode", {"dtype": BF16, "num_heads": 64}, "other than 16 and 128", (("v0.1.5", "v0.1.6.post1"),)),
    Case("mla_decode", {"dtype": FP16, "num_heads": 16}, "float16"),
    Case("mla_decode", {"dtype": BF16, "num_heads": 256, "has_plan": True}, "128"),
    Case("mla_decode", {"dtype": FNUZ, "num_heads": 16}, "another GPU"),
    Case(
        *("mla_decode", {"dtype": BF16, "num_heads": 64, "has_plan": True, "max_seqlen_q": 2}),
        *("", (("v0.1.5", "v0.1.8"),)),
    ),
    Case("mla_metadata_info", {"num_heads": 24}, "multiple of 16", (("v0.1.6.post2", "v0.1.11.post1"),)),
    Case("mla_metadata_info", {"num_heads": 12}, "no multiple of"),
    Case("all_reduce_rms_norm", {"dtype": BF16, "width": 7168, "world_size": 6}, "2, 4 and 8"),
    Case("all_reduce_rms_norm", {"dtype": BF16, "width": 256, "use_1stage": False}, "1 to 32 KiB"),
    Case("all_reduce_rms_norm", {"dtype": BF16, "width": 7164}, "multiple of 16 bytes"),
    Case(
        *("all_reduce_rms_norm", {"dtype": BF16, "width": 7168, "weight_offset": 1.0}),
        *("v0.1.17-rc0", (("v0.1.12", "v0.1.16.post6"),)),
    ),
    Case("all_reduce_rms_norm", {"dtype": BF16, "width": 7168, "weight_offset": 0.5}, "weight offset"),
    Case("all_reduce_rms_norm", {"dtype": torch.float64}, "float16"),
    Case("all_reduce_rms_norm", {"dtype": BF16, "weight_dtype": FP32}, "another dtype"),
    Case("all_reduce_rms_norm_group_quant", {"dtype": FP32}, "float16 and bfloat16 only"),
    Case("all_reduce_rms_norm_group_quant", {"dtype": BF16, "width": 7168, "group_size": 1024}, "64 packs"),
    Case("all_reduce_rms_norm_group_quant", {"dtype": BF16, "width": 7200, "group_size": 128}, "do not divide"),
    Case("all_reduce_rms_norm_group_quant", {"dtype": BF16, "quant_dtype": FNUZ}, "another GPU"),
    Case("all_reduce_rms_norm_group_quant", {"dtype": BF16, "weight_offset": 1.0}, "knows none"),
    Case("all_reduce_rms_norm_group_quant", {"dtype": BF16, "width": 4608, "group_size": 96}, "power of two"),
    Case("all_reduce_rms_norm_group_quant", {"dtype": BF16, "width": 16384, "group_size": 128}, "8192"),
    Case(
        *("all_reduce_rms_norm_group_quant", {"dtype": BF16, "width": 7168, "group_size": 128, "column_major": True}),
        *("transpose_scale", (("v0.1.14-rc0", "v0.1.16.post6"), ("v0.1.17-longctx", "v0.1.19.post1"))),
    ),
    Case("qr_all_reduce_rms_norm", {"dtype": BF16, "width": 7168}, "powers of two"),
    Case("qr_all_reduce_rms_norm", {"dtype": BF16, "width": 2880}, "powers of two"),
    Case("qr_all_reduce_rms_norm", {"dtype": FP32, "width": 4096}, "float16 and bfloat16 only"),
    Case("qr_all_reduce_rms_norm", {"dtype": BF16, "width": 4096, "world_size": 6}, "2, 4 and 8"),
)
"""What is refused in these releases, and in no others that have the function."""
