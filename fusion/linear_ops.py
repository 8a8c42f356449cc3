"""The ops of linears with few tokens, declared. Nothing here needs torch.

`group_quant_linear`: activations quantised in groups of 128 columns, and their product with an fp8 weight in blocks of 128 x 128
(DeepSeek-V3, arXiv 2412.19437, section 3.3.2). For a few tokens both are one launch, as a product then waits for its weights.
`block_scaled_linear`: the product alone, of activations that were quantised in front of it.
`few_token_linear`: the product with a weight of 16 bits, without scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .declare import (
    UE8M0,
    Bias,
    BlockScales,
    Flag,
    FloatDtype,
    Kernel,
    LinearWeight,
    NamedOp,
    Op,
    PlainWeight,
    Product,
    QuantisedRows,
    Rows,
    RowScales,
)

_WEIGHT = (LinearWeight(name="weight", of="x"), BlockScales(name="weight_scale", weight="weight"))
_STEADY = Flag(
    name="steady",
    doc="nothing on the stream writes to the weight and its scales, as to parameters: they may be read while the kernel in front "
    "still runs.",
)


def _beyond(takes: str) -> NamedOp:
    return NamedOp(
        name="beyond",
        doc=f"what takes more tokens, as `namespace::op` of ({takes}): what an engine would have called. Empty: plain torch, which is slow.",
    )


def _reference(name: str) -> Callable[..., Any]:
    def reference(*args: Any) -> Any:
        from .backends.backend import imported

        return imported(f"{__package__}.ops.linear:{name}")(*args)

    return reference


GROUP_QUANT_LINEAR = Op(
    name="group_quant_linear",
    doc="x, quantised to fp8 with one scale per 128 columns, times an fp8 weight with one scale per 128 x 128: for up to 16 tokens in "
    "one launch (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).",
    args=(
        Rows(name="x"),
        *_WEIGHT,
        UE8M0,
        _STEADY,
        _beyond("x, weight, weight_scale"),
    ),
    results=(
        Product(name="out", of="x", through="weight", doc="(..., columns), in the dtype of x; sums are in float32."),
    ),
    reference=_reference("group_quant_linear"),
)

BLOCK_SCALED_LINEAR = Op(
    name="block_scaled_linear",
    doc="x in fp8 with one scale per 128 columns, times an fp8 weight with one scale per 128 x 128: for up to 16 tokens in one launch.",
    args=(
        QuantisedRows(name="x"),
        RowScales(name="x_scale", of="x"),
        *_WEIGHT,
        FloatDtype(),
        _STEADY,
        _beyond("x, x_scale, weight, weight_scale"),
    ),
    results=(Product(name="out", of="x", through="weight", doc="(..., columns), in out_dtype; sums are in float32."),),
    reference=_reference("block_scaled_linear"),
)

FEW_TOKEN_LINEAR = Op(
    name="few_token_linear",
    doc="x times a weight of bfloat16 or float16, as torch.nn.functional.linear: for up to 16 tokens in one launch, which shares out the depth. "
    "That function takes more tokens, and float32.",
    args=(Rows(name="x"), PlainWeight(name="weight", of="x"), Bias(name="bias", weight="weight"), _STEADY),
    results=(
        Product(name="out", of="x", through="weight", doc="(..., columns), in the dtype of x; sums are in float32."),
    ),
    reference=_reference("few_token_linear"),
)

BLOCK_SCALED = (GROUP_QUANT_LINEAR, BLOCK_SCALED_LINEAR)
"""Those with fp8 weights in blocks of 128 x 128."""

LINEARS = {
    GROUP_QUANT_LINEAR: (
        Kernel(
            backend="triton",
            made_by="layerfuse.fusion.backends.triton.linear:function_of",
            refuses="layerfuse.fusion.backends.triton.linear:refuses",
            steps="layerfuse.fusion.backends.triton.linear:steps_of",
        ),
    ),
    BLOCK_SCALED_LINEAR: (
        Kernel(
            backend="triton",
            made_by="layerfuse.fusion.backends.triton.linear:quantised_function_of",
            refuses="layerfuse.fusion.backends.triton.linear:refuses",
            steps="layerfuse.fusion.backends.triton.linear:steps_of",
        ),
    ),
    FEW_TOKEN_LINEAR: (
        Kernel(
            backend="triton",
            made_by="layerfuse.fusion.backends.triton.linear:plain_function_of",
            refuses="layerfuse.fusion.backends.triton.linear:refuses_plain",
            steps="layerfuse.fusion.backends.triton.linear:steps_of",
        ),
    ),
}
"""The ops, with their kernels beside the reference."""
