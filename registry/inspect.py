"""What a Hugging Face config.json is, in this library's terms: its adapter, the declared model it equals, an entry.

Needs no torch. Facts about the architecture that no config holds (norms that add 1, sinks, an engine's own epsilons)
come from a declared model of the same architecture, and from nowhere else. What is derived is noted, what cannot be told
is said, and a config that contradicts itself or what it calls itself is refused.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from attrs import field, frozen

from ..adapters.arguments import expect
from ..adapters.errors import LayerfuseError, cut, shown
from .catalog import ModelEntry
from .hf_config import MEANT, HFConfig, text_part
from .hf_heads import SINKS
from .hf_hybrids import HYBRIDS, READ_HERE, Hybrid, hybrid_layers, layers_in
from .hf_layers import NO_HEAD_DIM, layers_of
from .hf_mlps import LEFT_OUT, experts_of, mlps_of
from .hf_quant import held_by, quant_of
from .kinds import GatedDeltaNetKind, GQAKind, LayerKind, MLAKind
from .quant_methods import MalformedError

if TYPE_CHECKING:
    from .lookup import Registry

LARGEST_CONFIG = 16 << 20
"""Bytes. Larger than any config.json; a weights file given by mistake is refused before it is read."""

MODELOPT = "hf_quant_config.json"
"""What NVIDIA's ModelOpt writes beside a config.json; up to 0.29 it did not write a `quantization_config` there."""

NO_SINKS_SAID = "has_sinks is not said by any config"
NOT_DECLARED = "no declared model has this architecture"
NO_OFFSET_SAID = "norm_weight_offset is not said by any config"
NO_MLP_SAID = "whether an MLP is gated is not said by any config"
NO_STREAM_SAID = "where the norms stand is not said by any config"
"""Notes that end with an answer of the model's code."""

_FAMILY_ADAPTERS = {"mla": "deepseek_v3", "gqa": "decoders"}
_ZERO_CENTRED = ("gemma", "gemma2", "gemma3", "gemma3_text", "vaultgemma", "recurrent_gemma")
"""Model types whose norms add 1 to the stored weight, as transformers 5.23 builds them, beside the declared ones."""

_NORMS_ELSEWHERE = re.compile(r"(post|sandwich|peri)_?(layer)?norm")
"""Keys by which a config may say that norms stand behind attention and MLP."""

_OFFSETS = re.compile(r"zero_cent(er|re)ed|unit_offset|layernorm_1p")
"""Keys by which a config may say that norms add 1 to their weight."""


class ConfigError(LayerfuseError, ValueError):
    """A config.json that does not say what an entry needs: every reason, the adapter where one was recognised, and what to do instead."""

    def __init__(self, file: str, problems: Sequence[str], recognised: Sequence[str] = (), instead: str = "") -> None:
        self.file = file
        self.problems = tuple(problems)
        self.recognised = tuple(recognised)
        self.instead = instead
        super().__init__(file, self.problems, self.recognised, instead)

    def __str__(self) -> str:
        notes = [f"note: {sentence}" for sentence in self.recognised]
        said = [*notes, *self.problems, *filter(None, [self.instead])]
        return "\n".join(f"{cut(self.file, 250)}: {sentence}" for sentence in said)


WITHOUT_AN_ENTRY = "fusion.compile and registry.specs_in need no entry: they read the model's own layers, those whose classes are known"
"""What is left to those whose config was read and makes no entry."""


