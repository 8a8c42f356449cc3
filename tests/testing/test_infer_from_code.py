"""What `inspect` learns from transformers' own code, of models that no entry declares: published defaults of its configs."""

import re
import sys

import attrs
import pytest
from helpers import ROOT

from layerfuse import fusion, registry
from layerfuse.adapters import ActivationQuant, Adapter, GatedMLPSpec, GQASpec, ResidualSpec
from layerfuse.registry import files
from layerfuse.registry.inspect import ConfigError, inspect
from layerfuse.testing import full_model, small_model
from layerfuse.testing.infer_from_code import ask_code
from layerfuse.testing.models import published_model
from layerfuse.testing.run import run_contract

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

sys.path.append(str(ROOT / "tests" / "adapters"))
from fake_ranks import ranks, with_plan  # noqa: E402


def undeclared():
    """Built-in layer classes and no model: what is asked here must not be known from an entry."""
    own = registry.Registry()
    for adapter in registry.adapters().values():
        if adapter.name in ("deepseek_v3", "kimi_linear", "kimi_k2", "qwen3_next", "gpt_oss"):
            own.register_adapter(adapter)
    own.register_adapter(Adapter("decoders", layers={}))  # of many models, which are to be unknown here
    return own


def asked(config, **changes):
    own = undeclared()
    values = getattr(transformers, config)(**changes).to_dict()
    return ask_code(inspect(values, registry=own, name="mine"), own), own


@pytest.mark.parametrize(
    ("config", "epsilons"),
    [
        ("MiniCPM3Config", {"latent_norm_eps": 1e-6}),
        ("DeepseekV3Config", {"latent_norm_eps": 1e-6}),
        ("OlmoHybridConfig", {"output_norm_eps": 1e-5}),
        ("YoutuConfig", {}),
    ],
)  # fmt: skip
def test_the_epsilons_of_the_code_are_found(config, epsilons):
    changes = {"rms_norm_eps": 1e-5} if config == "DeepseekV3Config" else {}  # as Moonlight has it
    entry = asked(config, **changes)[0].entry
    found = (
        {
            name: value
            for name, value in attrs.asdict(entry.engines["transformers"]).items()
            if name.endswith("eps") and value is not None
        }
        if entry.engines
        else {}
    )
    assert found == epsilons


PROPOSED = [
    *("MiniCPM3Config", "YoutuConfig", "Mistral4Config", "OlmoHybridConfig", "Gemma3TextConfig", "AXK1Config"),
    *("Olmo2Config", "Olmo3Config", "Gemma2Config", "Qwen3NextConfig", "Qwen3MoeConfig", "GraniteConfig"),
    *("Phi3Config", "Glm4Config", "GotOcr2Config"),
]


@pytest.mark.parametrize("config", PROPOSED)
def test_what_is_proposed_keeps_the_contract(config):
    found, own = asked(config, num_hidden_layers=4)
    own.register_models(files.parse(found.toml()), "inspect")
    results = run_contract("mine", registry=own, full=False)
    # Small models of this one have dense MLPs, of a class that no layer of the config has.
    apart = ("C2", "C11", "C14") if config == "Qwen3MoeConfig" else ("C11", "C14")
    assert {result.outcome for result in results if result.scenario not in apart} == {"passed"}, results


def test_sinks_that_no_config_says_are_found():
    found, _ = asked("GraniteSWAConfig")
    assert {kind.has_sinks for kind in found.entry.layers.values()} == {True}
    assert not any("has_sinks" in note for note in found.notes)
    assert {kind.has_sinks for kind in asked("LlamaConfig")[0].entry.layers.values()} == {False}


def streams_of(entry):
    return {
        (len(spec.input_norms), spec.input_norm and spec.input_norm.weight_offset, spec.added_as_given)
        for _, spec in entry.specs()
        if isinstance(spec, ResidualSpec)
    }


