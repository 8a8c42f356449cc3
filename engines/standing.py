"""Fused ops at module level, in a model that an engine does not compile: put in, counted in its first run, reported.

Each stands in one instance of the engine's own classes, at a site of the plan. Where an op refuses its arguments, the engine's own code
runs, and the report says so.
"""

from __future__ import annotations

import functools
import logging
import operator
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any, TypeAlias

import attrs
import torch
from attrs import define, field
from torch import Tensor, nn

from ..adapters.activation_quant import ActivationQuant
from ..adapters.errors import first_of
from ..adapters.specs import FinalNormSpec, KernelSpec, LinearSpec
from ..fusion.catalog import FUSIONS
from ..fusion.match.errors import Unmatched
from ..fusion.ops import FUNCTIONS
from ..fusion.ops.warming import recording
from ..fusion.planning import Decision
from ..fusion.rewrite.attribution import is_around, join
from ..fusion.rewrite.ranks import check_kernel
from ..fusion.rewrite.unknown_norms import UnknownNorm
from ..fusion.sites import OUTPUT, OWN_PLACE, STREAM, Site
from . import calls, trial
from .calls import GONE, Run
from .compiled_module import CompiledModule
from .handover import Reader, forget, give
from .host import here
from .native import Native, NotNativeError, Step
from .placement import REFUSALS, Placement, Put, is_looked_at, looking, why_apart
from .process import once
from .seams import Seam, seam_of
from .whose import kind_of, module_of

Called: TypeAlias = tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]
"""What calls a fused op, what it means by the same arguments, and what the op is given behind these."""

NOT_CALLED = "{engine} did not call its {what} in the first run"
NOT_TAKEN = "no linear behind it asked for what the op had quantised in the first run"

AWAY = "layerfuse: the fused ops are in CUDA graphs; steps whose ops are launched one by one, as those of long prompts, are %s's own from now on"
"""What is said where an engine captures CUDA graphs."""

OTHER = "another forward was put where the fused op stands, from %s"
"""What is said of a module whose forward is ours no more: the other one may call ours, or not."""


