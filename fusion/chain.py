"""What a fusion is: a declared chain of steps at a site, and the op that does them in one launch.

A step names the arguments and results of the op that it stands for. Nothing here needs torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from attrs import field, frozen

from ..adapters.errors import LayerfuseError
from .declare import REQUIRED, Kernel, Op
from .sites import ROLES, Site


class FusionError(LayerfuseError, ValueError):
    """A fusion that is declared wrongly; the message says what to change."""


@frozen(kw_only=True)
class Add:
    """The residual add in front of a norm: `x + residual`, with the sum as a result of its own."""

    x: str = "x"
    residual: str = "residual"
    out: str = "residual_out"


@frozen(kw_only=True)
class Norm:
    """An RMSNorm. `weight_offset` None: the op takes no zero-centred weights."""

    x: str = "x"
    weight: str = "weight"
    epsilon: str = "epsilon"
    weight_offset: str | None = None
    out: str = "normed"

    @classmethod
    def of(cls, name: str) -> Norm:
        """One norm of several: `of("q")` takes `q`, `q_weight` and `q_epsilon`, and gives `q`."""
        return cls(x=name, weight=f"{name}_weight", epsilon=f"{name}_epsilon", out=name)


@frozen(kw_only=True)
class Quant:
    """Dynamic fp8 quantisation of the chain's first norm, which then has no other reader."""

    per: str = field()
    "token or group."
    dtype: str = "dtype"
    group_size: str = "group_size"
    column_major: str = "column_major"
    use_ue8m0: str = "use_ue8m0"
    out: str = "values"
    scales: str = "scales"

    @per.validator
    def _check(self, _: object, value: object) -> None:
        if value not in ("token", "group"):
            raise FusionError(f"Quant.per: expected token or group, got {value!r}")

    @property
    def scheme(self) -> str:
        """As `ActivationQuant.scheme` names it."""
        return "per_token" if self.per == "token" else "group"


Step: TypeAlias = Add | Norm | Quant


@frozen(kw_only=True)
class TokenLimit:
    """Up to how many tokens a fusion is taken at a site."""

    most: int
    reason: str
    "A sentence."


def _steps(chain: Iterable[Any]) -> tuple[Step, ...]:
    """Classes stand for their defaults, so that a chain reads `(Add, Norm)`."""
    return tuple(step() if isinstance(step, type) else step for step in chain)


def _names(several: Iterable[str]) -> tuple[str, ...]:
    return tuple(several)


def _engines(several: Iterable[str]) -> frozenset[str]:
    return frozenset(several)


def _kernels(several: Iterable[Kernel]) -> tuple[Kernel, ...]:
    return tuple(several)