@frozen(kw_only=True)
class Inspection:
    """The answer to one config."""

    config: Mapping[str, Any] = field(repr=False)
    "The language model's part of it."
    entry: ModelEntry
    recognised: tuple[str, ...]
    "Sentences: which adapter, and why."
    same_as: tuple[str, ...]
    "Declared models with exactly these layers, of one model_type."
    differs: tuple[str, ...]
    "How the layers differ from the first declared model of this architecture; empty where `same_as` is not."
    notes: tuple[str, ...]
    "What was derived, what the config cannot say, and what is left to do."
    problems: tuple[str, ...] = ()
    "What the model's code contradicts, or what of it fits no known class: the entry is then a draft, and no answer."
    unread: str | None = None
    "Why what it says of its quantisation is not read, which is one of the notes; None where it is, or it says nothing."
    defaults: Mapping[str, Any] = field(factory=dict)
    "What transformers has by default for keys that the config leaves out, as far as the entry follows from them, which is one of the notes."

    @property
    def lost(self) -> tuple[str, ...]:
        """The notes that say what of the config is not in the entry, or in it by a guess that no declared model bears out."""
        begun = (MODELOPT, NO_MLP_SAID, *(() if self.same_as else (NO_HEAD_DIM,)))
        return tuple(note for note in self.notes if note == self.unread or LEFT_OUT in note or note.startswith(begun))

    def is_of_type(self, other: ModelEntry) -> bool:
        """Whether the config says that it is of the other one's `model_type`: Mistral's layers may be those of a Llama."""
        return other.model_type in (self.entry.model_type, self.config.get("model_type"))

    def toml(self) -> str:
        """The entry as models.toml text, with the notes as comments. A draft is nothing but comments, so that it declares nothing."""
        from .files import unstructure
        from .toml import written

        comments = "".join(f"# {note}\n" for note in (*self.problems, *self.notes))
        text = written(unstructure({self.entry.name: self.entry}))
        return comments + (
            "".join(f"# {line}".rstrip() + "\n" for line in text.splitlines()) if self.problems else text
        )


def read_config(path: Path) -> dict[str, Any]:
    """A config.json, or that of a folder.

    Raises:
        ConfigError: it cannot be read, or is no JSON object.
    """
    if path.name == MODELOPT:
        raise ConfigError(
            str(path),
            ["says how a checkpoint is quantised, and no more: give the config.json beside it, or their folder"],
        )
    return _read_json(path / "config.json" if path.is_dir() else path, "config.json")


def read_modelopt(path: Path) -> dict[str, Any] | None:
    """ModelOpt's own file in the folder of a config.json; None: there is none.

    Raises:
        ConfigError: as `read_config`.
    """
    if not path.is_dir() and path.name != "config.json":
        return None
    beside = (path if path.is_dir() else path.parent) / MODELOPT
    return _read_json(beside, MODELOPT) if beside.exists() else None


def _read_json(path: Path, what: str) -> dict[str, Any]:
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # reading a pipe would wait for whoever writes it
            raise ConfigError(str(path), ["is no regular file"])
        if found.st_size > LARGEST_CONFIG:
            raise ConfigError(str(path), [f"larger than {LARGEST_CONFIG >> 20} MiB, which no {what} is"])
        config = json.loads(path.read_bytes())
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(str(path), [f"cannot be read: {error.strerror or error}"]) from None
    except RecursionError:
        raise ConfigError(str(path), [f"is nested too deeply to be a {what}"]) from None
    except ValueError as error:
        raise ConfigError(str(path), [f"is not JSON: {error}"]) from None
    if not isinstance(config, dict):
        raise ConfigError(str(path), [f"expected a JSON object, got {type(config).__name__}"])
    return config


