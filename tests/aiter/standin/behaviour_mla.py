"""The attention metadata: how large it is, and what its builder checks, assumes and writes.

The builder's real contents are a plan for a GPU. The stand-in writes what it was asked for instead, so that the decode
can tell metadata of another geometry, or buffers in another order, from the right ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .behaviour import Call, body
from .misuse import check, expect, expect_bool, expect_int
from .mla_sizes import Shapes, mla_shapes, ps_shapes

MODULE = "aiter.ops.attention"
BUFFERS = (
    "work_metadata_ptrs",
    "work_indptr",
    "work_info_set",
    "reduce_indptr",
    "reduce_final_map",
    "reduce_partial_map",
)
"""The order in which `get_mla_metadata_info_v1` names them, which is not that of `get_mla_metadata_v1` since v0.1.8."""

FILLED = {"work_indptr": 11, "reduce_indptr": 13, "reduce_final_map": 14, "reduce_partial_map": 15}
"""What the builder leaves in the buffers that hold no parameters."""


@body(f"{MODULE}:get_mla_metadata_info_v1")
def get_mla_metadata_info_v1(call: Call) -> Shapes:
    """Shapes and dtypes; one-dimensional shapes are plain ints."""
    for name in ("batch_size", "max_seqlen_qo", "num_head_qo"):
        expect_int(call[name], name)
    if call.since("v0.1.7.post5"):
        expect_bool(call["is_sparse"], "is_sparse")
        expect_bool(call["intra_batch_mode"], "intra_batch_mode")
        expect_int(call["num_kv_splits"], "num_kv_splits")
    expect_bool(call["fast_mode"], "fast_mode")
    for name in ("q_dtype", "kv_dtype"):
        expect(isinstance(call[name], torch.dtype), f"{name} is {call[name]!r}, no dtype")
    return mla_shapes(
        call.release,
        call.arch,
        call["batch_size"],
        call["max_seqlen_qo"],
        call["num_head_qo"],
        call["q_dtype"],
        call["kv_dtype"],
        bool(call["is_sparse"]),
        call["fast_mode"],
        call.get("num_kv_splits", 32),
        call.get("intra_batch_mode", False),
        call.get("max_split_per_batch", -1),
    )


@body(f"{MODULE}:get_ps_metadata_info_v1")
def get_ps_metadata_info_v1(call: Call) -> Shapes:
    """The same for prefill."""
    for name in ("batch_size", "num_head_k", "max_qlen", "qlen_granularity"):
        expect_int(call[name], name)
    return ps_shapes(call.arch, call["batch_size"], call["num_head_k"], call["max_qlen"], call["qlen_granularity"])


def _power_of_two(number: Any, name: str) -> None:
    expect_int(number, name)
    check(number > 0 and number & (number - 1) == 0, f"{name} Must be power of 2!")


def _check_indices(call: Call, names: tuple[str, ...]) -> int:
    """int32 and dense, as is checked, and of fitting lengths, as is not; returns the number of requests."""
    for name in names:
        tensor = call[name]
        expect(tensor.dim() == 1, f"{name} has {tensor.dim()} dimensions")
        check(tensor.stride(0) == 1, f"{name} should be continuous!")
        check(tensor.dtype == torch.int32, f"{name}'s element type should be int!")
    requests = int(call[names[0]].numel()) - 1
    expect(requests > 0, f"{names[0]} names no request")
    expect(call[names[1]].numel() == requests + 1, f"{names[1]} has not the length of {names[0]}")
    return requests


def _check_buffers(call: Call, needed: Shapes, work_info: str) -> None:
    """Rank, dtype and size of every buffer, none of which the real builder looks at."""
    for name, (shape, dtype) in zip(BUFFERS, needed, strict=True):
        own = work_info if name == "work_info_set" else name
        buffer, shape = call[own], (shape,) if isinstance(shape, int) else shape
        expect(
            buffer.dim() == len(shape) and buffer.shape[1:] == shape[1:] and buffer.is_contiguous(),
            f"{own} {tuple(buffer.shape)} is no {shape}: on another buffer's position?",
        )
        size = buffer.element_size()
        expect(size == dtype.itemsize, f"{own} is {buffer.dtype}, but {dtype} is written")
        expect(
            buffer.shape[0] >= shape[0], f"{own} has {buffer.shape[0]} rows of {shape[0]}: it is written past its end"
        )


def _longest(call: Call, indptr: Tensor) -> int:
    lengths = indptr.diff()
    longest, uniform = int(lengths.max()), call["uni_seqlen_qo"]
    expect(int(indptr[0]) == 0 and int(lengths.min()) >= 0, "seqlens_qo_indptr does not count up from 0")
    if uniform > 0:
        expect(bool((lengths == uniform).all()), f"uni_seqlen_qo is {uniform}, but requests have {lengths.tolist()}")
    if call["max_seqlen_qo"] > 0:
        expect(call["max_seqlen_qo"] >= longest, f"max_seqlen_qo is {call['max_seqlen_qo']}, a request has {longest}")
        longest = call["max_seqlen_qo"]
    return longest


def component_dtypes(call: Call) -> tuple[torch.dtype, torch.dtype]:
    """Of queries and cache; bfloat16 where nothing is said. Dtypes by component are of another, newer format."""
    for component in ("dtype_q_nope", "dtype_q_rope", "dtype_kv_nope", "dtype_kv_rope"):
        expect(call.get(component) is None, f"{component} is given: a dtype on another parameter's position?")
    if "mla_version" in call.values:
        version = call["mla_version"]
        expect(
            version == 0 and not isinstance(version, torch.dtype), f"mla_version is {version!r}: a dtype passed there?"
        )
    found = call.get("dtype_q") or torch.bfloat16, call.get("dtype_kv") or torch.bfloat16
    expect(all(isinstance(dtype, torch.dtype) for dtype in found), f"the dtypes are {found}")
    return found


def code(dtype: torch.dtype) -> int:
    """A number for a dtype, to be written into metadata."""
    return {torch.bfloat16: 1, torch.float8_e4m3fn: 2, torch.float8_e4m3fnuz: 3}.get(dtype, 9)


def _check_heads(call: Call, heads: int, longest: int, fp8: bool) -> None:
    """Sixteen, what folds into sixteens, and the few others that a release's kernels take natively."""
    if heads % 16 == 0:
        return
    if call.arch == "gfx950" and not fp8 and call.since("v0.1.14-rc0"):
        return
    four = heads == 8 and fp8 and longest == 4 and call.since("v0.1.12")
    if four and (call.arch == "gfx950" or call.until("v0.1.12.post2")):
        return
    if heads == 8 and not fp8 and longest == 2 and call.arch == "gfx942" and call.since("v0.1.13.dev0"):
        return
    raise RuntimeError(f"get_mla_metadata_v1: num_heads {heads} not supported")


