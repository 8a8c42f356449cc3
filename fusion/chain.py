"""What a fusion is: a declared chain of steps at a site, and the op that does them in one launch.

A fusion whose op is not given has the one that its chain composes to. Nothing here needs torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import permutations
from typing import Any, TypeAlias

from attrs import define, field, frozen

from ..adapters.errors import FOREIGN, shown
from .compose import is_inner, op_of
from .declare import REQUIRED, Kernel, Op
from .formats import FORMATS, Format
from .sites import FINAL, OURS, ROLES, Role, Site
from .steps import (
    SOURCES,
    STAGES,
    Add,
    AllReduce,
    Experts,
    FusionError,
    GatedNorm,
    HeadNorm,
    Linear,
    Norm,
    Pad,
    Quant,
    Rope,
    SiluMul,
    Step,
    format_of,
    main_step,
)


@frozen(kw_only=True)
class TokenLimit:
    """Up to how many tokens a fusion is taken at a site."""

    most: int
    "0: for no number of tokens, and `reason` says why."
    reason: str
    "Why not above that, as a sentence."
    how: str = ""
    "How it is done up to that, where that depends on the number of tokens: `one stage to 18 tokens, two stages to 146`."
    stages: tuple[int, ...] = ()
    "The same in numbers: up to how many tokens each kernel is taken, the first of them from one token on."
    unless_switched_on: str | None = None
    "Why it is off unless it is switched on by name, as a sentence; None where it is on."


Limit: TypeAlias = Callable[[Site, Any, Any], TokenLimit | None]
"""From a site, a target and an engine or None to up to how many tokens a fusion is taken there; None: any number."""


def _steps(chain: Iterable[Any]) -> tuple[Step, ...]:
    """Classes stand for their defaults, so that a chain reads `(Add, Norm)`."""
    steps = _several("chain", chain, "steps, as (Add, Norm)")
    return tuple(step() if isinstance(step, type) and issubclass(step, Step) else step for step in steps)


def _several(name: str, value: Any, what: str) -> tuple[Any, ...]:
    """What is given as a list, a tuple or a generator: one of them alone is a slip, as is a text, whose letters are no names."""
    try:
        if not isinstance(value, str | bytes):
            return tuple(value)
    except FOREIGN:  # what it is to go through it is the value's own code
        pass
    raise FusionError(f"{name}: expected {what}, got {shown(value)}")


def _roles(several: Iterable[str | Role]) -> tuple[Any, ...]:
    return _several("roles", several, f"names of roles, as ({FINAL!r},), or a Role of your own")


FAMILY = (
    Kernel(backend="aiter"),
    Kernel(backend="triton", made_by="layerfuse.fusion.backends.triton.family:function_of"),
)
"""The kernels of an op that is made from its chain."""


COLLECTIVE = (
    Kernel(backend="aiter"),
    Kernel(backend="symm_mem", made_by="layerfuse.fusion.backends.symm_mem.functions:function_of"),
)
"""The kernels of an op that starts with an all-reduce."""


def _kernels(several: Iterable[Kernel]) -> tuple[Kernel, ...]:
    what = "kernels, as (Kernel(backend='triton', function=...),)"
    found = _several("backends", several, what)
    for wrong in [each for each in found if not isinstance(each, Kernel)]:
        raise FusionError(f"backends: expected {what}, got {shown(wrong)}")
    names = [kernel.backend for kernel in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise FusionError(f"backends: two kernels of backend {twice!r}; an op has one of each")
    return found


LAYERFUSE = "layerfuse"
"""The owner of what is built in."""


@frozen(kw_only=True, eq=False)
class Form:
    """One way to run a fusion: which of several a use takes is decided by who reads the norm in the graph."""

    chain: tuple[Step, ...]
    op: Op
    in_graphs: bool = True
    "Whether a graph may hold it. One that is not stands at module level alone."


def _limit(fusion: Any, _attribute: object, value: object) -> None:
    if value is not None and not callable(value):
        raise FusionError(
            f"{fusion.name}: limit: expected a function from site, target and engine to a TokenLimit, got {shown(value)}"
        )


@define(kw_only=True, eq=False, frozen=True, slots=False)
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
    roles: tuple[str, ...] = field(converter=_roles)
    "Where it may stand: names of `sites.ROLES`. A `Role` of another package is given itself, and known from then on."
    chain: tuple[Step, ...] = field(converter=_steps)
    "What happens there, in order. A longer chain is preferred to a shorter one, which is then its fallback."
    op: Op = field(repr=False)
    "Made from the chain unless given, and called like the fusion."
    pads: bool = False
    "Whether there is a form for norms that are padded with columns of zeros behind them."
    backends: tuple[Kernel, ...] = field(converter=_kernels, repr=False)
    "Its kernels, the preferred one first: AITER and Triton for a chain of the family. The op's reference comes after them."
    limit: Limit | None = field(default=None, repr=False, validator=_limit)
    "Up to how many tokens it is taken at a site; None: any number, everywhere."
    opt_in: bool = False
    "Whether it is on by its own name alone: `all` does not ask for it."
    form_of: str | None = None
    "The fusion that it is another form of: switched off with that one, unless it is named itself."
    nowhere: str = "none of its layers has such a chain"
    "Why a model has no site for it, as a sentence, where a plan lists none."
    owner: str = LAYERFUSE
    "The package that declares it."
    entry_point: str = ""
    "By which entry point of that package it is known."

    @op.default
    def _composed(self) -> Op:
        problems = [*self._bad_steps()]
        if problems:
            raise FusionError(f"{self.name}: {problems[0]}")
        own = self.chain[0].own_op if len(self.chain) == 1 else None
        return op_of(self.name, self.chain) if own is None else own

    @backends.default
    def _family(self) -> tuple[Kernel, ...]:
        if self._by_hand is not None:
            return self._by_hand.own_kernels
        # A class that is derived from one of ours computes something else.
        if not self._is_composed or not all(step.is_ours for step in self.chain):
            return ()
        if self.format is not None and self.format.mode is None:
            return ()
        return COLLECTIVE if self.across_ranks else FAMILY

    @name.validator
    def _check_name(self, _: object, value: str) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", value):
            raise FusionError(f"a fusion's name is lower-case letters, digits and underscores, got {shown(value)}")

    @level.validator
    def _check_level(self, _: object, value: object) -> None:
        if value not in (1, 2):
            raise FusionError(f"{self.name}: level must be 1 or 2, got {shown(value)}")

    def __attrs_post_init__(self) -> None:
        given: tuple[Any, ...] = self.roles
        brought = [role for role in given if isinstance(role, Role)]
        known: dict[Any, Role] = {role.name: role for role in reversed(brought)} | ROLES
        object.__setattr__(self, "roles", tuple(role.name if isinstance(role, Role) else role for role in given))
        problems = [*self._bad_chain()] or [*self._bad_roles(brought, known), *self._bad_op()]
        if problems:
            raise FusionError(f"{self.name}: " + "; ".join(problems))
        ROLES.update(known)

    @property
    def _is_composed(self) -> bool:
        op: Any = self.op
        return isinstance(op, Op) and op.chain is not None

    @property
    def _by_hand(self) -> Step | None:
        """Its only step, where the op is that step's own."""
        only: Any = self.chain[0] if len(self.chain) == 1 else None
        return only if isinstance(only, Step) and only.own_op is self.op else None

    @cached_property
    def forms(self) -> tuple[Form, ...]:
        """The forms in the order in which they are tried: padded, then the chain itself, then those with less, or that keep the norm."""
        found = [Form(chain=self.chain, op=self.op, in_graphs=self._by_hand is None or self._by_hand.in_graphs)]
        if not self._is_composed:
            parts = () if self._by_hand is None else self._by_hand.in_parts
            return (*found, *(Form(chain=(part,), op=part.own_op) for part in parts if part.own_op is not None))
        if self.pads:
            chain = (*self.chain, Pad())
            found.insert(0, Form(chain=chain, op=op_of(f"{self.name}_pad", chain)))
        first = main_step(self.chain)
        kept = first and first.keeping()
        if kept is not None and self.format is not None:
            chain = tuple(kept if step is first else step for step in self.chain)
            form = op_of(f"{self.name}_with_{'norm' if kept.is_norm else 'product'}", chain)
            found.append(Form(chain=chain, op=form, in_graphs=kept.in_graphs))
        return tuple(found)

    @cached_property
    def from_the_middle(self) -> tuple[int, ...]:
        """The places of its steps, of the sources the last one first: without an add there is nothing to reduce for."""
        sources = sum(step.stage == SOURCES for step in self.chain)
        return (*reversed(range(sources)), *range(sources, len(self.chain)))

    @cached_property
    def length(self) -> int:
        """How long its chain is: of several that could be taken at a site the longest is."""
        return sum(step.length for step in self.chain)

    @cached_property
    def norms(self) -> tuple[Step, ...]:
        """The norms of the chain, in the order of the site's."""
        return tuple(step for step in self.chain if step.is_norm)

    @cached_property
    def takes_any_number(self) -> bool:
        """Whether a graph for any number of tokens may hold its op, which does the chain in pieces beyond its range."""
        return any(step.takes_any_number for step in self.chain)

    @cached_property
    def goes_with(self) -> str | None:
        """As `Step.goes_with`, of whichever of its steps says it."""
        return next((step.goes_with for step in self.chain if step.goes_with is not None), None)

    @cached_property
    def across_ranks(self) -> bool:
        """Whether the ranks of a process group call its op together."""
        return any(step.across_ranks for step in self.chain)

    @cached_property
    def format(self) -> Format | None:
        """What the chain quantises to."""
        return format_of(self.chain)

    def _bad_steps(self) -> Iterable[str]:
        chain: tuple[Any, ...] = self.chain
        for wrong in [step for step in chain if not isinstance(step, Step)]:
            yield f"chain: expected steps, such as Add, Norm or Quant(per='token'), got {shown(wrong)}"
            return
        named: dict[str, Any] = {}
        for step in self.chain:
            said = {"stage": step.stage in range(len(STAGES)), "roles": bool(step.roles)}
            absent = [name for name, is_said in said.items() if not is_said]
            if absent:
                yield f"{type(step).__name__} does not say its {' and its '.join(absent)}"
            for name, function in step.reference().items():
                if name.startswith("_") or named.setdefault(name, function) is not function:
                    yield (
                        f"{type(step).__name__}.reference: {name} is another function already; names that start with an "
                        "underscore are layerfuse's"
                    )

    def _bad_chain(self) -> Iterable[str]:
        op: Any = self.op
        if not isinstance(op, Op):
            yield f"op: expected an Op, got {shown(op)}"
        wrong = [*self._bad_steps()]
        if wrong:
            yield wrong[0]
            return
        steps = [step for step in self.chain if not step.is_norm]
        twice = next((type(a).__name__ for a, b in permutations(steps, 2) if isinstance(b, type(a))), None)
        if twice is not None:
            yield f"the chain has {twice} twice"
        misplaced = (step.why_not_in(self.chain) for step in self.chain)
        yield from filter(None, misplaced)
        stages = [step.stage for step in self.chain]
        if stages != sorted(stages):
            yield "the steps of a chain stand in the order sources, middle, sinks: " + ", ".join(
                f"{type(step).__name__} is {STAGES[step.stage]}" for step in self.chain
            )

    def _bad_roles(self, brought: Iterable[Role], known: Mapping[Any, Role]) -> Iterable[str]:
        others = [known[role.name] for role in brought if known[role.name] != role]
        if others:
            yield f"roles: there is a role {others[0].name!r} already, {others[0].doc}; give yours another name"
            return
        if not self.roles:
            yield f"it stands at no role; known: {', '.join(ROLES)}"
        for name in self.roles:
            role = known.get(name) if isinstance(name, str) else None
            if role is None:
                yield f"no role is called {shown(name)}; known: {', '.join(ROLES)}"
                continue
            # Whoever brings a role knows what stands there: its norms are counted, and each step asks the site.
            wrong = [step for step in self.chain if name not in step.roles and name in OURS]
            if wrong:
                stands = ", ".join(f"{type(step).__name__} stands at {', '.join(sorted(step.roles))}" for step in wrong)
                yield f"the role {name} has no {', '.join(type(step).__name__ for step in wrong)}: {stands}"
            elif len(self.norms) != role.norms:
                norms = "1 norm" if role.norms == 1 else f"{role.norms} norms"
                yield f"the role {name} has {norms}, and the chain has {len(self.norms)}"

    def _bad_op(self) -> Iterable[str]:
        if self.op.mutated and (self._by_hand is None or self._by_hand.in_graphs):
            written = ", ".join(argument.name for argument in self.op.mutated)
            yield f"{self.op.name} writes to {written}; the op of a fusion writes to nothing, as graphs are functional"
        taken = {argument.name for argument in self.op.args}
        given = {result.name for result in self.op.results}
        filled: set[str] = set()
        read: set[str] = set()
        for step in self.chain:
            names = [argument.name for argument in step.arguments()]
            missing = [name for name in names if name not in taken]
            if missing:
                yield f"{type(step).__name__} fills {', '.join(missing)}, which {self.op.name} does not take"
            absent = [out for out in step.outs if out not in given and not is_inner(step, self.chain)]
            if absent:
                yield f"{type(step).__name__} gives {', '.join(absent)}, which {self.op.name} does not return"
            filled.update(names)
            read.update(step.outs)
        unfilled = [each.name for each in self.op.args if each.name not in filled and each.default is REQUIRED]
        if unfilled:
            yield f"no step fills {', '.join(unfilled)}, which {self.op.name} takes"
        unread = [each.name for each in self.op.results if each.name not in read]
        if unread:
            yield f"no step gives {', '.join(unread)}, which {self.op.name} returns"


