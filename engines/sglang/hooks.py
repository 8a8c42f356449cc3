"""The places of SGLang that layerfuse stands at, as data; those of fused ops are in `seams`."""

from __future__ import annotations

from ..hooks import Hook

LOADED = Hook.of(
    "sglang.srt.model_executor.model_runner:ModelRunner.load_model(self)",
    does="plans as a model is loaded",
    others="optional",
)

PRODUCTS = tuple(
    Hook.of(
        f"sglang.srt.layers.quantization.fp8_utils:{name}(input, weight, block_size, weight_scale, input_scale, bias)",
        does="few tokens can be multiplied by layerfuse",
        others="optional",
    )
    for name in ("deepgemm_w8a8_block_fp8_linear_with_fallback", "triton_w8a8_block_fp8_linear")
)
"""What multiplies fp8 in blocks on NVIDIA GPUs before Blackwell."""
