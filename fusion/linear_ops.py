"""The ops of linears with few tokens, declared. Nothing here needs torch.

`group_quant_linear`: activations quantised in groups of 128 columns, and their product with an fp8 weight in blocks of 128 x 128
(DeepSeek-V3, arXiv 2412.19437, section 3.3.2). For a few tokens both are one launch, as a product then waits for its weights.
`block_scaled_linear`: the product alone, of activations that were quantised in front of it.
`scaled_linear`: of fp8 activations with a scale per token, or one, and an fp8 weight with a scale per column of the product, or one.
`few_token_linear`: the product with a weight of 16 bits, without scales.
"""

from __future__ import annotations

from .declare import (
    UE8M0,
    Bias,
    BlockScales,
    ChannelScales,
    ExpertIds,
    ExpertScales,
    ExpertWeights,
    Flag,
    FloatDtype,
    Kernel,
    LinearWeight,
    NamedOp,
    Op,
    Output,
    PlainWeight,
    Product,
    QuantisedRows,
    RouterWeights,
    Rows,
    RowScales,
    TokenScales,
)
from .kernel_source import later

MOST = 16
"""Tokens up to which a product is one launch of layerfuse's: at 64 DeepGEMM and FlashInfer are faster (bench/results/few_token_gemm-nvidia-h100.json), and
at 32 they are where a weight is large."""

LARGE = 1 << 25
"""Numbers of an fp8 weight with a scale per column from which CUTLASS is as fast (bench/results/few_token_channels-nvidia-h100.json)."""

LARGE_BLOCKS = 70_000_000
"""The same of an fp8 weight in blocks of 128 x 128, from which DeepGEMM and FlashInfer are (bench/results/few_token_large-nvidia-h100.json). Alone they
are from 42 million on; in vLLM's step 66 million were 7 us faster by layerfuse (`qwen3-32b-fp8-rank4` in vllm_engine_torch_2_14-nvidia-h100.json), as
such a product asks for its weights while the kernel in front of it runs."""

WIDEST = 65536
"""Columns of a product up to which it is layerfuse's."""

_WEIGHT = (LinearWeight(name="weight", of="x"), BlockScales(name="weight_scale", of="weight"))
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


def _product(dtype: str) -> tuple[Product]:
    return (Product(name="out", of="x", through="weight", doc=f"(..., columns), in {dtype}; sums are in float32."),)


_OPS = f"{__package__}.ops.linear"

GROUP_QUANT_LINEAR = Op(
    name="group_quant_linear",
    doc="x, quantised to fp8 with one scale per 128 columns, times an fp8 weight with one scale per 128 x 128: for up to 16 tokens in "
    "one launch (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).",
    args=(Rows(name="x"), *_WEIGHT, UE8M0, _STEADY, _beyond("x, weight, weight_scale")),
    results=_product("the dtype of x"),
    reference=later(f"{_OPS}:group_quant_linear"),
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
    results=_product("out_dtype"),
    reference=later(f"{_OPS}:block_scaled_linear"),
)

SCALED_LINEAR = Op(
    name="scaled_linear",
    doc="x in fp8 with a scale per token or one for all, times an fp8 weight with a scale per column of the product or one for all: for up to "
    "16 tokens in one launch. Scales are applied to the sum, then the bias.",
    args=(
        QuantisedRows(name="x"),
        TokenScales(name="x_scale", of="x"),
        LinearWeight(name="weight", of="x"),
        ChannelScales(name="weight_scale", of="weight"),
        Bias(name="bias", weight="weight", doc="(columns,), of out_dtype; None: nothing is added."),
        FloatDtype(),
        _STEADY,
        _beyond("x, x_scale, weight, weight_scale, bias"),
    ),
    results=_product("out_dtype"),
    reference=later(f"{_OPS}:scaled_linear"),
)

FEW_TOKEN_LINEAR = Op(
    name="few_token_linear",
    doc="x times a weight of bfloat16 or float16, as torch.nn.functional.linear: for up to 16 tokens in one launch, which shares out the depth. "
    "That function takes more tokens, and float32.",
    args=(Rows(name="x"), PlainWeight(name="weight", of="x"), Bias(name="bias", weight="weight"), _STEADY),
    results=_product("the dtype of x"),
    reference=later(f"{_OPS}:few_token_linear"),
)

BLOCK_SCALED_EXPERTS = Op(
    name="block_scaled_experts",
    doc="The routed experts of a mixture on x in fp8 with one scale per 128 columns, by fp8 weights with one scale per 128 x 128: "
    "silu(gate) * up of each chosen expert, quantised as x is, times its w2, and the sum of these as the router weighs them. In two launches "
    "for up to 16 tokens, which read each expert once (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).",
    args=(
        QuantisedRows(name="x", doc="(tokens, width)."),
        RowScales(name="x_scale", of="x"),
        ExpertWeights(name="w13", of="x", doc="(experts, 2 * inner, width), fp8: gates, then as many others."),
        ExpertScales(name="w13_scale", of="w13"),
        ExpertWeights(name="w2", of="w13", doc="(experts, width, inner), fp8."),
        ExpertScales(name="w2_scale", of="w2"),
        RouterWeights(name="topk_weights", of="x"),
        ExpertIds(name="topk_ids", of="topk_weights"),
        Output(name="out", of="x", doc="(tokens, width), floating: written to; sums are in float32."),
        Flag(name="use_ue8m0", doc="round the scales of the products up to powers of two."),
        _STEADY,
    ),
    results=(),
    reference=later(f"{_OPS}:block_scaled_experts"),
)


def _kernel(module: str, refuses: str = "refuses") -> tuple[Kernel, ...]:
    path = "layerfuse.fusion.backends.triton"
    return (
        Kernel(
            backend="triton",
            made_by=f"{path}.{module}:function_of",
            refuses=f"{path}.{module}:{refuses}",
            steps=f"{path}.linear:steps_of",
        ),
    )


LINEARS = {
    GROUP_QUANT_LINEAR: _kernel("linear"),
    BLOCK_SCALED_LINEAR: _kernel("linear"),
    SCALED_LINEAR: _kernel("linear"),
    FEW_TOKEN_LINEAR: _kernel("linear", "refuses_plain"),
    BLOCK_SCALED_EXPERTS: _kernel("experts"),
}
"""The ops, with their kernels beside the reference."""
