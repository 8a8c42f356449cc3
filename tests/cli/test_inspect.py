import copy
import json
import os
from pathlib import Path

import pytest

from layerfuse import registry
from layerfuse.adapters import ResidualSpec
from layerfuse.registry import files
from layerfuse.registry.inspect import ConfigError, inspect, read_config
from layerfuse.registry.toml import written

CHECKPOINTS = sorted((Path(__file__).parent.parent / "engines" / "checkpoints").glob("*/config.json"))

NAMES = {"kimi-k2": "kimi-k2-instruct"}
"""Folders that are not called as the declared model."""

PLAIN = {
    "architectures": ["HeliumForCausalLM"],
    "model_type": "helium",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
}
MLA = {
    "architectures": ["NewForCausalLM"],
    "model_type": "new",
    "num_hidden_layers": 4,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-6,
}


def ask(config, **changes):
    config = {**copy.deepcopy(config), **changes}
    return inspect({key: value for key, value in config.items() if value != "absent"}, registry=registry.default)


def kinds(config, **changes):
    return ask(config, **changes).entry.layers


def problems(config, **changes):
    with pytest.raises(ConfigError) as error:
        ask(config, **changes)
    return "\n".join(error.value.problems)


@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: path.parent.name)
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
    assert len(CHECKPOINTS) >= 15


def test_a_folder_will_do_and_names_the_entry(run):
    answer = run("inspect", CHECKPOINTS[0].parent)
    assert answer.code == 0
    name = CHECKPOINTS[0].parent.name
    assert list(files.parse(answer.out)) == [f"my-{name}"]
    assert (
        f"`layerfuse plan {name}` knows it without an entry; the one that follows is for the name my-{name}"
        in answer.err
    )


@pytest.mark.parametrize(
    ("folder", "changes", "name"),
    [
        ("kimi-k2", {}, "my-kimi-k2"),  # an alias
        ("kimi-k2-instruct", {}, "my-kimi-k2-instruct"),
        ("anything", {"_name_or_path": "moonshotai/Kimi-K2-Instruct"}, "my-kimi-k2-instruct"),
        ("mine", {}, "mine"),
    ],
)
def test_an_entry_of_inspect_is_one_that_check_takes(run, tmp_path, folder, changes, name):
    (tmp_path / folder).mkdir()
    config = read_config(next(path for path in CHECKPOINTS if path.parent.name == "kimi-k2"))
    (tmp_path / folder / "config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")
    answer = run("inspect", tmp_path / folder)
    assert list(files.parse(answer.out)) == [name]
    declared = name.removeprefix("my-")
    assert (f"the entry is called {name}, since {declared} is a name of kimi-k2-instruct" in answer.err) == (
        name != "mine"
    )
    (tmp_path / "new.toml").write_text(answer.out, encoding="utf-8")
    checked = run("check", tmp_path / "new.toml")
    assert checked.code == 0, checked.out


def test_a_name_that_was_asked_for_is_taken_as_it_is(run):
    assert list(files.parse(run("inspect", CHECKPOINTS[0].parent, "--name", "kimi-k2").out)) == ["kimi-k2"]


def test_an_entry_that_was_printed_can_be_loaded_and_planned(run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PLAIN), encoding="utf-8")
    file = tmp_path / "entry.toml"
    file.write_text(run("inspect", tmp_path, "--name", "My Llama").out, encoding="utf-8")
    assert run("check", file).out == "1 model, 4 layer classes: all fine\n"
    assert "full: 32 layers (0-31)" in run("plan", "my-llama", "--models", file, "--tp", 8, "-v").out


# ---- which layers are of which kind


def test_llama_is_plain_gqa_and_what_is_derived_is_said():
    found = ask(PLAIN)
    kind = found.entry.layers["full"]
    assert (kind.num_heads, kind.num_kv_heads, kind.head_dim, kind.sliding_window) == (32, 8, 128, "off")
    notes = " ".join(found.notes)
    assert "head_dim is not said; it is hidden_size / num_attention_heads = 128" in notes
    assert "has_sinks is not said by any config" in notes
    assert "no declared model has this architecture" in notes


def test_a_head_dim_of_its_own_is_taken():
    assert kinds(PLAIN, head_dim=64)["full"].head_dim == 64


