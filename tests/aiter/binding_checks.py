"""What every binding is asked for at a small size, and what layerfuse's own plain torch says to it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from check_tools import LEADING, random, weight
from norm_checks import DEFAULTS, OPS, check_op, same_results
from torch import Tensor

from layerfuse.fusion.backends import aiter as amd
from layerfuse.fusion.backends.aiter import Bound, communicators
from layerfuse.fusion.backends.aiter.mla import PLAN
from layerfuse.fusion.metadata import sizes
from layerfuse.fusion.ops.groups import process_group


def plan_of(said: dict[str, Any]) -> dict[str, Tensor]:
    """Buffers as large as AITER says."""
    return {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in said.items()}


def _batch(requests: int = 4, pages: int = 3) -> dict[str, Tensor]:
    return {
        "qo_indptr": torch.arange(requests + 1, dtype=torch.int32),
        "kv_indptr": torch.arange(requests + 1, dtype=torch.int32) * pages,
        "kv_last_page_lens": torch.ones(requests, dtype=torch.int32),
    }


def mla_metadata_info(call: Callable[..., Any]) -> None:
    release = sys.modules["aiter._standin"].RELEASE
    found = call(64, 1, 16, torch.bfloat16, torch.bfloat16, False)
    assert tuple(found) == PLAN
    case = sizes.Case(batch=64, queries=1, heads=16, q="bf16", kv="bf16", arch="gfx950", cu_count=256)
    assert [tuple(size) for size, _ in found.values()] == list(sizes.metadata_shapes(case, release).values())
    assert [str(dtype) for _, dtype in found.values()] == [f"torch.{each}" for each in sizes.BUFFER_DTYPE.values()]


def mla_metadata(call: Callable[..., Any]) -> None:
    batch = _batch()
    buffers = plan_of(amd.bound("mla_metadata_info").call(4, 1, 16, torch.bfloat16, torch.bfloat16, False))
    call(*batch.values(), 16, 1, True, buffers, max_seqlen_qo=1, uni_seqlen_qo=1)
    assert buffers["work_indptr"].unique().numel() == 1, "the buffer of another kind was filled"
    assert buffers["work_info_set"].flatten()[:2].tolist() == [4, 16]
    call(*batch.values(), 16, 1, True, buffers, kv_granularity=1)


def mla_decode(call: Callable[..., Any]) -> None:
    batch = _batch()
    q, kv = random(4, 16, 576), random(12, 1, 1, 576)
    indices = torch.arange(12, dtype=torch.int32)
    arguments = (q, kv, *list(batch.values())[:2], indices, batch["kv_last_page_lens"], 1, 512)
    scores = torch.einsum("bhd,bpd->bhp", q.float(), kv.float().view(4, 3, 576)) * 0.07
    expected = torch.einsum("bhp,bpd->bhd", scores.softmax(-1), kv.float().view(4, 3, 576)[..., :512])
    planned = plan_of(amd.bound("mla_metadata_info").call(4, 1, 16, torch.bfloat16, torch.bfloat16, False))
    amd.bound("mla_metadata").call(*batch.values(), 16, 1, True, planned, max_seqlen_qo=1, uni_seqlen_qo=1)
    for plan in (None, planned):
        out = call(*arguments, softmax_scale=0.07, buffers=plan)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.02)


@contextlib.contextmanager
def group_of_one() -> Iterator[str]:
    """The name of a process group of this process alone."""
    started = not dist.is_initialized()
    if started:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD.group_name
    finally:
        communicators.close()
        if started:
            dist.destroy_process_group()


@contextlib.contextmanager
def holding(ranks: Any = None) -> Iterator[tuple[str, Any]]:
    """A group with one of AITER's communicators, whose other rank holds zeros: a group of one can have none of its own."""
    if ranks is None:
        made = sys.modules["aiter.dist.device_communicators.custom_all_reduce"].CustomAllreduce
        ranks = made(None, torch.device("cpu"))
    with group_of_one() as group:
        of = process_group(group)
        communicators._held[group, torch.device("cpu")] = communicators._Held(of=of, communicator=ranks)
        yield group, ranks


def all_reduce_case(op: str, group: str, leading: tuple[int, ...], width: int = 1024, **options: Any) -> list[Any]:
    """The arguments of an op: rows that are further apart than they are wide."""
    x, residual = random(*leading, 2 * width)[..., :width], random(*leading, width + 8, seed=2)[..., :width]
    tensors = {"x": x, "residual": residual, "weight": weight(width), "padded_width": width + 128, "group": group}
    values = DEFAULTS | tensors | options
    return [values[argument.name] for argument in OPS[op].args]


def check_all_reduce(call: Callable[..., Any], op: str, **options: Any) -> None:
    """One launch of AITER's for each call that is not empty, and what the op's reference gives."""
    with holding() as (group, ranks):
        # 100: more tokens than a launch in one stage has blocks in some releases.
        for leading in (*LEADING, *(() if "quant" in op else ((100,),))):
            given = all_reduce_case(op, group, leading, **options)
            ranks.launches.clear()
            same_results(call(*given), OPS[op], given)
            assert len(ranks.launches) == (0 not in leading), "the op's pieces ran"


CALLS: dict[str, Callable[[Callable[..., Any]], None]] = {
    function.__name__: function for function in (mla_metadata_info, mla_metadata, mla_decode)
}
"""What is no op's backend."""


def check_numbers(bound: Bound) -> None:
    """Check that the binding gives the right numbers.

    Raises:
        AssertionError: it does not, or AITER's function would have been misused.
    """
    op = bound.probed.binding.op
    if op in CALLS:
        CALLS[op](bound.call)
    elif op.startswith("all_reduce"):
        check_all_reduce(bound.call, op)
    else:
        check_op(bound.call, op)


def mla_decode_of_several_queries(call: Callable[..., Any], heads: int = 32) -> None:
    """Two queries for each request, and heads that are folded: some releases point the output at other storage."""
    batch = _batch() | {"qo_indptr": torch.arange(5, dtype=torch.int32) * 2}
    q, kv = random(8, heads, 576), random(12, 1, 1, 576)
    plan = plan_of(amd.bound("mla_metadata_info").call(4, 2, heads, torch.bfloat16, torch.bfloat16, False))
    amd.bound("mla_metadata").call(*batch.values(), heads, 1, True, plan, max_seqlen_qo=2, uni_seqlen_qo=2)
    indices = torch.arange(12, dtype=torch.int32)
    arguments = (q, kv, batch["qo_indptr"], batch["kv_indptr"], indices, batch["kv_last_page_lens"], 2, 512)
    out = call(*arguments, softmax_scale=0.07, buffers=plan)
    keys = kv.float().view(4, 3, 576)
    scores = torch.einsum("bthd,bpd->bthp", q.float().view(4, 2, heads, 576), keys) * 0.07
    scores[:, 0, :, 2] = -torch.inf  # the first of the two does not see the second one's key
    expected = torch.einsum("bthp,bpd->bthd", scores.softmax(-1), keys[..., :512]).view(8, heads, 512)
    torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.02)
