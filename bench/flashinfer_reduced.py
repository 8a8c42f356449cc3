"""FlashInfer's fused all-reduce as a peer of the fusions that start with one: its own interface, over memory without multicast."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .cases import Case
from .inputs import Work
from .peers import Peer, RefusedError, Setting, needs_gpu
from .rank_group import rank_group
from .thirdparty import Function, Offer, Results, ThirdParty, norms_of, peer_of

RANKS = (2, 4, 8)
"""For which it says up to which size it takes one shot."""
_ready: dict[tuple[int, torch.dtype], tuple[int, Any]] = {}
"""By width and dtype: the most tokens, and the memory for them. It grows when more are asked for, on all ranks."""


def _workspace(work: Work) -> Any:
    from flashinfer import comm
    from flashinfer.comm.mnnvl import TorchDistBackend

    key = width, _ = work.case.width_of("x"), work.dtype
    if key not in _ready or _ready[key][0] < work.tokens:
        _ready.pop(key, None)
        group = dist.group.WORLD
        with torch.inference_mode(False):
            workspace = comm.create_allreduce_fusion_workspace(
                backend="trtllm", world_size=rank_group().size, rank=rank_group().rank, max_token_num=work.tokens, hidden_dim=width,
                dtype=work.dtype, comm_backend=TorchDistBackend(group=group), group=group,
            )  # fmt: skip
        _ready[key] = work.tokens, workspace
    return _ready[key][1]


def _make(pattern: str, one_shot: bool | None, work: Work) -> Function:
    from flashinfer import comm

    if one_shot is False and work.tokens <= rank_group().size:
        raise RefusedError(f"it takes two shots beyond {rank_group().size} tokens, the number of ranks")
    ((weight, epsilon),) = norms_of(work)
    (offset,) = work.case.weight_offsets.values()
    given = {
        "workspace": _workspace(work), "pattern": getattr(comm.AllReduceFusionPattern, pattern), "launch_with_pdl": True,
        "rms_gamma": weight, "rms_eps": epsilon, "weight_bias": offset, "scale_factor": work.weights.get("scale"),
        "use_oneshot": one_shot,
    }  # fmt: skip
    quantises, keeps = "Quant" in pattern, "Quant" not in pattern or "Out" in pattern

    def call(x: Tensor, residual: Tensor) -> Results:
        total = torch.empty_like(x)
        norm = torch.empty_like(x) if keeps else None
        values = torch.empty_like(x, dtype=torch.float8_e4m3fn) if quantises else None
        comm.allreduce_fusion(
            input=x, residual_in=residual, residual_out=total, norm_out=norm, quant_out=values, **given
        )
        return tuple(each for each in (values, norm, total) if each is not None)

    return call


def _refuses(case: Case) -> str | None:
    if case.ranks not in RANKS:
        return f"it says for {', '.join(map(str, RANKS))} ranks when it takes one shot, not for {case.ranks}"
    if case.fp8 not in (None, "e4m3fn"):
        return f"its fp8 is e4m3fn, not {case.fp8}"
    width = case.width_of("x")
    # Its kernels load 16 bytes at a time.
    return f"a row of {width} is no multiple of 8 columns" if width % 8 else None


PATTERNS = {
    "": "kARResidualRMSNorm",
    "_static_quant": "kARResidualRMSNormFP8Quant",
    "_static_quant_with_norm": "kARResidualRMSNormOutFP8Quant",
}
"""By form. Scales of groups come packed, four to an int32, which is another result than the op's, and so is not measured."""


def flashinfer_reduced_peer(setting: Setting, one_shot: bool | None = None) -> Peer:
    """FlashInfer's fused all-reduce as a peer for what is measured.

    Args:
        setting: what is measured.
        one_shot: False forces two; None leaves it to FlashInfer's own rule.
    """
    shots, name = ("as many shots as it chooses", "fused") if one_shot is None else ("two shots", "two-shot")
    offers = {
        f"all_reduce_add_rms_norm{form}": Offer(
            about=f"FlashInfer's allreduce_fusion of TensorRT-LLM's kernels with PDL, in {shots}",
            make=functools.partial(_make, pattern, one_shot), takes=frozenset({"offset"}),
            refuses=_refuses,
        )
        for form, pattern in PATTERNS.items()
    }  # fmt: skip
    return peer_of(
        ThirdParty(
            name=f"flashinfer {name}",
            package="flashinfer-python",
            module="flashinfer.comm",
            needs=needs_gpu,
            offers=offers,
        ),
        setting,
    )
