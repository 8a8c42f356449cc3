import copy
import json
import os
import re
import sys
from pathlib import Path

import attrs
import pytest
from published import CHECKPOINTS, published

from layerfuse import registry
from layerfuse.adapters import ResidualSpec
from layerfuse.cli import models
from layerfuse.registry import files
from layerfuse.registry.inspect import ConfigError, inspect, read_config
from layerfuse.registry.toml import written
from layerfuse.testing.models import config_of

NAMES = {"kimi-k2": "kimi-k2-instruct"}
"""Folders that are not called as the declared model."""

PLAIN = published("PLAIN")


def ask(config, **changes):
    config = {**copy.deepcopy(config), **changes}
    return inspect({key: value for key, value in config.items() if value != "absent"}, registry=registry.default)


def problems(config, **changes):
    with pytest.raises(ConfigError) as error:
        ask(config, **changes)
    return "\n".join(error.value.problems)


@pytest.mark.parametrize("path", sorted(CHECKPOINTS.glob("*/config.json")), ids=lambda path: path.parent.name)
def test_a_published_config_is_the_declared_model(path):
    declared = registry.model(NAMES.get(path.parent.name, path.parent.name))
    found = inspect(read_config(path), registry=registry.default)
    assert found.entry.adapter == declared.adapter
    assert found.entry.specs() == [
        (name, spec) for (name, _), (_, spec) in zip(found.entry.specs(), declared.specs(), strict=True)
    ]
    assert declared.name in found.same_as
    assert found.differs == ()
    assert files.parse(found.toml()) == {found.entry.name: found.entry}


def test_the_checkpoints_are_there():
    assert len([*CHECKPOINTS.glob("*/config.json")]) >= 15


def test_a_mixture_without_shared_experts_has_dense_mlps_alone():
    entry = ask(published("deepseek-v3"), n_shared_experts=0).entry
    assert entry.mlp_at() == ["dense"] * 3 + [None] * 58
    assert entry.mixture_at() == [False] * 3 + [True] * 58
    mixtures = [spec.experts for _, spec in entry.specs() if isinstance(spec, ResidualSpec)]
    assert [each.shared if each else "dense" for each in mixtures] == ["dense"] * 3 + [None] * 58


def test_head_dim_says_nothing_of_latent_attention():
    assert ask(published("MLA"), head_dim=72).entry.specs() == ask(published("MLA")).entry.specs()


CASES = re.split(r"\n(?![-!?=] )", (Path(__file__).parent / "configs.txt").read_text(encoding="utf-8").strip())
"""A config with changes, and what comes of it: values of the entry (=), notes (?), or reasons why it is refused (!) and words that are none (-)."""


def at(value, path):
    for step in path.split("."):
        value = value[step] if isinstance(value, dict) else getattr(value, step)
    return value


@pytest.mark.parametrize("case", CASES)
def test_what_comes_of_a_config(case):
    asked, *answers = case.splitlines()
    base, _, changes = asked.partition(" ")
    config, changes = published(base), json.loads(changes)
    if answers[0].startswith("! "):
        said = problems(config, **changes)
        assert all(answer[0] in "!-" and (answer[2:] in said) == (answer[0] == "!") for answer in answers), said
        if base == "MLA" and "absent" not in changes.values():  # the language model's part of one that sees
            inside = {"model_type": "seen", "architectures": ["SeenForCausalLM"], "text_config": {**config, **changes}}
            assert problems(inside) == said
        return
    found = ask(config, **changes)
    notes = " ".join(found.notes)
    for sign, _, words in (answer.partition(" ") for answer in answers):
        path, _, value = words.partition(" ")
        assert (words in notes) == (sign == "?") if sign in "?-" else str(at(found.entry, path)) == value, words


@pytest.mark.parametrize(("content", "said"), [(b"\xff\xfe\xfa", "is not JSON"), (b"[" * 200_000, "is n")])
def test_bytes_that_are_no_config_get_one_clean_message(run, tmp_path, content, said):
    (tmp_path / "config.json").write_bytes(content)
    answer = run("inspect", tmp_path)
    assert answer.code == 1 and said in answer.err and "Traceback" not in answer.err


def test_the_notes_travel_with_the_entry_as_comments():
    text = ask(PLAIN).toml()
    assert text.startswith("# head_dim is not said")
    assert written(files.unstructure(files.parse(text))) in text


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
def test_a_pipe_is_refused_and_not_waited_for(run_python, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    answer = run_python("-m", "layerfuse", "inspect", str(tmp_path / "pipe"))
    assert (answer.code, answer.err) == (1, f"layerfuse: {tmp_path / 'pipe'}: is no regular file\n")


@pytest.mark.parametrize("key", ["rms_norm_eps", "head_dim", "num_hidden_layers", "sliding_window", "hidden_size"])
@pytest.mark.parametrize("number", [10**400, -(10**400), 10**4299, float("inf"), float("nan")])
def test_a_number_beyond_every_float_is_refused_by_its_key(key, number):
    said = problems(PLAIN, sliding_window_pattern=6, **{key: number})
    assert f"{key}: expected a " in said
    assert len(said) < 1000


def test_a_layer_of_a_config_that_transformers_does_not_take_is_answered_on_one_line(run, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**PLAIN, "model_type": "llama", "vocab_size": "x"}))
    answer = run("inspect", str(file), "--layer", "model.layers.0.self_attn")
    assert answer.code == 1 and "transformers builds no model of this config: " in answer.err.splitlines()[-1]


