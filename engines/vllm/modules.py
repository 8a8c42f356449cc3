"""Fused ops at module level, in a model that vLLM does not compile: put in, counted in its first run, reported.

Each stands in one instance of vLLM's own classes, at a site of the plan. Where an op refuses its arguments, vLLM's own code
runs, and the report says so.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any

import attrs
from attrs import define, field
from torch import Tensor, nn

from ...adapters.activation_quant import ActivationQuant
from ...adapters.errors import LayerfuseError
from ...adapters.linear_quant import quantiser_of
from ...adapters.specs import FinalNormSpec, GatedNormSpec, KernelSpec
from ...fusion.catalog import FUSIONS
from ...fusion.declare import Op
from ...fusion.ops import FUNCTIONS
from ...fusion.report import GraphRecord, Use
from ...fusion.rewrite.attribution import is_around, join
from ...fusion.rewrite.unknown_norms import UnknownNorm
from ...fusion.sites import OUTPUT, STREAM, Site
from . import trial
from .compiled_module import CompiledModule, Piece
from .handover import give, reader_of
from .hooks import Hook
from .native import Native, NotNativeError, native, native_call, native_function
from .process import once
from .seams import Seam, seam_of
from .whose import module_of

REFUSALS = (LayerfuseError, TypeError, ValueError)
"""What an op raises for arguments that it does not take."""

NOT_CALLED = "vLLM did not call its norms together in the first run"
NOT_TAKEN = "no linear behind the norm asked for what the op had quantised in the first run"

GONE = "layerfuse: a fused op is not called any more: %s"
"""What is said when something else was put in the place of what an op stands in."""

OTHER = "another forward was put where the fused op stands, from %s"
"""What is said of a module whose forward is ours no more: the other one may call ours, or not."""

_inside: ContextVar[Callable[..., Any] | None] = ContextVar("layerfuse_inside", default=None)
"""What stands for a module's function while an instance runs."""


