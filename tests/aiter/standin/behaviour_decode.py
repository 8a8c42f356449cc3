"""The decode of absorbed MLA: exact attention over a paged cache, with what each release checks, assumes and returns."""

from __future__ import annotations

import torch
from torch import Tensor

from .behaviour import Call, body
from .behaviour_mla import FILLED, code
from .misuse import check, expect, expect_int, expect_rows

PERSISTENT = ("work_indptr", "work_info_set", "reduce_indptr", "reduce_final_map", "reduce_partial_map")
FP8_PRODUCTS = (8, 16, 32, 48, 64, 128, 256, 384, 512)


def _lengths(call: Call, requests: int, page_size: int) -> list[int]:
    """Cached tokens per request, from whole pages and the fill of the last one."""
    pages = call["kv_indptr"].diff()
    last = call["kv_last_page_lens"]
    expect(last.numel() >= requests, "kv_last_page_lens has not one length per request")
    expect(bool((pages > 0).all()), "a request has no cached token: its result is undefined")
    last = last[:requests]
    expect(bool(((last > 0) & (last <= page_size)).all()), f"kv_last_page_lens {last.tolist()} of pages of {page_size}")
    return [int(count) for count in (pages - 1) * page_size + last]


def _check_tensors(call: Call) -> None:
    q, kv, out = call["q"], call["kv_buffer"], call["o"]
    check(call["logit_cap"] <= 0, f"logit_cap={call['logit_cap']} is not support yet", AssertionError)
    check(kv.dim() == 4, f"not enough values to unpack: kv_buffer has {kv.dim()} dimensions", ValueError)
    check(q.dim() == 3 and q.is_contiguous(), "q must be contiguous")
    check(kv.shape[3] == q.shape[2], "kv_buffer's last dim must be q's head size")
    check(kv.shape[2] == 1, "nhead_kv must be 1")
    check(q.dtype in (torch.bfloat16, call.fp8), f"q of {q.dtype} has no kernel")
    check(kv.dtype in (torch.bfloat16, call.fp8), f"a cache of {kv.dtype} has no kernel")
    expect(kv.is_contiguous(), "kv_buffer is not contiguous, but is read as if it were")
    if out is None:
        raise AttributeError("'NoneType' object has no attribute 'shape'")
    expect(out.dim() == 3 and out.shape[:2] == q.shape[:2], f"o {tuple(out.shape)} does not fit q {tuple(q.shape)}")
    expect(out.dtype == torch.bfloat16, f"o is {out.dtype}, but bfloat16 is written")
    expect(out.is_contiguous() and out.shape[2] <= q.shape[2], f"o {tuple(out.shape)} is not dense, or wider than q")
    expect_rows(q, "q")
    for name in ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens"):
        check(call[name].dtype == torch.int32, f"{name} must be int32")
        expect(call[name].is_contiguous(), f"{name} is not contiguous, but is read as if it were")
    scales = isinstance(call["q_scale"], Tensor) and isinstance(call["kv_scale"], Tensor)
    check(q.dtype == torch.bfloat16 or scales, "fp8 q needs q_scale and kv_scale")


def _check_arguments(call: Call) -> int:
    """What is no tensor; returns the page size."""
    expect_int(call["max_seqlen_q"], "max_seqlen_q")
    expect(call["sm_scale"] is None or isinstance(call["sm_scale"], float), f"sm_scale is {call['sm_scale']!r}")
    expect(isinstance(call["logit_cap"], float | int), f"logit_cap is {call['logit_cap']!r}")
    pages: int = call["kv_buffer"].shape[1]
    expect(call["page_size"] == pages, f"page_size is {call['page_size']}, but kv_buffer has pages of {pages}")
    expect(call["nhead_kv"] == 1, f"nhead_kv is {call['nhead_kv']}")
    expect(call.get("cp_world_size", 1) == 1 and call.get("g_kv_indptr") is None, "the stand-in has one rank")
    return pages


def _native(call: Call, heads: int, longest: int) -> bool:
    """Whether the persistent kernels take this head count as it is."""
    q, kv, is_942 = call["q"].dtype, call["kv_buffer"].dtype, call.arch == "gfx942"
    fp8, bf16 = q == kv == call.fp8, q == kv == torch.bfloat16
    if heads == 16:
        return True
    if bf16:
        return call.arch == "gfx950" or (heads == 8 and is_942 and longest == 2)
    if not fp8:
        return False
    if heads == 8:
        return call.arch == "gfx950" and longest == 4
    if heads == 64 and is_942:
        return longest == 1 and call.since("v0.1.17-longctx")
    return heads in (64, 128) or (heads == 32 and not is_942 and _native_32(call, longest))


def _native_32(call: Call, longest: int) -> bool:
    """Thirty-two heads in fp8, whose numbers of query tokens grew one by one."""
    if call.since("v0.1.20") or longest in (2, 4):
        return True
    return call.since("v0.1.17-rc0") if longest == 1 else longest > 4 and call.since("v0.1.17-longctx")


