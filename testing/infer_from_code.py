"""What transformers' own code says of a config's layers, which no config does: epsilons, sinks, gates, and which classes.

The config's model is built on the meta device, and its layers are read with the facts of classes that are known already. With
what that adds, the entry is registered as it was written and held to the same layers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs
from attrs import field, frozen

from ..adapters.errors import LayerfuseError, said, shown
from ..adapters.reader import LayerReader
from ..adapters.specs import GatedDeltaNetSpec, GatedMLPSpec, GQASpec, MLASpec, ResidualSpec, RopeSpec
from ..registry.declare import facts_from_words
from ..registry.inspect import NO_MLP_SAID, NO_OFFSET_SAID, NO_SINKS_SAID, NO_STREAM_SAID, NOT_DECLARED, Inspection
from ..registry.kind_words import GateWords, Rope, RopeWords
from ..registry.kinds import EngineFacts, GatedDeltaNetKind, GQAKind, MLAKind
from ..registry.mixer_kinds import MLPBlockKind
from .compare import differences
from .contract_case import ContractCase
from .models import NotBuildableError, published_model

if TYPE_CHECKING:
    from ..registry.catalog import ModelEntry
    from ..registry.lookup import Registry

_ATTENTIONS: tuple[Mapping[str, Any], ...] = (
    {"like": "transformers:DeepseekV3Attention"},
    {"like": "transformers:KimiLinearDeltaAttention"},
    {"like": "transformers:Qwen3NextGatedDeltaNet"},
    {
        "like": "transformers:Qwen3NextGatedDeltaNet",
        "output_norm": {
            "module": "o_norm",
            "epsilon": "variance_epsilon",
            "activation": "activation",
            "norm_before_gate": {"const": True},
            "group_size": {"const": "none"},
            "consumers": ["o_proj"],
        },
        "tp_weight": "o_proj.in_features",
    },
    {"like": "transformers:GptOssAttention"},
    {"like": "transformers:GptOssAttention", "has_sinks": {"const": False}},
)
"""What a class that no adapter knows may be like, the most telling first: of what fits, the first is taken."""

_PLAIN_ATTENTION: Mapping[str, Any] = {**_ATTENTIONS[-1], "sliding_window": {"const": "none"}}
"""The last of them: an attention that holds no window of its own. Norms of heads and ropes of unknown code are left open."""

_MERGED_HEADS = {"tp_weight": "qkv_proj.in_features"}
"""Of an attention whose queries, keys and values are one linear. Its output is gathered, so that every rank has all heads."""

_EITHER_KIND = {
    "layer_index": ["self_attn.layer_idx", "linear_attn.layer_idx"],
    "tp_weight": ["self_attn.o_proj.in_features", "linear_attn.o_proj.in_features", "linear_attn.out_proj.in_features"],
}
"""Of a decoder layer that holds either kind of attention."""


_MLP = re.compile(r"(MLP|FeedForward)$")

_MERGED_MLP = {
    "hidden_size": "down_proj.out_features",
    "intermediate_size": "down_proj.in_features",
    "activation": ["act_fn", "activation_fn"],
    # Gathered like merged heads.
    "tp_weight": "gate_up_proj.in_features",
}
"""Of an MLP whose gate and up are one linear (Phi-3, GLM-4)."""


@frozen
class _Asked:
    """What was read, and what could not be."""

    specs: list[Any] = field(factory=list)
    classes: dict[str, Mapping[str, Any]] = field(factory=dict)
    unread: list[str] = field(factory=list)
    "What looks like a layer and fits no known class."


NOT_BUILT = "transformers builds no model of this config"


def why_not_built(error: Exception, config: Mapping[str, Any]) -> str:
    """What a config class or a layer of transformers says of a config that it does not take, on one line."""
    return _of_a_value(error, config) or " ".join(said(error).split())


def ask_code(found: Inspection, registry: Registry) -> Inspection:
    """The same inspection with what transformers' code adds, or with a note of why it could not be asked.

    Its `problems` are what that code contradicts.

    Args:
        found: what a config says.
        registry: whose layer classes are known.
    """
    if found.same_as and found.is_of_type(registry.model(found.same_as[0])):
        return found  # declared, and held to the contract
    try:
        model = published_model(found.entry, found.config)
    except NotBuildableError as error:
        note = f"transformers' code, which may have epsilons and sinks of its own, was not asked, and no layer was checked: {error}"
        return attrs.evolve(found, notes=(*found.notes, note))
    except Exception as error:  # a config class refuses in its own way what it does not take, and so do layers
        problem = f"{NOT_BUILT}, so that no layer was checked: {why_not_built(error, found.config)}"
        return attrs.evolve(found, problems=(problem,))
    offsets = _offsets(model, found.entry.hidden_size)
    offset = offsets.pop() if len(offsets) == 1 else None
    entry = found.entry if offset is None else attrs.evolve(found.entry, norm_weight_offset=offset)
    asked = _read(model, registry, entry)
    entry = _with_answers(entry, asked)
    answered = [NO_SINKS_SAID, NOT_DECLARED, NO_MLP_SAID] if asked.specs else []
    answered += [] if offset is None else [NO_OFFSET_SAID]
    answered += [NO_STREAM_SAID] if any(isinstance(spec, ResidualSpec) for spec in asked.specs) else []
    known = [note for note in found.notes if not note.startswith(tuple(answered))]
    mlps = [] if entry.mlps or not asked.specs else [_about_mlps(asked)]
    problems = list(_contradictions(attrs.evolve(found, entry=entry), model, registry))
    if len(offsets) > 1:
        said_of = " and ".join(sorted(map(str, offsets)))
        problems.append(
            f"the norms of the stream add {said_of} to their weight, and an entry has one norm_weight_offset"
        )
    notes = [*known, *([] if problems else asked.unread), *mlps, *_of_other_code(entry, model)]
    return attrs.evolve(
        found, entry=entry, notes=tuple(dict.fromkeys(notes)), problems=(*(asked.unread if problems else ()), *problems)
    )


def _of_a_value(error: Exception, config: Mapping[str, Any]) -> str | None:
    """What of the config an error is about, where a table of transformers' does not hold a value of it (`ACT2FN`)."""
    wanted = error.args[0] if isinstance(error, KeyError) and error.args else None
    keys = [key for key, value in config.items() if type(value) is str and value == wanted]
    if not keys:
        return None
    from importlib.metadata import version

    release = version("transformers")
    return f"{' or '.join(keys)}: transformers {release} does not know {shown(wanted)}: correct it in the config, or take it out"


