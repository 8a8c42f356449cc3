"""An entry held to the tensors of its checkpoint: each linear and norm is there, as wide and as quantised as declared, and no other.

Norms have the names that adapters know them by. What adapters need not know, the sizes of linears, stands here per family.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from attrs import field, frozen

from ..adapters.base import Adapter
from ..adapters.errors import first_of
from ..adapters.specs import (
    FinalNormSpec,
    GatedDeltaNetSpec,
    GatedMLPSpec,
    MLASpec,
    NormSpec,
    ResidualSpec,
)
from .catalog import ModelEntry
from .kinds import SHARED_EXPERTS, ExpertsKind
from .published import Linears
from .safetensors import Tensor
from .weight_forms import FLOATS, Form, Sizes, forms, held_as, in_words

_Linear: TypeAlias = tuple[str, Mapping[str, Tensor]]
"""A linear's module and its tensors."""
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
_DOWN = ("down_proj", "w2", "output_linear")
"""What the linear is called by which experts give the stream."""


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
        ways, optional = forms(spec)
        if not ways:
            self._notes.append(f"{path}: what a checkpoint calls the linears of a {type(spec).__name__} is not known")
            return
        for parent in parents:
            names = {module.removeprefix(f"{parent}.") for module in modules if module.startswith(f"{parent}.")}
            if any(names & set(form) for form in ways):
                break
        else:
            self._say(f"{self._stem}{where[:-1]}", f"no linear of its {kind} is there, below {' or '.join(parents)}")
            return
        below = f"{parent}."
        form = max(ways, key=lambda form: (len(names & set(form)), self._fitting(modules, below, form), -len(form)))
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
        firsts = {}
        for name in form:
            held = modules.get(below + name, {})
            # GPTQ and AWQ keep a linear the other way round.
            sides = [held["scales"].shape[-1:]] if "qweight" in held and "scales" in held else None
            firsts[name] = sides or [tensor.shape[:1] for tensor in held.values()]
        return sum((given,) in firsts[name] for name, (given, _) in form.items())

    def _linear(
        self, where: str, held: Mapping[str, Tensor], sizes: Sizes, category: Linears, *, may_be_plain: bool = False
    ) -> None:
        kind = self._kinds.get(category)
        weight = None if kind is None else kind.weight_spec
        if may_be_plain and "weight" in held and held["weight"].dtype in FLOATS:
            weight = None
        problems = list(held_as(held, weight, sizes))
        self._problems += [f"{where}: {problem}" for problem in problems]
        self._held += not problems

    def _experts(self, where: str, modules: _Held) -> None:
        """Routed experts: each has its three linears, or all are merged into two tensors; as many and as wide as declared."""
        said = self._entry.experts
        if not modules or said is None:
            unsaid = "the entry says nothing of its routed experts"
            if modules and unsaid not in self._notes:
                self._notes.append(unsaid)
            return
        numbers: defaultdict[str, dict[int, _Linear]] = defaultdict(dict)
        for module, held in modules.items():
            expert, _, name = module.partition("experts.")[2].partition(".")
            if expert.isdecimal():
                numbers[name][int(expert)] = (module, held)
            else:
                self._merged(where + module, expert, held, said)
        for name, found in numbers.items():
            sizes = (self._entry.hidden_size, said.intermediate_size)
            sizes = sizes if name in _DOWN else sizes[::-1]
            for number in sorted(found)[: said.num_experts]:
                module, tensors = found[number]
                self._linear(where + module, tensors, sizes, "experts")
            missing = [number for number in range(said.num_experts) if number not in found]
            if missing:
                which = f"expert {first_of(missing)} of {said.num_experts}"
                self._say(f"{where}experts", f"the {name} of {which} is not there")
        # LongCat's zero experts give back what they are given: they have rows in some tensors, and no down-projection.
        whole = set.intersection(*(set(found) for found in numbers.values())) if numbers else set()
        beyond = [number for number in whole if number >= said.num_experts]
        if beyond:
            self._say(f"{where}experts", f"there are {len(whole)}, and {said.num_experts} are declared")

    def _merged(self, where: str, name: str, held: Mapping[str, Tensor], said: ExpertsKind) -> None:
        """All experts' linears of one kind in one tensor, as transformers keeps them, or in blocks of MXFP4 as gpt-oss is published."""
        hidden, width = self._entry.hidden_size, said.intermediate_size
        given, read = (hidden, width) if name in _DOWN else (2 * width if "gate_up" in name else width, hidden)
        kind = self._kinds.get("experts")
        if "blocks" in held or "scales" in held:
            groups = (said.num_experts, given, math.ceil(read / 32))
            expected = {"blocks": Tensor("U8", (*groups, 16)), "scales": Tensor("U8", groups)}
            found = {what: held[what] for what in expected if what in held}
            if kind is None or (kind.weight, kind.scheme) != ("float4_e2m1fn", "mx"):
                self._say(where, f"expected {self._as_declared('experts')}, got {in_words(held)}")
            elif found != expected:
                self._say(where, f"expected {in_words(expected)}, got {in_words(held)}")
            else:
                self._held += 1
            return
        tensors = [tensor for tensor in held.values() if len(tensor.shape) == 3]
        plain = [tensor for tensor in tensors if tensor.dtype in FLOATS]
        if not tensors and kind is None and all(len(tensor.shape) == 2 for tensor in held.values()):
            return  # biases
        if (kind is None) != bool(plain):
            self._say(where, f"expected {self._as_declared('experts')}, got {in_words(held)}")
        elif kind is None and not any(
            t.shape[0] == said.num_experts and sorted(t.shape[1:]) == sorted((given, read)) for t in plain
        ):
            self._say(where, f"expected [{said.num_experts}, {given}, {read}], got {in_words(held)}")
        else:
            self._held += 1

    def _as_declared(self, category: Linears) -> str:
        kind = self._kinds.get(category)
        return "weights as they are" if kind is None else str(kind)

    def _left_over(self) -> None:
        """What no spec of the entry has named."""
        undeclared, mixtures = self._entry.mlp_at(), self._entry.mixture_at()
        for index, modules in sorted(self._layers.items()):
            where = f"{self._stem}layers.{index}."
            if index >= self._entry.num_hidden_layers:
                if _DRAFT in modules:
                    self._notes.append(f"{where[:-1]} predicts further tokens, and is no layer of the model")
                else:
                    self._say(where[:-1], f"is one more than the {self._entry.num_hidden_layers} declared layers")
                continue
            experts = {name: held for name, held in modules.items() if ".experts." in f".{name}"}
            self._experts(where, experts)
            if self._entry.experts is not None and mixtures[index] != bool(experts):
                how = "none is declared in this layer" if experts else "none is there"
                self._say(f"{where}experts", f"of routed experts, {how}")
            for name, held in modules.items():
                first = name.partition(".")[0].rstrip("s")
                is_linear = any(len(t.shape) == 2 and what not in ("", "bias") for what, t in held.items())
                if ".experts." in f".{name}" or not (is_linear or "qweight" in held):
                    continue
                if first in _PARTS["mlp"] and (
                    undeclared[index] is None or "gate" in name.split(".")[-1] or "router" in name
                ):
                    continue  # routers and gates of mixtures, and MLPs that the entry says nothing of
                if ".indexer." in f".{name}":
                    continue  # chooses tokens for sparse attention, which is no part of a spec
                self._say(where + name, f"is not named by the entry: {in_words(held)}")
        silent = sum(mlp is None and not mixture for mlp, mixture in zip(undeclared, mixtures, strict=True))
        if silent:
            self._notes.append(
                f"the entry declares neither an MLP nor experts of {silent} layers: none was looked at there"
            )
