"""An entry held to the tensors of its checkpoint: each linear and norm is there, as wide and as quantised as declared, and no other.

Norms have the names that adapters know them by. What adapters need not know, the sizes of linears, stands here per family.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from attrs import field, frozen

from ..adapters.base import Adapter
from ..adapters.errors import shown
from ..adapters.specs import (
    FinalNormSpec,
    GatedDeltaNetSpec,
    GatedMLPSpec,
    GQASpec,
    MLASpec,
    NormSpec,
    ResidualSpec,
    WeightSpec,
)
from .catalog import ModelEntry
from .kinds import SHARED_EXPERTS
from .published import Linears
from .safetensors import Tensor

Sizes: TypeAlias = tuple[int, int]
"""What a linear gives and what it reads."""
Form: TypeAlias = Mapping[str, Sizes]
"""Linears of a layer by their names, in one way to cut them."""
_Held: TypeAlias = dict[str, dict[str, Tensor]]
"""The tensors of each module, by what is behind its path: weight, weight_scale."""

_TENSOR = re.compile(
    r"(?:(?P<module>.+?)[._])?(?P<what>weight\w*|bias|input_\w*scale|scales|qweight|qzeros|g_idx|blocks)"
)
_PARTS = {
    "attention": ("self_attn", "linear_attn", "attention", "attn"),
    "mlp": ("mlp", "block_sparse_moe", "feed_forward"),
}
_SHARED = ("shared_experts", "shared_expert", "shared_mlp")
_GATES = frozenset(
    ("in_proj_ba", "in_proj_a", "in_proj_b", "a_proj", "b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj")
)
"""Small projections of gates, which many checkpoints keep unquantised."""
_DRAFT = "eh_proj"
"""What only a layer of multi-token prediction has, which stands behind the model's layers."""
_FLOATS = ("BF16", "F16", "F32")


@frozen
class Weighed:
    """What came of it."""

    problems: list[str] = field(factory=list)
    notes: list[str] = field(factory=list)
    held: int = 0
    "Linears and norms that are as declared."


def weigh(entry: ModelEntry, tensors: Mapping[str, Tensor], adapters: Iterable[Adapter]) -> Weighed:
    """Hold an entry to the tensors of its checkpoint.

    Args:
        entry: the model.
        tensors: by their names in the checkpoint.
        adapters: which know what norms are called in transformers, whose names checkpoints have.
    """
    return _Weighing(entry, tensors, _norm_names(adapters)).done()


def _norm_names(adapters: Iterable[Adapter]) -> dict[str, set[str]]:
    """The modules of each norm of a spec, as transformers' classes call them."""
    names: defaultdict[str, set[str]] = defaultdict(set)
    for adapter in adapters:
        for key, several in adapter.layers.items():
            if key.startswith("transformers"):
                for facts in several:
                    for name, word in facts.words.items():
                        for each in word if isinstance(word, list) else [word]:
                            if isinstance(each, dict) and isinstance(each.get("module"), str):
                                names[name].add(each["module"])
    return dict(names)


def _forms(spec: Any) -> tuple[list[Form], Form]:
    """The ways in which checkpoints cut a layer's linears, and those that some have beside them."""
    hidden = spec.hidden_size
    if isinstance(spec, MLASpec):
        values = spec.num_heads * spec.v_head_dim
        queries = spec.num_heads * spec.qk_head_dim
        form = {
            "kv_a_proj_with_mqa": (spec.kv_lora_rank + spec.qk_rope_head_dim, hidden),
            "kv_b_proj": (spec.num_heads * (spec.qk_nope_head_dim + spec.v_head_dim), spec.kv_lora_rank),
            "o_proj": (hidden, values),
        }
        if spec.q_lora_rank is None:
            form["q_proj"] = (queries, hidden)
        else:
            form |= {"q_a_proj": (spec.q_lora_rank, hidden), "q_b_proj": (queries, spec.q_lora_rank)}
        return [form], {"g_proj": (values, hidden)}
    if isinstance(spec, GQASpec):
        queries, values = spec.num_heads * spec.head_dim, spec.num_heads * spec.v_head_dim
        keys, kv_values = spec.num_kv_heads * spec.head_dim, spec.num_kv_heads * spec.v_head_dim
        out = {"o_proj": (hidden, values)}
        cut = out | {"k_proj": (keys, hidden), "v_proj": (kv_values, hidden)}
        return [
            cut | {"q_proj": (queries, hidden)},
            cut | {"q_proj": (queries + values, hidden)},  # with the output's gate
            out | {"qkv_proj": (queries + keys + kv_values, hidden)},
        ], {"g_proj": (values, hidden)}
    if isinstance(spec, GatedDeltaNetSpec):
        keys, values = spec.num_k_heads * spec.head_k_dim, spec.num_v_heads * spec.head_v_dim
        qkv = {
            "q_proj": (keys, hidden),
            "k_proj": (keys, hidden),
            "v_proj": (values, hidden),
            "o_proj": (hidden, values),
        }
        gates = {"b_proj": (spec.num_v_heads, hidden)}
        whole, out = {"in_proj_qkv": (2 * keys + values, hidden)}, {"out_proj": (hidden, values)}
        return [
            out | {"in_proj_qkvz": (2 * keys + 2 * values, hidden), "in_proj_ba": (2 * spec.num_v_heads, hidden)},
            out
            | whole
            | {"in_proj_z": (values, hidden)}
            | dict.fromkeys(("in_proj_a", "in_proj_b"), (spec.num_v_heads, hidden)),
            qkv | gates | {"g_proj": (values, hidden), "a_proj": (spec.num_v_heads, hidden)},  # Olmo
            qkv
            | gates
            | {"f_a_proj": (spec.head_v_dim, hidden), "f_b_proj": (keys, spec.head_v_dim)}
            | {"g_a_proj": (spec.head_v_dim, hidden), "g_b_proj": (values, spec.head_v_dim)},  # Kimi
        ], {}
    if isinstance(spec, GatedMLPSpec):
        inner = spec.intermediate_size
        down = {"down_proj": (hidden, inner)}
        split = down | {"gate_proj": (inner, hidden), "up_proj": (inner, hidden)}
        return [split, down | {"gate_up_proj": (2 * inner, hidden)}], {}
    return [], {}


