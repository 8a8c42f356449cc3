"""The rope of MLA layers, off real transformers layers and the stand-ins of the engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import standins_atom
import torch
import vllm_standins
from helpers import fresh_layer
from standins import Rank, module

from layerfuse import registry
from layerfuse.adapters import NO_ROPE, Adapter, GQASpec, MLASpec, RopeSpec, SpecError, const
from layerfuse.adapters.base import Facts
from layerfuse.adapters.conversions import CONVERSIONS
from layerfuse.adapters.errors import MissingAttributeError, UnreadableError
from layerfuse.adapters.rope_source import rope
from layerfuse.adapters.vocabulary import VLLM_MLA_ITSELF
from layerfuse.registry.kind_words import RopeWords
from layerfuse.testing import models

transformers = pytest.importorskip("transformers")

DEEPSEEK = RopeSpec(width=64, interleaved=True, attention_scaling=1.0)


def ropes(model: Any) -> list[RopeSpec | None]:
    return [spec.rope for _, spec in registry.specs_in(model, of=MLASpec)]


@pytest.mark.parametrize(
    ("name", "interleaved", "interleaved_out"),
    [
        ("deepseek-v3", True, False),
        ("deepseek-v2-lite", True, True),
        ("deepseek-v3.2", True, False),
        ("glm-4.7-flash", True, False),
        ("longcat-flash", True, False),
        ("minicpm3-4b", False, True),
        ("mistral-small-4-119b", True, False),
        ("kimi-linear-48b-a3b", None, None),
    ],
)
def test_what_a_real_layer_turns_is_what_its_spec_says(
    name: str, interleaved: bool | None, interleaved_out: bool | None
) -> None:
    """The layer's own function, on its own widths, against the pairs that the spec names: content and order."""
    model = models.small_model(registry.model(name), layers=4)
    path, spec = registry.specs_in(model, of=MLASpec)[0]
    assert isinstance(spec, MLASpec) and spec.rope is not None
    assert spec.rope == registry.model(name).layers["mla"].spec(around_of(name)).rope
    if interleaved is None:
        assert spec.rope == NO_ROPE
        return
    assert (spec.rope.interleaved, spec.rope.interleaved_out, spec.rope.table) == (
        interleaved,
        interleaved_out,
        "values",
    )
    layer = model.get_submodule(path)
    turned = key_in_the_code(layer, model, position=5)
    angles = angles_of(model, 5)
    assert torch.allclose(turned, expected(spec.rope, angles), atol=1e-5)


def test_an_entry_that_turns_halves_builds_layers_that_do() -> None:
    entry = registry.model("deepseek-v3")
    halves = attrs.evolve(entry.layers["mla"], rope=RopeWords(interleaved=False))
    model = models.small_model(attrs.evolve(entry, layers={"mla": halves}), layers=4)
    assert ropes(model) == [RopeSpec(width=64, interleaved=False, attention_scaling=1.0)] * 4


def around_of(name: str) -> Any:
    from layerfuse.adapters.specs import WHOLE
    from layerfuse.registry.kinds import Around, EngineFacts

    common = {"hidden_size": 64, "layer_index": 0, "parallel": WHOLE}
    return Around(common=common, rms_norm_eps=1e-6, norm_weight_offset=0.0, engine=EngineFacts())


def columns(width: int) -> torch.Tensor:
    """Different in every column: no other order gives the same."""
    return torch.linspace(-1.0, 2.0, width)


def rotary_of(model: Any) -> Any:
    return next(child for name, child in model.named_modules() if name.endswith("rotary_emb"))


def angles_of(model: Any, position: int) -> torch.Tensor:
    return position * rotary_of(model).inv_freq.double()


def key_in_the_code(layer: Any, model: Any, position: int) -> torch.Tensor:
    """What the model's own code makes of a rope key of `columns`."""
    import sys

    rotary, width = rotary_of(model), layer.qk_rope_head_dim
    code = sys.modules[type(layer).__module__]
    x = columns(width).reshape(1, 1, 1, width)
    embeddings = rotary(x, torch.tensor([[position]]))
    if not isinstance(embeddings, tuple):  # complex numbers, in DeepSeek-V2
        return code.apply_rotary_emb(x, x, embeddings)[1].flatten()
    halves = not getattr(layer.config, "rope_interleave", hasattr(code, "apply_rotary_pos_emb_interleave"))
    function = code.apply_rotary_pos_emb if halves else code.apply_rotary_pos_emb_interleave
    return function(x, x, *embeddings)[1].flatten()


