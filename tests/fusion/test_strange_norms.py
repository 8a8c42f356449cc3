"""Norms that no adapter reads, whatever they are called: the graphs tell of those that the names do not, and of nothing else.

The graphs are run op by op instead of by generated code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import in_turn
from torch import Tensor, nn

from layerfuse import fusion, registry
from layerfuse.adapters import Adapter
from layerfuse.fusion import FusionConfig, FusionMissedError

transformers = pytest.importorskip("transformers")
from transformers.models.qwen3 import modeling_qwen3 as qwen3  # noqa: E402
from transformers.models.t5.modeling_t5 import T5LayerNorm  # noqa: E402

pytestmark = pytest.mark.usefixtures("_op_by_op")

CONFIG = transformers.Qwen3Config(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
    head_dim=16, max_position_embeddings=64, attn_implementation="sdpa",
)  # fmt: skip
ONE = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
IDS = torch.arange(6)[None]


class Scale(nn.Module):
    """An RMS norm by no name, in torch's words."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(64) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (64,), self.weight, 1e-6)


class Halves(Scale):
    """With all arithmetic in the dtype of what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Buffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(64) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (64,), self.scale, 1e-6)


class Alone(nn.Module):
    """Without a weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (64,))


class Own(nn.Module):
    """A decoder layer of somebody's own around Qwen3's attention and MLP."""

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.attention, self.mlp = qwen3.Qwen3Attention(CONFIG, 0), qwen3.Qwen3MLP(CONFIG)
        self.before, self.behind = norm(), norm()

    def forward(self, x: Tensor, rope: Any) -> Tensor:
        x = x + self.attention(self.before(x), position_embeddings=rope, attention_mask=None)[0]
        return x + self.mlp(self.behind(x))


class Flat(Own):
    """Whose MLP takes rows of all sequences together."""

    def forward(self, x: Tensor, rope: Any) -> Tensor:
        x = x + self.attention(self.before(x), position_embeddings=rope, attention_mask=None)[0]
        return x + self.mlp(self.behind(x.view(-1, 64))).view(x.shape)


class Bare(nn.Module):
    """With the norms' weights as its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = qwen3.Qwen3Attention(CONFIG, 0), qwen3.Qwen3MLP(CONFIG)
        self.one, self.two = nn.Parameter(torch.ones(64)), nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor, rope: Any) -> Tensor:
        normed = F.rms_norm(x, (64,), self.one, 1e-6)
        x = x + self.attention(normed, position_embeddings=rope, attention_mask=None)[0]
        return x + self.mlp(F.rms_norm(x, (64,), self.two, 1e-6))


class Known(qwen3.Qwen3DecoderLayer):
    def forward(self, x: Tensor, rope: Any) -> Any:
        return super().forward(x, position_embeddings=rope, attention_mask=None)


class Model(nn.Module):
    """Layers, what is in front of them, and what is behind."""

    def __init__(
        self, layers: list[nn.Module], norm: nn.Module, head: nn.Module | None = None, front: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.embedding, self.rotary = nn.Embedding(64, 64), qwen3.Qwen3RotaryEmbedding(CONFIG)
        self.front, self.layers = front or nn.Identity(), nn.ModuleList(layers)
        self.last, self.head = norm, head or nn.Identity()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.front(self.embedding(ids))
        rope = self.rotary(x, torch.arange(x.shape[1])[None])
        for layer in self.layers:
            x = layer(x, rope)
        return self.head(self.last(x))


def known() -> list[nn.Module]:
    return [Known(CONFIG, 0)]


def unknown(model: nn.Module, **arguments: Any) -> dict[str, str]:
    """What holds norms that nobody reads, after a call that gives the model's numbers -> which norms."""
    # Without the op of Qwen3's heads, which rounds once where the model rounds each step.
    arguments.setdefault("config", FusionConfig(switches={"qk_norm_rope": False}))
    fused = fusion.compile(model.eval(), **arguments)
    with torch.no_grad():
        torch.testing.assert_close(fused(IDS), model(IDS), rtol=1e-3, atol=1e-3)
    said = fused.report.to_dict()["unknown"]
    try:
        fused.report.check_call()
    except FusionMissedError as error:
        assert error.unknown == said
    else:
        assert not said
    return {path: what.rpartition(": ")[2] for path, what in said.items()}


@pytest.mark.parametrize(
    ("norm", "in_a_head"), in_turn([Scale, Halves, Buffer, Alone, lambda: T5LayerNorm(64)], [False, True])
)
def test_a_final_norm_of_any_name_is_named(norm: Callable[[], nn.Module], in_a_head: bool) -> None:
    if in_a_head:
        head = nn.Sequential(nn.Identity(), norm(), nn.Linear(64, 64))
        assert unknown(Model(known(), nn.Identity(), head)) == {"head": "1"}
    else:
        assert unknown(Model(known(), norm())) == {"": "last"}


