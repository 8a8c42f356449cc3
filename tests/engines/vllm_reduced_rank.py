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
from test_vllm_plugin import ROWS
from test_vllm_specs import BLOCK
from test_vllm_uncompiled_runs import _add_rows, started
from vllm_started import apart, fp8

from layerfuse.engines import process
from layerfuse.engines.vllm import register

FUSION = "all_reduce_add_rms_norm"
QUANTISED = f"{FUSION}_group_quant"
MODELS = "MiniMaxM3SparseForCausalLM", "Dots3NoteForCausalLM"
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


_plain: dict[tuple[str, bool], list[torch.Tensor]] = {}
"""Architecture and whether it is quantised -> vLLM's own results."""
CHANGES = {"wrapped": wrapped, "louder": louder}


def otherwise() -> Any:
    """As where what linears quantise is not what the op has quantised."""
    return mock.patch("layerfuse.engines.vllm.readers.why_quantised_apart", return_value="it quantises otherwise")


def results(architecture: str, folder: Path, options: Any, rank: int, blocks: bool = False) -> list[torch.Tensor]:
    given: dict[str, Any] = {"tp": 2, "rank": rank, "groups": contextlib.nullcontext()}
    given |= {"quant": BLOCK, "dtype": "bfloat16"} if blocks else {}
    folder.mkdir(parents=True)
    with fp8(ROWS) if blocks else contextlib.nullcontext(), started(architecture, folder, options, **given) as engine:
        return [engine(tokens) for tokens in (6, 1, 33)]


def run(architecture: str, folder: Path, rank: int, *fusions: str, strict: bool = True) -> dict[str, Any]:
    """With these fusions and without; quantised in blocks where one of them quantises."""
    process.this = process.Process()
    register()
    blocks = fusions != (FUSION,)
    logger, said = logging.getLogger("vllm.layerfuse"), vllm_rank.Said()
    plain = _plain.get((architecture, blocks)) or results(architecture, folder / "plain", False, rank, blocks)
    _plain[architecture, blocks] = plain
    logger.addHandler(said)
    got = results(architecture, folder / "fused", {"fusions": list(fusions), "strict": strict}, rank, blocks)
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
        done = {name: run(name, place / name, rank, FUSION) for name in MODELS}
        done["quantised"] = {name: run(name, place / f"{name}-quantised", rank, QUANTISED, FUSION) for name in MODELS}
        with otherwise() if rank else contextlib.nullcontext():
            done["otherwise"] = run(MODELS[1], place / "otherwise", rank, QUANTISED, FUSION, strict=False)
        done |= {change: run_changed(place / change, rank, change) for change in CHANGES}
        dist.barrier()
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(done))
