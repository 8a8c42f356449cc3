"""The schedule: every row meets every key once, in even parts, within the sizes of every release."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch
from decode_support import GFX942, GFX950, make_step, mla, with_heads
from hypothesis import given
from hypothesis import strategies as st

from layerfuse.fusion.backends.aiter.releases import RELEASES, ReleaseRange
from layerfuse.fusion.metadata import HeadsRefusedError, allocate, plan_metadata
from layerfuse.fusion.metadata.reference_decode import scratch_rows
from layerfuse.fusion.metadata.reference_schedule import WORK_COLUMNS, ScheduleShape, fill_schedule, kv_lengths
from layerfuse.fusion.metadata.sizes import SIZES_SINCE

PLANNED = RELEASES[RELEASES.index(SIZES_SINCE) :]


def scheduled(plan, step):
    """The shape and the six buffers as lists, filled over garbage."""
    buffers = allocate(plan, "cpu").tensors
    for name, tensor in buffers.items():
        if name != "work_metadata_ptrs":
            tensor.fill_(-9)
    shape = ScheduleShape.of(plan)
    fill_schedule(shape, buffers, *step.for_schedule)
    return shape, {
        name: tensor.view(torch.int64).tolist() if tensor.dtype == torch.uint64 else tensor.tolist()
        for name, tensor in buffers.items()
    }


def work_of(found):
    """Unit by unit, its rows by their columns."""
    starts = found["work_indptr"]
    return [
        [dict(zip(WORK_COLUMNS, row, strict=True)) for row in found["work_info_set"][begin:end]]
        for begin, end in pairwise(starts)
    ]


def possible_plan(*args, **options):
    try:
        return plan_metadata(*args, **options)
    except HeadsRefusedError:
        return None


@given(
    heads=st.integers(1, 128),
    target=st.sampled_from([GFX942, GFX950]),
    release=st.sampled_from(PLANNED),
    fp8=st.booleans(),
    page_size=st.sampled_from([1, 16, 64]),
    sequences=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3_000)), max_size=9),
    units=st.integers(1, 40),
    mode=st.sampled_from([{}, {"fast": False}, {"intra_batch": True}, {"max_split_per_batch": 3}]),
)
def test_every_row_meets_every_key_once(heads, target, release, fp8, page_size, sequences, units, mode):
    most = max([1, *(queries for queries, _ in sequences)])
    dtype = "fp8" if fp8 else "bf16"
    plan = possible_plan(
        *(with_heads(heads), target, release),
        batch=max(1, len(sequences)),
        max_query_length=most,
        q_dtype=dtype,
        kv_dtype=dtype,
        page_size=page_size,
        cu_count=units,
        **mode,
    )
    if plan is None:
        return
    step = make_step([q for q, _ in sequences], [k for _, k in sequences], page_size=page_size, dim=1)
    shape, found = scheduled(plan, step)
    met = {i: [] for i in range(len(sequences))}
    slots = {}
    for work in (work for unit in work_of(found) for work in unit):
        rows, keys = (work["row_begin"], work["row_end"]), (work["kv_begin"], work["kv_end"])
        assert 0 < rows[1] - rows[0] <= shape.slot_rows and keys[0] % max(16, page_size) == 0 and keys[0] < keys[1]
        assert work["kv_length"] == step.lengths[work["sequence"]]
        met[work["sequence"]].append((rows, keys))
        if work["slot"] >= 0:
            assert work["slot"] not in slots
            slots[work["slot"]] = rows
        else:
            assert keys == (0, work["kv_length"])
    first = 0
    for sequence, (queries, length) in enumerate(sequences):
        last = first + queries * shape.heads
        by_rows = {}
        for rows, keys in met[sequence]:
            by_rows.setdefault(rows, []).append(keys)
        assert sum(end - begin for begin, end in by_rows) == (last - first if length else 0)
        assert all(first <= begin < end <= last for begin, end in by_rows)
        for keys in by_rows.values():
            ends = [0, *(end for _, end in sorted(keys))]
            assert [begin for begin, _ in sorted(keys)] == ends[:-1] and ends[-1] == length
        first = last
    indptr, reduced = found["reduce_indptr"], {}
    for tile, rows in enumerate(found["reduce_final_map"]):
        for slot in found["reduce_partial_map"][indptr[tile] : indptr[tile + 1]]:
            reduced[slot] = tuple(rows)
    assert reduced == slots


@pytest.mark.parametrize("release", PLANNED)
def test_the_sizes_of_every_release_suffice(release):
    """The tile that they were computed with is the schedule's, and the scratch holds a slot for every partial result."""
    asked = 0
    for target in (GFX942, GFX950):
        for heads in (1, 8, 16, 20, 24, 32, 48, 64, 80, 96, 112, 128):
            for queries in (1, 2, 3, 4):
                for dtype in ("bf16", "fp8"):
                    options = {"q_dtype": dtype, "kv_dtype": dtype, "max_query_length": queries, "batch": 3}
                    plan = possible_plan(with_heads(heads), target, release, cu_count=8, **options)
                    if plan is None:
                        continue
                    asked += 1
                    shape = ScheduleShape.of(plan)
                    assert plan.buffer("reduce_final_map").shape[0] == 3 * shape.tiles
                    assert plan.buffer("reduce_partial_map").shape[0] * shape.slot_rows <= scratch_rows(plan)
                    assert 1 <= shape.parts <= 8
                    assert (3 + shape.parts - 1) * shape.tiles <= plan.buffer("work_info_set").shape[0]
    assert asked >= 20


