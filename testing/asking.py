"""What transformers' own code says of a config's layers, which no config does: epsilons, sinks, gates, and which classes.

A model of the proposed entry is built on the meta device, and its layers are read with the facts of classes that are known already.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs
from attrs import field, frozen

from ..adapters.errors import LayerfuseError, said
from ..adapters.reader import LayerReader
from ..adapters.specs import FinalNormSpec, GatedDeltaNetSpec, GatedMLPSpec, GQASpec, MLASpec, ResidualSpec, RopeSpec
from ..registry.declare import facts_from_words
from ..registry.inspect import NO_MLP_SAID, NO_OFFSET_SAID, NO_SINKS_SAID, NO_STREAM_SAID, NOT_DECLARED, Inspection
from ..registry.kinds import EngineFacts, GatedDeltaNetKind, GateWords, GQAKind, MLAKind, Rope, RopeWords
from .compare import differences, without_index
from .models import full_model, why_not
from .run import one_of_each

if TYPE_CHECKING:
    from ..registry.catalog import ModelEntry
    from ..registry.lookup import Registry

_ATTENTIONS: tuple[Mapping[str, Any], ...] = (
    {"like": "transformers:DeepseekV3Attention"},
    # Without a word on its rope in its config, only its code tells what the rope turns together.
    {"like": "transformers:DeepseekV3Attention", "without": ["rope"]},
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
            "feeds": ["o_proj"],
        },
        "tp_weight": "o_proj.in_features",
    },
    {"like": "transformers:GptOssAttention"},
    {"like": "transformers:GptOssAttention", "has_sinks": {"const": False}},
    {"like": "transformers:Qwen3NextAttention"},
)
"""What a class that no adapter knows may be like, the most telling first: of what fits, the first is taken."""

_EITHER_KIND = {
    "layer_index": ["self_attn.layer_idx", "linear_attn.layer_idx"],
    "tp_weight": ["self_attn.o_proj.in_features", "linear_attn.o_proj.in_features", "linear_attn.out_proj.in_features"],
}
"""Of a decoder layer that holds either kind of attention."""


@frozen
class _Asked:
    """What was read, and what could not be."""

    specs: list[Any] = field(factory=list)
    classes: dict[str, Mapping[str, Any]] = field(factory=dict)
    notes: list[str] = field(factory=list)


def ask_code(found: Inspection, registry: Registry) -> Inspection:
    """The same inspection with what transformers' code adds; with a note of why it could not be asked, where that is so.

    Args:
        found: what a config says.
        registry: whose layer classes are known.
    """
    if found.same_as:
        return found  # declared, and held to the contract
    reason = why_not(found.entry)
    if reason is not None:
        return _noted(
            found, f"transformers' code, which may have epsilons and sinks of its own, was not asked: {reason}"
        )
    try:
        model = full_model(_two_of_each(found.entry), mixtures=True)
    except Exception as error:  # a config class refuses in its own way what it does not take
        return _noted(found, f"transformers' code was not asked: {said(error)}".splitlines()[0])
    offset = _offset(model, found.entry.hidden_size)
    entry = found.entry if offset is None else attrs.evolve(found.entry, norm_weight_offset=offset)
    kept = _two_of_each(entry).kind_at()
    asked = _read(model, registry, entry)
    entry = _with_answers(entry, asked, kept)
    declared = [without_index(spec) for _, spec in entry.specs(engine="transformers")]
    for spec in asked.specs:
        asked.notes.extend(_contradictions(without_index(spec), declared))
    answered = [NO_SINKS_SAID, NOT_DECLARED, NO_MLP_SAID] if asked.specs else []
    answered += [] if offset is None else [NO_OFFSET_SAID]
    answered += [NO_STREAM_SAID] if any(isinstance(spec, ResidualSpec) for spec in asked.specs) else []
    known = [note for note in found.notes if not note.startswith(tuple(answered))]
    mlps = [] if entry.mlps or not asked.specs else [_about_mlps(asked)]
    return attrs.evolve(found, entry=entry, notes=(*known, *dict.fromkeys(asked.notes), *mlps))


def _noted(found: Inspection, note: str) -> Inspection:
    return attrs.evolve(found, notes=(*found.notes, note))


def _two_of_each(entry: ModelEntry) -> ModelEntry:
    """The entry with its true widths and two layers of each kind, of which one can be a mixture of experts."""
    kinds = entry.kind_at()
    kept = [kinds[number] for number in one_of_each(entry)] * 2
    layers = {
        name: attrs.evolve(kind, at=[i for i, word in enumerate(kept) if word == name])
        for name, kind in entry.layers.items()
    }
    return attrs.evolve(entry, num_hidden_layers=len(kept), layers=layers, mlps={}, layer_classes={}, aliases=[])


def _offset(model: Any, hidden_size: int) -> float | None:
    """What the norms of the stream add to their weight, from the first of the decoder layers and the final one."""
    from .streams import is_norm, weight_offset

    norms = [m for path, m in model.named_modules() if is_norm(m) and re.search(r"(layers\.0|model)\.\w*norm$", path)]
    found = {weight_offset(norm, hidden_size) for norm in norms}
    return found.pop() if len(found) == 1 else None


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
        yield from _ATTENTIONS
    elif name.endswith("DecoderLayer"):
        like = _stream_words(layer, f"{prefix}DecoderLayer", entry, registry)
        yield from ({},) if like is None else (like, {**like, **_EITHER_KIND})
    elif name.endswith("Model") and {"layers", "norm"} <= children:
        yield {"like": f"{prefix}Model"}
    elif re.search(r"(MLP|FeedForward)$", name):
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
    known = registry.readers_for(type(layer))
    if known:
        return known[0].read(layer, None, path)
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
        asked.classes[key] = words
        return spec
    why = "its parts have other names or another order than those of known classes"
    if refusals == [] and type(layer).__name__.endswith("DecoderLayer"):
        why = "its forward does something else with the residual stream than specs describe: norm it before attention and MLP, or nowhere"
    if len(refusals) == 1:
        why = refusals[0]
    note = f"{key} could not be read: {why}; declare it under layer_classes"
    asked.notes.extend([note] if note not in asked.notes else [])
    return None


def _with_answers(entry: ModelEntry, asked: _Asked, kept: list[str]) -> ModelEntry:
    """The entry with the epsilons, gates, sinks and norms of the code, and its layer classes; `kept`: the kinds of its layers."""
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
                word = kept[spec.layer_index]
                layers[word] = attrs.evolve(layers[word], stream_norms="none")
        for name, kind in layers.items():
            if isinstance(spec, GQASpec) and isinstance(kind, GQAKind):
                layers[name] = attrs.evolve(kind, has_sinks=kind.has_sinks or spec.has_sinks)
            elif isinstance(spec, MLASpec) and isinstance(kind, MLAKind):
                layers[name] = attrs.evolve(kind, rope=_rope(spec.rope))
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


def _rope(spec: RopeSpec | None) -> Rope:
    if spec is None or spec.width == 0:
        return None if spec is None else "none"
    return RopeWords(interleaved=spec.interleaved, attention_scaling=spec.attention_scaling)


def _gate(spec: GatedDeltaNetSpec) -> GateWords:
    norm: Any = spec.output_norm
    return GateWords(
        activation=norm.activation,
        norm_before_gate=norm.norm_before_gate,
        group_size="none" if norm.group_size is None else norm.group_size,
    )


def _contradictions(spec: Any, declared: list[Any]) -> list[str]:
    """What the code says otherwise than the entry, of the declared layer that is nearest to it."""
    if isinstance(spec, GatedMLPSpec | FinalNormSpec):
        return []
    alike = [list(differences(other, spec)) for other in declared if type(other) is type(spec)]
    nearest = min(alike, key=len, default=[])
    return [f"transformers' code contradicts the entry: {what}; correct the entry by hand" for what in nearest]
