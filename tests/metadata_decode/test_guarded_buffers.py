"""The buffers are used at the sizes that the plan gave them, and what was sized for other heads is caught."""

from __future__ import annotations

import attrs
import pytest
import torch
from decode_support import GFX942, GFX950, SCALE, VALUES, Guarded, make_query, make_step, mla, with_heads

from layerfuse.fusion.metadata import MetadataBuffers, plan_metadata
from layerfuse.fusion.metadata.buffers import specs_of
from layerfuse.fusion.metadata.errors import BufferTooSmallError, ScheduleMismatchError
from layerfuse.fusion.metadata.reference_decode import decode_planned, decode_scheduled
from layerfuse.fusion.metadata.reference_schedule import ScheduleShape, fill_schedule
from layerfuse.fusion.metadata.sizes import BUFFERS, metadata_shapes

UNITS = 6


def sized_for(plan, heads):
    """The same plan with buffers and scratch of another head count: what an engine allocates that counts for itself."""
    shapes = metadata_shapes(attrs.evolve(plan.case, heads=heads), plan.releases.last)
    scratch = tuple(
        attrs.evolve(
            buffer, shape=(shapes["reduce_partial_map"][0] * plan.max_query_length, 1, heads, *buffer.shape[3:])
        )
        for buffer in plan.scratch[:2]
    )
    return attrs.evolve(plan, buffers=specs_of(shapes), scratch=scratch)


def decoded(guarded, step, q, *, reach=None):
    buffers, scratch = (guarded.buffers, guarded.scratch) if reach is None else reach
    options = {"softmax_scale": SCALE, "value_width": VALUES, "scratch": scratch}
    return decode_planned(buffers, q, step.kv_buffer, *step.indices, **options)


def full_step(plan):
    """As many sequences and queries as were planned, none of which ends where a cut lies."""
    return make_step([plan.max_query_length] * plan.batch, [97 + 31 * i for i in range(plan.batch)])


BUGS = [
    # the layer, queries per sequence, the heads that its buffers were sized for
    pytest.param(mla("kimi-k2.5", 8), 1, 8, id="kimi-k2.5: 8 heads, kernel 16 (vLLM 38615)"),
    pytest.param(mla("kimi-k2.5", 8), 2, 8, id="kimi-k2.5: the same with 2 queries"),
    pytest.param(with_heads(40), 1, 32, id="40 heads, counted as 32, kernel 48"),
    pytest.param(mla("glm-4.7-flash"), 1, 16, id="glm-4.7-flash: 20 heads, counted as 16, kernel 32"),
    pytest.param(with_heads(120), 2, 112, id="120 heads, counted as 112, kernel 128"),
]


@pytest.mark.parametrize(("spec", "queries", "heads"), BUGS)
def test_buffers_of_other_heads_are_refused_before_anything_is_written_past_them(spec, queries, heads):
    plan = plan_metadata(spec, GFX942, batch=7, max_query_length=queries, cu_count=UNITS)
    step = full_step(plan)
    q = make_query(step, spec.num_local_heads)
    assert heads < plan.heads.kernel_heads
    guarded = Guarded(sized_for(plan, heads))
    bug = attrs.evolve(guarded.buffers, plan=plan)
    with pytest.raises(BufferTooSmallError, match="Size it by the plan of the heads that the kernel gets"):
        decoded(guarded, step, q, reach=(bug, guarded.scratch))
    assert guarded.broken == []
    right = Guarded(plan)
    decoded(right, step, q)
    assert right.broken == []


@pytest.mark.parametrize(("spec", "queries", "heads"), BUGS)
def test_the_guard_bytes_show_what_a_kernel_without_checks_does(spec, queries, heads):
    """Over the same memory, with the reach of a kernel that believes its buffers were sized for the heads it gets."""
    plan = plan_metadata(spec, GFX942, batch=7, max_query_length=queries, cu_count=UNITS)
    step = full_step(plan)
    guarded = Guarded(sized_for(plan, heads))
    raw = {name: torch.full((len(raw) * 4,), 0xA5, dtype=torch.uint8) for name, (raw, _) in guarded.raw.items()}
    guarded.raw = {name: (raw[name], size) for name, (_, size) in guarded.raw.items()}
    decoded(guarded, step, make_query(step, spec.num_local_heads), reach=guarded.reach(plan))
    assert guarded.broken != []


@pytest.mark.parametrize("target", [GFX942, GFX950], ids=str)
@pytest.mark.parametrize("queries", [1, 2, 4])
@pytest.mark.parametrize("heads", [1, 4, 8, 12, 16, 20, 24, 32, 48, 64, 80, 96, 128])
def test_a_full_step_leaves_every_guard_whole(heads, queries, target):
    plan = plan_metadata(with_heads(heads), target, batch=7, max_query_length=queries, cu_count=UNITS)
    guarded = Guarded(plan)
    step = full_step(plan)
    decoded(guarded, step, make_query(step, heads))
    assert guarded.broken == []


