"""Every causal language model of transformers, built from its default config: read in full, or said why not in docs/causal-classes.md.

`UPDATE_DOCS=1 pytest` with this file writes the page.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen

from layerfuse import registry
from layerfuse.adapters import (
    FinalNormSpec,
    GatedDeltaNetSpec,
    GatedMLPSpec,
    GQASpec,
    LayerNormSpec,
    Mamba2Spec,
    MLASpec,
    MLPSpec,
    OtherMixerSpec,
    ResidualSpec,
    UnknownLayerError,
)
from layerfuse.registry.inspect import ConfigError, inspect

transformers = pytest.importorskip("transformers")
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES  # noqa: E402

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "causal-classes.md"
LAYERS = 4
WANTED: Mapping[str, Mapping[str, Any]] = {
    **{name: {"head_dim": 128} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1},
    "nemotron": {"num_key_value_heads": 8},
}
"""What a class cannot be built without, and its default config does not say."""


WITH_AN_ENCODER = (
    "Bart BigBirdPegasus Blenderbot BlenderbotSmall MBart Marian Musicgen Mvp PLBart Pegasus TrOCR Whisper"
)
REASONS: Mapping[str, str] = {
    **{
        f"{name}ForCausalLM": "attention to an encoder between its layers' own attention and their MLP, which no spec describes"
        for name in WITH_AN_ENCODER.split()
    },
    "AXK2ForCausalLM": "norms that are multiplied by a gate with weights of its own, which no spec describes",
    "BigBirdForCausalLM": "attention in random blocks, which no spec describes",
    "BitNetForCausalLM": "a norm between the product of its MLPs and their down-projection, which no spec describes",
    "BltForCausalLM": "a stream of patches between two of bytes, with cross-attention, which no spec describes",
    "DiffLlamaForCausalLM": "the difference of two attentions, which no spec describes",
    "DogeForCausalLM": "a stream that is multiplied with weights before others add to it, which no spec describes",
    **dict.fromkeys(
        [f"Gemma4{name}For{what}" for name in ("", "Unified") for what in ("CausalLM", "ConditionalGeneration")],
        "a stream that is multiplied by a weight behind each layer's last add, which no spec describes",
    ),
    "HeliumForCausalLM": "its classes are not declared: they are those of the example in the docs",
    "HrmTextForCausalLM": "two stacks of layers that run in turns over one stream, with norms without weights, which no spec describes",
    "JetMoeForCausalLM": "attention with experts for heads, which no spec describes",
    "MiniMaxM3VLForCausalLM": "MLPs that add 1 to what the gate multiplies and scale the gate's sigmoid, which no spec describes",
    "ModernBertDecoderForCausalLM": "a first layer without a norm in front of its attention, which no spec describes",
    "MoshiForCausalLM": "layers that keep a sliding window and do not use it: its class is not declared",
    "NanoChatForCausalLM": "norms without weights, which no spec describes",
    "XLMWithLMHeadModel": "no module for a layer: its attentions, MLPs and norms are in lists of their own",
    "XLNetLMHeadModel": "attention over two streams, with weights for relative positions, which no spec describes",
    "XmodForCausalLM": "adapters of a language behind its MLPs, with adds of their own, which no spec describes",
    "Zamba2ForCausalLM": "attention layers that several places of the stream share, beside Mamba-2, which no spec describes",
    "xLSTMForCausalLM": "recurrent layers without an index, which are not declared",
}
"""Of classes that are not read, where their config does not tell."""


@frozen
class Answer:
    """One class, and what is read of its layers."""

    name: str
    read: str
    "in full, its stream, in part, no, or not built"
    why: str = ""

    def __str__(self) -> str:
        return f"| `{self.name}` | {self.read} | {self.why or '-'} |"


def answers() -> Iterator[Answer]:
    """Each class once, by name."""
    for name, model_type in sorted({name: model_type for model_type, name in CLASSES.items()}.items()):
        try:
            model, config = built(model_type, name)
        except Exception as error:
            yield Answer(name, "not built", f"its default config raises {type(error).__name__}")
            continue
        yield answer(name, model, config)


def built(model_type: str, name: str) -> tuple[Any, Any]:
    """The model on the meta device, cut to a few layers, and its text config."""
    # The class's own, as the model type may be that of a whole with pictures.
    config = getattr(transformers, name).config_class(**WANTED.get(model_type, {}))
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        cut(part)
    with torch.device("meta"):
        return getattr(transformers, name)(config), config.get_text_config()


def cut(config: Any) -> None:
    """Leave the first layers."""
    total = getattr(config, "num_hidden_layers", None)
    if isinstance(total, int) and total > LAYERS:
        config.num_hidden_layers = LAYERS
        for key, value in list(vars(config).items()):
            if isinstance(value, list) and len(value) == total:
                setattr(config, key, value[:LAYERS])


def answer(name: str, model: Any, config: Any) -> Answer:
    """What of this model is read. Every value that its config says too is compared."""
    try:
        specs = registry.specs_in(model)
    except UnknownLayerError:
        return Answer(name, "no", REASONS.get(name) or why_not(config))
    check(specs, config)
    left = list(dict.fromkeys(what.partition(":")[2].partition(":")[0] for _, what in registry.unknown_in(model)))
    if left:
        return Answer(name, "in part", REASONS.get(name) or f"nobody reads {', '.join(left)}")
    counts = {kind: sum(isinstance(spec, kind) for _, spec in specs) for kind in (ResidualSpec, FinalNormSpec)}
    mixers = [spec for _, spec in specs if isinstance(spec, MIXERS)]
    streams = [spec for _, spec in specs if isinstance(spec, ResidualSpec)]
    post = any(spec.post_norms for spec in streams)
    assert counts[FinalNormSpec] == (not post), (name, counts)
    if all(spec.is_one_block for spec in streams):  # some are MLPs
        assert mixers, name
    else:
        assert mixers and len(mixers) % len(streams) == 0, (name, counts)
    others = sorted({spec.mixer for spec in mixers if isinstance(spec, OtherMixerSpec)})
    if others:
        return Answer(name, "its stream", f"known by name only: {', '.join(others)}")
    plain = [type(m).__name__ for path, m in model.named_modules() if path.endswith(".0.mlp")]
    mlps = any(isinstance(spec, MLPSpec) for _, spec in specs)
    experts = any("expert" in path for path, _ in model.named_modules())
    alone = all(isinstance(spec, Mamba2Spec) for spec in mixers)
    return (
        Answer(name, "in full")
        if mlps or experts or alone
        else Answer(name, "in part", f"{', '.join(plain)} has no gate")
    )


MIXERS = (GQASpec, MLASpec, GatedDeltaNetSpec, Mamba2Spec, OtherMixerSpec)
"""What stands in a decoder layer in front of its MLP."""


def why_not(config: Any) -> str:
    """What `inspect` says of the config that no entry could; else what is left to do."""
    try:
        inspect(json.loads(config.to_json_string(use_diff=False)), registry=registry.default)
    except ConfigError as error:
        return "; ".join(error.problems).replace("|", "\\|").replace("\n", " ")
    return "its classes are not declared"


def check(specs: list[tuple[str, Any]], config: Any) -> None:
    """Heads, widths, windows and epsilons against the config's."""
    heads = said(config, "num_attention_heads")
    kv_heads = said(config, "num_key_value_heads", default=1 if said(config, "multi_query") else heads)
    for path, spec in specs:
        assert spec.hidden_size == config.hidden_size, path
        if isinstance(spec, GQASpec):
            doubled = config.model_type == "mimo_v2_flash" and spec.sliding_window is not None
            of_layer = kv_heads * 2 if doubled else kv_heads
            if config.model_type.startswith("gemma4"):
                layer = config.per_layer_config[spec.layer_index]
                of_layer = layer.num_key_value_heads
                assert spec.head_dim == layer.head_dim, path
            assert (spec.num_heads, spec.num_kv_heads) == (heads, of_layer), path
            assert spec.sliding_window == window(config, spec.layer_index), path
        if isinstance(spec, MLPSpec) and not isinstance(spec, GatedMLPSpec):
            names = ["intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "dff"]
            if path.endswith("shared_experts"):
                names = ["moe_shared_expert_intermediate_size"]
            assert spec.intermediate_size == said(config, *names, default=4 * config.hidden_size), path
        if isinstance(spec, Mamba2Spec):
            check_mamba2(path, spec, config)
    norms = [
        norm for _, spec in specs if isinstance(spec, ResidualSpec) for norm in (*spec.input_norms, *spec.post_norms)
    ]
    names = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "layernorm_epsilon")
    expected = OWN_EPSILONS.get(config.model_type, said(config, *names))
    assert expected is None or {norm.epsilon for norm in norms} <= {expected}


