"""The buffers: addresses, growth, and the calls that fill and use them, on stand-ins of AITER's releases."""

from __future__ import annotations

import attrs
import pytest
import torch
from mla_layers import FP8, GFX942, GFX950, mla, with_heads
from torch.utils._python_dispatch import TorchDispatchMode

from layerfuse.fusion.backends import aiter as amd
from layerfuse.fusion.metadata import HeadCountError, PlanExceededError, allocate, plan_metadata
from layerfuse.fusion.metadata.sizes import BUFFERS

KIMI = mla("kimi-k2.5", 8)


def step(sequences: int, pages: int = 3, queries: int = 1) -> tuple[torch.Tensor, ...]:
    """qo_indptr, kv_indptr and kv_last_page_lens of sequences of so many pages of one token."""
    each = torch.arange(sequences + 1, dtype=torch.int32)
    return each * queries, each * pages, torch.ones(sequences, dtype=torch.int32)


def addresses(buffers):
    return {name: tensor.data_ptr() for name, tensor in buffers.tensors.items()}


def test_they_are_what_was_planned():
    plan = plan_metadata(KIMI, GFX950, batch=64)
    buffers = allocate(plan, "cpu")
    assert {name: tuple(tensor.shape) for name, tensor in buffers.tensors.items()} == {
        buffer.name: buffer.shape for buffer in plan.buffers
    }
    assert buffers.bytes == plan.buffer_bytes
    assert buffers["work_metadata_ptrs"].dtype == torch.uint64
    assert all(not tensor.any() for name, tensor in buffers.tensors.items() if name != "work_metadata_ptrs")


def test_only_a_larger_plan_moves_what_is_too_small():
    large = allocate(plan_metadata(KIMI, GFX950, batch=64), "cpu")
    small = allocate(plan_metadata(KIMI, GFX950, batch=8), "cpu", reuse=large)
    assert addresses(small) == addresses(large)
    assert small["reduce_final_map"].shape == (8, 2)
    again = allocate(plan_metadata(KIMI, GFX950, batch=64), "cpu", reuse=small)
    assert addresses(again) == addresses(large)
    grown = allocate(plan_metadata(KIMI, GFX950, batch=128), "cpu", reuse=again)
    kept = {name for name in BUFFERS if addresses(grown)[name] == addresses(large)[name]}
    assert kept == {"work_metadata_ptrs", "work_indptr"}


@pytest.mark.parametrize("release", ["v0.1.16.post3", "v0.1.17", "v0.1.18", "v0.1.20.post1"])
@pytest.mark.parametrize(("heads", "tp"), [(64, 8), (96, 8), (32, 8), (64, 1)])
def test_decoding_by_a_plan_is_plain_attention(aiter_of, release, heads, tp):
    """The stand-in refuses buffers that are too small, in another order, or filled for other heads than it is given."""
    aiter_of(release)
    plan = plan_metadata(with_heads(heads, tp), GFX950, batch=4, build=amd.bound("mla_metadata_info"))
    assert release in plan.releases
    assert plan.source == "the installed aiter.ops.attention:get_mla_metadata_info_v1"
    buffers = allocate(plan, "cpu")
    indices = step(4)
    buffers.build(*indices, uniform=True)
    q, kv = torch.randn(4, heads // tp, 576, dtype=torch.bfloat16), torch.randn(12, 1, 1, 576, dtype=torch.bfloat16)
    out = buffers.decode(*(q, kv, *indices[:2], torch.arange(12, dtype=torch.int32), indices[2]), softmax_scale=0.07)
    scores = torch.einsum("bhd,bpd->bhp", q.float(), kv.float().view(4, 3, 576)) * 0.07
    expected = torch.einsum("bhp,bpd->bhd", scores.softmax(-1), kv.float().view(4, 3, 576)[..., :512])
    torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.02)


