"""What every binding is asked for at a small size, and what layerfuse's own plain torch says to it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from check_tools import EPSILON, LEADING, pair, random, same, same_quantised, weight
from norm_checks import check_op
from torch import Tensor

from layerfuse.fusion.backends import aiter as amd
from layerfuse.fusion.backends.aiter import Bound
from layerfuse.fusion.backends.aiter.mla import PLAN
from layerfuse.fusion.ops.norm import normalise_wide


def plan_of(sizes: dict[str, Any]) -> dict[str, Tensor]:
    """Buffers as large as AITER says."""
    return {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in sizes.items()}


def _batch(requests: int = 4, pages: int = 3) -> dict[str, Tensor]:
    return {
        "qo_indptr": torch.arange(requests + 1, dtype=torch.int32),
        "kv_indptr": torch.arange(requests + 1, dtype=torch.int32) * pages,
        "kv_last_page_lens": torch.ones(requests, dtype=torch.int32),
    }


def mla_metadata_info(call: Callable[..., Any]) -> None:
    from standin.mla_sizes import mla_shapes

    release = sys.modules["aiter._standin"].RELEASE
    sizes = call(64, 1, 16, torch.bfloat16, torch.bfloat16, False)
    assert tuple(sizes) == PLAN
    expected = mla_shapes(release, "gfx950", 64, 1, 16, torch.bfloat16, torch.bfloat16, False, True, 32, False, -1)
    assert [size for size, _ in sizes.values()] == [(s,) if isinstance(s, int) else tuple(s) for s, _ in expected]
    assert [dtype for _, dtype in sizes.values()] == [dtype for _, dtype in expected]


def ps_metadata_info(call: Callable[..., Any]) -> None:
    sizes = call(4, 1, 512, 256)
    assert tuple(sizes) == PLAN
    compute_units = 256  # gfx950 in the stand-ins
    assert [size for size, _ in sizes.values()] == [
        *((2,), (compute_units + 1,), ((4 + compute_units - 1) * 2, 8), (4 * 2 + 1,), (4 * 2, 2)),
        (min(4 + compute_units - 1, 2 * (compute_units - 1)) * 2,),
    ]


def mla_metadata(call: Callable[..., Any]) -> None:
    batch = _batch()
    buffers = plan_of(amd.bound("mla_metadata_info").call(4, 1, 16, torch.bfloat16, torch.bfloat16, False))
    call(*batch.values(), 16, 1, True, buffers, max_seqlen_qo=1, uni_seqlen_qo=1)
    assert buffers["work_indptr"].unique().numel() == 1, "the buffer of another kind was filled"
    assert buffers["work_info_set"].flatten()[:2].tolist() == [4, 16]


def mla_decode(call: Callable[..., Any]) -> None:
    batch = _batch()
    q, kv = random(4, 16, 576), random(12, 1, 1, 576)
    indices = torch.arange(12, dtype=torch.int32)
    arguments = (q, kv, *list(batch.values())[:2], indices, batch["kv_last_page_lens"], 1, 512)
    scores = torch.einsum("bhd,bpd->bhp", q.float(), kv.float().view(4, 3, 576)) * 0.07
    expected = torch.einsum("bhp,bpd->bhd", scores.softmax(-1), kv.float().view(4, 3, 576)[..., :512])
    plans = [None]
    if isinstance(planner := amd.bind("mla_metadata"), Bound):
        sizes = amd.bound("mla_metadata_info").call(4, 1, 16, torch.bfloat16, torch.bfloat16, False)
        plans.append(plan_of(sizes))
        planner.call(*batch.values(), 16, 1, True, plans[-1], max_seqlen_qo=1, uni_seqlen_qo=1)
    for plan in plans:
        out = call(*arguments, softmax_scale=0.07, buffers=plan)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.02)


def communicator() -> Any:
    """One of AITER's, of the stand-in's two ranks that hold the same."""
    return sys.modules["aiter.dist.device_communicators.custom_all_reduce"].CustomAllreduce(None, torch.device("cpu"))


def all_reduce_rms_norm(call: Callable[..., Any], offset: float = 0.0) -> None:
    ranks = communicator()
    for leading in LEADING:
        for one_stage in (False, True):
            x = random(*leading, 2 * 1024)[..., :1024]  # the communicator takes what is contiguous only
            residual = random(*leading, 1024, seed=2)
            out, summed = call(ranks, x, residual, weight(1024), EPSILON, offset, one_stage)
            wide = x.float() + residual.float()
            same(summed, wide.to(x.dtype))
            same(out, normalise_wide(wide, weight(1024).float(), EPSILON, offset).to(x.dtype))
    many = random(100, 1024)  # more tokens than a launch in one stage has blocks
    assert call(ranks, many, many, weight(1024), EPSILON, 0.0, True) is not None
    ranks._IS_CAPTURING, ranks.enable_register_for_capturing = True, False
    assert call(ranks, many, many, weight(1024), EPSILON, 0.0, True) is None, "its input is not registered"
    ranks._IS_CAPTURING = False
    ranks.world_size = 3  # one pack of 16 bytes among three ranks: AITER would drop it
    assert call(ranks, x[..., :8], x[..., :8], weight(8), EPSILON, 0.0, True) is None
    ranks.disabled = True
    assert call(ranks, many, many, weight(1024), EPSILON, 0.0, True) is None


def all_reduce_rms_norm_group_quant(call: Callable[..., Any], columns: bool = False) -> None:
    ranks = communicator()
    for leading in LEADING:
        if 0 in leading:
            continue  # declined: the fp8 flavour is AITER's to say
        x, residual = random(*leading, 2 * 1024)[..., :1024], random(*leading, 1024, seed=2)
        out, scales, summed = call(ranks, x, residual, weight(1024), EPSILON, 0.0, 128, columns, False)
        wide = x.float() + residual.float()
        same(summed, wide.to(x.dtype))
        same_quantised((out, scales), normalise_wide(wide, weight(1024).float(), EPSILON), 128, columns)
    ranks.disabled = True
    assert call(ranks, x, residual, weight(1024), EPSILON, 0.0, 128, columns, False) is None


def quick_reduce() -> int:
    module = sys.modules["aiter.ops.quick_all_reduce"]
    address: int = module.init_custom_qr(0, 2)
    return address


def qr_handles(call: Callable[..., Any]) -> None:
    seen: list[Tensor] = []

    def exchange(handle: Tensor) -> list[Tensor]:
        seen.append(handle)
        return [handle, handle.clone()]

    call(quick_reduce(), exchange)
    assert seen[0].tolist() == list(range(64))


def qr_all_reduce_rms_norm(call: Callable[..., Any]) -> None:
    for leading in LEADING:
        x, _ = pair(*leading)
        residual = random(*leading, 256, seed=2)
        out, summed = call(quick_reduce(), x, residual, weight(256), EPSILON, 0.0, 2, False)
        wide = x.float() + residual.float()
        same(summed, wide.to(x.dtype))
        same(out, normalise_wide(wide, weight(256).float(), EPSILON).to(x.dtype))


CALLS: dict[str, Callable[[Callable[..., Any]], None]] = {
    function.__name__: function
    for function in (
        mla_metadata_info,
        ps_metadata_info,
        mla_metadata,
        mla_decode,
        all_reduce_rms_norm,
        all_reduce_rms_norm_group_quant,
        qr_handles,
        qr_all_reduce_rms_norm,
    )
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
    else:
        check_op(bound.call, op)


def mla_decode_of_several_queries(call: Callable[..., Any], heads: int = 32) -> None:
    """Two queries for each request, and heads that are folded: some releases point the output at other storage."""
    batch = _batch() | {"qo_indptr": torch.arange(5, dtype=torch.int32) * 2}
    q, kv = random(8, heads, 576), random(12, 1, 1, 576)
    sizes = amd.bound("mla_metadata_info").call(4, 2, heads, torch.bfloat16, torch.bfloat16, False)
    plan = plan_of(sizes)
    amd.bound("mla_metadata").call(*batch.values(), heads, 1, True, plan, max_seqlen_qo=2, uni_seqlen_qo=2)
    indices = torch.arange(12, dtype=torch.int32)
    arguments = (q, kv, batch["qo_indptr"], batch["kv_indptr"], indices, batch["kv_last_page_lens"], 2, 512)
    out = call(*arguments, softmax_scale=0.07, buffers=plan)
    keys = kv.float().view(4, 3, 576)
    scores = torch.einsum("bthd,bpd->bthp", q.float().view(4, 2, heads, 576), keys) * 0.07
    scores[:, 0, :, 2] = -torch.inf  # the first of the two does not see the second one's key
    expected = torch.einsum("bthp,bpd->bthd", scores.softmax(-1), keys[..., :512]).view(8, heads, 512)
    torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.02)
