"""Reading real transformers layers: always what the layer says now, whatever was read before."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from helpers import every_model, fresh_layer, fresh_model, real_model

from layerfuse import registry
from layerfuse.adapters import Adapter, KernelSpec, MLASpec, NormSpec, ResidualSpec, SpecError
from layerfuse.adapters.errors import UnreadableError
from layerfuse.adapters.sources import Path
from layerfuse.adapters.vocabulary import SGLANG_MLA, TRANSFORMERS_MLA
from layerfuse.testing.compare import norms_in

REWRITES = [
    ("deepseek-v3", "model.layers.3.self_attn", "num_heads", 64, "num_heads"),
    ("deepseek-v3", "model.layers.3.self_attn", "scaling", 0.25, "softmax_scale"),
    ("deepseek-v3", "model.layers.3.self_attn", "qk_rope_head_dim", 0, "qk_rope_head_dim"),
    ("deepseek-v3", "model.layers.3.self_attn.kv_a_layernorm", "variance_epsilon", 1e-4, "kv_norm.epsilon"),
    ("deepseek-v3", "model.layers.3", "hidden_size", None, None),
    ("kimi-linear-48b-a3b", "model.layers.0.self_attn.o_norm", "activation", "silu", "output_norm.activation"),
    ("kimi-linear-48b-a3b", "model.layers.0.self_attn", "conv_kernel_size", 8, "conv_kernel_size"),
    ("gpt-oss-20b", "model.layers.0.self_attn", "sliding_window", None, "sliding_window"),
    ("gpt-oss-20b", "model.layers.0.self_attn", "sliding_window", 64, "sliding_window"),
    ("gpt-oss-20b", "model.layers.0.self_attn", "sinks", None, "has_sinks"),
    ("gpt-oss-20b", "model.layers.0.self_attn.config", "num_attention_heads", 32, "num_heads"),
    ("qwen3-next-80b-a3b", "model.layers.0.linear_attn", "num_v_heads", 16, "num_v_heads"),
    ("qwen3-next-80b-a3b", "model.layers.3.input_layernorm", "eps", 1e-4, "input_norms"),
]


@pytest.mark.parametrize(("name", "owner", "attribute", "value", "field"), REWRITES)
@pytest.mark.parametrize("reads", [0, 3], ids=["cold", "warm"])
def test_a_rewritten_attribute_is_in_the_next_reading(
    name: str, owner: str, attribute: str, value: Any, field: str | None, reads: int
) -> None:
    model = fresh_model(name)
    path, _, _ = owner.partition(".config")
    module = model.get_submodule(path)
    layer_path = path if registry.default.readers_for(type(module)) else path.rpartition(".")[0]
    layer = model.get_submodule(layer_path)
    first = registry.spec_for(layer)
    for _ in range(reads):
        assert registry.spec_for(layer) is not None
    setattr(module.config if owner.endswith(".config") else module, attribute, value)
    if field is None:
        with pytest.raises(SpecError, match=f"{attribute}: expected a whole number, got None"):
            registry.spec_for(layer)
        return
    again: Any = registry.spec_for(layer)
    assert again != first
    for part in field.split("."):
        again = getattr(again, part)
    if field == "input_norms":
        assert again[0].epsilon == value
    else:
        assert again == (False if field == "has_sinks" else value)


def test_a_replaced_norm_is_read_with_its_own_width() -> None:
    layer = fresh_layer("deepseek-v3")
    assert registry.spec_for(layer).kv_norm.width == 512
    layer.kv_a_layernorm = type(layer.kv_a_layernorm)(256)
    with pytest.raises(SpecError, match="kv_norm: width 256 is not the kv_lora_rank 512"):
        registry.spec_for(layer)
    layer.kv_lora_rank = 256
    assert registry.spec_for(layer).kv_norm == NormSpec(width=256, epsilon=1e-6)


def test_what_is_put_on_the_class_is_in_the_next_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = fresh_layer("deepseek-v3")
    path, missing = Path(("kv_lora_rank",)), Path(("other_rank",))
    assert path.read(layer) == 512
    with pytest.raises(UnreadableError, match=r"other_rank: .* has no 'other_rank'"):
        missing.read(layer)
    monkeypatch.setattr(type(layer), "kv_lora_rank", property(lambda _: 256), raising=False)
    monkeypatch.setattr(type(layer), "other_rank", 64, raising=False)
    assert (path.read(layer), missing.read(layer)) == (256, 64)


def test_what_is_put_on_the_class_hides_a_child_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = fresh_layer("deepseek-v3")
    assert registry.spec_for(layer).kv_norm.epsilon == 1e-6
    other = type(layer.kv_a_layernorm)(512, eps=1e-3)
    monkeypatch.setattr(type(layer), "kv_a_layernorm", other, raising=False)
    assert layer.kv_a_layernorm is other
    assert registry.spec_for(layer).kv_norm.epsilon == 1e-3


def test_none_is_a_value_and_the_query_norm_goes_with_it() -> None:
    layer = fresh_layer("deepseek-v3")
    assert registry.spec_for(layer).q_norm is not None
    layer.q_lora_rank = None
    layer.q_a_layernorm = None
    spec = registry.spec_for(layer)
    assert (spec.q_lora_rank, spec.q_norm, spec.split_sizes) == (None, None, (512, 64))


def test_zero_is_a_value_and_never_taken_for_missing() -> None:
    layer = fresh_layer("deepseek-v3", "model.layers.0.self_attn")
    layer.qk_rope_head_dim = 0
    spec = registry.spec_for(layer)
    assert (spec.layer_index, spec.qk_rope_head_dim) == (0, 0)
    layer.num_heads = 0
    with pytest.raises(SpecError, match="num_heads: expected at least 1, got 0"):
        registry.spec_for(layer)


@pytest.mark.parametrize(
    "value",
    [
        *(128.0, "128", True, [128], {"heads": 128}, float("nan"), object(), np.True_, np.array([128])),
        *(torch.tensor([128]), torch.tensor([[128]]), torch.tensor(True), torch.tensor(128.0), torch.tensor([1, 2])),
    ],
    ids=lambda value: "an object" if type(value) is object else str(value),
)
def test_a_count_of_another_type_is_refused_with_layer_and_field(value: Any) -> None:
    layer = fresh_layer("deepseek-v3")
    layer.num_heads = value
    with pytest.raises(SpecError) as caught:
        registry.spec_for(layer)
    assert caught.value.what == "transformers:DeepseekV3Attention layer 3 (MLASpec)"
    assert any(problem.startswith("num_heads: expected a whole number, got ") for problem in caught.value.problems)


@pytest.mark.parametrize("value", [torch.tensor(128), np.array(128)], ids=["torch", "numpy"])
def test_whole_numbers_of_other_libraries_are_whole_numbers(value: Any) -> None:
    layer = fresh_layer("deepseek-v3")
    layer.num_heads = value
    spec = registry.spec_for(layer)
    assert type(spec.num_heads) is int and spec.num_heads == 128
    value[...] = 64  # in place: the same object says something else now
    assert registry.spec_for(layer).num_heads == 64


@pytest.mark.parametrize(
    "value",
    [
        *(torch.tensor([1.0, 2.0]), torch.empty((), device="meta"), pytest.param(10**5000, id="10^5000"), "0.5", [0.5]),
        *(np.True_, torch.tensor(True), torch.tensor([0.5]), torch.tensor([[0.5]]), np.array([0.5]), b"0.5", 1j),
    ],
    ids=str,
)
def test_a_scale_that_is_no_number_is_refused_by_name(value: Any) -> None:
    layer = fresh_layer("deepseek-v3")
    layer.scaling = value
    with pytest.raises(SpecError, match="softmax_scale: expected a finite number, got "):
        registry.spec_for(layer)


def test_reading_keeps_no_layer_and_no_tensor_alive() -> None:
    model = fresh_model("gpt-oss-20b")
    layer = model.get_submodule("model.layers.0.self_attn")
    watched = [weakref.ref(thing) for thing in (layer, layer.sinks, layer.o_proj.weight, layer.config)]
    for _ in range(3):
        registry.specs_in(model)
        registry.spec_for(layer)
    del model, layer
    gc.collect()
    assert [ref() for ref in watched] == [None] * 4


def test_an_attribute_that_is_a_tensor_is_not_kept_alive() -> None:
    layer = fresh_layer("deepseek-v3")
    heads = torch.tensor(128)
    layer.num_heads = heads
    registry.spec_for(layer)
    watched = weakref.ref(heads)
    layer.num_heads = 128
    del heads
    gc.collect()
    assert watched() is None


def test_equal_layers_give_equal_specs_and_different_ones_do_not_mix() -> None:
    first, second = fresh_layer("deepseek-v3"), fresh_layer("kimi-k2-instruct")
    assert type(first) is type(second)
    for _ in range(3):
        assert registry.spec_for(first).num_heads == 128
        assert registry.spec_for(second).num_heads == 64


def test_threads_read_and_register_at_once() -> None:
    own = registry.fresh()
    model = real_model("kimi-linear-48b-a3b")
    expected = own.specs_in(model)
    failures: list[Any] = []
    stop = threading.Event()

    def read() -> None:
        try:
            while not stop.is_set():
                if own.specs_in(model) != expected:
                    failures.append("another reading")
        except Exception as error:
            failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for thread in readers:
        thread.start()
    for i in range(40):
        own.register_adapter(Adapter(f"extra{i}", {f"mylib{i}:MyAttention": TRANSFORMERS_MLA}))
    stop.set()
    for thread in readers:
        thread.join()
    assert failures == []
    assert len([name for name in own.adapters() if name.startswith("extra")]) == 40


# ---- what kind of thing a layer may be


def test_a_layer_need_not_be_a_torch_module() -> None:
    """Anything with the attributes can be read: reading imports no torch and asks for no module."""
    norm = SimpleNamespace(weight=SimpleNamespace(shape=(512,)), variance_epsilon=1e-6)
    attributes = {
        "num_heads": 8,
        "num_local_heads": 4,
        "hidden_size": 64,
        "layer_id": 1,
        "scaling": 0.1,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "kv_a_layernorm": norm,
        "rotary_emb": None,
        "o_proj": SimpleNamespace(tp_group=SimpleNamespace(rank_in_group=1)),
    }
    own = registry.Registry()
    own.register_adapter(Adapter("plain", {"mylib:Attention": SGLANG_MLA}))
    cls = type("Attention", (SimpleNamespace,), {"__module__": "mylib.models"})
    spec = own.spec_for(cls(**attributes))
    assert isinstance(spec, MLASpec)
    assert (spec.parallel.size, spec.parallel.rank, spec.num_local_heads) == (2, 1, 4)


def test_one_spec_type_can_be_asked_of_a_layer() -> None:
    decoder = real_model("deepseek-v3").get_submodule("model.layers.0")
    assert isinstance(registry.spec_for(decoder, ResidualSpec), ResidualSpec)
    with pytest.raises(LookupError, match=r"as MLASpec\. It is known as ResidualSpec: ask for that"):
        registry.spec_for(decoder, MLASpec)
    assert registry.specs_in(real_model("deepseek-v3"), of=KernelSpec) == []


# ---- where a norm was read

MODULES = [
    ("deepseek-v3", "model.layers.3.self_attn", "q_norm", "q_a_layernorm"),
    ("deepseek-v3", "model.layers.3.self_attn", "kv_norm", "kv_a_layernorm"),
    ("deepseek-v3", "model.layers.3", "input_norm", "input_layernorm"),
    ("deepseek-v3", "model.layers.3", "post_attention_norm", "post_attention_layernorm"),
    ("kimi-linear-48b-a3b", "model.layers.0.self_attn", "output_norm", "o_norm"),
    ("qwen3-next-80b-a3b", "model.layers.0.linear_attn", "output_norm", "norm"),
    ("longcat-flash", "model.layers.0", "input_norms.1", "input_layernorm.1"),
    ("longcat-flash", "model.layers.0", "post_attention_norms.0", "post_attention_layernorm.0"),
]


@pytest.mark.parametrize(("name", "path", "field", "module"), MODULES)
def test_a_norm_says_from_which_module_it_was_read(name: str, path: str, field: str, module: str) -> None:
    norm: Any = registry.spec_for(real_model(name).get_submodule(path))
    for part in field.split("."):
        norm = norm[int(part)] if part.isdigit() else getattr(norm, part)
    assert norm.module == module


@pytest.mark.parametrize("name", every_model())
def test_every_norm_that_is_read_names_its_module_and_no_declared_one_does(name: str) -> None:
    assert {norm.module for _, spec in registry.model(name).specs() for norm in norms_in(spec)} <= {None}
    model = real_model(name)
    for path, spec in registry.specs_in(model):
        for norm in norms_in(spec):
            assert norm.module is not None
            assert model.get_submodule(f"{path}.{norm.module}").weight.shape == (norm.width,)


# ---- numbers of numpy, as configs that were computed hold them


def as_numpy(value: Any) -> Any:
    if type(value) is int:
        return np.int64(value)
    if type(value) is float:
        return np.float64(value)
    return tuple(map(as_numpy, value)) if type(value) is tuple else value


@pytest.mark.parametrize("name", every_model())
def test_numpys_numbers_read_as_python_s_own(name: str) -> None:
    model = fresh_model(name)
    plain = registry.specs_in(model)
    for module in model.modules():
        for key, value in vars(module).items():
            if not key.startswith("_"):
                vars(module)[key] = as_numpy(value)
        for key, value in vars(module.config).items() if hasattr(module, "config") else ():
            vars(module.config)[key] = as_numpy(value)
    found = registry.specs_in(model)
    assert found == plain
    for (_, spec), (_, before) in zip(found, plain, strict=True):
        for attribute in attrs.fields(type(spec)):
            assert type(getattr(spec, attribute.name)) is type(getattr(before, attribute.name)), attribute.name


def test_numpys_numbers_are_divided_like_any_other() -> None:
    layer = fresh_layer("qwen3-next-80b-a3b", "model.layers.3.self_attn")
    plain = registry.spec_for(layer)
    del vars(layer.config)["num_attention_heads"]
    layer.o_proj.in_features, layer.head_dim = np.int64(layer.o_proj.in_features), np.int64(layer.head_dim)
    assert registry.spec_for(layer) == plain
    layer.o_proj.weight = torch.nn.Parameter(torch.empty(layer.o_proj.out_features, 2048, device="meta"))
    sharded = registry.spec_for(layer)
    assert (sharded.parallel.size, type(sharded.parallel.size)) == (2, int)


# ---- read often: everything is asked again, and what is said again is the spec that was made of it


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-next-80b-a3b", "gpt-oss-20b"])
def test_what_says_the_same_is_the_same_spec(name: str) -> None:
    model = real_model(name)
    for path, _ in registry.specs_in(model):
        layer = model.get_submodule(path)
        assert registry.spec_for(layer, path=path) is registry.spec_for(layer, path=path)


@pytest.mark.parametrize(
    ("owner", "attribute", "odd", "problem"),
    [
        ("", "num_heads", True, "num_heads: expected a whole number, got True"),
        ("", "num_heads", 1.0, "num_heads: expected a whole number, got 1.0"),
        ("", "scaling", True, "softmax_scale: expected a finite number, got True"),
        ("kv_a_layernorm", "variance_epsilon", True, "kv_norm.epsilon: expected a finite number, got True"),
    ],
)
def test_what_equals_a_number_that_was_read_is_refused_all_the_same(
    owner: str, attribute: str, odd: Any, problem: str
) -> None:
    layer = fresh_layer("deepseek-v3")
    setattr(layer.get_submodule(owner), attribute, 1)
    layer.kv_b_proj.out_features = layer.kv_b_proj.out_features if owner else 256
    registry.spec_for(layer)
    setattr(layer.get_submodule(owner), attribute, odd)
    with pytest.raises(SpecError, match=problem):
        registry.spec_for(layer)


def test_equal_norms_keep_who_reads_them() -> None:
    """Specs are equal whatever reads their norms, and none is taken for the other."""
    layer = fresh_layer("deepseek-v3")
    before = registry.spec_for(layer)
    after = registry.spec_for(layer.half())
    assert after == before
    dtypes = [found.weight.dtype for spec in (before, after) for found in spec.kv_norm.consumers]
    assert dtypes == ["float32", "float16"]


@pytest.mark.parametrize(
    ("path", "most"),
    [
        ("model.layers.3.self_attn", 250),
        ("model.layers.1", 370),
        ("model.layers.3", 570),
        ("model.layers.0.mlp", 105),
        ("model", 145),
    ],
)
def test_reading_costs_few_calls(path: str, most: int) -> None:
    """Of functions, Python's and others', each time after the first: what the time goes to, on a machine however busy."""
    layer = real_model("deepseek-v3").get_submodule(path)
    registry.spec_for(layer)
    counted = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        registry.spec_for(layer)
    finally:
        sys.setprofile(before)
    assert counted < most
