"""The formats that activations are quantised to: one entry each, of which a chain's quantised forms are made.

A package adds one by an entry point of the group `layerfuse.formats` whose object is a `Format`. Nothing here imports torch.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from attrs import Factory, evolve, field, frozen

from ..adapters.activation_quant import GROUP_SIZES, ActivationQuant
from ..adapters.errors import FOREIGN, did_you_mean, said, shown
from ..registry.entry_points import of_group, unusable
from .declare import ELEMENTS, BlockScale, Exponents, Quantised, Result, Scales, SmallScales
from .kernel_source import imported, why_absent
from .target import Target

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

FP8_FORMATS = ("e4m3fn", "e4m3fnuz")
"""What a quantising fusion can write; `Target.fp8` is one of them where it can run."""


def _no_fp8(target: Target) -> str | None:
    if target.fp8 in FP8_FORMATS:
        return None
    has = "no fp8 format" if target.fp8 is None else f"fp8 {target.fp8}"
    return f"{target} has {has}, and the fused op writes {' or '.join(FP8_FORMATS)}"


def _no_mx(target: Target) -> str | None:
    return None if target.mx else f"{target} has no MX formats; gfx950, gfx1250 and sm100 have"


def _no_nvfp4(target: Target) -> str | None:
    return None if target.nvfp4 else f"{target} has no NVFP4; NVIDIA's have it from sm100 on"


GROUP = "layerfuse.formats"
"""The group of entry points."""

GIVEN = ("scale", "global_scale", "swizzled")
"""The options of formats that are no plain fp8."""


@frozen(kw_only=True)
class Format:
    """One format of quantised activations."""

    word: str
    "As `Quant(per=...)` says it."
    scheme: str = field(default=Factory(lambda self: self.word, takes_self=True))
    "As `ActivationQuant.scheme` and the names of fusions say it."
    says: str
    "What comes of a tensor, in words."
    mode: int | None = None
    "As Triton's kernels know it: `QUANT` in `backends.triton.rows`, where 0 quantises nothing; None: no kernel of layerfuse's does it."
    options: tuple[str, ...] = ()
    "The arguments of an op that writes it, in order: the fields of `Quant` that name them."
    results: tuple[Result, ...]
    "Its values, and its scales where they are not given: with names to be filled in."
    reference: str = field(default=Factory(lambda self: f"{__package__}.ops.quantisation:{self.op}", takes_self=True))
    "`module:function`, its arithmetic in plain torch: from values (..., width) of any dtype and the options, by position, to the results."
    ops: tuple[str, ...] = ()
    "Ops of others, by qualified name, that take and give what `op` does: arguments that they share have its names."
    absent: Callable[[Target], str | None] = lambda _: None
    "Why a target does not have it, as a sentence, or None where it has."
    owner: str = "layerfuse"
    "The package that declares it."
    entry_point: str = ""
    "Its name there, of another package's format."

    @property
    def op(self) -> str:
        """The op of `ops.canonical` that does it alone."""
        return f"quantise_{self.scheme}"

    @property
    def function(self) -> Callable[..., Any]:
        """What `reference` names. It may import torch."""
        return imported(self.reference)

    @property
    def is_plain(self) -> bool:
        """Whether it is in the target's fp8 format, so that graphs may hold it step by step."""
        return "dtype" in self.options

    @property
    def block(self) -> int:
        """Columns that share a scale, where the format itself says how many; else 0."""
        return next((each.columns for each in self.results if isinstance(each, BlockScale)), 0)

    @property
    def dtype(self) -> str:
        """Of the tensor that holds its values, as torch names it; empty: the target's fp8 format."""
        return next(each.dtype for each in self.results if isinstance(each, Quantised))

    @property
    def packed(self) -> int:
        """How many values lie in one element of that tensor."""
        return ELEMENTS[self.dtype].per if self.dtype else 1

    def why_not(self, target: Target, width: int) -> str | None:
        """Why rows of this width cannot be quantised to it there, or None."""
        wrong = self.block and width % self.block
        why = (
            f"the quantised tensor is {width} wide, which is no multiple of the {self.block} columns that share a scale, and kernels take whole groups alone"
            if wrong
            else None
        )
        return self.absent(target) or why


_VALUES = Quantised(name="", of="", doc="in fp8.")
_E4M3FN = Quantised(name="", of="", doc=_VALUES.doc, dtype="float8_e4m3fn")
_PACKED = Quantised(name="", of="", doc="two fp4 values per byte.", dtype="uint8")
_EXPONENTS = Exponents(name="", of="", doc="exponents plus 127, one per 32 columns.")
_SMALL = SmallScales(name="", of="", doc="float8_e4m3fn, one per 16 columns, times `global_scale`.")
_PER_TOKEN = Scales(name="", of="", doc="the float32 scales, (..., 1).")
_PER_GROUP = Scales(name="", of="", doc="the float32 scales, (..., groups).")