@pytest.mark.parametrize(("layer", "dtype"), in_turn([Own, Flat], [torch.float32, torch.bfloat16]))
def test_the_norms_of_ones_own_decoder_layers_are_named(layer: type[Own], dtype: torch.dtype) -> None:
    model = Model([layer(Scale), layer(Scale)], Scale()).to(dtype)
    # The first norm of all has no residual to add, and no fusion takes it.
    assert unknown(model, dynamic=dtype == torch.bfloat16) == {
        "layers.0": "behind",
        "layers.1": "before, behind",
        "": "last",
    }


def test_a_norm_that_is_no_module_is_named_by_the_line_that_computes_it() -> None:
    found = unknown(Model([Bare(), Bare()], nn.Identity()))
    assert list(found) == ["layers.0", "layers.1"]
    assert all("test_strange_norms.py:" in lines for lines in found.values())


def test_strict_refuses_them_in_each_call_and_says_where_they_stand() -> None:
    fused = fusion.compile(Model(known(), Scale()).eval(), strict=True)
    for _ in range(2):
        with torch.no_grad(), pytest.raises(FusionMissedError, match=r"the model itself: RMS norms .*: last"):
            fused(IDS)
    assert "unknown: the model itself: no adapter knows RMS norms" in str(fused.report)
    with pytest.raises(FusionMissedError, match="last"):
        fused.report.check()
    fused.original.last = nn.Identity()
    with torch.no_grad():
        fused(IDS)


class Turns(Model):
    """All layers twice, one after the other."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.front(self.embedding(ids))
        rope = self.rotary(x, torch.arange(x.shape[1])[None])
        for layer in [*self.layers, *self.layers]:
            x = layer(x, rope)
        return x


def test_the_first_norm_of_layers_that_run_again_is_named() -> None:
    assert unknown(Turns(known(), nn.Identity())) == {"layers.0": "input_layernorm, where it runs behind other layers"}


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6, 64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.last = Scale(), nn.Linear(64, 64), Scale()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.linear(self.norm(x)))


class Every(Scale):
    """One root for all rows."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(dim=None, keepdim=True) + 1e-6))


class Products(Scale):
    """Of no squares."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt((x * (x + 1)).mean(-1, keepdim=True) + 10))


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (lambda: Model(known(), Every()), {}),
        (lambda: Model(known(), Products()), {}),
        (lambda: Model([Own(lambda: nn.LayerNorm(64))], nn.LayerNorm(64)), {}),
        (lambda: Model(known(), nn.LayerNorm(64), front=Tower()), {}),
        (lambda: Model(known(), nn.LayerNorm(64), head=Tower().linear), {}),
        (lambda: Model(known(), nn.LayerNorm(64), front=Positions()), {}),
        (lambda: Model([Own(Scale)], Scale()), {"specs": []}),
        (lambda: Model([Own(Scale)], Scale()), {"config": FusionConfig(level=0)}),
        (lambda: Model([Own(Scale)], Scale()), {"config": FusionConfig.parse("-add_rms_norm")}),
    ],
    ids=[
        "all rows at once",
        "no squares",
        "layer norms",
        "a tower in front",
        "a linear behind",
        "positions",
        "specs that are given",
        "level 0",
        "switched off",
    ],
)
def test_nothing_else_is_named(make: Callable[[], nn.Module], arguments: dict[str, Any]) -> None:
    assert unknown(make(), **arguments) == {}


def test_what_an_adapter_ignores_is_left_alone() -> None:
    made = registry.fresh()
    made.register_adapter(Adapter("mine", {}, ignored=[f"{__name__}:Bare", f"{__name__}:Scale"]))
    assert unknown(Model([Bare(), Bare()], Scale()), registry=made) == {}


# ---- a site's own norm in no known form


class Roots(Scale):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Sums(Scale):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / 64 + 1e-6))


class Centred(Scale):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (64,), self.weight, None, 1e-6)


class Columns(Scale):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6))


@pytest.mark.parametrize("norm", [Roots, Sums, Centred, Columns, Halves])
def test_a_norm_in_no_known_form_is_missed_for_that(norm: type[Scale]) -> None:
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**CONFIG.to_dict(), **ONE})).eval().half()
    for layer in model.model.layers:
        for name in ("input_layernorm", "post_attention_layernorm"):
            given = norm().half()
            given.variance_epsilon = 1e-6
            setattr(layer, name, given)
    fused = fusion.compile(model)
    with torch.no_grad():
        fused(IDS, use_cache=False)
    missed = fused.report.of("add_rms_norm").missed
    assert list(missed) == ["model.layers.0:post_attention"]
    assert all("known form" in why for why in missed.values()), missed