def inspect(
    config: Mapping[str, Any],
    *,
    registry: Registry,
    name: str | None = None,
    file: str = "config.json",
    folder: str | None = None,
    modelopt: Mapping[str, Any] | None = None,
) -> Inspection:
    """What this config describes.

    Args:
        config: a parsed config.json; a composite one may hold the language model under `text_config`.
        registry: where declared models are looked up.
        name: the entry's name; else `folder`, else the config's own `_name_or_path`, else its model_type, with `my-` before it
            where a declared model is called that.
        file: what messages call the config.
        folder: where the config lies, as far as that names the model.
        modelopt: a parsed hf_quant_config.json of the same folder, which counts where the config has no `quantization_config`, as in vLLM and SGLang.

    Raises:
        ConfigError: it does not say what an entry needs; everything missing is listed.
    """
    expect("config", config, Mapping, "a parsed config.json (read_config reads one)")
    values, part = text_part(config)
    hf = HFConfig(values)
    for each in (config,) if part is None else (config, values):
        hf.problems.extend(_odd_texts(each))
    types = [t for t in (config.get("model_type"), values.get("model_type")) if isinstance(t, str)]
    classes = [*_texts(config.get("architectures")), *_texts(values.get("architectures"))]
    sibling, why = _sibling(registry.models().values(), types, classes)
    family = hf.family()
    recognised = [] if sibling is None else [f"adapter {sibling.adapter}, by {why}"]
    if part is not None:
        recognised.append(f"the language model is described under {part}")
    adapter = sibling.adapter if sibling is not None else _FAMILY_ADAPTERS.get(family[0]) if family else None
    hybrid = HYBRIDS.get(types[-1]) if types else None
    if hybrid is not None and sibling is None:
        adapter = "hybrids"
        recognised.append(f"adapter hybrids, by model_type {types[-1]}")
    elif sibling is None and family is not None:
        if adapter is None:
            adapter = "kimi_linear" if "linear_attn_config" in family[1] else "qwen3_next"
        recognised.append(f"adapter {adapter}, by family: {family[1]}")
    if sibling is not None and hybrid is None:
        hf.refuse_another_family(why, {kind.family for kind in sibling.layers.values()})
    hf.refuse_what_is_not_described(() if hybrid is None else READ_HERE)
    if hybrid is not None:
        total = layers_in(hf, hybrid)
        layers = hybrid_layers(hf, total, hybrid)
    else:
        count = "num_layers" if sibling is not None and sibling.attentions_per_layer > 1 else "num_hidden_layers"
        total = hf.count(count)
        layers = layers_of(hf, total, types[-1] if types else "", _gate(sibling), _turned(sibling))
    hidden_size, epsilon = hf.count("hidden_size"), hf.number(_epsilon(hf, types) if hybrid is None else hybrid.epsilon)
    if hf.problems or adapter is None:
        raise ConfigError(file, list(dict.fromkeys(hf.problems)), recognised, WITHOUT_AN_ENTRY)
    taken = {known: other.name for other in registry.models().values() for known in other.names}
    wanted = _name(name or folder or _own_name(config) or (types[0] if types else "model"))
    own = wanted if name else _free(wanted, taken)
    if own != wanted:
        recognised.append(f"the entry is called {cut(own)}, since {cut(wanted)} is a name of {taken[wanted]}")
    hub_name = _hub_name(config)
    mlps = {} if sibling is None else mlps_of(hf, total, sibling)
    experts = experts_of(hf, total, sibling, mlps)
    entry = ModelEntry(
        name=own,
        adapter=adapter,
        source=f"{file}, read by layerfuse inspect",
        num_hidden_layers=total,
        hidden_size=hidden_size,
        rms_norm_eps=epsilon,
        layers={word: _with_code(kind, sibling) for word, kind in layers.items()},
        mlps=mlps,
        experts=experts,
        norm_weight_offset=_offset(sibling, types) if hybrid is None else hybrid.offset,
        added_as_given=hybrid.as_given if hybrid is not None else sibling is None or sibling.added_as_given,
        attentions_per_layer=1 if sibling is None else sibling.attentions_per_layer,
        hf_id=None if hub_name is None or hub_name.lower() in taken else hub_name,  # one model has it
        model_type=types[0] if types else None,
        architectures=_texts(config.get("architectures")),
        engines=dict(sibling.engines) if sibling is not None and sibling.rms_norm_eps == epsilon else {},
    )
    from .files import contradictions

    problems = contradictions(entry)
    if problems:
        raise ConfigError(file, problems, recognised, WITHOUT_AN_ENTRY)
    kinds = [entry.layers[word] for word in entry.kind_at()]
    said, where, source = config.get("quantization_config"), "quantization_config", f"{file}, quantization_config"
    if said is None and modelopt is not None:
        said, where, source = {"quant_method": "modelopt", **modelopt}, MODELOPT, f"{MODELOPT} beside {file}"
    elif said is None:
        said, older = values.get("quantization_config"), config.get("compression_config")
        if said is None and older is not None:  # compressed-tensors' first checkpoints
            said, where, source = older, "compression_config", f"{file}, compression_config"
        elif said is None and (odd := _close_table(config, "quantization_config")) is not None:
            raise ConfigError(
                file, [f"quantization_config is missing; {MEANT} quantization_config by {odd}?"], recognised
            )
    try:
        held = list(held_by(mlps, values))
        quant, unread = quant_of(said, held, kinds, source, where)
        hf.notes.extend([] if unread is None else [unread])
        if where != MODELOPT and modelopt is not None:
            where = MODELOPT
            other, _ = quant_of({"quant_method": "modelopt", **modelopt}, held, kinds, MODELOPT, MODELOPT)
            if [*map(str, other.values())] != [*map(str, quant.values())]:
                hf.notes.append(
                    f"{MODELOPT} beside it says otherwise, and engines do not read it where there is a quantization_config"
                )
    except MalformedError as why:
        raise ConfigError(file, [f"{where}: {why}{CORRECT}"], recognised) from None
    entry = attrs.evolve(entry, quant=quant)
    # Models of other code may have the same sizes.
    kin = [each for each in registry.models().values() if sibling is not None and each.adapter == sibling.adapter]
    same = _same(entry, kin)
    return Inspection(
        config=values,
        entry=entry,
        recognised=tuple(recognised),
        same_as=same,
        differs=() if same or sibling is None else tuple(_differences(entry, sibling)),
        unread=unread,
        notes=(*hf.notes, *_unsaid(hf, entry, sibling, hybrid, classes)),
    )


