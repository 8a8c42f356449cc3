"""Everybody who is measured: ours on every backend, torch, the kernels of others, whoever was registered, the copy."""

from __future__ import annotations

from .aiter_peer import aiter_peer
from .ours import our_peers
from .peers import Peer, Setting, added
from .plain_torch import COMBO_KERNELS, COPY, EAGER_TORCH, INDUCTOR, MAX_AUTOTUNE
from .thirdparty import THIRD_PARTIES, peer_of
from .vllm_peer import vllm_peer


def all_peers(setting: Setting) -> list[Peer]:
    """Every peer, here or not: ours first, the copy last."""
    compilers = (INDUCTOR, COMBO_KERNELS, MAX_AUTOTUNE)
    others = (aiter_peer(setting), vllm_peer(setting), *(peer_of(third, setting) for third in THIRD_PARTIES))
    return [*our_peers(setting), EAGER_TORCH, *compilers, *others, *added(), COPY]
