"""Routed experts with few tokens, on the reference and on Triton's kernels."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from helpers import in_turn
from torch.nn import functional

from layerfuse.fusion import backends, ops
from layerfuse.fusion.backends.triton import experts, linear
from layerfuse.fusion.ops.linear import block_scaled_experts as reference
from layerfuse.fusion.ops.linear import dequantised

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
FP8 = torch.float8_e4m3fn


def given_of(
    tokens: int, choices: int = 3, many: int = 5, width: int = 256, inner: int = 128, seed: int = 3
) -> dict[str, torch.Tensor]:
    """A mixture in which nothing is rounded but its result, and each token's choices: different experts.

    Gates are 64, whose silu is 64 in float32. The others are small whole numbers with 448 in each group, so that fp8 holds their products.
    A token has a column of its own in each group of the depth, and all scales are powers of two.
    """
    generator = torch.Generator().manual_seed(seed)

    def powers(*shape: int) -> torch.Tensor:
        return 2.0 ** torch.randint(-2, 3, shape, generator=generator)

    def small(*shape: int) -> torch.Tensor:
        return torch.randint(-8, 9, shape, generator=generator).float()

    columns = min(width, 128)
    up = small(many, inner, columns)
    up[:, ::128] = 448
    both = torch.cat([torch.full_like(up, 64), up], 1)
    w13_scale, group = (
        powers(many, inner // 64, width // 128),
        torch.randint(0, width // 128, both.shape, generator=generator),
    )
    spread = torch.stack(
        [both.where(group == each, 0) for each in range(width // 128)], 2
    )  # many, columns, groups, 128
    w13 = spread / w13_scale.repeat_interleave(128, 1)[..., None]
    x_scale = powers(tokens, width // 128)
    own = torch.eye(columns)[torch.arange(tokens) % columns].view(tokens, 1, columns) / x_scale[..., None]
    ids = torch.stack([torch.randperm(many, generator=generator)[:choices] for _ in range(tokens)] or [torch.zeros(0)])
    given = {
        "x": own.view(tokens, width).to(FP8),
        "x_scale": x_scale,
        "w13": w13.view(many, 2 * inner, width).to(FP8),
        "w13_scale": w13_scale,
        "w2": small(many, width, inner).to(FP8),
        "w2_scale": powers(many, width // 128, inner // 128),
        "topk_weights": powers(tokens, choices),
        "topk_ids": ids.view(tokens, choices).to(torch.int32),
    }
    return {name: tensor.to(DEVICE) for name, tensor in given.items()}


def experts_of(dtype: torch.dtype = torch.bfloat16, **given: Any) -> torch.Tensor:
    """What the op writes into a tensor in which nothing was."""
    x, gap = given["x"], 8
    out = torch.full((len(x), x.shape[-1] + gap), float("nan"), dtype=dtype, device=x.device)
    ops.block_scaled_experts(**given, out=out[:, :-gap])
    assert out[:, -gap:].isnan().all()
    return out[:, :-gap]


def wanted(given: dict[str, Any]) -> torch.Tensor:
    """In float64, token by token and choice by choice."""
    x = dequantised(given["x"], given["x_scale"], 1).double()
    total = torch.zeros(len(x), given["w2"].shape[1], dtype=torch.float64, device=x.device)
    for token, chosen in enumerate(given["topk_ids"].tolist()):
        for place, expert in enumerate(chosen):
            if 0 <= expert < len(given["w13"]):
                both = dequantised(given["w13"][expert], given["w13_scale"][expert], 128).double() @ x[token]
                gate, up = both.bfloat16().double().chunk(2)
                product = (functional.silu(gate) * up).bfloat16().double()
                result = dequantised(given["w2"][expert], given["w2_scale"][expert], 128).double() @ product
                total[token] += result * given["topk_weights"][token, place].double()
    return total


def close(got: torch.Tensor, right: torch.Tensor) -> None:
    # One rounding to bfloat16, which Triton's interpreter cuts. Hopper's tensor cores keep 14 bits of a sum of fp8 products.
    torch.testing.assert_close(
        got.double(), right, rtol=2**-7, atol=float(right.abs().max()) * (2**-11 if GPU else 2**-20)
    )


@pytest.mark.parametrize(
    ("tokens", "choices", "many", "width", "inner", "ids", "use_ue8m0"),
    in_turn(
        [1, 2, 8, 9, 16, 17],
        [10, 8, 1, 3, 2],
        [10, 16],
        [128, 384],
        [384, 256, 256, 128],
        [torch.int32, torch.int64],
        [False, True],
    ),
    ids=str,
)
def test_what_a_mixture_gives(
    backend: str, tokens: int, choices: int, many: int, width: int, inner: int, ids: torch.dtype, use_ue8m0: bool
) -> None:
    given = given_of(tokens, choices, many, width, inner)
    given["topk_ids"] = given["topk_ids"].to(ids)
    right = wanted(given)
    # The last time without Triton's search. Its interpreter has none, and knows no kernel in front that a steady one need not wait for.
    for steady in (False, True, True) if GPU else (tokens % 2 == 0,):
        got = experts_of(**given, use_ue8m0=use_ue8m0, steady=steady)
        assert got.shape == (tokens, width) and got.dtype == torch.bfloat16
        close(got, right)


def test_products_that_are_rounded(backend: str) -> None:
    given = given_of(5, 3, 6, 256, 256)
    generator = torch.Generator().manual_seed(1)
    for name in ("x", "w13", "w2"):
        given[name] = (torch.randn(given[name].shape, generator=generator) * 60).to(FP8).to(DEVICE)
    given["w13_scale"] /= 6000
    both = [experts_of(**given, use_ue8m0=use_ue8m0) for use_ue8m0 in (False, True)]
    for got, use_ue8m0 in zip(both, (False, True), strict=True):
        right = torch.empty_like(got)
        reference(*given.values(), right, use_ue8m0, False)
        # What is rounded between the products may go either way, and Triton's interpreter rounds as no hardware does.
        far = float((got - right).norm() / right.norm())
        assert far < (1e-2 if GPU or backend == "reference" else 8e-2)
    assert float((both[0] - both[1]).norm() / both[0].norm()) > 1e-3


def test_one_expert_of_all_tokens_and_one_of_none(backend: str) -> None:
    given = given_of(6, 2, 4)
    given["topk_ids"][:] = torch.tensor([3, 1])
    close(experts_of(**given), wanted(given))


def test_an_expert_that_is_named_twice_counts_twice(backend: str) -> None:
    given = given_of(3, 2, 4)
    given["topk_ids"][1] = 2
    close(experts_of(**given), wanted(given))


def test_what_is_no_expert_counts_nothing(backend: str) -> None:
    given = given_of(3, 2, 4)
    given["topk_ids"][0] = torch.tensor([-1, 2])
    given["topk_ids"][1] = -1
    given["topk_ids"][2] = torch.tensor([4, 0])
    got = experts_of(**given)
    close(got, wanted(given))
    assert not got[1].any()


def test_views_and_scales_by_columns(backend: str) -> None:
    given = given_of(5, 3, 6, 256, 128)
    right = experts_of(**given)
    wide = torch.cat([given["w13"].view(torch.uint8)] * 2, 2).view(FP8)
    changed = given | {
        "w13": wide[:, :, : given["w13"].shape[2]],
        "x": torch.cat([given["x"].view(torch.uint8)] * 2, 1).view(FP8)[:, :256],
        "x_scale": given["x_scale"].t().contiguous().t(),
        "topk_ids": torch.cat([given["topk_ids"]] * 2, 1)[:, :3],
        "topk_weights": torch.cat([given["topk_weights"]] * 2, 1)[:, :3],
    }
    torch.testing.assert_close(experts_of(**changed), right, rtol=0, atol=0)


def test_a_broken_token_is_broken_alone(backend: str) -> None:
    given = given_of(4, 2, 4)
    given["x_scale"][2, 1] = float("nan")
    got = experts_of(**given)
    if backend == "reference" or GPU:
        assert got[2].isnan().all()
    assert got[[0, 1, 3]].isfinite().all()


def test_no_tokens_give_nothing(backend: str) -> None:
    assert experts_of(**given_of(0)).shape == (0, 256)


def test_the_same_call_gives_the_same_bits(backend: str) -> None:
    given = given_of(9, 3, 8, 384, 256) if GPU else given_of(3, 2, 4)
    first = experts_of(**given)
    for _ in range(5 if GPU else 1):
        assert torch.equal(experts_of(**given), first)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"x": torch.zeros(1, 2, 256, dtype=FP8), "x_scale": torch.zeros(1, 2, 2)}, "x must be (tokens, width); got (1, 2, 256)"),
        ({"w13": torch.zeros(5, 256, 128, dtype=FP8)}, "w13 must be (experts, columns, 256), as wide as x"),
        ({"w13": torch.zeros(5, 192, 256, dtype=FP8)}, "w13 must be whole blocks of 128 x 128"),
        ({"w2": torch.zeros(4, 256, 128, dtype=FP8)}, "w2 must be (5, 256, 128): as many experts as w13"),
        ({"w2_scale": torch.zeros(5, 2)}, "w2_scale must be (5, 2, 1), one per 128 x 128 of w2"),
        ({"topk_weights": torch.zeros(3, 3)}, "topk_weights must be (2, choices)"),
        ({"topk_weights": torch.zeros(2, 3, dtype=torch.bfloat16)}, "topk_weights must be one of torch.float32"),
        ({"topk_ids": torch.zeros(2, 2, dtype=torch.int32)}, "topk_ids must be (2, 3), as topk_weights"),
        ({"topk_ids": torch.zeros(2, 3)}, "topk_ids must be one of torch.int32, torch.int64"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(change: dict[str, torch.Tensor], says: str) -> None:
    given = (
        given_of(2)
        | {name: tensor.to(DEVICE) for name, tensor in change.items()}
        | {"out": torch.zeros(2, 256, device=DEVICE)}
    )
    with pytest.raises(ValueError, match=re.escape(says)):
        ops.block_scaled_experts(**given)


def test_a_broken_expert_breaks_those_that_chose_it_alone(backend: str) -> None:
    given = given_of(4, 2, 6)
    given["topk_ids"][:] = torch.tensor([[1, 2], [3, 1], [2, 4], [4, 1]])
    given["w2_scale"][3], given["w2_scale"][0] = float("inf"), float("nan")
    got = experts_of(**given)
    assert got[[0, 2, 3]].isfinite().all() and not got[1].isfinite().all()


def test_more_tiles_than_are_counted_are_launched_in_parts_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    given = given_of(6, 2, 4, 256, 128)
    launched: list[int] = []
    own = experts._launch
    monkeypatch.setattr(experts, "_launch", lambda *args: (launched.append(len(args[1][0])), own(*args))[1])
    backends.force("triton")
    try:
        for counters, several in ((8192, [6]), (8, [2, 2, 2]), (2, [])):
            monkeypatch.setattr(linear, "MOST_TILES", counters)
            launched.clear()
            close(experts_of(**given), wanted(given))
            assert launched == several
    finally:
        backends.force(None)


def test_kernels_have_tiles_and_warps_in_powers_of_two() -> None:
    for tokens, inner in ((1, 128), (2, 2048), (3, 256), (16, 2048)):
        shape = experts.shape_of(tokens, inner)
        for each in (shape.up_tile, shape.up_warps, shape.down_tile, shape.down_warps):
            assert each.bit_count() == 1, (tokens, inner, shape)