def test_qwen_windows_that_are_switched_off():
    assert kinds(PLAIN, sliding_window=4096, use_sliding_window=False, max_window_layers=28)["full"].at == "all"
    entry = ask(PLAIN, sliding_window=4096, use_sliding_window=True, max_window_layers=28).entry
    assert entry.kind_at() == ["full"] * 28 + ["sliding"] * 4
    assert entry.layers["sliding"].sliding_window == 4096


def test_mistral_s_window_is_on_every_layer_and_another_model_s_is_unsaid():
    assert kinds(PLAIN, model_type="mistral", sliding_window=4096)["sliding"].at == "all"
    assert "neither layer_types nor sliding_window_pattern" in problems(PLAIN, sliding_window=4096)


def test_gemma_patterns_scale_and_zero_centred_norms():
    found = ask(
        PLAIN, model_type="gemma3_text", sliding_window=1024, sliding_window_pattern=6, query_pre_attn_scalar=64
    )
    assert [i for i, kind in enumerate(found.entry.kind_at()) if kind == "full"] == [5, 11, 17, 23, 29]
    assert found.entry.layers["full"].softmax_scale == 0.125
    assert found.entry.norm_weight_offset == 1.0


def test_exaone_letters():
    found = ask(PLAIN, model_type="exaone4", sliding_window=4096, sliding_window_pattern="LLLG")
    assert found.entry.kind_at()[:8] == ["sliding", "sliding", "sliding", "full"] * 2


def test_layer_types_must_cover_the_layers():
    assert "expected a list of 32 layers, got 1 layers" in problems(PLAIN, layer_types=["full_attention"])
    assert "'mamba' is a kind of layer" in problems(PLAIN, layer_types=["mamba"] * 32)


def test_kimi_counts_from_1_and_every_layer_once():
    config = read_config(next(path for path in CHECKPOINTS if path.parent.name == "kimi-linear-48b-a3b"))
    assert ask(config).entry.layers["mla"].at == [3, 7, 11, 15, 19, 23, 26]
    config["linear_attn_config"]["kda_layers"].remove(26)
    assert "do not share out the layers 1 to 27" in problems(config)


def test_qwen3_next_s_interval():
    config = read_config(next(path for path in CHECKPOINTS if path.parent.name == "qwen3-next-80b-a3b"))
    assert [i for i, kind in enumerate(ask(config).entry.kind_at()) if kind == "full"] == list(range(3, 48, 4))
    assert "neither layer_types nor full_attention_interval" in problems(config, full_attention_interval=None)


# ---- latent attention


def test_head_dim_lies_for_latent_attention():
    assert ask(MLA, head_dim=72).entry.specs() == ask(MLA).entry.specs()


def test_q_lora_rank_null_is_an_answer_and_absence_is_none():
    assert kinds(MLA)["mla"].q_lora_rank == "none"
    assert kinds(MLA, q_lora_rank=1536)["mla"].q_lora_rank == 1536
    assert "q_lora_rank is missing" in problems(MLA, q_lora_rank="absent")


def test_a_rope_dim_of_0_is_a_value():
    assert kinds(MLA, qk_rope_head_dim=0)["mla"].qk_rope_head_dim == 0


def test_a_contradicting_qk_head_dim():
    assert "qk_head_dim: 200 is not 128 + 64" in problems(MLA, qk_head_dim=200)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_yarn_is_read_under_both_keys_and_only_with_mscale_all_dim(key):
    yarn = {"rope_type": "yarn", "factor": 40, "mscale_all_dim": 1.0}
    assert kinds(MLA, **{key: yarn})["mla"].yarn.factor == 40.0
    assert kinds(MLA, **{key: {**yarn, "mscale_all_dim": 0}})["mla"].yarn is None
    assert kinds(MLA, **{key: {"rope_type": "default"}})["mla"].yarn is None


def test_the_declared_model_s_engines_are_taken_over():
    config = read_config(next(path for path in CHECKPOINTS if path.parent.name == "glm-5"))
    assert ask(config).entry.engines["transformers"].latent_norm_eps == 1e-6


