"""The GEMM of each head behind the attention of an MLA decode layer, on the reference and on Triton's kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import in_turn

from layerfuse.fusion import backends, ops
from layerfuse.fusion.backends.triton import absorb, launcher
from layerfuse.fusion.ops import library

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
UNIT = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-20}
GUARD = 7.0


def given_of(
    tokens: int, heads: int, latent: int, values: int, dtype: torch.dtype = torch.bfloat16, *, as_read: bool = True
) -> dict[str, Any]:
    """As a layer has them: a weight that is a view of `kv_b_proj`'s rows, and rows of a wider output to write to."""
    generator = torch.Generator().manual_seed(3)
    attended = torch.randn(heads, tokens, latent, generator=generator).to(dtype).to(DEVICE).transpose(0, 1)
    both = (torch.randn(heads, values + 8, latent, generator=generator) * latent**-0.5).to(dtype).to(DEVICE)
    weight = both[:, 8:].transpose(1, 2)
    out = torch.full((tokens + 3, heads * values), GUARD, dtype=dtype, device=DEVICE)
    return {
        "attended": attended, "weight": weight if as_read else weight.contiguous(), "out": out[:tokens].view(tokens, heads, values),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "widths", "as_read"),
    in_turn(
        [(1, 16), (3, 5), (16, 2), (17, 3), (40, 2), (64, 1), (65, 2)],
        [(64, 32), (72, 24), (512, 128), (96, 40)],
        [True, False],
    ),
    ids=str,
)
def test_the_product_and_nothing_beside_it(
    backend: str, sizes: tuple[int, int], widths: tuple[int, int], as_read: bool
) -> None:
    given = given_of(*sizes, *widths, as_read=as_read)
    wanted = torch.einsum("thk,hkn->thn", given["attended"].double(), given["weight"].double())
    for steady in (False, True, True):  # the last time without Triton's search
        given["out"].fill_(GUARD)
        assert ops.mla_value_up_into(**given, steady=steady) is None
        torch.testing.assert_close(given["out"].double(), wanted, rtol=UNIT[torch.bfloat16], atol=2e-3)
    behind = given["out"].as_strided((3, widths[1] * sizes[1]), (widths[1] * sizes[1], 1), given["out"].numel())
    assert (behind == GUARD).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_all_dtypes(backend: str, dtype: torch.dtype) -> None:
    given = given_of(5, 4, 64, 32, dtype)
    ops.mla_value_up_into(**given)
    wanted = torch.einsum("thk,hkn->thn", given["attended"].double(), given["weight"].double())
    torch.testing.assert_close(given["out"].double(), wanted, rtol=UNIT[dtype], atol=UNIT[dtype])


def test_no_tokens_write_nothing(backend: str) -> None:
    ops.mla_value_up_into(**given_of(0, 3, 64, 32))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"weight": torch.zeros(4, 64, 32, dtype=torch.bfloat16)}, r"weight must be \(2, 64, columns\)"),
        ({"out": torch.zeros(3, 2, 40, dtype=torch.bfloat16)}, r"as wide as the product with weight, 32 columns; got \(3, 2, 40\)"),
        ({"out": torch.zeros(3, 4, 32, dtype=torch.bfloat16)}, r"out must have the leading dimensions of attended \(3, 2\), got \(3, 4\)"),
        ({"out": torch.zeros(3, 2, 32)}, "out is torch.float32, attended is torch.bfloat16"),
    ],
    ids=["weight", "columns", "heads", "dtype"],
)  # fmt: skip
@pytest.mark.skipif(GPU, reason="the tensors are on the CPU")
def test_what_does_not_fit_is_refused_by_name(change: dict[str, Any], says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        ops.mla_value_up_into(**(given_of(3, 2, 64, 32) | change))


def test_torch_is_told_the_truth() -> None:
    with torch.no_grad():
        torch.library.opcheck(
            torch.ops.layerfuse.mla_value_up_into.default, (*given_of(3, 2, 64, 32).values(), False),
            test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
        )  # fmt: skip


@pytest.mark.skipif(GPU, reason="launches are taken down in the place of Triton's interpreter")
@pytest.mark.parametrize(
    ("latent", "dtype", "own"), [(64, torch.bfloat16, 64), (512, torch.float32, 32), (4096, torch.bfloat16, 0)]
)
def test_every_way_to_launch_it_begins_behind_one_of_its_steps(
    latent: int, dtype: torch.dtype, own: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where ours ends, torch's GEMM is taken."""
    keys: set[Any] = set()
    monkeypatch.setattr(launcher, "first", lambda kernel, key, *_, **__: keys.add(key))
    cases = []

    def launched(tokens: int) -> frozenset[Any]:
        keys.clear()
        ops.mla_value_up_into(**given_of(tokens, 4, latent, 32, dtype))
        return frozenset(keys)

    assert absorb.most_values(latent, dtype.itemsize) == own
    backends.force("triton")
    try:
        with backends.listening(
            lambda _, given: cases.append(library.case_maker(library.declared("mla_value_up_into"))(*given))
        ):
            launched(1)
        steps = backends.steps("mla_value_up_into", DEVICE, cases[0])
        ways = {launched(count) for count in (1, *(step + 1 for step in steps))}
        assert {launched(count) for count in (1, 2, 16, 17, 32, 33, 64, 65, 100)} == ways
        assert len(ways) == len(steps) + 1 and launched(own + 1) == frozenset()
    finally:
        backends.force(None)
