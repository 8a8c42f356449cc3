"""The traps of attribute names, 1 to 15: the same name with another meaning. One test each.

Numbers are those of docs/engines.md, from the sources of transformers 5.23, vLLM 0.33, SGLang 0.5.23 and ATOM ffdf3bb5.
`test_traps_of_absence.py` goes on with 16 to 32; those of SGLang alone stand in `tests/engines/test_sglang_specs.py`, which has its layers.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import standins_atom
import vllm_standins as vllm
from helpers import fresh_layer, real_model
from standins import Rank
from torch import nn

from layerfuse import registry
from layerfuse.adapters import GatedDeltaNetSpec, MLASpec, Parallel, SpecError
from layerfuse.adapters.values import _window

TP8 = Rank(8, 5)


def atom(name: str, path: str, rank: Rank = TP8) -> Any:
    return standins_atom.MODELS[name](registry.model(name), rank).get_submodule(f"model.layers.{path}")


def transformers(name: str, path: str) -> Any:
    return real_model(name).get_submodule(f"model.layers.{path}")


def test_trap_01_num_heads_is_a_total_here_and_a_share_there() -> None:
    held_and_read = [
        # (layer, what its num_heads says, total, local)
        (transformers("deepseek-v3", "0.self_attn"), 128, 128, 128),
        (vllm.mla(), 128, 128, 16),
        (vllm.mla().mla_attn, 16, 128, 16),
        (vllm.sparse_mla(), 16, 128, 16),
        (vllm.kda(), 32, 32, 4),
        (atom("deepseek-v3", "0.self_attn"), 128, 128, 16),
        (atom("qwen3-next-80b-a3b", "3.self_attn"), 2, 16, 2),
    ]
    for layer, says, total, local in held_and_read:
        assert layer.num_heads == says
        spec = registry.spec_for(layer)
        names = (
            ("num_v_heads", "num_local_v_heads")
            if isinstance(spec, GatedDeltaNetSpec)
            else ("num_heads", "num_local_heads")
        )
        assert (getattr(spec, names[0]), getattr(spec, names[1])) == (total, local), type(layer)


def test_trap_02_num_heads_changes_its_meaning_on_the_way_down_one_layer() -> None:
    layer = vllm.mla()
    assert [layer.num_heads, layer.mla_attn.num_heads, layer.mla_attn.mla_attn.num_heads] == [128, 16, 16]
    outside, between = registry.spec_for(layer), registry.spec_for(layer.mla_attn)
    assert outside == between
    assert registry.spec_for(layer.mla_attn.mla_attn).num_local_heads == 16


def test_trap_03_the_share_is_spelled_in_many_ways() -> None:
    spellings = {
        "num_local_heads": vllm.mla(),
        "local_num_heads": vllm.kda(),
        "num_local_attention_heads": vllm.gpt_oss(),
    }
    for name, layer in spellings.items():
        spec = registry.spec_for(layer)
        local = spec.num_local_v_heads if isinstance(spec, GatedDeltaNetSpec) else spec.num_local_heads
        assert local == getattr(layer, name)


def test_trap_04_delta_net_counts_are_totals() -> None:
    for layer, total, local in (
        (atom("qwen3-next-80b-a3b", "0.linear_attn"), 32, 4),
        (transformers("qwen3-next-80b-a3b", "0.linear_attn"), 32, 32),
    ):
        assert layer.num_v_heads == total
        assert registry.spec_for(layer).num_local_v_heads == local
    # ATOM's inner layer keeps the total, and divides by the size that its kernel object holds.
    inner = atom("qwen3-next-80b-a3b", "0.linear_attn").attn
    assert (inner.num_v_heads, registry.spec_for(inner).num_local_v_heads) == (32, 4)


def test_trap_05_head_dim_of_an_mla_config_is_not_read() -> None:
    layer = fresh_layer("deepseek-v3")
    before = registry.spec_for(layer)
    layer.config.head_dim = 72
    layer.head_dim = 72
    assert registry.spec_for(layer) == before
    assert (before.qk_head_dim, before.v_head_dim) == (192, 128)


def test_trap_06_glms_config_maps_head_dim_onto_the_rope_width() -> None:
    configuration = pytest.importorskip("transformers").Glm4MoeLiteConfig
    assert configuration(head_dim=192).qk_rope_head_dim == 192
    # A layer is read from its own attributes; one built from such a config says what it really is.
    assert registry.spec_for(transformers("glm-4.7-flash", "0.self_attn")).split_sizes == (768, 512, 64)


def test_trap_08_activation_on_a_delta_net_is_that_of_the_convolution() -> None:
    layer = vllm.kda()
    assert (layer.activation, layer.o_norm.activation) == ("silu", "sigmoid")
    assert registry.spec_for(layer).output_norm.activation == "sigmoid"
    layer.activation = "situ"  # Kimi-K3's, which no gate knows
    assert registry.spec_for(layer).output_norm.activation == "sigmoid"
    assert registry.spec_for(transformers("kimi-linear-48b-a3b", "0.self_attn")).output_norm.activation == "sigmoid"
    assert registry.spec_for(transformers("qwen3-next-80b-a3b", "0.linear_attn")).output_norm.activation == "silu"


def test_trap_09_layer_norm_epsilon_is_not_that_of_the_output_norm() -> None:
    layer = vllm.kda()
    assert (layer.layer_norm_epsilon, layer.o_norm.eps) == (1e-6, 1e-5)
    assert registry.spec_for(layer).output_norm.epsilon == 1e-5


def test_trap_10_the_scale_has_two_names_and_one_hiding_place() -> None:
    assert registry.spec_for(vllm.mla()).softmax_scale == 0.1  # scaling
    assert registry.spec_for(vllm.mla().mla_attn.mla_attn).softmax_scale == 0.1  # scale
    assert registry.spec_for(vllm.gpt_oss().attn).softmax_scale == 0.125  # impl.scale
    spec = registry.spec_for(transformers("deepseek-v3", "0.self_attn"))
    mscale = 0.1 * math.log(40) + 1
    assert math.isclose(spec.softmax_scale, spec.qk_head_dim**-0.5 * mscale**2)
    assert not math.isclose(spec.softmax_scale, spec.latent_width**-0.5)


def test_trap_11_a_window_that_is_off_is_written_three_ways_and_one_that_is_on_too() -> None:
    assert [_window(value) for value in (None, -1, (-1, -1), [-1, -1])] == [None] * 4
    assert [_window(value) for value in (128, (127, 0), [127, 0])] == [128] * 3
    for engine, full, sliding in (
        ("transformers", transformers("gpt-oss-20b", "1.self_attn"), transformers("gpt-oss-20b", "0.self_attn")),
        ("vllm", vllm.gpt_oss(window=None), vllm.gpt_oss(window=128)),
        ("atom", atom("gpt-oss-20b", "1.self_attn"), atom("gpt-oss-20b", "0.self_attn")),
    ):
        windows = registry.spec_for(full).sliding_window, registry.spec_for(sliding).sliding_window
        assert windows == (None, 128), engine


def test_trap_11_a_window_on_both_sides_is_refused_and_not_guessed() -> None:
    layer = fresh_layer("gpt-oss-20b", "model.layers.0.self_attn")
    layer.sliding_window = (127, 127)
    with pytest.raises(SpecError, match=r"sliding_window: expected a whole number, got \(127, 127\)"):
        registry.spec_for(layer)


def test_trap_12_self_attn_is_of_either_kind_and_only_its_class_says_which() -> None:
    delta, latent = (
        transformers("kimi-linear-48b-a3b", "0.self_attn"),
        transformers("kimi-linear-48b-a3b", "3.self_attn"),
    )
    assert delta.num_heads == latent.num_heads == 32  # by accident: a mix-up would not show
    assert isinstance(registry.spec_for(delta), GatedDeltaNetSpec)
    assert isinstance(registry.spec_for(latent), MLASpec)


def test_trap_13_config_is_read_only_where_it_is_the_models() -> None:
    # GQA in transformers is the one kind whose geometry is read off a config, and those layers have one.
    reading_config = {
        key
        for key, owner in registry.layer_classes().items()
        for facts in registry.adapters()[owner].layers[key]
        for name, parsed in facts.parsed.items()
        if name not in ("parallel_residual", "unless")
        if any("config" in str(part).split(".") or "model_config" in str(part) for part in _parts(parsed))
    }
    assert {key.partition(":")[0] for key in reading_config} == {"transformers"}
    assert all("Attention" in key and "Delta" not in key for key in reading_config)
    # A `model_config` that is the engine's own changes nothing.
    layer = vllm.kda()
    before = registry.spec_for(layer)
    layer.model_config = layer.config = SimpleNamespace(num_heads=1, hidden_size=1)
    assert registry.spec_for(layer) == before


def _parts(parsed: Any) -> list[Any]:
    if hasattr(parsed, "fields"):
        return [parsed.module, *(place for _, places in parsed.fields for place in places)]
    return [part for place in parsed for part in (_parts(place) if hasattr(place, "fields") else [place])]


def test_trap_14_no_width_is_taken_from_a_fused_projection() -> None:
    # vLLM's ROCm Kimi-K3 packs the output gate into it, the CUDA layer calls it by another name and leaves None here.
    layer = vllm.mla()
    before = registry.spec_for(layer)
    for fused in (None, vllm.linear(1, 0, output_size=29184)):
        layer.fused_qkv_a_proj = fused
        assert registry.spec_for(layer) == before
    for key, owner in registry.layer_classes().items():
        for facts in registry.adapters()[owner].layers[key]:
            assert not any("fused" in str(part) for parsed in facts.parsed.values() for part in _parts(parsed)), key


def test_trap_15_atoms_q_proj_and_o_proj_are_other_modules_and_not_read() -> None:
    layer = atom("kimi-k3", "3.self_attn")
    before = registry.spec_for(layer)
    # `q_proj` on the kernel is q_b_proj; an output projection may be an Identity. The rank is read off kv_b_proj.
    layer.attn.impl.q_proj = layer.kv_b_proj
    layer.o_proj = nn.Identity()
    assert registry.spec_for(layer) == before
    assert before.parallel == Parallel(size=8, rank=5)
