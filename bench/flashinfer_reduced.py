"""FlashInfer's fused all-reduce as a peer of the fusions that start with one: what it takes of a case, and its memory between calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from . import flashinfer_allreduce
from .cases import Case
from .flashinfer_allreduce import FusedAllReduce
from .inputs import DTYPES, Work
from .peers import Peer, RefusedError, Setting, needs_gpu
from .rank_group import team
from .thirdparty import Function, Offer, Results, norms_of, why_not_offered

_Call = Callable[..., Results]
_OFFSET = frozenset({"offset"})
_ready: dict[tuple[Path, int, torch.dtype, bool | None], tuple[int, FusedAllReduce]] = {}
"""By library, width, dtype and shots: the most tokens, and what takes them. It grows when more are asked for, on all ranks."""


def _kernel(path: Path, one_shot: bool | None, work: Work) -> _Call:
    width = work.case.width_of("x")
    if one_shot is False and work.tokens <= team().size:
        raise RefusedError(f"it takes two shots beyond {team().size} tokens, the number of ranks")
    key = path, width, work.dtype, one_shot
    if key not in _ready or _ready[key][0] < work.tokens:
        _ready.pop(key, None)
        with torch.inference_mode(False):
            kernel = FusedAllReduce(
                path, dist.group.WORLD, work.tokens, width, work.dtype, work.device, one_shot=one_shot
            )
        _ready[key] = work.tokens, kernel
    return _ready[key][1]


def _norm(path: Path, one_shot: bool | None, work: Work) -> Function:
    kernel, ((weight, epsilon),) = _kernel(path, one_shot, work), norms_of(work)
    (offset,) = work.case.weight_offsets.values()
    return lambda x, residual: kernel(x, residual, weight, epsilon, offset)


def _static(path: Path, one_shot: bool | None, work: Work, *, with_norm: bool) -> Function:
    kernel, ((weight, epsilon),) = _kernel(path, one_shot, work), norms_of(work)
    (offset,) = work.case.weight_offsets.values()

    def call(x: Tensor, residual: Tensor) -> Results:
        return kernel(x, residual, weight, epsilon, offset, scale=work.weights["scale"], with_norm=with_norm)

    return call


def _only_e4m3fn(case: Case) -> str | None:
    return None if case.fp8 == "e4m3fn" else f"its fp8 is e4m3fn, not {case.fp8}"


def _offers(path: Path, one_shot: bool | None) -> dict[str, Offer]:
    """By op. Scales of groups come packed, four to an int32, which is another result than the op's, and so is not measured."""
    shots = {None: "in as many shots as it chooses", True: "in one shot", False: "in two shots"}[one_shot]
    about = f"FlashInfer's trtllm_allreduce_fusion over unicast memory with PDL, {shots}"
    offers = {"": Offer(about=about, make=functools.partial(_norm, path, one_shot), takes=_OFFSET)}
    for with_norm, suffix in ((False, ""), (True, "_with_norm")):
        offers[f"_static_quant{suffix}"] = Offer(
            about=about, make=functools.partial(_static, path, one_shot, with_norm=with_norm), rounds_between=True,
            takes=_OFFSET, refuses=_only_e4m3fn,
        )  # fmt: skip
    return {f"all_reduce_add_rms_norm{ending}": offer for ending, offer in offers.items()}


def flashinfer_reduced_peer(setting: Setting, one_shot: bool | None = None) -> Peer:
    """FlashInfer's fused all-reduce as a peer for what is measured.

    Args:
        setting: what is measured, and where FlashInfer's library is.
        one_shot: forces one shot or two; None leaves it to FlashInfer's own rule.
    """
    path = setting.flashinfer
    offers = _offers(path or Path(), one_shot)
    offer = offers.get(setting.case.op)

    def why_not(setting: Setting) -> str | None:
        case = setting.case
        said = why_not_offered(offers, "FlashInfer's fused all-reduce", setting) or needs_gpu(setting)
        said = said or flashinfer_allreduce.refuses(case.ranks, case.width_of("x"), DTYPES[case.dtype])
        return said or flashinfer_allreduce.why_not(path)

    return Peer(
        name="flashinfer" + {None: " fused", True: " one-shot", False: " two-shot"}[one_shot],
        about="FlashInfer's fused all-reduce" if offer is None else offer.about,
        why_not=why_not,
        build=lambda work, _: offers[work.case.op].calls(work),
        rounds_between=offer is not None and offer.rounds_between,
        version=lambda _: None if (found := path and flashinfer_allreduce.library(path)) is None else found.name,
    )
