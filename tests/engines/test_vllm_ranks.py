"""layerfuse inside vLLM on two real tensor-parallel ranks: two processes, vLLM's own groups over gloo, one cache."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm_layers")
from vllm_layers import MODELS

RANK = Path(__file__).with_name("vllm_rank.py")
ADD, DUAL, GATED, REDUCED = "add_rms_norm", "mla_dual_rms_norm", "gated_rms_norm", "all_reduce_add_rms_norm"
COMPILED = {"fusions": [REDUCED, ADD, DUAL, GATED], "strict": True}
MODULES = {"fusions": [ADD, DUAL, GATED], "strict": True}
RUNS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "deepseek-v3": ({"model": "deepseek-v3"}, {REDUCED: 6, DUAL: 3}),
    "deepseek-v3-bfloat16": ({"model": "deepseek-v3", "dtype": "bfloat16"}, {REDUCED: 6, DUAL: 3}),
    "deepseek-v3-fp8": (
        {
            "model": "deepseek-v3",
            "dtype": "bfloat16",
            "kernel": "cutlass:CutlassFp8BlockScaledMMKernel",
            "layerfuse": {"fusions": "all", "strict": True},
        },
        {},
    ),
    # Chains are launched for 1, 2 and 4 tokens too.
    "kimi-k2": ({"model": "kimi-k2", "steps": [1, 3]}, {REDUCED: 6, DUAL: 3}),
    "gpt-oss": ({"model": "gpt-oss-20b", "dtype": "bfloat16"}, {REDUCED: 8}),
    "qwen3-next": ({"model": "qwen3-next", "dtype": "bfloat16"}, {REDUCED: 8, GATED: 3}),
    "deepseek-v3-modules": ({"model": "deepseek-v3", "mode": "NONE", "layerfuse": MODULES}, {ADD: 6, DUAL: 3}),
    "kimi-linear": ({"model": "kimi-linear", "mode": "NONE", "layerfuse": MODULES}, {ADD: 7, GATED: 3}),
}
"""Name -> what `vllm_rank.run` is given, and the sites of each fusion."""


def start(folder: Path) -> list[dict[str, Any]]:
    """What each of two ranks says of every model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    runs = {name: {"layerfuse": COMPILED, **given} for name, (given, _) in RUNS.items() if given["model"] in MODELS}
    ranks = [
        subprocess.Popen(
            [sys.executable, RANK, str(rank), "2", port, str(folder), json.dumps(runs)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=600)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n\n".join(said)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def test_another_tensor_parallel_group_takes_no_piece_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused all-reduce holds torch's name of its group, and pipeline stages and replicas share a cache."""
    from types import SimpleNamespace

    from vllm.distributed import parallel_state

    from layerfuse.engines.vllm.passes import FusionPass

    pipeline: Any = SimpleNamespace(uuid=lambda: "one plan")

    def uuid_in(group: str) -> str:
        there = SimpleNamespace(device_group=SimpleNamespace(group_name=group))
        monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: True)
        monkeypatch.setattr(parallel_state, "get_tp_group", lambda: there)
        return FusionPass(pipeline).uuid()

    assert uuid_in("3") == uuid_in("3") != uuid_in("4")
    monkeypatch.undo()
    assert FusionPass(pipeline).uuid() == "one plan over no group"
