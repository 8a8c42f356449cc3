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

import torch
import torch.distributed as dist
from vllm_started import engine_config, in_engine, load

from vllm.distributed import parallel_state  # isort: skip  (vllm_started comes before vllm)
from layerfuse.engines.vllm import register
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


def main(rank: int, size: int, port: str, folder: Path, options: str, mode: str, steps: str) -> None:
    logging.getLogger("vllm.layerfuse").setLevel(logging.INFO)
    logging.getLogger("vllm.layerfuse").addHandler(logging.StreamHandler(sys.stdout))
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
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), *sys.argv[5:8])