def test_differences_from_the_declared_model_are_named():
    config = read_config(next(path for path in CHECKPOINTS if path.parent.name == "deepseek-v3"))
    found = ask(config, num_hidden_layers=30, num_attention_heads=64)
    assert found.same_as == ()
    assert "num_hidden_layers: 30 (in deepseek-v3: 61)" in found.differs
    assert "mla.num_heads: 64 (in deepseek-v3: 128)" in found.differs


# ---- gated MLPs


def test_mixtures_come_after_the_first_dense_layers_or_as_listed():
    listed = ["sparse", "dense"] * 30 + ["sparse"]
    entry = ask(published("deepseek-v3"), mlp_layer_types=listed, n_shared_experts=3).entry
    assert entry.mlps["shared_experts"].intermediate_size == 3 * 2048
    assert [{"shared_experts": "sparse"}.get(kind, kind) for kind in entry.mlp_at()] == listed
    assert ask(published("deepseek-v3"), moe_layer_freq=2).entry.mlp_at()[:6] == [
        *["dense"] * 4,
        "shared_experts",
        "dense",
    ]
    only = ask(published("qwen3-next-80b-a3b"), mlp_only_layers=[0, 5]).entry
    assert [i for i, kind in enumerate(only.mlp_at()) if kind == "dense"] == [0, 5]
    assert only.mlps["dense"].intermediate_size == 5120


def test_a_mixture_without_shared_experts_has_dense_mlps_alone():
    entry = ask(published("deepseek-v3"), n_shared_experts=0).entry
    assert entry.mlp_at() == ["dense"] * 3 + [None] * 58
    assert entry.mixture_at() == [False] * 3 + [True] * 58
    mixtures = [spec.experts for _, spec in entry.specs() if isinstance(spec, ResidualSpec)]
    assert [each.shared if each else "dense" for each in mixtures] == ["dense"] * 3 + [None] * 58


def test_a_mixture_all_of_whose_layers_are_dense_has_no_experts():
    entry = ask(published("deepseek-v3"), first_k_dense_replace=61).entry
    assert (entry.experts, entry.mlp_at()) == (None, ["dense"] * 61)


def test_a_clamp_and_another_activation_are_taken():
    mlp = ask(published("deepseek-v3"), hidden_act="gelu_pytorch_tanh", swiglu_limit=7).entry.mlps["dense"]
    assert (mlp.activation, mlp.swiglu_limit) == ("gelu_tanh", 7.0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": 7}, 'model_type: expected a text, as "qwen3", got 7'),
        ({"model_type": ["new"]}, """model_type: expected a text, as "qwen3", got ['new']"""),
        ({"hidden_act": 3}, 'hidden_act: expected a text, as "silu", got 3'),
        ({"hidden_activation": False}, 'hidden_activation: expected a text, as "gelu_pytorch_tanh", got False'),
        ({"architectures": "New"}, """architectures: expected a list of texts, as ["Qwen3ForCausalLM"], got 'New'"""),
        ({"architectures": [1]}, 'architectures: expected a list of texts, as ["Qwen3ForCausalLM"], got [1]'),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_a_name_that_is_no_text_is_refused_by_its_key(changes, said, inside):
    config = {**MLA, **changes}
    if inside:
        config = {"model_type": "seen", "architectures": ["SeenForCausalLM"], "text_config": config}
    assert problems(config) == f"{said}: correct it in the config, or take it out"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"n_shared_experts": None}, "n_shared_experts is null"),
        (
            {"mlp_multipliers": [1.0]},
            "mlp_multipliers: expected two numbers, those of the gate and of the result, got [1.0]",
        ),
        (
            {"mlp_multipliers": ["a", 1]},
            "mlp_multipliers: expected two numbers, those of the gate and of the result, got ['a', 1]",
        ),
        ({"hidden_act": "tanh"}, "hidden_act: expected one that a spec describes (silu, gelu,"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types: expected 61 times dense or sparse, got ['dense']"),
        ({"first_k_dense_replace": "absent"}, "neither mlp_layer_types nor first_k_dense_replace says which"),
    ],
)
def test_mlps_that_a_config_does_not_say_are_left_out_with_the_reason(changes, said):
    found = ask(published("deepseek-v3"), **changes)
    assert found.entry.mlps == {}
    assert f"the gated MLPs are left out: {said}" in " ".join(found.notes)


