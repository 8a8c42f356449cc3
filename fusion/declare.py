"""How an op is declared: its arguments, its results and its reference. Nothing here needs torch.

The schema, the checks, the fake, the case that picks a backend, the public function with its docstring and the
benchmark's inputs are made from the declaration (`ops.library`, `bench`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from keyword import iskeyword
from typing import Any, ClassVar, TypeAlias

from attrs import asdict, define, field, frozen

from ..adapters.errors import LayerfuseError, did_you_mean, shown
from .kernel_source import why_absent


class OpError(LayerfuseError, ValueError):
    """An op or a kernel that is declared wrongly; the message says what to change."""


@frozen
class Source:
    """A default that is written as source text: torch is not imported here."""

    text: str

    def __repr__(self) -> str:
        return self.text


class _Declared:
    """Compares and prints by the fields of its class. attrs would write that out for each of some fifty kinds, in a tenth of a plan's time."""

    __slots__ = ()

    def _values(self) -> dict[str, Any]:
        kind: Any = self  # a class of fields
        return asdict(kind, recurse=False)

    def __eq__(self, other: object) -> bool:
        return self._values() == other._values() if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash((type(self), *self._values().values()))

    def __repr__(self) -> str:
        said = (f"{name}={value!r}" for name, value in self._values().items())
        return f"{type(self).__name__}({', '.join(said)})"


@frozen(kw_only=True, eq=False, repr=False)
class Argument(_Declared):
    """One argument of an op."""

    schema: ClassVar[str] = "Tensor"
    "Its type in torch's schema language."

    name: str
    doc: str = ""

    @property
    def annotation(self) -> str:
        """Its type in Python."""
        return {"ScalarType": "torch.dtype", "Tensor?": "Tensor | None"}.get(self.schema, self.schema)

    @property
    def default(self) -> Any:
        """The default of the public function, or `REQUIRED`."""
        return REQUIRED

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor, or None where it may be left out."""
        return self.schema in ("Tensor", "Tensor?")

    @property
    def is_mutated(self) -> bool:
        """Whether the op writes to it."""
        return False


REQUIRED: Any = object()
"""The default of an argument that has none."""


@frozen(kw_only=True, eq=False, repr=False)
class Rows(Argument):
    """A tensor of rows, (..., width): any leading dimensions and row strides, last stride 1."""

    width: str = "width"
    "The name of its width. Rows of one width name are equally wide."
    like: str | None = None
    "An earlier argument whose leading dimensions, dtype and device it has."
    any_strides: bool = False
    "True: the last stride may be another than 1."
    heads: bool = False
    "True: (..., heads, width), normed head by head. Quantised results are those of (..., heads * width)."
    own_heads: bool = False
    "True: it may have another number of heads than the rows that it is like, as the key has."
    mutated: bool = False
    "Whether the op writes to them."
    wider_than: str | None = None
    "Rows before it that fit into its last columns, with others in front of them."

    @property
    def is_mutated(self) -> bool:
        """Whether the op writes to them."""
        return self.mutated


class QuantisedRows(Rows):
    """Rows in fp8."""


@frozen(kw_only=True, eq=False, repr=False)
class RowScales(Argument):
    """The float32 scales of `QuantisedRows`, (..., width / 128 rounded up), of any strides: by rows or by columns."""

    of: str
    doc: str = "float32, (..., width / 128), rounded up: one per 128 columns of a row, in any strides."


@frozen(kw_only=True, eq=False, repr=False)
class Weight(Argument):
    """A norm's weight, (width,), of any floating dtype."""

    of: str
    "The rows that it belongs to."


@frozen(kw_only=True, eq=False, repr=False)
class Epsilon(Argument):
    """Added to the mean square, at least 0."""

    schema = "float"

    name: str = "epsilon"


@frozen(kw_only=True, eq=False, repr=False)
class GroupName(Argument):
    """The process group whose ranks call the op together, by name: a schema carries no communicator."""

    schema = "str"

    name: str = "group"
    doc: str = (
        "the name of a process group, as `torch.distributed.group.WORLD.group_name`: all its ranks make this call."
    )


