"""Models that transformers itself shards over real ranks: each all-reduce in front of an add is fused, and counted.

What is sharded is what its own plans say: of DeepSeek-V3 the MLPs and experts, of gpt-oss the experts, of neither the
attention.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from ranks import run_on_ranks
from reduced_support import REDUCED
from torch.distributed.tensor import DTensor

from layerfuse.fusion import compile  # noqa: A004
from layerfuse.fusion.rewrite import Pipeline

transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "max_position_embeddings": 64}
EXPERTS = {"num_hidden_layers": 2, "num_experts_per_tok": 2, "num_attention_heads": 4}
LATENTS = {"q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
ROUTED = {"first_k_dense_replace": 1, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 1}
TOKENS = torch.arange(6)[None]


def deepseek() -> Any:
    """A dense layer, and a mixture of experts with a shared one."""
    config = transformers.DeepseekV3Config(
        **SMALL, **EXPERTS, **LATENTS, **ROUTED, num_key_value_heads=4, n_group=1, topk_group=1
    )
    return transformers.DeepseekV3ForCausalLM(config).eval()


def gpt_oss() -> Any:
    """Two mixtures of experts."""
    config = transformers.GptOssConfig(**SMALL, **EXPERTS, num_key_value_heads=2, num_local_experts=4, head_dim=16)
    return transformers.GptOssForCausalLM(config).eval()


def sharded(model: Any, size: int, **plans: Any) -> Any:
    """As `from_pretrained(distributed_config=...)` does it before it loads weights, which are there already."""
    from transformers.distributed import DistributedConfig

    config, _, meshes = model.prepare_distribute_model(DistributedConfig(tp_size=size, **plans), device_map=None)
    return model.maybe_distribute_model(model, config, meshes)


def rows_of(model: Any) -> int:
    """Of the embedding that this rank holds."""
    weight = model.get_input_embeddings().weight
    return len(weight.to_local() if isinstance(weight, DTensor) else weight)


def counting() -> Counter[str]:
    """Counts the collectives that rewritten graphs still hold, and lets Inductor run them op by op."""
    import torch._inductor.compile_fx as inductor

    left: Counter[str] = Counter()
    rewrite = Pipeline.rewrite

    def counted(self: Pipeline, graph: torch.fx.Graph) -> Any:
        record = rewrite(self, graph)
        left.update(str(node.target).split(".")[1] for node in graph.nodes if "_c10d_functional" in str(node.target))
        return record

    Pipeline.rewrite = counted  # type: ignore[method-assign]
    inductor.compile_fx_inner = lambda gm, _inputs, **_: gm
    return left


def on_a_rank(_rank: int, size: int) -> Any:
    """Each model sharded and fused, held against the whole one."""
    left, answers = counting(), []
    cases = (
        (deepseek, {}, torch.float32, 1e-5),
        (gpt_oss, {"ep_size": size}, torch.bfloat16, 2e-2),
    )
    for build, plans, dtype, tolerance in cases:
        torch._dynamo.reset()
        left.clear()
        whole = build().to(dtype)
        part = sharded(copy.deepcopy(whole), size, tp_plan="auto", **plans)
        # Of gpt-oss since transformers 5.24, too.
        embedding = int(rows_of(part) < rows_of(whole))
        fused = compile(part, strict=True)
        with torch.no_grad():
            wanted = whole(input_ids=TOKENS, use_cache=False).logits
            for _ in range(2):
                given = fused(input_ids=TOKENS, use_cache=False).logits
        torch.testing.assert_close(given, wanted, rtol=0, atol=tolerance * float(wanted.abs().max()))
        verdict = fused.report.of(REDUCED)
        # Attention is whole on every rank: nothing is reduced behind it, and nothing is expected there.
        assert verdict.matched == verdict.expected == ("model.layers.1:input", "model:final"), str(fused.report)
        assert verdict.last_call == 2
        # What is left is that of the embedding and what gathers the logits, each with its wait.
        wanted_left = {"all_reduce": embedding, "all_gather_into_tensor": 1, "wait_tensor": 1 + embedding}
        assert left == Counter(wanted_left), left
        answers.append(given.double().tolist())
    return answers


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_every_all_reduce_in_front_of_an_add_is_fused(size: int) -> None:
    one, *others = run_on_ranks(on_a_rank, size, size)
    assert all(other == one for other in others)
