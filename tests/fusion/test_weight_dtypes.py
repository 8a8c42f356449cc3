"""Norms whose weight is wider than their input: every form of them is found, ordinary and zero-centred."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import in_turn
from quant_support import assert_quantised, vllm_group
from stream_support import EPSILON, SITE, Norm, Stream, exact_norm, form_of, rows, run, stream_spec
from torch import Tensor, nn


class TorchNorm(nn.RMSNorm):
    def __init__(self) -> None:
        super().__init__(256, eps=EPSILON)
        nn.init.uniform_(self.weight, 0.5, 1.5)


class Gemma(Norm):
    def __init__(self) -> None:
        super().__init__(offset=1.0)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
        return (wide * (1.0 + self.weight.float())).type_as(x)


NORMS: dict[str, Any] = {
    "rounded after the weight": lambda: Norm(after_weight=True),
    "rounded before the weight": lambda: Norm(),
    "torch": TorchNorm,
    "zero-centred, after": lambda: Norm(offset=1.0, after_weight=True),
    "zero-centred, before": lambda: Norm(offset=1.0),
    "gemma": Gemma,
}


@pytest.mark.parametrize(
    ("name", "weights", "dtype"), in_turn(NORMS, [torch.float32, None], [torch.bfloat16, torch.float16]), ids=str
)
def test_found(name: str, weights: torch.dtype | None, dtype: torch.dtype) -> None:
    norm = NORMS[name]()
    norm.to(weights or dtype)
    offset = getattr(norm, "offset", 0.0)
    module = Stream(vllm_group, norm)
    x, residual = rows(dtype=dtype)
    specs = [("layer", stream_spec(offset))]
    traced = run(module, "group128", x, residual, specs=specs)
    assert form_of(traced) == "add_rms_norm_group_quant", str(traced.report)
    assert_quantised(*traced.output[:2], exact_norm(module, x, residual), rounding=2**-8)
    plain = run(Stream(lambda n: n * 2, norm), None, x, residual, specs=specs)
    assert form_of(plain) == "add_rms_norm"
    torch.testing.assert_close(
        plain.output[0].double(), 2 * exact_norm(module, x, residual), rtol=torch.finfo(dtype).eps, atol=1e-6
    )


def test_a_product_that_stays_in_float32_is_another_norm() -> None:
    class Wide(Norm):
        def forward(self, x: Tensor) -> Tensor:
            wide = x.float()
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
            return self.weight * wide.to(x.dtype)

    traced = run(Stream(lambda n: n * 2, Wide().float()), None, *rows())
    assert form_of(traced) is None
    assert "rounds to another dtype" in traced.report.of("add_rms_norm").missed[SITE]
