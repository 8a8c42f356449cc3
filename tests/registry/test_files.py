"""models.toml: what is read, what is refused, and how every mistake is reported."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, run_python
from toml_samples import BAD, BAD_CLASSES, GOOD, also, but, with_class

from layerfuse import registry
from layerfuse.registry import CatalogError, files
from layerfuse.registry import schema as schemas
from layerfuse.registry.inspect import read_config
from layerfuse.registry.toml import written

MODELS_TOML = ROOT / "models.toml"


def problems(text: str) -> tuple[str, ...]:
    with pytest.raises(CatalogError) as caught:
        files.parse(text, "mine.toml")
    return caught.value.problems


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_with_its_problem(name: str) -> None:
    text, says = BAD[name]
    assert any(says in problem for problem in problems(text)), problems(text)


@pytest.mark.parametrize("name", BAD_CLASSES)
def test_a_bad_layer_class_is_refused_with_its_problem_and_its_place(name: str, tmp_path: Path) -> None:
    words, says = BAD_CLASSES[name]
    path = tmp_path / "mine.toml"
    path.write_text(with_class(words))
    own = registry.fresh()
    before = dict(own.layer_classes())
    with pytest.raises(CatalogError) as caught:
        own.load(path)
    (problem,) = caught.value.problems
    assert says in problem
    assert problem.endswith(" @ $.models.mine.layer_classes.'mylib:A'")
    assert dict(own.layer_classes()) == before and "mine" not in own.models()


def test_all_mistakes_of_a_file_are_reported_at_once_with_file_and_path() -> None:
    text = (
        but("num_heads = 8", "num_heads = true")
        .replace("hidden_size = 64", "hiden_size = 64")
        .replace('activation = "silu"', 'activation = "swish"')
        .replace("at = [0, 2]", 'at = ["0", 2]')
    )
    with pytest.raises(CatalogError) as caught:
        files.parse(text, "mine.toml")
    known = "num_hidden_layers, hidden_size, rms_norm_eps, layers, mlps, experts, norm_weight_offset, added_as_given, attentions_per_layer, aliases, hf_id"
    assert str(caught.value).splitlines() == [
        "mine.toml: required key 'hidden_size' is missing @ $.models.mine.hidden_size",
        "mine.toml: expected a whole number, got True @ $.models.mine.layers['mla'].num_heads",
        "mine.toml: expected a whole number, got '0' @ $.models.mine.layers['mla'].at[0]",
        "mine.toml: expected 'silu' or 'sigmoid', got 'swish' @ $.models.mine.layers['delta'].output_norm.activation",
        f"mine.toml: unknown key 'hiden_size'; did you mean 'hidden_size'? (known: adapter, source, {known}, model_type, "
        "architectures, quant, engines, layer_classes) @ $.models.mine",
    ]


def test_a_good_file_is_read() -> None:
    entry = files.parse(GOOD)["mine"]
    assert entry.kind_at() == ["mla", "delta", "mla", "delta"]
    assert [path for path, _ in entry.specs()] == [
        *("layers.0", "layers.0.mla", "layers.1", "layers.1.delta"),
        *("layers.2", "layers.2.mla", "layers.3", "layers.3.delta", "final"),
    ]
    assert files.parse(GOOD.encode())["mine"] == entry
    assert files.parse("") == files.parse("[models]") == {}


def test_whole_numbers_may_stand_for_floats_and_not_the_other_way_round() -> None:
    assert files.parse(but("factor = 40.0", "factor = 40")) == files.parse(GOOD)
    assert problems(but("num_heads = 8", "num_heads = 8.0"))


def test_layers_may_be_at_regular_distances() -> None:
    text = but("at = [0, 2]", "at = { step = 2 }")
    assert files.parse(text)["mine"].kind_at() == ["mla", "delta"] * 2
    text = but("at = [0, 2]", "at = { start = 1, step = 9 }")
    assert files.parse(text)["mine"].kind_at() == ["delta", "mla", "delta", "delta"]


def test_shared_experts_in_layers_of_several_mlps_are_refused() -> None:
    table = {**files.tomllib.loads(MODELS_TOML.read_text())["models"]["deepseek-v2-lite"], "attentions_per_layer": 2}
    with pytest.raises(
        CatalogError, match=r"mlps\.shared_experts: of 2 MLPs in a layer, which stands beside its experts"
    ):
        files.structure({"models": {"mine": table}}, "mine.toml")


def test_a_file_goes_round_unchanged() -> None:
    for entries in (files.read_file(MODELS_TOML), files.parse(with_class('[{ like = "vllm:MLAAttention" }]'))):
        document = files.unstructure(entries)
        assert files.structure(document, "again") == entries
        assert files.parse(written(document)) == entries


def test_models_toml_is_the_library_s_own_and_is_registered_whole() -> None:
    assert set(files.read_file(MODELS_TOML)) == set(registry.models())


# ---- files that cannot be read


def test_a_path_that_is_no_file_is_a_catalog_error(tmp_path: Path) -> None:
    for path, says in (
        (tmp_path / "absent.toml", "cannot be read: No such file or directory"),
        (tmp_path, "cannot be read: Is a directory"),
        ("nul\0.toml", "cannot be read: embedded null byte"),
        (tmp_path / ("x" * 5000), "cannot be read: File name too long"),
    ):
        with pytest.raises(CatalogError, match=says):
            registry.fresh().load(path)


def test_broken_utf8_names_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(b'[models.mine]\nadapter = "\xff"\n')
    with pytest.raises(CatalogError) as caught:
        files.read_file(path)
    assert str(caught.value) == f"{path}: is not UTF-8: byte 25 is 255"


@pytest.mark.parametrize(
    "text", ["[models", "a = ", "[models.a]\n[models.a]\n", "a = 1\na = 2", "\x00", "\ufeff\ufeff[models]"]
)
def test_what_is_no_toml_says_where(text: str) -> None:
    (problem,) = problems(text)
    assert problem.startswith("is not TOML: ")
    assert "line" in problem or "end of document" in problem


# ---- the schema


def validator() -> Any:
    jsonschema = pytest.importorskip("jsonschema")
    return jsonschema.Draft202012Validator(json.loads((ROOT / "models.schema.json").read_text()))


def test_the_schema_that_is_checked_in_is_the_one_the_classes_make() -> None:
    assert (ROOT / "models.schema.json").read_text() == schemas.text(), (
        "run: python -m layerfuse.registry.schema > models.schema.json"
    )
    printed = run_python("import runpy; runpy.run_module('layerfuse.registry.schema', run_name='__main__')")
    assert printed.stdout == schemas.text()


def test_the_schema_accepts_what_is_accepted() -> None:
    check = validator()
    check.check_schema(check.schema)
    for text in (MODELS_TOML.read_text(), GOOD, "", but("factor = 40.0", "factor = 40"), also("hf_id = 'a/b'")):
        assert list(check.iter_errors(tomllib.loads(text))) == []


@pytest.mark.parametrize("name", [name for name in BAD if not name.endswith("*")])
def test_the_schema_refuses_what_is_refused(name: str) -> None:
    if name in ("infinite epsilon", "epsilon of nan", "engine epsilon of nan that nothing uses"):
        pytest.skip("JSON has no such numbers")
    assert not validator().is_valid(json.loads(json.dumps(tomllib.loads(BAD[name][0]), default=str)))


def test_every_field_in_the_schema_says_what_it_is() -> None:
    schema = schemas.schema()
    for name, table in schema["$defs"].items():
        assert table["description"], name
        for field, words in table.get("properties", {}).items():
            assert words.get("description") or name in ("place", "norm") or field == "family", f"{name}.{field}"


# ---- the case of vLLM pull request 44308: a layer that names things differently is one TOML table, and no Python


@pytest.mark.parametrize("heads", ["num_heads", "n_heads"])
def test_a_renamed_head_count_is_fixed_in_toml_alone(heads: str, tmp_path: Path) -> None:
    from standins import module, weight

    def layer() -> Any:
        norm = module("newlib.norm:Gated", weight=weight(128), eps=1e-5, activation="sigmoid")
        held = {heads: 32, "tp_size": 8, "tp_rank": 3, "head_k_dim": 128, "head_v_dim": 128, "conv_kernel_size": 4}
        return module("newlib.kda:NewDeltaAttention", hidden_size=2304, layer_idx=0, norm=norm, **held)

    path = tmp_path / "mine.toml"
    own = registry.fresh()
    with pytest.raises(LookupError):
        own.spec_for(layer())
    # Declared as another engine's delta net: what it calls otherwise is named in the error, with the names it has.
    declared = '{{ like = "vllm:QwenGatedDeltaNetAttention", layer_index = "layer_idx", output_norm = {norm}{fix} }}'
    norm = (
        '{ module = "norm", epsilon = "eps", activation = "activation", norm_before_gate = { const = true }, '
        'group_size = { const = "none" } }'
    )
    path.write_text(with_class(declared.format(norm=norm, fix=""), "newlib:NewDeltaAttention"))
    own.load(path)
    with pytest.raises(AttributeError, match=rf"num_k_heads: NewDeltaAttention has no 'num_k_heads'(.|\n)*{heads}"):
        own.spec_for(layer())

    fixed = registry.fresh()
    fix = f', num_k_heads = "{heads}", num_v_heads = "{heads}"'
    path.write_text(with_class(declared.format(norm=norm, fix=fix), "newlib:NewDeltaAttention"))
    fixed.load(path)
    spec = fixed.spec_for(layer())
    assert (spec.num_v_heads, spec.num_local_v_heads, spec.gated_norm_shape) == (32, 4, (4, 128))
    assert fixed.adapter_for(layer()).name == "mine"


def test_a_file_may_declare_a_class_like_one_it_declares_later(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        with_class('{ like = "mylib:B", num_heads = "n" }') + '"mylib:B" = { like = "vllm:OAIAttention" }\n'
    )
    own = registry.fresh()
    own.load(path)
    assert {"mylib:A", "mylib:B"} <= set(own.layer_classes())
    own.load(path)  # once more is nothing new
    path.write_text(but("hidden_size = 64", "hidden_size = 128"))
    with pytest.raises(registry.ConflictError, match="the model mine is declared differently by"):
        own.load(path)


def test_a_circle_of_likes_is_found(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        with_class('{ like = "mylib:B" }') + '"mylib:B" = { like = "mylib:C" }\n"mylib:C" = { like = "mylib:A" }\n'
    )
    with pytest.raises(CatalogError) as caught:
        registry.fresh().load(path)
    assert [problem.partition(" @ ")[0] for problem in caught.value.problems] == ["like: goes in a circle"] * 3


@pytest.mark.parametrize("alias", ["Mine", "my model", ""])
def test_an_alias_is_written_like_a_name(alias: str) -> None:
    text = but('adapter = "deepseek_v3"', f'adapter = "deepseek_v3"\naliases = ["{alias}"]')
    assert list(problems(text)) == [
        f"aliases: a model's name is lower-case without blanks, got {alias!r} @ $.models.mine"
    ]


def test_a_byte_order_mark_is_no_part_of_a_file() -> None:
    assert files.parse(b"\xef\xbb\xbf" + GOOD.encode()) == files.parse("\ufeff" + GOOD) == files.parse(GOOD)


def test_a_config_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'\xef\xbb\xbf{"hidden_size": 8}')
    assert read_config(tmp_path) == {"hidden_size": 8}
