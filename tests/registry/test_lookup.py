"""Which adapter speaks for which layer: matching by names, walking models, and what is said of the unknown."""

from __future__ import annotations

import pickle
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import fresh_model, real_model
from standins import module
from torch import nn

from layerfuse import registry
from layerfuse.adapters import Adapter, ArgumentError, KernelSpec, MLASpec, ResidualSpec, UnknownLayerError
from layerfuse.adapters.errors import closest_classes
from layerfuse.adapters.vocabulary import TRANSFORMERS_MLA


def class_of(module: str, name: str, *bases: type) -> type:
    return type(name, bases or (nn.Module,), {"__module__": module})


def known(own: registry.Registry, cls: type) -> str | None:
    readers = own.readers_for(cls)
    return readers[0].key if readers else None


@pytest.fixture
def own() -> registry.Registry:
    """A registry of its own, with a few classes of one name."""
    made = registry.Registry()
    made.register_adapter(
        Adapter(
            "mine",
            {
                "mylib:Attention": TRANSFORMERS_MLA,
                "mylib.models.special:Attention": TRANSFORMERS_MLA.but(num_heads="n_heads"),
                "mylib.models:Attention": TRANSFORMERS_MLA.but(num_heads="heads"),
            },
            ignored=["mylib.vision:VisionAttention"],
        )
    )
    return made


# ---- matching


@pytest.mark.parametrize(
    ("module", "key"),
    [
        ("mylib", "mylib:Attention"),
        ("mylib.layers.deep", "mylib:Attention"),
        ("mylib.models", "mylib.models:Attention"),
        ("mylib.models.other", "mylib.models:Attention"),
        ("mylib.models.special", "mylib.models.special:Attention"),
        ("mylib.models.special.v2", "mylib.models.special:Attention"),
        ("mylib.models.specialised", "mylib.models:Attention"),
        ("mylib2", None),
        ("my", None),
        ("other.mylib", None),
    ],
)
def test_the_longest_module_prefix_wins_and_prefixes_end_at_dots(own: registry.Registry, module: str, key: str) -> None:
    assert known(own, class_of(module, "Attention")) == key


def test_the_name_must_be_the_whole_name(own: registry.Registry) -> None:
    assert known(own, class_of("mylib", "Attention2")) is None
    assert known(own, class_of("mylib", "attention")) is None


def test_a_subclass_is_found_by_its_base_and_its_own_name_comes_first(own: registry.Registry) -> None:
    base = class_of("mylib.models.special", "Attention")
    assert known(own, class_of("elsewhere", "Renamed", base)) == "mylib.models.special:Attention"
    # Its own name, in another module of the library, is nearer than its base's.
    assert known(own, class_of("mylib.fast", "Attention", base)) == "mylib:Attention"


def test_a_class_made_at_run_time_is_found_by_its_base() -> None:
    model = fresh_model("gpt-oss-20b")
    layer = model.get_submodule("model.layers.0.self_attn")
    before = registry.spec_for(layer)
    # What FSDP and parametrisations do: a class of their own, of the same module or another, in front of the layer's.
    layer.__class__ = type(f"FSDP{type(layer).__name__}", (type(layer),), {})
    assert registry.spec_for(layer) == before
    assert registry.adapter_for(layer).name == "gpt_oss"


# ---- the unknown


class GptOssAttention(nn.Module):
    """The name of a known class, in a module of our own."""


def test_the_same_name_in_another_package_is_not_the_same_class() -> None:
    with pytest.raises(UnknownLayerError) as caught:
        registry.spec_for(GptOssAttention())
    message = str(caught.value)
    assert message.startswith(f"no adapter knows the layer class {__name__}:GptOssAttention; the closest known are ")
    assert "transformers:GptOssAttention" in message and "sglang:GptOssAttention" in message
    assert message.endswith(
        "To register one, declare it in a models.toml entry under layer_classes "
        f'(for example like = "{caught.value.closest[0]}"), or call registry.register_adapter.'
    )
    assert isinstance(caught.value, LookupError)


class Zorp(nn.Module):
    """Like no class that is known."""


@pytest.mark.parametrize(("asked", "layer"), [(registry.Registry(), GptOssAttention()), (registry, Zorp())])
def test_where_nothing_is_like_a_class_no_other_is_suggested(asked: Any, layer: nn.Module) -> None:
    with pytest.raises(UnknownLayerError) as caught:
        asked.spec_for(layer)
    assert str(caught.value) == (
        f"no adapter knows the layer class {__name__}:{type(layer).__name__}. To register one, declare it in a models.toml entry "
        "under layer_classes (with its family and where it says each field), or call registry.register_adapter."
    )


