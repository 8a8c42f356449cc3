"""`mla_decode` beside adapters: vLLM puts its LoRA linears in the places of the projections once a model is loaded.

Run by `make test-engines` in an environment of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from reports import Said

pytest.importorskip("vllm_paged")
from test_vllm_decode import ON, STEPS
from test_vllm_plugin import GROUP_FP8, ROWS
from torch import Tensor
from vllm.config.lora import LoRAConfig
from vllm.lora.layers import BaseLayerWithLoRA, LoRAMapping
from vllm.lora.model_manager import create_lora_manager
from vllm_paged import Paged, paged
from vllm_started import engine_config, fp8, in_engine, load

from layerfuse.fusion.backends import counting

DENSE = {"num_hidden_layers": 2, "first_k_dense_replace": 2}
PROJECTIONS = {"fused_qkv_a_proj", "q_b_proj", "o_proj"}
TOKENS = 64


def adapted(engine: Paged) -> Any:
    """The manager of adapters that vLLM's runner makes behind the load; one with seeded weights is in its first place."""
    config, model = engine.engine.config, engine.engine.model
    config.lora_config = LoRAConfig(max_lora_rank=8, max_loras=1, lora_dtype=torch.float32)
    manager = create_lora_manager(model, 4, TOKENS, 128, config.lora_config, config, torch.device("cpu"))
    manager.lora_index_to_id[0] = 1
    generator = torch.Generator().manual_seed(0)
    found = {name.rpartition(".")[2]: m for name, m in model.named_modules() if isinstance(m, BaseLayerWithLoRA)}
    assert set(found) >= PROJECTIONS
    for module in model.modules():
        if isinstance(module, BaseLayerWithLoRA):
            for weight in (*module.lora_a_stacked, *module.lora_b_stacked):
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
    return manager


def ran(path: Path, layerfuse: Any, mode: str, adapter: bool = True) -> tuple[list[Tensor], list[dict[str, int]]]:
    results, calls = [], []
    with paged("deepseek-v3", path, layerfuse=layerfuse, mode=mode, overrides=DENSE, profile=False) as engine:
        manager = adapted(engine) if adapter else None

        def told(tokens: int) -> None:
            if manager is not None:
                manager.set_adapter_mapping(LoRAMapping((1,) * tokens, (1,), is_prefill=True))

        told(6)
        engine.engine()
        engine.allocate()
        for requests, padded in STEPS:
            told(sum(new for _, new in requests) + abs(padded))
            with counting() as counted:
                results.append(engine.step(requests, abs(padded), padded >= 0))
            calls.append({**counted})
    return results, calls


def test_a_product_whose_reader_may_have_an_adapter_is_not_expected_to_be_quantised_in_a_graph(
    tmp_path: Path, said: Said
) -> None:
    one = {"num_hidden_layers": 1, "first_k_dense_replace": 1}
    mlp = ["gate_up_proj", "down_proj"]  # an adapter's arithmetic is most of what is compiled
    given = {"overrides": {**GROUP_FP8, **one}, "dtype": "bfloat16"}
    config = engine_config("deepseek-v3", layerfuse={"fusions": "all", "strict": True}, **given)
    config.lora_config = LoRAConfig(max_lora_rank=8, max_loras=1, lora_dtype=torch.bfloat16, target_modules=mlp)
    with fp8(ROWS), in_engine(config, tmp_path):
        engine = load(config)
        manager = create_lora_manager(engine.model, 4, TOKENS, 128, config.lora_config, config, torch.device("cpu"))
        found = {
            name.rpartition(".")[2] for name, m in engine.model.named_modules() if isinstance(m, BaseLayerWithLoRA)
        }
        assert found == {*mlp}
        manager.lora_index_to_id[0] = 1
        manager.set_adapter_mapping(LoRAMapping((1,) * 6, (1,), is_prefill=True))
        engine()
    lines = said()
    assert any(line.startswith("add_rms_norm_group_quant: 1 expected, 1 fused, 0 missed") for line in lines)
    assert "silu_mul_group_quant: cannot stand at 1 site: LoRA may read the product too, unquantised" in lines


@pytest.mark.parametrize("mode", [pytest.param("VLLM_COMPILE", marks=pytest.mark.thorough), "NONE"])
def test_projections_with_adapters_are_called_as_vllm_calls_them(mode: str, tmp_path: Path) -> None:
    own, _ = ran(tmp_path / "own", False, "NONE")
    plain, _ = ran(tmp_path / "plain", False, "NONE", adapter=False)
    got, calls = ran(tmp_path / "ours", ON, mode)
    torch.testing.assert_close(got, own, rtol=1e-4, atol=1e-4)
    assert all((a - b).norm() > 0.1 * b.norm() for a, b in zip(own, plain, strict=True)), "the adapter does nothing"
    assert sum("mla_query_absorb" in counted for counted in calls) == 3
    assert all(counted["mla_norm_rope_cache_into"] == 2 for counted in calls)
