"""The tensors of a measurement: column views of one projection's output, as many sets of them as outgrow the cache."""

from __future__ import annotations

from pathlib import Path

import torch
from attrs import frozen
from torch import Tensor

from .cases import ITEM_SIZES, Case

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FP8_DTYPES = {"e4m3fn": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz}

FEWEST_SETS, MOST_SETS = 8, 64
"""On a GPU; on a CPU, whose cache may outsize anything that is worth the time, always the fewest."""
CACHES = 4
"""How many times the last-level cache all sets together should hold."""


@frozen(kw_only=True, eq=False)
class Work:
    """One case with one number of tokens: the inputs of every call."""

    case: Case
    tokens: int
    device: torch.device
    sets: tuple[tuple[Tensor, Tensor], ...]
    "(query latent, key/value latent): views of rows of one projection, (tokens, width) each."
    q_weight: Tensor
    kv_weight: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """Of inputs, weights and unquantised results."""
        return DTYPES[self.case.dtype]

    @property
    def fp8(self) -> torch.dtype:
        """Of the quantised result."""
        return FP8_DTYPES[self.case.fp8 or "e4m3fn"]


def sets_for(case: Case, tokens: int, device: torch.device, peers: int) -> int:
    """How many sets of inputs to rotate through.

    Args:
        case: what is measured.
        tokens: rows of one set.
        device: whose cache they should outgrow, and into whose memory they and the results of all peers must fit.
        peers: how many peers keep a result for each set.
    """
    wanted = -(-CACHES * cache_size(device) // case.bytes_moved(tokens)) if device.type == "cuda" else FEWEST_SETS
    row = case.row_width * ITEM_SIZES[case.dtype] * tokens
    each = row + (peers + 1) * case.bytes_moved(tokens)
    return max(1, min(max(FEWEST_SETS, min(wanted, MOST_SETS)), memory_for(device) // each))


def make(case: Case, tokens: int, device: torch.device, sets: int, seed: int = 0) -> Work:
    """Fresh random inputs; rows differ in size, as hidden states do, and weights lie around one."""
    dtype = DTYPES[case.dtype]
    generator = torch.Generator(device).manual_seed(seed + tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    def latents() -> tuple[Tensor, Tensor]:
        rows = normal(tokens, case.row_width).mul_(normal(tokens, 1).exp_()).to(dtype)
        q, kv, _ = rows.split((case.q_width, case.kv_width, case.rope_width), dim=-1)
        return q, kv

    return Work(
        case=case,
        tokens=tokens,
        device=device,
        sets=tuple(latents() for _ in range(sets)),
        q_weight=(1 + 0.2 * normal(case.q_width)).to(dtype),
        kv_weight=(1 + 0.2 * normal(case.kv_width)).to(dtype),
    )


def cache_size(device: torch.device) -> int:
    """Bytes of the last cache before memory, 0 where nothing says."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    levels = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    try:
        size = levels[-1].read_text().strip() if levels else ""
    except OSError:
        return 0
    return int(size[:-1]) << 10 if size.endswith("K") and size[:-1].isdigit() else 0


def memory_for(device: torch.device) -> int:
    """Bytes that a measurement may take: half of what is free on a GPU; 2 GiB of a host."""
    return int(torch.cuda.mem_get_info(device)[0]) // 2 if device.type == "cuda" else 2 << 30