def expected(spec: RopeSpec, angles: torch.Tensor) -> torch.Tensor:
    x, half = columns(spec.width).double(), spec.width // 2
    pairs = x.reshape(half, 2) if spec.interleaved else x.reshape(2, half).T
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(
        torch.full_like(angles, spec.attention_scaling), angles
    )
    parts = torch.view_as_real(turned)
    return (parts.flatten() if spec.interleaved and spec.interleaved_out else parts.T.flatten()).float()


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 1e4},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "attention_factor": 1.25},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 1.0},
        {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [1.0] * 16, "short_factor": [1.0] * 16},
        {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ],
    ids=lambda words: "-".join(str(words[key]) for key in ("rope_type", "attention_factor", "mscale") if key in words),
)
def test_the_factor_on_cos_and_sin_is_what_transformers_computes(parameters: dict[str, Any]) -> None:
    if parameters["rope_type"] not in ("default", "linear"):
        parameters = {**parameters, "original_max_position_embeddings": 1024}
    config = transformers.LlamaConfig(
        hidden_size=128, num_attention_heads=4, head_dim=32, max_position_embeddings=8192, rope_parameters=parameters
    )
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    assert CONVERSIONS["rope_scaling"](config) == rotary.attention_scaling


def test_a_type_of_rope_that_is_not_known_is_refused_by_name() -> None:
    config = SimpleNamespace(rope_parameters={"rope_type": "spiral"}, max_position_embeddings=1)
    with pytest.raises(UnreadableError, match="'spiral'"):
        CONVERSIONS["rope_scaling"](config)


def test_an_engines_rope_is_its_module() -> None:
    for found in ropes(standins_atom.MODELS["deepseek-v3"](registry.model("deepseek-v3"), Rank(8, 3))):
        assert found == DEEPSEEK
        assert (found.module, found.table, found.interleaved_out) == ("rotary_emb", "cos_and_sin", True)


def test_a_layer_without_a_rope_says_so() -> None:
    built = standins_atom.MODELS["kimi-k3"](registry.model("kimi-k3"), Rank(1, 0))
    assert ropes(built) and all(found == NO_ROPE for found in ropes(built))


def test_vllms_three_layers_of_one_attention_say_the_same_rope() -> None:
    layer = vllm_standins.mla()
    outer, inner = registry.spec_for(layer), registry.spec_for(layer.mla_attn)
    assert outer.rope == inner.rope == registry.spec_for(vllm_standins.sparse_mla()).rope == DEEPSEEK
    assert (outer.rope.module, inner.rope.module) == ("mla_attn.rotary_emb", "rotary_emb")
    layer.mla_attn.rotary_emb = None
    assert registry.spec_for(layer).rope == NO_ROPE


def test_an_engines_factor_and_pairs_are_read_off_its_module() -> None:
    layer = vllm_standins.sparse_mla()
    layer.rotary_emb = vllm_standins.rotary(is_neox_style=True, mscale=1.5)
    assert registry.spec_for(layer).rope == RopeSpec(width=64, interleaved=False, attention_scaling=1.5)


def test_a_missing_part_of_a_rope_names_it() -> None:
    layer = vllm_standins.sparse_mla()
    del layer.rotary_emb.is_neox_style
    with pytest.raises(MissingAttributeError, match=r"rope\.interleaved") as caught:
        registry.spec_for(layer)
    assert "rotary_emb.is_neox_style" in " ".join(caught.value.tried)


def test_a_rope_of_another_width_than_the_layers_is_refused() -> None:
    layer = vllm_standins.sparse_mla()
    layer.rotary_emb = vllm_standins.rotary(rotary_dim=32)
    with pytest.raises(SpecError, match="rope: width 32 is neither the qk_rope_head_dim 64 nor 0"):
        registry.spec_for(layer)


