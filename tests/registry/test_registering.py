"""Registering adapters and models: once, twice, differently, in threads, and in registries that know nothing of each
other."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import attrs
import pytest
from toml_samples import also

from layerfuse import registry
from layerfuse.adapters import Adapter
from layerfuse.adapters.vocabulary import TRANSFORMERS_GQA, TRANSFORMERS_MLA
from layerfuse.registry import CatalogError, ConflictError, files

E = TypeVar("E", bound=BaseException)
MINE = Adapter("mine", {"mylib:MyAttention": TRANSFORMERS_MLA})
OTHER_FACTS = TRANSFORMERS_MLA.but(num_heads="n_heads")


def contents(own: registry.Registry) -> tuple[Any, ...]:
    return dict(own.adapters()), dict(own.models()), dict(own.layer_classes())


@pytest.fixture
def own() -> registry.Registry:
    """A registry with one adapter."""
    made = registry.Registry()
    made.register_adapter(MINE)
    return made


@contextmanager
def refused(by: registry.Registry, error: type[E]) -> Iterator[pytest.ExceptionInfo[E]]:
    """What is registered in here is refused, and changes nothing."""
    before = contents(by)
    with pytest.raises(error) as caught:
        yield caught
    assert contents(by) == before


def together(count: int, work: Callable[[int], object]) -> None:
    """In threads that begin at the same time."""
    barrier = threading.Barrier(count)
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda number: (barrier.wait(), work(number)), range(count)))


def entry(**changes: Any) -> registry.ModelEntry:
    return attrs.evolve(registry.model("gpt-oss-20b"), name="my-model", adapter="mine", **{"aliases": [], **changes})


def test_the_same_registration_twice_is_no_registration(own: registry.Registry) -> None:
    own.register_model(entry())
    before = contents(own)
    own.register_adapter(Adapter("mine", {"mylib:MyAttention": TRANSFORMERS_MLA.but()}))
    own.register_model(entry())
    assert contents(own) == before


def test_two_owners_may_declare_the_same_class_alike(own: registry.Registry) -> None:
    own.register_adapter(Adapter("another", {"mylib:MyAttention": TRANSFORMERS_MLA}))
    assert own.layer_classes() == {"mylib:MyAttention": "mine"}
    assert set(own.adapters()) == {"mine", "another"}


def test_a_class_declared_differently_names_both_owners_and_changes_nothing(own: registry.Registry) -> None:
    clash = Adapter("another", {"mylib:New": TRANSFORMERS_GQA, "mylib:MyAttention": OTHER_FACTS})
    with refused(own, ConflictError) as caught:
        own.register_adapter(clash)
    assert str(caught.value) == (
        "the layer class mylib:MyAttention is declared differently by the adapter mine (a call of register_adapter) "
        "and by the adapter another (a call of register_adapter); rename or remove one of them"
    )
    assert len(caught.value.owners) == 2


def test_a_builtin_adapter_cannot_be_replaced() -> None:
    own = registry.fresh()
    before = contents(own)
    with pytest.raises(ConflictError) as caught:
        own.register_adapter(Adapter("deepseek_v3", {"mylib:MyAttention": TRANSFORMERS_MLA}), "the plugin mine")
    assert str(caught.value) == (
        "the adapter deepseek_v3 is declared differently by layerfuse itself and by the plugin mine; "
        "rename or remove one of them"
    )
    with pytest.raises(
        ConflictError,
        match=r"vllm:MLAAttention is declared .* deepseek_v3 \(layerfuse itself\) and by the adapter mine",
    ):
        own.register_adapter(Adapter("mine", {"vllm:MLAAttention": TRANSFORMERS_MLA}))
    assert contents(own) == before


@pytest.mark.parametrize("module", ["transformers.models", "transformers.models.deepseek_v3.modeling_deepseek_v3"])
def test_a_longer_prefix_does_not_take_a_class_from_a_builtin_adapter(module: str) -> None:
    own = registry.fresh()
    before = contents(own)
    key = f"{module}:DeepseekV3Attention"
    with pytest.raises(ConflictError) as caught:
        own.register_adapter(Adapter("mine", {key: OTHER_FACTS}))
    assert f"the layer class {key}, which transformers:DeepseekV3Attention covers, is declared" in str(caught.value)
    assert "the adapter deepseek_v3 (layerfuse itself)" in caught.value.owners
    assert contents(own) == before
    own.register_adapter(Adapter("same", {key: before[0]["deepseek_v3"].layers["transformers:DeepseekV3Attention"]}))


@pytest.mark.parametrize("inner_first", [True, False])
def test_of_two_prefixes_of_two_packages_neither_wins_in_any_order(inner_first: bool) -> None:
    own = registry.Registry()
    both = [
        (Adapter("inner", {"mylib.models:MyAttention": OTHER_FACTS}), "the plugin of one package"),
        (MINE, "the plugin of another"),
    ]
    first, second = both if inner_first else both[::-1]
    own.register_adapter(*first)
    with pytest.raises(ConflictError, match=r"mylib.models:MyAttention, which mylib:MyAttention covers"):
        own.register_adapter(*second)


def test_who_declares_a_class_may_declare_some_of_them_otherwise() -> None:
    own = registry.Registry()
    own.register_adapter(Adapter("mine", {**MINE.layers, "mylib.models:MyAttention": OTHER_FACTS}))
    cls = type("MyAttention", (), {"__module__": "mylib.models.one"})
    assert own.readers_for(cls)[0].facts == OTHER_FACTS


def test_what_a_class_is_does_not_depend_on_what_was_asked_before() -> None:
    """A plugin may declare a class whose base is known without it."""
    base = type("MyAttention", (), {"__module__": "mylib"})
    derived = type("Derived", (base,), {"__module__": "latelib"})
    own = registry.Registry()
    own.register_adapter(MINE)
    own.on_miss(lambda filled: filled.register_adapter(Adapter("late", {"latelib:Derived": OTHER_FACTS})))
    with pytest.raises(AttributeError, match=r"\(adapter late\)"):
        own.spec_for(derived())


def test_everything_that_clashes_is_said_at_once() -> None:
    """A file written before its classes, and its model, were built in."""
    own = registry.fresh()
    model = registry.model("gpt-oss-20b")
    classes = {
        "transformers:DeepseekV3Attention": {"like": "transformers:DeepseekV2Attention", "softmax_scale": "scale"},
        "transformers:Qwen3Attention": {"like": "transformers:GptOssAttention"},
        "transformers.models.llama:LlamaAttention": {"like": "transformers:GptOssAttention"},
        "mylib:New": {"like": "transformers:GptOssAttention"},
    }
    old = attrs.evolve(model, hidden_size=64, layer_classes=classes)
    with refused(own, ConflictError) as caught:
        own.register_models({old.name: old}, "mine.toml")
    lines = str(caught.value).splitlines()
    said = [line.partition(" is declared differently by ")[0] for line in lines]
    assert said == [
        "the layer class transformers:DeepseekV3Attention",
        "the layer class transformers:Qwen3Attention",
        "the layer class transformers.models.llama:LlamaAttention, which transformers:LlamaAttention covers,",
        "the model gpt-oss-20b",
    ]
    assert all("mine.toml" in line for line in lines)
    assert [caught.value.what, *(other.what for other in caught.value.others)] == said
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


NEXT = "transformers:Qwen3NextAttention"


@pytest.mark.parametrize(
    "table",
    [
        {"like": "transformers:Later"},
        {"like": NEXT},
        {"like": NEXT, "layer_index": ["layer_idx"], "has_sinks": {"const": False}},
    ],
)
def test_a_class_that_is_declared_as_it_is_built_in_is_no_conflict(table: dict[str, Any]) -> None:
    """However it is written."""
    own = registry.fresh()
    facts = own.adapters()[own.layer_classes()[NEXT]].layers[NEXT]
    own.register_adapter(Adapter("built_in_later", {"transformers:Later": facts}))
    own.register_model(
        attrs.evolve(
            registry.model("gpt-oss-20b"),
            name="mine",
            aliases=[],
            hf_id=None,
            layer_classes={"transformers:Later": table},
        )
    )
    assert own.layer_classes()["transformers:Later"] == "built_in_later"


def test_a_model_declared_differently_is_a_conflict_and_changes_nothing(own: registry.Registry) -> None:
    own.register_model(entry())
    with refused(own, ConflictError) as caught:
        own.register_models({"my-model": entry(hidden_size=64)}, "mine.toml")
    assert caught.value.owners == ("a call of register_model", "mine.toml")


def test_several_models_are_added_all_or_none(own: registry.Registry) -> None:
    before = contents(own)
    good, bad = entry(), attrs.evolve(entry(), name="bad", layer_classes={"mylib:X": {"like": "mylib:Nothing"}})
    with pytest.raises(CatalogError, match="like: no class 'mylib:Nothing' is known"):
        own.register_models({"my-model": good, "bad": bad}, "a file")
    assert contents(own) == before


def test_an_entry_of_an_unknown_adapter_is_refused_with_the_closest() -> None:
    own = registry.fresh()
    with pytest.raises(CatalogError) as caught:
        own.register_model(attrs.evolve(entry(), adapter="deepseek_v2"))
    (problem,) = caught.value.problems
    assert problem.startswith("no adapter 'deepseek_v2' is registered; did you mean 'deepseek_v3'")
    assert problem.endswith(" @ $.models.my-model.adapter")


def test_registries_know_nothing_of_each_other() -> None:
    first, second = registry.fresh(), registry.fresh()
    first.register_adapter(MINE)
    assert "mine" in first.adapters()
    assert "mine" not in second.adapters()
    assert "mine" not in registry.adapters()
    assert registry.Registry().models() == {}


def test_a_view_taken_before_does_not_change() -> None:
    own = registry.fresh()
    before = own.adapters()
    own.register_adapter(MINE)
    assert "mine" not in before and "mine" in own.adapters()


def test_a_class_asked_for_too_early_is_found_once_it_is_registered() -> None:
    own = registry.Registry()
    cls = type("MyAttention", (), {"__module__": "mylib.models"})
    assert own.readers_for(cls) == ()
    own.register_adapter(MINE)
    assert own.readers_for(cls)[0].owner == "mine"


def test_what_is_left_for_later_is_fetched_once_and_only_when_it_is_needed(own: registry.Registry) -> None:
    calls = []

    def more(filled: registry.Registry) -> None:
        calls.append(1)
        filled.register_adapter(Adapter("late", {"latelib:Mixer": TRANSFORMERS_MLA}))

    own.on_miss(more)
    layer = type("MyAttention", (), {"__module__": "mylib"})()
    with pytest.raises(AttributeError, match="does not say its"):
        own.spec_for(layer)  # known: nothing else is needed
    assert calls == []
    # A class of any name may be what was left for later; the first question already has it.
    mixer = type("Mixer", (), {"__module__": "latelib"})()
    with pytest.raises(AttributeError, match=r"\(adapter late\)"):
        own.spec_for(mixer)
    assert calls == [1]
    with pytest.raises(LookupError):
        own.spec_for(object())
    assert calls == [1]


def test_an_error_in_what_was_left_for_later_is_not_swallowed_by_the_second_question() -> None:
    own = registry.Registry()

    def more(_: registry.Registry) -> None:
        raise ConflictError("the adapter x", ["a", "b"])

    own.on_miss(more)
    for _ in range(2):
        with pytest.raises(ConflictError):
            own.models()


def test_a_first_filling_that_fails_is_tried_again() -> None:
    tries = []

    def fill(filled: registry.Registry) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise OSError("the disk is away")
        filled.register_adapter(MINE)

    own = registry.Registry(fill=fill)
    with pytest.raises(OSError, match="the disk is away"):
        own.adapters()
    assert set(own.adapters()) == {"mine"}
    assert len(tries) == 2


def test_threads_that_register_the_same_and_different_things() -> None:
    own = registry.fresh()

    def work(number: int) -> None:
        for i in range(25):
            own.register_adapter(Adapter(f"shared{i}", {f"shared{i}:A": TRANSFORMERS_MLA}))
            own.register_adapter(Adapter(f"own{number}.{i}", {f"own{number}.x{i}:A": TRANSFORMERS_GQA}))
            assert own.models() and own.layer_classes()

    together(8, work)
    assert sum(name.startswith(("shared", "own")) for name in own.adapters()) == 25 + 8 * 25


def test_many_threads_may_ask_first() -> None:
    own = registry.fresh()
    counts: list[int] = []
    together(8, lambda _: counts.append(len(own.layer_classes())))
    assert len(counts) == 8 and len(set(counts)) == 1


# ---- aliases


@pytest.mark.parametrize(
    ("short", "name"),
    [
        ("kimi-k2", "kimi-k2-instruct"),
        ("K2", "kimi-k2-instruct"),
        ("deepseek", "deepseek-v3"),
        ("v3", "deepseek-v3"),
        ("kimi-linear", "kimi-linear-48b-a3b"),
        ("gpt-oss", "gpt-oss-120b"),
        ("qwen3-next", "qwen3-next-80b-a3b"),
    ],
)
def test_a_short_name_finds_its_model(short: str, name: str) -> None:
    assert registry.model(short) is registry.model(name)


def test_no_name_is_that_of_two_models() -> None:
    names = [name for model in registry.models().values() for name in model.names]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("aliases", "hf_id"),
    [(["gpt-oss-20b"], None), (["openai/gpt-oss-20b"], None), (["oss-20b"], None), ([], "oss-20b")],
    ids=["a name", "an id", "an alias", "its id is an alias"],
)
def test_an_alias_that_another_model_goes_by_is_refused_with_both_names(
    own: registry.Registry, aliases: list[str], hf_id: str | None
) -> None:
    own.register_adapter(registry.adapters()["gpt_oss"])
    own.register_models({"gpt-oss-20b": registry.model("gpt-oss-20b")}, "the first file")
    with refused(own, ConflictError) as caught:
        own.register_models({"my-model": entry(aliases=aliases, hf_id=hf_id)}, "the second file")
    assert str(caught.value) == (
        f"the name {(aliases or [hf_id])[0]!r} is declared differently by the model gpt-oss-20b (the first file) and by "
        "the model my-model (the second file); rename or remove one of them"
    )


def test_a_model_may_not_take_the_alias_of_another_for_its_name(own: registry.Registry) -> None:
    own.register_model(entry(aliases=["short"]))
    with pytest.raises(ConflictError, match="the name 'short' is declared differently by the model my-model"):
        own.register_model(attrs.evolve(entry(aliases=[]), name="short"))


@pytest.mark.parametrize("engine", ["transfomers", "vlm", "my-engine"])
def test_an_engine_that_nobody_knows_is_refused(engine: str) -> None:
    text = also(f"engines.{engine} = {{ latent_norm_eps = 1e-6 }}")
    with pytest.raises(CatalogError) as refused:
        registry.fresh().register_models(files.parse(text), "mine.toml")
    near = {"transfomers": "; did you mean 'transformers'", "vlm": "; did you mean 'vllm'"}.get(engine, "")
    assert f"engines: no layer class of {engine!r} is known{near}" in str(refused.value)
    assert str(refused.value).endswith("@ $.models.mine.engines")


def test_an_engine_whose_layer_classes_an_entry_brings_is_known() -> None:
    text = also("engines.mylib = { latent_norm_eps = 1e-6 }") + (
        '[models.mine.layer_classes]\n"mylib.layers:Attention" = { like = "vllm:MLAAttention" }\n'
    )
    registry.fresh().register_models(files.parse(text), "mine.toml")


def test_what_a_class_does_not_read_cannot_be_left_out() -> None:
    text = """
    [models.mine]
    adapter = "deepseek_v3"
    source = "mine"
    num_hidden_layers = 1
    hidden_size = 64
    rms_norm_eps = 1e-6
    layers.full = { family = "gqa", num_heads = 4, num_kv_heads = 4, head_dim = 16, sliding_window = "off", has_sinks = false }
    [models.mine.layer_classes]
    "transformers:MineAttention" = { like = "transformers:DeepseekV3Attention", without = ["ropes"] }
    """
    with pytest.raises(CatalogError, match="without: MLASpec has no field 'ropes'; did you mean 'rope'"):
        registry.fresh().register_models(files.parse(text), "mine.toml")
