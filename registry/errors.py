"""What can go wrong with a registration or a models.toml file."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ..adapters.errors import LayerfuseError, UnknownNameError, closest, cut, did_you_mean, shown


class ConflictError(LayerfuseError, ValueError):
    """Two owners declare the same name, or classes of which one covers the other, differently. Neither wins."""

    def __init__(self, what: str, owners: Sequence[str], others: Sequence[ConflictError] = ()) -> None:
        self.what = what
        self.owners = tuple(owners)
        self.others = tuple(others)
        "Further conflicts of the same registration."
        super().__init__(what, self.owners, self.others)

    @classmethod
    def of(cls, conflicts: Sequence[ConflictError]) -> ConflictError:
        """Several as one error, which says them all."""
        first, *others = conflicts
        return cls(first.what, first.owners, others)

    def __str__(self) -> str:
        owners = " and by ".join(cut(owner, 400) for owner in self.owners)
        own = f"{cut(self.what, 400)} is declared differently by {owners}; rename or remove one of them"
        more = len(self.others) - MOST_PROBLEMS
        rest = [f"and {more} more conflict{'s' if more > 1 else ''}"] if more > 0 else []
        return "\n".join([own, *map(str, self.others[:MOST_PROBLEMS]), *rest])


MOST_PROBLEMS = 50
"""Mistakes listed for one file before the rest is only counted."""


TOO_MANY_PROBLEMS = 1000
"""Mistakes after which a file is not read on: it is no models file."""

LONGEST_PROBLEM = 800
"""Letters of one mistake that are shown."""


class CatalogError(LayerfuseError, ValueError):
    """A models.toml file with mistakes: all of them, each as `file: problem @ path`."""

    def __init__(self, file: str, problems: Sequence[str]) -> None:
        self.file = file
        more = len(problems) - MOST_PROBLEMS
        least = "at least " if len(problems) >= TOO_MANY_PROBLEMS else ""  # the file was not read on
        rest = [f"and {least}{more} more problem{'s' if more > 1 else ''}"] if more > 0 else []
        self.problems = (*map(_cut, problems[:MOST_PROBLEMS]), *rest)
        super().__init__(file, self.problems)

    def __str__(self) -> str:
        file = _printable(_cut(self.file))
        return "\n".join(f"{file}: {_printable(problem)}" for problem in self.problems)


def _cut(problem: str) -> str:
    """A problem without its middle where a file has names of thousands of letters. Its place stands at its end."""
    return (
        problem
        if len(problem) <= LONGEST_PROBLEM
        else f"{problem[: LONGEST_PROBLEM * 3 // 4]}...{problem[-LONGEST_PROBLEM // 4 :]}"
    )


def _printable(text: str) -> str:
    """One line, whatever a file calls its models: a name may hold a newline, or what a terminal takes for a command."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


HOW = {
    "-fp8-dynamic": ("per_token", "with a scale per token"),
    "-fp8-block": ("group128", "in blocks of 128 x 128"),
    "-fp8": ("group128", "in blocks of 128 x 128 (static: of one scale; per_token: of one per token)"),
}
"""How names of checkpoints in fp8 end -> the `--quant` that fits, and what it is of."""


class UnknownModelError(UnknownNameError):
    """No models.toml entry has this name. `quantised`: the declared model of which it names a checkpoint in fp8, and `HOW` it says that it quantises."""

    quantised: tuple[str, str] | None = None
    begun: str | None = None
    "The declared model with whose name or id, of its last part, this one's last part begins."

    @classmethod
    def of(cls, name: str, names: Mapping[str, str], known: Collection[str]) -> UnknownModelError:
        """The error, with the declared model of which this is called a checkpoint in fp8: `names` has the model of each name."""
        error, asked = cls(name, known), cut(name.lower(), 200).rpartition("/")[2]
        last = {each.rpartition("/")[2]: model for each, model in names.items()}
        suffix = next((each for each in HOW if asked.endswith(each)), None)
        if suffix is not None and asked not in last and (base := last.get(asked.removesuffix(suffix))):
            error.quantised = base, suffix
        own = {
            each.rpartition("/")[2]: model for each, model in names.items() if each == model or "/" in each
        }  # no alias
        error.begun = own.get(max((each for each in own if f"{asked}-".startswith(f"{each}-")), key=len, default=""))
        return error

    @property
    def closest(self) -> tuple[str, ...]:
        """The model whose name this one begins with, or else the names that are most like it; of an id its last part is compared too."""
        if self.begun is not None:
            return (self.begun,)
        name = cut(self.name.lower(), 200)
        return tuple(closest(name, self.known) or closest(name.rpartition("/")[2], self.known))

    def __str__(self) -> str:
        near = f"; did you mean {' or '.join(self.closest)}?" if self.closest else "."
        if self.quantised is not None:
            base, suffix = self.quantised
            how, words = HOW[suffix]
            near += f" `layerfuse plan {base} --quant {how}` plans for its linears in fp8 {words}."
        return f"no model is called {shown(self.name)}{near} `layerfuse models` lists all {len(self.known)}."


class UnknownEngineError(UnknownNameError):
    """No engine of this name is known."""

    def __str__(self) -> str:
        return f"no engine is called {shown(self.name)}{did_you_mean(self.name, self.known)} (known: {', '.join(self.known)})"


class PluginError(LayerfuseError, ImportError):
    """An installed plugin that cannot be loaded, or that is no adapter or models file."""