def test_an_interval_of_releases():
    plan = plan_metadata(with_heads(64), GFX950, ReleaseRange("v0.1.14", "v0.1.18"), batch=4, cu_count=8)
    _, found = scheduled(plan, make_step([1] * 4, [77, 300, 5, 64], dim=1))
    assert sum(map(len, work_of(found))) >= 4


@pytest.mark.parametrize("target", [GFX942, GFX950], ids=str)
def test_units_get_even_parts(target):
    plan = plan_metadata(mla("kimi-k2.5", 8), target, batch=64)
    lengths = [1 + 13_777 * i % 9_973 for i in range(64)]
    _, found = scheduled(plan, make_step([1] * 64, lengths, dim=1))
    keys = [sum(work["kv_end"] - work["kv_begin"] for work in unit) for unit in work_of(found)]
    assert len(keys) == {"gfx942": 304, "gfx950": 256}[target.arch]
    grains = -(-sum(lengths) // 16)
    assert max(keys) <= (grains // len(keys) + 1) * 16 and sum(keys) == sum(lengths)
    assert min(keys) >= (grains // len(keys)) * 16 - 16 * 5  # sequences end within a grain


def test_cuts_do_not_depend_on_the_heads():
    """What makes a padded run equal to the last bit: each head's sums are cut at the same keys."""
    cuts = set()
    for heads in (1, 8, 20, 33, 128):
        plan = plan_metadata(with_heads(heads), GFX942, batch=3, max_query_length=2, cu_count=7)
        _, found = scheduled(plan, make_step([2, 1, 2], [700, 31, 90], dim=1))
        every = {(w["sequence"], w["kv_begin"], w["kv_end"]) for unit in work_of(found) for w in unit}
        cuts.add(tuple(sorted(every)))
    assert len(cuts) == 1


def test_sparse_queries_are_sequences_of_their_own():
    plan = plan_metadata(mla("deepseek-v3.2", 8), GFX950, batch=2, max_query_length=3, sparse=True, topk=64, cu_count=4)
    shape, found = scheduled(plan, make_step([1] * 6, [64, 64, 64, 10, 11, 12], dim=1))
    assert shape.max_query_length == 1 and found["work_indptr"][-1] >= 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qo_indptr": [0, 3, 4]}, "qo_indptr: sequence 0 has 3 queries, planned were 0 to 2"),
        ({"qo_indptr": [0, 2, 1]}, "qo_indptr: sequence 1 has -1 queries, planned were 0 to 2"),
        ({"kv_indptr": [0, 2, 1]}, "kv_indptr: sequence 1 runs from page 2 back to 1"),
        ({"kv_last_page_lens": [5, 17]}, "kv_last_page_lens: sequence 1 says 17, of a page that holds 1 to 16"),
        ({"kv_last_page_lens": [0, 1]}, "kv_last_page_lens: sequence 0 says 0, of a page that holds 1 to 16"),
        ({"kv_indptr": [0, 2]}, "got 3 and 2 for 2"),
        ({"qo_indptr": [0.0, 1.0, 2.0]}, "one-dimensional int32, got torch.float32"),
    ],
)
def test_steps_that_cannot_be(change, message):
    plan = plan_metadata(with_heads(8), GFX942, batch=2, max_query_length=2, page_size=16, cu_count=4)
    right = {"qo_indptr": [0, 1, 2], "kv_indptr": [0, 1, 2], "kv_last_page_lens": [5, 6]}
    given_ = [
        torch.tensor(v) if isinstance(v[0], float) else torch.tensor(v, dtype=torch.int32)
        for v in (right | change).values()
    ]
    with pytest.raises(ValueError, match=re.escape(message)):
        fill_schedule(ScheduleShape.of(plan), allocate(plan, "cpu").tensors, *given_)


def test_a_buffer_of_another_dtype():
    plan = plan_metadata(with_heads(8), GFX942, batch=2, cu_count=4)
    tensors = allocate(plan, "cpu").tensors
    wrong = tensors | {"work_info_set": tensors["work_info_set"].long()}
    with pytest.raises(ValueError, match=r"work_info_set: expected torch\.int32, got torch\.int64"):
        fill_schedule(ScheduleShape.of(plan), wrong, *make_step([1], [4], dim=1).for_schedule)


def test_lengths():
    assert kv_lengths([0, 0, 2, 3], [9, 16, 1], 16) == [0, 32, 1]