def _of_other_code(entry: ModelEntry, model: Any) -> Iterator[str]:
    """Architectures of the config that are not transformers' for its model_type, as those of code that lies beside the weights."""
    import transformers

    for name in entry.architectures:
        config = getattr(getattr(transformers, name, None), "config_class", None)
        if config is None or config.model_type != entry.model_type:
            what = f"the config names {name}, which is not of transformers' model_type {entry.model_type}: what was checked are the layers"
            yield f"{what} of {type(model).__name__}, and those of {name} may be others"


def _offsets(model: Any, hidden_size: int) -> set[float | None]:
    """What the norms of the stream add to their weight, those of the decoder layers and the final one."""
    from .streams import is_norm, weight_offset

    of_stream = re.compile(r"(^|\bmodel\.)(layers\.\d+\.)?\w*norm$")
    # Of a class each is alike, if it is as wide as the stream.
    norms = {type(m): m for path, m in model.named_modules() if is_norm(m) and of_stream.search(path)}
    return {weight_offset(norm, hidden_size) for norm in norms.values()}


def _about_mlps(asked: _Asked) -> str:
    gates = sorted({spec.activation for spec in asked.specs if isinstance(spec, GatedMLPSpec)})
    if gates:
        return f"its MLPs are gated, with {' and '.join(gates)}: declare their widths under mlps"
    return "no gated MLP of a known form was found outside of routed experts, and none was written"


def _read(model: Any, registry: Registry, entry: ModelEntry) -> _Asked:
    asked = _Asked()
    inside = ""
    for path, layer in model.named_modules():
        if inside and path.startswith(inside):
            continue
        candidates = list(_candidates(layer, entry, registry))
        if not candidates:
            continue
        spec = _read_one(path, layer, candidates, registry, asked)
        if isinstance(spec, MLASpec | GQASpec | GatedDeltaNetSpec):
            inside = f"{path}."
        if spec is not None:
            asked.specs.append(spec)
    # A class whose layers differ in it (A.X-K1's dense ones and mixtures) gets the answer that promises less.
    streams = [spec for spec in asked.specs if isinstance(spec, ResidualSpec) and spec.input_norms]
    if not all(spec.added_as_given for spec in streams):
        asked.specs[:] = [attrs.evolve(s, added_as_given=False) if s in streams else s for s in asked.specs]
        for key in [key for key in asked.classes if key.endswith("DecoderLayer")]:
            asked.classes[key] = {**asked.classes[key], "added_as_given": {"const": False}}
    return asked