def test_whether_an_unknown_architecture_s_mlps_are_gated_no_config_says():
    found = ask(PLAIN, intermediate_size=11008, hidden_act="silu")
    assert found.entry.mlps == {}
    assert "whether an MLP is gated is not said by any config" in " ".join(found.notes)


# ---- refusals


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_key_value_heads": "absent"}, "the kind of attention cannot be told"),
        ({"rms_norm_eps": "absent", "layer_norm_eps": 1e-5}, "which may be a LayerNorm's"),
        ({"num_attention_heads": "absent", "n_head": 12}, "num_attention_heads is missing (there is n_head = 12"),
        ({"num_attention_heads": "32"}, "num_attention_heads: expected a whole number, got '32'"),
        ({"num_attention_heads": [32, 16]}, "num_attention_heads: expected a whole number"),
        ({"num_attention_heads": True}, "num_attention_heads: expected a whole number, got True"),
        ({"num_attention_heads": 10**18, "head_dim": 64}, "expected a whole number of at most"),
        ({"num_attention_heads": 0}, "num_heads: expected at least 1, got 0"),
        ({"num_hidden_layers": 10**9}, "expected 1 to 1000"),
        ({"num_hidden_layers": -1}, "num_hidden_layers: expected a whole number of at least 0, got -1"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps: expected a number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: expected a number above 0"),
        ({"mamba_d_state": 16}, "layers that are no attention"),
        ({"is_encoder_decoder": True}, "decoder-only"),
        ({"per_layer_config": {"5": {"head_dim": 512}}}, "heads that differ between layers"),
        ({"model_type": "phimoe"}, "LayerNorms"),
        ({"attention_chunk_size": 8192}, "attention in chunks"),
        ({"hc_mult": 4, "hc_eps": 1e-6}, "hc_mult = 4: a residual stream that is mixed"),
        ({"mhc_num_streams": 4}, "mhc_num_streams = 4: a residual stream that is mixed"),
        ({"num_residual_streams": 2}, "num_residual_streams = 2: a residual stream that is mixed"),
        ({"use_hyperconnections": True}, "use_hyperconnections = True: a residual stream that is mixed"),
        ({"hyper_connection_rate": 4}, "hyper_connection_rate = 4: a residual stream that is mixed"),
        ({"altup_num_inputs": 4}, "altup_num_inputs = 4: a residual stream that is mixed"),
        ({"num_streams": 4}, "num_streams = 4: a residual stream that is mixed"),
        ({"use_parallel_residual": True}, "use_parallel_residual = True: attention and MLP side by side"),
        ({"parallel_attn": True}, "parallel_attn = True: attention and MLP side by side"),
        ({"num_attention_heads": 24, "num_key_value_heads": 24}, "does not divide hidden_size"),
        ({"num_key_value_heads": 5}, "num_heads: 32 is no multiple of num_kv_heads 5"),
    ],
)
def test_what_cannot_be_told_is_refused_with_the_reason(changes, said):
    assert said in problems(PLAIN, **changes)


def test_what_a_config_says_of_the_norms_is_in_the_notes_that_ask():
    notes = " ".join(ask(PLAIN, use_sandwich_norm=True, zero_centered_gamma=True).notes)
    assert "where the norms stand is not said by any config, but use_sandwich_norm = True may mean it" in notes
    assert "0.0 was written: zero_centered_gamma = True may mean that the norms add 1 to their weight" in notes


def test_streams_that_are_switched_off_are_no_streams():
    off = {"hc_mult": None, "use_hyper_connections": False, "num_residual_streams": 0, "parallel_attn": False}
    assert kinds(PLAIN, **off) == kinds(PLAIN)


