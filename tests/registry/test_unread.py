"""What nobody reads is named: layers that were declared in part, layers in a module of one's own. And nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from standins import layer_class, module
from torch import nn

from layerfuse import fusion, registry
from layerfuse.adapters import Adapter, Facts, FinalNormSpec
from layerfuse.fusion import FusionMissedError
from layerfuse.registry import Registry, files

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
CLASSES = {
    "Attention": 'like = "transformers:LlamaAttention"',
    "DecoderLayer": 'like = "transformers:LlamaDecoderLayer"',
    "MLP": 'like = "transformers:LlamaMLP"',
    "Model": 'like = "transformers:LlamaModel"',
}


def helium() -> Any:
    return transformers.HeliumForCausalLM(transformers.HeliumConfig(**SMALL)).eval()


def knowing(*classes: str) -> Registry:
    """A registry that knows these classes of Helium besides, each like Llama's."""
    made = Registry()
    made.register_adapters(list(registry.adapters().values()), "layerfuse")
    tables = "\n".join(f'"transformers:Helium{name}" = {{ {CLASSES[name]} }}' for name in classes)
    made.register_models(
        files.parse(f"""
[models."helium"]
adapter = "gpt_oss"
source = "this file"
num_hidden_layers = 2
hidden_size = 64
rms_norm_eps = 1e-5
layers.full = {{ family = "gqa", num_heads = 4, num_kv_heads = 4, head_dim = 16, sliding_window = "off", has_sinks = false }}

[models."helium".layer_classes]
{tables}
"""),
        "tests",
    )
    return made


def kinds(model: nn.Module, asked: Registry = registry.default) -> dict[str, str]:
    """Path -> what it is said to be: the name of its class, and of a spec."""
    found = {}
    for path, what in asked.unknown_in(model):
        cls, _, spec = what.partition(":")[2].partition(":")[0].partition(" as ")
        found[path] = f"{cls} as {spec}" if spec else cls
    return found


LAYERS = ("model.layers.0", "model.layers.1")


@pytest.mark.parametrize(
    ("declared", "named"),
    [
        ("Attention DecoderLayer MLP Model", {}),
        ("Attention DecoderLayer MLP", {"model": "HeliumModel as FinalNormSpec"}),
        ("Attention DecoderLayer Model", {f"{layer}.mlp": "HeliumMLP as GatedMLPSpec" for layer in LAYERS}),
        ("Attention MLP Model", dict.fromkeys(LAYERS, "HeliumDecoderLayer as ResidualSpec")),
        ("Attention", dict.fromkeys(LAYERS, "HeliumDecoderLayer as ResidualSpec")),
        ("DecoderLayer MLP Model", {f"{layer}.self_attn": "HeliumAttention" for layer in LAYERS}),
    ],
)
def test_each_part_that_an_entry_leaves_out_is_named(declared: str, named: dict[str, str]) -> None:
    assert kinds(helium(), knowing(*declared.split())) == named


def test_what_is_missing_says_what_to_declare() -> None:
    modeling = "transformers.models.helium.modeling_helium"
    assert knowing("Attention", "DecoderLayer").unknown_in(helium())[:2] == [
        (
            "model",
            f"{modeling}:HeliumModel as FinalNormSpec: its norm stands beside decoder layers that are read; declare the "
            'class under layer_classes, like one that is known or with family = "final"',
        ),
        (
            "model.layers.0.mlp",
            f"{modeling}:HeliumMLP as GatedMLPSpec: a gated MLP by its gate_proj, up_proj and down_proj; declare the class "
            'under layer_classes, like one that is known or with family = "gated_mlp"',
        ),
    ]


@pytest.mark.usefixtures("_op_by_op")
def test_strict_refuses_an_entry_in_part_and_takes_it_whole() -> None:
    given = torch.arange(6)[None]
    part = fusion.compile(helium(), registry=knowing("Attention", "DecoderLayer", "MLP"), strict=True)
    with torch.no_grad(), pytest.raises(FusionMissedError, match=r"model: .*HeliumModel as FinalNormSpec"):
        part(given, use_cache=False)
    assert "unknown: model: no adapter knows transformers" in str(part.report)
    torch._dynamo.reset()
    whole = fusion.compile(helium(), registry=knowing(*CLASSES), strict=True)
    with torch.no_grad():
        whole(given, use_cache=False)
    assert len(whole.report.of("add_rms_norm").matched) == 4


# ---- somebody's own module around known layers


def qwen() -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL))