def _candidates(layer: Any, entry: ModelEntry, registry: Registry) -> Iterator[Mapping[str, Any]]:
    """Words that a class may be read with, the most telling first. Empty ones: it is such a layer, and nothing fits."""
    name, children = type(layer).__name__, {name for name, _ in layer.named_children()}
    prefix = "transformers:Qwen3Next" if entry.norm_weight_offset else "transformers:DeepseekV3"
    if re.search(r"(Attention|Attn|MLA|DeltaNet)$", name):
        # As Mistral's, which slides everywhere.
        slides = all(isinstance(kind, GQAKind) and kind.sliding_window != "off" for kind in entry.layers.values())
        sliding = [{**_PLAIN_ATTENTION, "sliding_window": "config.sliding_window"}] if slides else []
        merged = _MERGED_HEADS if "qkv_proj" in children else {}
        yield from ({**words, **merged} for words in (*_ATTENTIONS, *sliding, _PLAIN_ATTENTION))
    elif name.endswith("DecoderLayer"):
        like = _stream_words(layer, f"{prefix}DecoderLayer", entry, registry)
        yield from ({},) if like is None else (like, {**like, **_EITHER_KIND})
    elif name.endswith("Model") and {"layers", "norm"} <= children:
        yield {"like": f"{prefix}Model"}
    elif {"gate_up_proj", "down_proj"} <= children:
        yield {"like": f"{prefix}MLP", **_MERGED_MLP}
    elif _MLP.search(name):
        yield {"like": f"{prefix}MLP"} if {"gate_proj", "up_proj", "down_proj"} <= children else {}


def _stream_words(layer: Any, like: str, entry: ModelEntry, registry: Registry) -> dict[str, Any] | None:
    """How a decoder layer's norms are declared, by what its forward does; None where no spec describes that."""
    from .streams import USUAL, stream_of

    stream = stream_of(layer, entry.hidden_size)
    if stream is None:
        return None
    words: dict[str, Any] = {"like": like}
    (known,) = registry.adapters()[registry.layer_classes()[like]].layers[like]
    for field_name, norms in (
        ("input_norms", stream.input_norms),
        ("post_attention_norms", stream.post_attention_norms),
    ):
        if norms != getattr(USUAL, field_name):
            words[field_name] = [{**known.words[field_name][0], "module": norm} for norm in norms]
    return words if stream.added_as_given else {**words, "added_as_given": {"const": False}}


def _read_one(
    path: str, layer: Any, candidates: list[Mapping[str, Any]], registry: Registry, asked: _Asked
) -> Any | None:
    from .gates import why_not_gated

    known = registry.readers_for(type(layer))
    if known:
        try:
            return known[0].read(layer, None, path)
        except LayerfuseError:  # which is found when the entry is held to its layers
            return None
    adapters, owners = registry.adapters(), registry.layer_classes()
    key = f"transformers:{type(layer).__name__}"
    refusals = []
    for words in filter(None, candidates):
        facts = facts_from_words(words, lambda like: adapters[owners[like]].layers[like])[0]
        try:
            spec = LayerReader(key, "inspect", facts).read(layer, None, path)
        except LayerfuseError as error:
            refusals.append(str(error).splitlines()[0].removesuffix(". Tried:"))
            continue
        if isinstance(spec, GatedMLPSpec) and (reason := why_not_gated(layer, spec)) is not None:
            refusals.append(reason)
            continue
        asked.classes[key] = words
        return spec
    why = "its parts have other names or another order than those of known classes"
    if refusals == [] and type(layer).__name__.endswith("DecoderLayer"):
        why = "its forward does something else with the residual stream than specs describe: norm it before attention and MLP, or nowhere"
    if len(refusals) == 1:
        why = refusals[0]
    note = f"{key} could not be read: {why}; declare it under layer_classes"
    # Once for a class: why it cannot be read names the layer.
    if not any(other.startswith(f"{key} could not be read") for other in asked.unread):
        asked.unread.append(note)
    return None