def test_a_head_dim_that_is_not_said_is_derived_aloud_and_one_that_is_misspelt_refused(run, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(PLAIN))
    answer = run("plan", str(file))
    assert answer.code == 0 and "head_dim is not said; it is hidden_size / num_attention_heads = 128" in answer.err
    file.write_text(json.dumps({**PLAIN, "head_dims": 64}))
    answer = run("plan", str(file))
    assert answer.code == 1 and "head_dim is missing; did you mean head_dim by head_dims = 64?" in answer.err


GEMMA = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "sliding_window": 1024,
}
"""All that google/gemma-3-4b-it says of its layers."""


def test_what_a_config_leaves_out_is_transformers_default_where_it_is_installed(run, monkeypatch, tmp_path):
    file = tmp_path / "config.json"
    composite = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    file.write_text(
        json.dumps({**composite, "text_config": {**GEMMA, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}})
    )
    answer = run("inspect", str(file))
    assert answer.code == 0 and "this is gemma-3-4b" in answer.err
    note = answer.err.splitlines()[0]
    assert (
        "for gemma3_text: num_attention_heads = 8, num_key_value_heads = 4, head_dim = 256, rms_norm_eps = 1e-06"
        in note
    )
    answer = run("inspect", str(file), "--layer", "model.layers.0.self_attn")
    assert answer.code == 0 and "head_dim            256" in answer.out
    file.write_text(json.dumps({**composite, "text_config": {**GEMMA, "num_attention_head": 4}}))
    assert run("inspect", str(file)).code == 1, "a default would hide what is misspelt"
    file.write_text(json.dumps({**composite, "text_config": {**GEMMA, "hidden_size": None}}))
    assert run("inspect", str(file)).code == 1
    file.write_text(json.dumps({"model_type": "gemma3_text"}))
    answer = run("plan", str(file))
    assert answer.code == 1 and "num_hidden_layers is missing" in answer.err, "it does not say which model it is"
    file.write_text(json.dumps({**composite, "text_config": {**GEMMA, "num_key_value_head": 4}}))
    answer = run("inspect", str(file))
    assert answer.code == 1 and "did you mean num_key_value_heads" in answer.err
    monkeypatch.setattr(models, "find_spec", lambda _: None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    file.write_text(json.dumps({**composite, "text_config": {**GEMMA, "num_key_value_heads": 4}}))
    answer = run("plan", str(file))
    assert (
        answer.code == 1 and "num_attention_heads is missing" in answer.err and "or install transformers" in answer.err
    )


@pytest.mark.parametrize(
    ("name", "gone", "needed"),
    [
        ("gemma-2-2b", ["sliding_window"], {"sliding_window": 4096}),
        ("mistral-7b-v0.1", ["sliding_window"], {"sliding_window": 4096}),
        ("granite-3.3-8b", ["attention_multiplier"], {"attention_multiplier": 1.0}),
        ("mixtral-8x7b", ["num_local_experts"], {"num_local_experts": 8}),
        ("mixtral-8x7b", ["rope_parameters", "attention_dropout"], {}),
    ],
)
def test_what_a_config_leaves_out_is_named_where_a_spec_follows_from_it(run, tmp_path, name, gone, needed):
    file = tmp_path / "mine.json"
    config = config_of(registry.model(name)).to_dict()
    file.write_text(json.dumps({key: value for key, value in config.items() if key not in gone}))
    answer = run("plan", str(file), "--json")
    assert answer.code == 0 and json.loads(answer.out)["defaults"] == needed
    line = f"has by default for {config['model_type']}: " + ", ".join(
        f"{key} = {value}" for key, value in needed.items()
    )
    assert answer.err.splitlines()[0].endswith(line) if needed else "by default" not in answer.err
    entry = run("inspect", str(file)).out
    assert [comment.endswith(line) for comment in entry.splitlines() if "by default" in comment] == [True] * len(needed)


def test_a_default_that_is_misspelt_or_does_not_go_with_the_rest_is_said(run, tmp_path):
    file = tmp_path / "mine.json"
    config = config_of(registry.model("mistral-7b-v0.1")).to_dict()
    config["sliding_windows"] = config.pop("sliding_window")
    file.write_text(json.dumps(config))
    answer = run("plan", str(file))
    assert answer.code == 1
    assert "sliding_window is missing; did you mean sliding_window by sliding_windows = 4096?" in answer.err
    config = {**published("deepseek-v3"), "n_routed_experts": 4}
    file.write_text(json.dumps({key: config[key] for key in config if key not in ("num_experts_per_tok", "auto_map")}))
    answer = run("plan", str(file))
    assert answer.code == 0 and "which does not go with the rest: experts_per_token: expected at most " in answer.err


def test_without_transformers_a_plan_says_that_defaults_are_not_known(run, monkeypatch, tmp_path):
    monkeypatch.setattr(models, "find_spec", lambda _: None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**published("qwen3-4b"), "num_hidden_layers": 3}))
    assert (
        "transformers, whose defaults are taken for what a config leaves out, is not installed" in run("plan", file).err
    )


