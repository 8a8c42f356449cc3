"""Our table of sizes held to AITER's own functions: `LAYERFUSE_AITER_CHECKOUT=path pytest tests/metadata`."""

from __future__ import annotations

import os
from pathlib import Path

import aiter_formula
import pytest

from layerfuse.fusion.backends.aiter.releases import RELEASES
from layerfuse.fusion.metadata import sizes

CHECKOUT = os.environ.get(aiter_formula.VARIABLE, "")


@pytest.mark.skipif(not CHECKOUT, reason=f"{aiter_formula.VARIABLE} names no checkout of ROCm/aiter")
@pytest.mark.parametrize("release", RELEASES)
def test_the_table_is_aiters_own_function(release):
    found = aiter_formula.compare(Path(CHECKOUT), release)
    if not found:
        pytest.skip(f"the checkout has no metadata functions of {release}")
    assert found["mismatches"] == 0, found["first"]
    assert found["points"]["decode"] >= 2_000


GFX942 = {"arch": "gfx942", "cu_count": 304}
GFX950 = {"arch": "gfx950", "cu_count": 256}


def sized(release, heads, queries, dtype, device, batch=64, **more):
    """work_indptr, W, reduce_indptr and R."""
    case = sizes.Case(batch=batch, queries=queries, heads=heads, q=dtype, kv=dtype, **device, **more)
    shapes = sizes.metadata_shapes(case, release)
    return [shapes[name][0] for name in ("work_indptr", "work_info_set", "reduce_indptr", "reduce_partial_map")]


@pytest.mark.parametrize(
    ("release", "heads", "queries", "dtype", "device", "tiles"),
    [
        ("v0.1.16.post3", 16, 1, "bf16", GFX942, 1),
        ("v0.1.20.post1", 16, 1, "bf16", GFX942, 1),
        ("v0.1.16.post3", 24, 1, "bf16", GFX942, 2),
        ("v0.1.16.post3", 128, 1, "bf16", GFX942, 8),
        ("v0.1.16.post6", 64, 1, "bf16", GFX950, 4),
        ("v0.1.17-rc0", 64, 1, "bf16", GFX950, 1),
        ("v0.1.17-rc0", 48, 1, "bf16", GFX950, 3),
        ("v0.1.17-rc0", 48, 3, "bf16", GFX950, 3),
        ("v0.1.17-rc0", 64, 2, "bf16", GFX950, 1),
        ("v0.1.17-rc0", 80, 1, "bf16", GFX950, 1),
        ("v0.1.17-rc0", 80, 2, "bf16", GFX950, 2),
        ("v0.1.16.post3", 128, 1, "fp8", GFX942, 1),
        ("v0.1.16.post3", 64, 1, "fp8", GFX950, 1),
        ("v0.1.16.post3", 128, 1, "fp8", GFX950, 1),
        ("v0.1.17", 64, 1, "fp8", GFX942, 4),
        ("v0.1.17-longctx", 64, 1, "fp8", GFX942, 1),
        ("v0.1.17-longctx", 64, 2, "fp8", GFX942, 8),
        ("v0.1.16.post3", 32, 4, "fp8", GFX950, 1),
        ("v0.1.19.post2", 32, 3, "fp8", GFX950, 6),
        ("v0.1.20", 32, 3, "fp8", GFX950, 2),
    ],
)
def test_sizes_that_changed(release, heads, queries, dtype, device, tiles):
    """Tiles worked out by hand, beside the comparison that needs a checkout."""
    units = device["cu_count"]
    most = (64 + units - 1) * tiles
    assert sized(release, heads, queries, dtype, device) == [units + 1, most, 64 * tiles + 1, most]


def test_options_change_what_they_should():
    split = {"batch": 512, "max_split_per_batch": 4}
    assert sized("v0.1.16.post3", 16, 1, "bf16", GFX950, **split)[3] == 512 * 256
    assert sized("v0.1.17-rc0", 16, 1, "bf16", GFX950, **split)[3] == 512 + 256
    assert sized("v0.1.20", 16, 1, "bf16", GFX950, batch=8, intra_batch=True, num_kv_splits=4)[1::2] == [32, 32]
    assert sized("v0.1.18", 16, 1, "bf16", GFX950, fast=False)[1::2] == [64 * 256] * 2
    assert sized("v0.1.18", 16, 4, "fp8", GFX950, experimental=True)[0] == 513
    assert sized("v0.1.18", 16, 4, "bf16", GFX950, sparse=True)[2] == 4 * 64 + 1


def test_heads_that_it_does_not_size():
    case = sizes.Case(batch=1, queries=1, heads=20, q="bf16", kv="bf16", **GFX950)
    with pytest.raises(ValueError, match="multiple of 8, got 20"):
        sizes.metadata_shapes(case, "v0.1.20")