def _with_answers(entry: ModelEntry, asked: _Asked) -> ModelEntry:
    """The entry with the epsilons, gates, sinks and norms of the code, and its layer classes."""
    kinds = entry.kind_at()
    own: dict[str, Any] = {}
    as_given = entry.added_as_given
    layers = dict(entry.layers)
    for spec in asked.specs:
        if isinstance(spec, MLASpec):
            epsilons = {norm.epsilon for norm in (spec.q_norm, spec.kv_norm) if norm is not None}
            _own(own, "latent_norm_eps", epsilons, entry.rms_norm_eps)
        elif isinstance(spec, GatedDeltaNetSpec):
            _own(own, "output_norm_eps", {spec.output_norm.epsilon}, entry.rms_norm_eps)
        elif isinstance(spec, ResidualSpec):
            epsilons = {norm.epsilon for norm in (*spec.input_norms, *spec.post_attention_norms)}
            _own(own, "rms_norm_eps", epsilons, entry.rms_norm_eps)
            if spec.input_norms:
                as_given = as_given and spec.added_as_given
            else:
                word = kinds[spec.layer_index]
                if not isinstance(kind := layers[word], MLPBlockKind):
                    layers[word] = attrs.evolve(kind, stream_norms="none")
        for name, kind in layers.items():
            if isinstance(spec, GQASpec) and isinstance(kind, GQAKind):
                sinks, turned = kind.has_sinks or spec.has_sinks, _rope(spec.rope, spec.head_dim)
                layers[name] = attrs.evolve(kind, has_sinks=sinks, qk_norms=spec.q_norm is not None, rope=turned)
            elif isinstance(spec, MLASpec) and isinstance(kind, MLAKind):
                layers[name] = attrs.evolve(kind, rope=_rope(spec.rope, spec.qk_rope_head_dim))
            elif isinstance(spec, GatedDeltaNetSpec) and isinstance(kind, GatedDeltaNetKind):
                layers[name] = attrs.evolve(kind, output_norm=_gate(spec))
    facts = attrs.evolve(entry.engines.get("transformers", EngineFacts()), **own)
    engines = {**entry.engines, "transformers": facts} if own else entry.engines
    return attrs.evolve(
        entry,
        layers=layers,
        engines=engines,
        added_as_given=as_given,
        layer_classes={**entry.layer_classes, **asked.classes},
    )


def _own(own: dict[str, Any], name: str, epsilons: set[float], published: float) -> None:
    """An engine's own epsilon, where there is one: of two that differ no entry can speak, and what is read is noted."""
    if len(epsilons) == 1 and epsilons != {published}:
        own[name] = epsilons.pop()


def _rope(spec: RopeSpec | None, whole: int) -> Rope:
    if spec is None or spec.width == 0:
        return None if spec is None else "none"
    width = None if spec.width == whole else spec.width
    return RopeWords(interleaved=spec.interleaved, attention_scaling=spec.attention_scaling, width=width)


def _gate(spec: GatedDeltaNetSpec) -> GateWords:
    norm: Any = spec.output_norm
    return GateWords(
        activation=norm.activation,
        norm_before_gate=norm.norm_before_gate,
        group_size="none" if norm.group_size is None else norm.group_size,
    )


def _contradictions(found: Inspection, model: Any, registry: Registry) -> Iterator[str]:
    """What the entry, registered as it is written, says otherwise than the specs that are then read off the model's layers."""
    from ..registry.files import parse
    from ..registry.lookup import Registry as Own

    own = Own()
    own.register_adapters(list(registry.adapters().values()), "the registry")
    try:
        own.register_models(parse(found.toml(), "the entry"), "the entry")
        contract = type(
            "ReadBack", (ContractCase,), {"model": found.entry.name, "registry": own, "build": lambda _: model}
        )()
        read = contract.found()
        declared = contract.declared(engine=contract.engine_of(read, model))
    except LayerfuseError as error:
        yield str(error)
        return
    counts, expected = (Counter(type(spec).__name__ for _, spec in pairs) for pairs in (read, declared))
    for kind in dict.fromkeys([*expected, *counts]):
        if counts[kind] != expected[kind]:
            yield f"{expected[kind]} x {kind} are declared, and {counts[kind]} were read off the layers of {type(model).__name__}"
    seen: set[str] = set()
    for (name, one), (path, other) in zip(declared, read, strict=True) if counts == expected else ():
        for sentence in differences(one, other):
            if sentence not in seen:
                yield f"{path} ({type(model).__name__}), declared as {name}: {sentence}"
            seen.add(sentence)
    for path, what in own.unknown_in(model):
        if what not in seen:
            yield f"{path}: no adapter reads {what}"
        seen.add(what)
