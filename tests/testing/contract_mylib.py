"""A third party's library: an MLA model with words of its own, and the models file that teaches it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from layerfuse import registry
from layerfuse.registry import Registry, files

HIDDEN, HEADS, Q_LORA, KV_LORA, NOPE, ROPE, V = 32, 4, 24, 16, 8, 4, 6


class MyNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class MyKernel(nn.Module):
    def __init__(self, outer):
        super().__init__()
        self.num_heads = outer.n_heads
        self.q_lora_rank, self.kv_lora_rank = Q_LORA, KV_LORA
        self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim = NOPE, ROPE, V
        self.scale = outer.scale
        self.layer_name = f"model.layers.{outer.index}.attention.kernel"


class MyAttention(nn.Module):
    """Says `n_heads` where others say `num_heads`. `size` is known to no attribute: only weights tell."""

    def __init__(self, index):
        super().__init__()
        self.index, self.width = index, HIDDEN
        self.n_heads = HEADS
        self.head_groups = 1
        self.q_lora_rank, self.kv_lora_rank = Q_LORA, KV_LORA
        self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim = NOPE, ROPE, V
        self.scale = (NOPE + ROPE) ** -0.5
        self.q_a = nn.Linear(HIDDEN, Q_LORA, bias=False)
        self.q_norm = MyNorm(Q_LORA, 1e-6)
        self.q_b = nn.Linear(Q_LORA, HEADS * (NOPE + ROPE), bias=False)
        self.kv_a = nn.Linear(HIDDEN, KV_LORA + ROPE, bias=False)
        self.kv_norm = MyNorm(KV_LORA, 1e-6)
        self.kv_b = nn.Linear(KV_LORA, HEADS * (NOPE + V), bias=False)
        self.o = nn.Linear(HEADS * V, HIDDEN, bias=False)

    def forward(self, x):
        batch, length, _ = x.shape
        q = self.q_b(self.q_norm(self.q_a(x))).view(batch, length, HEADS, NOPE + ROPE).transpose(1, 2)
        latent, rope = self.kv_a(x).split([KV_LORA, ROPE], dim=-1)
        kv = self.kv_b(self.kv_norm(latent)).view(batch, length, HEADS, NOPE + V).transpose(1, 2)
        k = torch.cat([kv[..., :NOPE], rope.unsqueeze(1).expand(-1, HEADS, -1, -1)], dim=-1)
        weights = (q @ k.transpose(-1, -2) * self.scale).softmax(-1)
        return self.o((weights @ kv[..., NOPE:]).transpose(1, 2).reshape(batch, length, HEADS * V))


class MyShardedAttention(MyAttention):
    """As an engine builds it: total and local counts, and the rank, are attributes."""

    def __init__(self, index, size=1, rank=0):
        super().__init__(index)
        self.n_local_heads, self.tp_rank = HEADS // size, rank


class MyModel(nn.Module):
    def __init__(self, layers=2, kernels=False, make=MyAttention):
        super().__init__()
        self.embed = nn.Embedding(16, HIDDEN)
        self.layers = nn.ModuleList(make(i) for i in range(layers))
        if kernels:
            for layer in self.layers:
                layer.kernel = MyKernel(layer)

    def forward(self, input_ids, use_cache=False):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return x


for _class in (MyNorm, MyAttention, MyShardedAttention, MyKernel, MyModel):
    _class.__module__ = "mylib.attention"

MODELS_TOML = (Path(__file__).parent / "mylib.toml").read_text(encoding="utf-8")


def registry_of(kind=Registry, toml=MODELS_TOML, **words):
    """A registry of this kind with the built-in content and my model, some words about MyAttention changed."""
    made = kind(fill=registry.default._fill or _fill)
    entries = files.parse(toml)
    table = entries["my-model"].layer_classes["mylib:MyAttention"]
    table.update({name: word for name, word in words.items() if word is not None})
    for name in [name for name, word in words.items() if word is None]:
        del table[name]
    made.register_models(entries, "tests")
    return made


def _fill(made):
    for adapter in registry.adapters().values():
        made.register_adapter(adapter)


def meta_model(**kwargs):
    with torch.device("meta"):
        return MyModel(**kwargs)


def small():
    torch.manual_seed(0)
    return MyModel().eval().requires_grad_(False)
