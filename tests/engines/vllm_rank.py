"""One rank of a real tensor-parallel group of vLLM's, on gloo: `vllm_rank.py RANK SIZE PORT FOLDER OPTIONS MODE STEPS`.

Loads the tiny DeepSeek-V3, runs it compiled and as it is, and prints what layerfuse said and how far the two are apart. STEPS are the
numbers of tokens above which kernels are launched in another way here: the reference, which runs on a CPU, has none.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from vllm_started import engine_config, in_engine, load

from vllm.config import set_current_vllm_config  # isort: skip  (vllm_started comes before vllm)
from vllm.distributed import parallel_state  # isort: skip
from layerfuse.engines.vllm import process, register
from layerfuse.fusion import backends


@contextlib.contextmanager
def real_groups(rank: int, size: int, port: str) -> Iterator[None]:
    """vLLM's own groups over gloo, with the other processes."""
    parallel_state.init_distributed_environment(size, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
    parallel_state.initialize_model_parallel(size)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def decode(rank: int, size: int, port: str, folder: Path, options: str) -> None:
    """`mla_decode` twice: as it is, then with an op that does not run on rank 1."""
    from vllm_paged import paged

    from layerfuse.engines.vllm import decode_ops

    def broken(*_: Any) -> None:
        raise RuntimeError("no such kernel")

    config = engine_config("deepseek-v3", tp=size, rank=rank)
    with set_current_vllm_config(config), real_groups(rank, size, port):
        for start in range(2):
            process.this = process.Process()
            register()
            if start and rank:
                decode_ops._rope = broken
            given = {"layerfuse": json.loads(options), "tp": size, "rank": rank, "mode": "NONE"}
            with paged("deepseek-v3", folder, groups=contextlib.nullcontext(), **given):
                print(f"RANK {rank} start {start}")


def main(rank: int, size: int, port: str, folder: Path, options: str, mode: str, steps: str) -> None:
    register()
    backends.steps = lambda *_: tuple(json.loads(steps))
    config = engine_config("deepseek-v3", layerfuse=json.loads(options), tp=size, rank=rank, mode=mode)
    with in_engine(config, folder, groups=real_groups(rank, size, port)):
        engine = load(config)
        apart = (engine() - engine.uncompiled()).abs().max().item()
        values = [None] * size
        dist.all_gather_object(values, apart)
        print(f"RANK {rank} apart {max(values):.1e} hash {config.compute_hash()}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.getLogger("vllm.layerfuse").setLevel(logging.INFO)
    logging.getLogger("vllm.layerfuse").addHandler(logging.StreamHandler(sys.stdout))
    given = (int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), sys.argv[5])
    if "mla_decode" in sys.argv[5]:
        decode(*given)
    else:
        main(*given, *sys.argv[6:8])