@define(kw_only=True)
class Standing:
    """The fused ops that stand in one model."""

    unit: CompiledModule
    model: nn.Module = field(repr=False)
    ran: Counter[str] = field(factory=Counter)
    "Site -> calls of its fused op."
    missed: dict[str, str] = field(factory=dict)
    "Site -> why no fused op stands there, or why one did not run."
    inside: dict[str, nn.Module] = field(factory=dict, repr=False)
    "Path of a norm, or of the layer of both -> the module in which an op stands there."
    forwards: dict[str, tuple[nn.Module, Any]] = field(factory=dict, repr=False)
    "Site -> the module in which an op stands, and the forward that was put there."
    held: tuple[tuple[Mapping[str, Any], str, Any], ...] = field(default=(), repr=False)
    "Where and under which name the model holds these modules, what is around them, and their forwards."
    wrong: set[str] = field(factory=set)
    "Sites at which something else than the op's meaning was found to run."
    stands: dict[str, str] = field(factory=dict)
    "Site -> the fusion that stands there: the one that is expected, or its fallback."
    forms: dict[str, str] = field(factory=dict)
    "Site -> the op that is called there, where it is another form of the fusion's."
    asked: set[str] = field(factory=set)
    "Sites that an op was to stand at so far."
    strange: dict[UnknownNorm, None] = field(factory=dict)
    "Norms of the residual stream that belong to no layer that was read."

    def put_in(self) -> None:
        """Let the planned ops stand at their sites. Those at which some were to stand before are left as they are."""
        for decision in self.unit.plan.expected():
            if decision.site in self.asked:
                continue
            self.asked.add(decision.site)
            fallback = (each.fusion for each in self.unit.plan.fallback() if each.site == decision.site)
            for fusion in (decision.fusion, *fallback):
                problem = self._put_in(self.unit.plan.site[decision.site], fusion)
                if problem is None:
                    self.stands[decision.site] = fusion
                    break
                self.missed.setdefault(decision.site, problem)

    def _put_in(self, site: Site, fusion: str) -> str | None:
        """Why not, or None."""
        path = join(site.layer, site.norms[0].module or "") if len(site.norms) == 1 else site.layer
        around = self.model.get_submodule(path)
        inner = [around] if len(site.norms) == 1 else list(around.modules())
        found = next(((each, seam) for each in inner if (seam := seam_of(type(each), fusion)) is not None), None)
        if found is None:
            cls = type(around)
            return f"{cls.__module__}.{cls.__qualname__} is no class of vLLM's that layerfuse knows a place in"
        module, seam = found
        problem = seam.why_not()
        if problem is not None:
            return problem
        if not seam.plain(module):
            return f"this {type(module).__qualname__} does more than its spec says"
        try:
            if seam.reader is not None:
                problem = self._quantised(module, seam, site, fusion)
            elif seam.function is None:
                self._norm(module, seam, site, fusion)
            else:
                self._function(module, seam, site, fusion)
        except NotNativeError as error:
            return str(error)
        if problem is not None:
            return problem
        self.inside[path] = module
        self.forwards[site.name] = module, vars(module)["forward"]
        return None

    @contextmanager
    def looking_for_strangers(self) -> Iterator[None]:
        """Take down what is called like a norm of the residual stream, with its residual, and belongs to no layer that was read.

        Such a module holds one weight as wide as the stream, and no other module.
        """
        plan, hooks = self.unit.plan, []
        read = {path for path, spec in plan.specs if not isinstance(spec, FinalNormSpec | KernelSpec)}
        read |= {join(site.layer, norm.module or "") for site in plan.site.values() for norm in site.norms}
        read |= self.unit.around.ignored
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
        """Look before each later call whether what an op stands in is there."""
        if self.unit.door is not None and self.unit.door.stands:
            wrappers = (layer.wrapper for layer in self.unit.door.made)
            self.inside.update(zip(self.unit.door.layers, wrappers, strict=True))
        if self.inside:
            self._hold()
            self.model.register_forward_pre_hook(lambda *_: self._look())

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
        self.held = tuple((where, name, where.get(name)) for where, name in places)

    def _look(self) -> None:
        """Say what is there no more: what is called in its place is no op of ours. About 50 ns for a module."""
        if all(where.get(name) is what for where, name, what in self.held):
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
        now = ours if module is None else vars(module).get("forward", type(module).forward)
        return None if now is ours else OTHER % module_of(now)

    def _as_it_was(self, site: str, stood: Iterable[Native]) -> bool:
        """Whether nothing has been put in the place of vLLM's code since ours stands there: what has is called instead, and said."""
        problem = next(filter(None, (each.changed() for each in stood)), None)
        if problem is None:
            return True
        self.missed[site] = problem
        once(logging.WARNING, GONE, problem)
        return False

    def _counted(self, site: str, fusion: str, own: Callable[..., Any]) -> Callable[..., Any]:
        """The fused op, or vLLM's own code where it refuses or something else runs there; each given its arguments ready."""
        op = FUNCTIONS[FUSIONS[fusion].op.name]

        def call(*fused: Any) -> Any:
            result = op(*fused)
            self.ran[site] += 1
            return result

        return self._tried(site, call, FUSIONS[fusion].op.reference, own)

    def _tried(
        self, site: str, call: Callable[..., Any], meaning: Callable[..., Any], own: Callable[..., Any]
    ) -> Callable[..., Any]:
        """`call`, or vLLM's own code where that refuses, or where `meaning` is found to be something else."""
        tried = False

        def run(fused: tuple[Any, ...], plain: tuple[Any, ...]) -> Any:
            nonlocal tried
            if not tried and trial.possible():
                tried = True
                problem = trial.difference(meaning, fused, own, plain)
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
        """Leave a site to vLLM from now on: what runs there computes something else."""
        self.wrong.add(site)
        self.missed[site] = why

    def _took(self, site: str) -> None:
        """Count a call of the op at a site, once for its readers, when the first of them takes what it has quantised."""
        self.ran[site] += 1

    def _norm(self, module: Any, seam: Seam, site: Site, fusion: str) -> None:
        (norm,) = site.norms
        settings: tuple[Any, ...] = (norm.epsilon, norm.weight_offset)
        if isinstance(norm, GatedNormSpec):
            settings = (*settings, norm.activation, norm.norm_before_gate)
        stood, second = (native(module),), seam.second
        own = _of_its_class(module)
        run = self._counted(site.name, fusion, own)

        def forward(x: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.keys() == {second} and not args:
                args, kwargs = (kwargs[second],), {}
            # Without the second tensor, or with options of vLLM's, it is another computation.
            plain = len(args) == 1 and not kwargs and args[0] is not None and args[0].numel() == x.numel()
            if not plain or not self._as_it_was(site.name, stood):
                return own(x, *args, **kwargs)
            # Kimi's delta nets give the gate without the leading dimension of 1.
            return run((x, args[0].view(x.shape), module.weight, *settings), (x, *args))

        _stand(module, forward)

    def _quantised(self, module: Any, seam: Seam, site: Site, fusion: str) -> str | None:
        """Let an op norm and quantise, and the linears behind it take what it has quantised; why it cannot, or None."""
        (norm,), quant = site.norms, site.quant
        assert quant is not None, "a fusion that quantises is expected where linears do"
        assert seam.reader is not None
        linears = [
            join(site.layer, linear.path)
            for linear in norm.feeds
            if isinstance(linear.activation, ActivationQuant) and linear.activation == quant
        ]
        found = [reader_of(quantiser_of(self.model.get_submodule(path)), seam.reader, quant) for path in linears]
        readers = [each for each in found if each is not None]
        if len(readers) < len(found) or not found:
            strange = linears[found.index(None)] if found else "no linear behind it"
            return f"{strange} does not quantise in a way that layerfuse knows a place in"
        op = FUSIONS[fusion].forms[-1].op
        settings = (norm.epsilon, norm.weight_offset, *_format_of(op, quant))
        stood, own = (native(module), *(each.stood for each in readers)), _of_its_class(module)
        run = self._tried(
            site.name,
            lambda *fused: _one(give(site.name, FUNCTIONS[op.name](*fused))),
            lambda *fused: op.reference(*fused)[2:],  # the values and scales are compared where they are taken
            own,
        )
        adds, second = FUSIONS[fusion].chain[0].adds, seam.second

        def forward(x: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.keys() == {second} and not args:
                args, kwargs = (kwargs[second],), {}
            given = tuple(each for each in args if each is not None)
            plain = len(given) == adds and not kwargs
            if not plain or not self._as_it_was(site.name, stood):
                return own(x, *args, **kwargs)
            return run((x, *given, module.weight, *settings), (x, *given))

        for reader in readers:
            reader.stand(site.name, self._took, self._refuse)
        _stand(module, forward)
        self.forms[site.name] = op.name
        return None

    def _function(self, module: Any, seam: Seam, site: Site, fusion: str) -> None:
        q, kv = site.norms
        function: Any = seam.function
        native_function(function.module, function.path)
        original, own = _dispatched(function), _of_its_class(module)
        paths = [join(site.layer, norm.module or "") for norm in site.norms]
        switched = seam.switch is not None and not getattr(module, seam.switch)
        stood: list[Native] = []
        if switched:  # vLLM would call its norms
            stood = [native(module, values=False), *(native_call(self.model.get_submodule(path)) for path in paths)]

        def plain(x: Any, y: Any, *others: Any) -> Any:
            if not switched:
                return original(x, y, *others)
            first, second = map(self.model.get_submodule, paths)
            return first(x), second(y)

        run = self._counted(site.name, fusion, plain)
        settings = (q.epsilon, kv.epsilon, q.weight_offset, kv.weight_offset)

        def fused(x: Any, y: Any, x_weight: Any, y_weight: Any, epsilon: float) -> Any:
            if epsilon != q.epsilon:
                why = f"vLLM calls {function.path} with epsilon {epsilon} here; the spec says {q.epsilon}"
                self.missed[site.name] = why
                once(logging.WARNING, GONE, why)
                return plain(x, y, x_weight, y_weight, epsilon)
            return run((x, y, x_weight, y_weight, *settings), (x, y, x_weight, y_weight, epsilon))

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self._as_it_was(site.name, stood):
                if switched:
                    setattr(module, str(seam.switch), False)
                return own(*args, **kwargs)
            before = _inside.set(fused)
            try:
                return own(*args, **kwargs)
            finally:
                _inside.reset(before)

        _stand(module, forward)
        if switched:
            setattr(module, str(seam.switch), True)

    def take_down(self) -> None:
        """Write what the first run was as a record of the unit."""
        uses, unreached = [], []
        for decision in self.unit.plan.expected():
            site = decision.site
            stands = self.stands.get(site, decision.fusion)
            op = self.forms.get(site, FUSIONS[stands].op.name)
            why = self.missed.get(site)
            if why is None and not self.ran[site] and self.unit.plan.site[site].role != OUTPUT:
                why = self._other(site) or (NOT_TAKEN if site in self.forms else NOT_CALLED)
            missed = {} if why is None else {decision.fusion: why}
            instead = missed if stands != decision.fusion else {}
            if missed and not (instead and self.ran[site]):
                uses.append(Use(site=site, fused=None, missed=missed))
            elif why is None and not self.ran[site]:
                # vLLM skips the recurrence, and all that is inside of it, where there is no cache yet.
                unreached.append(site)
                uses.append(Use(site=site, fused=decision.fusion, how="module"))
            uses += [Use(site=site, fused=stands, form=op, how="module", missed=instead)] * self.ran[site]
        record = GraphRecord(graph=0, uses=tuple(uses), strange=tuple(self.strange))
        self.unit.pieces.append(Piece(number=0, tokens="any", source="module", record=record))
        self.unit.unreached = tuple(unreached)


def _with_residual(found: dict[UnknownNorm, None], norm: UnknownNorm) -> Callable[..., None]:
    """A hook that takes note of a norm when it is called with two tensors of one shape."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shapes = [each.shape for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        if len(shapes) > 1 and shapes[0] == shapes[1]:
            found[norm] = None

    return hook


def _format_of(op: Op, quant: ActivationQuant) -> Iterator[Any]:
    """What an op is told of a quantisation, behind a norm's settings."""
    from vllm.platforms import current_platform

    said = {**attrs.asdict(quant), "dtype": current_platform.fp8_dtype()}
    return (said[argument.name] for argument in op.args if argument.name in said)


def _one(several: tuple[Any, ...]) -> Any:
    return several if len(several) > 1 else several[0]


def _stand(module: Any, forward: Callable[..., Any]) -> None:
    """Let the forward of a module be ours. A copy of it takes this along, and runs what its class has, with its own weight."""

    @functools.wraps(module.forward)
    def instead(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs) if self is module else type(self).forward(self, *args, **kwargs)

    module.forward = MethodType(instead, module)  # which copies are bound to anew


def _of_its_class(module: Any) -> Callable[..., Any]:
    """The forward of a module in which ours stands: what its class has when it is called."""

    def own(*args: Any, **kwargs: Any) -> Any:
        return type(module).forward(module, *args, **kwargs)

    return own


def _dispatched(function: Hook) -> Callable[..., Any]:
    """The function of vLLM's that a place calls, from now on through what stands for it while an instance runs."""
    module: Any = sys.modules[function.module]
    name = function.path
    held: Any = vars(module)[name]
    known = vars(held).get("__layerfuse_original__")
    if known is not None:
        return known  # type: ignore[no-any-return]

    @functools.wraps(held)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        standing = _inside.get()
        return held(*args, **kwargs) if standing is None else standing(*args, **kwargs)

    setattr(dispatch, "__layerfuse_original__", held)  # noqa: B010 (functions have no such attribute by type)
    setattr(module, name, dispatch)
    return held  # type: ignore[no-any-return]


@contextmanager
def counted(unit: CompiledModule) -> Iterator[None]:
    """Count the fused ops that are called while this lasts."""
    from ...fusion.backends import counting

    with counting() as calls:
        yield
    unit.counted = calls


def at_first_call(
    model: Any, unit: CompiledModule, before: Callable[[CompiledModule], None], done: Callable[[CompiledModule], None]
) -> None:
    """Put the planned ops into a model, and report after its first call: vLLM's profiling run if it makes one, else the first step.

    Args:
        model: as loaded.
        unit: its plan.
        before: called with the unit before that call; it may plan anew.
        done: called with the unit when the record of that call is in it.
    """
    standing = Standing(unit=unit, model=model)
    standing.put_in()
    own = model.forward

    @functools.wraps(own)
    def first(*args: Any, **kwargs: Any) -> Any:
        before(unit)
        standing.put_in()
        standing.ran.clear()
        with counted(unit), standing.looking_for_strangers():
            result = own(*args, **kwargs)
        # A call that raised is none: the next one is reported.
        if model.forward is first:
            del model.forward  # later calls are the model's own
        standing.watch()
        standing.take_down()
        done(unit)
        return result

    model.forward = first