def test_the_sizes_leave_no_room():
    """A full step, one that no cut suits, takes every row of the work; one row less is refused."""
    plan = plan_metadata(with_heads(20), GFX942, batch=7, cu_count=UNITS)
    guarded, step = Guarded(plan), full_step(plan)
    decoded(guarded, step, make_query(step, 20))
    tensors = guarded.buffers.tensors
    assert int(tensors["work_indptr"][-1]) == tensors["work_info_set"].shape[0] == (7 + UNITS - 1) * 2
    for name in ("work_info_set", "work_indptr"):
        tight = {**tensors, name: tensors[name][:-1]}
        with pytest.raises(BufferTooSmallError, match=f"{name}: "):
            fill_schedule(ScheduleShape.of(plan), tight, *step.for_schedule)


@pytest.mark.parametrize("name", [*BUFFERS, "output", "lse"])
def test_each_buffer_is_looked_at(name):
    plan = plan_metadata(with_heads(40), GFX942, batch=2, max_query_length=2, cu_count=UNITS)
    guarded, step = Guarded(plan), make_step([2, 2], [400, 300])
    tensors, scratch = dict(guarded.buffers.tensors), guarded.scratch
    if name in tensors:
        tensors[name] = tensors[name][:1]
    else:
        needed = tensors["reduce_partial_map"].shape[0] * ScheduleShape.of(plan).slot_rows
        scratch = attrs.evolve(scratch, **{name: getattr(scratch, name)[: needed - 1]})
    with pytest.raises(BufferTooSmallError) as caught:
        decoded(guarded, step, make_query(step, 40), reach=(attrs.evolve(guarded.buffers, tensors=tensors), scratch))
    assert (
        caught.value.name in (name, f"partial {name}", "partial log-sum-exp")
        and caught.value.needed > caught.value.found
    )
    assert guarded.broken == []


def test_the_message():
    plan = plan_metadata(mla("glm-4.7-flash"), GFX942, batch=4, cu_count=UNITS)
    guarded = Guarded(sized_for(plan, 16))
    step = full_step(plan)
    with pytest.raises(BufferTooSmallError) as caught:
        decoded(guarded, step, make_query(step, 20), reach=(attrs.evolve(guarded.buffers, plan=plan), guarded.scratch))
    assert str(caught.value) == (
        "reduce_final_map: 8 rows are needed, it has 4 (32 heads in tiles of 16 rows, 6 parts). Nothing was written. "
        "Size it by the plan of the heads that the kernel gets"
    )


# ---- a schedule that is not this step's


def scheduled(heads=8, queries=(1, 2), lengths=(90, 40)):
    plan = plan_metadata(with_heads(heads), GFX942, batch=2, max_query_length=2, cu_count=UNITS)
    guarded, step = Guarded(plan), make_step(queries, lengths)
    fill_schedule(ScheduleShape.of(plan), guarded.buffers.tensors, *step.for_schedule)
    return plan, guarded, step


def run(plan, guarded, step, q, tensors=None, **shape):
    return decode_scheduled(
        *(attrs.evolve(ScheduleShape.of(plan), **shape), tensors or guarded.buffers.tensors, guarded.scratch, q),
        *(step.kv_buffer, *step.indices),
        softmax_scale=SCALE,
        value_width=VALUES,
    )


def test_a_schedule_for_other_heads_is_refused():
    """Of 16 heads, where the query has 32: half of its rows would stay as they were (SGLang 32625)."""
    plan, guarded, step = scheduled()
    with pytest.raises(ScheduleMismatchError, match="scheduled for other heads or lengths"):
        run(plan, guarded, step, make_query(step, 32), heads=32, tile_rows=32)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"lengths": (91, 40)}),
        ({}, {"queries": (2, 2)}),
        ({}, {"lengths": (90, 0)}),
        ({"lengths": (0, 40)}, {"lengths": (0, 40), "queries": (2, 2)}),  # the same rows, one token later
        ({"queries": (1, 2)}, {"queries": (1,), "lengths": (90,)}),
    ],
)
def test_the_schedule_of_the_step_before_is_refused(before, after):
    plan, guarded, _ = scheduled(**before)
    queries, lengths = ({"queries": (1, 2), "lengths": (90, 40)} | after).values()
    step = make_step(queries, lengths)
    with pytest.raises(ScheduleMismatchError):
        run(plan, guarded, step, make_query(step, 16))


def test_buffers_that_moved_are_refused():
    plan, guarded, step = scheduled()
    moved = {name: tensor.clone() for name, tensor in guarded.buffers.tensors.items()}
    with pytest.raises(ScheduleMismatchError, match="point at other buffers"):
        run(plan, guarded, step, make_query(step, 16), moved)


def test_steps_follow_each_other_in_the_same_buffers():
    """What a longer step left behind is not read by a shorter one."""
    _, guarded, _ = scheduled()
    for lengths in ((900, 700), (1, 1), (0, 0), (33, 500)):
        step = make_step((1, 2), lengths)
        q = make_query(step, 8)
        found = decoded(guarded, step, q)
        for tensor in guarded.buffers.tensors.values():
            (tensor.view(torch.int64) if tensor.dtype == torch.uint64 else tensor).fill_(-1)
        guarded.scratch.output.fill_(torch.nan)
        guarded.scratch.lse.fill_(torch.nan)
        assert all(torch.equal(*pair) for pair in zip(found, decoded(guarded, step, q), strict=True))
        assert not any(each.isnan().any() for each in found)
    assert isinstance(guarded.buffers, MetadataBuffers) and guarded.broken == []
