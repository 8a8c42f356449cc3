"""Which site takes which fusion on a target, and why not: pure, from specs alone.

It needs no torch, no GPU and no layer. The report compares everything later with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import attrs
from attrs import define, field, frozen

from ..adapters.activation_quant import ActivationQuant
from ..adapters.arguments import check_whole, expect
from ..adapters.errors import ArgumentError, ArgumentValueError, did_you_mean, shown
from ..adapters.layer_specs import LayerSpec
from ..adapters.specs import AnySpec, FinalNormSpec, KernelSpec, LinearSpec, MLASpec, ResidualSpec
from .alike import PLACE, Alike
from .catalog import FUSIONS
from .chain import LAYERFUSE, Fusion, TokenLimit
from .config import ENVIRONMENT, FusionConfig
from .engine import NAMES as ENGINES
from .engine import SPELT, Engine
from .legality import legality
from .policy import GROUP, At, Measurement, Policy, shipped
from .sites import (
    ACTIVATION,
    LINEAR,
    OwnSites,
    Site,
    decode_sites,
    latents_of,
    linear_sites,
    mixture_sites,
    sites_in_words,
    sites_of,
    stack_of,
)
from .steps import Kind, Legality
from .target import Target

Placed: TypeAlias = "AnySpec | tuple[str, AnySpec]"
"""A spec, or a spec with the path of its layer in the model."""


@frozen
class Tokens:
    """A range of token counts, both ends included."""

    first: int = 1
    last: int | None = None
    "None: no end."

    def __contains__(self, count: int) -> bool:
        # No tokens at all are planned as one is: an empty batch runs the same graph.
        return self.first <= max(count, 1) and (self.last is None or count <= self.last)

    def __str__(self) -> str:
        if self.last is None:
            return "any number of tokens" if self.first == 1 else f"from {self.first} tokens"
        if self.last == 1:
            return "one token"
        return f"up to {self.last} tokens" if self.first == 1 else f"{self.first} to {self.last} tokens"


ANY = Tokens()
"""Every number of tokens."""


class Decision(NamedTuple):
    """One fusion at one site, for a range of tokens."""

    site: str
    "The site's name: `model.layers.3.self_attn:latents`."
    fusion: str
    kind: Kind
    reason: str
    "A sentence, whichever way it was decided."
    tokens: Tokens = ANY

    @property
    def applies(self) -> bool:
        """Whether the fusion is expected to happen here."""
        return self.kind == "expected"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return self._asdict() | {"tokens": attrs.asdict(self.tokens)}

    def __str__(self) -> str:
        tokens = "" if self.tokens == ANY else f" ({self.tokens})"
        return f"{self.site}: {self.fusion}{tokens}: {self.kind.replace('_', ' ')}: {self.reason}"


@define(kw_only=True, frozen=True, slots=False)
class Plan:
    """The decisions for a model: site by site in the order given, fusions in the order of the catalog."""

    target: Target
    config: FusionConfig
    engine: Engine | None = None
    specs: tuple[tuple[str, AnySpec], ...] = field(repr=False)
    sites: tuple[Site, ...] = field(repr=False)
    decisions: tuple[Decision, ...] = field(repr=False)
    measured: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    "Of each measurement that an expected fusion is on by: the fusion, and the release of the engine."
    off: frozenset[str] = field(default=frozenset(), repr=False)
    "The reasons of refused decisions that a switch would change: the fusion could stand there."

    @cached_property
    def site(self) -> dict[str, Site]:
        """Every site by its name."""
        return {site.name: site for site in self.sites}

    @cached_property
    def _by_site(self) -> dict[str, list[Decision]]:
        found: dict[str, list[Decision]] = {}
        for decision in self.decisions:
            found.setdefault(decision.site, []).append(decision)
        return found

    def like(self, site: Site) -> Iterator[Site]:
        """The sites that are to their layers what this one, of this plan or another, is to its."""

        def place(each: Site) -> tuple[Any, ...]:
            return each.role, each.block, each.linear and each.linear.path

        return (other for other in self.sites if place(other) == place(site))

    def at(self, site: str) -> tuple[Decision, ...]:
        """The decisions for one site.

        Raises:
            ArgumentValueError: the plan has no such site.
        """
        expect("site", site, str, "a site's name")
        if site not in self.site:
            raise ArgumentValueError(
                f"site: expected one of the plan's, got {shown(site)}{did_you_mean(site, self.site)}"
            )
        return tuple(self._by_site.get(site, ()))

    def expects(self, site: str, tokens: int) -> bool:
        """Whether some fusion is expected at a site for so many tokens.

        Raises:
            ArgumentValueError: the plan has no such site.
        """
        check_whole(tokens=tokens)
        return any(decision.applies and tokens in decision.tokens for decision in self.at(site))

    def of(self, layer: str) -> tuple[Decision, ...]:
        """The decisions for all sites of one layer; empty where it has no site.

        Raises:
            ArgumentValueError: the plan has no such layer.
        """
        expect("layer", layer, str, "a layer's path")
        known = dict(self.specs)
        if layer not in known:
            raise ArgumentValueError(
                f"layer: expected one of the plan's, got {shown(layer)}{did_you_mean(layer, known)}"
            )
        return tuple(d for site in self.sites if site.layer == layer for d in self.at(site.name))

    def _kind(self, kind: Kind, fusion: str | None) -> tuple[Decision, ...]:
        if fusion is not None:
            FUSIONS.check(fusion)
        return tuple(d for d in self.decisions if d.kind == kind and fusion in (None, d.fusion))

    def expected(self, fusion: str | None = None) -> tuple[Decision, ...]:
        """Where this fusion (or any) will happen.

        Raises:
            UnknownFusionError: no fusion has this name; the same for the other kinds.
        """
        return self._kind("expected", fusion)

    def fallback(self, fusion: str | None = None) -> tuple[Decision, ...]:
        """Where this fusion (or any) is taken if a longer one is missed."""
        return self._kind("fallback", fusion)

    def refused(self, fusion: str | None = None) -> tuple[Decision, ...]:
        """Where the site has the steps, and this fusion (or any) may not be taken."""
        return self._kind("refused", fusion)

    def not_applicable(self, fusion: str | None = None) -> tuple[Decision, ...]:
        """Where the site has no such steps."""
        return self._kind("not_applicable", fusion)

    def concerns(self, fusion: str) -> bool:
        """Whether some site takes the fusion, falls back to it or is refused it.

        Raises:
            UnknownFusionError: no fusion has this name.
        """
        FUSIONS.check(fusion)
        return any(d.fusion == fusion and d.kind != "not_applicable" for d in self.decisions)

    @property
    def why_empty(self) -> str | None:
        """Why no fusion concerns any site, as a sentence: the reasons that hold at most sites, until each site has one. None: some fusion does."""
        if any(map(self.concerns, FUSIONS)):
            return None
        if not self.sites:
            read = ", ".join(dict.fromkeys(type(spec).__name__ for _, spec in self.specs))
            return f"no fusion has a site here: {f'layers are read as {read}' if read else 'no layer was read'}"
        at: dict[str, set[str]] = {}
        for decision in self.decisions:
            at.setdefault(decision.reason, set()).add(decision.site)
        left, reasons = {site.name for site in self.sites}, []
        for reason, sites in sorted(at.items(), key=lambda each: -len(each[1])):
            if sites & left:
                reasons.append(f"{sites_in_words(len(sites & left))}: {reason}")
                left -= sites
        return f"no fusion can stand here: {'; '.join(reasons)}"

    def unfound(self, names: Iterable[str], taken: Collection[str] = ()) -> dict[str, str]:
        """As the function `unfound`, of this plan alone."""
        found = unfound(names, self.decisions, taken)
        engine = self.engine
        if engine is not None:  # what holds of any model
            found |= {name: engine.refuses[name] for name in found if name in engine.refuses}
        if engine is None or (engine.name == "transformers" and engine.linears is None):
            found |= {name: LINEARS_BY_ENGINE for name in found if FUSIONS[name].roles == (LINEAR,)}
        return found

    def measured_with_another_release(self) -> str | None:
        """With which other releases of the engine than this one the figures of expected fusions were measured, as a sentence; None: with none."""
        if self.engine is None:
            return None
        others = [(name, release) for name, release in self.measured if not self.engine.is_release(release)]
        if not others:
            return None
        of = (
            "here"
            if len(others) == len(self.measured)
            else f"of {', '.join(dict.fromkeys(name for name, _ in others))}"
        )
        releases = ", ".join(sorted({release for _, release in others}))
        return (
            f"the figures {of} were measured with {SPELT[self.engine.name]} {releases}; this is {self.engine.release}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "target": self.target.to_dict(),
            "config": self.config.to_dict(),
            "engine": None if self.engine is None else self.engine.to_dict(),
            "decisions": [decision.to_dict() for decision in self.decisions],
        }

    def __str__(self) -> str:
        where = f"{self.target}" if self.engine is None else f"{self.target} in {self.engine.name}"
        lines = [f"plan for {where}:", *([] if self.why_empty is None else [f"  {self.why_empty}"])]
        for name in filter(self.concerns, FUSIONS):
            kinds = Counter((KINDS.index(d.kind), str(d.tokens)) for d in self.decisions if d.fusion == name)
            counts = ", ".join(
                f"{count} {KINDS[kind].replace('_', ' ')}" + ("" if tokens == str(ANY) else f" ({tokens})")
                for (kind, tokens), count in sorted(kinds.items())
            )
            lines.append(f"  {name}: {counts}")
            # Sites of one kind give the same answer; saying it once per kind keeps 61 layers readable.
            reasons = Counter((d.kind, d.tokens, d.reason) for d in self.decisions if d.fusion == name)
            for (kind, tokens, reason), count in reasons.items():
                of = "" if tokens == ANY else f" ({tokens})"
                lines.append(f"    {count} x {kind.replace('_', ' ')}{of}: {reason}")
        return "\n".join(lines)


KINDS: tuple[Kind, ...] = ("expected", "fallback", "refused", "not_applicable")
"""In the order in which they are listed."""


def plan(
    specs: Iterable[Placed],
    target: Target,
    config: FusionConfig | None = None,
    engine: Engine | str | None = None,
    policy: Policy | None = None,
) -> Plan:
    """Decide every fusion for every site.

    Args:
        specs: specs, or (path, spec) pairs as `registry.specs_in` yields them. One layer may have several specs of
            different types, as a decoder layer that holds its attention's numbers itself.
        target: what the kernels will run on.
        config: what is wanted; the default config if not given. The environment is not read here:
            pass `FusionConfig.from_environment()` for that.
        engine: where the model runs, by name or with what it will not let happen; None: torch.compile as it is.
        policy: the measurements that say what is on in an engine; those that come with the library if not given.

    Raises:
        ArgumentValueError: two specs of one type claim the same layer.
        ArgumentError: an argument is of another type.
        UnknownFusionEngineError: no engine has this name.
        UnknownFusionError: a policy names what is no fusion.
    """
    config = FusionConfig() if config is None else config
    engine = Engine.named(engine) if isinstance(engine, str) else engine
    for name, value, wanted, how in (
        ("target", target, Target, "Target.named('gfx950') makes one from a name"),
        ("config", config, FusionConfig, "give FusionConfig(...), or None for the default"),
        ("engine", engine, Engine | None, f"give one of {', '.join(ENGINES)}, or an Engine(name=...)"),
        ("policy", policy, Policy | None, "fusion.policy.read_policy(path) reads one, None is the library's"),
    ):
        if not isinstance(value, wanted):
            raise ArgumentError(f"{name}: got {shown(value)}; {how}")
    for measured in () if policy is None else policy.measurement:
        for name in (*measured.fusions, *filter(None, [measured.unless])):
            FUSIONS.check(name)
    placed = tuple(map(_placed, several(specs)))
    twice = [key for key, n in Counter((layer, type(spec).__name__) for layer, spec in placed).items() if n > 1]
    if twice:
        layer, kind = twice[0]
        raise ArgumentValueError(
            f"{len(twice)} layers have more than one spec of a type ({shown(layer)} has several {kind}); give each spec "
            "with the path of its own layer, as (path, spec)"
        )
    stack = stack_of(placed)
    if any(isinstance(spec, OwnSites) for _, spec in placed):
        len(FUSIONS)  # those of other packages bring their roles when they are first asked for
    sites = tuple([site for layer, spec in placed for site in sites_of(layer, spec, stack)])
    if engine is not None and engine.decodes:
        sites += tuple(decode_sites(placed))
    linears: tuple[Site, ...] = ()
    routed: tuple[Site, ...] = ()
    if engine is not None and engine.linears is not None:
        linears = tuple(linear_sites(placed, engine.linears, stack, engine.loaded))
        routed = tuple(mixture_sites(placed, engine.linears))
    if engine is not None and engine.shared_routed is not None:
        sites = _with_shared_routed(sites, engine.shared_routed)
        linears = _with_shared_routed(linears, engine.shared_routed)
    roles = frozenset(site.role for site in (*sites, *linears, *routed))
    mixed = {} if engine is None else {index for index, experts in stack.mixtures.items() if experts is not None}
    every = (*sites, *linears, *routed)
    quants = {} if engine is None else {quant: None for site in every if (quant := config.quant_at(site)) is not None}
    decide = _Decider(target, config, engine, policy, roles, mixed, quants)
    decisions = decide.over(sites)
    if linears:
        linears = _handed_over(linears, decide.quantised)
    for products in (linears, routed):
        decide.beside = decide.on.copy()
        decisions += decide.over(products)
    every = (*sites, *linears, *routed)
    return Plan(
        target=target,
        config=config,
        engine=engine,
        specs=placed,
        sites=every,
        decisions=tuple(decisions),
        measured=tuple(decide.measured),
        off=frozenset(decide.off),
    )


def _with_shared_routed(sites: Iterable[Site], why: str) -> tuple[Site, ...]:
    """The sites where an engine runs shared experts as routed ones: in their MLP nothing can stand, and it reads no norm. `why`: `Engine.shared_routed`."""
    open_ended = why.startswith(UNKNOWN)

    def each(site: Site) -> Site:
        if site.experts is None or site.experts.shared is None:
            return site
        if not site.norms:
            return attrs.evolve(site, unknown=why) if open_ended else attrs.evolve(site, absent=why)
        return site if open_ended else attrs.evolve(site, experts=attrs.evolve(site.experts, shared=None))

    return tuple(map(each, sites))


LINEARS_BY_ENGINE = "there is a place for it in transformers' models with fusion.compile(model, engine=engines.transformers.engine_of(model))"
"""Why a plan that was told of no loaded model has no site for a linear."""


def unfound(names: Iterable[str], decisions: Iterable[Decision], taken: Collection[str] = ()) -> dict[str, str]:
    """The fusions of these names that can happen at no site of a model -> why, as a sentence.

    Args:
        names: of fusions that are asked for.
        decisions: of all plans for the model.
        taken: reasons of decisions at whose sites something else does the same.
    """
    found, decisions = {}, tuple(decisions)
    for name in names:
        of_it = [each for each in decisions if each.fusion == name]
        if not any(each.kind in ("expected", "fallback") or each.reason in taken for each in of_it):
            refused = [each.reason for each in of_it if each.kind == "refused"]
            reasons = Counter(refused or [each.reason for each in of_it])
            found[name] = reasons.most_common(1)[0][0] if reasons else FUSIONS[name].nowhere
    return found


def several(specs: Any) -> Iterable[Placed]:
    """Several specs, or (path, spec) pairs, and no text.

    Raises:
        ArgumentError: it is something else.
    """
    try:
        if isinstance(specs, str):
            raise TypeError
        found: Iterable[Placed] = iter(specs)
    except TypeError:
        raise ArgumentError(f"specs: expected specs, or (path, spec) pairs, in a list; got {shown(specs)}") from None
    return found


def _placed(spec: Placed) -> tuple[str, AnySpec]:
    pair = spec if isinstance(spec, tuple) else ("", spec)
    if len(pair) != 2 or not isinstance(pair[0], str) or not isinstance(pair[1], LayerSpec | KernelSpec):
        raise ArgumentError(f"specs: expected a spec or a (path, spec) pair, got {shown(spec)}")
    return (pair[0] if isinstance(spec, tuple) else _label(pair[1])), pair[1]


def _handed_over(linears: tuple[Site, ...], quantised: Iterable[Site]) -> tuple[Site, ...]:
    """The linears, with whether a chain at one of these sites quantises for them: as those say that were read."""
    paths = {
        f"{site.layer}.{each.path}"
        for site in quantised
        for each in site.consumers
        if isinstance(each, LinearSpec) and each.activation == site.quant
    }
    given = (attrs.evolve(site, handed_over=True) if site.path in paths else site for site in linears)
    return tuple(given) if paths else linears


def _label(spec: AnySpec) -> str:
    name = f"layer {spec.layer_index}"
    if isinstance(spec, KernelSpec):
        return f"{name} kernel"
    if isinstance(spec, ResidualSpec):
        return f"{name} residual"
    return "final norm" if isinstance(spec, FinalNormSpec) else name


Row: TypeAlias = tuple[str, Kind, str, Tokens]
"""A decision without its site."""

UNKNOWN = "not known:"
"""How a reason begins that says what a plan does not know of a site."""

ROUTED_ALONE = "routed experts alone read the norm, which take it as it is and quantise inside of their own kernels; no fusion stands in front of those"
"""Why no quantised fusion stands in front of a mixture without shared experts, where no engine says how it runs them."""


class _Decider:
    """Decides site by site. Sites that differ in their place only are decided once."""

    def __init__(
        self,
        target: Target,
        config: FusionConfig,
        engine: Engine | None,
        policy: Policy | None,
        roles: frozenset[str],
        mixed: Collection[int | None],
        quants: Collection[ActivationQuant],
    ) -> None:
        self._target = target
        self._quantised = bool(quants)
        groups = [each.group_size for each in quants if each.scheme == "group"]
        self._columns = GROUP if GROUP in groups else next(iter(groups), None)
        self._linears = engine.block_linears if engine is not None and GROUP in groups else None
        self._roles = roles
        self._mixed = mixed
        self._config = config
        self._engine = engine
        self._given = policy
        self._switches = dict(config.switches)
        self._declared = frozenset(role for role, _ in config.quant)
        self._fusions = tuple(FUSIONS.values())
        # What other packages wrote may look at the place, too.
        self._anywhere = not any(
            f.limit or not all(s.is_ours for s in f.chain) for f in self._fusions if f.owner != LAYERFUSE
        )
        self._alike = Alike(without=(*PLACE, "norms"))  # a site's are its spec's
        self._known: dict[tuple[Any, bool], tuple[list[Row], bool]] = {}
        self.on: set[str] = set()
        "The fusions that are expected so far, and the words of `FORMATS` that they quantise to."
        self.beside: set[str] = set()
        "The same of the sites in front: what others go with."
        self.measured: dict[tuple[str, str], None] = {}
        "As `Plan.measured`."
        self.off: set[str] = set()
        "As `Plan.off`."
        self.quantised: list[Site] = []
        "The sites where a chain that quantises is expected."

    def over(self, sites: Iterable[Site]) -> list[Decision]:
        """The decisions for these sites, one after the other."""
        key_of = self._alike.number if self._anywhere and self._config.only is None else attrgetter("name")
        decisions: list[Decision] = []
        for site in sites:
            name, key = site.name, (key_of(site), self._is_mixed(site))
            found = self._known.get(key) or self._new(key, site)
            if found[1]:
                self.quantised.append(site)
            # Thousands are made, and so they are made past the constructor.
            decisions += [tuple.__new__(Decision, (name, *row)) for row in found[0]]
        return decisions

    def _new(self, key: tuple[Any, bool], site: Site) -> tuple[list[Row], bool]:
        rows = list(self._decide(site, self._config.quant_at(site)))
        on = {fusion for fusion, kind, _, _ in rows if kind == "expected"}
        formats = {each.word for fusion in on if (each := FUSIONS[fusion].format) is not None}
        self.on |= on | formats
        return self._known.setdefault(key, (rows, bool(formats)))

    def _decide(self, site: Site, quant: ActivationQuant | None) -> Iterable[Row]:
        at = At(
            site=site,
            target=self._target,
            quant=quant,
            mixture=self._is_mixed(site),
            quantised=self._quantised,
            columns=quant.group_size if quant is not None and quant.scheme == "group" else self._columns,
            linears=self._linears,
            foreign=self._is_foreign,
        )
        legalities = {f: self._legality(f, at) for f in self._fusions if site.role in f.roles}
        # The longest chain first; of equal ones the catalog's first. What is left of the token counts goes on.
        wanted = sorted((f for f, v in legalities.items() if v.kind == "expected"), key=lambda f: -f.length)
        first: int | None = 1
        taken: dict[Fusion, list[Row]] = {}
        holders: list[str] = []
        for fusion in wanted:
            limit, rows = self._limit(fusion, site), taken.setdefault(fusion, [])
            most = None if limit is None else limit.most
            if first != 1:
                verb, it = ("is", "it is") if len(holders) == 1 else ("are", "they are")
                why = (
                    f"{' and '.join(holders)} {verb} tried first at the same operations; this stands where {it} missed"
                )
                ends = [end for end in (most, None if first is None else first - 1) if end is not None]
                rows.append((fusion.name, "fallback", why, Tokens(1, min(ends, default=None))))
            if first is not None and (most is None or first <= most):
                if (measured := self._measured(fusion, at)) is not None:
                    self.measured[fusion.name, measured.release] = None
                how = f": {limit.how}" if limit is not None and limit.how else ""
                rows.append((fusion.name, "expected", legalities[fusion].reason + how, Tokens(first, most)))
                first = None if most is None else most + 1
                holders.append(fusion.name)
            if limit is not None:
                rows.append((fusion.name, "not_applicable", limit.reason, Tokens(limit.most + 1)))
        for fusion, found in legalities.items():
            yield from taken.get(fusion) or [(fusion.name, found.kind, found.reason, ANY)]

    def _why_not_read(self, site: Site, quant: ActivationQuant | None) -> str | None:
        """Why a quantisation is not known to be of what reads this site, or not to be had; None where it is."""
        if site.undeclared:
            return (
                "not known: the model's entry declares no MLP of this layer; routed experts, which quantise inside of "
                "their own kernels, take what this norm gives as it is"
            )
        engine = self._engine
        if quant is not None and quant.inside and (engine is None or engine.inside is not None):
            return (
                f"the linears that read the {site.role} site quantise inside of the op that multiplies, and nothing takes that out "
                f"{'here' if engine is None else f'in {engine.name}: {engine.inside}'}"
            )
        return self._why_hidden(site)

    def _why_hidden(self, site: Site) -> str | None:
        """Why nothing can stand where a mixture's experts read, nor in shared ones, since an engine runs them in ops of its own; None where it can."""
        engine = self._engine
        # transformers' shared experts are linears like any others, and torch.compile sees them.
        apart = engine is None or engine.name == "transformers" or engine.shared_apart
        if engine is not None and engine.linears_apart:
            apart = apart or site.role == ACTIVATION or site.routed_alone
        if site.experts is None or apart or engine is None or "*" in engine.refuses:
            return ROUTED_ALONE if site.routed_alone else None
        if site.beside_experts:
            return None
        return engine.experts or f"not known: how {engine.name} runs a mixture's experts, and what it gives them"

    @property
    def _policy(self) -> Policy:
        """The measurements, which only plans for an engine read."""
        return shipped() if self._given is None else self._given

    def _measured(self, fusion: Fusion, at: At) -> Measurement | None:
        """The measurement by which a fusion is on here, which only a decision that expects it quotes."""
        return None if self._engine is None else self._policy.faster_at(fusion.name, self._engine, at)

    def _is_mixed(self, site: Site) -> bool:
        """Whether its layer holds a mixture of experts, which matters in an engine."""
        return site.spec.layer_index in self._mixed

    def _is_foreign(self, name: str) -> bool:
        """Whether the model has no site for a fusion."""
        return name in FUSIONS and self._roles.isdisjoint(FUSIONS[name].roles)

    def _limit(self, fusion: Fusion, site: Site) -> TokenLimit | None:
        return None if fusion.limit is None else fusion.limit(site, self._target, self._engine)

    def _legality(self, fusion: Fusion, at: At) -> Legality:
        site, quant = at.site, at.quant
        if isinstance(site.spec, MLASpec) and any(step.reads_latents for step in fusion.chain):
            quant = self._config.quant_at(latents_of(site.layer, site.spec))
        found = legality(fusion, site, self._target, quant, site.role in self._declared)
        unread = None if fusion.format is None else self._why_not_read(site, quant)
        if fusion.format is None and site.role == ACTIVATION and self._engine is not None and self._engine.experts:
            unread = self._why_hidden(site)
        if unread is not None and found.kind != "not_applicable":
            return Legality("not_applicable", unread)
        # What is not known of a site is of no account where the fusion is off, or has no place.
        unknown = found if found.kind == "refused" and found.reason.startswith(UNKNOWN) else None
        engine, switched = self._engine, self._switches.get(fusion.name)
        if found.kind != "expected" and unknown is None:
            if engine is None or not found.reason.startswith(UNKNOWN):
                return found
            nowhere = engine.why_not(fusion.name, site.role)
            return found if nowhere is None else Legality(found.kind, nowhere)
        measured = self._measured(fusion, at)
        refusal = None if engine is None else engine.why_not(fusion.name, site.role)
        if engine is not None and refusal is None:
            elsewhere = engine.why_kept(fusion.name, site.role)
            if elsewhere is None and measured is None and not switched:
                figure = self._policy.why_nothing_gained(fusion.name, engine, at)
                # A pass of the engine's looks for a quantisation in the graph too.
                inside = fusion.format is not None and quant is not None and quant.inside
                elsewhere = None if inside else engine.why_done(fusion.name, quant)
                elsewhere = f"{elsewhere}; {figure}" if elsewhere is not None and figure is not None else elsewhere
            if elsewhere is not None:
                return Legality("not_applicable", elsewhere)
        companion = engine is not None and fusion.goes_with in self.beside
        off = self._config.why_off(fusion, engine, measured, self._given, at, companion)
        limit = self._limit(fusion, site)
        if limit is not None and limit.most < 1:
            refusal = refusal or limit.reason
        elif limit is not None and switched is None and self._config.level != 0:
            how = f"; {ENVIRONMENT}=+{fusion.name}, or in Python FusionConfig(switches={{'{fusion.name}': True}}), switches it on"
            off = off if limit.unless_switched_on is None else limit.unless_switched_on + how
        reason = refusal or off
        if reason is not None:
            if refusal is None:
                self.off.add(reason)
            return Legality("refused", reason)
        if unknown is not None or measured is None:
            return unknown or found
        return Legality("expected", f"{found.reason}; measured {measured.quoted(at.elsewhere(measured))}")