class Formats(Mapping[str, Format]):
    """The formats by word. Those of other packages are read when all are asked for, or one is not found."""

    def __init__(self, *ours: Format) -> None:
        self._known = {form.word: form for form in ours}
        self._refused: dict[tuple[str, str], str] = {}
        self._is_read: bool | None = None
        self._lock = threading.RLock()

    def _all(self) -> dict[str, Format]:
        if not self._is_read:
            with self._lock:
                if self._is_read is None:
                    self._is_read = False  # a package may ask while it is imported
                    for point, package in of_group(GROUP):
                        found = self._of_plugin(point, package)
                        if isinstance(found, Format):
                            self._known[found.word] = found
                            continue
                        sentence = self._refused[point.name, package] = unusable(point.name, package, found)
                        warnings.warn(sentence, RuntimeWarning, stacklevel=1)
                    self._is_read = True
        return self._known

    def _of_plugin(self, point: EntryPoint, package: str) -> Format | str:
        """What an entry point gives, or why it cannot be taken."""
        try:
            form = point.load()
            if not isinstance(form, Format):
                return f"expected a Format, got {shown(form)}"
            if (other := self._known.get(form.word)) is not None:
                return f"{other.owner} has a format called {form.word!r} already"
            ActivationQuant(fixed=form.word)
            values, *scales = form.results
            if form.scheme != form.word or {*form.options} - {*GIVEN}:
                return f"{form.word} has a scheme or options of plain fp8; its own may be {', '.join(GIVEN)}"
            if not isinstance(values, Quantised) or values.dtype not in ELEMENTS:
                return f"the first result of {form.word} is Quantised, of a dtype among {', '.join(ELEMENTS)}"
            if len(scales) > 1 or not all(isinstance(each, Scales | BlockScale) for each in scales):
                return f"the second result of {form.word} is Scales, Exponents or SmallScales"
            return why_absent(form.reference) or evolve(form, owner=package, entry_point=point.name)
        except FOREIGN as error:  # a plugin may fail in any way
            return f"reading it raised {said(error)}"

    @property
    def refused(self) -> Mapping[tuple[str, str], str]:
        """Why entry points cannot be used, by their names and packages."""
        self._all()
        return self._refused

    def __getitem__(self, word: str) -> Format:
        known = self._known
        return known[word] if word in known else self._all()[word]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


FORMATS = Formats(
    Format(
        word="static", says="fp8 by a static scale", mode=3, absent=_no_fp8,
        results=(_VALUES,), options=("scale", "dtype"),
    ),
    Format(
        word="token", scheme="per_token", says="fp8 with one scale per token", mode=1, absent=_no_fp8,
        results=(_VALUES, _PER_TOKEN), options=("dtype", "use_ue8m0"),
    ),
    Format(
        word="group", says="fp8 with one scale per group of columns", mode=2, absent=_no_fp8,
        results=(_VALUES, _PER_GROUP),
        options=("dtype", "group_size", "column_major", "tma_aligned", "use_ue8m0"),
    ),
    Format(
        word="mxfp8", says="MXFP8: fp8 with one exponent per 32 columns", mode=4, absent=_no_mx,
        results=(_E4M3FN, _EXPONENTS),
    ),
    Format(
        word="mxfp4", says="MXFP4: fp4 with one exponent per 32 columns", mode=5, absent=_no_mx,
        results=(_PACKED, _EXPONENTS),
        ops=("vllm::rocm_aiter_dynamic_mxfp4_quant",),  # over AITER's Triton dynamic_mxfp4_quant
    ),
    Format(
        word="nvfp4", says="NVFP4: fp4 with one fp8 scale per 16 columns", mode=6, absent=_no_nvfp4,
        results=(_PACKED, _SMALL), options=("global_scale", "swizzled"),
    ),
)  # fmt: skip
"""Every format by its word."""

FP8 = ("static", "token", "group")
"""Those in plain fp8, which are layerfuse's own."""


def why_unknown(quant: ActivationQuant) -> str | None:
    """Why no format is what a quantisation says, as a sentence; None where one is."""
    form = next((each for each in FORMATS.values() if each.scheme == quant.scheme), None)
    if form is None:
        sizes = {"group": f"group{'|'.join(map(str, GROUP_SIZES))}"}
        schemes = [sizes.get(each.scheme, each.scheme) for each in FORMATS.values()]
        others = did_you_mean(quant.scheme, schemes) or f"; known: {', '.join(schemes)}"
        return f"no format is called {shown(quant.scheme)}{others}"
    if quant.swizzled and "swizzled" not in form.options:
        return f"the scales of {quant.scheme} do not lie in tiles"
    return None