def test_a_config_of_another_model_type_has_its_own_name_beside_the_layers_of_a_declared_model(run, tmp_path):
    file = tmp_path / "mistral-7b-v0.3.json"
    config = {**config_of(registry.model("mistral-7b-v0.1")).to_dict(), "sliding_window": None}
    file.write_text(json.dumps(config))
    said = "mistral-7b-v0.3 (adapter decoders, its layers are declared as those of llama-3.1-8b)"
    assert run("plan", str(file)).out.splitlines()[0] == said
    said = run("inspect", str(file)).err
    assert (
        "its layers are those of llama-3.1-8b, of another model_type: `layerfuse plan " in said
        and "this is" not in said
    )


def test_compressed_tensors_first_key_is_read_and_a_misspelt_one_is_asked_about():
    said = {
        "quant_method": "compressed-tensors", "format": "int-quantized",
        "config_groups": {"all": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}},
    }  # fmt: skip
    assert ask(PLAIN, compression_config=said).entry.quant == {
        name: attrs.evolve(kind, source=kind.source.replace("quantization_config", "compression_config"))
        for name, kind in ask(PLAIN, quantization_config=said).entry.quant.items()
    }
    assert "did you mean quantization_config by quantisation_config?" in problems(PLAIN, quantisation_config=said)


def test_experts_of_a_mixture_that_is_not_declared_are_said_to_be_left_out():
    found = ask(PLAIN, model_type="newmoe", architectures=["NewMoeForCausalLM"], num_experts=64)
    assert found.entry.experts is None
    assert any("the routed experts are left out" in note and "num_experts = 64" in note for note in found.lost)


def test_a_default_that_no_entry_could_say_refuses_the_config(run, tmp_path):
    file = tmp_path / "config.json"
    said = {key: value for key, value in PLAIN.items() if key != "layer_types"}
    file.write_text(json.dumps({**said, "model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"]}))
    answer = run("plan", file)
    assert answer.code == 1 and "attention_chunk_size = 8192: attention in chunks" in answer.err


def test_a_config_that_transformers_does_not_take_is_said_to_be_read_without_its_defaults(run, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**PLAIN, "attention_dropout": "x"}))
    assert "what it leaves out was not looked for, as transformers does not take it: " in run("plan", file).err


@pytest.mark.parametrize(("said", "meant"), [("lama", "'llama'"), ("Mixtral", "'mixtral'"), ("qwen9", ""), ("new", "")])
def test_a_model_type_that_may_be_misspelt_is_said(run, tmp_path, said, meant):
    file = tmp_path / "config.json"
    words = f"nothing is known of a model_type '{said}'; did you mean {meant}?"
    file.write_text(json.dumps({**PLAIN, "model_type": said, "architectures": []}))
    assert (words in run("plan", file).err) == bool(meant)
    assert (f"# {words}" in run("inspect", file).out) == bool(meant)
    file.write_text(json.dumps({"model_type": said}))
    assert (words in run("plan", file).err) == bool(meant)


@pytest.mark.parametrize(
    ("said", "names", "taken"),
    [
        ("qwen3", ["LlamaForCausalLM"], "qwen3"),
        ("helium", ["LlamaForCausalLM"], "LlamaForCausalLM"),
        ("new", ["LlamaForCausalLM"], None),
        ("llama", ["LlamaForCausalLM"], None),
        ("kimi_k2", ["DeepseekV3ForCausalLM"], None),
        ("qwen3", ["MyForCausalLM"], None),
    ],
)
@pytest.mark.parametrize("command", ["plan", "inspect"])
def test_a_model_type_and_architectures_of_two_models_are_said_with_the_one_taken(
    run, tmp_path, command, said, names, taken
):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**PLAIN, "model_type": said, "architectures": names}))
    words = f"model_type '{said}' and architectures contradict each other, as LlamaForCausalLM is of model_type llama: "
    answer = run(command, str(file)).err
    assert (f"{words}{taken} was taken" in answer) if taken else ("contradict each other" not in answer)
