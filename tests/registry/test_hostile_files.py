"""Hostile files: absurd sizes, depths and numbers get a clear error in bounded time, and nothing ever runs."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT
from hypothesis import given
from hypothesis import strategies as st
from toml_samples import GOOD, but, with_class

from layerfuse import registry
from layerfuse.adapters.base import Facts
from layerfuse.adapters.errors import FactsError
from layerfuse.adapters.vocabulary import TRANSFORMERS_MLA
from layerfuse.registry import CatalogError, files
from layerfuse.registry.errors import MOST_PROBLEMS

sys.path.append(str(ROOT / "tests" / "fuzz"))

from test_fuzz_files import KEYS, held

FULL = files.LARGEST_FILE - 100
ENTRY = GOOD.replace("models.mine", "models.m%d")
DELTA = GOOD[GOOD.index("[models.mine.layers.delta]") :]


def classes(line: str, letters: int) -> str:
    """The good file with layer classes, as many as fit where each takes so many letters; `%d` and `%n`: its number and the next one."""
    lines = (line.replace("%d", str(i)).replace("%n", str(i + 1)) for i in range(FULL // letters))
    return "\n".join([f"{GOOD}[models.mine.layer_classes]", *lines, ""])


def models_of(count: int) -> str:
    return "".join(ENTRY.replace("%d", str(i)) for i in range(count))


# Each as large as a file may be, so that anything worse than a little over linear shows.
HUGE = {
    "dots in a key": lambda: "a." * (FULL // 2) + "b = 1",
    "quoted dots in a key": lambda: '"a" . ' * (FULL // 6) + "b = 1",
    "dots in a header": lambda: "[" + "a." * (FULL // 2) + "b]",
    "one long key": lambda: "a" * FULL,
    "dots in a text": lambda: "x = '" + "a.b c " * (FULL // 6) + "'",
    "quotes": lambda: "'" * FULL,
    "brackets": lambda: "x = " + "[" * (FULL // 2) + "]" * (FULL // 2),
    "braces": lambda: "x = " + "{a=" * (FULL // 4),
    "a decimal number": lambda: "x = " + "9" * (FULL - 10),
    "a hexadecimal number": lambda: but("num_heads = 8", "num_heads = 0x" + "f" * (FULL - len(GOOD))),
    "a float": lambda: "x = 1." + "9" * (FULL - 10),
    "unknown tables": lambda: "\n".join(f"k{i} = 1" for i in range(FULL // 11)),
    "unknown keys": lambda: "[models.a]\n" + "\n".join(f"k{i} = 1" for i in range(FULL // 11)),
    "empty models": lambda: "\n".join(f"[models.a{i}]" for i in range(FULL // 17)),
    "models of a thousand layers": lambda: models_of(FULL // (len(ENTRY) + 30)).replace("layers = 4", "layers = 1000"),
    "a list of layers": lambda: but("at = [0, 2]", "at = [" + "1," * (FULL // 2 - len(GOOD)) + "]"),
    "a list of texts": lambda: but("at = [0, 2]", "at = [" + '"a",' * (FULL // 4 - len(GOOD)) + "]"),
    "layer classes": lambda: classes('"m:C%d" = { like = "vllm:MLAAttention" }', 50),
    "layer classes in a row": lambda: classes('"m:C%d" = { like = "m:C%n" }', 45),
    "misspelt likes": lambda: classes('"m:C%d" = { like = "vllm:MLAAtention%d" }', 50),
    "misspelt fields": lambda: classes('"m:C%d" = { like = "vllm:MLAAttention", num_head = "a%d" }', 70),
    "engines times kinds": lambda: (
        GOOD.replace("layers = 4", "layers = 1000").replace("at = [0, 2]", "at = [0]")
        + "".join(DELTA.replace("delta]", f"d{i}]").replace('"rest"', f"[{i + 1}]") for i in range(900))
        + "".join(f"[models.mine.engines.e{i}]\n" for i in range((FULL - 250 * 900) // 30))
    ),
    "unknown adapters": lambda: "".join(
        GOOD.replace("models.mine", f"models.m{i}").replace('"deepseek_v3"', '"deepseek_v33"')
        for i in range(FULL // 900)
    ),
    "a long adapter": lambda: but('"deepseek_v3"', f'"{"deepseek_v3" * (FULL // 11 - 100)}"'),
    "a long name": lambda: GOOD.replace("models.mine", f"models.{'m' * (FULL // 3 - 1000)}").replace("= 8", "= 0"),
    "a long kind": lambda: GOOD.replace("layers.mla", f"layers.{'m' * (FULL - 2000)}").replace("= 8", "= 0"),
    "a long layer class": lambda: (
        GOOD + f'[models.mine.layer_classes]\n"m:{"C" * (FULL - 2000)}" = {{ like = "vllm:MLAA" }}\n'
    ),
}


@pytest.mark.parametrize("name", HUGE)
def test_a_file_as_large_as_allowed_is_done_with_in_bounded_time(name: str) -> None:
    text = HUGE[name]()
    assert len(text) <= files.LARGEST_FILE
    own = registry.fresh()
    own.models()
    gc.freeze()  # what other tests hold costs the collector time, not the file
    began = time.process_time()
    try:
        own.register_models(files.parse(text), "mine.toml")
    except CatalogError as error:
        assert len(str(error)) < 50_000
    took = time.process_time() - began
    gc.unfreeze()
    # A megabyte takes under a second where nothing else runs.
    assert took < 6


def test_a_larger_file_is_refused_without_being_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    with path.open("wb") as file:
        file.truncate(50 << 20)
    with pytest.raises(CatalogError, match="larger than 1 MiB, which no models file is"):
        files.read_file(path)
    if Path("/dev/zero").exists():
        with pytest.raises(CatalogError, match="larger than 1 MiB"):
            files.read_file("/dev/zero")


def test_a_pipe_is_read_like_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=(GOOD,))
    writer.start()
    assert set(files.read_file(path)) == {"mine"}
    writer.join()


def test_a_thousand_layers_of_a_step_are_no_list_of_them() -> None:
    text = but("num_hidden_layers = 4", "num_hidden_layers = 1000").replace("at = [0, 2]", "at = { step = 1000000000 }")
    assert files.parse(text)["mine"].kind_at().count("mla") == 1


def test_the_problems_of_a_hopeless_file_are_counted_and_not_all_listed() -> None:
    with pytest.raises(CatalogError) as caught:
        files.parse("\n".join(f"[models.a{i}]" for i in range(500)))
    assert len(caught.value.problems) == MOST_PROBLEMS + 1
    assert caught.value.problems[-1].startswith("and ")


@pytest.mark.parametrize(("tables", "rest"), [(51, "and 1 more problem"), (60, "and 10 more problems")])
def test_of_a_file_that_was_read_to_its_end_the_number_of_problems_is_exact(tables: int, rest: str) -> None:
    with pytest.raises(CatalogError) as caught:
        files.parse("\n".join(f"k{i} = 1" for i in range(tables)))
    assert caught.value.problems[-1] == rest


def test_of_a_file_that_was_not_read_on_the_number_of_problems_is_a_least_one() -> None:
    with pytest.raises(CatalogError) as caught:
        files.parse("\n".join(f"k{i} = 1" for i in range(13_000)))
    assert caught.value.problems[-1] == "and at least 950 more problems"


@pytest.mark.parametrize("table", ["layers", "mlps"])
def test_of_the_problems_of_one_entry_the_rest_is_counted(table: str) -> None:
    outside = list(range(100, 800))
    mlp = f"[models.mine.mlps.dense]\nat = {outside}\nintermediate_size = 64\nactivation = 'silu'\n"
    text = but("at = [0, 2]", f"at = {[0, 2, *outside]}") if table == "layers" else GOOD + mlp
    with pytest.raises(CatalogError) as caught:
        files.parse(text)
    assert len(caught.value.problems) == 21
    assert caught.value.problems[-1].startswith("and 680 more @ $.models.mine")


@pytest.mark.parametrize("layers", [1_000, 1_001])
def test_a_list_of_layers_is_as_long_as_the_largest_model(layers: int) -> None:
    text = but("at = [0, 2]", f"at = {[0] * layers}")
    with pytest.raises(CatalogError) as caught:
        files.parse(text)
    assert (f"expected at most 1000 layers, got {layers}" in str(caught.value)) == (layers > 1_000)


# ---- nothing runs


class Loud:
    """Everything about it that runs code says so."""

    calls: tuple[str, ...] = ()

    def __call__(self) -> Any:
        Loud.calls += ("call",)

    def method(self) -> Any:
        Loud.calls += ("method",)

    @property
    def prop(self) -> int:
        Loud.calls += ("property",)
        return 8


@pytest.mark.parametrize(
    "path",
    [
        "__class__",
        "__init__.__globals__",
        "method.__func__.__globals__",
        "a.__subclasses__",
        "__dict__.x",
        "forward.__code__",
    ],
)
def test_no_path_in_a_file_reaches_the_machinery(path: str) -> None:
    entries = files.parse(with_class(f'{{ like = "vllm:MLAAttention", kv_lora_rank = "{path}" }}'))
    with pytest.raises(CatalogError, match="reads a dunder attribute, which no layer says anything with"):
        registry.fresh().register_models(entries, "mine.toml")


def test_reading_a_declared_path_calls_nothing_but_properties() -> None:
    Loud.calls = ()
    words = {**TRANSFORMERS_MLA.words, "num_heads": ["method.im_self", "method", "prop"]}
    own = registry.Registry()
    from layerfuse.adapters import Adapter, SpecError

    own.register_adapter(Adapter("mine", {"mylib:Loud": Facts(TRANSFORMERS_MLA.spec, words)}))
    layer: Any = type("Loud", (Loud,), {"__module__": "mylib"})()
    layer.hidden_size = layer.layer_idx = layer.q_lora_rank = None
    with pytest.raises((AttributeError, SpecError)):
        own.spec_for(layer)
    assert set(Loud.calls) <= {"property"}


def test_structuring_imports_nothing() -> None:
    import sys

    before = set(sys.modules)
    files.parse(with_class('{ like = "evil.module:Class", num_heads = "os.system" }', "evil.module:Class"))
    assert {name for name in set(sys.modules) - before if name.startswith("evil")} == set()


# ---- fuzzing

scalars = (
    st.none().map(lambda _: "none")
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.dates()
    | st.datetimes()
)
documents = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)
named = st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=6), documents, max_size=5)


@given(
    st.dictionaries(
        st.just("models") | st.text(max_size=6), st.dictionaries(st.just("m"), named, max_size=2), max_size=2
    ),
    st.randoms(use_true_random=False),
)
def test_any_document_gives_entries_or_a_catalog_error(document: dict[str, Any], chance: random.Random) -> None:
    held(document, chance)


@given(st.binary(max_size=200))
def test_any_bytes_give_entries_or_a_catalog_error(data: bytes) -> None:
    try:
        files.parse(data)
    except CatalogError as error:
        assert str(error)


@given(st.sampled_from(sorted(TRANSFORMERS_MLA.words)), documents)
def test_any_words_in_facts_are_facts_or_a_facts_error(field: str, words: Any) -> None:
    try:
        TRANSFORMERS_MLA.but(**{field: words})
    except FactsError as error:
        assert str(error)


BASES = [
    *("builtins:object", "torch.nn:Module", "torch:Module", "torch.nn:ModuleList", "transformers:PreTrainedModel"),
    *("transformers.modeling_layers:GradientCheckpointingLayer", "vllm:CustomOp", "vllm:AttentionLayerBase"),
]


@pytest.mark.parametrize("base", BASES)
def test_a_base_of_everything_is_no_layer_class(base: str) -> None:
    text = with_class('{ like = "vllm:MLAAttention" }', base)
    with pytest.raises(CatalogError, match="is a base of layers or models of every kind"):
        registry.fresh().register_models(files.parse(text), "mine.toml")


def test_what_a_file_calls_its_models_cannot_command_a_terminal() -> None:
    with pytest.raises(CatalogError) as refused:
        files.parse('[models."a\\u001b[31m\\nb"]\nadapter = 1\n', "mine.toml")
    assert all(line.startswith("mine.toml: ") for line in str(refused.value).splitlines())
    assert str(refused.value).replace("\n", "").isprintable()
