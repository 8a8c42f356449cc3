"""A write in place between what a fused op would read, and where the graph reads it: nothing is fused there.

AOTAutograd leaves no such writes; these graphs are as other compilers may hand them over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fusion_support import KV, ROPE, Q, mla_spec
from gated_support import HEADS, INNER, WIDTH, delta_net, mlp
from quant_support import CPU_FP8, FP8, MAX, config
from stream_support import stream_spec
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from layerfuse.fusion import plan
from layerfuse.fusion.rewrite import Pipeline

convert = torch.ops.prims.convert_element_type
SCALE = 0.02


def norm(x: Tensor, weight: Tensor, write: Callable[[], Any]) -> Tensor:
    """Reads x, and then something is written."""
    wide = convert(x, torch.float32)
    write()
    return weight * convert(wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6), torch.bfloat16)


def unwritten() -> None:
    pass


def quantised(x: Tensor, scale: Tensor) -> Tensor:
    return convert((convert(x, torch.float32) / scale).clamp(-MAX, MAX), FP8)


def add_norm(written: bool, x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    total = x + residual
    return norm(total, weight, lambda: total.add_(3.0) if written else None), total


def norm_quant(written: bool, x: Tensor, weight: Tensor, scale: Tensor) -> Any:
    x = x * 2
    return quantised(norm(x, weight, lambda: x.add_(3.0) if written else None), scale), x


def one_of_two(which: int) -> Callable[..., Any]:
    def dual_norm(written: bool, x: Tensor, q_weight: Tensor, kv_weight: Tensor) -> Any:
        q, kv, rope = (x + 0).split([Q, KV, ROPE], -1)
        writes = [unwritten, unwritten]
        if written:
            writes[which] = lambda: (q, kv)[which].add_(3.0)
        # The latent that is written comes first: its op would run behind the write.
        first, second = (q, q_weight, writes[0]), (kv, kv_weight, writes[1])
        return [norm(*each) for each in ((first, second) if which == 0 else (second, first))], rope + 1

    return dual_norm


def gated(written: bool, x: Tensor, gate: Tensor, weight: Tensor, scale: Tensor) -> Any:
    x = x * 2
    normed = norm(x, weight, unwritten) * torch.ops.aten.silu(gate)
    if written:
        x.add_(3.0)
    return quantised(normed.view(-1, HEADS * WIDTH), scale), x


def product(written: bool, gate: Tensor, up: Tensor, weight: Tensor, scale: Tensor) -> Any:
    up = up * 2
    copy = up.clone()
    if written:
        up.add_(3.0)
    values = quantised(torch.ops.aten.silu(gate) * copy, scale)
    return values, convert(values, torch.bfloat16) @ weight * 0, up


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


LATENTS = (bf16(3, Q + KV + ROPE), bf16(Q), bf16(KV))
CASES: dict[str, tuple[Callable[..., Any], Any, str | None, tuple[Tensor, ...]]] = {
    "add and norm": (add_norm, stream_spec(), None, (bf16(3, 256), bf16(3, 256), bf16(256))),
    "norm and quant": (norm_quant, stream_spec(), "static", (bf16(3, 256), bf16(256), torch.tensor([SCALE]))),
    "dual norm, query": (one_of_two(0), mla_spec(), None, LATENTS),
    "dual norm, keys": (one_of_two(1), mla_spec(), None, LATENTS),
    "gated norm and quant": (gated, delta_net(), "static", (bf16(3, HEADS, WIDTH), bf16(3, HEADS, WIDTH), bf16(WIDTH), torch.tensor([SCALE]))),
    "copied half of a product": (product, mlp(), "static", (bf16(3, INNER), bf16(3, INNER), bf16(INNER, 64), torch.tensor([SCALE]))),
}  # fmt: skip


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_read_after_it_was_written(name: str, written: bool) -> None:
    function, spec, quant, given = CASES[name]
    module = make_fx(lambda *args: function(written, *args), tracing_mode="fake")(*(each.clone() for each in given))
    pipeline = Pipeline(plan([("", spec)], CPU_FP8, None if quant is None else config(quant)))
    pipeline(module.graph)
    module.graph.lint()
    module.recompile()
    (use,) = pipeline.report.records[0].uses
    assert use.fused is not None or written, use
    assert ("writes in place between" in str(use.missed)) == written
    wanted = function(written, *(each.clone() for each in given))
    for got, right in zip(_flat(module(*given)), _flat(wanted), strict=True):
        torch.testing.assert_close(got.float(), right.float(), rtol=0.15, atol=0.15)


def test_what_was_written_before_is_what_is_normed() -> None:
    def function(x: Tensor, q_weight: Tensor, kv_weight: Tensor) -> Any:
        q, kv, _ = (x + 0).split([Q, KV, ROPE], -1)
        kv.add_(3.0)
        return norm(q, q_weight, unwritten), norm(kv, kv_weight, unwritten)

    module = make_fx(function, tracing_mode="fake")(*LATENTS)
    pipeline = Pipeline(plan([("", mla_spec())], CPU_FP8))
    pipeline(module.graph)
    module.recompile()
    assert pipeline.report.records[0].fused() == 1
    for got, right in zip(module(*LATENTS), function(*LATENTS), strict=True):
        torch.testing.assert_close(got.float(), right.float(), rtol=2e-2, atol=2e-2)


def _flat(results: Any) -> list[Tensor]:
    return list(torch.utils._pytree.tree_leaves(results))
