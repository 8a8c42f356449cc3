"""One rank of two, on gloo, that runs tiny models which vLLM does not compile, with fused all-reduces and without. Writes FOLDER/rank-RANK.json."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import vllm_rank
from test_vllm_uncompiled_runs import _add_rows, started
from vllm_started import apart

from layerfuse.engines import process
from layerfuse.engines.vllm import register

FUSION = "all_reduce_add_rms_norm"
M3 = "vllm.models.minimax_m3.nvidia.model"


@contextlib.contextmanager
def wrapped() -> Iterator[None]:
    """As another package's, which wraps vLLM's function."""
    module = importlib.import_module(M3)
    own = module.fused_allreduce_gemma_rms_norm

    @functools.wraps(own)
    def theirs(*args: Any) -> Any:
        normed, residual = own(*args)
        return normed * 1.25, residual

    with mock.patch.object(module, "fused_allreduce_gemma_rms_norm", theirs):
        yield


@contextlib.contextmanager
def louder() -> Iterator[None]:
    """A kernel that computes something else, which no source tells."""

    def rows(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> None:
        _add_rows(x, residual, weight, epsilon)
        x.mul_(1.25)

    with mock.patch("test_vllm_uncompiled_runs._add_rows", rows):
        yield


CHANGES = {"wrapped": wrapped, "louder": louder}


def results(architecture: str, folder: Path, options: Any, rank: int) -> list[torch.Tensor]:
    given = {"tp": 2, "rank": rank, "groups": contextlib.nullcontext()}
    folder.mkdir(parents=True)
    with started(architecture, folder, options, **given) as engine:
        return [engine(tokens) for tokens in (6, 1, 33)]


def run(architecture: str, folder: Path, rank: int) -> dict[str, Any]:
    process.this = process.Process()
    register()
    logger, said = logging.getLogger("vllm.layerfuse"), vllm_rank.Said()
    plain = results(architecture, folder / "plain", False, rank)
    logger.addHandler(said)
    got = results(architecture, folder / "fused", {"fusions": [FUSION], "strict": True}, rank)
    logger.removeHandler(said)
    return {"said": said.lines, "apart": max(apart(*both) for both in zip(got, plain, strict=True))}


def run_changed(folder: Path, rank: int, change: str) -> dict[str, Any]:
    """With something else on rank 1: nothing of ours runs on either."""
    process.this = process.Process()
    register()
    logger, said = logging.getLogger("vllm.layerfuse"), vllm_rank.Said()
    with CHANGES[change]() if rank else contextlib.nullcontext():
        plain = results("MiniMaxM3SparseForCausalLM", folder / "theirs", False, rank)
        logger.addHandler(said)
        got = results("MiniMaxM3SparseForCausalLM", folder / "left", {"fusions": [FUSION]}, rank)
        logger.removeHandler(said)
    same = all(torch.equal(*both) for both in zip(got, plain, strict=True))
    return {"said": said.lines, "same": same}


def main(rank: int, port: str, folder: str) -> None:
    torch.set_num_threads(1)
    logging.getLogger("vllm.layerfuse").setLevel(logging.INFO)
    with vllm_rank.real_groups(rank, 2, port):
        place = Path(folder) / str(rank)
        place.mkdir()
        done = {name: run(name, place / name, rank) for name in ("MiniMaxM3SparseForCausalLM", "Dots3NoteForCausalLM")}
        done |= {change: run_changed(place / change, rank, change) for change in CHANGES}
        dist.barrier()
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(done))
