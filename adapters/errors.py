"""What can go wrong between a layer and its spec, one class per mistake.

Every error carries its data as attributes as well as text, and is also a builtin error, so that guards written by
others (`except LookupError`, `hasattr`) keep working.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from .pipeline import ELSEWHERE

FOREIGN = (Exception, SystemExit)
"""What code of others may raise where it is asked for something: a layer's property, a plugin, a `repr`. `sys.exit` is no
reason to end an engine. KeyboardInterrupt is the user's, and passes."""

_LAST_WORD = re.compile(r"[A-Z][a-z]+|[A-Z]+(?![a-z])")
_KIND = re.compile(r"(Self|Cross|Decoder|Encoder)?([A-Z][a-z]+|[A-Z]+)\d*$")
_NORM = re.compile(r"Norm(Gated)?\d*$")


def closest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known names most like `name`, best first; compared by their last part too, since prefixes are often long.

    Where none is like it, the shortest that it is a part of.
    """
    import difflib  # only ever needed for a message

    known = list(known)
    best = difflib.get_close_matches(name, known, n=count, cutoff=0.6)
    tails: dict[str, list[str]] = {}
    for full in known:
        tails.setdefault(_tail(full), []).append(full)
    for tail in difflib.get_close_matches(_tail(name), tails, n=count, cutoff=0.6):
        best.extend(full for full in tails[tail] if full not in best)
    part = _letters(name)
    if not best and len(part) > 2:
        best = sorted((full for full in known if part in _letters(full)), key=len)
    return best[:count]


def _letters(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()


def _tail(name: str) -> str:
    return name.rsplit(":", 1)[-1].rsplit(".", 1)[-1]


def closest_classes(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known layer classes (`package:ClassName`) that are much like this one, best first; often none.

    Only the class's own name counts, and where others end in the same word (Attention, DecoderLayer, Model), only those:
    a norm is not like a decoder layer of the same package. That word says nothing of which model a class is of, so what stands in front
    of it is compared. Classes of the same package come first: an engine names the parts of its layers in one way. The last is another's,
    where one is like it. Of an engine's class where none of the engine's is like it there is none: another's facts read nothing in it.
    """
    package, _, own = name.rpartition(":")
    known, top, word = list(known), _top(package), _LAST_WORD.findall(own)[-1:]
    same_word = [full for full in known if _LAST_WORD.findall(_tail(full))[-1:] == word]
    compared = _head if same_word else str.lower
    best = []
    for inside in (True, False):
        tails: dict[str, list[str]] = {}
        for full in same_word or known:
            if (_top(full) == top) == inside:
                tails.setdefault(_tail(full), []).append(full)
        alike = {tail: _likeness(compared(own), compared(tail)) for tail in tails}
        near = [tail for tail in tails if alike[tail] >= 0.7]
        near.sort(key=lambda tail: _likeness(own, tail), reverse=True)
        best.append([full for tail in near for full in tails[tail]])
    ours, others = best
    if not ours:
        return [] if any(_top(full) == top for full in known) else others[:count]
    return [*ours[: count - len(others[:1])], *others[:1]]


def _head(name: str) -> str:
    """The name of a class in front of the words that say what it is, in small letters: `kimik3` of KimiK3DecoderLayer."""
    return _KIND.sub("", name).lower()


def _likeness(one: str, other: str) -> float:
    import difflib

    return difflib.SequenceMatcher(None, other, one).ratio() if one and other else 0.0


def _top(key: str) -> str:
    return key.partition(":")[0].partition(".")[0]


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """`; did you mean 'a' or 'b'?`, or nothing when no known name is near. Of a long name the beginning is compared."""
    near = closest(cut(name), known) if isinstance(name, str) else ()
    return "; did you mean " + " or ".join(repr(n) for n in near) + "?" if near else ""


def shown(value: object, most: int = 80) -> str:
    """`repr(value)` for a message: short, and never an error of its own."""
    try:
        # A text is cut first: of a long one the repr is several times as long.
        return cut(repr(value[:most]) + "..." if type(value) is str and len(value) > most else repr(value), most)
    except FOREIGN:  # Python refuses to print a number of thousands of digits, and objects may break as they like
        return f"{cut(type(value).__name__, most)}, too long or too broken to print"


def said(error: BaseException, most: int = 200) -> str:
    """The class and text of somebody else's error for a message: short, and never an error of its own."""
    try:
        text = str(error)
    except FOREIGN:  # an error's text is its author's code
        text = "(its text cannot be read)"
    return f"{cut(type(error).__name__)}: {cut(text, most)}"


def counted(number: int, one: str, many: str = "") -> str:
    """A number and what is counted: `1 line`, `2 lines`."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def first_of(places: Sequence[object]) -> str:
    """`layers.0:input and 3 more`: the first of several sites or layers, where an empty path is the model itself, and how many others there are."""
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    return f"{str(places[0]) or 'the model itself'}{more}"


def cut(text: str, most: int = 80) -> str:
    """A text for a message, no longer than this."""
    return text if len(text) <= most else text[: most - 3] + "..."


class UnreadableError(Exception):
    """A path that leads nowhere on this layer. Carries the sentence for the error; never leaves this package."""


class LayerfuseError(Exception):
    """The parent of every error this library raises."""


class ArgumentError(LayerfuseError, TypeError):
    """An argument of another type than the function takes: the message names it, and says what to give."""


class ArgumentValueError(ArgumentError, ValueError):
    """An argument whose value the function does not take: the message names it, and says what it takes."""


class UnknownNameError(LayerfuseError, LookupError):
    """Nothing has this name. `known` holds the names that there are."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name = name
        self.known = tuple(known)
        super().__init__(name, self.known)


