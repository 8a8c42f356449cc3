"""Fixtures of the tests inside SGLang: a new process of its own, and plain torch for its kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import sglang_layers  # noqa: F401  isort: skip  (before sglang)
import torch
from sglang.srt.layers.quantization import fp8, fp8_utils
from sglang.srt.model_executor import model_runner
from sglang.srt.plugins.hook_registry import HookRegistry
from torch import Tensor

from layerfuse.engines import process
from layerfuse.engines.host import enter
from layerfuse.engines.native import native_methods
from layerfuse.engines.sglang import loading, readers
from layerfuse.engines.sglang.host import SGLANG
from layerfuse.fusion import Target
from layerfuse.fusion.ops.quantisation import Scaling, scale_groups

ADD = "add_rms_norm"
FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A new process of SGLang's, as far as layerfuse knows, that asks for one fusion."""
    monkeypatch.setattr(process, "this", process.Process())
    monkeypatch.setenv("LAYERFUSE_FUSIONS", ADD)
    monkeypatch.setenv("LAYERFUSE_REPORT", str(tmp_path / "report.json"))
    enter(SGLANG)
    held = vars(model_runner.ModelRunner)["load_model"]
    yield
    model_runner.ModelRunner.load_model = held
    HookRegistry.reset()
    scale_groups(Scaling.OF_SCALE)


class Kernels:
    """Plain torch in the place of SGLang's kernels, which counts what it quantises."""

    def __init__(self) -> None:
        self.quantised = 0

    def _by(self, x: Tensor, scale: Tensor) -> Tensor:
        self.quantised += 1
        return (x / scale).clamp(-448, 448).to(FP8)

    def group_quant(self, x: Tensor, size: int, column_major_scales: bool = False) -> tuple[Tensor, Tensor]:
        groups = x.float().unflatten(-1, (-1, size))
        scale = groups.abs().amax(-1).clamp(min=1e-10) / 448
        return self._by(groups, scale[..., None]).flatten(-2), scale

    def block_product(
        self, x: Tensor, weight: Tensor, x_scale: Tensor, scale: Tensor, *_: Any, output_dtype: Any
    ) -> Tensor:
        rows = x.float() * x_scale.repeat_interleave(128, -1)
        scales = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        columns = weight.float() * scales[: len(weight), : weight.shape[1]]
        return (rows @ columns.t()).to(output_dtype)

    def linear(
        self, input: Tensor, weight: Tensor, weight_scale: Tensor, input_scale: Tensor | None, bias: Any = None,  # noqa: A002 (its name)
        pre_quant_output_dtype: Any = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        if input.dtype == FP8:
            values, dtype = input, pre_quant_output_dtype
        else:
            dtype = input.dtype
            if input_scale is None:
                input_scale = input.float().abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
            values = self._by(input.float(), input_scale)
        return ((values.float() * input_scale) @ (weight.float() * weight_scale.flatten()[:1])).to(dtype)


@pytest.fixture
def kernels() -> Iterator[Kernels]:
    made = Kernels()
    with (
        mock.patch.object(fp8_utils, "per_token_group_quant_fp8", made.group_quant),
        mock.patch.object(fp8_utils, "w8a8_block_fp8_matmul_triton", made.block_product),
        mock.patch.object(fp8, "apply_fp8_linear", made.linear),
        mock.patch.object(readers, "native_methods", return_value=native_methods()),
        mock.patch.object(loading, "target_of", return_value=Target(arch="cpu", vendor="cpu", fp8="e4m3fn")),
    ):
        yield made
