"""What a fusion, its steps and its kernels must do, one test per scenario of docs/contract.md: test classes to subclass.

class TestMyFusion(StepContract, FusionContract):
    fusion = "my_fusion"

    def build(self):
        return Model(), [("", spec)], (x, residual)

class TestMyKernel(KernelContract):
    op, backend = "my_fusion", "fast"
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..adapters.errors import said
from ..fusion import FUSIONS, FusionConfig, Target, plan
from ..fusion.backends import choose, force, forced, survey
from ..fusion.closeness import FLOAT32, compare
from ..fusion.declare import REFERENCE, Argument, Flag, Index, Like, Op, Padded, Rows
from ..fusion.ops.library import case_maker, declared, overload
from ..fusion.sites import sites_in_words
from .op_inputs import arguments_of, results_of
from .scenario import Verbs, scenario, to_set
from .tracing import traced

if TYPE_CHECKING:
    from ..fusion.chain import Fusion

LEADING = ((), (0,), (3,), (2, 3))
"""Leading dimensions of rows: one row, none, some, several dimensions of them."""
TARGETS = ("cpu", "sm90", "gfx950")
ONE_ROUNDING, SUMS = 0.51, 16 * FLOAT32
"""The error of one rounding in units of a dtype's epsilon, and on top what sums in float32 may add, relative to the row's largest."""


class OpCase(Verbs):
    """What an op is called with."""

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16, torch.float32)
    "Of the rows."
    widths: ClassVar[tuple[int, ...]] = (128, 192, 320)
    "Of the rows. A second kind of rows is half as wide."
    device: ClassVar[str] = "cpu"
    "Where it is called."

    def inputs(self, op: Op, leading: tuple[int, ...], width: int, dtype: torch.dtype) -> list[Any]:
        """The op's arguments by position. Replace it where an argument is one that only its author can fill."""
        return arguments_of(op, leading, width, dtype, device=self.device)


class _Declared(Verbs):
    fusion: ClassVar[str] = to_set("fusion", 'the name of a fusion, as fusion = "add_rms_norm"')
    "Its name."

    @property
    def asked(self) -> Fusion:
        """The fusion under test."""
        FUSIONS.check(self.fusion)
        return FUSIONS[self.fusion]


class FusionContract(_Declared, OpCase):
    """What the ops of a fusion must do, in every form that it has, by their references."""

    def _ops(self) -> tuple[Op, ...]:
        return tuple(form.op for form in self.asked.forms)

    @scenario(1, "The fake is like what runs", of="F")
    def test_f01_the_fake_is_like_what_runs(self) -> None:
        """F1. Shapes, strides and dtypes are those that the op declares."""
        for op in self._ops():
            calls = [self.inputs(op, *shape, self.dtypes[0]) for shape in product(LEADING, self.widths)]
            odd = [given for _, given in _odd(self.inputs(op, (3,), self.widths[0], self.dtypes[0]), op)]
            for given in (switched for call in (*calls, *odd) for switched in _switched_on(op, call)):
                with torch.no_grad(), _by(REFERENCE):
                    results, fakes = overload(op.name)(*given), overload(op.name)(*map(_meta, given))
                for result, real, fake in zip(op.results, results_of(results), results_of(fakes), strict=True):
                    one, other, where = laid_out(real), laid_out(fake), tuple(given[0].shape)
                    self.validate(
                        one == other, f"{op.name}, rows of {where}: {result.name} is {one}, and the op declares {other}"
                    )

    @scenario(2, "torch takes the op", of="F")
    def test_f02_torch_takes_the_op(self) -> None:
        """F2. `torch.library.opcheck` finds nothing wrong with it."""
        for op in self._ops():
            given = self.inputs(op, (3,), self.widths[0], self.dtypes[0])
            with torch.no_grad(), _by(REFERENCE):
                torch.library.opcheck(overload(op.name), tuple(given))

    @scenario(3, "Only values count", of="F")
    def test_f03_only_values_count(self) -> None:
        """F3. Rows that are column ranges give what contiguous ones give, and nothing that is read is written."""
        for op in self._ops():
            given = self.inputs(op, (2, 3), self.widths[-1], self.dtypes[0])
            kept = [each.clone() if isinstance(each, Tensor) else each for each in given]
            with torch.no_grad():
                results = op.reference(*given)
                for argument, one, other in zip(op.args, given, kept, strict=True):
                    stays = argument in op.mutated or _same(one, other)
                    self.validate(stays, f"{op.name} writes to {argument.name}")
                again = op.reference(*kept)
            for result, one, other in zip(op.results, results_of(results), results_of(again), strict=True):
                self.validate(_same(one, other), f"{op.name}: {result.name} depends on the strides of its inputs")

    @scenario(4, "The reference rounds once", of="F")
    def test_f04_the_reference_rounds_once(self) -> None:
        """F4. What is not quantised is what comes of the same inputs in float64, rounded."""
        for op in self._ops():
            if not any(isinstance(result, Like | Padded) for result in op.results):
                continue
            for dtype in self.dtypes:
                for width in self.widths:
                    given = self.inputs(op, (3,), width, dtype)
                    with torch.no_grad():
                        results, exact = op.reference(*given), op.reference(*map(_wide, given))
                    for result, got, wanted in zip(op.results, results_of(results), results_of(exact), strict=True):
                        if isinstance(result, Like | Padded):
                            off = _roundings(got, wanted)
                            self.validate(
                                off <= ONE_ROUNDING,
                                f"{op.name}, {width} columns: {result.name} is {off:.3g} roundings of {dtype} away",
                            )