@pytest.mark.parametrize(
    "thing",
    [None, 7, "layer", [], object(), SimpleNamespace(num_heads=4), nn.Module.__new__(nn.Module)],
    ids=["None", "int", "str", "list", "object", "namespace", "not initialised"],
)
def test_what_is_no_layer_at_all_is_unknown_and_nothing_worse(thing: Any) -> None:
    with pytest.raises(UnknownLayerError, match="no adapter knows the layer class") as caught:
        registry.spec_for(thing)
    assert "It holds known layers" not in str(caught.value)


def test_a_whole_model_is_sent_to_specs_in() -> None:
    with pytest.raises(UnknownLayerError) as caught:
        registry.spec_for(real_model("deepseek-v3"))
    assert str(caught.value).endswith(". It holds known layers, the first at model: ask specs_in for all of them.")


NORMS = ["vllm.model_executor.layers.layernorm:RMSNorm", "my.lib:Qwen3NextRMSNorm", "my.lib:FusedRMSNormGated"]


@pytest.mark.parametrize("key", NORMS)
def test_a_norm_is_no_layer_and_no_layer_is_close_to_it(key: str) -> None:
    with pytest.raises(UnknownLayerError) as caught:
        registry.spec_for(class_of(*key.split(":"))())
    assert caught.value.closest == ()
    assert str(caught.value) == (
        f"no adapter knows the layer class {key}. A norm is no layer of its own: it is read as part of the layer that holds "
        "it, so ask spec_for for that layer."
    )


@pytest.mark.parametrize(
    ("key", "first"),
    [
        ("vllm.model_executor.models.llama4:LlamaAttention", "vllm.model_executor.models.llama:LlamaAttention"),
        ("sglang.srt.models.llama9:LlamaDecoderLayer", "sglang.srt.models.llama:LlamaDecoderLayer"),
        ("sglang.srt.models.qwen3:Qwen3MLP", "sglang.srt.models.qwen2:Qwen2MLP"),
        ("sglang.srt.models.new:KimiK4DecoderLayer", "sglang:KimiK3DecoderLayer"),
        ("my.lib:DeepseekV4Model", "vllm.models.deepseek_v4.nvidia.model:DeepseekV4Model"),
        ("vllm.x:GptOssModel2", "vllm:GptOssModel"),
        ("my.lib:DeepseekV3AttentionPlus", "transformers:DeepseekV3Attention"),
        ("vllm.model_executor.models.gpt_oss:Embedding", None),
    ],
)
def test_the_closest_classes_are_layers_of_the_same_kind(key: str, first: str | None) -> None:
    found = closest_classes(key, registry.layer_classes())
    assert (found[0] if found else None) == first
    last = re.findall("Attention|DecoderLayer|Model|MLP", key)
    assert all(last[-1] in near for near in found)


@pytest.mark.parametrize("engine", ["transformers", "vllm", "sglang", "atom"])
@pytest.mark.parametrize("name", ["LlamaAttention", "LlamaDecoderLayer", "MiniMaxMLP", "NewModel"])
def test_an_unknown_class_of_an_engine_is_like_others_of_that_engine(engine: str, name: str) -> None:
    """Whose layers name their parts alike: what is copied from another engine's facts reads nothing."""
    cls = class_of(f"{engine}.models.new", name)
    if registry.default.readers_for(cls):
        return
    with pytest.raises(UnknownLayerError) as caught:
        registry.spec_for(cls())
    closest = caught.value.closest
    assert all(re.match(rf"{engine}[.:]", key) for key in (*closest[:1], *closest[:-1]))
    assert f'like = "{closest[0]}"' in str(caught.value) if closest else "with its family" in str(caught.value)


@pytest.mark.parametrize(
    "key",
    [
        "mylib:MyAttention",
        "vllm.models.new:NewModel",
        "transformers:WhisperAttention",
        "atom:LlamaAttention",
        "sglang:ExtendDecoderLayer",
    ],
)
def test_a_class_that_shares_no_more_than_the_word_for_its_kind_is_like_none(key: str) -> None:
    assert closest_classes(key, registry.layer_classes()) == []


def test_case_does_not_hide_the_same_name() -> None:
    assert closest_classes("transformers:GptNeoXJapaneseAttention", registry.layer_classes()) == [
        "transformers:GPTNeoXJapaneseAttention"
    ]


def test_an_unknown_layer_error_survives_pickling() -> None:
    error = UnknownLayerError("a:B", ("c:B",), where=" (at 1)")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_model_without_any_known_layer_names_what_looks_like_one() -> None:
    attention = class_of("mylib.models", "SelfAttention")
    model = nn.Sequential(nn.Linear(2, 2), attention(), attention())
    with pytest.raises(UnknownLayerError, match=r"mylib.models:SelfAttention \(at 1, and 1 more\)"):
        registry.specs_in(model)
    assert registry.unknown_in(model) == [("1", "mylib.models:SelfAttention"), ("2", "mylib.models:SelfAttention")]