@frozen(kw_only=True, eq=False)
class Fusion:
    """One fusion.

    Raises:
        FusionError: a chain that cannot stand at one of its roles, or that does not fit its op.
    """

    name: str = field()
    doc: str
    "What becomes one kernel, in a few words."
    level: int = field()
    "1: changes at most the order and number of float roundings. 2: changes numerics, such as quantisation."
    roles: tuple[str, ...] = field(converter=_names)
    "Where it may stand: names of `sites.ROLES`."
    chain: tuple[Step, ...] = field(converter=_steps)
    "What happens there, in order. A longer chain is preferred to a shorter one, which is then its fallback."
    op: Op = field(repr=False)
    backends: tuple[Kernel, ...] = field(default=(), converter=_kernels, repr=False)
    "Its kernels, the preferred one first. The op's reference comes after them."
    faster_in: frozenset[str] = field(default=frozenset(), converter=_engines, repr=False)
    "Engines in which it was measured faster than what the engine does without it: it is on there by default."
    off_in: Mapping[str, str] = field(factory=dict, repr=False)
    "Engine -> why it is off there, with the measurement, as a sentence."
    limit: Callable[[Site, Any], TokenLimit | None] | None = field(default=None, repr=False)
    "From a site and a target to the number of tokens up to which the fusion is taken there; None: any."
    owner: str = "layerfuse"
    "The package that declares it."

    @name.validator
    def _check_name(self, _: object, value: str) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", value):
            raise FusionError(f"a fusion's name is lower-case letters, digits and underscores, got {value!r}")

    @level.validator
    def _check_level(self, _: object, value: object) -> None:
        if value not in (1, 2):
            raise FusionError(f"{self.name}: level must be 1 or 2, got {value!r}")

    def __attrs_post_init__(self) -> None:
        problems = [*self._bad_chain()] or [*self._bad_roles(), *self._bad_op()]
        if problems:
            raise FusionError(f"{self.name}: " + "; ".join(problems))

    @property
    def norms(self) -> tuple[Norm, ...]:
        """The norms of the chain, in the order of the site's."""
        return tuple(step for step in self.chain if isinstance(step, Norm))

    @property
    def add(self) -> Add | None:
        """The residual add, if the chain has one."""
        return next((step for step in self.chain if isinstance(step, Add)), None)

    @property
    def quant(self) -> Quant | None:
        """The quantisation, if the chain has one."""
        return next((step for step in self.chain if isinstance(step, Quant)), None)

    def why_off_in(self, engine: str | None) -> str | None:
        """Why it is off in an engine unless switched on, or None where it is on. transformers runs in torch.compile."""
        if engine in (None, "transformers", *self.faster_in):
            return None
        return self.off_in.get(str(engine), f"it was not benchmarked in {engine}")

    def _bad_chain(self) -> Iterable[str]:
        op: Any = self.op
        if not isinstance(op, Op):
            yield f"op: expected an Op, got {op!r:.80}"
        wrong: list[Any] = [step for step in self.chain if not isinstance(step, Add | Norm | Quant)]
        if wrong:
            yield f"chain: expected steps (Add, Norm, Quant), got {wrong[0]!r:.80}"
        order = [(Add, Norm, Quant).index(type(step)) for step in self.chain if step not in wrong]
        several = [step.__name__ for step in (Add, Quant) if sum(isinstance(s, step) for s in self.chain) > 1]
        if several:
            yield f"the chain has {several[0]} twice"
        if order != sorted(order):
            yield "the steps of a chain stand in the order Add, Norm, Quant"

    def _bad_roles(self) -> Iterable[str]:
        if not self.roles:
            yield f"it stands at no role; known: {', '.join(ROLES)}"
        for name in self.roles:
            role = ROLES.get(name)
            if role is None:
                yield f"no role is called {name!r}; known: {', '.join(ROLES)}"
                continue
            wrong = [type(step).__name__ for step in self.chain if type(step).__name__ not in role.steps]
            if wrong:
                yield f"the role {name} has no {', '.join(wrong)}; it may have {', '.join(sorted(role.steps))}"
            elif len(self.norms) != role.norms:
                norms = "1 norm" if role.norms == 1 else f"{role.norms} norms"
                yield f"the role {name} has {norms}, and the chain has {len(self.norms)}"

    def _bad_op(self) -> Iterable[str]:
        taken = {argument.name for argument in self.op.args}
        given = {result.name for result in self.op.results}
        for step in self.chain:
            names = step_arguments(step)
            missing = [name for name in names if name not in taken]
            if missing:
                yield f"{type(step).__name__} fills {', '.join(missing)}, which {self.op.name} does not take"
            outs = [step.out, *([step.scales] if isinstance(step, Quant) else [])]
            absent = [out for out in outs if out not in given and not self._is_inner(step)]
            if absent:
                yield f"{type(step).__name__} gives {', '.join(absent)}, which {self.op.name} does not return"
        filled = {name for step in self.chain for name in step_arguments(step)}
        read = {step.out for step in self.chain} | {step.scales for step in self.chain if isinstance(step, Quant)}
        unfilled = [each.name for each in self.op.args if each.name not in filled and each.default is REQUIRED]
        if unfilled:
            yield f"no step fills {', '.join(unfilled)}, which {self.op.name} takes"
        unread = [each.name for each in self.op.results if each.name not in read]
        if unread:
            yield f"no step gives {', '.join(unread)}, which {self.op.name} returns"

    def _is_inner(self, step: Step) -> bool:
        """Whether a step's result stays inside: the quantised norm is no result of its own."""
        return isinstance(step, Norm) and self.quant is not None and step is self.norms[0]


def step_arguments(step: Step) -> tuple[str, ...]:
    """The op's arguments that a step fills."""
    if isinstance(step, Add):
        return (step.x, step.residual)
    if isinstance(step, Norm):
        offset = () if step.weight_offset is None else (step.weight_offset,)
        return (step.x, step.weight, step.epsilon, *offset)
    groups = () if step.per == "token" else (step.group_size, step.column_major)
    return (step.dtype, *groups, step.use_ue8m0)