def check_heads(call: Call, heads: int, longest: int, persistent: bool) -> bool:
    """Refuses a head count as the release does; returns whether it is folded into sixteens with its rows moved."""
    if not persistent:
        if call["q"].dtype == call.fp8:
            known = FP8_PRODUCTS + ((24,) if call.since("v0.1.17-rc0") else ())
            check(heads * longest in known, str(heads * longest), KeyError)
        return False
    if _native(call, heads, longest):
        return False
    message = f"nhead={heads} and max_seqlen_q={longest} not supported"
    check(heads in range(32, 129, 16), message, AssertionError)
    return longest > 1


def _check_metadata(call: Call, heads: int, requests: int, longest: int, page_size: int) -> None:
    """That the metadata was built for this very call: the kernel follows it wherever it leads."""
    for name in PERSISTENT:
        expect(isinstance(call[name], Tensor), f"{name} is missing in persistent mode")
    info = call["work_info_set"]
    expect(info.dim() == 2 and info.shape[1] == 8, f"work_info_set {tuple(info.shape)} is no [n, 8]")
    expect(call["reduce_final_map"].dim() == 2, "reduce_final_map is no [n, 2]")
    for name, value in FILLED.items():
        if name in PERSISTENT:
            expect(int(call[name].reshape(-1)[0]) == value, f"{name} is not what get_mla_metadata_v1 filled as such")
    pointers = [int(pointer) for pointer in call["work_meta_data"].view(torch.int64)[:2]]
    expect(pointers == [call["work_indptr"].data_ptr(), info.data_ptr()], "work_meta_data points to other buffers")
    q, kv = code(call["q"].dtype), code(call["kv_buffer"].dtype)
    asked, given = info[0].tolist()[:6], [requests, heads, longest, q, kv, page_size]
    named = "(requests, heads, longest, q dtype, kv dtype, page size)"
    expect(asked == given, f"the metadata is for {asked}, the call is {given}: {named}")


def _attend(call: Call, lengths: list[int], page_size: int) -> tuple[Tensor, Tensor]:
    """Softmax attention in float32: the output and the logarithm of the sum of exponentials."""
    q, cache, width = call["q"].float(), call["kv_buffer"].float(), call["o"].shape[2]
    q = q * call["q_scale"].float() if call["q_scale"] is not None else q
    cache = cache * call["kv_scale"].float() if call["kv_scale"] is not None else cache
    scale = call["sm_scale"] or q.shape[-1] ** -0.5
    out, sums = torch.zeros(*q.shape[:2], width), torch.zeros(q.shape[:2])
    starts, pages = call["qo_indptr"].tolist(), call["kv_indptr"].tolist()
    for request, length in enumerate(lengths):
        rows = slice(starts[request], starts[request + 1])
        taken = call["kv_indices"][pages[request] : pages[request + 1]].long()
        expect(int(taken.min()) >= 0 and int(taken.max()) < cache.shape[0], "kv_indices leads outside the cache")
        keys = cache[taken].flatten(0, 2)[:length]
        scores = torch.einsum("thd,sd->ths", q[rows], keys) * scale
        count = scores.shape[0]
        if call.get("causal", True):
            limit = torch.arange(length - count, length)[:, None, None]
            scores = scores.masked_fill(torch.arange(length) > limit, float("-inf"))
        out[rows] = torch.einsum("ths,sd->thd", scores.softmax(-1), keys[:, :width])
        sums[rows] = scores.logsumexp(-1)
    return out, sums


def _write(out: Tensor, result: Tensor, moved: bool, longest: int) -> None:
    """Into `o`; where rows are moved the caller's memory gets them in another order, and `o` new memory instead."""
    if not moved:
        out.copy_(result)
        return
    rows, heads, width = out.shape
    split = result.to(out.dtype).view(rows // longest, longest, heads // 16, 16, width)
    out.view(rows * heads // 16, 16, width).copy_(split.permute(0, 2, 1, 3, 4).reshape(-1, 16, width))
    out.set_(result.to(out.dtype).contiguous())


@body("aiter.mla:mla_decode_fwd")
def mla_decode_fwd(call: Call) -> tuple[Tensor, Tensor | None]:
    """Writes `o`; of the two results the first is opaque."""
    page_size = _check_arguments(call)
    _check_tensors(call)
    starts, longest = call["qo_indptr"], call["max_seqlen_q"]
    requests = starts.numel() - 1
    rows, heads = call["q"].shape[:2]
    expect(int(starts[0]) == 0 and int(starts[-1]) == rows, f"qo_indptr ends at {int(starts[-1])}, q has {rows} rows")
    expect(int(starts.diff().max()) <= longest, f"max_seqlen_q is {longest}, a request has {int(starts.diff().max())}")
    expect(call["kv_indptr"].numel() == requests + 1, "kv_indptr has not the length of qo_indptr")
    expect(int(call["kv_indptr"][-1]) <= call["kv_indices"].numel(), "kv_indptr leads past kv_indices")
    lengths = _lengths(call, requests, page_size)
    persistent = call["work_meta_data"] is not None
    moved = check_heads(call, heads, longest, persistent)
    if persistent:
        _check_metadata(call, heads, requests, longest, page_size)
    out, sums = _attend(call, lengths, page_size)
    _write(call["o"], out, moved, longest)
    return torch.full((1,), float("nan")), sums if call["return_lse"] else None