def test_buffers_of_the_layers_own_heads_are_caught(aiter_of):
    """Buffers and metadata sized for the 20 heads of the layer, as `max(16, n)` did, where the kernel gets 32."""
    from standin import StandInMisuse

    aiter_of("v0.1.18", arch="gfx942")
    plan = plan_metadata(with_heads(20), GFX942, batch=300, build=amd.bound("mla_metadata_info"))
    assert plan.heads.kernel_heads == 32
    small = plan_metadata(with_heads(16), GFX942, batch=300)
    buffers = attrs.evolve(allocate(small, "cpu"), plan=plan)
    with pytest.raises(StandInMisuse, match="past its end"):
        buffers.build(*step(300), uniform=True)


def test_the_installed_function_is_believed_and_a_disagreement_said(aiter_of):
    aiter_of("v0.1.18")
    build = amd.bound("mla_metadata_info")
    assert plan_metadata(KIMI, GFX950, batch=256, build=build, **FP8).warnings == ()
    other = plan_metadata(KIMI, GFX950, batch=256, cu_count=80, build=build, **FP8)
    assert other.buffer("work_indptr").shape == (257,)
    (warning,) = other.warnings
    assert "sizes otherwise" in warning
    assert "work_indptr (257,) where (81,) was recorded" in warning


class Counting(TorchDispatchMode):
    """Counts every operation that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_step_runs_no_operation_of_its_own(aiter_of):
    """No operation is no allocation and no wait: what is left is AITER's own function, here one that does nothing."""
    aiter_of("v0.1.18")
    plan = plan_metadata(KIMI, GFX950, batch=64)
    buffers, indices = allocate(plan, "cpu"), step(4)
    buffers.build(*indices)
    planner = amd.bound("mla_metadata")
    taken = []
    made = amd.bind("mla_metadata")
    from layerfuse.fusion.backends.aiter import mla as calls
    from layerfuse.fusion.backends.aiter.table import Resolved

    nothing = Resolved(
        binding=planner.probed.binding,
        function=lambda **kwargs: taken.append(kwargs),
        names=planner.probed.main.names,
        releases=planner.probed.releases,
    )
    quiet = attrs.evolve(made, call=calls.metadata(nothing))
    before = addresses(buffers)
    with Counting() as counting:
        for _ in range(3):
            buffers.build(*indices, function=quiet)
    assert counting.seen == []
    assert addresses(buffers) == before
    assert len(taken) == 3
    assert taken[0]["num_heads_per_head_k"] == 16
    assert all(taken[0][name] is buffers[name] for name in BUFFERS)


def test_a_step_that_was_not_planned_for_is_refused():
    """SGLang's rows past the planned ones corrupted silently (sgl-project/sglang pull request 32625)."""
    buffers = allocate(plan_metadata(KIMI, GFX950, batch=4), "cpu")
    with pytest.raises(PlanExceededError, match="planned for 4 sequences, and this step has 5"):
        buffers.build(*step(5))
    qo, kv, last = step(4)
    with pytest.raises(PlanExceededError):
        buffers.build(qo[:-1], kv, last)


def test_a_query_of_other_heads_is_refused(aiter_of):
    aiter_of("v0.1.18")
    buffers, indices = allocate(plan_metadata(KIMI, GFX950, batch=4), "cpu"), step(4)
    with pytest.raises(HeadCountError, match="q: expected"):
        buffers.decode(
            *(torch.zeros(4, 16, 576), torch.zeros(12, 1, 1, 576), *indices[:2]),
            *(torch.arange(12, dtype=torch.int32), indices[2]),
            softmax_scale=1.0,
        )


