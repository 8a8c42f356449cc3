"""Real transformers models of declared entries: whole on the meta device, or small enough to run on a laptop.

Importing this module imports neither torch nor transformers; the functions do.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
from attrs import field, frozen

from ..adapters.arguments import check_counts, expect
from ..adapters.errors import FOREIGN, ArgumentError, ArgumentValueError, LayerfuseError, cut, said, shown
from ..registry.catalog import MOST_LAYERS, ModelEntry
from ..registry.hf_config import text_part
from ..registry.kinds import SHARED_EXPERTS, GatedDeltaNetKind, GQAKind, LayerKind, MLAKind, MLPKind
from ..registry.mixer_kinds import Mamba2Kind, MLPBlockKind
from .general import general_recipe, own_config, yarn_rope
from .recipes import NOT_IN_TRANSFORMERS, RECIPES, Recipe

if TYPE_CHECKING:
    import torch
    from torch import nn

SMALL_MLP = 64
"""Width of the MLPs of a small model."""


_HEADS_FILL = ("bitnet", "helium", "olmoe")
"""Model types whose code takes the hidden size for the width of all query heads."""


class NotBuildableError(LayerfuseError, LookupError):
    """transformers cannot build this entry; the text says why."""


def why_not(entry: ModelEntry) -> str | None:
    """Why transformers cannot build this entry, in a sentence, or None where it can. Imports transformers' index only.

    Raises:
        ArgumentError: this is no ModelEntry.
    """
    expect("entry", entry, ModelEntry, "a ModelEntry (registry.model gives one by its name)")
    if entry.model_type is None:
        return f"{entry.name} declares no model_type"
    try:
        if importlib.util.find_spec("transformers") is None:
            return "transformers is not installed (pip install 'layerfuse[hf]')"
        return _why_not(entry)
    except (Exception, SystemExit) as error:  # half an installation breaks in any way
        return (
            f"the installed transformers cannot be used: {said(error)}; install it anew (pip install 'layerfuse[hf]')"
        )


def _why_not(entry: ModelEntry) -> str | None:
    import transformers

    recipe, model_type = _recipe_of(entry), entry.model_type or ""
    if recipe is None:
        return NOT_IN_TRANSFORMERS.get(
            model_type,
            f"transformers {transformers.__version__} builds no language model of the model_type {shown(model_type)}",
        )
    for name in (recipe.config, recipe.model):
        if not hasattr(transformers, name):
            return f"transformers {transformers.__version__} has no {name}"
    unwritten = sorted({kind.family for kind in entry.layers.values()} - set(recipe.keys))
    if unwritten:
        return f"no config with layers of the family {' or '.join(unwritten)} is written here; `layerfuse inspect` holds one to its model"
    return None


def full_model(entry: ModelEntry) -> nn.Module:
    """The real model with the published dimensions of everything a spec speaks of, without memory, on the meta device.

    Vocabulary, routed experts and the vision tower are small.

    Args:
        entry: the declared model.

    Raises:
        NotBuildableError: transformers has no such model.
    """
    return _made(_buildable(entry), config_of(entry), device="meta", dtype=None)


def published_model(entry: ModelEntry, config: Mapping[str, Any]) -> nn.Module:
    """The real model of a config, on the meta device: every number in it is the config's, and none is the entry's.

    Args:
        entry: says which classes of transformers it is, by its `model_type`.
        config: a parsed config.json; of a composite one the language model's part, whose own `model_type` may say it too.

    Returns:
        The language model, or what is inside of it where transformers has it only as a part of others.

    Raises:
        NotBuildableError: transformers has no such model. And whatever a config class raises for what it does not take.
    """
    reason = why_not(entry)
    recipe = _recipe_of(entry) if reason is None else _recipe_of_part(entry.model_type, config.get("model_type"))
    if recipe is None:
        raise NotBuildableError(reason or f"{entry.name} has no recipe")
    import transformers

    made = getattr(transformers, recipe.config).from_dict(_with_floats(dict(config)))
    return _made(recipe, _around(recipe, made), device="meta", dtype=None)


@frozen(kw_only=True)
class Defaults:
    """What transformers takes for what the language model's part of a config leaves out."""

    whose: str
    "Which transformers, and of which model_type."
    values: Mapping[str, Any] = field(factory=dict)
    "By key, each that is not None."
    unknown: Mapping[str, Any] = field(factory=dict)
    "What the config says by keys that transformers does not know."
    refused: str | None = None
    "Why it does not take the config; None where it does."

    def meant(self, key: str) -> str | None:
        """The unknown key that may be meant by one that is left out: close to it, with a value of its type."""
        import difflib

        alike = [each for each, value in self.unknown.items() if type(value) is type(self.values[key])]
        return next(iter(difflib.get_close_matches(key, alike, n=1, cutoff=0.72)), None)