def test_facts_may_be_silent_about_the_rope_and_the_spec_then_says_so() -> None:
    own = registry.Registry()
    words = {name: word for name, word in VLLM_MLA_ITSELF.words.items() if name != "rope"}
    own.register_adapter(Adapter("plain", {"mylib:Attention": Facts(MLASpec, words)}))
    sparse = vllm_standins.sparse_mla(total=16, tp=1, rank=0)
    layer = module("mylib.models:Attention", **{**vars(sparse)["_modules"], **of_layer(sparse)}, hidden_size=64)
    assert own.spec_for(layer).rope is None


def like_deepseek(like: str = "transformers:DeepseekV3Attention", **words: Any) -> registry.Registry:
    """A registry in which a class of another package is like transformers' DeepSeek attention, or like another one."""
    classes = {"mylib:Attention": {"like": like, **words}}
    entry = attrs.evolve(registry.model("deepseek-v3"), name="mine", aliases=[], hf_id=None, layer_classes=classes)
    own = registry.fresh()
    own.register_model(entry)
    return own


def attention_of(model: str = "deepseek-v3") -> Any:
    layer = fresh_layer(model)
    layer.__class__ = type("Attention", (type(layer),), {"__module__": "mylib"})
    return layer


@pytest.mark.parametrize("words", [{}, {"softmax_scale": "scaling"}])
def test_a_rope_that_a_class_is_only_like_another_in_is_unsaid_where_it_is_not_there(words: dict[str, Any]) -> None:
    own, layer = like_deepseek(**words), attention_of()
    assert own.spec_for(layer).rope == registry.spec_for(fresh_layer("deepseek-v3")).rope != NO_ROPE
    layer.config = SimpleNamespace(**{k: v for k, v in vars(layer.config).items() if k != "rope_interleave"})
    assert own.spec_for(layer).rope is None
    with pytest.raises(
        MissingAttributeError, match=r"rope\.interleaved"
    ):  # a class that was declared with it has to have it
        registry.spec_for(layer)


def test_norms_of_heads_that_a_class_is_only_like_another_in_are_none_where_it_has_none() -> None:
    own = like_deepseek("transformers:Qwen3NextAttention")
    plain = own.spec_for(attention_of("llama-3.3-70b"))
    assert (plain.q_norm, plain.k_norm) == (None, None) and plain.rope is not None
    normed = own.spec_for(attention_of("qwen3-next-80b-a3b"))
    assert normed.q_norm == normed.k_norm is not None


def test_what_a_class_says_itself_of_its_rope_has_to_be_there() -> None:
    said = rope(width="qk_rope_head_dim", interleaved="turned", attention_scaling=const(1.0), table=const("values"))
    with pytest.raises(MissingAttributeError, match=r"rope\.interleaved"):
        like_deepseek(rope=said).spec_for(attention_of())


def test_what_fails_in_its_own_way_is_not_absent() -> None:
    layer = attention_of()
    layer.config = type(
        "Config", (), {"rope_interleave": property(lambda self: 1 // 0), "__getattr__": lambda *_: None}
    )()
    with pytest.raises(MissingAttributeError, match="ZeroDivisionError"):
        like_deepseek().spec_for(layer)


@pytest.mark.parametrize("missing", ["q_lora_rank", "qk_rope_head_dim", "kv_lora_rank"])
def test_no_geometry_that_is_inherited_may_be_absent(missing: str) -> None:
    """Not even what may be None: a None says that there is no query latent."""
    layer = attention_of()
    delattr(layer, missing)
    with pytest.raises(MissingAttributeError, match=f"does not say its {missing}"):
        like_deepseek().spec_for(layer)


def of_layer(layer: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(layer).items() if not name.startswith("_") and name != "training"}


def test_equal_ropes_may_differ_in_where_they_come_from() -> None:
    other = RopeSpec(width=64, interleaved=True, attention_scaling=1.0, interleaved_out=False, table="values")
    assert other == DEEPSEEK and hash(other) == hash(DEEPSEEK)
    assert RopeSpec(width=64, interleaved=False, attention_scaling=1.0) != DEEPSEEK


def test_a_mixture_of_qwen3_whose_config_says_no_head_dim() -> None:
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=1,
        num_experts=2,
    )
    assert getattr(config, "head_dim", None) is None
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config)
    (found,) = (spec for _, spec in registry.specs_in(model, of=GQASpec))
    assert (found.head_dim, found.rope.width) == (2, 2)