class Own(nn.Module):
    """A module that no adapter knows, with these children in this order."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def wrapped(inner: nn.Module) -> nn.Module:
    return Own(_orig_mod=inner)


AROUND: dict[str, tuple[Callable[[Any], nn.Module], str | None]] = {
    "a list and a norm": (lambda q: Own(embed=q.embed_tokens, blocks=q.layers, norm=q.norm), ""),
    "in another module": (lambda q: Own(trunk=Own(blocks=q.layers, norm=q.norm)), "trunk"),
    "torch's norm": (lambda q: Own(blocks=q.layers, final=nn.RMSNorm(64)), ""),
    "a wrapped norm": (lambda q: Own(blocks=q.layers, norm=wrapped(q.norm)), ""),
    "wrapped layers": (lambda q: Own(blocks=nn.ModuleList(map(wrapped, q.layers)), norm=q.norm), ""),
    "a dictionary": (lambda q: Own(parts=nn.ModuleDict({"h": q.layers, "norm": q.norm})), ""),
    "a sequence": (lambda q: Own(all=nn.Sequential(q.embed_tokens, *q.layers, q.norm)), ""),
    "layers by name": (lambda q: Own(first=q.layers[0], second=q.layers[1], norm=q.norm), ""),
    "no norm": (lambda q: Own(blocks=q.layers, head=nn.Linear(64, 64)), None),
    "no RMS norm": (lambda q: Own(blocks=q.layers, norm=nn.LayerNorm(64)), None),
    "a norm that is defined first": (lambda q: Own(norm=q.norm, embed=q.embed_tokens, blocks=q.layers), ""),
    "defined first, layers by name": (lambda q: Own(norm=q.norm, first=q.layers[0], second=q.layers[1]), ""),
    "a norm behind before one in front": (
        lambda q: Own(embedding_norm=nn.RMSNorm(64), blocks=q.layers, norm=q.norm),
        "",
    ),
    "around the trunk, which has a norm in front": (
        lambda q: Own(trunk=Own(embedding_norm=nn.RMSNorm(64), blocks=q.layers), norm=q.norm),
        "",
    ),
    "around the trunk": (lambda q: Own(trunk=Own(blocks=q.layers), norm=q.norm), ""),
    "around the trunk, defined first": (lambda q: Own(norm=q.norm, trunk=Own(trunk=Own(blocks=q.layers))), ""),
    "in the head": (lambda q: Own(blocks=q.layers, head=Own(norm=q.norm, lm_head=nn.Linear(64, 64))), ""),
    "behind the trunk in a sequence": (lambda q: Own(all=nn.Sequential(Own(blocks=q.layers), q.norm)), ""),
    "in front in a sequence": (lambda q: Own(all=nn.Sequential(q.embed_tokens, q.norm, *q.layers)), None),
    "two norms in front": (
        lambda q: Own(enorm=nn.RMSNorm(64), hnorm=nn.RMSNorm(64), eh_proj=nn.Linear(128, 64), block=q.layers[0]),
        None,
    ),
    "the list alone": (lambda q: q.layers, None),
    "one layer": (lambda q: q.layers[0], None),
    "one layer, wrapped": (lambda q: wrapped(q.layers[0]), None),
    "the model, wrapped": (lambda q: Own(_fsdp_wrapped_module=q), None),
    "a stage without the norm": (lambda q: Own(blocks=q.layers, norm=nn.Identity()), None),
    "a stage without the last layer": (
        lambda q: Own(blocks=nn.ModuleList([q.layers[0], module("engine.utils:PPMissingLayer")]), norm=q.norm),
        None,
    ),
}


@pytest.mark.parametrize(("around", "named"), AROUND.values(), ids=AROUND)
def test_the_norm_behind_known_layers_is_named_where_it_runs(
    around: Callable[[Any], nn.Module], named: str | None
) -> None:
    found = kinds(around(qwen().model))
    assert found == ({} if named is None else {named: "Own as FinalNormSpec"})


def test_the_norm_of_the_layers_goes_before_that_of_a_projector() -> None:
    q = qwen().model
    projector = Own(norm=nn.RMSNorm(64), linear=nn.Linear(64, 64))
    ((_, said),) = registry.unknown_in(Own(trunk=Own(blocks=q.layers), projector=projector, final=q.norm))
    assert "FinalNormSpec: its final stands beside" in said
    trunk = Own(final=q.norm, blocks=q.layers)
    ((path, said),) = registry.unknown_in(Own(trunk=trunk, projector=projector))
    assert path == "trunk" and "FinalNormSpec: its final stands beside" in said


def test_a_final_norm_that_torch_s_own_module_holds_says_what_to_do() -> None:
    q = qwen().model
    ((path, said),) = registry.unknown_in(nn.Sequential(Own(blocks=q.layers), q.norm, nn.Linear(64, 64)))
    assert path == ""
    assert said == (
        "torch.nn.modules.container:Sequential as FinalNormSpec: its 1 stands beside decoder layers that are read; put both "
        "into a class of your own, and declare that"
    )


def test_what_is_named_is_declared_with_words_of_its_own() -> None:
    """The norm that the module around the trunk holds, and the one in the head beside it."""
    q = qwen().model
    made = knowing()
    for name, norm in (("Around", "norm"), ("WithHead", "head.norm")):
        words = {
            "hidden_size": "trunk.blocks.-1.hidden_size",
            "layer_index": {"path": "trunk.blocks", "as": "length"},
            "tp_weight": "trunk.blocks.-1.self_attn.o_proj.in_features",
            "final_norm": norm,
        }
        made.register_adapter(Adapter(name.lower(), {f"mylib.models:{name}": Facts(FinalNormSpec, words)}))
    head = Own(norm=q.norm, lm_head=nn.Linear(64, 64))
    for name, part in (("Around", {"norm": q.norm}), ("WithHead", {"head": head})):
        model = Own(trunk=Own(blocks=q.layers), **part)
        assert set(kinds(model)) == {""}
        model.__class__ = layer_class(f"mylib.models:{name}", nn.Module)
        assert made.unknown_in(model) == []
        assert made.specs_in(model)[-1][1].final_norm.width == 64


def test_known_models_are_read_whole_in_whatever_wraps_their_parts() -> None:
    model = qwen()
    for layer in model.model.layers:
        layer.self_attn = wrapped(layer.self_attn)
        layer.mlp.gate_proj = Own(base_layer=layer.mlp.gate_proj, lora_A=nn.Linear(64, 4), lora_B=nn.Linear(4, 64))
    assert registry.unknown_in(model) == registry.unknown_in(model.model) == []


def test_a_decoder_layer_of_another_kind_beside_known_ones_is_named() -> None:
    model = qwen()
    mixer = Own(mixer=nn.Linear(64, 64), norm=nn.RMSNorm(64))
    model.model.layers.extend([mixer, wrapped(mixer), nn.Identity(), nn.Linear(64, 64)])
    assert kinds(model) == {"model.layers.2": "Own as ResidualSpec"}


def test_a_decoder_layer_around_attention_that_lies_deeper_is_named() -> None:
    attention = qwen().model.layers[0].self_attn
    model = Own(layers=nn.ModuleList([Own(norm=nn.RMSNorm(64), block=Own(attn=wrapped(attention)))]))
    assert kinds(model) == {"layers.0": "Own as ResidualSpec"}
    # Norms of what attention gives to somebody else's layer, torch's own, tell of no stream.
    assert kinds(Own(layers=nn.ModuleList([Own(norm=nn.LayerNorm(64), attn=attention)]))) == {}


def test_attention_of_any_name_in_a_known_layer_is_known_by_its_children() -> None:
    model = qwen()
    attention = model.model.layers[0].self_attn
    attention.__class__ = layer_class("mylib.layers:TokenMixer", nn.Module)
    assert kinds(model) == {"model.layers.0.self_attn": "TokenMixer"}


class _Norms(nn.ModuleList):
    pass


@pytest.mark.parametrize(
    "norms",
    [
        lambda norm: nn.ModuleList([norm, nn.Identity()]),
        lambda norm: nn.ModuleList([nn.ModuleList([norm]), nn.Dropout()]),
        lambda norm: nn.ModuleDict({"before": norm, "after": nn.Identity()}),
        lambda norm: _Norms([norm, nn.Dropout()]),
    ],
    ids=["beside others", "in lists of lists", "in a dict", "in a list of its own class"],
)
def test_norms_of_an_unknown_decoder_layer_may_lie_in_any_list(norms: Callable[[nn.Module], nn.Module]) -> None:
    layer = qwen().model.layers[0]
    model = Own(blocks=nn.ModuleList([Own(norms=norms(layer.input_layernorm), attn=layer.self_attn)]))
    assert kinds(model) == {"blocks.0": "Own as ResidualSpec"}


def test_experts_and_towers_are_left_alone_and_other_gated_mlps_named() -> None:
    model = qwen()

    def mlp(*names: str) -> nn.Module:
        return Own(**{name: nn.Linear(4, 4) for name in names})

    three = ("gate_proj", "up_proj", "down_proj")
    mixture = Own(
        gate=nn.Linear(64, 2), experts=nn.ModuleList([mlp("w1", "w2", "w3"), mlp(*three)]), shared=mlp(*three)
    )
    first, second = model.model.layers
    first.mlp, second.mlp = mixture, mlp("gate_up_proj", "down_proj")
    first.moe, second.moe = mlp("router", "input_linear", "output_linear"), mlp("input_linear", "output_linear")
    tower = Own(blocks=nn.ModuleList([Own(norm=nn.RMSNorm(4), mlp=mlp(*three))]), norm=nn.RMSNorm(4))
    assert kinds(Own(tower=tower, language=model)) == {
        "language.model.layers.0.mlp.shared": "Own as GatedMLPSpec",
        "language.model.layers.1.mlp": "Own as GatedMLPSpec",
        "language.model.layers.1.moe": "Own as GatedMLPSpec",
    }


def test_what_an_adapter_ignores_is_left_alone_whatever_it_looks_like() -> None:
    asked = knowing("Attention")
    asked.register_adapter(Adapter("mine", {}, ignored=["transformers:HeliumDecoderLayer"]))
    assert asked.unknown_in(helium()) == []
    assert len(asked.specs_in(helium())) == 2


def test_what_an_adapter_ignores_beside_the_layers_hides_no_norm() -> None:
    asked = knowing("Attention", "DecoderLayer", "MLP")
    before = kinds(helium(), asked)
    asked.register_adapter(Adapter("mine", {}, ignored=["transformers:HeliumRotaryEmbedding"]))
    assert before and kinds(helium(), asked) == before
