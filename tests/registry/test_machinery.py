"""Names for other machinery: transformers' own `KernelConfig` takes the keys that follow from a model's specs."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import fresh_model

from layerfuse import registry
from layerfuse.cli import main
from layerfuse.registry.machinery import kernel_fusions, packed_modules
from layerfuse.testing.models import small_model

transformers = pytest.importorskip("transformers")

LAYERS = "model.layers.*"


def specs(name: str) -> list[tuple[str, Any]]:
    return list(registry.specs_in(fresh_model(name)))


AS_LLAMA = {"input_layernorm": "self_attn", "post_attention_layernorm": "mlp"}


@pytest.mark.parametrize(
    ("name", "packed", "readers"),
    [
        ("llama-3.1-8b", {"qkv_proj": 3, "gate_up_proj": 2}, AS_LLAMA),
        ("phi-4", {"qkv_proj": 1, "gate_up_proj": 1}, AS_LLAMA),
        ("mixtral-8x7b", {"qkv_proj": 3}, AS_LLAMA),
        (
            "gemma-2-2b",
            {"qkv_proj": 3, "gate_up_proj": 2},
            {"input_layernorm": "self_attn", "pre_feedforward_layernorm": "mlp"},
        ),
        ("deepseek-v3", {"gate_up_proj": 2, "fused_qkv_a_proj": 2}, AS_LLAMA),
        # a hybrid
        ("qwen3.5-27b", {"qkv_proj": 3, "gate_up_proj": 2, "in_proj_qkvz": 2}, {"post_attention_layernorm": "mlp"}),
        ("olmo-2-7b", {}, {}),  # its norms stand on what the blocks give
    ],
)
def test_what_follows_from_the_specs(name: str, packed: dict[str, int], readers: dict[str, str]) -> None:
    found = specs(name)
    assert {merged: len(parts) for merged, parts in packed_modules(found).items()} == packed
    keys = [
        ((("RMSNorm", f"{LAYERS}.{norm}")), ("Attention" if at == "self_attn" else "MLP", f"{LAYERS}.{at}"))
        for norm, at in readers.items()
    ]
    assert kernel_fusions(found) == keys


def test_the_command_prints_both(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["specs", "llama-3.1-8b", "--names"])
    assert done.value.code == 0
    said = json.loads(capsys.readouterr().out)
    assert said["packed_modules_mapping"]["gate_up_proj"] == ["gate_proj", "up_proj"]
    assert said["kernel_fusions"][1] == [["RMSNorm", f"{LAYERS}.post_attention_layernorm"], ["MLP", f"{LAYERS}.mlp"]]


class NormMLP(torch.nn.Module):
    """A kernel as the hub has them: its layout stands in the place of both modules."""


class NormMLPLayout(torch.nn.Module):
    def __init__(self, norm: Any, mlp: Any) -> None:
        super().__init__()
        self.norm, self.mlp = norm, mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.norm(x))


def test_transformers_fuses_what_a_key_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its own registering and patching; the hub alone, from which nothing can be downloaded, is a stand-in."""
    hub = pytest.importorskip("transformers.integrations.hub_kernels")
    patching = pytest.importorskip("transformers.monkey_patching")
    if not hasattr(hub, "register_kernel_replacements_and_fusions"):
        pytest.skip("this transformers fuses no modules")
    model = small_model(registry.model("llama-3.1-8b"), layers=2)
    _, key = kernel_fusions(registry.specs_in(model))
    monkeypatch.setattr(hub, "LocalLayerRepository", lambda **_: SimpleNamespace(load=lambda: NormMLP))
    config = transformers.KernelConfig({key: "/nowhere:NormMLP"}, use_local_kernel=True)
    try:
        hub.register_kernel_replacements_and_fusions(type(model), model.config, config)
        with patching.apply_patches():
            fused = type(model)(model.config).eval()
    finally:
        patching.clear_patch_mapping()
    layer = fused.model.layers[0]
    assert isinstance(layer.post_attention_layernorm, NormMLPLayout)
    assert isinstance(layer.mlp, torch.nn.Identity)
    state = {
        k: model.state_dict()[
            k.replace("post_attention_layernorm.norm.", "post_attention_layernorm.").replace(
                "post_attention_layernorm.mlp.", "mlp."
            )
        ]
        for k in fused.state_dict()
    }
    fused.load_state_dict(state)
    ids = torch.arange(8)[None]
    with torch.inference_mode():
        assert torch.equal(fused(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
