"""torch.nn.RMSNorm in the place of a class's own norm: it calls its epsilon `eps`, and adds nothing to its weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import fresh_model
from torch import nn

from layerfuse import registry
from layerfuse.adapters import MissingAttributeError, SpecError

pytest.importorskip("transformers")


def stream_with(norm: nn.Module, model: str = "qwen3-4b") -> Any:
    layer = fresh_model(model).get_submodule("model.layers.0")
    layer.input_layernorm = norm
    return registry.spec_for(layer, path="model.layers.0").input_norm


def torch_norm(model: str = "qwen3-4b", **words: Any) -> nn.RMSNorm:
    return nn.RMSNorm(registry.model(model).hidden_size, device="meta", **words)


class Derived(nn.RMSNorm):
    """Computes what torch's does, as a wrapper that FSDP makes of it."""


class Other(nn.RMSNorm):
    """Computes something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("model", ["qwen3-4b", "qwen3-next-80b-a3b"])
def test_torchs_norm_is_read_as_what_it_is(model: str) -> None:
    """Where a class's own norms are zero-centred too."""
    read = stream_with(torch_norm(model, eps=3e-5), model)
    assert (read.width, read.epsilon, read.weight_offset) == (registry.model(model).hidden_size, 3e-5, 0.0)


def test_a_class_that_computes_the_same_is_read_alike_and_another_is_not() -> None:
    assert stream_with(Derived(2560, eps=1e-5, device="meta")).epsilon == 1e-5
    with pytest.raises(MissingAttributeError, match="Other has no 'variance_epsilon'"):
        stream_with(Other(2560, eps=1e-5, device="meta"))


def test_torchs_norm_without_an_epsilon_is_refused_with_the_reason() -> None:
    """It takes that of the dtype that it is called with."""
    norm = nn.RMSNorm(4)
    x = torch.full((1, 4), 1e-5)
    eps = torch.finfo(torch.float32).eps
    assert torch.allclose(norm(x), x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))
    with pytest.raises(
        SpecError, match=r"input_norms.epsilon: torch.nn.RMSNorm with eps=None takes the eps of the dtype"
    ):
        stream_with(torch_norm())


def test_torchs_norm_without_a_weight_is_refused() -> None:
    with pytest.raises(MissingAttributeError, match=r"input_norms?\S*width"):
        stream_with(torch_norm(eps=1e-5, elementwise_affine=False))


def test_the_other_places_of_norms_are_read_alike() -> None:
    model = fresh_model("deepseek-v3")
    attention = model.get_submodule("model.layers.0.self_attn")
    attention.kv_a_layernorm = nn.RMSNorm(512, eps=2e-6, device="meta")
    assert registry.spec_for(attention).kv_norm.epsilon == 2e-6
    model.model.norm = nn.RMSNorm(7168, eps=4e-6, device="meta")
    assert registry.spec_for(model.model).final_norm.epsilon == 4e-6