def raising(error: BaseException) -> Any:
    def raises(*_: Any) -> Any:
        raise error

    return raises


@pytest.mark.parametrize(
    ("named_modules", "says"),
    [
        (raising(RuntimeError("not loaded")), "model: its named_modules() raised RuntimeError: not loaded"),
        (raising(SystemExit(3)), "model: its named_modules() raised SystemExit: 3"),
        (property(raising(OSError("gone"))), "model: reading its named_modules raised OSError: gone"),
        (7, "model: its named_modules() raised TypeError: 'int' object is not callable"),
        (lambda _: None, "model: its named_modules() raised TypeError: 'NoneType' object is not iterable"),
        (lambda _: map(raising(KeyError("x")), "ab"), "model: its named_modules() raised KeyError: 'x'"),
        (lambda _: [3], "model: expected pairs of a path and a module of its named_modules(), got 3"),
        (lambda _: [("a",)], "model: expected pairs of a path and a module of its named_modules(), got ('a',)"),
        (
            lambda _: [(1, nn.Linear(2, 2))],
            "model: expected pairs of a path and a module of its named_modules(), got (1, ",
        ),
    ],
)
def test_a_model_that_cannot_be_walked_is_refused_with_the_reason(named_modules: Any, says: str) -> None:
    model = type("Model", (), {"named_modules": named_modules})()
    for walk in (registry.specs_in, registry.unknown_in):
        with pytest.raises(ArgumentError) as caught:
            walk(model)
        assert str(caught.value).startswith(says)


@pytest.mark.parametrize("model", [nn.Sequential(), nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU())])
def test_a_model_without_attention_says_so(model: nn.Module) -> None:
    with pytest.raises(UnknownLayerError, match="Give a model that holds attention layers"):
        registry.specs_in(model)
    assert registry.unknown_in(model) == []


def test_an_ignored_class_and_what_is_inside_it_is_not_unknown(own: registry.Registry) -> None:
    inner = class_of("mylib.vision", "PatchAttention")()
    tower = class_of("mylib.vision.tower", "VisionAttention")()
    tower.inner = inner
    assert own.unknown_in(nn.Sequential(tower)) == []
    assert own.unknown_in(nn.Sequential(inner)) == [("0", "mylib.vision:PatchAttention")]


# ---- walking


def test_specs_come_in_layer_order_with_decoder_layers_before_their_attention() -> None:
    found = registry.specs_in(real_model("kimi-linear-48b-a3b"))
    assert [path for path, _ in found[:6]] == [
        "model.layers.0",
        "model.layers.0.self_attn",
        "model.layers.0.mlp",
        "model.layers.1",
        "model.layers.1.self_attn",
        "model.layers.1.mlp.shared_experts",
    ]
    assert [spec.layer_index for _, spec in found] == [*(i for i in range(27) for _ in range(3)), 27]
    assert [path for path, _ in found[-2:]] == ["model.layers.26.mlp.shared_experts", "model"]


def test_of_selects_by_type_and_by_parent_type() -> None:
    model = real_model("kimi-linear-48b-a3b")
    assert {type(spec) for _, spec in registry.specs_in(model, of=MLASpec)} == {MLASpec}
    assert len(registry.specs_in(model, of=ResidualSpec)) == 27
    assert registry.specs_in(model, of=KernelSpec) == []
    with pytest.raises(UnknownLayerError):
        registry.spec_for(model.get_submodule("model.layers.0"), of=MLASpec)


def test_a_known_layer_may_be_the_whole_model() -> None:
    layer = real_model("deepseek-v3").get_submodule("model.layers.0.self_attn")
    assert registry.specs_in(layer) == [("", registry.spec_for(layer))]
    decoder = real_model("deepseek-v3").get_submodule("model.layers.0")
    assert [path for path, _ in registry.specs_in(decoder)] == ["", "self_attn", "mlp"]


def holding(**children: nn.Module) -> nn.Module:
    return module("some:Holder", **children)


def started(model: nn.Module) -> dict[str, bool | None]:
    return {path: spec.starts_stream for path, spec in registry.specs_in(model, of=ResidualSpec)}


def test_the_first_decoder_layer_of_each_module_that_holds_some_starts_a_stream() -> None:
    first, second, *drafts, decoder = real_model("deepseek-v3").model.layers[3:8]
    # As vLLM has blocks of multi-token prediction, and as SGLang has them.
    blocks = {str(61 + i): holding(enorm=nn.Identity(), mtp_block=draft) for i, draft in enumerate(drafts)}
    model = holding(model=holding(layers=nn.ModuleList([first, second])), mtp=nn.ModuleDict(blocks), decoder=decoder)
    assert started(model) == {
        "model.layers.0": True,
        "model.layers.1": False,
        "mtp.61.mtp_block": True,
        "mtp.62.mtp_block": True,
        "decoder": True,
    }