def quantised(
    *,
    name: str,
    doc: str,
    formats: Iterable[str],
    roles: Iterable[str],
    chain: Iterable[Any],
    out: str = "values",
    limit: Callable[[str], Limit] | None = None,
) -> Iterator[Fusion]:
    """The quantised forms of a chain, one for each format.

    Args:
        name: with `{}` for the scheme of the format.
        doc: with `{}` for what the format says.
        formats: words of `formats.FORMATS`.
        roles: as in `Fusion`.
        chain: what is quantised.
        out: the name of the quantised result.
        limit: from a format to what `Fusion.limit` takes.
    """
    steps = tuple(chain)
    for each in map(FORMATS.__getitem__, formats):
        yield Fusion(
            name=name.format(each.scheme),
            doc=doc.format(each.says),
            level=2,
            roles=roles,
            chain=(*steps, Quant(per=each.word, out=out)),
            limit=None if limit is None else limit(each.word),
            owner=each.owner,
        )


__all__ = [
    "COLLECTIVE",
    "FAMILY",
    "Add",
    "AllReduce",
    "Experts",
    "Form",
    "Fusion",
    "FusionError",
    "GatedNorm",
    "HeadNorm",
    "Linear",
    "Norm",
    "Pad",
    "Quant",
    "Rope",
    "SiluMul",
    "Step",
    "TokenLimit",
    "quantised",
]