@pytest.mark.parametrize(
    ("config", "streams"),
    [
        ("LlamaConfig", {(1, 0.0, True)}),
        ("Gemma3TextConfig", {(1, 1.0, False)}),  # four norms, two of which read the stream
        ("Qwen3NextConfig", {(1, 1.0, True)}),
        ("Olmo2Config", {(0, None, False)}),
        ("OlmoHybridConfig", {(0, None, False), (1, 0.0, True)}),
        ("GraniteConfig", {(1, 0.0, False)}),  # a factor on what the blocks give
        ("AXK1Config", {(1, 0.0, False)}),  # a norm at the end of each mixture
    ],
)
def test_where_the_norms_stand_is_seen_in_the_code(config, streams):
    found, _ = asked(config)
    assert streams_of(found.entry) == streams
    assert not any("where the norms stand" in note or "norm_weight_offset" in note for note in found.notes)


def test_gemmas_norm_before_the_mlp_is_the_one_that_reads_the_stream():
    words = asked("Gemma3TextConfig")[0].entry.layer_classes["transformers:Gemma3DecoderLayer"]
    assert [norm["module"] for norm in words["post_attention_norms"]] == ["pre_feedforward_layernorm"]


MIXED = ["Glm5NextConfig", "HYV4Config", "Qwen4ExpConfig", "DeepseekV4Config", "Gemma3nConfig", "MuseSparkConfig"]


@pytest.mark.parametrize("config", MIXED)
def test_a_stream_that_is_mixed_is_refused_by_the_name_of_its_key(config):
    with pytest.raises(ConfigError, match=r"(hc_|altup_|residual_gate)\w+ = .*: a residual stream that is mixed"):
        asked(config)


DRAFTS = {
    "HYV4Config": "transformers:HYV4DecoderLayer could not be read: its forward does something else with the residual stream",
    "CohereConfig": "transformers:CohereDecoderLayer could not be read: its forward does something else with the residual stream",
    "DogeConfig": "32 x ResidualSpec are declared, and 0 were read off the layers of DogeForCausalLM",
    "JetMoeConfig": "transformers:JetMoeAttention could not be read",
    "Exaone4Config": "declared as layers.3.full: sliding_window: declared None, read 4096",
    "MuseGlimmerConfig": "the norms of the stream add 0.0 and 1.0 to their weight, and an entry has one norm_weight_offset",
    "MinistralConfig": "transformers builds no model of this config, so that no layer was checked: TypeError",
    "BitNetConfig": "transformers:BitNetMLP could not be read: its forward is not down_proj(relu2(gate) * up)",
    "MiniMaxM3VLTextConfig": "MiniMaxM3VLDenseMLP) does not say its activation",
    "Phi4MultimodalConfig": "no adapter reads torch.nn.modules.activation:MultiheadAttention",
}


@pytest.mark.parametrize("config", DRAFTS)
def test_what_the_code_does_not_bear_out_is_a_draft(config):
    """HYV4 says nothing of its streams here, Cohere's attention and MLP read one norm, Doge's adds are weighted, JetMoe's parts have
    other names, Exaone's full layers hold a window that they do not use, BitNet norms what its gate gives, MiniMax-M3 adds 1 to up."""
    values = getattr(transformers, config)().to_dict()
    values = {key: value for key, value in values.items() if not key.startswith("hc_")}
    own = undeclared()
    found = ask_code(inspect({"rms_norm_eps": 1e-5, **values}, registry=own, name="mine"), own)
    assert sum(DRAFTS[config] in problem for problem in found.problems) == 1
    assert files.parse(found.toml()) == {}
    assert "# [models.mine.layers" in found.toml()


@pytest.mark.parametrize(
    "config", ["CwmConfig", "Phi3Config", "GlmConfig", "Glm4Config", "SeedOssConfig", "ArceeConfig"]
)
def test_no_layer_stays_unknown_of_what_is_no_draft(config):
    """Cwm's config class takes no null for a token, SeedOss drops out behind its MLP, Arcee's MLP has no gate."""
    found, own = asked(config)
    assert found.problems == ()
    own.register_models(files.parse(found.toml()), "inspect")
    assert own.unknown_in(full_model(own.model("mine"))) == []


@pytest.mark.parametrize("config", ["Phi3Config", "GlmConfig"])
def test_gate_and_up_in_one_linear_are_read(config):
    values = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 384, "hidden_act": "gelu_pytorch_tanh"}
    found, own = asked(config, **values)
    own.register_models(files.parse(found.toml()), "inspect")
    model = published_model(found.entry, found.config)
    spec = own.spec_for(model.model.layers[1].mlp, path="model.layers.1.mlp")
    assert (spec.hidden_size, spec.intermediate_size, spec.activation) == (256, 384, "gelu_tanh")
    assert (spec.layer_index, spec.local_intermediate_size) == (1, 384)


