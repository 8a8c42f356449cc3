"""The decode of absorbed MLA: exact attention over a paged cache, with what each release checks, assumes and returns."""

from __future__ import annotations

import torch
from torch import Tensor

from .behaviour import Call, body
from .behaviour_mla import FILLED, code
from .misuse import check, expect, expect_bool, expect_int, expect_rows
from .recorded import between

PERSISTENT = ("work_indptr", "work_info_set", "reduce_indptr", "reduce_final_map", "reduce_partial_map")
FP8_PRODUCTS = (16, 32, 48, 64, 128, 256, 384, 512)


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
    scales = isinstance(call.get("q_scale"), Tensor) and isinstance(call.get("kv_scale"), Tensor)
    check(q.dtype == torch.bfloat16 or scales, "fp8 q needs q_scale and kv_scale")


def _check_arguments(call: Call) -> int:
    """What is no tensor; returns the page size."""
    expect_int(call["max_seqlen_q"], "max_seqlen_q")
    expect(call["sm_scale"] is None or isinstance(call["sm_scale"], float), f"sm_scale is {call['sm_scale']!r}")
    expect(isinstance(call["logit_cap"], float | int), f"logit_cap is {call['logit_cap']!r}")
    for name in ("intra_batch_mode", "return_logits", "return_lse"):
        expect_bool(call.get(name, False), name)
    pages: int = call["kv_buffer"].shape[1]
    if not call.since("v0.1.10.post2"):
        expect(pages == 1, f"the cache has pages of {pages}, but this release reads one token per index")
        return 1
    expect_int(call["page_size"], "page_size")
    expect(call["page_size"] == pages, f"page_size is {call['page_size']}, but kv_buffer has pages of {pages}")
    expect(call["nhead_kv"] == 1, f"nhead_kv is {call['nhead_kv']}")
    expect(call.get("cp_world_size", 1) == 1 and call.get("g_kv_indptr") is None, "the stand-in has one rank")
    expect_bool(call.get("causal", True), "causal")
    return pages


def _native(call: Call, heads: int, longest: int) -> bool:
    """Whether the persistent kernels take this head count as it is."""
    q, kv = call["q"].dtype, call["kv_buffer"].dtype
    fp8, bf16 = q == kv == call.fp8, q == kv == torch.bfloat16
    if heads == 16:
        return True
    if call.arch == "gfx950" and bf16 and call.since("v0.1.13.dev0"):
        return call.since("v0.1.14-rc0") or heads * longest % 128 == 0
    if heads == 8:
        on_950 = call.arch == "gfx950" and fp8 and longest == 4 and call.since("v0.1.12")
        return on_950 or (call.arch == "gfx942" and bf16 and longest == 2 and call.since("v0.1.13.dev0"))
    if not fp8:
        return False
    if heads == 128:
        if call.arch == "gfx942" or call.until("v0.1.11.post1"):
            return True
        without_four = call.since("v0.1.15-rc0") and call.until("v0.1.15.post3")
        return call.since("v0.1.14-rc0") and not (without_four and longest == 4)
    if heads == 64:
        if call.arch == "gfx950" and call.since("v0.1.16"):
            return True
        return longest == 1 and call.since("v0.1.12.post1" if call.arch == "gfx950" else "v0.1.17-longctx")
    return heads == 32 and _native_32(call, longest)


def _native_32(call: Call, longest: int) -> bool:
    """Thirty-two heads in fp8, whose numbers of query tokens grew one by one."""
    if call.arch != "gfx950":
        return call.release == "v0.1.10.post3" and longest == 4
    if call.since("v0.1.20"):
        return True
    one = between(call.release, "v0.1.14.post1", "v0.1.15.post3") or call.since("v0.1.17-rc0")
    known = (
        (1, one),
        (2, call.since("v0.1.13.dev0")),
        (4, call.since("v0.1.10.post3")),
        (max(longest, 5), call.since("v0.1.17-longctx")),
    )
    return any(longest == tokens and there for tokens, there in known)


def _folds_tokens(call: Call, heads: int, longest: int) -> bool:
    """gfx950 with fp8 from v0.1.12 to v0.1.15.post3: query tokens are folded too, and nothing has to be moved."""
    fp8 = call["q"].dtype == call["kv_buffer"].dtype == call.fp8
    if not fp8 or call.arch != "gfx950" or not between(call.release, "v0.1.12", "v0.1.15.post3"):
        return False
    return longest * (heads // 16) == 4 or (heads == 64 and longest == 2)


def check_heads(call: Call, heads: int, longest: int, persistent: bool) -> bool:
    """Refuses a head count as the release does; returns whether it is folded into sixteens with its rows moved."""
    message = f"nhead={heads} and max_seqlen_q={longest} not supported"
    if not call.since("v0.1.6.post2"):
        check(heads in (16, 128), message, AssertionError)
        return False
    if not persistent:
        if call["q"].dtype == call.fp8:
            known = FP8_PRODUCTS + ((8,) if call.since("v0.1.14-rc0") else ())
            known += (24,) if call.since("v0.1.17-rc0") else ()
            check(heads * longest in known, str(heads * longest), KeyError)
        return False
    if _native(call, heads, longest):
        return False
    widest = 512 if call.until("v0.1.7.post2") else 128
    check(heads in range(32, widest + 1, 16), message, AssertionError)
    if call.until("v0.1.8"):
        check(longest == 1, message, AssertionError)
    return longest > 1 and call.since("v0.1.11.post1") and not _folds_tokens(call, heads, longest)


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
    q = q * call["q_scale"].float() if call.get("q_scale") is not None else q
    cache = cache * call["kv_scale"].float() if call.get("kv_scale") is not None else cache
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
    """Writes `o`; of the two results the first is opaque and the second's presence depends on the release."""
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
    persistent = call.get("work_meta_data") is not None
    moved = check_heads(call, heads, longest, persistent)
    if persistent:
        _check_metadata(call, heads, requests, longest, page_size)
    out, sums = _attend(call, lengths, page_size)
    _write(call["o"], out, moved, longest)
    logits = torch.full((1,), float("nan"))
    return logits, _second_result(call, sums, persistent)


def _second_result(call: Call, sums: Tensor, persistent: bool) -> Tensor | None:
    """The logarithms, memory that nobody wrote to, or None."""
    undefined = torch.full_like(sums, float("nan"))
    if not call.since("v0.1.6.post2"):
        return undefined
    if persistent and call.until("v0.1.8"):
        return sums
    if not persistent and call.until("v0.1.12.post2"):
        return undefined
    return sums if call["return_lse"] else None
