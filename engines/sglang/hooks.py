"""The places of SGLang that layerfuse stands at, as data; those of fused ops are in `seams`."""

from __future__ import annotations

from ..hooks import Hook

LOADED = Hook(
    name="specs",
    does="plans as a model is loaded",
    module="sglang.srt.model_executor.model_runner",
    path="ModelRunner.load_model",
    takes=("self",),
    others="optional",
)

PRODUCTS = tuple(
    Hook(
        name="products",
        does="few tokens can be multiplied by layerfuse",
        module="sglang.srt.layers.quantization.fp8_utils",
        path=path,
        takes=("input", "weight", "block_size", "weight_scale", "input_scale", "bias"),
        others="optional",
    )
    for path in ("deepgemm_w8a8_block_fp8_linear_with_fallback", "triton_w8a8_block_fp8_linear")
)
"""What multiplies fp8 in blocks on NVIDIA GPUs before Blackwell."""