def _close_table(config: Mapping[str, Any], key: str) -> str | None:
    """The key of a table that is close to one that is not there."""
    import difflib  # only ever needed for a message

    tables = [name for name, value in config.items() if isinstance(value, Mapping)]
    return next(iter(difflib.get_close_matches(key, tables, n=1, cutoff=0.85)), None)


CORRECT = ": correct it in the config, or take it out"
_TEXTS = {"model_type": "qwen3", "hidden_act": "silu", "hidden_activation": "gelu_pytorch_tanh"}
"""Keys whose values are texts, each with one."""


def _odd_texts(config: Mapping[str, Any]) -> Iterator[str]:
    for key, example in _TEXTS.items():
        value = config.get(key)
        if value is not None and not isinstance(value, str):
            yield f'{key}: expected a text, as "{example}", got {shown(value)}{CORRECT}'
    classes = config.get("architectures")
    if classes is not None and not (isinstance(classes, list) and all(isinstance(one, str) for one in classes)):
        yield f'architectures: expected a list of texts, as ["Qwen3ForCausalLM"], got {shown(classes)}{CORRECT}'


# ---- recognising -----------------------------------------------------------------------------------------------------


def _sibling(
    entries: Iterable[ModelEntry], types: Sequence[str], classes: Sequence[str]
) -> tuple[ModelEntry | None, str]:
    """The first declared model of the same architecture, and what told."""
    entries = list(entries)
    for found in types:
        for entry in entries:
            if entry.model_type == found:
                return entry, f"model_type {found}"
    for found in classes:
        for entry in entries:
            if found in entry.architectures:
                return entry, f"architecture {found}"
    return None, ""


def _gate(sibling: ModelEntry | None) -> Any:
    kinds = () if sibling is None else sibling.layers.values()
    return next((kind.output_norm for kind in kinds if isinstance(kind, GatedDeltaNetKind)), None)


def _turned(sibling: ModelEntry | None) -> MLAKind | GQAKind | None:
    kinds = () if sibling is None else sibling.layers.values()
    return next((kind for kind in kinds if isinstance(kind, MLAKind | GQAKind) and kind.rope is not None), None)


_OF_THE_CODE = ("has_sinks", "qk_norms", "stream_norms", "latent_norm_eps", "output_norm_eps")
"""What no config says of a kind of layers: where declared ones of the same architecture and family agree, it is theirs."""


def _with_code(kind: LayerKind, sibling: ModelEntry | None) -> LayerKind:
    alike = [] if sibling is None else [other for other in sibling.layers.values() if type(other) is type(kind)]
    for name in (a.name for a in attrs.fields(type(kind)) if a.name in _OF_THE_CODE):
        said = {getattr(other, name) for other in alike}
        if len(said) == 1:
            kind = attrs.evolve(kind, **{name: said.pop()})
    return kind


def _epsilon(hf: HFConfig, types: Sequence[str]) -> str:
    """What the epsilon of the stream's RMSNorms is called."""
    own = types and types[-1].startswith("mimo_v2") and not hf.has("rms_norm_eps")
    return "layernorm_epsilon" if own else "rms_norm_eps"


def _offset(sibling: ModelEntry | None, types: Sequence[str]) -> float:
    if sibling is not None:
        return sibling.norm_weight_offset
    return 1.0 if any(found in _ZERO_CENTRED for found in types) else 0.0