@frozen(kw_only=True, eq=False, repr=False)
class WeightOffset(Argument):
    """Added to the weight: 1.0 for zero-centred norms."""

    schema = "float"

    name: str = "weight_offset"
    doc: str = "added to the weight: 1.0 for zero-centred norms."
    default = 0.0


@frozen(kw_only=True, eq=False, repr=False)
class QuantDtype(Argument):
    """The fp8 format of quantised results."""

    schema = "ScalarType"

    name: str = "dtype"
    doc: str = "torch.float8_e4m3fn, or torch.float8_e4m3fnuz for gfx942."
    default = Source("torch.float8_e4m3fn")


@frozen(kw_only=True, eq=False, repr=False)
class FloatDtype(Argument):
    """The dtype of a result whose rows are quantised."""

    schema = "ScalarType"

    name: str = "out_dtype"
    doc: str = "torch.bfloat16, torch.float16 or torch.float32."
    default = Source("torch.bfloat16")


@frozen(kw_only=True, eq=False, repr=False)
class GroupSize(Argument):
    """Columns that share a scale."""

    schema = "int"

    name: str = "group_size"
    doc: str = "32, 64 or 128; the last group may be short."
    default = 128  # DeepSeek's


@frozen(kw_only=True, eq=False, repr=False)
class Flag(Argument):
    """A switch, off unless it says otherwise."""

    schema = "bool"

    on: bool = False

    @property
    def default(self) -> Any:
        """Whether it is on unless given."""
        return self.on


class ColumnMajor(Flag):
    """The layout of the scales: column by column."""


class TmaAligned(Flag):
    """The layout of column-major scales: each column on 16 bytes."""


class Swizzled(Flag):
    """The layout of NVFP4's scales: in tiles of 128 rows and 4 scales, as tensor cores take them."""


@frozen(kw_only=True, eq=False, repr=False)
class Choice(Argument):
    """One of several words, the first of them unless given."""

    schema = "str"

    words: tuple[str, ...]

    @property
    def default(self) -> Any:
        """The first word."""
        return self.words[0]


@frozen(kw_only=True, eq=False, repr=False)
class Limit(Argument):
    """The clamp of a gated MLP: gates are at most this, the other half lies between minus and plus this."""

    schema = "float"

    name: str = "limit"
    doc: str = "gate is clamped from above and up on both sides; positive, infinite where a model clamps nothing."
    default = Source('float("inf")')


@frozen(kw_only=True, eq=False, repr=False)
class Number(Argument):
    """A number that a layer has once and for all."""

    schema = "float"

    sample: float = 1.0
    "What a benchmark gives for it."


@frozen(kw_only=True, eq=False, repr=False)
class StaticScale(Argument):
    """The scale of a static quantisation."""

    sample: ClassVar[float] = 0.02
    "What a benchmark gives: of a norm of about one the largest values are then near the middle of fp8's range, and few are clamped."

    name: str = "scale"
    doc: str = "one float32 element on the device of the rows: values are divided by it."


@frozen(kw_only=True, eq=False, repr=False)
class GlobalScale(StaticScale):
    """The scale over the scales of NVFP4, vLLM's `input_global_scale`: 448 * 6 over the largest magnitude of a calibration."""

    sample = 300.0  # values up to 9

    name: str = "global_scale"
    doc: str = "one float32 element on the device of the rows: 448 * 6 over the largest magnitude there may be; scales are stored times it."


@frozen(kw_only=True, eq=False, repr=False)
class PaddedWidth(Argument):
    """How wide a padded result is."""

    schema = "int"

    name: str = "padded_width"
    doc: str = "columns of the padded result, at least the width; what is behind the width is zero."


@frozen(kw_only=True, eq=False, repr=False)
class Index(Argument):
    """A whole number for each token: int32 or int64, (tokens,), contiguous."""

    of: str
    "The rows whose tokens are numbered: their leading dimensions, counted as one, without heads."


