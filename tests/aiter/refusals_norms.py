"""The same for the norms and gated activations, by hand."""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
FIRST, LAST = "v0.1.16.post3", "v0.1.20.post1"
EVER = (FIRST, LAST)


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
    return {"dtype": BF16, "width": 1536, "kv_width": 512, "weight_offset": 0.0, "kv_weight_offset": 0.0, **other}


def _norm(**other: Any) -> dict[str, Any]:
    return {"dtype": BF16, "weight_dtype": BF16, "width": 7168, "weight_offset": 0.0, **other}


def _fp8(**other: Any) -> dict[str, Any]:
    return {"quant_dtype": E4M3, "use_ue8m0": False, **other}


def _groups(size: int = 128, **other: Any) -> dict[str, Any]:
    return _fp8(group_size=size, column_major=True, tma_aligned=False, **other)


def _rows(**other: Any) -> dict[str, Any]:
    return _groups() | {"column_major": False, **other}


def _heads(**other: Any) -> dict[str, Any]:
    return _norm(width=128, activation="silu", norm_before_gate=True, **other)


def _silu(**other: Any) -> dict[str, Any]:
    return {"dtype": BF16, "width": 2048, "limit": NONE, **other}


NONE = float("inf")
TOKEN, GROUP, STATIC = "rms_norm_per_token_quant", "rms_norm_group_quant", "rms_norm_static_quant"
KEPT = "add_rms_norm_group_quant_with_norm"
DUAL, DUAL_TOKEN, DUAL_GROUP = (f"mla_dual_rms_norm{what}" for what in ("", "_per_token_quant", "_group_quant"))
DUAL_STATIC = "mla_dual_rms_norm_static_quant"
GATED, GATED_TOKEN = "gated_rms_norm_group_quant", "gated_rms_norm_per_token_quant"
SILU, SILU_TOKEN, SILU_STATIC = (f"silu_mul_{what}_quant" for what in ("group", "per_token", "static"))
MXFP8, MXFP4 = "rms_norm_mxfp8_quant", "rms_norm_mxfp4_quant"
BEFORE_GEMMA = ((FIRST, "v0.1.16.post6"),)

NORMS_TAKEN = tuple(
    Case(binding, call, releases=())
    for binding, call in (
        (DUAL, _dual()),
        (DUAL, _dual(dtype=FP16, width=8192)),
        (DUAL_TOKEN, _dual(**_fp8())),
        (DUAL_GROUP, _dual(**_groups())),
        (DUAL_GROUP, _dual(**_groups(), weight_offset=1.0, kv_weight_offset=1.0)),
        (DUAL_GROUP, _dual(**_groups(), arch="gfx950") | {"width": 5120}),
        (f"{DUAL_GROUP}.triton", _dual(**_groups(), arch="gfx1201", dtype=FP32) | {"width": 1504}),
        (DUAL_STATIC, _dual(width=512, quant_dtype=E4M3)),
        ("add_rms_norm", _norm()),
        ("add_rms_norm.triton", _norm(dtype=FP32, width=7167)),
        ("add_rms_norm", _norm(width=12288)),
        ("add_rms_norm.triton", _norm(weight_dtype=FP32, width=12288)),
        ("add_rms_norm_pad", _norm(width=2880)),
        (GROUP, _norm(**_groups())),
        (TOKEN, _norm(**_fp8(), width=5120)),
        (f"{GROUP}.latents", _norm(**_groups(), width=5120)),
        (f"{KEPT}.latents", _norm(**_groups(), width=6144)),
        (f"{GROUP}.triton", _norm(**_groups(), width=16384, weight_dtype=FP32)),
        (f"{TOKEN}.triton", _norm(**_fp8(), width=16384)),
        (STATIC, _norm(quant_dtype=E4M3)),
        (GATED, _heads(**_groups())),
        (f"{GATED}.triton", _heads(**_rows(group_size=64, use_ue8m0=True)) | {"activation": "sigmoid"}),
        (SILU, _silu(**_groups(), width=8192)),
        (SILU, _silu(**_groups(), limit=7.0)),
        (SILU, _silu(**_groups(), limit=7.00390625, dtype=FP16)),
        (f"{SILU}.clamp", _silu(**_groups(), limit=7.1)),
        (f"{SILU}.clamp", _silu(**_groups(64))),
        (f"{SILU}.triton", _silu(**_rows())),
        (f"{SILU_TOKEN}.clamp", _silu(**_fp8(), width=5120, limit=7.1)),
        (f"{SILU_TOKEN}.triton", _silu(**_fp8())),
        (SILU_STATIC, _silu(quant_dtype=E4M3, width=2050)),
        (MXFP8, _norm()),
        (f"{MXFP8}.triton", _norm(width=5120)),
        (MXFP4, _norm(width=5120)),
    )
)
"""What no release that has the function refuses."""