def _unsaid(
    hf: HFConfig, entry: ModelEntry, sibling: ModelEntry | None, hybrid: Hybrid | None, classes: Sequence[str]
) -> list[str]:
    no_mlp = f"{NO_MLP_SAID}; none was written: declare them under mlps"
    if hybrid is not None:
        return [] if sibling is not None or hybrid.one_block else [no_mlp]
    notes = []
    if hf.has("attn_logit_softcapping"):
        notes.append(f"attn_logit_softcapping = {shown(hf.values['attn_logit_softcapping'])}: no spec describes it")
    if sibling is not None:
        return notes
    if any(isinstance(kind, GQAKind) for kind in entry.layers.values()) and not hf.has(SINKS[True]):
        notes.append(f"{NO_SINKS_SAID}; false was written: check the attention class for sinks")
    offset = f"{NO_OFFSET_SAID}; {entry.norm_weight_offset} was written"
    if not entry.norm_weight_offset:
        said = hf.said_by(_OFFSETS)
        notes.append(
            f"{offset}: {'check whether' if said is None else f'{said} may mean that'} the norms add 1 to their weight"
        )
    elsewhere = hf.said_by(_NORMS_ELSEWHERE)
    notes.append(
        f"{NO_STREAM_SAID}{'' if elsewhere is None else f', but {elsewhere} may mean it'}; one before the attention and one before "
        "the MLP were written: where they stand behind them "
        'instead, write stream_norms = "none" under layers, and where they stand there too, added_as_given = false'
    )
    notes.append(no_mlp)
    prefix = cut(next((c.partition("For")[0] for c in classes), ""))
    example = f'"transformers:{prefix or "My"}Attention" = {{ like = "transformers:..." }}'
    notes.append(
        f"{NOT_DECLARED}: compare the entry with the real layers, whose code may say more than "
        f"the config, and declare their classes under layer_classes, as in {example}"
    )
    return notes


# ---- comparing -------------------------------------------------------------------------------------------------------


def _same(entry: ModelEntry, declared: Iterable[ModelEntry]) -> tuple[str, ...]:
    """The names of those with the same layers, of one model_type: the entry's, where one has it. Those that are quantised alike come first.

    Another one may run more beside the same sizes: DeepSeek-V3.2 has an indexer in front of its attention, which no spec describes.
    """
    mine = [spec for _, spec in entry.specs()]
    quantised = {*map(str, entry.quant.values())}

    def far(other: ModelEntry) -> tuple[bool, bool]:
        return other.model_type != entry.model_type, {*map(str, other.quant.values())} != quantised

    alike = [
        other
        for other in sorted(declared, key=far)
        if (other.experts, other.num_hidden_layers) == (entry.experts, entry.num_hidden_layers)
        and [spec for _, spec in other.specs()] == mine
    ]
    return tuple(other.name for other in alike if other.model_type == alike[0].model_type)


def _differences(entry: ModelEntry, other: ModelEntry) -> list[str]:
    mine, theirs = _flat(entry), _flat(other)
    return [
        f"{key}: {mine.get(key, 'none')} (in {other.name}: {theirs.get(key, 'none')})"
        for key in dict.fromkeys([*mine, *theirs])
        if mine.get(key) != theirs.get(key)
    ]


def _flat(entry: ModelEntry) -> dict[str, Any]:
    numbers = (
        "num_hidden_layers",
        "hidden_size",
        "rms_norm_eps",
        "norm_weight_offset",
        "added_as_given",
        "attentions_per_layer",
    )
    flat: dict[str, Any] = {name: getattr(entry, name) for name in numbers}
    experts = {} if entry.experts is None else {"experts": entry.experts}
    for name, kind in [*entry.layers.items(), *entry.mlps.items(), *experts.items()]:
        flat.update({f"{name}.{a.name}": getattr(kind, a.name) for a in attrs.fields(type(kind)) if a.name != "at"})
    return flat


# ---- names -----------------------------------------------------------------------------------------------------------


def _texts(value: Any) -> list[str]:
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []


def _hub_name(config: Mapping[str, Any]) -> str | None:
    name = config.get("_name_or_path")
    return name if isinstance(name, str) and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) else None


def _own_name(config: Mapping[str, Any]) -> str | None:
    hub_name = _hub_name(config)
    return None if hub_name is None else hub_name.rpartition("/")[2]


def _free(wanted: str, taken: Iterable[str]) -> str:
    while wanted in taken:
        wanted = f"my-{wanted}"
    return wanted


def _name(text: str) -> str:
    return re.sub(r"\s+", "-", text.strip()).lower() or "model"
