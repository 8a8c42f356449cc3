"""Everybody who is measured: ours on every backend, torch, the kernels of others, whoever was registered, the copy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from .aiter_peer import aiter_peer
from .flashinfer_reduced import flashinfer_reduced_peer
from .ours import our_names, our_peers
from .peers import Peer, Setting, added
from .plain_torch import COMBO_KERNELS, COPY, EAGER_TORCH, INDUCTOR, MAX_AUTOTUNE
from .thirdparty import THIRD_PARTIES, peer_of
from .unfused import unfused_peers
from .vllm_peer import VLLM_OPS

WHOLE_OPS: tuple[Callable[[Setting], Peer], ...] = (
    flashinfer_reduced_peer,
    partial(flashinfer_reduced_peer, one_shot=False),
)
"""Libraries that do the all-reduce, the add and the norm in one op: from what is measured to the peer, here or not. Its `build` is
called on all ranks at once; `rank_group.rank_group()` is how they talk, and torch.distributed's default group is theirs."""


def all_peers(setting: Setting) -> list[Peer]:
    """Every peer, here or not: ours first, the copy last."""
    return [*our_peers(setting), *_others(setting)]


def names(setting: Setting) -> list[str]:
    """Those of `all_peers`, without asking any backend; needs no GPU and no process group."""
    return [*our_names(setting), *(peer.name for peer in _others(setting))]


def _others(setting: Setting) -> list[Peer]:
    if setting.case.declared.across_ranks:
        whole = [peer(setting) for peer in WHOLE_OPS]
        return [*whole, *unfused_peers(setting), *added(), COPY]
    compilers = (INDUCTOR, COMBO_KERNELS, MAX_AUTOTUNE)
    others = (aiter_peer(setting), *(peer_of(third, setting) for third in (VLLM_OPS, *THIRD_PARTIES)))
    return [EAGER_TORCH, *compilers, *others, *added(), COPY]