@body(f"{MODULE}:get_mla_metadata_v1")
def get_mla_metadata_v1(call: Call) -> None:
    """Fills the buffers, after looking at all that the real one takes on trust."""
    paged = call.since("v0.1.10.post2")
    indices = ("seqlens_qo_indptr", "seqlens_kv_indptr", *(("kv_last_page_lens",) if paged else ()))
    requests = _check_indices(call, indices)
    if paged:
        expect(call["kv_last_page_lens"].numel() == requests, "kv_last_page_lens has not one length per request")
        _power_of_two(call["page_size"], "page_size")
    _power_of_two(call["kv_granularity"], "kv_granularity")
    for name in ("is_causal", "fast_mode", "intra_batch_mode", "is_cp_round_robin"):
        expect_bool(call.get(name, False), name)
    for name in ("num_heads_per_head_k", "num_heads_k", "max_seqlen_qo", "uni_seqlen_qo", "topk"):
        expect_int(call[name], name)
    expect_int(call.get("max_split_per_batch", -1), "max_split_per_batch")
    heads = call["num_heads_per_head_k"]
    expect(call["num_heads_k"] == 1, f"num_heads_k is {call['num_heads_k']}, but MLA has one latent head")
    longest = _longest(call, call["seqlens_qo_indptr"])
    q_dtype, kv_dtype = component_dtypes(call)
    sparse = call["topk"] >= 0
    _check_heads(call, heads, longest, q_dtype.itemsize == 1)
    needed = mla_shapes(
        call.release,
        call.arch,
        requests,
        longest,
        heads,
        q_dtype,
        kv_dtype,
        sparse,
        call["fast_mode"],
        1 if call.get("intra_batch_mode", False) else 32,
        call.get("intra_batch_mode", False),
        call.get("max_split_per_batch", -1),
    )
    work_info = "work_info" if call.until("v0.1.7.post5") else "work_info_set"
    _check_buffers(call, needed, work_info)
    for name, value in FILLED.items():
        call[name].fill_(value)
    pointers = [call["work_indptr"].data_ptr(), call[work_info].data_ptr()]
    call["work_metadata_ptrs"].view(torch.int64)[:2] = torch.tensor(pointers)
    asked = [
        requests,
        heads,
        longest,
        code(q_dtype),
        code(kv_dtype),
        call.get("page_size", 1),
        int(call["is_causal"]),
        7,
    ]
    call[work_info].zero_()[0] = torch.tensor(asked, dtype=torch.int32)


@body(f"{MODULE}:get_ps_metadata_v1")
def get_ps_metadata_v1(call: Call) -> None:
    """The plan of prefill, in which the work's index precedes its description."""
    requests = _check_indices(call, ("seqlens_qo_indptr", "pages_kv_indptr"))
    expect(call["context_lens"].numel() == requests, "context_lens has not one length per request")
    _power_of_two(call["kvlen_granularity"], "kvlen_granularity")
    expect_bool(call["is_causal"], "is_causal")
    longest = int(call["seqlens_qo_indptr"].diff().max())
    for name in ("gqa_ratio", "num_heads_k", "qhead_granularity", "qlen_granularity", "block_size"):
        expect_int(call[name], name)
    rows = call["qlen_granularity"] // call["qhead_granularity"]
    needed = ps_shapes(call.arch, requests, call["num_heads_k"], longest, rows)
    _check_buffers(call, needed, "work_info")
    for name, value in FILLED.items():
        call[name].fill_(value)
    call["work_metadata_ptrs"].zero_()
    call["work_info"].fill_(12)
