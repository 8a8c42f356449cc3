"""What transformers' own code says of a config's layers, which no config does: epsilons, sinks, gates, and which classes.

A model of the proposed entry is built on the meta device, and its layers are read with the facts of classes that are known already.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs
from attrs import field, frozen

from ..adapters.errors import LayerfuseError
from ..adapters.reader import LayerReader
from ..adapters.specs import FinalNormSpec, GatedDeltaNetSpec, GatedMLPSpec, GQASpec, MLASpec, ResidualSpec, RopeSpec
from ..registry.declare import facts_from_words
from ..registry.inspect import NO_SINKS_SAID, NOT_DECLARED, Inspection
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

_STREAM_NORMS = {"input_layernorm", "post_attention_layernorm"}


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
        model = full_model(_one_of_each(found.entry))
    except Exception as error:  # a config class refuses in its own way what it does not take
        return _noted(found, f"transformers' code was not asked: {type(error).__name__}: {error}".splitlines()[0])
    asked = _read(model, registry, found.entry.norm_weight_offset)
    entry = _with_answers(found.entry, asked)
    declared = [without_index(spec) for _, spec in entry.specs(engine="transformers")]
    for spec in asked.specs:
        asked.notes.extend(_contradictions(spec, declared))
    known = [note for note in found.notes if not (asked.specs and note.startswith((NO_SINKS_SAID, NOT_DECLARED)))]
    return attrs.evolve(found, entry=entry, notes=(*known, *dict.fromkeys(asked.notes)))


def _noted(found: Inspection, note: str) -> Inspection:
    return attrs.evolve(found, notes=(*found.notes, note))


def _one_of_each(entry: ModelEntry) -> ModelEntry:
    """The entry with its true widths and no more layers than it has kinds of them."""
    kinds = entry.kind_at()
    kept = [kinds[number] for number in one_of_each(entry)]
    layers = {
        name: attrs.evolve(kind, at=[i for i, word in enumerate(kept) if word == name])
        for name, kind in entry.layers.items()
    }
    return attrs.evolve(entry, num_hidden_layers=len(kept), layers=layers, mlps={}, layer_classes={}, aliases=[])


def _read(model: Any, registry: Registry, norm_weight_offset: float) -> _Asked:
    asked = _Asked()
    prefix = "transformers:Qwen3Next" if norm_weight_offset else "transformers:DeepseekV3"
    inside = ""
    for path, layer in model.named_modules():
        candidates = list(_candidates(type(layer).__name__, prefix, {name for name, _ in layer.named_children()}))
        if not candidates or (inside and path.startswith(inside)):
            continue
        spec = _read_one(path, layer, candidates, registry, asked)
        if isinstance(spec, MLASpec | GQASpec | GatedDeltaNetSpec):
            inside = f"{path}."
        if spec is not None:
            asked.specs.append(without_index(spec))
    return asked


def _candidates(name: str, prefix: str, children: set[str]) -> Iterator[Mapping[str, Any]]:
    if re.search(r"(Attention|Attn|MLA|DeltaNet)$", name):
        yield from _ATTENTIONS
    elif name.endswith("DecoderLayer"):
        norms = {child for child in children if "norm" in child}
        # Where there are others, it is not these two that stand before the attention and before the MLP.
        like = {"like": f"{prefix}DecoderLayer"}
        yield from (like, {**like, **_EITHER_KIND}) if norms == _STREAM_NORMS else ({},)
    elif name.endswith("Model") and {"layers", "norm"} <= children:
        yield {"like": f"{prefix}Model"}
    elif name.endswith("MLP") and {"gate_proj", "up_proj", "down_proj"} <= children:
        yield {"like": f"{prefix}MLP"}


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
    why = (
        refusals[0] if len(refusals) == 1 else "its parts have other names or another order than those of known classes"
    )
    note = f"{key} could not be read: {why}; declare it under layer_classes"
    asked.notes.extend([note] if note not in asked.notes else [])
    return None


def _with_answers(entry: ModelEntry, asked: _Asked) -> ModelEntry:
    """The entry with the epsilons, gates and sinks of the code, and its layer classes."""
    own: dict[str, Any] = {}
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
        for name, kind in layers.items():
            if isinstance(spec, GQASpec) and isinstance(kind, GQAKind):
                layers[name] = attrs.evolve(kind, has_sinks=kind.has_sinks or spec.has_sinks)
            elif isinstance(spec, MLASpec) and isinstance(kind, MLAKind):
                layers[name] = attrs.evolve(kind, rope=_rope(spec.rope))
            elif isinstance(spec, GatedDeltaNetSpec) and isinstance(kind, GatedDeltaNetKind):
                layers[name] = attrs.evolve(kind, output_norm=_gate(spec))
    facts = attrs.evolve(entry.engines.get("transformers", EngineFacts()), **own)
    engines = {**entry.engines, "transformers": facts} if own else entry.engines
    return attrs.evolve(entry, layers=layers, engines=engines, layer_classes={**entry.layer_classes, **asked.classes})


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