@define(kw_only=True, eq=False)
class Standing(Placement):
    """The fused ops that stand in one model."""

    compiled: CompiledModule = field(repr=False)
    model: nn.Module = field(repr=False)
    seams: Sequence[Seam] = field(repr=False)
    "The engine's."
    done: Counter[str] = field(factory=Counter)
    "Site -> calls of its fused op so far."
    inside: dict[str, nn.Module] = field(factory=dict, repr=False)
    "Path of a norm, or of the layer of both -> the module in which an op stands there."
    forwards: dict[str, tuple[nn.Module, Any]] = field(factory=dict, repr=False)
    "Site -> the module in which an op stands, and the forward that was put there."
    held: tuple[list[Callable[..., Any]], list[str], list[Any]] = field(default=([], [], []), repr=False)
    "What gets these modules where the model holds them, what is around them, and their forwards; by which name; and what that was."
    wrong: set[str] = field(factory=set)
    "Sites at which something else than the op's meaning was found to run."
    left: set[str] = field(factory=set)
    "Sites whose op runs, and whose linears quantise for themselves all the same."
    stands: dict[str, str] = field(factory=dict)
    "Site -> the fusion that stands there: the one that is expected, or its fallback."
    forms: dict[str, str] = field(factory=dict)
    "Site -> the op that is called there, where it is another form of the fusion's."
    given: set[str] = field(factory=set)
    "Sites whose op has quantised something for the linears behind it."
    asked: set[str] = field(factory=set)
    "Sites that an op was to stand at so far."
    waiting: dict[str, Callable[[], None]] = field(factory=dict)
    "Site of a fused all-reduce, which all ranks have to take -> what puts the op in."
    captured: bool = False
    "Whether the engine has captured CUDA graphs."
    apart: range = range(0)
    "Tokens of steps whose ops the host launches one by one; of no account where the engine says itself when it captures CUDA graphs."
    away: bool = False
    "Whether nothing stands at the engine's modules in this step."
    number: int = field(factory=count().__next__)
    "Of the models in this process: what was agreed on of one is not asked again."

    def put_in(self) -> None:
        """Let the planned ops stand at their sites. Those at which some were to stand before are left as they are."""
        before = frozenset(self.asked)
        self._put_in_each()
        reduced = [d.site for d in self._expected() if FUSIONS[d.fusion].across_ranks and d.site not in before]
        if reduced:
            self._put_in_together(dict.fromkeys(reduced))

    def _put_in_together(self, sites: Iterable[str]) -> None:
        """The fused all-reduces: at the same sites on all ranks of the group, or at none."""
        found = [f"{self.missed[site]} ({site})" for site in sites if site in self.missed]
        problem = self._apart("the all-reduces", "\n".join(found))
        if problem is not None:
            for site in sites:
                self.missed[site] = problem
                self.stands.pop(site, None)
        else:
            for put in self.waiting.values():
                put()
        self.waiting.clear()

    def _apart(self, what: str, decision: str) -> str | None:
        return why_apart(f"{what} of model {self.number}", decision)

    def _put_in_each(self) -> None:
        for decision in self._expected():
            if decision.site in self.asked:
                continue
            self.asked.add(decision.site)
            fallback = (each.fusion for each in self.compiled.plan.fallback() if each.site == decision.site)
            for fusion in (decision.fusion, *fallback):
                problem = self._put_in(self.compiled.plan.site[decision.site], fusion)
                if problem is None:
                    self.stands[decision.site] = fusion
                    break
                self.missed.setdefault(decision.site, problem)

    def _expected(self) -> list[Decision]:
        """What is expected at the sites that have a place here: others have seams of their own."""
        plan = self.compiled.plan
        return [each for each in plan.expected() if plan.site[each.site].role not in OWN_PLACE]

    def _put_in(self, site: Site, fusion: str) -> str | None:
        """Why not, or None."""
        path = join(site.layer, site.norms[0].module or "") if len(site.norms) == 1 else site.layer
        around = self.model.get_submodule(path)
        inner = [around] if len(site.norms) == 1 else list(around.modules())
        found = next(
            ((each, seam) for each in inner if (seam := seam_of(self.seams, type(each), fusion)) is not None), None
        )
        if found is None:
            return f"{'.'.join(kind_of(around))} is no class of {here().name}'s that layerfuse knows a place in"
        module, seam = found
        problem = seam.why_not()
        if problem is not None:
            return problem
        stands = list(self._norms(site)) if seam.callers else [module]
        strange = next((each for each in stands if not seam.plain(each)), None)
        if strange is not None:
            return f"this {type(strange).__qualname__} does more than its spec says"
        try:
            readers = self._readers(seam, site)
            if isinstance(readers, str):
                return readers
            norms, before = partial(self._norms, site), {**vars(module)}
            stood = Native.of_all([*calls.stood(module, seam, norms()), *(each.stood for each in readers)])
            same = partial(self._as_it_was, site.name, stood)
            quant = site.quant if readers else None
            call, meaning, options = (
                self._plainly(site.name, fusion)
                if quant is None
                else self._handing_over(site.name, seam, quant, readers)
            )
            if seam.call == "reduced":
                most = next(d.tokens.last for d in self.compiled.plan.at(site.name) if d.fusion == fusion and d.applies)
                run = self._tried(site.name, call, meaning, partial(self._together, site.name, fusion, options))
                self.waiting[site.name] = partial(self._reduce, path, module, seam, site, run, same, most, readers)
                return None
            run = self._tried(site.name, call, meaning)
            if seam.call == "neighbours":
                calls.neighbours(site, run, same, norms, partial(self.missed.setdefault, site.name))
            elif seam.call == "pair":
                calls.pair(module, seam, site, run, same, norms, partial(self.missed.__setitem__, site.name))
            else:
                {"norm": calls.norm, "product": calls.product}[seam.call](module, seam, site, run, same)
        except NotNativeError as error:
            return str(error)
        self._read(site.name, fusion, readers, self._refuse)
        paths = [join(site.layer, norm.module or "") for norm in site.norms] if seam.callers else [path]
        self.inside.update(zip(paths, stands, strict=True))
        self.forwards[site.name] = stands[0], vars(stands[0])["forward"]
        self.put += [Put.at(each, "forward") for each in stands]
        if seam.switch is not None and vars(module).get(seam.switch) is not before.get(seam.switch):
            self.put.append(Put.at(module, seam.switch, before))
        return None

    def _read(self, site: str, fusion: str, readers: Iterable[Reader], refuse: Callable[[str, str], None]) -> None:
        """Let the linears behind a site take what its op has quantised; `refuse` is told where they make something else of it."""
        for reader in readers:
            before = {**vars(reader.place)}
            reader.stand(site, self._took, refuse)
            self.put.append(Put.at(reader.place, reader.method, before))
            self.forms[site] = FUSIONS[fusion].forms[-1].op.name

    def _norms(self, site: Site) -> tuple[nn.Module, ...]:
        """The norms of a site as they are now."""
        return tuple(self.model.get_submodule(join(site.layer, norm.module or "")) for norm in site.norms)

    def _readers(self, seam: Seam, site: Site) -> tuple[Reader, ...] | str:
        """How the linears behind a site take what is quantised there, none where nothing is; or why they cannot."""
        if seam.consumer is None:
            return ()
        assert site.quant is not None, "a fusion that quantises is expected where linears do"
        consumers = site.norms[0].consumers if site.norms else site.consumers
        linears = [
            join(site.layer, each.path)
            for each in consumers
            if isinstance(each, LinearSpec) and each.activation == site.quant
        ]
        found = [seam.consumer.reader(self.model.get_submodule(path), site.quant) for path in linears]
        readers = tuple(each for each in found if each is not None)
        if len(readers) == len(found) and found:
            return readers
        strange = linears[found.index(None)] if found else "no linear behind it"
        return f"{strange} does not quantise in a way that layerfuse knows a place in"

    @contextmanager
    def looking_for_unknown_norms(self) -> Iterator[None]:
        """Take down what is called like a norm of the residual stream, with its residual, and belongs to no layer that was read.

        Such a module holds one weight as wide as the stream, and no other module.
        """
        plan, hooks = self.compiled.plan, []
        read = {path for path, spec in plan.specs if not isinstance(spec, FinalNormSpec | KernelSpec)}
        read |= {join(site.layer, norm.module or "") for site in plan.site.values() for norm in site.norms}
        read |= self.compiled.around.ignored
        widths = {(spec.hidden_size,) for _, spec in plan.specs if not isinstance(spec, KernelSpec)}
        on_stream = any(plan.site[each.site].role in STREAM for each in plan.expected())
        for path, module in self.model.named_modules() if on_stream else ():
            alone = next(module.children(), None) is None and any(
                tuple(each.shape) in widths for each in module.parameters(recurse=False)
            )
            if alone and not any(is_around(outer, path) for outer in read):
                holder, _, name = path.rpartition(".")
                hook = _with_residual(self.strange, (holder, name))
                hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def watch(self) -> None:
        """Look before each later call whether what an op stands in is there, and whether it is to stand there."""
        placements = self.compiled.placements.values()
        for each in placements:
            self.inside.update(each.modules())
        if self.inside or any(each.put for each in placements):
            self._hold()
            for module in {id(each): each for each in (self.model, self._around())}.values():
                module.register_forward_pre_hook(self._begin, with_kwargs=True)

    def _around(self) -> nn.Module:
        """The innermost module that is around all of them and has a forward: SGLang calls the model's forward past its hooks, vLLM what is inside."""
        others = (each for each in self.compiled.placements.values() if each is not self and each.put)
        layers = (self.compiled.plan.site[site].layer for each in others for site in each.calls())
        every = [*self.inside, *layers]
        first = every[0].split(".")
        paths = (".".join(first[:end]) for end in range(len(first) - 1, 0, -1))
        outer = (self.model.get_submodule(path) for path in paths if all(is_around(path, each) for each in every))
        return next((each for each in outer if not isinstance(each, nn.ModuleList | nn.ModuleDict)), self.model)

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A step begins: look what is there, and stand there or not."""
        if torch.compiler.is_compiling():
            return
        away = self._is_launched_by_the_host(module, args, kwargs)
        if away and self.away:  # nothing of ours stands there
            return
        Step.begin()
        self._look()
        if away is self.away:
            return
        self.away = not self.away
        put = [each for placement in self.compiled.placements.values() for each in placement.put]
        if self.away:
            # The other way round: one may stand over another.
            for each in reversed(put):
                each.take_out()
            forget()
            once(logging.INFO, AWAY, here().name)
        else:
            for each in put:
                each.put_back()
        self._hold()

    def _is_launched_by_the_host(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the ops of this step are, one by one: where the GPU has less to do, one of ours costs more than it saves."""
        captures, tokens = here().captures, here().tokens
        if captures is not None:
            capturing = captures()
            self.captured |= capturing
            return self.captured and not capturing
        several = tokens(module, args, kwargs) if tokens is not None and self.apart else 0
        return self.away if several is None else several in self.apart

    def _hold(self) -> None:
        """Take note of where the model holds those modules and the ones around them, and of their forwards."""
        wanted = {id(module) for module in self.inside.values()}
        held = {}
        for path, module in self.model.named_modules():
            if id(module) in wanted:
                parts = path.split(".")
                held.update({".".join(parts[:end]): parts[end - 1] for end in range(1, len(parts) + 1)})
        places = [(self.model.get_submodule(path.rpartition(".")[0])._modules, name) for path, name in held.items()]
        places += [(vars(module), "forward") for module, _ in self.forwards.values()]
        gets, names = [where.get for where, _ in places], [name for _, name in places]
        self.held = gets, names, [*map(operator.call, gets, names)]

    def _look(self) -> None:
        """Say what is there no more: what is called in its place is no op of ours. About 50 ns for a module."""
        gets, names, whats = self.held
        if all(map(operator.is_, map(operator.call, gets, names), whats)):
            return
        there = {id(module) for module in self.model.modules()}
        for path, module in self.inside.items():
            if id(module) not in there:
                once(logging.WARNING, GONE, f"another module stands at {path}")
        for site in self.forwards:
            problem = self._other(site)
            if problem is not None:
                once(logging.WARNING, "layerfuse: %s, which calls the op or does not", problem)
        self._hold()

    def _other(self, site: str) -> str | None:
        """Whose forward was put where the op of a site stands, as a sentence; None where it is ours."""
        module, ours = self.forwards.get(site, (None, None))
        if module is None or (self.away and "forward" not in vars(module)):
            return None
        now = vars(module).get("forward", type(module).forward)
        return None if now is ours else OTHER % module_of(now)

    def _as_it_was(self, site: str, stood: Native) -> bool:
        """Whether nothing has been put in the place of the engine's code since ours stands there: what has is called instead, and said."""
        problem = stood.changed()
        if problem is None:
            return True
        self.missed[site] = problem
        once(logging.WARNING, GONE, problem)
        return False

    def _plainly(self, site: str, fusion: str) -> Called:
        """The fused op of a chain that quantises nothing."""
        op = FUNCTIONS[FUSIONS[fusion].op.name]

        def call(*fused: Any) -> Any:
            result = op(*fused)
            self.done[site] += is_looked_at()
            return result

        return call, FUSIONS[fusion].op.reference, ()

    def _reduce(self, path: str, module: nn.Module, seam: Seam, site: Site, *given: Any) -> None:
        *told, readers = given
        calls.reduced(module, seam, site, *told)
        self._read(site.name, seam.fusion, readers, self._leave)
        self.inside[path] = module

    def _together(
        self, site: str, fusion: str, options: Sequence[Any], fused: Sequence[Any], find: Callable[[], str | None]
    ) -> str | None:
        """Why no rank runs the fused op of a chain with an all-reduce: one of them has no kernel for it, or finds something else there."""
        form = FUSIONS[fusion].forms[-1 if options else 0]
        try:
            check_kernel(form, (*fused, *options))
            none = None
        except Unmatched as error:
            none = str(error)
        problem = self._apart(f"the kernel at {site}", none or "") or none
        if problem is None:
            found = find()
            problem = self._apart(f"what runs at {site}", found or "") or found
        return problem

    def _handing_over(self, site: str, seam: Seam, quant: ActivationQuant, readers: Sequence[Reader]) -> Called:
        """The fused op of a chain that quantises, with the plain result too: what reads that is given what is quantised."""
        op, scale = FUSIONS[seam.fusion].forms[-1].op, readers[0].scale
        rows = calls.halves if seam.call == "product" else _as_given
        said = {**attrs.asdict(quant), "dtype": here().fp8_dtype(), "scale": scale}
        options = tuple(said[argument.name] for argument in op.args if argument.name in said)
        function, quantised = FUNCTIONS[op.name], 1 if scale is not None else 2

        def call(*fused: Any) -> Any:
            results = function(*rows(*fused), *options)
            if site in self.left:
                return _one(results[quantised:])
            self.given.add(site)
            return _one(give(site, results, scale))

        # The values and scales are compared where they are taken.
        return call, lambda *fused: op.reference(*rows(*fused), *options)[quantised:], options

    def _tried(
        self,
        site: str,
        call: Callable[..., Any],
        meaning: Callable[..., Any],
        together: Callable[[Sequence[Any], Callable[[], str | None]], str | None] = lambda _, find: find(),
    ) -> Run:
        """`call`, or the engine's own code where that refuses, or where `meaning` is found to be something else: by this rank, or `together`."""
        tried = False

        def run(fused: tuple[Any, ...], plain: tuple[Any, ...], own: Callable[..., Any]) -> Any:
            nonlocal tried
            if not tried and trial.possible():
                tried = True
                problem = together(fused, partial(trial.difference, meaning, fused, own, plain))
                if problem is not None:
                    self._refuse(site, problem)
            if site in self.wrong:
                return own(*plain)
            try:
                return call(*fused)
            except REFUSALS as error:
                self.missed[site] = f"the fused op refused its arguments: {error}"
                return own(*plain)

        return run

    def _refuse(self, site: str, why: str) -> None:
        """Leave a site to the engine from now on: what runs there computes something else."""
        self.wrong.add(site)
        self.missed[site] = why

    def _leave(self, site: str, why: str) -> None:
        """Leave the quantisation behind a fused all-reduce to the engine from now on: the other ranks sum by the op, so this one does too."""
        self.left.add(site)
        self.missed[site] = why

    def _took(self, site: str) -> None:
        """Count a call of the op at a site, once for its readers, when the first of them takes what it has quantised."""
        self.done[site] += is_looked_at()

    def fusions_at(self, site: str) -> tuple[str, str]:
        """The first that is expected: for more tokens than a fused all-reduce takes that may be another chain, where the engine's own code runs."""
        expected = next(decision.fusion for decision in self.compiled.plan.at(site) if decision.applies)
        return expected, self.stands.get(site, expected)

    def calls(self) -> dict[str, Counter[str]]:
        """Of what stands at each site, or was to."""
        sites = dict.fromkeys(decision.site for decision in self._expected())
        ops = {site: self.forms.get(site, FUSIONS[self.fusions_at(site)[1]].op.name) for site in sites}
        return {site: Counter({op: self.done[site]}) for site, op in ops.items()}

    def left_to_engine(self) -> set[str]:
        """Also where something else was found to run."""
        return super().left_to_engine() | self.wrong

    def why_left(self, site: str, run: str) -> str | None:  # noqa: ARG002 (it is the first one)
        """Who is called in its place, or that nobody is."""
        at = self.compiled.plan.site[site]
        if at.role == OUTPUT and site not in self.given:
            return None  # an engine skips the recurrence, and all that is inside of it, where there is no cache yet
        if any(each.covers(at) for each in self.compiled.placements.values()):
            return None
        not_called = NOT_CALLED.format(engine=here().name, what=_what(at))
        return self._other(site) or (NOT_TAKEN if site in self.forms else not_called)

    def notes(self, run: str) -> Iterator[str]:
        """Which sites the run did not come to, and in which steps nothing stands."""
        unreached = [use.site for use in self.uses(run) if use.form is None and not use.missed]
        if unreached:
            yield f"the {run} did not come to {first_of(unreached)}, where fused ops stand too"
        if self.apart and self.put:
            least, most = self.apart[0], self.apart[-1]
            which = f"more than {least - 1}" if most >= sys.maxsize - 1 else f"{least} to {most}"
            yield f"in steps of {which} tokens {here().name}'s own modules run"