def defaults_of(config: Mapping[str, Any]) -> Defaults | None:
    """What transformers takes for what a config leaves out.

    None where it does not say which of its architecture's models it is, where its checkpoint brings a class of its own, or transformers has none.
    """
    values, _ = text_part(config)
    layers = values.get("num_hidden_layers")
    # transformers makes a list of the layers, before anybody has looked at their number.
    if "hidden_size" not in values or config.get("auto_map") or not (isinstance(layers, int) and layers <= MOST_LAYERS):
        return None
    try:
        import transformers

        kind = own_config(str(values.get("model_type")))
        known = kind().to_dict()
    except FOREIGN:  # transformers is not there, or has no such model, or no default one
        return None
    whose = f"transformers {transformers.__version__} has by default for {values['model_type']}"
    try:
        made = kind.from_dict(_with_floats(dict(values))).to_dict()
    except FOREIGN as error:
        return Defaults(whose=whose, refused=cut(" ".join(str(error).split()), 200))
    return Defaults(
        whose=whose,
        values={key: value for key, value in made.items() if key not in values and value is not None},
        unknown={key: value for key, value in values.items() if key not in known},
    )


def with_keys(config: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """A config with more keys in its language model's part."""
    values, part = text_part(config)
    names, around = part.split(".") if part else [], [config]
    for name in names[:-1]:
        around.append(around[-1][name])
    whole: dict[str, Any] = {**keys, **values}
    for name, outer in zip(reversed(names), reversed(around), strict=False):
        whole = {**outer, name: whole}
    return whole


def _with_floats(said: Any) -> Any:
    """A copy in which infinities are numbers, which transformers writes as `{"__float__": "Infinity"}` (Mamba-2's `time_step_limit`)."""
    if isinstance(said, dict):
        word = said.get("__float__")
        return (
            float(word) if word in ("Infinity", "-Infinity", "NaN") else {k: _with_floats(v) for k, v in said.items()}
        )
    return [*map(_with_floats, said)] if isinstance(said, list) else copy.deepcopy(said)


def small_entry(
    entry: ModelEntry, *, layers: int | Sequence[int] = 4, hidden_size: int = 128, heads: int = 4
) -> ModelEntry:
    """The same entry with few layers, few heads, a small hidden size and small MLPs, dense where the model can have those.

    Every width of a head or a latent stays true, but of heads that the model's code takes to fill the hidden size.

    Args:
        entry: the declared model.
        layers: how many decoder layers to keep, from the first; or the numbers of those to keep, 0-based.
        hidden_size: width of the residual stream.
        heads: query heads. Grouped heads keep their group size where it fits.

    Raises:
        ArgumentError: an argument is of another type; ArgumentValueError: there is no such layer, or a number is none.
    """
    expect("entry", entry, ModelEntry, "a ModelEntry (registry.model gives one by its name)")
    check_counts(hidden_size=hidden_size, heads=heads)
    all_kinds = entry.kind_at()
    numbers = _kept(layers, len(all_kinds))
    kept = [all_kinds[number] for number in numbers]
    beside = [entry.beside_at()[number] for number in numbers]
    kinds = {
        name: attrs.evolve(_few_heads(kind, heads), at=[i for i, at in enumerate(places) if at == name])
        for name, kind in entry.layers.items()
        for places in (beside if name in entry.beside else kept,)
        if name in places
    }
    if entry.model_type in _HEADS_FILL:
        own = {name: kind for name, kind in kinds.items() if isinstance(kind, GQAKind)}
        kinds |= {name: attrs.evolve(kind, head_dim=hidden_size // heads) for name, kind in own.items()}
    return attrs.evolve(
        entry,
        num_hidden_layers=len(kept),
        hidden_size=hidden_size,
        layers=kinds,
        mlps=_small_mlps(entry),
        experts=None,
        layer_classes={},
        aliases=[],
    )


def small_model(
    entry: ModelEntry,
    *,
    layers: int | Sequence[int] = 4,
    hidden_size: int = 128,
    heads: int = 4,
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> nn.Module:
    """A small model with random weights that runs on the CPU, with the true widths of every head and latent.

    What it declares is `small_entry(entry, ...)` with the same arguments. It takes `input_ids` below 100, is in eval
    mode, and needs no cache (`use_cache=False`).

    Args:
        entry: the declared model.
        layers: as for `small_entry`.
        hidden_size: as for `small_entry`.
        heads: as for `small_entry`.
        dtype: of the weights; torch.float32 if not given.
        seed: of the random weights. The global random state is left as it was.

    Raises:
        NotBuildableError: transformers has no such model.
        ArgumentError: as for `small_entry`; of `dtype`, it is none that random weights can be of.
    """
    import torch

    known = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    if dtype is not None and (type(dtype) is not torch.dtype or dtype not in known):
        raise ArgumentError(f"dtype: expected torch.float32, bfloat16, float16 or float64, got {shown(dtype)}")
    check_counts(0, seed=seed)
    small = small_entry(entry, layers=layers, hidden_size=hidden_size, heads=heads)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _made(_buildable(small), config_of(small), device="cpu", dtype=dtype or torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Norm weights of all ones would hide a norm that is applied twice, or with another's weight.
                if parameter.dim() == 1 and "norm" in name:
                    parameter.add_(torch.rand_like(parameter) * 0.2 - 0.1)
    return model.eval().requires_grad_(False)


def config_of(entry: ModelEntry) -> Any:
    """The transformers config of an entry: published dimensions, everything else small.

    Raises:
        NotBuildableError: transformers has no such model.
    """
    recipe = _buildable(entry)
    import transformers

    return _around(recipe, getattr(transformers, recipe.config)(**arguments(entry)))


def _around(recipe: Recipe, config: Any) -> Any:
    """What the model class takes: the text config, or the composite config that holds it."""
    import transformers

    config._attn_implementation = "eager"
    if recipe.around is None:
        return config
    name, others = recipe.around
    composite = getattr(transformers, name)(text_config=config, **others)
    composite._attn_implementation = "eager"
    return composite


def arguments(entry: ModelEntry) -> dict[str, Any]:
    """The arguments of the config class, from the entry and its recipe."""
    recipe = _buildable(entry)
    words: dict[str, Any] = {
        **recipe.small,
        recipe.layers: entry.num_hidden_layers,
        "hidden_size": entry.hidden_size,
        "rms_norm_eps": entry.rms_norm_eps,
        "max_position_embeddings": 4096,
    }
    for kind in entry.layers.values():
        for declared, keys in recipe.keys[kind.family].items():
            value = getattr(kind, declared)
            words.update(dict.fromkeys(keys, None if value == "none" else value))
        words.update(yarn_rope(kind))
    for name, mlp in entry.mlps.items():
        key = recipe.shared if name == SHARED_EXPERTS else recipe.dense
        words.update({key: mlp.intermediate_size, "hidden_act": mlp.activation} if key is not None else {})
    for extra in recipe.extra:
        words.update(extra(entry))
    return words


def _buildable(entry: ModelEntry) -> Recipe:
    reason = why_not(entry)
    recipe = None if reason is not None else _recipe_of(entry)
    if recipe is None:
        raise NotBuildableError(reason or f"{entry.name} has no recipe")
    return recipe


def _recipe_of(entry: ModelEntry) -> Recipe | None:
    model_type = entry.model_type or ""
    if model_type in RECIPES or importlib.util.find_spec("transformers") is None:
        return RECIPES.get(model_type)
    return general_recipe(model_type)


def _kept(layers: int | Sequence[int], total: int) -> Sequence[int]:
    """The numbers of the decoder layers that are kept."""
    if isinstance(layers, int):
        check_counts(layers=layers)
        return range(min(layers, total))
    expect("layers", layers, (list, tuple, range), "how many layers, or their numbers in a list")
    wrong = [number for number in layers if type(number) is not int or not 0 <= number < total]
    if wrong or not layers:
        found = shown(wrong[0]) if wrong else "none"
        raise ArgumentValueError(f"layers: expected numbers from 0 to {total - 1}, got {found}")
    return list(layers)


def _recipe_of_part(*model_types: object) -> Recipe | None:
    try:
        found = (general_recipe(each, headless=True) for each in model_types if isinstance(each, str))
        return next(filter(None, found), None)
    except (Exception, SystemExit):  # half an installation of transformers, or none
        return None


def _small_mlps(entry: ModelEntry) -> dict[str, MLPKind]:
    recipe = None if why_not(entry) is not None else _recipe_of(entry)
    name = SHARED_EXPERTS if recipe is not None and recipe.dense is None else "dense"
    kind = next(iter(entry.mlps.values()), None)
    return {} if kind is None else {name: attrs.evolve(kind, at="all", intermediate_size=SMALL_MLP)}


def _few_heads(kind: LayerKind, heads: int) -> LayerKind:
    if isinstance(kind, GQAKind):
        group = min(kind.num_heads // kind.num_kv_heads, max(1, heads // 2))
        return attrs.evolve(kind, num_heads=heads, num_kv_heads=max(1, heads // group))
    if isinstance(kind, GatedDeltaNetKind):
        each = kind.num_v_heads // kind.num_k_heads
        keys = heads if each == 1 else max(2, heads // 2)
        return attrs.evolve(kind, num_k_heads=keys, num_v_heads=keys * each)
    if isinstance(kind, Mamba2Kind):
        return attrs.evolve(kind, num_heads=heads, num_groups=1)
    if isinstance(kind, MLPBlockKind):
        return attrs.evolve(kind, intermediate_size=SMALL_MLP)
    return attrs.evolve(kind, num_heads=heads) if isinstance(kind, MLAKind) else kind


def _made(recipe: Recipe, config: Any, *, device: str, dtype: torch.dtype | None) -> nn.Module:
    import torch
    import transformers

    usual = torch.get_default_dtype()
    # As transformers does: weights follow the default dtype, while rotary tables that ask for float32 keep it.
    torch.set_default_dtype(dtype or usual)
    try:
        with torch.device(device):
            model: nn.Module = getattr(transformers, recipe.model)(config)
    finally:
        torch.set_default_dtype(usual)
    return model