def test_an_entry_that_the_model_s_own_code_does_not_bear_out_declares_nothing(run, tmp_path):
    """NanoChat's norms hold no weight."""
    config = {**PLAIN, "architectures": ["NanoChatForCausalLM"], "model_type": "nanochat", "vocab_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    answer = run("inspect", tmp_path, "--name", "mine")
    assert answer.code == 1
    assert files.parse(answer.out) == {}
    assert "# [models.mine.layers.full]\n" in answer.out
    assert "transformers:NanoChatDecoderLayer could not be read" in answer.err
    assert "32 x ResidualSpec are declared, and 0 were read off the layers of NanoChatForCausalLM" in answer.err
    assert "so the entry is a draft, printed as comments" in answer.err
    as_json = run("inspect", tmp_path, "--json")
    assert as_json.code == 1
    said = json.loads(as_json.out)
    assert said["entry"] is None
    assert any("32 x ResidualSpec" in problem for problem in said["problems"])


def test_an_mlp_that_strict_would_call_unknown_is_no_answer(run, tmp_path):
    """BitNet norms what its gate gives. The same config of Phi-3, whose gate and up are one linear, is an answer."""
    config = {**PLAIN, "vocab_size": 32064, "intermediate_size": 11008, "hidden_act": "relu2"}
    for model_type in ("bitnet", "phi3"):
        (tmp_path / f"{model_type}.json").write_text(json.dumps({**config, "model_type": model_type}), encoding="utf-8")
    answer = run("inspect", tmp_path / "bitnet.json")
    assert answer.code == 1
    assert files.parse(answer.out) == {}
    assert "BitNetMLP could not be read: its forward is not down_proj(relu2(gate) * up)" in answer.err
    assert "model.layers.0.mlp: no adapter reads transformers.models.bitnet.modeling_bitnet:BitNetMLP" in answer.err
    answer = run("inspect", tmp_path / "phi3.json")
    assert answer.code == 0
    ((_, entry),) = files.parse(answer.out).items()
    assert {mlp.activation for mlp in entry.mlps.values()} == {"relu2"}
    assert entry.layer_classes == {}  # its classes are known


def test_every_gap_is_listed_at_once(run, tmp_path):
    (tmp_path / "config.json").write_text('{"kv_lora_rank": 512, "model_type": "new"}', encoding="utf-8")
    answer = run("inspect", tmp_path)
    assert answer.code == 1
    assert answer.out == ""
    for key in ("num_hidden_layers", "hidden_size", "rms_norm_eps"):
        assert f"{key} is missing" in answer.err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"[]", "expected a JSON object, got list"),
        (b"\xff\xfe\xfa", "is not JSON"),
        (b"[" * 200_000, "is n"),
        (b"{}", "the kind of attention cannot be told"),
        (b'{"text_config": {}}', "the kind of attention cannot be told"),
        (b'{"text_config": 3, "architectures": "Llama", "model_type": 7}', "the kind of attention cannot be told"),
        (b'{"linear_attn_config": 7, "num_hidden_layers": 2}', "is missing"),
        (b'{"linear_attn_config": {"num_heads": "x"}, "num_hidden_layers": 2}', "full_attn_layers and kda_layers"),
        (
            b'{"kv_lora_rank": 512, "rope_scaling": {"type": "yarn", "mscale_all_dim": "x"}, "num_hidden_layers": 1}',
            "yarn",
        ),
        (b'{"num_key_value_heads": 1, "layer_types": 5, "num_hidden_layers": 2}', "layer_types: expected a list"),
        (
            b'{"num_key_value_heads": 1, "attn_type_list": [[]], "num_hidden_layers": 2}',
            "attn_type_list: has other layers",
        ),
    ],
)
def test_hostile_files_get_one_clean_message(run, tmp_path, content, said):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    answer = run("inspect", file)
    assert answer.code == 1
    assert said in answer.err or "numbers, got" in answer.err
    assert "Traceback" not in answer.err


def test_the_notes_travel_with_the_entry_as_comments():
    text = ask(PLAIN).toml()
    assert text.startswith("# head_dim is not said")
    assert written(files.unstructure(files.parse(text))) in text


# ---- contradictions


def published(name):
    return read_config(next(path for path in CHECKPOINTS if path.parent.name == name))


@pytest.mark.parametrize("value", [None, "absent"])
def test_a_latent_model_without_its_latent_is_no_grouped_query_attention(value):
    said = problems(published("deepseek-v3"), kv_lora_rank=value)
    assert (
        "model_type deepseek_v3 has multi-head latent attention, and kv_lora_rank is missing or null, so that the keys "
        "say grouped-query attention: which is meant?"
    ) in said
    assert "qk_nope_head_dim = 128 belongs to multi-head latent attention, and kv_lora_rank is" in said