def test_a_stream_that_comes_from_another_rank_of_a_pipeline_is_handed_over() -> None:
    layers = real_model("deepseek-v3").model.layers[:2]
    gone = [module("engine.utils:PPMissingLayer") for _ in range(2)]
    later, first = nn.ModuleList([*gone, *layers]), nn.ModuleList([*layers, *gone])
    assert started(later) == {"2": False, "3": False}
    assert started(first) == {"0": True, "1": False}
    assert [spec.handed_over for _, spec in registry.specs_in(later, of=ResidualSpec)] == [True, False]
    assert not any(spec.handed_over for _, spec in registry.specs_in(first, of=ResidualSpec))


def test_what_wraps_a_layer_starts_no_stream() -> None:
    layers = real_model("deepseek-v3").model.layers[:2]
    model = holding(layers=nn.ModuleList([holding(_orig_mod=layer) for layer in layers]), norm=nn.Identity())
    assert started(model) == {"layers.0._orig_mod": True, "layers.1._orig_mod": False}
    # Alone, nothing says what comes before it.
    assert started(layers[1]) == {"": None}
    assert started(holding(layer=layers[1])) == {"layer": None}


def test_a_path_that_only_starts_alike_is_not_inside() -> None:
    attention = real_model("deepseek-v3").get_submodule("model.layers.0.self_attn")
    other = real_model("deepseek-v3").get_submodule("model.layers.1.self_attn")
    model = nn.Module()
    model.add_module("attn", attention)
    model.add_module("attn2", other)
    assert [path for path, _ in registry.specs_in(model)] == ["attn", "attn2"]


def test_a_tiny_model_on_a_real_device_reads_like_one_without_memory() -> None:
    from layerfuse.testing.models import small_entry, small_model

    entry = registry.model("kimi-linear-48b-a3b")
    read = [spec for _, spec in registry.specs_in(small_model(entry, dtype=torch.bfloat16))]
    assert read == [spec for _, spec in small_entry(entry).specs(engine="transformers")]


# ---- listing


def test_adapters_models_and_classes_are_listed_read_only() -> None:
    assert {"deepseek_v3", "kimi_k2", "kimi_linear", "gpt_oss", "qwen3_next"} <= set(registry.adapters())
    assert registry.layer_classes()["vllm:MLAAttention"] == "deepseek_v3"
    for view in (registry.adapters(), registry.models(), registry.layer_classes()):
        with pytest.raises(TypeError):
            view["new"] = None  # type: ignore[index]


def test_adapter_for_names_the_declaring_adapter_or_model() -> None:
    assert (
        registry.adapter_for(real_model("deepseek-v3").get_submodule("model.layers.0.self_attn")).name == "deepseek_v3"
    )
    assert registry.adapter_for(real_model("glm-5").get_submodule("model.layers.0.self_attn")).name == "glm-5"
    with pytest.raises(UnknownLayerError):
        registry.adapter_for(nn.Linear(2, 2))


@pytest.mark.parametrize("name", ["deepseek-v3", "DeepSeek-V3", "deepseek-ai/DeepSeek-V3", "DEEPSEEK-AI/deepseek-v3"])
def test_a_model_is_found_by_name_and_hub_name(name: str) -> None:
    assert registry.model(name).name == "deepseek-v3"


def test_an_unknown_model_suggests_the_closest() -> None:
    with pytest.raises(registry.UnknownModelError) as caught:
        registry.model("kimi-k2.6")
    assert str(caught.value).startswith("no model is called 'kimi-k2.6'; did you mean kimi-k2.5")
    assert isinstance(caught.value, LookupError)
    with pytest.raises(registry.UnknownModelError):
        registry.model("")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("qwen3-next-80b-a3b-fp8", "qwen3-next-80b-a3b --quant group128"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct-FP8", "qwen3-next-80b-a3b --quant group128"),
        ("someone/Qwen3-8B-FP8-dynamic", "qwen3-8b --quant per_token"),
        ("someone/Qwen3-8B-FP8", None),  # declared as qwen3-8b-fp8, which is what may be meant
        ("qwen3-next-80b-a3b-air-fp8", None),  # of another size for all that is known
    ],
)
def test_a_declared_model_in_fp8_is_answered_with_how_to_plan_for_it(name: str, said: str | None) -> None:
    with pytest.raises(registry.UnknownModelError) as caught:
        registry.model(name)
    commands = re.findall(r"`layerfuse plan (.*?)` plans for its linears in fp8", str(caught.value))
    assert commands == ([] if said is None else [said])