class _Weighing:
    def __init__(self, entry: ModelEntry, tensors: Mapping[str, Tensor], norms: Mapping[str, set[str]]) -> None:
        self._entry, self._tensors, self._norms = entry, tensors, norms
        self._problems: list[str] = []
        self._notes: list[str] = []
        self._held = 0
        self._kinds = {linears: kind for kind in entry.quant.values() for linears in kind.linears}

    def done(self) -> Weighed:
        """All of it."""
        ends = "embed_tokens.weight"
        stems = [name.removesuffix(ends) for name in self._tensors if name.endswith(ends)]
        stems = [stem for stem in stems if any(name.startswith(f"{stem}layers.") for name in self._tensors)]
        if len(stems) != 1:
            found = ", ".join(stems) or "none"
            return Weighed([f"expected one embed_tokens.weight with decoder layers beside it, found {found}"])
        self._stem = stems[0]
        self._layers = self._by_layer()
        specs = self._entry.specs()
        for path, spec in specs:
            if isinstance(spec, FinalNormSpec):
                self._norm(self._modules_of_model(), "", "final_norm", spec.final_norm)
            elif isinstance(spec, ResidualSpec):
                self._residual(int(path.split(".")[1]), spec)
            else:
                self._part(path, spec)
        self._left_over()
        return Weighed(self._problems, self._notes, self._held)

    def _by_layer(self) -> dict[int, _Held]:
        layers: defaultdict[int, defaultdict[str, dict[str, Tensor]]] = defaultdict(lambda: defaultdict(dict))
        start = f"{self._stem}layers."
        for name, tensor in self._tensors.items():
            index, _, rest = name.removeprefix(start).partition(".")
            if name.startswith(start) and re.fullmatch("[0-9]{1,6}", index):
                match = _TENSOR.fullmatch(rest)
                module, what = (rest, "") if match is None else (match["module"] or "", match["what"])
                layers[int(index)][module][what] = tensor
        return {index: dict(layer) for index, layer in layers.items()}

    def _modules_of_model(self) -> _Held:
        return {
            name.removeprefix(self._stem).removesuffix(".weight"): {"weight": tensor}
            for name, tensor in self._tensors.items()
            if name.startswith(self._stem) and name.endswith(".weight") and name.count(".") == self._stem.count(".") + 1
        }

    def _say(self, where: str, problem: str) -> None:
        self._problems.append(f"{where}: {problem}")

    def _norm(self, modules: _Held, where: str, name: str, norm: NormSpec, below: str = "") -> None:
        """One norm, which is there by one of the names that adapters know, and is taken out."""
        names = sorted(self._norms.get(name, ()))
        found = next((f"{below}{each}" for each in names if f"{below}{each}" in modules), None)
        place = f"{self._stem}{where}{below}"
        if found is None:
            self._say(place or name, f"no {name} is there, as {' or '.join(names)}")
            return
        weight = modules.pop(found).get("weight")
        if weight is None or weight.shape != (norm.width,):
            self._say(f"{self._stem}{where}{found}", f"expected a weight [{norm.width}], got {weight}")
        else:
            self._held += 1

    def _residual(self, index: int, spec: ResidualSpec) -> None:
        modules, where = self._layers.get(index), f"layers.{index}."
        if modules is None:
            self._say(f"{self._stem}{where[:-1]}", "no tensor of this layer is there")
            return
        for name, norms in (("input_norms", spec.input_norms), ("post_attention_norms", spec.post_attention_norms)):
            if len(norms) == 1:
                self._norm(modules, where, name, norms[0])
            else:
                for block, norm in enumerate(norms):
                    known = {f"{each}.{block}" for each in self._norms.get(name, ()) if f"{each}.{block}" in modules}
                    self._norms = {**self._norms, f"{name}[{block}]": known}
                    self._norm(modules, where, f"{name}[{block}]", norm)

    def _part(self, path: str, spec: Any) -> None:
        """The linears and norms of an attention or an MLP, by the place of its module in the decoder layer."""
        _, index, kind, *block = path.split(".")
        modules, where = self._layers.get(int(index)), f"layers.{index}."
        if modules is None:
            return
        is_mlp = isinstance(spec, GatedMLPSpec)
        parents = [f"{name}{end}" for name in _PARTS["mlp" if is_mlp else "attention"] for end in ("", "s")]
        parents = [".".join((name, *block)) for name in parents]
        category: Linears = "attention"
        if is_mlp and kind == SHARED_EXPERTS:
            category, parents = "shared_experts", [f"{parent}.{name}" for parent in parents for name in _SHARED]
        elif is_mlp:
            category = "mlps"
        forms, optional = _forms(spec)
        if not forms:
            self._notes.append(f"{path}: what a checkpoint calls the linears of a {type(spec).__name__} is not known")
            return
        for parent in parents:
            names = {module.removeprefix(f"{parent}.") for module in modules if module.startswith(f"{parent}.")}
            if any(names & set(form) for form in forms):
                break
        else:
            self._say(f"{self._stem}{where[:-1]}", f"no linear of its {kind} is there, below {' or '.join(parents)}")
            return
        below = f"{parent}."
        form = max(forms, key=lambda form: (len(names & set(form)), self._fitting(modules, below, form), -len(form)))
        for name, sizes in {**form, **{name: optional[name] for name in names & set(optional)}}.items():
            held = modules.pop(below + name, None)
            if held is None:
                self._say(f"{self._stem}{where}{below}{name}", "is not there")
            else:
                self._linear(f"{self._stem}{where}{below}{name}", held, sizes, category, may_be_plain=name in _GATES)
        norms: dict[str, Any] = {}
        if isinstance(spec, MLASpec):
            norms = {"q_norm": spec.q_norm, "kv_norm": spec.kv_norm}
        elif isinstance(spec, GatedDeltaNetSpec):
            norms = {"output_norm": spec.output_norm}
        for name, norm in norms.items():
            if norm is not None:
                self._norm(modules, where, name, norm, below)

    @staticmethod
    def _fitting(modules: _Held, below: str, form: Form) -> int:
        """How many of these linears give as much as is there."""
        firsts = {name: [t.shape[:1] for t in modules.get(below + name, {}).values()] for name in form}
        return sum((given,) in firsts[name] for name, (given, _) in form.items())

    def _linear(
        self, where: str, held: Mapping[str, Tensor], sizes: Sizes, category: Linears, *, may_be_plain: bool = False
    ) -> None:
        kind = self._kinds.get(category)
        weight = None if kind is None else kind.weight_spec
        if may_be_plain and "weight" in held and held["weight"].dtype in _FLOATS:
            weight = None
        problems = list(_held_as(held, weight, sizes))
        self._problems += [f"{where}: {problem}" for problem in problems]
        self._held += not problems

    def _experts(self, where: str, modules: _Held) -> None:
        """Routed experts, of which an entry says how they are quantised, and that they read and give the stream."""
        hidden = self._entry.hidden_size
        numbers: defaultdict[str, dict[int, Tensor]] = defaultdict(dict)
        for module, held in modules.items():
            expert, _, name = module.partition("experts.")[2].partition(".")
            if not expert.isdecimal():
                shapes = [tensor.shape for tensor in held.values()]
                quantised = self._kinds.get("experts") is not None
                if not any(hidden in shape or hidden // 32 in shape for shape in shapes):
                    self._say(where + module, f"no side of the experts is the hidden size {hidden}, got {shapes}")
                elif quantised == any(t.dtype in _FLOATS and len(t.shape) == 3 for t in held.values()):
                    self._say(where + module, f"expected {self._as_declared('experts')}, got {_in_words(held)}")
                else:
                    self._held += 1
                continue
            stored = held.get("weight") or held.get("weight_packed") or held.get("qweight")
            if stored is None or len(stored.shape) != 2:
                self._say(where + module, f"expected the weight of a linear, got {_in_words(held)}")
                continue
            numbers[name][int(expert)] = stored
            gives_stream = stored.shape[0] == hidden and name in ("down_proj", "w2")
            packed = 1 if "weight" in held else 8 if stored.dtype == "I32" else 2
            read = stored.shape[1] * packed
            if not gives_stream and read != hidden:
                self._say(where + module, f"expected the hidden size {hidden} on one side, got {stored}")
            else:
                self._linear(where + module, held, (stored.shape[0], read), "experts")
        total = 1 + max((max(found) for found in numbers.values()), default=-1)
        for name, found in numbers.items():
            if len(found) != total:
                self._say(f"{where}experts", f"{total - len(found)} of {total} {name} are not there")
            if len({tensor.shape for tensor in found.values()}) > 1:
                self._say(f"{where}experts", f"{name} are not all of one shape")

    def _as_declared(self, category: Linears) -> str:
        kind = self._kinds.get(category)
        return "weights as they are" if kind is None else str(kind)

    def _left_over(self) -> None:
        """What no spec of the entry has named."""
        undeclared = self._entry.mlp_at()
        for index, modules in sorted(self._layers.items()):
            where = f"{self._stem}layers.{index}."
            if index >= self._entry.num_hidden_layers:
                if _DRAFT in modules:
                    self._notes.append(f"{where[:-1]} predicts further tokens, and is no layer of the model")
                else:
                    self._say(where[:-1], f"is one more than the {self._entry.num_hidden_layers} declared layers")
                continue
            self._experts(where, {name: held for name, held in modules.items() if ".experts." in f".{name}"})
            for name, held in modules.items():
                first = name.partition(".")[0].rstrip("s")
                is_linear = any(len(t.shape) == 2 and what != "" for what, t in held.items())
                if ".experts." in f".{name}" or not (is_linear or "qweight" in held):
                    continue
                if first in _PARTS["mlp"] and (
                    undeclared[index] is None or "gate" in name.split(".")[-1] or "router" in name
                ):
                    continue  # routers and gates of mixtures, and MLPs that the entry says nothing of
                if ".indexer." in f".{name}":
                    continue  # chooses tokens for sparse attention, which is no part of a spec
                self._say(where + name, f"is not named by the entry: {_in_words(held)}")
        silent = undeclared.count(None)
        if silent:
            self._notes.append(
                f"the entry declares no MLP of {silent} layers: only experts' sides were looked at there"
            )


def _in_words(held: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{what} {tensor}".strip() for what, tensor in held.items()) or "nothing"


def _held_as(held: Mapping[str, Tensor], weight: WeightSpec | None, sizes: Sizes) -> Iterator[str]:
    """What in these tensors of a linear is not as it is declared."""
    given, read = sizes
    if weight is None:
        found = held.get("weight")
        if found is None or found.dtype not in _FLOATS or "weight_scale_inv" in held or "weight_scale" in held:
            yield f"expected a weight that is not quantised, got {_in_words(held)}"
        elif found.shape != sizes:
            yield f"expected a weight {list(sizes)}, got {found}"
        return
    rows, columns = weight.block or (1, 1)
    scales: dict[str, list[tuple[int, ...]]] = {
        "tensor": [(), (1,)],
        "channel": [(given, 1), (given,)],
        "plain": [],
    }
    scale_shapes = scales.get(weight.scheme, [(math.ceil(given / rows), math.ceil(read / columns))])
    stored: dict[str, list[tuple[str, str, tuple[int, ...]]]] = {
        "float8_e4m3fn": [("weight", "F8_E4M3", sizes)],
        "int8": [("weight", "I8", sizes), ("weight_packed", "I32", (given, math.ceil(read / 4)))],
        "int4": [("weight_packed", "I32", (given, math.ceil(read / 8)))],
        "float4_e2m1fn": [("weight_packed", "U8", (given, math.ceil(read / 2)))],
    }
    ways = stored.get(weight.dtype)
    if ways is None:
        yield f"how a checkpoint holds {shown(weight.dtype)} is not known"
        return
    if not any(what in held and (held[what].dtype, held[what].shape) == (dtype, shape) for what, dtype, shape in ways):
        expected = " or ".join(f"{what} {dtype} {list(shape)}" for what, dtype, shape in ways)
        yield f"expected {expected}, got {_in_words(held)}"
        return
    scale = held.get("weight_scale_inv") or held.get("weight_scale")
    if scale_shapes and (scale is None or scale.shape not in scale_shapes):
        yield f"expected scales {' or '.join(str(list(shape)) for shape in scale_shapes)}, got {scale or 'none'}"
