"""Models at their published widths and with few layers, as folders that vLLM loads without a network, and their random weights.

`workloads.toml` says which, and what of each is smaller than published; so is the vocabulary, which no decode graph holds.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from workloads import SHAPES

CHECKPOINTS = (Path(__file__).parents[2] / "tests" / "engines" / "checkpoints", Path(__file__).parent / "checkpoints")
VOCABULARY = 16384
FIRST_SEED = 0
"""Of the weights; another one gives another model of the same shape."""


def layers_of(shape: str) -> int:
    """How many decoder layers a shape has."""
    return int(SHAPES[shape][1]["num_hidden_layers"])


def folder_of(shape: str, below: Path) -> Path:
    """A folder with the config of a shape and a tokenizer of one word per token."""
    base, changes = SHAPES[shape]
    config = next(
        json.loads(path.read_text()) for path in (each / base / "config.json" for each in CHECKPOINTS) if path.exists()
    )
    outer = config
    config = config.get("text_config", config)
    # vLLM knows some by the name of the whole alone, and not by what is said of the text.
    whole = "text_config" in outer and "architectures" not in config
    config = config | {"vocab_size": VOCABULARY, "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1}
    config = {key: value for key, value in {**config, **changes}.items() if value is not None}
    config.setdefault("torch_dtype", "bfloat16")
    if isinstance(config.get("rope_scaling"), dict):
        config["max_position_embeddings"] = int(
            config["rope_scaling"]["original_max_position_embeddings"] * config["rope_scaling"]["factor"]
        )
    if whole:
        quantised = config.pop("quantization_config", None)
        config = {**outer, "text_config": config, **({"quantization_config": quantised} if quantised else {})}
    path = below / shape
    path.mkdir(parents=True, exist_ok=True)
    _write(path / "config.json", json.dumps(config, indent=1))
    words = {f"t{i}": i for i in range(VOCABULARY)}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "t2"},
    }  # fmt: skip
    _write(path / "tokenizer.json", json.dumps(tokenizer))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "t0", "eos_token": "t1", "unk_token": "t2"}
    _write(path / "tokenizer_config.json", json.dumps(about))
    return path


def _write(path: Path, text: str) -> None:
    """All of it at once: an engine of another command may be reading there."""
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.write_text(text)
    beside.replace(path)


def sharded_in(model: Any) -> frozenset[str]:
    """The parameters of an engine's model that each rank has a part of."""
    return frozenset(
        f"{path}.{name}"
        for path, each in model.named_modules()
        if getattr(each, "tp_size", 1) > 1 or ".experts" in path
        for name, _ in each.named_parameters(recurse=False)
    )


def fill(state: dict[str, Any], sharded: frozenset[str] = frozenset(), rank: int = 0, ranks: int = 1) -> None:
    """Draw weights that make a model's numbers worth comparing: rows of unit gain, small residual branches, logits apart.

    vLLM's dummy weights make all logits alike. Each tensor has a seed of its own, the same at every start, and of what is sharded
    each rank has another part: equal ones would make every token tie with those of the other ranks.

    Args:
        state: of the model on this rank.
        sharded: names of what each rank has a part of.
        rank: this one.
        ranks: that share them.
    """
    import torch

    for place, (name, tensor) in enumerate(sorted(state.items()), 1):
        seed = FIRST_SEED + place + (100_000 * rank if name in sharded else 0)
        parts = ranks if name in sharded or name.removesuffix("_scale_inv").removesuffix("_scale") in sharded else 1
        if tensor.device.type == "meta" or tensor.numel() == 1:
            continue
        generator = torch.Generator(device=tensor.device).manual_seed(seed)
        inner = any(word in name for word in ("o_proj", "down_proj", "out_proj", "w2_"))
        if tensor.dtype == torch.uint8:  # MXFP4: codes, and exponents plus 127
            if "scale" in name:
                tensor.fill_(118 if inner else 120)
            else:
                tensor.random_(0, 256, generator=generator)
        elif name.endswith("_packed"):  # eight values of four bits along its columns
            tensor.random_(-(2**31), 2**31, generator=generator)
        elif not tensor.is_floating_point():
            continue
        elif tensor.dim() == 1 and "norm" in name:
            tensor.uniform_(0.5, 1.5, generator=generator)
        elif tensor.dim() == 1 or name.endswith("bias"):
            tensor.uniform_(-0.1, 0.1, generator=generator)
        elif (packed := name.replace("_scale", "_packed")) != name and packed in state:
            tensor.fill_(_gain(name, state[packed].shape[-1] * 8, inner, parts) / 8)
        elif "scale" in name:
            columns = state[name.removesuffix("_scale_inv").removesuffix("_scale")].shape[-1]
            tensor.fill_(_gain(name, columns, inner, parts) / 224)
        elif tensor.element_size() == 1:
            drawn = torch.empty(tensor.shape, dtype=torch.bfloat16, device=tensor.device)
            tensor.copy_(drawn.uniform_(-224, 224, generator=generator))
        else:
            gain = _gain(name, tensor.shape[-1], inner, parts)
            tensor.uniform_(-gain, gain, generator=generator)


def _gain(name: str, columns: int, inner: bool, parts: int) -> float:
    if "embed" in name:
        return 1.7
    # What ends a residual branch is split along its columns.
    whole = columns * parts if inner else columns
    return float((3.0 / whole) ** 0.5 * (0.3 if inner else 3.0 if "lm_head" in name else 1.0))