class StepContract(_Declared):
    """What a step must do, through a fusion that has it."""

    config: ClassVar[FusionConfig | None] = None
    "For a fusion that is not taken by default, as one that quantises."
    target: ClassVar[Target] = Target.named("cpu")
    "What the model is compiled for; it runs on the CPU whatever it is."

    # ---- hooks

    def build(self) -> tuple[Any, list[tuple[str, Any]], tuple[Any, ...]]:
        """A model in plain torch with the steps in it, its specs as (path, spec), and what to call it with."""
        raise NotImplementedError(f"{type(self).__name__}.build() must return a model, its specs and its inputs")

    def build_alike(self) -> tuple[Any, list[tuple[str, Any]], tuple[Any, ...]] | None:
        """The same with something that is only like the steps, which must not be fused; None: S3 is skipped."""
        return None

    # ---- scenarios

    @scenario(1, "Every step stands for a part of the op", of="S")
    def test_s01_every_step_stands_for_a_part_of_the_op(self) -> None:
        """S1. What it fills and gives are arguments and results of the op."""
        op = self.asked.op
        names = {each.name for each in op.args}, {each.name for each in op.results}
        inner: set[str] = set()
        for step in self.asked.chain:
            name = type(step).__name__
            strange = {each.name for each in step.arguments()} - names[0] - inner
            self.validate(not strange, f"{name} fills {', '.join(sorted(strange))}, which {op.name} does not have")
            self.validate(step.outs, f"{name} gives nothing: `outs` is empty")
            inner |= set(step.outs)
        self.validate(op.doc.strip(), f"{op.name} has no words: `said` of its last step is empty")

    @scenario(2, "Found in plain torch", of="S")
    def test_s02_found_in_plain_torch(self) -> None:
        """S2. Every site that is expected is matched, its use is counted, and the answer is as before."""
        model, fused, wanted, got = self._run(self.build())
        verdict = fused.report.of(self.fusion)
        expected = [decision.site for decision in fused.plan.expected(self.fusion)]
        self.validate(expected, f"{self.fusion} is expected nowhere: {self._decided(fused.plan)}")
        self.validate(
            sorted(verdict.matched) == sorted(expected),
            f"{self.fusion}: expected at {sites_in_words(len(expected))}, matched at {len(verdict.matched)}; "
            + "; ".join(f"{site}: {why}" for site, why in verdict.missed.items()),
        )
        for one, other in zip(results_of(got), results_of(wanted), strict=True):
            units = _roundings(one, other.double(), of_all=True)
            self.validate(units <= 16, f"{type(model).__name__} with {self.fusion} is {units:.3g} roundings away")

    @scenario(3, "What is alike is left alone", of="S")
    def test_s03_what_is_alike_is_left_alone(self) -> None:
        """S3. Where the steps are not what the spec says, nothing is fused, and the report says why."""
        built = self.build_alike()
        if built is None:
            self.skip("build_alike is not defined: there is nothing that the steps could be taken for")
            return
        _, fused, wanted, got = self._run(built)
        verdict = fused.report.of(self.fusion)
        self.validate(not verdict.matched, f"{self.fusion} was put at {', '.join(verdict.matched)}")
        silent = [site for site, why in verdict.missed.items() if not why.strip()]
        self.validate(verdict.missed and not silent, f"{self.fusion} was missed without a reason")
        for one, other in zip(results_of(got), results_of(wanted), strict=True):
            self.validate(_roundings(one, other.double(), of_all=True) <= 16, "and the model answers something else")

    @scenario(4, "Decided in words", of="S")
    def test_s04_decided_in_words(self) -> None:
        """S4. On every target each site of its roles has a decision, and each decision a reason."""
        _, specs, _ = self.build()
        for target in TARGETS:
            made = plan(specs, Target.named(target), self.config)
            decided = [decision for decision in made.decisions if decision.fusion == self.fusion]
            sites = {site.name for site in made.sites if site.role in self.asked.roles}
            self.validate({each.site for each in decided} == sites, f"on {target} not every site is decided")
            self.validate(all(each.reason.strip() for each in decided), f"on {target} a decision has no reason")

    def _run(self, built: tuple[Any, list[tuple[str, Any]], tuple[Any, ...]]) -> tuple[Any, Any, Any, Any]:
        model, specs, inputs = built
        torch._dynamo.reset()
        with torch.no_grad():
            wanted = model(*inputs)
            fused = traced(model, specs, self.config, self.target)
            return model, fused, wanted, fused(*inputs)

    def _decided(self, made: Any) -> str:
        return "; ".join(str(decision) for decision in made.decisions if decision.fusion == self.fusion)