def test_what_comes_out_of_merged_linears_is_whole_on_every_rank():
    """transformers' own plan gathers it, as the forward cuts it into its parts, and splits it again for the linear behind."""
    found, own = asked("Phi3Config", num_hidden_layers=1)
    own.register_models(files.parse(found.toml()), "inspect")
    with ranks((2,), ("tp",)) as mesh:
        model = with_plan(published_model(found.entry, found.config), mesh)
        specs = {type(spec): spec for _, spec in own.specs_in(model)}
    assert (specs[GQASpec].num_local_heads, specs[GatedMLPSpec].local_intermediate_size) == (32, 8192)
    assert [specs[kind].parallel.size for kind in (GQASpec, GatedMLPSpec, ResidualSpec)] == [1, 1, 2]


def test_the_norms_in_front_of_merged_linears_quantise_as_those_do():
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    found, own = asked("Phi3Config", num_hidden_layers=2)
    own.register_models(files.parse(found.toml()), "inspect")
    fp8 = transformers.FineGrainedFP8Config()
    model = finegrained.replace_with_fp8_linear(published_model(found.entry, found.config), ["lm_head"], fp8, True)
    stream = next(spec for _, spec in own.specs_in(model) if isinstance(spec, ResidualSpec))
    norms = (stream.input_norm, stream.post_attention_norm)
    assert [norm.quant for norm in norms] == [ActivationQuant(group_size=128)] * 2


@pytest.mark.usefixtures("_op_by_op")
def test_strict_takes_what_inspect_calls_complete():
    found, own = asked("Phi3Config", num_hidden_layers=2)
    own.register_models(files.parse(found.toml()), "inspect")
    made = fusion.compile(small_model(own.model("mine"), layers=2), registry=own, strict=True)
    with torch.no_grad():
        made(torch.arange(6)[None], use_cache=False)
    assert len(made.report.of("add_rms_norm").matched) == 4


@pytest.mark.parametrize(
    ("config", "attention"), [("Qwen3VLConfig", "Qwen3VLTextAttention"), ("InternVLConfig", "Qwen2Attention")]
)
def test_the_language_model_inside_of_another_is_asked(config, attention):
    """transformers has Qwen3-VL's only without a head; InternVL's config names the type of its own."""
    own = undeclared()
    found = ask_code(inspect(getattr(transformers, config)().to_dict(), registry=own, name="mine"), own)
    assert found.problems == () and not any("was not asked" in note for note in found.notes)
    assert f"transformers:{attention}" in found.entry.layer_classes


def test_every_layer_of_mistral_slides_as_only_its_config_says():
    found, _ = asked("MistralConfig")
    assert found.problems == ()
    assert found.entry.layers["sliding"].sliding_window == 4096


def test_a_model_without_a_window_whose_config_takes_a_number_alone_is_built():
    found, own = asked("FlintConfig", num_hidden_layers=2)
    own.register_models(files.parse(found.toml()), "inspect")
    assert {spec.sliding_window for _, spec in own.specs_in(small_model(own.model("mine")), of=GQASpec)} == {None}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("LlamaConfig", "its MLPs are gated, with silu: declare their widths under mlps"),
        ("GptOssConfig", "no gated MLP of a known form was found"),
        ("Phi3Config", "its MLPs are gated, with silu: declare their widths under mlps"),
        ("ArceeConfig", "transformers:ArceeMLP could not be read: its parts have other names"),
    ],
)
def test_what_is_known_of_the_mlps_is_said(config, said):
    found, _ = asked(config)
    assert sum(said in note for note in found.notes) == 1
    assert not any("whether an MLP is gated" in note for note in found.notes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"softmax_scale": 0.5}, "softmax_scale: declared 0.5, read 0.088"),
        ({"num_kv_heads": 8}, "num_kv_heads: declared 8, read 32; "),
        ({"has_sinks": True}, "has_sinks: declared True, read False"),
    ],
)
def test_what_the_code_says_otherwise_makes_a_draft(changes, said):
    own = undeclared()
    found = inspect(transformers.LlamaConfig(num_hidden_layers=2).to_dict(), registry=own, name="mine")
    wrong = attrs.evolve(found.entry, layers={"full": attrs.evolve(found.entry.layers["full"], **changes)})
    problems = ask_code(attrs.evolve(found, entry=wrong), own).problems
    assert "; ".join([*problems, ""]).startswith(
        f"model.layers.0.self_attn (LlamaForCausalLM), declared as layers.0.full: {said}"
    )