def _with_residual(found: dict[UnknownNorm, None], norm: UnknownNorm) -> Callable[..., None]:
    """A hook that takes note of a norm when it is called with two tensors of one shape."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shapes = [each.shape for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        if len(shapes) > 1 and shapes[0] == shapes[1]:
            found[norm] = None

    return hook


def _what(site: Site) -> str:
    return "norms together" if site.norms else "product by itself"


def _as_given(*fused: Any) -> tuple[Any, ...]:
    return fused


def _one(several: tuple[Any, ...]) -> Any:
    return several if len(several) > 1 else several[0]


@contextmanager
def counted(compiled: CompiledModule) -> Iterator[None]:
    """Count the fused ops that this thread calls while this lasts, and what is called at seams."""
    from ..fusion.backends import listening

    before = {name: each.calls() for name, each in compiled.placements.items()}
    calls: Counter[str] = Counter()
    with looking(), listening(lambda op, _: calls.update((op,) * is_looked_at())):
        yield
    for name, each in compiled.placements.items():
        each.ran = {site: so_far - before[name][site] for site, so_far in each.calls().items()}
        calls = each.told(calls)
    compiled.counted = calls


def at_first_call(
    model: Any,
    compiled: CompiledModule,
    seams: Sequence[Seam],
    before: Callable[[CompiledModule], None],
    done: Callable[[CompiledModule], None],
    apart: range = range(0),
    warm: Callable[[dict[Any, None], CompiledModule], None] = lambda *_: None,
) -> None:
    """Put the planned ops into a model, and report after its first call: the engine's profiling run if it makes one, else the first step.

    Args:
        model: as loaded.
        compiled: its plan.
        seams: the engine's.
        before: called with `compiled` before that call; it may plan anew.
        done: called with `compiled` when the record of that call is in it.
        apart: as `Standing.apart`.
        warm: called behind that call with what it has called and `compiled`, to launch what other numbers of tokens launch.
    """
    standing = compiled.placements["modules"] = Standing(compiled=compiled, model=model, seams=seams, apart=apart)
    standing.put_in()
    own, before_us, reported, over = model.forward, {**vars(model)}, False, False

    @functools.wraps(own)
    def first(*args: Any, **kwargs: Any) -> Any:
        nonlocal reported, over
        if over:  # somebody stood around this in that call
            put.take_out()
        tokens = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), None)
        # Of no tokens, as on a rank without requests: an engine skips norms there. And SGLang holds on to this while it makes its CUDA graphs.
        if reported or (tokens is not None and not tokens.numel()):
            return own(*args, **kwargs)
        reported = True  # calls beside this one, of an engine's other micro-batches, are not
        try:
            before(compiled)
            standing.put_in()
            with counted(compiled), standing.looking_for_unknown_norms(), recording() as seen:
                result = own(*args, **kwargs)
        except BaseException:
            reported = False  # a call that raised is none: the next one is reported
            raise
        over = True
        put.take_out()  # later calls are the model's own
        standing.watch()
        warm(seen, compiled)
        done(compiled)
        return result

    model.forward = first
    put = Put.at(model, "forward", before_us)