def test_a_hybrid_without_its_linear_layers():
    said = problems(published("kimi-linear-48b-a3b"), linear_attn_config=None)
    assert "model_type kimi_linear has a gated delta net, and linear_attn_config" in said


def test_latent_keys_where_the_architecture_has_none():
    said = problems(published("gpt-oss-20b"), kv_lora_rank=512)
    assert "model_type gpt_oss has grouped-query attention, and kv_lora_rank says multi-head latent attention" in said


@pytest.mark.parametrize("key", ["qk_nope_head_dim", "qk_rope_head_dim"])
def test_half_a_latent_attention(key):
    assert f"{key} = 64 belongs to multi-head latent attention, and kv_lora_rank is missing" in problems(
        PLAIN, **{key: 64}
    )
    assert ask(PLAIN, **{key: 0}).entry.adapter == "decoders"


def test_what_is_derived_is_noted_as_to_be_checked(run):
    assert "as in Llama: derived, to be checked" in ask(PLAIN).notes[0]
    out = " ".join(run("inspect", "--help").out.split())
    assert "What is derived is noted" in out
    assert "guessed" not in out


def test_the_adapter_is_recognised_and_not_some_model_of_it():
    assert ask(published("gpt-oss-20b")).recognised == ("adapter gpt_oss, by model_type gpt_oss",)


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


def test_yarn_beyond_every_float():
    rope = {"type": "yarn", "factor": 10**400, "mscale_all_dim": 1}
    assert "rope_scaling: expected numbers, got mscale_all_dim 1.0 and factor 1000" in problems(MLA, rope_scaling=rope)


def test_lightning_attention_is_no_delta_net_with_missing_keys():
    said = problems(PLAIN, model_type="minimax", layer_types=["full_attention", "linear_attention"] * 16)
    assert said.startswith("layer_types: has linear_attention, and none of linear_num_value_heads")
    assert "which no spec describes" in said
    assert "missing" not in said


def test_notes_are_said_once(run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PLAIN), encoding="utf-8")
    answer = run("inspect", tmp_path)
    assert "# its MLPs are gated, with silu" in answer.out
    assert "gated" not in answer.err
    assert "what is left to check is noted above the entry, in 2 lines\n" in answer.err


def test_one_note_is_one_line(run, tmp_path):
    config = read_config(next(path for path in CHECKPOINTS if path.parent.name == "glm-4.7-flash"))
    (tmp_path / "config.json").write_text(json.dumps({**config, "attn_logit_softcapping": 50.0}), encoding="utf-8")
    answer = run("inspect", tmp_path)
    notes = [line for line in answer.out.splitlines() if line.startswith("#")]
    assert len(notes) == 1, notes
    assert "noted above the entry, in 1 line\n" in answer.err


def test_of_a_layer_it_says_where_each_field_was_read(run):
    config = Path(__file__).parent.parent / "engines" / "checkpoints" / "deepseek-v3" / "config.json"
    said = run("inspect", config, "--layer", "model.layers.3")
    assert said.code == 0, said.err
    places = {line.split()[0]: line.split("  ")[-1] for line in said.out.splitlines()[1:]}
    assert places["input_norms.epsilon"].strip() == "input_layernorm.variance_epsilon"
    assert places["experts.num_experts"].strip() == "the mixture at mlp" and "256" in said.out
    for layer, why in (
        ("model.layers.99", "no layer of this model"),
        ("model.layers.3.input_layernorm", "no layer that is read"),
    ):
        refused = run("inspect", config, "--layer", layer)
        assert refused.code and f"--layer {layer}: {why}; did you mean 'model.layers." in refused.err


def test_a_declared_model_that_is_quantised_otherwise_is_planned_by_its_own_config(run, tmp_path):
    """Qwen3-4B in fp8, with scales of tokens and channels: the declared model knows no quantisation."""
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False}
    reads = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": reads}
    said = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    config = read_config(next(path for path in CHECKPOINTS if path.parent.name == "qwen3-4b"))
    path = tmp_path / "w8a8" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps({**config, "quantization_config": said}), encoding="utf-8")
    answer = run("inspect", path)
    assert (
        "its layers are those of qwen3-4b, quantised otherwise (" in answer.err
        and "activations per_token)" in answer.err
    )
    assert f"`layerfuse plan {path}` plans it" in answer.err and "layerfuse plan qwen3-4b" not in answer.err
    planned = " ".join(run("plan", path, "--target", "sm90", "--engine", "vllm").out.split())
    assert "as published" not in planned and f"{path} says (see --quant):" in planned
    assert "silu_mul_per_token_quant 36 36 [" in planned
    path.write_text(json.dumps(config), encoding="utf-8")
    assert "`layerfuse plan qwen3-4b` knows it without an entry" in run("inspect", path).err


