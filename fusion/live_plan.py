"""A model's plan while it is compiled: made from what its layers say, and anew where they say something else."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import attrs
from attrs import field, frozen
from torch import nn

from ..adapters.arguments import expect
from ..adapters.errors import ArgumentError, shown
from ..adapters.parallel import ambient, tensor_parallel
from ..adapters.specs import Parallel
from .config import FusionConfig
from .engine import Engine
from .planning import Placed, Plan, plan, several
from .rewrite import ModuleIndex, Pipeline
from .target import Target, target_of


def _all_specs(specs: Iterable[Placed] | None) -> tuple[Placed, ...] | None:
    return None if specs is None else tuple(several(specs))


def _config(config: FusionConfig | None) -> FusionConfig:
    return FusionConfig.from_environment() if config is None else config


def _in_full(specs: Iterable[Placed] | None) -> list[Any]:
    """All that specs say: equal ones may differ in what reads a norm's result."""
    pairs = (spec if isinstance(spec, tuple) else ("", spec) for spec in specs or ())
    return [(path, type(spec), attrs.asdict(spec)) for path, spec in pairs]


@frozen(kw_only=True)
class Asked:
    """What a model is compiled with; see `fusion.compile`.

    Raises:
        ArgumentError: an argument is of another type.
    """

    specs: tuple[Placed, ...] | None = field(default=None, converter=_all_specs, eq=_in_full)
    target: Target | None = None
    config: FusionConfig = field(default=None, converter=_config)
    engine: Engine | str | None = None
    strict: bool = False
    registry: Any = None
    parallel: Parallel | None = None
    within: Parallel | None = field(factory=ambient)
    "What a `tensor_parallel` block said around the call that asked."

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.strict, bool):
            raise ArgumentError(f"strict: expected True or False, got {shown(self.strict)}")
        if self.registry is not None:
            from .. import registry as default

            # The package has what a Registry has, of the default one.
            if self.registry is not default:
                expect("registry", self.registry, default.Registry, "a Registry, or None for the default one")

    @property
    def is_strict(self) -> bool:
        """Whether what is missed is an error."""
        return self.strict or self.config.strict

    def plan(self, seen: Seen) -> Plan:
        """What is expected of a model that says this."""
        return plan(seen.specs, seen.target, self.config, self.engine)

    def look(self, model: nn.Module) -> Seen:
        """What a model says now. Specs that were given stay."""
        unknown: dict[str, str] = {}
        around = module_index_of(model)
        specs = self.specs
        if specs is None:
            registry = _registry(self.registry)
            said = self.within
            with nullcontext() if said is None else tensor_parallel(said.size, said.rank):
                specs = tuple(registry.specs_in(model, parallel=self.parallel))
            unknown = dict(registry.unknown_in(model))
            around = attrs.evolve(around, whole=True, ignored=frozenset(registry.ignored_in(model)))
        target = target_of(model) if self.target is None else self.target
        return Seen(specs=specs, unknown=unknown, target=target, around=around)


@frozen(kw_only=True)
class Seen:
    """What plans are made from, as a model says it now."""

    specs: tuple[Placed, ...] = field(eq=_in_full)
    unknown: dict[str, str]
    target: Target
    around: ModuleIndex


class LivePlan:
    """The plan of a model that is compiled, and the pipeline that rewrites by it. It holds no model."""

    def __init__(self, model: nn.Module, asked: Asked) -> None:
        self.asked, self.seen = asked, asked.look(model)
        self.pipeline = Pipeline(asked.plan(self.seen), around=self.seen.around)
        self._tell()

    def look_again(self, model: nn.Module) -> bool:
        """Plan anew where the model says something else now, and whether it does."""
        now = self.asked.look(model)
        if now == self.seen:
            return False
        self.pipeline.replan(self.asked.plan(now), now.around)
        self.seen = now
        self._tell()
        return True

    def _tell(self) -> None:
        """Let the report say what the plan does not."""
        report, plan = self.pipeline.report, self.pipeline.plan
        report.unknown = self.seen.unknown
        report.unfound = plan.unfound(name for name in plan.config.named if not plan.concerns(name))


def module_index_of(model: nn.Module) -> ModuleIndex:
    """The paths of a model's modules, and which of them are one module under several paths."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        known = first.setdefault(id(module), path)
        if known != path:
            aliases[path] = known
    return ModuleIndex(paths=frozenset((*first.values(), *aliases)), aliases=aliases)


def _registry(given: Any) -> Any:
    from .. import registry

    return registry.default if given in (None, registry) else given
