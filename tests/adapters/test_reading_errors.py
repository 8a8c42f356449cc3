"""What a layer that cannot be read is told, line by line."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import fresh_layer, fresh_model
from torch import nn

from layerfuse import registry
from layerfuse.adapters import MissingAttributeError
from layerfuse.adapters.errors import first_of


def message(layer: Any, **kwargs: Any) -> list[str]:
    with pytest.raises(MissingAttributeError) as caught:
        registry.spec_for(layer, **kwargs)
    return str(caught.value).splitlines()


EXISTING = (
    "It has: attention_dropout, config, hidden_size, is_causal, kv_a_layernorm, kv_a_proj_with_mqa, kv_b_proj, "
    "kv_lora_rank, layer_idx, num_heads, num_key_value_groups, o_proj, q_a_layernorm, q_a_proj, q_b_proj, q_lora_rank, "
    "q_proj, qk_head_dim, qk_nope_head_dim, qk_rope_head_dim, scaling, v_head_dim."
)


@pytest.mark.parametrize("reads", [0, 3], ids=["cold", "warm"])
def test_a_missing_attribute_names_layer_adapter_field_path_and_what_exists(reads: int) -> None:
    layer = fresh_layer("deepseek-v3")
    for _ in range(reads):
        registry.spec_for(layer)
    del layer.v_head_dim
    assert message(layer) == [
        "transformers:DeepseekV3Attention layer 3 does not say its v_head_dim (adapter deepseek_v3). Tried:",
        "  - v_head_dim: DeepseekV3Attention has no 'v_head_dim'",
        EXISTING.replace(", v_head_dim.", "."),
        'If one of these is the v_head_dim, say so in models.toml: layer_classes."<class>" with v_head_dim = "<attribute>".',
    ]


def test_a_path_in_a_model_is_named_instead_of_the_index() -> None:
    model = fresh_model("deepseek-v3")
    del model.model.layers[7].self_attn.scaling
    with pytest.raises(MissingAttributeError) as caught:
        registry.specs_in(model)
    assert str(caught.value).splitlines()[0] == (
        "model.layers.7.self_attn (transformers:DeepseekV3Attention) does not say its softmax_scale (adapter deepseek_v3). "
        "Tried:"
    )


def test_every_path_that_was_tried_is_listed() -> None:
    layer = fresh_layer("gpt-oss-20b", "model.layers.0.self_attn")
    layer.config = SimpleNamespace(hidden_size=2880)
    layer.o_proj = nn.Identity()
    assert message(layer)[:3] == [
        "transformers:GptOssAttention layer 0 does not say its num_heads (adapter gpt_oss). Tried:",
        "  - config.num_attention_heads: SimpleNamespace has no 'num_attention_heads'",
        "  - o_proj.in_features: Identity has no 'in_features'",
    ]


def test_a_norm_names_its_own_part() -> None:
    layer = fresh_layer("kimi-linear-48b-a3b", "model.layers.0.self_attn")
    del layer.o_norm.variance_epsilon
    assert message(layer)[:2] == [
        "transformers:KimiLinearDeltaAttention layer 0 does not say its output_norm.epsilon (adapter kimi_linear). Tried:",
        "  - o_norm.variance_epsilon: KimiLinearRMSNormGated has no 'variance_epsilon'",
    ]


def test_a_norm_that_is_none_is_missing() -> None:
    layer = fresh_layer("deepseek-v3")
    layer.kv_a_layernorm = None
    assert message(layer)[:2] == [
        "transformers:DeepseekV3Attention layer 3 does not say its kv_norm (adapter deepseek_v3). Tried:",
        "  - kv_a_layernorm: is None",
    ]


def test_a_missing_index_does_not_hide_itself() -> None:
    layer = fresh_layer("deepseek-v3")
    del layer.layer_idx
    assert message(layer)[:2] == [
        "a transformers:DeepseekV3Attention layer does not say its layer_index (adapter deepseek_v3). Tried:",
        "  - layer_idx: DeepseekV3Attention has no 'layer_idx'",
    ]
    del layer.v_head_dim
    assert message(layer, path="model.layers.3.self_attn")[0].startswith("model.layers.3.self_attn (transformers:")


@pytest.mark.parametrize("reads", [0, 3], ids=["cold", "warm"])
def test_a_property_that_fails_in_its_own_way_is_reported_with_its_cause(reads: int) -> None:
    layer = fresh_layer("deepseek-v3")
    for _ in range(reads):
        registry.spec_for(layer)

    class NotReady(type(layer)):  # type: ignore[misc]
        @property
        def kv_lora_rank(self) -> int:
            raise RuntimeError("weights are still on their way")

    del layer.kv_lora_rank
    layer.__class__ = NotReady
    with pytest.raises(MissingAttributeError) as caught:
        registry.spec_for(layer)
    assert str(caught.value).splitlines()[1] == (
        "  - kv_lora_rank: reading 'kv_lora_rank' raised RuntimeError: weights are still on their way"
    )
    assert isinstance(caught.value.__cause__, RuntimeError)


def failing_with(error: BaseException) -> Any:
    """A layer whose width of the latent cannot be read, and whose scale breaks the message about it."""
    layer = fresh_layer("deepseek-v3")

    class Odd:
        def __repr__(self) -> str:
            raise error

    class Ends(type(layer)):  # type: ignore[misc]
        @property
        def kv_lora_rank(self) -> Any:
            raise error

        num_heads = Odd()

    del layer.kv_lora_rank
    layer.__class__ = Ends
    return layer


def test_a_layer_that_calls_sys_exit_is_reported_as_one_that_fails() -> None:
    assert message(failing_with(SystemExit(3)))[1] == "  - kv_lora_rank: reading 'kv_lora_rank' raised SystemExit: 3"


def test_what_the_user_types_passes() -> None:
    with pytest.raises(KeyboardInterrupt):
        registry.spec_for(failing_with(KeyboardInterrupt()))


def test_an_attribute_error_inside_a_property_is_no_silent_gap() -> None:
    layer = fresh_layer("deepseek-v3")

    class Buggy(type(layer)):  # type: ignore[misc]
        @property
        def scaling(self) -> float:
            return self.no_such_thing

    del layer.scaling
    layer.__class__ = Buggy
    assert "Buggy has a property 'scaling' that raised" in message(layer)[1]


def test_the_error_is_an_attribute_error_with_its_parts_as_data() -> None:
    layer = fresh_layer("deepseek-v3")
    del layer.num_heads
    with pytest.raises(AttributeError) as caught:
        registry.spec_for(layer)
    error: Any = caught.value
    assert (error.adapter, error.field, error.layer) == (
        "deepseek_v3",
        "num_heads",
        "transformers:DeepseekV3Attention layer 3",
    )
    assert error.tried == ("num_heads: DeepseekV3Attention has no 'num_heads'",)
    assert "kv_lora_rank" in error.existing
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), str(back)) == (type(error), str(error))


def test_a_layer_with_hundreds_of_attributes_lists_the_first() -> None:
    layer = fresh_layer("deepseek-v3")
    for i in range(500):
        setattr(layer, f"cache_{i:03}", i)
    del layer.v_head_dim
    (existing,) = [line for line in message(layer) if line.startswith("It has: ")]
    assert existing.count(",") == 60
    assert existing.endswith("and 461 more.")


def test_contradictory_numbers_name_the_layer() -> None:
    model = fresh_model("deepseek-v3")
    model.model.layers[5].self_attn.qk_rope_head_dim = 63
    with pytest.raises(ValueError, match="rotary embedding turns pairs") as caught:
        registry.specs_in(model)
    assert str(caught.value) == (
        "model.layers.5.self_attn (transformers:DeepseekV3Attention) (MLASpec): "
        "qk_rope_head_dim: rotary embedding turns pairs, so it must be even, got 63"
    )


@pytest.mark.parametrize(
    ("places", "said"),
    [(["a:input"], "a:input"), (["", "b"], "the model itself and 1 more"), ([0, 4, 5], "0 and 2 more")],
)
def test_several_places_are_the_first_and_a_count(places: list[object], said: str) -> None:
    assert first_of(places) == said