def test_an_entry_that_cannot_be_registered_is_a_draft():
    own = undeclared()
    found = inspect(transformers.LlamaConfig().to_dict(), registry=own, name="decoders")
    (problem,) = ask_code(found, own).problems
    assert problem.startswith("the adapter decoders is declared differently by the registry and by the entry")


def test_a_value_that_transformers_does_not_know_is_named_by_its_key():
    said = "hidden_act: transformers .* does not know 'foo': correct it in the config, or take it out$"
    found, _ = asked("Qwen3Config", num_hidden_layers=2, hidden_act="foo")
    (problem,) = found.problems
    assert re.search(said, problem)


def test_what_cannot_be_asked_is_said(monkeypatch):
    found = inspect(transformers.LlamaConfig().to_dict(), registry=undeclared(), name="mine")
    of_nobody = {**found.config, "model_type": "of-nobody"}
    unknown = attrs.evolve(found, config=of_nobody, entry=attrs.evolve(found.entry, model_type="of-nobody"))
    assert (
        f"was not asked, and no layer was checked: transformers {transformers.__version__} builds no language model"
        in ask_code(unknown, undeclared()).notes[-1]
    )
    monkeypatch.setitem(sys.modules, "transformers", None)
    notes = ask_code(found, undeclared()).notes
    assert notes[:-1] == found.notes
    assert "of its own, was not asked, and no layer was checked: transformers is not installed" in notes[-1]


@pytest.mark.parametrize(
    ("names", "others"),
    [
        (["Qwen3ForCausalLM"], []),
        (["Qwen3ForSequenceClassification"], []),
        (["MineForCausalLM"], ["MineForCausalLM"]),
        (["LlamaForCausalLM"], ["LlamaForCausalLM"]),
    ],
)  # fmt: skip
def test_a_class_of_other_code_is_named(names, others):
    values = {**transformers.Qwen3Config(num_hidden_layers=2).to_dict(), "architectures": names}
    found = ask_code(inspect(values, registry=registry.default, name="mine"), registry.default)
    said = [note for note in found.notes if "which is not of transformers' model_type qwen3" in note]
    assert [note.split()[3].rstrip(",") for note in said] == others
    assert all("what was checked are the layers of Qwen3ForCausalLM" in note for note in said)


def test_a_declared_model_is_not_asked_again():
    found = inspect(transformers.DeepseekV3Config(**V3).to_dict(), registry=registry.default)
    assert found.same_as
    assert ask_code(found, registry.default) is found


GEMMA = {
    "num_hidden_layers": 26,
    "hidden_size": 1152,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "intermediate_size": 6912,
    "sliding_window": 512,
    "query_pre_attn_scalar": 256,
}


@pytest.mark.parametrize(
    ("config", "changes", "name"),
    [
        ("OlmoHybridConfig", {}, "olmo-hybrid-7b"),
        ("MiniCPM3Config", {}, "minicpm3-4b"),
        ("Gemma3TextConfig", GEMMA, "gemma-3-1b"),
        ("YoutuConfig", {}, "youtu-llm-2b"),
    ],
)
def test_what_the_code_of_a_declared_architecture_does_is_known_without_asking(config, changes, name):
    """Where its norms stand, what it does before it adds, and epsilons of its own."""
    values = getattr(transformers, config)(**changes).to_dict()
    assert inspect(values, registry=registry.default).same_as == (name,)
    other = inspect({**values, "intermediate_size": 2048}, registry=registry.default)
    assert other.same_as == ()
    assert streams_of(other.entry) == streams_of(registry.model(name))


V3 = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}}


def test_the_entry_and_the_layers_of_the_real_model_agree():
    found, own = asked("GraniteSWAConfig")
    own.register_models(files.parse(found.toml()), "inspect")
    read = [spec for _, spec in own.specs_in(full_model(own.model("mine"))) if isinstance(spec, GQASpec)]
    assert read == [spec for _, spec in own.model("mine").specs(engine="transformers") if isinstance(spec, GQASpec)]
