"""What a model holds that no adapter reads: attention, and what is left of layers that were declared in part.

Fusions are planned where something was read, so that the rest would be missed in silence. Everything here goes by paths and
classes: a module that no adapter knows is asked for nothing.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Set
from typing import Any

from ..adapters.reader import LayerReader
from ..adapters.specs import FinalNormSpec, KernelSpec, MLPSpec, ResidualSpec
from .streams import Streams, within
from .tables import Readers

_LOOKS_LIKE_ATTENTION = re.compile(r"(Attention|Attn|MLA|DeltaNet|SelfAttn)\d*$")
_LOOKS_LIKE_RMS_NORM = re.compile(r"rms_?norm|(?<!layer)(?<!batch)(?<!group)(?<!instance)norm$", re.IGNORECASE)
_ATTENTIONS = (("q_proj", "k_proj", "v_proj"), ("qkv_proj", "o_proj"), ("kv_b_proj", "o_proj"))
_MLPS = (
    ("gate_proj", "up_proj", "down_proj"),
    ("gate_up_proj", "down_proj"),
    ("w1", "w2", "w3"),
    ("input_linear", "output_linear"),
)
"""Children that tell what a module inside of a known decoder layer is."""
_ROUTED = ".experts."

_DECLARE = 'declare the class under layer_classes, like one that is known or with family = "{}"'
_MLP = "{} as GatedMLPSpec: a gated MLP by its {}; " + _DECLARE.format("gated_mlp")
_STREAM = "{} as ResidualSpec: a decoder layer by its norms, which nothing reads; " + _DECLARE.format("residual")
_FINAL = "{} as FinalNormSpec: its {} stands beside decoder layers that are read; {}"
_DECLARE_FINAL = _DECLARE.format("final")
_OF_TORCH = "put both into a class of your own, and declare that"


def is_attention(reader: LayerReader) -> bool:
    """Whether layers are read as attention."""
    return not issubclass(reader.facts.spec, (ResidualSpec, FinalNormSpec, KernelSpec, MLPSpec))


def class_name(cls: type) -> str:
    """A class as layer classes are written: `module:ClassName`."""
    return f"{cls.__module__}:{cls.__qualname__}"


class Unread:
    """One model, and what of it nobody reads."""

    def __init__(
        self, modules: list[tuple[str, Any]], readers_of: Callable[[type], Readers], ignores: Callable[[type], bool]
    ) -> None:
        """Args: modules: all of the model, by path, in its order."""
        self._classes = {path: type(module) for path, module in modules}
        self._children: dict[str, list[str]] = defaultdict(list)
        for path in filter(None, self._classes):
            self._children[_parent(path)].append(path)
        self._streams = Streams(modules)
        self._readers = {cls: readers_of(cls) for cls in set(self._classes.values())}
        self._ignored = {cls for cls, readers in self._readers.items() if not readers and ignores(cls)}
        self._layers = {path: reader for path in self._classes for reader in self._read_as(path, ResidualSpec)}
        self._norms = {self._classes.get(norm) for norm in self._norms_of_layers()}
        # What holds decoder layers -> the last of them, with what wraps it.
        self._last = {_parent(path): path for path in filter(None, map(self._streams.outermost, self._layers))}
        self._left, self._strange = self._attention()
        self._apart = {*self._left, *self._strange}

    def found(self) -> list[tuple[str, str]]:
        """(path, class) in the model's order. Behind a class that is no attention's stands what it is, and what to do."""
        found = {
            **dict(self._final_norms()),
            **dict(self._decoder_layers()),
            **dict(self._mlps()),
            **{path: class_name(self._classes[path]) for path in self._strange},
        }
        return [(path, found[path]) for path in self._classes if path in found]

    # ---- what is looked for

    def _attention(self) -> tuple[list[str], list[str]]:
        """Attention that is read, and what is to be left alone with all in it; and attention that nobody knows."""
        left: list[str] = []
        strange: list[str] = []
        inside: str | None = None
        read = [path for path, cls in self._classes.items() if any(map(is_attention, self._readers[cls]))]
        for path, cls in self._classes.items():
            if within(path, inside):
                continue
            if any(map(is_attention, self._readers[cls])) or cls in self._ignored:
                left.append(inside := path)
            elif not self._readers[cls] and (
                (_LOOKS_LIKE_ATTENTION.search(cls.__name__) or self._in_layer(path, _ATTENTIONS))
                and not any(within(each, path) for each in read)  # BERT's only wraps it
            ):
                strange.append(inside := path)
        return left, strange

    def _mlps(self) -> Iterator[tuple[str, str]]:
        for path, cls in self._classes.items():
            mixture = f"{path}.router" in self._children.get(path, ())
            names = () if self._readers[cls] or mixture else self._in_layer(path, _MLPS)
            # A decoder layer that is its own attention holds an MLP all the same.
            if names and _ROUTED not in path and _around(path, self._apart - self._layers.keys()) is None:
                yield path, _MLP.format(class_name(cls), _listed(names))

    def _decoder_layers(self) -> Iterator[tuple[str, str]]:
        around = [each for path in self._left if self._readers[self._classes[path]] for each in self._blocks(path)]
        for path in dict.fromkeys((*around, *filter(self._beside_layers, self._classes))):
            cls = self._classes.get(path, object)
            apart = cls in self._ignored or self._readers[cls] or path in self._apart
            if apart or _around(path, self._apart | self._layers.keys()) is not None:
                continue
            if self._holds_norms(path) and not any(within(each, path) for each in self._layers):
                yield path, _STREAM.format(class_name(cls))

    def _final_norms(self) -> Iterator[tuple[str, str]]:
        read = {path for path in self._classes for _ in self._read_as(path, FinalNormSpec)}
        # Layers that end with a norm of their own: one behind them is of the head.
        ends = [path for path, reader in self._layers.items() if "post_norms" in reader.facts.parsed]
        ended = set(map(self._streams.outermost, ends))
        for holder, layer in self._last.items():
            if holder in self._streams.cut or _around(layer, read) is not None or layer in ended:
                continue
            norm = self._norm_beside(layer)
            if norm is None:
                continue
            owner = _shared(norm, layer)
            while owner and self._of_torch(owner):
                owner = _parent(owner)  # nobody declares a ModuleDict
            if owner in self._classes:
                remedy = _OF_TORCH if self._of_torch(owner) else _DECLARE_FINAL
                yield owner, _FINAL.format(class_name(self._classes[owner]), norm[len(owner) :].lstrip("."), remedy)

    # ---- how it is told

    def _read_as(self, path: str, spec: type[Any]) -> list[LayerReader]:
        readers = self._readers.get(self._classes.get(path, object), ())
        return [reader for reader in readers if reader.facts.spec is spec]

    def _norms_of_layers(self) -> Iterator[str]:
        for path, reader in self._layers.items():
            yield from (f"{path}.{norm.module}".lstrip(".") for norm in reader.facts.norms)

    def _in_layer(self, path: str, kinds: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
        """The children by which a module in a known decoder layer is of one of these kinds; none where it is not."""
        names = {child.rpartition(".")[2] for child in self._children.get(path, ())}
        told = next((kind for kind in kinds if names.issuperset(kind)), ())
        return told if told and _around(path, self._layers.keys()) is not None else ()

    def _blocks(self, attention: str) -> Iterator[str]:
        """What may be the decoder layer around an attention: modules around it that hold a norm, up to a list of layers."""
        path = self._streams.outermost(attention)
        while path:
            path = _parent(path)
            if self._holds_norms(path):
                yield path
                return
            if path.rpartition(".")[2].isdecimal():
                return

    def _beside_layers(self, path: str) -> bool:
        """Whether a module lies in a list with known decoder layers, or in that of a model whose final norm is known."""
        holder, _, name = path.rpartition(".")
        known = holder in self._last or (holder != "" and bool(self._read_as(_parent(holder), FinalNormSpec)))
        return name.isdecimal() and known

    def _holds_norms(self, path: str) -> bool:
        """Whether a norm is among its children, or lists of norms are, as of a layer with two attentions."""
        for child in self._children.get(path, ()):
            if self._is_norm(child) or any(map(self._is_norm, self._listed(child))):
                return True
        return False

    def _listed(self, path: str) -> Iterator[str]:
        """What lies in a module that is a list or dict of modules, and in those within it."""
        names = {base.__name__ for base in self._classes[path].__mro__ if base.__module__.startswith("torch.")}
        if not names.isdisjoint(("ModuleList", "ModuleDict")):
            for child in self._children.get(path, ()):
                yield child
                yield from self._listed(child)

    def _is_norm(self, path: str) -> bool:
        """An RMS norm by the name of its class, or of the class of a decoder layer's norms; or what wraps one."""
        while len(self._children.get(path, ())) == 1:
            (path,) = self._children[path]
        cls = self._classes[path]
        return cls in self._norms or any(_LOOKS_LIKE_RMS_NORM.search(base.__name__) for base in cls.__mro__)

    def _norm_beside(self, path: str) -> str | None:
        """The norm behind a module, or behind what holds it, the nearest first; where there is none, the one in front.

        What is defined in front may run behind, but for a list. Two in front norm what goes in: a draft's block has such. What
        looks like a head may be a projector: a norm that stands by itself goes before its norm, and so does one in front that is nearer.
        """
        in_front: list[str] = []
        while path:
            beside = self._children[_parent(path)]
            at = beside.index(path)
            behind = [norm for each in beside[at + 1 :] for norm in self._norms_in(each)]
            alone = [norm for norm in behind if norm in beside]
            if alone or (behind and not in_front):
                return (alone or behind)[0]
            before = [] if path.rpartition(".")[2].isdecimal() else [*filter(self._is_norm, beside[:at])]
            in_front += before if len(before) == 1 else []
            path = _parent(path)
        return in_front[0] if in_front else None

    def _norms_in(self, path: str) -> list[str]:
        """The norm that a module is, or those of a head: of one that holds nothing but norms and single modules beside."""
        children = self._children.get(path, [])
        if self._classes[path] in self._ignored:
            return []
        if self._is_norm(path):
            return [path]
        return [] if any(map(self._children.get, children)) else [*filter(self._is_norm, children)]

    def _of_torch(self, path: str) -> bool:
        return self._classes.get(path, object).__module__.startswith("torch.")


def _listed(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _shared(path: str, other: str) -> str:
    """The innermost module that holds both."""
    while not within(other, path := _parent(path)):
        pass
    return path


def _around(path: str, outer: Set[str]) -> str | None:
    """The nearest of these modules that another lies inside of."""
    while path:
        path = _parent(path)
        if path in outer:
            return path
    return None