@frozen(kw_only=True, eq=False, repr=False)
class OptionalIndex(Index):
    """One that may be left out: token t then has the number t, counted anew behind the last one that there is."""

    schema = "Tensor?"
    default = None


@frozen(kw_only=True, eq=False, repr=False)
class Table(Argument):
    """A table of cos or sin, (positions, width / 2), of any floating dtype, last stride 1."""

    of: str
    "The rows that are turned by it."
    partial: bool = False
    "True: it may be narrower than half of them. The columns behind are then not turned."


@frozen(kw_only=True, eq=False, repr=False)
class Cache(Argument):
    """A paged cache, which the op writes to, see `ops.cache_layout`."""

    parts: tuple[str, str]
    "The rows that lie beside each other in an entry: the latent, and the rope columns."
    is_mutated = True


@frozen(kw_only=True, eq=False, repr=False)
class HeadWeight(Argument):
    """A GEMM's weight for each head, (heads, width of `of`, width of the product), of the dtype of `of`.

    It may be a view, as long as one of the last two strides is 1.
    """

    of: str
    "The rows of heads that are multiplied by it."


@frozen(kw_only=True, eq=False, repr=False)
class LinearWeight(Argument):
    """A linear's weight in fp8, (columns of the product, width of `of`); rows of any stride, last stride 1."""

    of: str
    "The rows that are multiplied by it."
    doc: str = "(columns, width), fp8; rows of any stride."


@frozen(kw_only=True, eq=False, repr=False)
class PlainWeight(LinearWeight):
    """One of the dtype of the rows, without scales."""

    doc: str = "(columns, width), of the dtype of x; rows of any stride."


@frozen(kw_only=True, eq=False, repr=False)
class Bias(Argument):
    """What a linear adds to each column, (columns,); it may be left out. Its dtype is that of `FloatDtype` if the op has it, else the weight's."""

    schema = "Tensor?"
    default = None

    weight: str
    doc: str = "(columns,), of the dtype of the weight; None: nothing is added."


@frozen(kw_only=True, eq=False, repr=False)
class BlockScales(Argument):
    """The float32 scales of a `LinearWeight`, one per 128 x 128, contiguous; the last blocks may be short."""

    of: str
    doc: str = "float32, (columns / 128, width / 128), rounded up: one per block of the weight."


@frozen(kw_only=True, eq=False, repr=False)
class TokenScales(Argument):
    """The float32 scales of `QuantisedRows`, (..., 1), rows of any stride, or one element for all of them."""

    of: str
    doc: str = "float32, (..., 1): one per token, or one element for all."


@frozen(kw_only=True, eq=False, repr=False)
class ChannelScales(Argument):
    """The float32 scales of a `LinearWeight`: contiguous, one per column of the product in any shape, or one element for all of them."""

    of: str
    doc: str = (
        "float32, one per column of the product, as (columns,), (columns, 1) or (1, columns), or one element for all."
    )


@frozen(kw_only=True, eq=False, repr=False)
class ExpertWeights(Argument):
    """The weights of experts in fp8, (experts, columns of the product, width of `of`); last stride 1, columns and width divide by 128."""

    of: str
    "The rows that are multiplied by it, or the `ExpertWeights` whose product is: half as wide, gates times the others."


@frozen(kw_only=True, eq=False, repr=False)
class ExpertScales(Argument):
    """The float32 scales of `ExpertWeights`, one per 128 x 128, contiguous."""

    of: str
    doc: str = "float32, (experts, columns / 128, width / 128), contiguous: one per block of the weights."


@frozen(kw_only=True, eq=False, repr=False)
class RouterWeights(Argument):
    """What each expert that a token of `of` chose counts: (tokens, choices), float32, last stride 1."""

    of: str
    doc: str = "float32, (tokens, choices): what each chosen expert counts."


@frozen(kw_only=True, eq=False, repr=False)
class ExpertIds(Argument):
    """The experts that were chosen, of the shape of the `RouterWeights` called `of`: int32 or int64, last stride 1."""

    of: str
    doc: str = "int32 or int64, (tokens, choices): the chosen experts. One that is none, as -1, counts nothing."


