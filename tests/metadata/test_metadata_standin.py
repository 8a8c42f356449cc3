"""Head plans held to the stand-ins, which were written from AITER's record without looking at this table."""

from __future__ import annotations

import itertools

import pytest
import torch
from mla_layers import GFX942, GFX950, with_heads

from layerfuse.fusion.backends.aiter.releases import RELEASES
from layerfuse.fusion.metadata import HeadsRefusedError, plan_heads, plan_metadata

HEADS = (1, 5, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 112, 120, 128)
DTYPES = {"bf16": torch.bfloat16, "gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}
SPECS = {heads: with_heads(heads) for heads in HEADS}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("target", [GFX942, GFX950], ids=str)
def test_what_is_planned_is_taken_and_where_the_output_moves_it_is_said(release, target):
    from standin.behaviour import Call
    from standin.behaviour_decode import check_heads

    planned = refused = 0
    for heads, queries, q, kv in itertools.product(HEADS, (1, 2, 3, 4), ("bf16", "fp8"), ("bf16", "fp8")):
        options = {"q_dtype": q, "kv_dtype": kv, "max_query_length": queries}
        try:
            plan = plan_metadata(SPECS[heads], target, release, batch=4, **options)
        except HeadsRefusedError as error:
            refused += 1
            assert (q, kv) == ("fp8", "bf16"), error
            continue
        planned += 1
        tensors = {
            name: torch.empty(0, dtype=DTYPES[dtype if dtype == "bf16" else target.arch])
            for name, dtype in (("q", q), ("kv_buffer", kv))
        }
        call = Call("aiter.mla:mla_decode_fwd", release, target.arch, tensors)
        moved = check_heads(call, plan.heads.kernel_heads, queries, True)
        assert moved == any("points its output at new storage" in warning for warning in plan.warnings)
    assert planned > 100
    assert planned + refused == 16 * len(HEADS)


@pytest.mark.parametrize("heads", HEADS)
def test_a_plan_never_pads_further_than_it_must(heads):
    """To the next multiple of 16: further only where a release has no kernel or no reduction in between."""
    for release, target in itertools.product(RELEASES, (GFX942, GFX950)):
        assert plan_heads(SPECS[heads], target, release).kernel_heads - heads < 16
