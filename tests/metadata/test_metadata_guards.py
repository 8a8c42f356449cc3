"""The planned sizes suffice and leave no room, in every release; buffers sized for other heads are caught."""

from __future__ import annotations

import math

import attrs
import pytest
from guarded import Guarded, padded
from mla_layers import BF16, FP8, GFX942, GFX950, mla, with_heads
from mla_oracle import BufferTooSmallError, Schedule, fill, make_step

from layerfuse.fusion.backends.aiter.releases import RELEASES, ReleaseRange
from layerfuse.fusion.metadata import HeadsRefusedError, plan_metadata
from layerfuse.fusion.metadata.buffers import specs_of
from layerfuse.fusion.metadata.sizes import metadata_shapes

UNITS = 6


def full_step(plan):
    """As many sequences and queries as were planned, none of which ends where a cut lies."""
    lengths = [97 + 31 * i for i in range(plan.batch)]
    return make_step(plan.heads.num_heads, [plan.max_query_length] * plan.batch, lengths)


def sized_for(plan, heads):
    """The same plan with buffers and scratch of another head count: what an engine allocates that counts for itself."""
    shapes = metadata_shapes(attrs.evolve(plan.case, heads=heads), plan.releases.last)
    rows = shapes["reduce_partial_map"][0] * plan.max_query_length
    output = attrs.evolve(plan.scratch[0], shape=(rows, 1, heads, 512))
    return attrs.evolve(plan, buffers=specs_of(shapes), scratch=(output,))


@pytest.mark.parametrize(
    ("spec", "queries", "heads"),
    [
        pytest.param(mla("kimi-k2.5", 8), 1, 8, id="kimi-k2.5: 8 heads, kernel 16 (vLLM 38615)"),
        pytest.param(mla("kimi-k2.5", 8), 2, 8, id="kimi-k2.5: the same with 2 queries"),
        pytest.param(with_heads(40), 1, 32, id="40 heads, counted as 32, kernel 48"),
        pytest.param(mla("glm-4.7-flash"), 1, 16, id="glm-4.7-flash: 20 heads, counted as 16, kernel 32"),
        pytest.param(with_heads(120), 2, 112, id="120 heads, counted as 112, kernel 128"),
    ],
)
def test_buffers_of_other_heads_are_caught(spec, queries, heads):
    """Refused by the check of sizes; and the guard bytes show what a kernel without that check does."""
    plan = plan_metadata(spec, GFX942, batch=7, max_query_length=queries, cu_count=UNITS)
    assert heads < plan.heads.kernel_heads
    guarded, step = Guarded(sized_for(plan, heads)), full_step(plan)
    with pytest.raises(BufferTooSmallError):
        guarded.decode(step, plan, guarded.tensors())
    assert guarded.broken == []
    guarded.decode(step, plan, guarded.tensors(reach=plan))
    assert guarded.broken != []


@pytest.mark.parametrize("target", [GFX942, GFX950], ids=str)
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("heads", [8, 20, 24, 48, 64, 80, 128])
def test_a_full_step_leaves_every_guard_whole(heads, queries, target):
    plan = plan_metadata(with_heads(heads), target, batch=7, max_query_length=queries, cu_count=UNITS)
    padded(plan, full_step(plan))


@pytest.mark.parametrize("name", ["work_indptr", "work_info_set", "reduce_indptr", "reduce_final_map", "output", "lse"])
def test_the_sizes_leave_no_room(name):
    """A full step, one that no cut suits, takes every row: one row less is refused."""
    plan = plan_metadata(with_heads(20), GFX942, batch=7, cu_count=UNITS)
    guarded, step = Guarded(plan), full_step(plan)
    tensors = guarded.tensors()
    fill(Schedule.of(plan), tensors, step)
    assert int(tensors["work_indptr"][-1]) == tensors["work_info_set"].shape[0] == (7 + UNITS - 1) * 2
    with pytest.raises(BufferTooSmallError, match="scratch" if name in ("output", "lse") else name):
        guarded.decode(step, plan, tensors | {name: tensors[name][:-1]})


def checked(target, heads, release, **options):
    """The schedule's parts and tiles are those that the sizes of the release were computed with."""
    plan = plan_metadata(with_heads(heads), target, release, batch=3, cu_count=8, **options)
    schedule = Schedule.of(plan)
    assert plan.buffer("reduce_final_map").shape[0] == 3 * schedule.tiles
    rows = math.prod(plan.scratch[0].shape[:-1])
    assert plan.buffer("reduce_partial_map").shape[0] * schedule.slot_rows <= rows
    assert (3 + schedule.parts - 1) * schedule.tiles <= plan.buffer("work_info_set").shape[0]
    assert schedule.parts == 8, "one for each compute unit"


@pytest.mark.parametrize("release", RELEASES)
def test_the_sizes_of_every_release_suffice(release):
    asked = 0
    for target in (GFX942, GFX950):
        for heads in (8, 24, 32, 48, 64, 80, 96, 112, 128):
            for queries in (1, 2, 3, 4):
                for dtypes in (BF16, FP8):
                    try:
                        checked(target, heads, release, max_query_length=queries, **dtypes)
                    except HeadsRefusedError:
                        continue
                    asked += 1
    assert asked >= 20


def test_the_sizes_of_an_interval_of_releases_suffice():
    plan = plan_metadata(with_heads(64), GFX950, ReleaseRange("v0.1.16.post3", "v0.1.18"), batch=4, cu_count=UNITS)
    padded(plan, full_step(plan))
