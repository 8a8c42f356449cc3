"""One rank of a real tensor-parallel group of vLLM's, on gloo, in a process of its own.

Runs tiny models, one after another, with layerfuse and without it, and writes what layerfuse said and how far the results are apart
to FOLDER/rank-RANK.json. RUNS is a table of names to what `run` takes.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from vllm_paged import paged
from vllm_started import (
    BLOCK_FP8,
    TWO_LAYERS,
    apart,
    as_near,
    close,
    engine_config,
    fp8,
    in_engine,
    load,
    loaded_from_cache,
)

from vllm.config import set_current_vllm_config  # isort: skip  (vllm_started comes before vllm)
from vllm.distributed import parallel_state

from layerfuse.engines import process
from layerfuse.engines.vllm import decode_ops, defaults, loading, register
from layerfuse.fusion import Target, backends


@contextlib.contextmanager
def real_groups(rank: int, size: int, port: str) -> Iterator[None]:
    """vLLM's own groups over gloo, with the other processes."""
    with set_current_vllm_config(engine_config("deepseek-v3", tp=size, rank=rank)):
        parallel_state.init_distributed_environment(size, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
        parallel_state.initialize_model_parallel(size)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


class Said(logging.Handler):
    """Keeps what is logged, line by line."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += [line.strip() for line in record.getMessage().splitlines()]


@contextlib.contextmanager
def on(arch: str | None) -> Iterator[None]:
    """What is planned is for a GPU; the ops run as on a CPU."""
    if arch is None:
        yield
        return
    with (
        mock.patch.object(loading, "target_of", return_value=Target.named(arch)),
        mock.patch.object(defaults, "arch_here", return_value=arch),
    ):
        yield


def run(
    folder: Path,
    *,
    tp: int,
    rank: int,
    model: str,
    layerfuse: Any,
    mode: str = "VLLM_COMPILE",
    dtype: str = "float32",
    kernel: str | None = None,
    steps: Sequence[int] = (),
    arch: str | None = None,
) -> dict[str, Any]:
    """Start a model with layerfuse, and again without it.

    Args:
        folder: vLLM's cache.
        tp: the size of the group.
        rank: of this process.
        model: its name.
        layerfuse: the options.
        mode: vLLM's compilation mode.
        dtype: of the model.
        kernel: of block fp8 linears, as for `fp8`; None: it is not quantised.
        arch: of the GPU that is planned for; None: the CPU.
        steps: numbers of tokens above which kernels are launched in another way here. The reference, which runs on a CPU, has none.

    Returns:
        What was logged, whether the compiled model came from the cache, the key of vLLM's cache, how far the results are `apart` from
        those of the same model without layerfuse and not compiled, and whether they are `close` in fp8, or
        in another narrow dtype `as_near` to those in float32.
    """
    process.this = process.Process()
    register()
    logger, said = logging.getLogger("vllm.layerfuse"), Said()
    logger.addHandler(said)

    def result(**config: Any) -> tuple[Any, str]:
        overrides = TWO_LAYERS.get(model, {}) | ({} if kernel is None else BLOCK_FP8)
        given = {"dtype": dtype, "overrides": overrides, **config}
        made = engine_config(model, tp=tp, rank=rank, **given)
        with in_engine(made, folder, groups=contextlib.nullcontext()):
            return load(made)(), made.compute_hash()

    before = loaded_from_cache()
    with contextlib.nullcontext() if kernel is None else fp8(kernel):
        with mock.patch.object(backends, "steps", return_value=tuple(steps)), on(arch):
            found, key = result(layerfuse=layerfuse, mode=mode)
        warm = loaded_from_cache() > before
        logger.removeHandler(said)
        own, _ = result(layerfuse=False, mode="NONE")
    near = None
    if kernel is not None:
        near = close(found, own)
    elif dtype != "float32":
        near = as_near(found, own, result(layerfuse=False, mode="NONE", dtype="float32")[0])
    return {"said": said.lines, "warm": warm, "key": key, "apart": apart(found, own), "near": near}


def run_decode(folder: Path, *, tp: int, rank: int, broken: bool, layerfuse: Any) -> dict[str, Any]:
    """Start a model whose layers have a cache; where it is `broken`, an op of the decode chain does not run on rank 1.

    Returns:
        What was logged.
    """
    process.this = process.Process()
    register()
    logger, said = logging.getLogger("vllm.layerfuse"), Said()
    logger.addHandler(said)
    fails = mock.patch.object(decode_ops, "_rope", side_effect=RuntimeError("no such kernel"))
    given = {"layerfuse": layerfuse, "tp": tp, "rank": rank, "mode": "NONE", "groups": contextlib.nullcontext()}
    with fails if broken and rank else contextlib.nullcontext(), paged("deepseek-v3", folder, **given):
        logger.removeHandler(said)
    return {"said": said.lines}


def main(rank: int, size: int, port: str, folder: str, runs: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # vLLM collects garbage twice for each model that it loads, and need not look among modules
    logging.getLogger("vllm.layerfuse").setLevel(logging.INFO)
    with real_groups(rank, size, port):
        done = {}
        for name, given in runs.items():
            with mock.patch.dict("os.environ"):  # vLLM sets a variable for models that it does not compile
                done[name] = (run_decode if "broken" in given else run)(
                    Path(folder) / name, tp=size, rank=rank, **given
                )
        dist.barrier()
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(done))