@frozen(kw_only=True, eq=False, repr=False)
class Output(Argument):
    """What the op writes its result to: of the shape of the rows called `of`, any floating dtype, rows of any stride, last stride 1."""

    of: str
    is_mutated = True


@frozen(kw_only=True, eq=False, repr=False)
class NamedOp(Argument):
    """An op by its name, `namespace::op`; empty: none."""

    schema = "str"

    default = ""


PAIRS = ("interleaved", "halves", "interleaved_to_halves", "none")
"""Which columns of a rope are a pair: 2i and 2i + 1, or i and i + width / 2. The third reads the one and writes the other, as
transformers does for DeepSeek. none: nothing is turned."""

COLUMN_MAJOR = ColumnMajor(
    name="column_major",
    doc="the scales' strides, (1, M) for M rows instead of (groups, 1); indexing means the same in both.",
)
TMA_ALIGNED = TmaAligned(
    name="tma_aligned",
    doc="column-major scales whose columns start on 16 bytes, as TMA loads want it: strides (1, M rounded up to 4).",
)
UE8M0 = Flag(name="use_ue8m0", doc="round the scales up to powers of two.")
SWIZZLED = Swizzled(
    name="swizzled",
    doc="the scales in tiles of 128 rows and 4 columns, (rows up to 128, columns up to 4), with zeros where there is no row or column.",
)


@frozen(kw_only=True, eq=False, repr=False)
class Result(_Declared):
    """One result of an op: a contiguous tensor unless it says otherwise."""

    name: str
    of: str
    "The rows whose leading dimensions and device it has."
    doc: str = ""


class Like(Result):
    """A tensor of the shape and dtype of `of`."""


@frozen(kw_only=True)
class Element:
    """One quantised value: how it is held, and its step at a magnitude."""

    word: str
    per: int = 1
    "How many lie in one element of a tensor, the first in the low bits."
    largest: float
    step: float
    "Of a value, relative to its power of two; 0: every step is `smallest`."
    smallest: float
    "The smallest positive value, which is the step below the normal numbers."


ELEMENTS = {
    "float8_e4m3fn": Element(word="fp8", largest=448.0, step=2.0**-3, smallest=2.0**-9),
    "float8_e4m3fnuz": Element(word="fp8", largest=240.0, step=2.0**-3, smallest=2.0**-10),
    "uint8": Element(word="fp4", per=2, largest=6.0, step=2.0**-1, smallest=0.5),
    "int8": Element(word="int8", largest=127.0, step=0.0, smallest=1.0),
}
"""Those that are known, by the dtype that holds them, in torch's words; fp4 is e2m1."""


@frozen(kw_only=True, eq=False, repr=False)
class Quantised(Result):
    """What is quantised, heads joined: as wide as `of`, or as many times narrower as values lie in one element."""

    dtype: str = ""
    "A key of `ELEMENTS`; empty: the fp8 format that the argument of kind `QuantDtype` says, or e4m3fn."


class Scales(Result):
    """The float32 scales, (..., groups), laid out as `ops.quantisation.scale_strides` says."""


class BlockScale(Result):
    """One byte per `columns` of a row: what scales them."""

    columns: ClassVar[int]
    dtype: ClassVar[str]


class Exponents(BlockScale):
    """The scales of MX formats: their exponents plus 127 (e8m0) in uint8, one per 32 columns."""

    columns, dtype = 32, "uint8"


class SmallScales(BlockScale):
    """The scales of NVFP4: float8_e4m3fn, one per 16 columns; laid out as the argument of kind `Swizzled` says."""

    columns, dtype = 16, "float8_e4m3fn"


class Padded(Result):
    """A tensor of the dtype of `of`, as wide as the argument of kind `PaddedWidth`."""


@frozen(kw_only=True, eq=False, repr=False)
class Joined(Result):
    """A tensor as wide as `of` and `beside` together; of their dtype, or fp8 where the op has an argument of kind `QuantDtype`."""

    beside: str
    through: str | None = None
    "The argument of kind `HeadWeight` that `of` is multiplied by: the product's width counts, not that of `of`."