def test_a_plan_says_that_a_quantisation_is_not_read(run, tmp_path):
    """As `inspect` notes it: of a copy of a declared model, and of one that is planned by its config alone."""
    config = read_config(next(path for path in CHECKPOINTS if path.parent.name == "qwen3-4b"))
    path = tmp_path / "config.json"
    for other in ({}, {"num_hidden_layers": 3}):
        unknown = {**config, **other, "quantization_config": {"quant_method": "other"}}
        path.write_text(json.dumps(unknown), encoding="utf-8")
        (line,) = [line for line in run("plan", tmp_path).err.splitlines() if "quantization_config" in line]
        assert line.startswith(f"layerfuse: {path}: quantization_config is not read: its quant_method is 'other'")
        assert line.removeprefix(f"layerfuse: {path}: ") in run("inspect", path).out
        path.write_text(json.dumps({**config, **other}), encoding="utf-8")
        assert "quantization_config" not in run("plan", tmp_path).err


def test_modelopts_own_file_says_how_a_checkpoint_is_quantised_where_its_config_does_not(run, tmp_path):
    config = read_config(next(path for path in CHECKPOINTS if path.parent.name == "qwen3-4b"))
    path, beside = tmp_path / "config.json", tmp_path / "hf_quant_config.json"
    path.write_text(json.dumps(config), encoding="utf-8")

    def says(algorithm, **more):
        held = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"], **more}
        beside.write_text(json.dumps({"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": held}))

    says("FP8")
    for asked in (tmp_path, path):
        (entry,) = json.loads(run("inspect", asked, "--json").out)["entry"]["models"].values()
        (table,) = entry["quant"].values()
        assert table == {
            "linears": ["attention", "mlps"],
            "weight": "float8_e4m3fn",
            "scheme": "tensor",
            "activation": "static",
            "method": "modelopt",
            "source": f"hf_quant_config.json beside {asked}",
        }
        planned = json.loads(run("plan", asked, "--target", "sm90", "--engine", "vllm", "--json").out)
        assert planned["published"] == ["attention, mlps in float8_e4m3fn, one scale per tensor; activations static"]
    says("nvfp4", group_size=16)  # vLLM reads it in small letters too
    assert "activations nvfp4" in run("inspect", path).err
    says("MIXED_PRECISION")
    said = "hf_quant_config.json is not read: its quant_algo is 'MIXED_PRECISION'; declare it under quant"
    assert said in run("inspect", path).out
    assert f"layerfuse: {path}: {said}" in run("plan", path).err
    says("FP8", exclude_modules="lm_head")
    refused = run("inspect", path)
    assert refused.code and f"{path}: hf_quant_config.json: exclude_modules: expected a list of texts" in refused.err
    beside.write_text("[]", encoding="utf-8")
    refused = run("plan", path)
    assert refused.code and f"{beside}: expected a JSON object, got list" in refused.err
    # What config.json says goes first, as in engines; a file of another name has no such file beside it.
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    says("FP8")
    path.write_text(json.dumps({**config, "quantization_config": fp8}), encoding="utf-8")
    assert "blocks of 128 x 128; activations group128" in run("inspect", path).err
    other = tmp_path / "other.json"
    other.write_text(json.dumps(config), encoding="utf-8")
    assert "float8_e4m3fn" not in run("inspect", other).out


def test_the_name_of_a_declared_model_is_no_config_and_what_shows_it_is_said(run):
    for name in ("deepseek-v3", "deepseek-ai/DeepSeek-V3"):
        answer = run("inspect", name)
        assert answer.code == 2
        assert f"`layerfuse specs {name}` and `layerfuse plan {name}` show" in " ".join(answer.err.split())
    assert "declared" not in run("inspect", "nowhere").err
