"""A real SGLang engine on a CPU, with two ranks: run as a script, as it starts processes of its own.

    python sglang_started.py FOLDER [mla]

The folder gets a tiny Llama, or a tiny DeepSeek-V3 for one rank and fa3 (`fa3_on_cpu`); the last line is JSON: the tokens of the engine, those behind what its radix cache holds of the same prompts and how many it held, and those of
transformers.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9]]
NEW = 8
CHUNK = 4
"""Tokens of a step of prompts: the first prompt takes two."""


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, max_position_embeddings=256, initializer_range=0.3, tie_word_embeddings=False, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _deepseek() -> Any:
    """Its layers are dense."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, first_k_dense_replace=2, num_attention_heads=4,
        num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16,
        moe_layer_freq=1, topk_method="noaux_tc", scoring_func="sigmoid", max_position_embeddings=256, initializer_range=0.3, tie_word_embeddings=False, eos_token_id=None,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config)


def made(folder: str, mla: bool) -> list[list[int]]:
    """Write the model, and return what transformers says to the prompts. In float32 only their rounding differs."""
    import torch

    torch.manual_seed(0)
    model = (_deepseek() if mla else _llama()).eval()
    for path, parameter in model.named_parameters():
        if "norm" in path:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder)
    said = []
    for prompt in PROMPTS:
        given = torch.tensor([prompt])
        mask = torch.ones_like(given)
        found = model.generate(given, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        said.append(found[0, len(prompt) :].tolist())
    return said


def main(folder: str, mla: bool) -> dict[str, Any]:
    expected = made(folder, mla)
    from sglang.srt.entrypoints.engine import Engine

    # SGLang spawns its processes, each of which takes ten seconds to import it: here they are forked from one that has.
    multiprocessing.set_forkserver_preload(["sglang.srt.managers.scheduler", "sglang.srt.models.registry"])
    start = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: start("forkserver", force=force)
    engine = Engine(
        model_path=folder,
        device="cpu",
        dtype="float32",
        tp_size=1 if mla else 2,
        attention_backend="fa3" if mla else "torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        chunked_prefill_size=CHUNK,
        max_total_tokens=512,
        max_running_requests=4,
        skip_tokenizer_init=True,
        log_level="info",
    )
    sampling = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
    first, again = (engine.generate(input_ids=PROMPTS, sampling_params=sampling) for _ in range(2))
    engine.shutdown()
    found, cached = ([answer["output_ids"] for answer in several] for several in (first, again))
    held = [[answer["meta_info"]["cached_tokens"] for answer in several] for several in (first, again)]
    return {"found": found, "cached": cached, "held": held, "expected": expected}


if __name__ == "__main__":
    answer = main(str(Path(sys.argv[1])), "mla" in sys.argv[2:])
    print(json.dumps(answer))
