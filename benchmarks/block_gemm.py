"""A block-scaled fp8 matrix product as one op: cuBLASLt's through torch where it runs, else a plain Triton kernel.

Activations are e4m3 with a scale per row and 128 columns, weights e4m3 with a scale per 128 x 128, as DeepSeek-V3 has them
(arXiv 2412.19437, section 3.3.2). The op is opaque to compilers, as a GEMM is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

BLOCK = 128
FP8 = torch.float8_e4m3fn
LARGEST = 448.0


def dequantised(values: Tensor, scales: Tensor, rows_per_scale: int) -> Tensor:
    """In float32; `rows_per_scale`: 1 for activations, 128 for weights."""
    wide = scales.repeat_interleave(BLOCK, -1)[:, : values.shape[1]]
    return values.float() * wide.repeat_interleave(rows_per_scale, 0)[: values.shape[0]]


def _cublas(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    """Wants column-major scales of x, and whole blocks of four rows."""
    from torch.nn.functional import ScalingType, scaled_mm

    result: Tensor = scaled_mm(
        x, weight.t(), x_scales, ScalingType.BlockWise1x128, weight_scales.t(), ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )  # fmt: skip
    return result


def _triton(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    import triton
    from block_gemm_kernel import block_mm

    (rows, depth), columns = x.shape, weight.shape[0]
    out = torch.empty((rows, columns), dtype=torch.bfloat16, device=x.device)
    tile_m = 16 if rows <= 16 else 64
    tile_n = 32 if columns <= 8192 else 64
    grid = (triton.cdiv(columns, tile_n), triton.cdiv(rows, tile_m))
    block_mm[grid](
        x, x_scales, weight, weight_scales, out, rows, columns, depth, x_scales.stride(0), x_scales.stride(1),
        tile_m=tile_m, tile_n=tile_n, tile_k=BLOCK, num_warps=4, num_stages=4,
    )  # fmt: skip
    return out


KERNELS = {"cublas": _cublas, "triton": _triton}
chosen: dict[int, str] = {}
"""By rows: which kernel was found to run and to be right, `try_out`."""


layout = ["column"]
"""How the scales of activations lie: column by column, as cuBLASLt wants them, or row by row."""


def _plain(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    return (dequantised(x, x_scales, 1) @ dequantised(weight, weight_scales, BLOCK).t()).bfloat16()


@torch.library.custom_op("layerfuse_benchmarks::block_mm", mutates_args=())
def block_product(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    """(rows, depth) and (columns, depth) to (rows, columns) in bfloat16."""
    function: Any = KERNELS[chosen[x.shape[0]]] if x.is_cuda else _plain
    result: Tensor = function(x, x_scales, weight, weight_scales)
    return result


@block_product.register_fake
def _fake(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:  # noqa: ARG001
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.bfloat16)


def try_out(rows: int) -> str:
    """Choose the kernel for this many rows: the first of the list that runs and is right. Returns what was found."""
    said = []
    x, weight = torch.randn(rows, 512, device="cuda"), torch.randn(1536, 512, device="cuda")
    values, scales = quantised(x)
    linear = BlockLinear.of(weight)
    right = _plain(values, scales, linear.weight, linear.weight_scales).float()
    for name, function in KERNELS.items():
        if name == "cublas" and layout == ["row"]:
            continue
        try:
            got = function(values, scales, linear.weight, linear.weight_scales).float()
            error = float((got - right).norm() / right.norm())
        except Exception as problem:  # whatever this build of torch cannot do
            said.append(f"{name}: {type(problem).__name__}: {str(problem).strip().splitlines()[0][:160]}")
            continue
        if error < 0.01:
            chosen[rows] = name
            return f"{rows} rows: {name}" + "".join(f" ({each})" for each in said)
        said.append(f"{name}: off by {error:.3g}")
    raise SystemExit(f"no block-scaled GEMM runs at {rows} rows: {'; '.join(said)}")


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """As a model writes it, step by step: (rows, depth) to e4m3 and float32 scales."""
    groups = x.float().unflatten(-1, (-1, BLOCK))
    scales = groups.abs().amax(-1).clamp(min=1e-10) / LARGEST
    values = (groups / scales.unsqueeze(-1)).clamp(-LARGEST, LARGEST).to(FP8).flatten(-2)
    return values, scales if layout == ["row"] else scales.t().contiguous().t()


class BlockLinear(nn.Module):
    """In place of nn.Linear: quantises its input, and multiplies in fp8."""

    def __init__(self, weight: Tensor, weight_scales: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scales", weight_scales)
        self.out_features, self.in_features = weight.shape

    @classmethod
    def of(cls, weight: Tensor) -> BlockLinear:
        """From a weight (columns, depth), whole blocks of both."""
        columns, depth = weight.shape
        blocks = weight.float().view(columns // BLOCK, BLOCK, depth // BLOCK, BLOCK)
        scales = blocks.abs().amax((1, 3)).clamp(min=1e-10) / LARGEST
        values = (blocks / scales[:, None, :, None]).view(columns, depth).to(FP8)
        return cls(values, scales.contiguous())

    def forward(self, x: Tensor) -> Tensor:
        """(..., depth) to (..., columns)."""
        values, scales = quantised(x.reshape(-1, x.shape[-1]))
        result: Tensor = block_product(values, scales, self.weight, self.weight_scales)
        return result.view(*x.shape[:-1], -1)


class Part(nn.Module):
    """Some columns of a product that several linears share, as engines merge what reads one hidden state.

    The first of them multiplies and leaves the product to the others, which are called in their order.
    """

    def __init__(self, whole: nn.Module, left: list[Tensor], start: int, stop: int, others: int) -> None:
        super().__init__()
        self.others = others
        self.whole, self.left, self.start, self.stop = whole, left, start, stop
        self.out_features, self.in_features = stop - start, whole.in_features

    def forward(self, x: Tensor) -> Tensor:
        """(..., depth) to (..., stop - start)."""
        if self.start:
            product = self.left.pop()
        else:
            product = self.whole(x)
            self.left.extend([product] * self.others)
        return product[..., self.start : self.stop]


def replace(module: nn.Module, *names: str) -> None:
    """One or two linears of a module by one in fp8, padded with columns of zeros to whole blocks."""
    weights = [getattr(module, name).weight.detach() for name in names]
    columns = sum(weight.shape[0] for weight in weights)
    whole = BlockLinear.of(nn.functional.pad(torch.cat(weights), (0, 0, 0, -columns % BLOCK)))
    left: list[Tensor] = []
    start = 0
    for name, weight in zip(names, weights, strict=True):
        stop = start + weight.shape[0]
        setattr(
            module,
            name,
            whole if weight.shape[0] == whole.out_features else Part(whole, left, start, stop, len(names) - 1),
        )
        start = stop