def test_24_native_heads_decode_as_they_are(aiter_of):
    aiter_of("v0.1.20")
    plan = plan_metadata(with_heads(24), GFX950, "v0.1.20", batch=4, build=amd.bound("mla_metadata_info"))
    assert (plan.heads.kernel_heads, plan.heads.how) == (24, "native")
    buffers, indices = allocate(plan, "cpu"), step(4)
    buffers.build(*indices, uniform=True)
    q, kv = torch.randn(4, 24, 576, dtype=torch.bfloat16), torch.randn(12, 1, 1, 576, dtype=torch.bfloat16)
    out = buffers.decode(q, kv, *indices[:2], torch.arange(12, dtype=torch.int32), indices[2], softmax_scale=0.07)
    scores = torch.einsum("bhd,bpd->bhp", q.float(), kv.float().view(4, 3, 576)) * 0.07
    expected = torch.einsum("bhp,bpd->bhd", scores.softmax(-1), kv.float().view(4, 3, 576)[..., :512])
    torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.02)


def test_context_parallel_steps_of_several_queries_are_refused():
    """The mask would be wrong: its option is not bound."""
    buffers = allocate(plan_metadata(KIMI, GFX950, batch=2, max_query_length=2, dcp=2), "cpu")
    with pytest.raises(amd.AiterCallError, match="several queries under decode context parallelism"):
        buffers.build(*step(2, queries=2))


@pytest.mark.parametrize("page_size", [16, 64])
def test_pages_of_several_tokens(aiter_of, page_size):
    aiter_of("v0.1.18")
    plan = plan_metadata(KIMI, GFX950, batch=2, page_size=page_size)
    buffers = allocate(plan, "cpu")
    each = torch.tensor([0, 1, 2], dtype=torch.int32)
    indices = (each, torch.tensor([0, 2, 3], dtype=torch.int32), torch.tensor([3, page_size], dtype=torch.int32))
    buffers.build(*indices, uniform=True)
    q, kv = torch.randn(2, 8, 576, dtype=torch.bfloat16), torch.randn(3, page_size, 1, 576, dtype=torch.bfloat16)
    out = buffers.decode(q, kv, *indices[:2], torch.arange(3, dtype=torch.int32), indices[2], softmax_scale=0.07)
    for row, keys in enumerate((kv[:2].flatten(0, 2)[: page_size + 3].float(), kv[2].flatten(0, 1).float())):
        expected = (q[row].float() @ keys.T * 0.07).softmax(-1) @ keys[:, :512]
        torch.testing.assert_close(out[row].float(), expected, rtol=0.02, atol=0.02)


def test_sparse_queries_are_sequences_of_their_own(aiter_of):
    aiter_of("v0.1.18")
    plan = plan_metadata(KIMI, GFX950, batch=2, max_query_length=3, sparse=True, topk=64)
    buffers = allocate(plan, "cpu")
    buffers.build(*step(6))
    assert buffers["reduce_final_map"].shape == (6, 2)
    assert buffers["work_info_set"].flatten()[:3].tolist() == [6, 16, 1]
    with pytest.raises(PlanExceededError, match="planned for 6"):
        buffers.build(*step(7))


def test_a_decode_that_was_not_planned_for_is_refused():
    """Before anything is called: more sequences, more query tokens, ranks that share a context."""
    plan = plan_metadata(KIMI, GFX950, "v0.1.18", batch=2, max_query_length=2)
    buffers = allocate(plan, "cpu")

    def decode(tokens, sequences, held=buffers):
        indptr = torch.arange(sequences + 1, dtype=torch.int32)
        q, cache = torch.zeros(tokens, held.plan.heads.num_heads, 576), torch.zeros(sequences, 1, 1, 576)
        held.decode(q, cache, indptr, indptr, indptr[:-1], indptr[1:], softmax_scale=1.0)

    with pytest.raises(PlanExceededError, match="planned for 2 sequences, and this step has 5"):
        decode(5, 5)
    with pytest.raises(PlanExceededError, match="planned for 4 query tokens, and q has 5"):
        decode(5, 2)
    shared = allocate(plan_metadata(KIMI, GFX950, "v0.1.18", batch=2, dcp=2), "cpu")
    with pytest.raises(amd.AiterCallError, match="decode context parallelism"):
        decode(2, 2, shared)