class SpecError(LayerfuseError, ValueError):
    """A spec whose numbers cannot all be true. `problems` holds one sentence each."""

    def __init__(self, what: str, problems: Sequence[str]) -> None:
        self.what = what
        self.problems = tuple(problems)
        super().__init__(what, self.problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return f"{self.what}: {self.problems[0]}"
        return f"{self.what}:" + "".join(f"\n  - {problem}" for problem in self.problems)


class FactsError(LayerfuseError, ValueError):
    """An adapter declaration that is malformed. Raised when it is defined, never when a layer is read."""


_OF_NORMS = (
    "A norm is no layer of its own: it is read as part of the layer that holds it, so ask spec_for for that layer."
)


class UnknownLayerError(LayerfuseError, LookupError):
    """No adapter speaks for this class of layer. `hint` is the sentence that says what to do, `where` stands after the class."""

    def __init__(self, class_name: str, known: Iterable[str], hint: str = "", where: str = "") -> None:
        self.class_name = class_name = cut(class_name, 200)
        self.where = where
        is_norm = not hint and _NORM.search(class_name) is not None
        self.closest = () if is_norm else tuple(closest_classes(class_name, known))
        self.hint = _OF_NORMS if is_norm else hint
        super().__init__(class_name, self.closest, self.hint, where)

    def __str__(self) -> str:
        near = "; the closest known are " + ", ".join(self.closest) if self.closest else ""
        # Where nothing is like it, any example would be one of another kind of layer.
        how = (
            f'for example like = "{self.closest[0]}"'
            if self.closest
            else "with its family and where it says each field"
        )
        remedy = self.hint or (
            f"To register one, declare it in a models.toml entry under layer_classes ({how}), or call registry.register_adapter."
        )
        return f"no adapter knows the layer class {self.class_name}{self.where}{near}. {remedy}"


class MissingAttributeError(LayerfuseError, AttributeError):
    """A layer that lacks what its adapter reads: names the layer, the adapter, the field and every path tried."""

    def __init__(
        self,
        *,
        layer: str,
        adapter: str,
        field: str,
        tried: Sequence[str],
        existing: Sequence[str],
    ) -> None:
        self.layer = layer
        self.adapter = adapter
        self.field = field
        self.tried = tuple(tried)
        self.existing = tuple(existing)
        super().__init__(layer, adapter, field, self.tried, self.existing)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_missing, (self.layer, self.adapter, self.field, self.tried, self.existing)

    def __str__(self) -> str:
        lines = [f"{self.layer} does not say its {self.field} (adapter {self.adapter}). Tried:"]
        lines += [f"  - {attempt}" for attempt in self.tried]
        lines.append("It has: " + (", ".join(self.existing) or "no public attributes") + ".")
        if any(ELSEWHERE in attempt for attempt in self.tried):
            lines.append("Ask that rank for it; specs_in reads what this one holds.")
            return "\n".join(lines)
        lines.append(
            f'If one of these is the {self.field}, say so in models.toml: layer_classes."<class>" with '
            f'{self.field} = "<attribute>".'
        )
        return "\n".join(lines)


def _rebuild_missing(
    layer: str, adapter: str, field: str, tried: Sequence[str], existing: Sequence[str]
) -> MissingAttributeError:
    return MissingAttributeError(layer=layer, adapter=adapter, field=field, tried=tried, existing=existing)


class ParallelUnknownError(LayerfuseError, LookupError):
    """The layer's weights may be sharded, and nothing says by how much. A size of 1 is never guessed."""

    def __init__(self, layer: str, tried: Sequence[str]) -> None:
        self.layer = layer
        self.tried = tuple(tried)
        super().__init__(layer, self.tried)

    def __str__(self) -> str:
        tried = "".join(f"\n  - {attempt}" for attempt in self.tried)
        return (
            f"{self.layer} does not say by how many tensor-parallel ranks it was sharded"
            + (f". Tried:{tried}\nPass" if tried else "; pass")
            + " parallel=Parallel(size=..., rank=...) to spec_for, specs_in or fusion.compile, or read it inside "
            "`with tensor_parallel(size, rank):`."
        )


class ParallelConflictError(LayerfuseError, ValueError):
    """Two sources of the tensor-parallel degree disagree. `sources` maps each source to what it said."""

    def __init__(self, layer: str, sources: dict[str, int]) -> None:
        self.layer = layer
        self.sources = dict(sources)
        super().__init__(layer, self.sources)

    def __str__(self) -> str:
        said = ", ".join(f"{source} says {shown(size)}" for source, size in self.sources.items())
        return f"{self.layer}: its tensor-parallel size is contradicted: {said}. Correct whichever is wrong."


class InnerLayerError(LayerfuseError, AttributeError):
    """Something was asked of an inner kernel layer that only the layer around it knows."""

    def __init__(self, field: str, spec: str, outer: str) -> None:
        self.field = field
        self.spec = spec
        self.outer = outer
        super().__init__(field, spec, outer)

    def __str__(self) -> str:
        return f"{self.spec} describes an inner kernel layer, which does not know its {self.field}; ask {cut(self.outer, 200)}."
