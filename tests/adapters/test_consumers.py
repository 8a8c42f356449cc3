"""What the linears that read a norm's result quantise it to: `NormSpec.quant`, on real models with real fp8 linears."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from helpers import ROOT, fp8_model, fresh_model, real_model
from torch import nn

from layerfuse import registry
from layerfuse.adapters import (
    BUILTIN,
    ActivationQuant,
    FinalNormSpec,
    GQASpec,
    NormSpec,
    SpecError,
)
from layerfuse.fusion import sites_of
from layerfuse.testing.compare import norms_in

sys.path.append(str(ROOT / "tests" / "registry"))
from toml_samples import with_class

GROUP = ActivationQuant(group_size=128)


class QuantizationScheme:
    """As compressed-tensors attaches one for the whole tensor."""

    input_activations = SimpleNamespace(type="float", num_bits=8, symmetric=True, strategy="tensor", dynamic=True)


QuantizationScheme.__module__ = "compressed_tensors.quantization"


@pytest.mark.parametrize(
    ("name", "layer"),
    [("deepseek-v3", 0), ("deepseek-v3", 3), ("kimi-linear-48b-a3b", 1), ("qwen3-next-80b-a3b", 2)],
)
def test_an_fp8_checkpoint_says_it_at_every_norm_of_a_layer(name: str, layer: int) -> None:
    model = fp8_model(name)
    read = [(path, spec) for path, spec in registry.specs_in(model) if f"layers.{layer}." in f"{path}."]
    assert len(read) == 3
    for _, spec in read[:2]:
        assert {found.quant for found in norms_in(spec)} == {GROUP}
    assert read[2][1].quant == GROUP
    # It is no part of what the layer is.
    plain = real_model(name)
    assert [spec for _, spec in read] == [registry.spec_for(plain.get_submodule(path), path=path) for path, _ in read]


def test_longcat_has_its_norms_and_their_readers_in_pairs() -> None:
    model = fp8_model("longcat-flash")
    decoder = model.model.layers[0]
    decoder.mlps[1].up_proj = nn.Linear(8, 8, device="meta")
    spec = registry.spec_for(decoder)
    assert [found.quant for found in spec.input_norms] == [GROUP, GROUP]
    assert [found.quant for found in spec.post_attention_norms] == [GROUP, None]


def test_gpt_oss_has_no_linear_after_its_attention() -> None:
    """Its experts quantise what they are sent inside their own kernel."""
    spec = registry.spec_for(fp8_model("gpt-oss-20b").model.layers[0])
    assert (spec.input_norm.quant, spec.post_attention_norm.quant) == (GROUP, None)


def test_per_tensor_weights_take_one_scale_per_token() -> None:
    model = fp8_model("deepseek-v3", weight_block_size=None)
    assert registry.spec_for(model.model.layers[3].self_attn).q_norm.quant == ActivationQuant()


def test_an_unquantised_model_says_none_everywhere() -> None:
    for _, spec in registry.specs_in(real_model("deepseek-v3")):
        assert {found.quant for found in norms_in(spec)} <= {None}


def test_linears_that_disagree_give_none() -> None:
    decoder = fp8_model("deepseek-v3").model.layers[3]
    assert registry.spec_for(decoder).input_norm.quant == GROUP
    decoder.self_attn.kv_a_proj_with_mqa = nn.Linear(8, 8, device="meta")
    assert registry.spec_for(decoder).input_norm.quant is None
    assert registry.spec_for(decoder).post_attention_norm.quant == GROUP


def test_where_they_disagree_each_is_named_with_what_it_does() -> None:
    decoder = fp8_model("qwen3-4b").model.layers[3]
    assert registry.spec_for(decoder).input_norm.unquantised is None
    for name in ("k_proj", "v_proj"):
        decoder.self_attn.set_submodule(name, nn.Linear(8, 8, device="meta"))
    read = registry.spec_for(decoder).input_norm
    assert (read.quant, read.unquantised) == (
        None,
        "self_attn.q_proj: quantises them with one scale per 128 columns; "
        "self_attn.k_proj and self_attn.v_proj: takes its activations as they are",
    )
    assert read == attrs.evolve(read, unquantised=None)


def test_a_quantisation_without_words_is_said_as_the_linear_says_it() -> None:
    decoder = fp8_model("qwen3-4b").model.layers[3]
    for name in ("gate_proj", "up_proj"):
        linear = nn.Linear(8, 8, device="meta")
        linear.quantization_scheme = QuantizationScheme()
        decoder.mlp.set_submodule(name, linear)
    assert registry.spec_for(decoder).post_attention_norm.unquantised == (
        "mlp.gate_proj and mlp.up_proj: Linear quantises activations with one scale for all tokens"
    )


def test_what_reads_a_product_says_it_too() -> None:
    """One linear: it quantises in a way that no fusion knows, which is not to be taken for none."""
    mlp = fp8_model("qwen3-4b").model.layers[3].mlp
    read = registry.spec_for(mlp, path="model.layers.3.mlp")
    assert (read.quant, read.unquantised) == (GROUP, None)
    mlp.down_proj = nn.Linear(8, 8, device="meta")
    mlp.down_proj.quantization_scheme = QuantizationScheme()
    odd = registry.spec_for(mlp, path="model.layers.3.mlp")
    said = "Linear quantises activations with one scale for all tokens"
    assert (odd.quant, odd.unquantised) == (None, said)
    (site,) = sites_of("mlp", odd)
    assert site.unquantised == said


def test_a_linear_that_is_exchanged_shows_in_the_next_reading() -> None:
    """Reading is live: an equal spec is remembered by what its linears quantise, too."""
    layer = fresh_model("deepseek-v3").model.layers[3].self_attn
    plain = registry.spec_for(layer)
    layer.q_b_proj = fp8_model("deepseek-v3").model.layers[3].self_attn.q_b_proj
    quantised = registry.spec_for(layer)
    assert (plain.q_norm.quant, quantised.q_norm.quant) == (None, GROUP)
    assert plain == quantised and quantised.kv_norm.quant is None


def test_declared_layers_say_none() -> None:
    for _, spec in registry.model("deepseek-v3").specs(8):
        assert {found.quant for found in norms_in(spec)} <= {None}


def test_the_quantisation_is_no_part_of_what_a_norm_is() -> None:
    plain = NormSpec(width=512, epsilon=1e-6)
    fed = attrs.evolve(plain, quant=GROUP)
    assert fed == plain and hash(fed) == hash(plain) and repr(fed) == repr(plain)
    assert pickle.loads(pickle.dumps(fed)).quant == GROUP
    with pytest.raises(SpecError, match="quant: expected ActivationQuant, got 128"):
        NormSpec(width=512, epsilon=1e-6, quant=128)  # type: ignore[arg-type]


# ---- the words


def test_feeds_in_a_models_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    words = '{ like = "transformers:DeepseekV3Attention", q_norm = { module = "q_a_layernorm", consumers = ["wq.0"] } }'
    path.write_text(with_class(words, "mylib:Attention"))
    own = registry.fresh()
    own.load(path)
    layer = fresh_model("deepseek-v3").model.layers[3].self_attn
    layer.wq = nn.ModuleList([fp8_model("deepseek-v3").model.layers[3].self_attn.q_b_proj])
    layer.__class__ = type("Attention", (type(layer),), {"__module__": "mylib.models"})
    assert own.spec_for(layer).q_norm.quant == GROUP
    assert registry.spec_for(layer).q_norm.quant is None


@pytest.mark.parametrize("adapter", BUILTIN, ids=lambda adapter: adapter.name)
def test_every_norm_of_every_built_in_class_says_who_reads_it(adapter: Any) -> None:
    """But the key/value latent's in the engines: it goes to the cache. And those before experts alone, at the end of a layer, and of heads: the rope reads them."""
    before_experts = {"transformers:PhimoeDecoderLayer"}
    # RWKV mixes the results of its norms with those of the token before, in front of the linears.
    before_experts |= {"transformers:RwkvBlock"}
    # Falcon-H1 and Dots3-Note multiply them by a factor there.
    before_experts |= {
        "vllm.models.dots3_note.nvidia.model:Dots3NoteFullAttention",
        "transformers:FalconH1DecoderLayer",
        "vllm.model_executor.models.falcon_h1:FalconH1ParallelHybrid",
    }
    silent = {
        (key, source.module.steps[-1])
        for key, several in adapter
        for facts in several
        for source in facts.norms
        if not source.consumers and facts.spec not in (FinalNormSpec, GQASpec)
        if source not in facts.parsed.get("post_norms", ())[1:] and key not in before_experts
    }
    # What reads the final norm is the head, which is outside of the class that holds it.
    allowed = {"post_attention_layernorm" if adapter.name == "gpt_oss" else "kv_a_layernorm"}
    assert {name for _, name in silent} <= allowed
    assert {name for key, name in silent if key.startswith("transformers")} == set()


@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-linear-48b-a3b", "qwen3.5-27b", "longcat-flash", "gpt-oss-20b"])
def test_feeds_lead_to_linears_on_every_real_layer(name: str) -> None:
    """A misspelt path would be passed over in silence: of each norm's linears, at least one is there."""
    model = real_model(name)
    for path, _ in registry.specs_in(model):
        layer = model.get_submodule(path)
        children = dict(layer.named_modules())
        for source in registry.default.readers_for(type(layer))[0].facts.norms:
            found = [children[str(feed)] for feed in source.consumers if str(feed) in children]
            assert all(isinstance(linear, nn.Linear) for linear in found)
            there = str(source.module) in children and source.consumers
            if there and not (name == "gpt-oss-20b" and source.module.steps == ("post_attention_layernorm",)):
                assert found, (path, str(source))
