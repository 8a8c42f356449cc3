"""Checkpoints whose headers chance has changed: read and weighed, or a WeightsError that names the file, and nothing else."""

from __future__ import annotations

import json
import math
import random
import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from mutations import CASES, SECONDS, garbled, mutated, tried

from layerfuse import registry
from layerfuse.registry.safetensors import _BITS, INDEX, WeightsError, read_headers
from layerfuse.registry.weights import weigh
from layerfuse.testing.models import full_model, small_entry

KEYS = sorted(
    {"dtype", "shape", "data_offsets", "__metadata__", "weight_map", "format", "lm_head.weight", "model.layers.0"}
    | {f"model.layers.{index}.{name}" for index in (0, 1, 7, 10**7) for name in ("mlp.experts.9.up_proj.weight", "x")}
    | {
        "model.layers.0.self_attn.q_proj.qweight",
        "model.layers.1.mlp.experts.gate_up_proj_blocks",
        "embed_tokens.weight",
    }
)
SHORT = ("llama-3.1-8b", "deepseek-v3", "mixtral-8x7b", "qwen3-next-80b-a3b")
MOST_LETTERS = 10_000
"""Of one message."""


@cache
def small(name: str) -> tuple[Any, dict[str, Any]]:
    """An entry with two layers, and the header of its checkpoint without places."""
    pytest.importorskip("transformers")
    entry = small_entry(registry.model(name), layers=2, hidden_size=64, heads=2)
    state = full_model(entry).state_dict()
    return entry, {key: {"dtype": "F32", "shape": list(tensor.shape)} for key, tensor in state.items()}


def placed(header: Any) -> tuple[Any, int]:
    """The same with tensors one behind the other, as far as they are some; and the bytes of all."""
    end = 0
    for said in header.values() if isinstance(header, dict) else ():
        shape = said.get("shape") if isinstance(said, dict) else None
        sizes = (
            shape
            if isinstance(shape, list) and all(type(side) is int and 0 <= side < 2**20 for side in shape)
            else None
        )
        if sizes is not None and str(said.get("dtype")) in _BITS and "data_offsets" not in said:
            begin, end = end, end + min(math.prod(sizes) * _BITS[said["dtype"]] // 8, 2**40)
            said["data_offsets"] = [begin, end]
    return header, end


def written(target: Path, header: bytes, data: int, index: Any, chance: random.Random) -> None:
    """A checkpoint of one file, and sometimes an index, in the place of the last."""
    length = len(header) if chance.random() < 0.95 else chance.choice((0, 7, len(header) + 1, 2**40, 2**64 - 1))
    with (target / "model.safetensors").open("wb") as file:
        file.write(length.to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + data)  # no block of the disk is taken
    (target / INDEX).unlink(missing_ok=True)
    if index is not None:
        (target / INDEX).write_text(json.dumps(index))


def one(path: Path, chance: random.Random) -> str:
    """One checkpoint: changed as a tree, before or after its tensors are placed, or as text."""
    entry, header = small(chance.choice(SHORT))
    changed = header if chance.random() < 0.2 else mutated(header, chance, KEYS)
    changed, data = placed(json.loads(json.dumps(changed)))
    changed = mutated(changed, chance, KEYS) if chance.random() < 0.2 else changed
    text = json.dumps(changed)
    text = garbled(text, chance) if chance.random() < 0.1 else text
    index = None
    if chance.random() < 0.2:
        index = {"weight_map": dict.fromkeys(header, "model.safetensors")}
        index = mutated(index, chance, KEYS) if chance.random() < 0.5 else index
    written(path, text.encode("utf-8", "surrogatepass"), data, index, chance)
    try:
        tensors = read_headers(path)
    except WeightsError as refused:
        assert str(path) in str(refused)
        assert len(str(refused)) < MOST_LETTERS
        return "refused"
    found = weigh(entry, tensors, registry.adapters().values())
    assert all(len(problem) < MOST_LETTERS for problem in found.problems)
    return "differs" if found.problems else "holds"


def test_any_checkpoint_is_weighed_or_refused(tmp_path: Path) -> None:
    for name in SHORT:
        small(name)
    in_memory = Path("/dev/shm")  # a new file on a disk takes longer than all that is done with it
    with tempfile.TemporaryDirectory(dir=in_memory if in_memory.is_dir() else tmp_path) as folder:
        found = tried(partial(one, Path(folder)))
    assert min(found["refused"], found["differs"], found["holds"]) * 50 > found.total()
    assert found.total() >= (100_000 if SECONDS >= 1200 and not CASES else 1)