@frozen(kw_only=True, eq=False, repr=False)
class Product(Result):
    """A tensor of the dtype of `of`, or of the argument of kind `FloatDtype`, as wide as the argument of kind `LinearWeight` called `through` has rows."""

    through: str


Results: TypeAlias = tuple[Result, ...]


def _arguments(several: Iterable[Argument]) -> tuple[Argument, ...]:
    return tuple(several)


def _results(several: Iterable[Result]) -> Results:
    return tuple(several)


REFERENCE = "reference"
"""The backend that every op has by itself."""

_BACKENDS = "layerfuse.fusion.backends"
BACKENDS = {
    "triton": f"{_BACKENDS}.triton:Triton",
    "aiter": f"{_BACKENDS}.aiter.backend:Aiter",
    "symm_mem": f"{_BACKENDS}.symm_mem.backend:SymmMem",
}
"""layerfuse's own backends, and where the classes are that have their rules. A kernel may belong to another one."""


TABLED = {"aiter": "AITER's functions are in layerfuse's own table"}
"""Those of them whose kernels name no function, and what is said of one that does."""


@frozen(kw_only=True)
class Kernel:
    """One implementation of an op beside its reference.

    Raises:
        OpError: a backend that can be none, or a function that is named wrongly, twice or not at all.
    """

    backend: str
    "triton, aiter, symm_mem, or another name, which then has no rules of its own."
    function: str = ""
    "`module:function`, imported when first chosen; it takes the op's arguments. Empty for aiter: its table has it."
    made_by: str = ""
    "`module:function` from the op to such a function, in place of `function`: for a kernel that serves many ops."
    refuses: str | None = None
    "`module:function` from the op's case to why it cannot take it, or None where it can: beside the backend's own rules."
    steps: str | None = None
    "`module:function` from the op's case to `Backend.steps`, in the place of the backend's own rule."

    def __attrs_post_init__(self) -> None:
        problems = [*self._problems()]
        if problems:
            raise OpError(f"kernel of backend {shown(self.backend)}: " + "; ".join(problems))

    @property
    def paths(self) -> tuple[str, ...]:
        """The functions that it names."""
        return tuple(path for path in (self.function, self.made_by, self.refuses, self.steps) if path)

    def why_not_for(self, op: Op) -> str | None:
        """Why it cannot be called for an op, by the source of the functions that it names."""
        takes = {self.function: [argument.name for argument in op.args], self.made_by: ["op"]}
        return next(filter(None, (why_absent(path, takes.get(path, ["case"])) for path in self.paths)), None)

    def _problems(self) -> Iterator[str]:
        known = ", ".join(BACKENDS)
        if not isinstance(self.backend, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", self.backend):
            near = did_you_mean(self.backend.lower(), BACKENDS) if isinstance(self.backend, str) else ""
            yield f"a backend's name is lower-case letters, digits and underscores{near} (known: {known})"
            return
        if self.backend == REFERENCE:
            yield "every op has its own reference, `Op.reference`: give the kernel the name of what it runs on"
        elif self.backend not in BACKENDS and (near := did_you_mean(self.backend, self._mistyped())):
            yield f"no backend is called that{near} (known: {known}; a name of your own must not be near one of them)"
        named = [path for path in (self.function, self.made_by) if path]
        if self.backend in TABLED and named:
            yield f"{TABLED[self.backend]}, got {shown(named[0])}"
        if self.backend not in TABLED and len(named) != 1:
            yield f"expected `function` or `made_by`, got {'both' if named else 'neither'}"
        for path in self.paths:
            if not isinstance(path, str) or not re.fullmatch(r"\w+(\.\w+)*:\w+", path):
                yield f"expected `module:function`, got {shown(path)}"

    def _mistyped(self) -> tuple[str, ...]:
        """The known names that this one may be meant for: one that holds a known name in full is meant as it is."""
        return tuple(name for name in BACKENDS if name not in self.backend)


@define(kw_only=True, eq=False, frozen=True, slots=False)  # not slotted: its rows are kept
class Op:
    """One op, `torch.ops.layerfuse.<name>`.

    Raises:
        OpError: names or references that do not fit together.
    """

    name: str
    doc: str
    "The first sentence of the public function's docstring."
    args: tuple[Argument, ...] = field(converter=_arguments)
    results: Results = field(converter=_results)
    reference: Callable[..., Any]
    "The meaning, in plain torch: takes all arguments by position, runs on every device. It may import torch inside."
    plain: Callable[..., Any] | None = None
    """The same arithmetic as a model without fused kernels has it, for compilers to fuse: what benchmarks compile.
    None: the reference."""
    backward: Callable[..., Any] | None = None
    "As torch.library.register_autograd takes it; None: for inference only, inputs that require grad are refused."
    setup_context: Callable[..., None] | None = None
    check: Callable[..., None] | None = None
    "What the arguments' kinds do not say, with all arguments by position: raises ValueError."

    chain: tuple[Any, ...] | None = None
    "The steps that it was composed from (`compose.op_of`); None for an op that was written by hand."

    def __attrs_post_init__(self) -> None:
        problems = [*self._problems()]
        if problems:
            raise OpError(f"op {self.name}: " + "; ".join(problems))

    def _problems(self) -> Iterator[str]:
        names = [argument.name for argument in self.args] + [result.name for result in self.results]
        bad = [name for name in (self.name, *names) if not name.isidentifier() or iskeyword(name)]
        if bad:
            yield f"{bad[0]!r} is no name"
        twice = next((name for i, name in enumerate(names[: len(self.args)]) if name in names[:i]), None)
        if twice is not None:
            yield f"two arguments are called {twice}"
        if not self.args or not isinstance(self.args[0], Rows):
            yield "the first argument is rows: it decides device and dtype"
        if not self.results and not any(argument.is_mutated for argument in self.args):
            yield "it returns nothing and writes to nothing"
        reference: Any = self.reference
        if not callable(reference):
            yield f"reference: expected a function, got {reference!r:.80}"
        rows: list[str] = []
        for argument in self.args:
            others: tuple[str | None, ...] = ()
            if isinstance(argument, Rows):
                others = (argument.like,)
            elif isinstance(argument, Weight | Index | Table | HeadWeight | LinearWeight | RowScales):
                others = (argument.of,)
            elif isinstance(argument, Cache):
                others = argument.parts
            for other in others:
                if other is not None and other not in rows:
                    yield f"{argument.name} refers to {other!r}, and no rows of that name stand before it"
            if isinstance(argument, Rows):
                rows.append(argument.name)
        for result in self.results:
            for of in (result.of, result.beside) if isinstance(result, Joined) else (result.of,):
                if of not in rows:
                    yield f"the result {result.name} is of {of!r}, and no rows are called that"

    @cached_property
    def rows(self) -> tuple[Rows, ...]:
        """The arguments that are rows, the first of which decides device and dtype."""
        return tuple(argument for argument in self.args if isinstance(argument, Rows))

    @property
    def mutated(self) -> tuple[Argument, ...]:
        """The arguments that it writes to."""
        return tuple(argument for argument in self.args if argument.is_mutated)

    @property
    def widths(self) -> tuple[str, ...]:
        """The names of its widths, each once."""
        return tuple(dict.fromkeys(rows.width for rows in self.rows))

    @property
    def schema(self) -> str:
        """As torch.library takes it."""
        # Each tensor that is written to is an alias set of its own, by a letter.
        written = {argument.name: chr(ord("a") + i) for i, argument in enumerate(self.mutated)}
        taken = ", ".join(
            f"Tensor({written[argument.name]}!) {argument.name}"
            if argument.is_mutated
            else f"{argument.schema} {argument.name}"
            for argument in self.args
        )
        given = "Tensor" if len(self.results) == 1 else f"({', '.join('Tensor' for _ in self.results)})"
        return f"{self.name}({taken}) -> {given}"
