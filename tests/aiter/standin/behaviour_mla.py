"""The attention metadata: how large it is, and what its builder checks, assumes and writes.

The builder's real contents are a plan for a GPU. The stand-in writes what it was asked for instead, so that the decode
can tell metadata of another geometry, or buffers in another order, from the right ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerfuse.fusion.metadata import sizes

from .behaviour import Call, body
from .misuse import check, expect, is_power_of_two

MODULE = "aiter.ops.attention"
BUFFERS = sizes.BUFFERS
"""The order in which `get_mla_metadata_info_v1` names them, which is not that of `get_mla_metadata_v1`."""

Shapes = tuple[tuple[Any, torch.dtype], ...]


def shapes(call: Call, batch: int, queries: int, heads: int, q: torch.dtype, kv: torch.dtype, **options: Any) -> Shapes:
    """(shape, dtype) of each buffer: by the table, which `test_metadata_formula` holds to AITER's own functions."""
    check(heads % 8 == 0, "num_head_qo % 8 == 0", AssertionError)
    words: dict[str, Any] = {name: "fp8" if dtype == call.fp8 else "bf16" for name, dtype in (("q", q), ("kv", kv))}
    units = {"gfx942": 304, "gfx950": 256}[call.arch]
    case = sizes.Case(batch=batch, queries=queries, heads=heads, arch=call.arch, cu_count=units, **words, **options)
    found = sizes.metadata_shapes(case, call.release)
    dtypes = [getattr(torch, sizes.BUFFER_DTYPE[name]) for name in BUFFERS]
    return tuple(
        (found[name] if len(found[name]) > 1 else found[name][0], dtype)
        for name, dtype in zip(BUFFERS, dtypes, strict=True)
    )


FILLED = {"work_indptr": 11, "reduce_indptr": 13, "reduce_final_map": 14, "reduce_partial_map": 15}
"""What the builder leaves in the buffers that hold no parameters."""


@body(f"{MODULE}:get_mla_metadata_info_v1")
def get_mla_metadata_info_v1(call: Call) -> Shapes:
    """Shapes and dtypes; one-dimensional shapes are plain ints."""
    for name in ("q_dtype", "kv_dtype"):
        expect(isinstance(call[name], torch.dtype), f"{name} is {call[name]!r}, no dtype")
    names = {"sparse": "is_sparse", "fast": "fast_mode", "num_kv_splits": "num_kv_splits"}
    names |= {"intra_batch": "intra_batch_mode", "max_split_per_batch": "max_split_per_batch"}
    given = (call[name] for name in ("batch_size", "max_seqlen_qo", "num_head_qo", "q_dtype", "kv_dtype"))
    return shapes(call, *given, **{ours: call[name] for ours, name in names.items()})


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


def _check_buffers(call: Call, needed: Shapes) -> None:
    """Rank, dtype and size of every buffer, none of which the real builder looks at."""
    for name, (shape, dtype) in zip(BUFFERS, needed, strict=True):
        buffer, shape = call[name], (shape,) if isinstance(shape, int) else shape
        expect(
            buffer.dim() == len(shape) and buffer.shape[1:] == shape[1:] and buffer.is_contiguous(),
            f"{name} {tuple(buffer.shape)} is no {shape}: on another buffer's position?",
        )
        size = buffer.element_size()
        expect(size == dtype.itemsize, f"{name} is {buffer.dtype}, but {dtype} is written")
        expect(
            buffer.shape[0] >= shape[0], f"{name} has {buffer.shape[0]} rows of {shape[0]}: it is written past its end"
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
    if call.arch == "gfx950" and (not fp8 or (heads == 8 and longest == 4)):
        return
    if heads == 8 and not fp8 and longest == 2 and call.arch == "gfx942":
        return
    raise RuntimeError(f"get_mla_metadata_v1: num_heads {heads} not supported")


@body(f"{MODULE}:get_mla_metadata_v1")
def get_mla_metadata_v1(call: Call) -> None:
    """Fills the buffers, after looking at all that the real one takes on trust."""
    requests = _check_indices(call, ("seqlens_qo_indptr", "seqlens_kv_indptr", "kv_last_page_lens"))
    expect(call["kv_last_page_lens"].numel() == requests, "kv_last_page_lens has not one length per request")
    for name in ("page_size", "kv_granularity"):
        check(is_power_of_two(call[name]), f"{name} Must be power of 2!")
    heads = call["num_heads_per_head_k"]
    expect(call["num_heads_k"] == 1, f"num_heads_k is {call['num_heads_k']}, but MLA has one latent head")
    longest = _longest(call, call["seqlens_qo_indptr"])
    q_dtype, kv_dtype = component_dtypes(call)
    sparse = call["topk"] >= 0
    _check_heads(call, heads, longest, q_dtype.itemsize == 1)
    fast, intra, most = call["fast_mode"], call["intra_batch_mode"], call["max_split_per_batch"]
    options = {"sparse": sparse, "fast": fast, "num_kv_splits": 1 if intra else 32, "intra_batch": intra}
    # Whoever plans for sparse queries hands over each as a sequence of its own.
    needed = shapes(
        call, requests, 1 if sparse else longest, heads, q_dtype, kv_dtype, max_split_per_batch=most, **options
    )
    _check_buffers(call, needed)
    for name, value in FILLED.items():
        call[name].fill_(value)
    pointers = [call["work_indptr"].data_ptr(), call["work_info_set"].data_ptr()]
    call["work_metadata_ptrs"].view(torch.int64)[:2] = torch.tensor(pointers)
    dtypes = code(q_dtype), code(kv_dtype)
    asked = [requests, heads, longest, *dtypes, call["page_size"], int(call["is_causal"]), 7]
    call["work_info_set"].zero_()[0] = torch.tensor(asked, dtype=torch.int32)