NORMS_REFUSED = (
    Case(DUAL, _dual(dtype=FP32), "float16 and bfloat16 only"),
    Case(DUAL, _dual(width=8200), "more than 8192"),
    Case(DUAL, _dual(kv_width=9216), "more than 8192"),
    Case(DUAL, _dual(width=1535), "multiple of 16 bytes"),
    Case(DUAL, _dual(kv_width=516), "multiple of 16 bytes"),
    Case(DUAL, _dual(weight_dtype=FP32), "another dtype than the activations"),
    Case(DUAL, _dual(kv_weight_offset=1.0), "knows none"),
    Case(DUAL_TOKEN, _dual(**_fp8(use_ue8m0=True)), "power-of-two scales"),
    Case(DUAL_TOKEN, _dual(quant_dtype=FNUZ), "another GPU"),
    Case(DUAL_TOKEN, _dual(quant_dtype=E4M3, arch="gfx1201"), "RDNA"),
    Case(DUAL_TOKEN, _dual(weight_offset=1.0, quant_dtype=E4M3), "that differ"),
    Case(DUAL_GROUP, _dual(**_groups()) | {"use_ue8m0": True}, "power-of-two scales"),
    Case(DUAL_GROUP, _dual(**_groups()) | {"quant_dtype": FNUZ}, "another GPU"),
    Case(DUAL_GROUP, _dual(**_groups()) | {"tma_aligned": True}, "padded columns"),
    Case(DUAL_GROUP, _dual(**_groups(), width=1504), "do not divide the width"),
    Case(DUAL_GROUP, _dual(**_groups(256)), "32, 64 or 128"),
    Case(DUAL_GROUP, _dual(**_groups(), weight_offset=0.5, kv_weight_offset=0.5), "weight offset"),
    Case(f"{DUAL_GROUP}.triton", _dual(**_groups(), kv_weight_offset=1.0), "knows none"),
    Case(DUAL_STATIC, _dual(quant_dtype=E4M3), "chosen by kv alone"),
    Case(DUAL_STATIC, _dual(quant_dtype=E4M3, width=1024, kv_width=512), "chosen by kv alone"),
    Case("add_rms_norm", _norm(dtype=FP32, weight_dtype=FP32), "float16 and bfloat16 only", ((FIRST, "v0.1.17"),)),
    Case("add_rms_norm", _norm(dtype=torch.float64, weight_dtype=torch.float64), "float16"),
    Case("add_rms_norm", _norm(weight_dtype=FP32), "another dtype than the activations"),
    Case("add_rms_norm", _norm(weight_offset=0.5), "weight offset"),
    Case("add_rms_norm.triton", _norm(weight_offset=1.0), "knows none"),
    Case("add_rms_norm.triton", _norm(dtype=torch.float64), "it computes in float32"),
    Case("add_rms_norm", _norm(weight_offset=1.0), "came with v0.1.17-rc0", BEFORE_GEMMA),
    Case("add_rms_norm", _norm(weight_offset=1.0, width=12288), "weight offset", ((FIRST, "v0.1.17"),)),
    Case("add_rms_norm_pad", _norm(weight_offset=1.0), "knows none"),
    Case(TOKEN, _norm(**_fp8(), width=12288), "more than 8192"),
    Case(TOKEN, _norm(**_fp8(), weight_offset=1.0), "came with v0.1.17-rc0", BEFORE_GEMMA),
    Case(GROUP, _norm(**_groups(), width=5120), "4097 to 6144"),
    Case(GROUP, _norm(**_groups(32), width=6144), "4097 to 6144"),
    Case(f"add_{GROUP}", _norm(**_groups(64), width=6144), "4097 to 6144"),
    Case(f"add_{GROUP}", _norm(**_groups(), width=1504), "do not divide"),
    Case(GROUP, _norm(**_groups()) | {"use_ue8m0": True}, "power-of-two scales"),
    Case(f"{GROUP}.latents", _norm(**_groups(), arch="gfx1201"), "RDNA"),
    Case(f"{GROUP}.latents", _norm(**_groups(), width=8200), "more than 8192"),
    Case(f"{KEPT}.latents", _norm(**_groups(), weight_offset=0.5), "weight offset"),
    Case(f"{TOKEN}.latents", _norm(**_fp8(), width=7164), "multiple of 16 bytes"),
    Case(f"{GROUP}.triton", _norm(**_groups(96)), "power of two"),
    Case(f"{GROUP}.triton", _norm(**_groups()) | {"quant_dtype": FNUZ}, "another GPU"),
    Case(f"{GROUP}.triton", _norm(**_groups()) | {"use_ue8m0": True}, "power-of-two scales"),
    Case(f"{GROUP}.triton", _norm(**_groups()) | {"tma_aligned": True}, "padded columns"),
    Case(f"{STATIC}_with_norm", _norm(quant_dtype=E4M3, weight_offset=1.0), "knows none"),
    Case(GATED, _heads(**_groups()) | {"width": 64}, "not 128 wide"),
    Case(GATED, _heads(**_groups(64)), "other than 128"),
    Case(GATED, _heads(**_groups()) | {"activation": "sigmoid"}, "other than silu"),
    Case(GATED, _heads(**_groups()) | {"norm_before_gate": False}, "before the norm"),
    Case(GATED, _heads(**_groups()) | {"use_ue8m0": True}, "power-of-two scales"),
    Case(GATED, _heads(**_groups()) | {"weight_offset": 1.0}, "knows none"),
    Case(GATED_TOKEN, _heads(**_fp8(), num_heads=129), "more than 128 heads"),
    Case(f"{GATED}.triton", _heads(**_rows()) | {"activation": "relu"}, "without a word"),
    Case(f"{GATED}.triton", _heads(**_rows()) | {"width": 65536}, "64 KiB"),
    Case(f"{GATED}.triton", _heads(**_rows()) | {"width": 192}, "do not divide"),
    Case(f"{GATED}.triton", _heads(**_groups()), "row by row"),
    Case(SILU, _silu(**_groups(), dtype=FP32), "float16 and bfloat16 only"),
    Case(SILU, _silu(**_groups(), width=16384), "more than 8192"),
    Case(SILU, _silu(**_groups(), width=5120), "reduces over other columns"),
    Case(SILU, _silu(**_groups(), width=2080), "do not divide"),
    Case(SILU, _silu(**_groups(), limit=7.1), "does not hold"),
    Case(SILU, _silu(**_groups(), limit=7.1, dtype=FP16), "does not hold"),
    Case(SILU, _silu(**_groups(), limit=70000.0, dtype=FP16), "does not hold"),
    Case(SILU, _silu(**_groups(), limit=0.0), "means none to AITER"),
    Case(f"{SILU}.clamp", _silu(**_groups(), limit=-1.0), "means none to AITER"),
    Case(f"{SILU}.clamp", _silu(**_groups(), width=2080), "no multiple of 128"),
    Case(f"{SILU_TOKEN}.clamp", _silu(**_fp8(), width=2080), "no multiple of 128"),
    Case(f"{SILU}.triton", _silu(**_groups()), "row by row"),
    Case(f"{SILU}.triton", _silu(**_rows(), width=2080), "never loaded"),
    Case(f"{SILU}.triton", _silu(**_rows(), limit=7.0), "has none"),
    Case(f"{SILU_TOKEN}.triton", _silu(**_fp8(), width=5120), "never loaded"),
    Case(SILU_STATIC, _silu(quant_dtype=E4M3, limit=7.0), "has none"),
    Case(SILU_STATIC, _silu(quant_dtype=FNUZ), "another GPU"),
    Case(MXFP8, _norm(width=5120), "4097 to 6144"),
    Case(f"add_{MXFP8}", _norm(width=12288), "more than 8192"),
    Case(MXFP8, _norm(fp8=FNUZ), "not e4m3fn"),
    Case(MXFP8, _norm(weight_offset=0.5), "weight offset"),
    Case(f"{MXFP8}.triton", _norm(width=7184), "multiple of 32"),
    Case(f"{MXFP8}.triton", _norm(weight_offset=1.0), "knows none"),
    Case(MXFP4, _norm(weight_offset=1.0), "knows none"),
    Case(f"{MXFP4}_with_norm", _norm(width=7184), "multiple of 32"),
)
"""What is refused in these releases, and in no others that have the function."""