def check_mamba2(path: str, spec: Mamba2Spec, config: Any) -> None:
    """Sizes against the config's."""
    assert (spec.num_heads, spec.head_dim, spec.ssm_state_size, spec.num_groups) == (
        said(config, "mamba_num_heads", "mamba_n_heads", "num_heads"),
        said(config, "mamba_head_dim", "mamba_d_head", "head_dim"),
        said(config, "mamba_d_state", "ssm_state_size", "state_size"),
        said(config, "mamba_n_groups", "n_groups"),
    ), path


OWN_EPSILONS = {"biogpt": 1e-5, "bert-generation": 1e-12}
"""Where transformers' code does not ask the config: torch's own default."""


def said(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these that the config says."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), default)


def window(config: Any, layer: int) -> int | None:
    """The sliding window of one layer, as the config says it."""
    if said(config, "attention_layers") is not None:  # GPT-Neo
        return config.window_size if config.attention_layers[layer] == "local" else None
    kinds = said(config, "layer_types")
    slides = kinds is None or kinds[layer] == "sliding_attention"
    used = getattr(config, "use_sliding_window", True)
    return said(config, "sliding_window") if slides and used else None


def page(found: list[Answer]) -> str:
    """The page of the docs."""
    words = ("in full", "its stream", "in part", "no", "not built")
    counts = {read: sum(each.read == read for each in found) for read in words}
    lines = "\n".join(map(str, found))
    return f"""# Causal language models of transformers

Each class that transformers {transformers.__version__} names as a causal language model, built from its default config, cut to at most {LAYERS} layers, on
the meta device. {counts["in full"]} of {len(found) - counts["not built"]} are read in full: residual stream, attention, delta net or Mamba-2, MLP or experts, final norm (but of those whose
layers end with one). Of {counts["its stream"]} the stream is read, so that it is planned, and its mixers are known by name. {counts["in part"]} are read in part,
{counts["no"]} not at all. {counts["not built"]} cannot be built from their default configs. `make test` reads them again and compares this page.

| class | read | why not |
|---|---|---|
{lines}
"""


def test_every_class_is_read_or_named_with_the_reason() -> None:
    if f"transformers {transformers.__version__} names" not in PAGE.read_text() and not os.environ.get("UPDATE_DOCS"):
        pytest.skip(f"the page is not of transformers {transformers.__version__}")
    found = page(list(answers()))
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(found)
    assert PAGE.read_text() == found


# ---- what no adapter reads is named, of every class

PARTS: Mapping[str, tuple[str, Any]] = {
    "attention": ("Attention", MIXERS),
    "an MLP": ("MLP", GatedMLPSpec),
    "decoder layers": ("DecoderLayer", ResidualSpec),
    "what holds them": ("Model", FinalNormSpec),
}
"""Part -> how its class is called when it is a stranger's, and its specs."""


@contextlib.contextmanager
def of_a_stranger(model: Any, paths: Iterable[str], end: str) -> Iterator[None]:
    """These modules of another class, which holds the same."""
    modules, kept = dict(model.named_modules()), []
    stranger = type(f"Stranger{end}", (torch.nn.Module,), {"__module__": "elsewhere"})
    for path in paths:
        module, (holder, _, name) = stranger.__new__(stranger), path.rpartition(".")
        module.__dict__.update(vars(modules[path]))
        kept.append((modules[holder]._modules, name, modules[path]))
        modules[holder]._modules[name] = module
    try:
        yield
    finally:
        for children, name, module in kept:
            children[name] = module


def fusible(spec: Any) -> bool:
    """Whether any fusion could stand at a layer: none does where LayerNorms read the stream, and an MLP without a gate none begins with."""
    if isinstance(spec, ResidualSpec):
        return any(not isinstance(norm, LayerNormSpec) for norm in (*spec.input_norms, *spec.post_norms))
    return True


def silent_parts(name: str, model: Any) -> list[str]:
    """The parts of a class that nobody would read, and nothing would name, if their class were a stranger's."""
    try:
        specs, found = registry.specs_in(model), []
    except UnknownLayerError:  # says what it does not know by itself
        return []
    modules = dict(model.named_modules())
    for part, (end, kinds) in PARTS.items():
        paths = [path for path, spec in specs if path and isinstance(spec, kinds) and fusible(spec)]
        paths = [path for path in paths if type(modules[path]) is type(modules[paths[0]])]
        with of_a_stranger(model, paths, end):
            named = dict(registry.unknown_in(model))
            with contextlib.suppress(UnknownLayerError):  # that nothing is left to read is said by itself
                assert not {path for path, _ in registry.specs_in(model)}.intersection(paths) - named.keys()
        # A class around it may be named in its place, as BERT's, which only wraps its attention.
        if not all(any(f"{path}.".startswith(f"{other}.") for other in named) for path in paths):
            found.append(f"{name}: {part}, {paths[:2]}")
    return found


BY_ANOTHER_NAME = {"CpmAntForCausalLM"}
"""Whose norms are RMS norms in classes that are called LayerNorm, and lie two modules deep: nothing tells them by their names."""

SAMPLE = (
    "LlamaForCausalLM",
    "DeepseekV3ForCausalLM",
    "LongcatFlashForCausalLM",
    "Gemma3ForCausalLM",
    "Qwen3NextForCausalLM",
    "MixtralForCausalLM",
)


@pytest.mark.parametrize(
    "names", [pytest.param(SAMPLE, id="six"), pytest.param(None, id="all", marks=pytest.mark.thorough)]
)
def test_each_part_of_a_class_is_named_where_no_adapter_reads_it(names: tuple[str, ...] | None) -> None:
    silent, swept = [], 0
    for name, model_type in sorted({name: model_type for model_type, name in CLASSES.items()}.items()):
        if names is not None and name not in names:
            continue
        try:
            model, _ = built(model_type, name)
        except Exception:  # its default config cannot be built: the page says which
            continue
        silent += silent_parts(name, model) if name not in BY_ANOTHER_NAME else []
        swept += 1
    assert not silent and swept >= (100 if names is None else len(names)), (swept, silent)