class KernelContract(OpCase):
    """What a kernel must do beside its op's reference, wherever it does not refuse."""

    op: ClassVar[str] = to_set("op", 'the name of an op, as op = "add_rms_norm"')
    "The op's name."
    backend: ClassVar[str] = to_set("backend", 'the name of a backend, as backend = "triton"')
    "The backend that runs it."

    @property
    def asked(self) -> Op:
        """The op under test."""
        return declared(self.op)

    def _calls(self, leading: tuple[tuple[int, ...], ...] = ((3,),)) -> Iterator[tuple[str, list[Any]]]:
        """The calls that it takes, each in words; at least one."""
        refused, taken = "", False
        for dtype in self.dtypes:
            for width in self.widths:
                for rows in leading:
                    given = self.inputs(self.asked, rows, width, dtype)
                    why = self._refusal(given)
                    taken = taken or why is None
                    refused = refused or why or ""
                    if why is None:
                        yield f"{self.op} by {self.backend}, {dtype}, rows of {(*rows, width)}", given
        if not taken:
            self.skip(f"{self.backend} takes no call here: {refused}")

    def _refusal(self, given: list[Any]) -> str | None:
        with _by(self.backend):
            found = dict(survey(self.op, self.device, case_maker(self.asked)(*given)))
        self.validate(self.backend in found, f"{self.op} has no backend {self.backend!r}, but {', '.join(found)}")
        return found[self.backend]

    def _kernel(self, given: list[Any]) -> Any:
        with _by(self.backend):
            kernel = choose(self.op, self.device, case_maker(self.asked)(*given)).function
        try:
            signature = inspect.signature(kernel)
        except ValueError:  # some of other languages have none
            return kernel
        try:
            signature.bind(*given)
        except TypeError:
            takes = f"({', '.join(signature.parameters)})"
            passes = f"({', '.join(argument.name for argument in self.asked.args)})"
            self.validate(False, f"{self.op} by {self.backend}: the kernel takes {takes}, the op passes {passes}")
        return kernel

    @scenario(1, "Refused with a sentence", of="K")
    def test_k01_refused_with_a_sentence(self) -> None:
        """K1. Of any call it says that it takes it, or why not, and does not fail."""
        for width in (1, 7, 33, *self.widths, 100_000):
            for dtype in (*self.dtypes, torch.float64):
                case = case_maker(self.asked)(*map(_meta, self.inputs(self.asked, (0,), width, dtype)))
                try:
                    with _by(self.backend):
                        why = dict(survey(self.op, self.device, case))[self.backend]
                except Exception as error:
                    self.validate(False, f"{self.backend} fails where it is asked of {case}: {said(error)}")
                    raise
                self.validate(why is None or len(why.split()) > 1, f"{self.backend} refuses {case} with {why!r}")

    @scenario(2, "Equal to the reference", of="K")
    def test_k02_equal_to_the_reference(self) -> None:
        """K2. Every element, of rows that lie in odd ways, into memory that held NaN."""
        for call, made in self._calls():
            for way, given in _odd(made, self.asked):
                where = call + way
                with torch.no_grad():
                    wanted = results_of(self.asked.reference(*given))
                    kernel = self._kernel(given)
                    with _Poisoned():
                        got = results_of(kernel(*given))
                self._validate_alike(where, got, wanted)
                for apart in compare(self.asked, tuple(given), got, wanted):
                    self.validate(apart.first is None, f"{where}: {apart}")

    @scenario(3, "Any number of rows", of="K")
    def test_k03_any_number_of_rows(self) -> None:
        """K3. None, one, and several dimensions of them, laid out as the op declares."""
        for where, given in self._calls(LEADING):
            with torch.no_grad():
                self._validate_alike(where, results_of(self._kernel(given)(*given)), results_of(self._fake(given)))

    @scenario(4, "Inputs stay", of="K")
    def test_k04_inputs_stay(self) -> None:
        """K4. Nothing is written but results, and what the op says that it writes to."""
        for where, given in self._calls():
            kept = [each.clone() if isinstance(each, Tensor) else each for each in given]
            with torch.no_grad():
                self._kernel(given)(*given)
            for argument, one, other in zip(self.asked.args, given, kept, strict=True):
                stays = argument in self.asked.mutated or _same(one, other)
                self.validate(stays, f"{where}: {argument.name} was written to")

    def _fake(self, given: list[Any]) -> Any:
        return overload(self.op)(*map(_meta, given))

    def _validate_alike(self, where: str, got: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
        for result, one, other in zip(self.asked.results, got, wanted, strict=True):
            self.validate(
                laid_out(one) == laid_out(other),
                f"{where}: {result.name} is {laid_out(one)}, and should be {laid_out(other)}",
            )


# ---- tensors


def laid_out(tensor: Tensor) -> tuple[Any, ...]:
    """Shape, dtype, and the strides that matter: of dimensions with more than one element."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    strides = tuple(stride for size, stride in sizes if size > 1 and tensor.numel())
    return tuple(tensor.shape), tensor.dtype, strides


def _switched_on(op: Op, given: list[Any]) -> Iterator[list[Any]]:
    """A call as it is, and with one more of its switches on each time: some only go with those before them."""
    yield given
    given = list(given)
    for place, argument in enumerate(op.args):
        if isinstance(argument, Flag):
            given[place] = True
            yield list(given)


def _odd(given: list[Any], op: Op) -> Iterator[tuple[str, list[Any]]]:
    """A call in words, and the same with rows that lie in other ways; they are of three rows."""
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "": lambda rows: rows,
        ", off the 16-byte grid": _off_the_grid,
        ", which no single stride reaches": lambda rows: torch.stack([rows, rows], 1).transpose(0, 1),
        ", all of them one": lambda rows: rows[:1].expand_as(rows),
    }
    for words, way in ways.items():
        several = len(way(given[0])) != len(given[0])  # as many again: each has the numbers of its own tokens

        def laid(argument: Argument, each: Any, way: Callable[..., Any] = way, several: bool = several) -> Any:
            if isinstance(argument, Rows):
                return way(each)
            return each.repeat(2) if several and isinstance(argument, Index) else each

        yield words, list(map(laid, op.args, given))


def _off_the_grid(rows: Tensor) -> Tensor:
    return torch.cat([rows[..., :1], rows], -1)[..., 1:]


def _meta(given: Any) -> Any:
    """Without data, and with the strides."""
    if not isinstance(given, Tensor):
        return given
    return torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="meta")


def _wide(given: Any) -> Any:
    return given.double() if isinstance(given, Tensor) and given.is_floating_point() else given


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor):
        return True
    return bool(torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)))


def _roundings(got: Tensor, wanted: Tensor, *, of_all: bool = False) -> float:
    """The largest error beyond `SUMS` in units of the dtype's epsilon, relative to each element, or to the largest of all."""
    if not got.numel():
        return 0.0
    size, info = wanted.abs().double(), torch.finfo(got.dtype)
    off = (got.double() - wanted.double()).abs() - SUMS * size.amax(-1, keepdim=True)
    off = off / (size.amax() if of_all else size).clamp(min=info.tiny)
    return float(off.nan_to_num(float("inf")).max()) / float(info.eps)


@contextmanager
def _by(backend: str) -> Iterator[None]:
    """With a backend forced."""
    before = forced()
    force(backend)
    try:
        yield
    finally:
        force(before)


class _Poisoned(TorchDispatchMode):  # type: ignore[misc]
    """Fills memory that is made without values with NaN, so that what is not written shows."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if "empty" in func.name() and isinstance(made, Tensor) and made.device.type != "meta":
            if made.is_floating_point() and made.element_size() > 1:
                made.fill_(float("nan"))
            else:
                made.view(torch.uint8).fill_(0x7F)
        return made
