"""What AITER must give for the norms and gated activations: what the references of their ops give, at small sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from check_tools import EPSILON, FP8, LEADING, pair, random, weight
from torch import Tensor

from layerfuse.fusion import FUSIONS
from layerfuse.fusion.declare import Exponents, Op
from layerfuse.fusion.ops.quantisation import e2m1

OPS: dict[str, Op] = {form.op.name: form.op for fusion in FUSIONS.values() for form in fusion.forms}

WIDTH = 384
"""No power of two: one scale for such a row is where Triton's block is wider than the row."""

KV_WIDTH = 512
"""Not narrower than the query latent, which is refused of the static form."""

NONE = float("inf")
"""No limit."""

DEFAULTS: dict[str, Any] = {
    "epsilon": EPSILON,
    "q_epsilon": EPSILON,
    "kv_epsilon": 1e-6,
    **dict.fromkeys(("weight_offset", "q_weight_offset", "kv_weight_offset"), 0.0),
    "dtype": FP8,
    "scale": torch.tensor([0.02]),
    "group_size": 128,
    "limit": NONE,
    "padded_width": 500,
    **dict.fromkeys(("column_major", "tma_aligned", "use_ue8m0"), False),
    "activation": "silu",
    "norm_before_gate": True,
}


def check(call: Callable[..., Any], op: str, **options: Any) -> None:
    """Hold a callable to an op's reference for every kind of leading dimensions. Column-major scales need be asked for."""
    for leading in LEADING:
        for tensors in _tensors(OPS[op], leading, options.get("width")):
            values = DEFAULTS | options | tensors
            given = [values[argument.name] for argument in OPS[op].args]
            same_results(call(*given), OPS[op], given)


def _tensors(op: Op, leading: tuple[int, ...], width: int | None) -> Iterator[dict[str, Tensor]]:
    """Rows that are further apart than they are wide, and weights that fit."""
    if op.name.startswith("silu_mul"):
        for gate, up in _halves(*leading, width=width or WIDTH):
            yield {"gate": gate, "up": up}
    elif op.name.startswith("gated"):
        whole = random(*leading, 3, 128 * 2 + 64)
        yield {"x": whole[..., :128], "gate": whole[..., 128:256], "weight": weight(128)}
    elif op.name.startswith("mla_dual"):
        q, kv = pair(*leading, q=WIDTH, kv=KV_WIDTH)
        yield {"q": q, "kv": kv, "q_weight": weight(WIDTH), "kv_weight": weight(KV_WIDTH)}
    else:
        x, _ = pair(*leading, q=WIDTH)
        yield {"x": x, "residual": random(*leading, WIDTH + 8, seed=2)[..., :WIDTH], "weight": weight(WIDTH)}


def _halves(*leading: int, width: int) -> list[tuple[Tensor, Tensor]]:
    """A gate and an up that are the halves of one tensor, of a wider one, and of none."""
    whole, wider = random(*leading, 2 * width), random(*leading, 2 * width + 64)
    apart = random(*leading, width), random(*leading, width, seed=3)
    return [(whole[..., :width], whole[..., width:]), (wider[..., :width], wider[..., width : 2 * width]), apart]


def same_results(found: Any, op: Op, given: list[Any]) -> None:
    """What the reference gives, result for result: exact bytes, scales laid out alike, fp8 to a rounding.

    The reference quantises what it has rounded, and AITER quantises before: a code of MXFP4 may be the next one, and an exponent off by one.
    """
    expected = op.reference(*given)
    several = [each if isinstance(each, tuple) else (each,) for each in (found, expected)]
    assert len(several[0]) == len(several[1])
    for result, one, other in zip(op.results, *several, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        if other.numel() > 1 and 1 not in other.shape:
            assert one.stride() == other.stride()
        if other.dtype == FP8:
            torch.testing.assert_close(one.float(), other.float(), rtol=0.13, atol=1e-6)
        elif other.dtype == torch.float32:
            torch.testing.assert_close(one, other, rtol=2**-8, atol=1e-9)
        elif other.dtype == torch.uint8:
            assert (one != other).sum() <= 2 + other.numel() // 10
            if isinstance(result, Exponents):
                assert (one.int() - other.int()).abs().le(1).all()
            else:
                scaled = next(place for place, each in enumerate(op.results) if isinstance(each, Exponents))
                assert_next_codes(one, other, several[0][scaled], several[1][scaled])
        else:
            torch.testing.assert_close(one, other)


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def assert_next_codes(found: Tensor, expected: Tensor, exponents: Tensor, right: Tensor) -> None:
    """The codes of MXFP4, or the next ones: of what is expected, rounded again where the exponent is the next one too."""

    def counted(codes: Tensor) -> Tensor:
        """From -7 to 7, so that the next one is one away."""
        return (codes.int() & 7) * torch.where(codes > 7, -1, 1)

    moved = (right.int() - exponents.int()).repeat_interleave(32, -1)
    one, other = (counted(torch.stack([each & 15, each >> 4], -1).flatten(-2)) for each in (found, expected))
    under_found = e2m1(E2M1[other.abs()] * other.sign() * torch.exp2(moved))
    assert (one - counted(under_found)).abs().le(1).all()


def check_op(call: Callable[..., Any], op: str) -> None:
    """What every binding of an op takes."""
    if "silu_mul_per_token" in op:
        check(call, op, width=256)  # a power of two, which one of them needs
    else:
        check(call, op)
    if op.endswith(("group_quant", "group_quant_with_norm")) and not op.startswith(("gated", "silu")):
        check(call, op, group_size=64, column_major=True)
