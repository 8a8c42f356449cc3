"""Whole real SGLang 0.5.23 models, built without a GPU, against what models.toml declares of them.

Run by `make test-engines` in an environment of its own.
"""

from __future__ import annotations

import pytest

from layerfuse import registry
from layerfuse.adapters import GQASpec, ResidualSpec

sglang_layers = pytest.importorskip("sglang_layers")
from sglang_layers import MODELS, build_model  # noqa: E402
from whole_models import cases, check_every_layer, check_kernel_layers, check_stages, norms_that_feed_nothing  # noqa: E402

WITHOUT_STAGES = ("longcat-flash", "qwen3-next")
"""One is built whole on every rank, and the other stops."""


@pytest.mark.parametrize(("name", "tp", "rank"), cases(MODELS))
def test_every_layer_reads_as_declared(name: str, tp: int, rank: int) -> None:
    check_every_layer(build_model(name, tp=tp, rank=rank), "sglang", name, tp, rank)


@pytest.mark.parametrize(("name", "tp", "rank"), cases(MODELS))
def test_kernel_layers_hold_what_their_outer_layer_holds_on_this_rank(name: str, tp: int, rank: int) -> None:
    assert check_kernel_layers(build_model(name, tp=tp, rank=rank)) > 0


def test_a_decoder_layer_that_is_its_own_attention_reads_as_both() -> None:
    model = build_model("qwen3-next", tp=8, rank=5)
    layer = model.get_submodule("model.layers.3")

    assert isinstance(registry.spec_for(layer), GQASpec)
    assert isinstance(registry.spec_for(layer, ResidualSpec), ResidualSpec)
    # Two KV heads over eight ranks: each rank holds a replica of one.
    assert (registry.spec_for(layer).num_kv_heads, registry.spec_for(layer).num_local_kv_heads) == (2, 1)


def test_local_heads_that_the_engine_rewrites_during_a_forward_are_read_anew() -> None:
    layer = build_model("deepseek-v3", tp=8, rank=5).get_submodule("model.layers.0.self_attn")
    assert registry.spec_for(layer).num_local_heads == 16

    layer.num_local_heads = 32  # as decode attention with a tensor-parallel size of its own does

    assert registry.spec_for(layer).num_local_heads == 32
    assert registry.spec_for(layer).parallel.size == 4


@pytest.mark.parametrize("name", MODELS)
def test_the_linears_that_read_a_norm_are_where_the_adapters_say(name: str) -> None:
    """The key/value latent goes to the cache, and gpt-oss has nothing but experts after its attention."""
    silent = norms_that_feed_nothing(build_model(name))

    allowed = "post_attention_layernorm" if name.startswith("gpt-oss") else "kv_a_layernorm"
    assert {found.partition(".")[2] for found in silent} <= {allowed}


@pytest.mark.parametrize(("tp", "stages"), [(1, 4), (2, 2)])
@pytest.mark.parametrize("name", [name for name in MODELS if name not in WITHOUT_STAGES])
def test_the_stages_of_a_pipeline_together_are_the_whole_model(name: str, tp: int, stages: int) -> None:
    rank = tp - 1
    models = [build_model(name, tp=tp, rank=stage * tp + rank, pp=stages) for stage in range(stages)]
    check_stages(build_model(name, tp=tp, rank=rank), models)
