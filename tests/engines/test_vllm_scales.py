"""Block fp8 as DeepGEMM takes it inside vLLM's graphs: scales column by column, each column on 16 bytes or not.

vLLM's own quantisation of CUDA, `_C.per_token_group_fp8_quant`, stands in the graph; its arithmetic is plain torch here, under
its real schema. Run by `make test-engines` in an environment of its own.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

pytest.importorskip("vllm_started")
sys.path.append(str(Path(__file__).parents[1] / "fusion"))

import engine_ops  # noqa: F401 (declares vLLM's ops that its CPU build lacks)
from test_vllm_plugin import ADD, DUAL, GROUP_FP8, fresh, said  # noqa: F401 (`fresh` is a fixture)
from torch import Tensor
from vllm.compilation.passes.utility import fix_functionalization
from vllm.model_executor.kernels.linear.scaled_mm.deep_gemm import DeepGemmFp8BlockScaledMMKernel
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils import fp8_utils
from vllm.platforms import current_platform
from vllm_layers import fp8_kernel
from vllm_started import Started, close, started

from layerfuse.engines.vllm import loading
from layerfuse.fusion import Target

GROUP = f"{ADD}_group_quant"
seen: list[tuple[Tensor, Tensor, tuple[int, ...]]] = []
"""What each product was given: quantised rows, their scales, and the scales' strides."""

# With vLLM's quantisation in a graph, its pass that undoes functionalisation asks for ops that its CPU build lacks.
_C = torch.library.Library("_C", "FRAGMENT")
for _name in sorted(set(re.findall(r"torch\.ops\._C\.(\w+)", Path(fix_functionalization.__file__).read_text()))):
    with contextlib.suppress(RuntimeError):  # declared already
        _C.define(f"{_name}(Tensor(a!) x) -> ()")

_LIBRARY = torch.library.Library("layerfuse_tests", "FRAGMENT")
_LIBRARY.define("block_product(Tensor a, Tensor b, Tensor a_scales, Tensor b_scales) -> Tensor")


def _product(a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor) -> Tensor:
    seen.append((a.clone(), a_scales.clone(), a_scales.stride()))
    rows = a.float() * a_scales.repeat_interleave(128, -1)[:, : a.shape[-1]]
    scales = b_scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (rows @ (b.float() * scales[: b.shape[0], : b.shape[1]]).T).bfloat16()


_LIBRARY.impl("block_product", _product, "CompositeExplicitAutograd")
torch.library.register_fake(
    "layerfuse_tests::block_product",
    lambda a, b, *_: a.new_empty(a.shape[0], b.shape[0], dtype=torch.bfloat16),
    lib=_LIBRARY,
)


class Cuda(type(current_platform)):  # type: ignore[misc]
    """The platform of this machine, which says that it is CUDA's where an op is chosen."""

    def is_cuda_alike(self) -> bool:
        return True

    @classmethod
    def fp8_dtype(cls) -> torch.dtype:
        return torch.float8_e4m3fn


@contextlib.contextmanager
def on_cuda() -> Iterator[None]:
    """vLLM's fp8 linears as a CUDA platform has them, but for the product."""
    with (
        fp8_kernel("deep_gemm:DeepGemmFp8BlockScaledMMKernel"),
        mock.patch.object(QuantFP8, "dispatch_forward", lambda self, **_: self.forward_cuda),
        mock.patch.object(fp8_utils, "current_platform", Cuda()),
        mock.patch.object(
            DeepGemmFp8BlockScaledMMKernel,
            "apply_block_scaled_mm",
            lambda _, A, B, As, Bs: torch.ops.layerfuse_tests.block_product(A, B, As, Bs),
        ),
        mock.patch.object(loading, "target_of", return_value=Target(arch="cpu", vendor="cpu", fp8="e4m3fn")),
    ):
        yield


@pytest.mark.parametrize(
    "aligned",
    [pytest.param(True, id="TMA-aligned", marks=pytest.mark.thorough), pytest.param(False, id="column by column")],
)
def test_fused_quantisations_give_what_vllms_own_op_gives_in_its_layout(
    aligned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES", str(int(aligned)))
    options = {"fusions": "all", "strict": True}
    with (
        on_cuda(),
        started("deepseek-v3", tmp_path, layerfuse=options, dtype="bfloat16", overrides=GROUP_FP8) as engine,
    ):
        engine()  # compiles
        for tokens in (6, 8):
            assert_alike(engine, tokens, -(-tokens // 4) * 4 if aligned else tokens)
    assert {line.partition(";")[0] for line in said(caplog) if "expected" in line} >= {
        f"{GROUP}: 2 expected, 2 fused, 0 missed",
        f"{DUAL}_group_quant: 2 expected, 2 fused, 0 missed",
        "silu_mul_group_quant: 1 expected, 1 fused, 0 missed",
    }


def assert_alike(engine: Started, tokens: int, columns: int) -> None:
    """What the products of some tokens are given, and what comes out, is as without fusions; scales have so many columns."""
    found = []
    for run in (engine, engine.uncompiled):
        seen.clear()
        found.append((run(tokens), seen.copy()))
    (fused, mine), (plain, theirs) = found
    assert close(fused, plain)
    assert len(mine) == len(theirs) == 2 * 5
    for (a, scales, strides), (b, expected, wanted) in zip(mine, theirs, strict=True):
        assert (a.shape, a.dtype, a.stride(), scales.shape) == (b.shape, b.dtype, b.stride(), expected.shape)
        assert strides == wanted == (1, columns)
    # What goes into the first product is computed from the same input.
    (a, scales, _), (b, expected, _) = mine[0], theirs[0]
    torch.testing.assert_close(scales, expected, rtol=2**-7, atol=0)
    torch.testing.assert_close(a.float(), b.float(), rtol=0.13, atol=2**-6)
