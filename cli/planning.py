"""`layerfuse plan`: what each kind of layer holds on one rank, and which fusions it takes. One dict, shown three ways."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from ..adapters.activation_quant import ActivationQuantError
from ..adapters.errors import LayerfuseError, SpecError, cut, did_you_mean, shown
from ..adapters.linear_specs import NOT_READ
from ..adapters.specs import LinearSpec, ResidualSpec
from ..adapters.variables import unknown_variables
from ..fusion import ActivationQuant, Engine, FusionConfig, Plan, Target, plan
from ..fusion.config import ENVIRONMENT, NEEDS_LEVEL, UNLESS, FusionConfigError
from ..fusion.engine import NAMES as ENGINES
from ..fusion.engine import SPELT
from ..fusion.formats import why_unknown
from ..fusion.planning import ANY
from ..fusion.policy import shipped
from ..fusion.sites import EXPERTS, ROLES, UNREAD, linear_sites, sites_in_words, stack_of
from ..fusion.steps.linear import HELD
from .console import draw, facts, print_json, prose_width, require_writable, show, show_said
from .kinds import kinds_of, mixtures_of, ranges, rows_of, spec_dict
from .summary import Footnotes, is_open, possible, show_summary, summed, with_tokens

if TYPE_CHECKING:
    from rich.console import Console

    from ..fusion import Decision
    from ..fusion.policy import Measurement
    from ..registry.catalog import ModelEntry
    from ..registry.published import Linears, QuantKind

DEFAULT_TARGET = "gfx950"
"""Of plans that nobody gave a target for, unless they are for one of `RUNS_HERE`."""
RUNS_HERE = ("transformers", "vllm", "sglang")
"""The engines that layerfuse runs in, whose plans are for this machine's GPU."""
ENGINE_TARGET = "sm90"
"""Of those where torch can use no GPU: H100s and H200s run most of them."""

LARGEST_TP_LISTED = 64
_SHOWN = ("fusions", "off", "rows", "paths", "read", "asked_quant", "planned_for")
_WORDS = {"expected": "yes", "fallback": "fallback", "off": "off", "refused": "no", "not_applicable": "not applicable"}
_STYLES = {"expected": "green", "fallback": "cyan", "off": "yellow", "refused": "red", "not_applicable": "dim"}


class TooManyRanksError(LayerfuseError, ValueError):
    """A model whose heads cannot be shared by that many ranks. `works` holds the sizes that can: size -> the engine's option that it needs, or None."""

    def __init__(self, model: str, tp: int, problems: tuple[str, ...], works: Mapping[int, str | None]) -> None:
        self.model = model
        self.tp = tp
        self.problems = problems
        self.works = works
        super().__init__(model, tp, problems, works)

    def __str__(self) -> str:
        reasons = "; ".join(dict.fromkeys(self.problems))
        by_option: dict[str | None, list[str]] = {}
        for size, option in self.works.items():
            by_option.setdefault(option, []).append(str(size))
        sizes = "; ".join(
            ", ".join(several) + (f" with {option}" if option else "") for option, several in by_option.items()
        )
        works = (
            f"Sizes up to {LARGEST_TP_LISTED} that work: {sizes}."
            if sizes
            else f"No size up to {LARGEST_TP_LISTED} works."
        )
        return f"{self.model} cannot be sharded over {self.tp} ranks: {reasons}. {works}"


def target_for(engine: str | None) -> tuple[str, str | None]:
    """The target of a plan that nobody gave one for, and a sentence on it where it may not be the one that is meant.

    For an engine it is this machine's GPU, as what an engine fuses itself, and what was measured faster there, differs by GPU. Torch says which it is,
    and is imported where there may be one.
    """
    if engine not in RUNS_HERE:
        return DEFAULT_TARGET, None
    try:
        found = Target.detect() if _may_have_gpu() else Target.named("cpu")
    except (ImportError, OSError):  # a broken wheel raises OSError too
        found = Target.named("cpu")
    if found.vendor != "cpu":
        return found.name, None
    said = f"Planned for {ENGINE_TARGET} (H100, H200), as no --target was given and torch can use no GPU here; --target names another."
    return ENGINE_TARGET, said


def _may_have_gpu() -> bool:
    """Whether torch could find a GPU here: on Linux it reaches each by a file of the driver's."""
    return sys.platform != "linux" or any(name.startswith(_DRIVERS) for name in os.listdir("/dev"))


_DRIVERS = ("nvidia", "nvgpu", "nvmap", "nvhost", "kfd", "dxg")
"""How those begin in /dev: NVIDIA's, its boards' with a GPU on the chip, AMD's, and that of Linux in Windows."""


def sharded(
    entry: ModelEntry, tp: int, rank: int, engine: str | None, published: bool = False
) -> list[tuple[str, Any]]:
    """The specs of one rank, as published where that is asked for.

    Raises:
        TooManyRanksError: the model cannot be sharded that way.
    """
    try:
        entry.check_engine(engine)
        return list(entry.specs(tp, rank, engine=engine, published=published))
    except SpecError as error:
        raise TooManyRanksError(entry.name, tp, error.problems, _sizes(entry, engine, published)) from None


def _sizes(entry: ModelEntry, engine: str | None, published: bool) -> dict[int, str | None]:
    distinct = {spec for _, spec in entry.specs()}
    works: dict[int, str | None] = {}
    for size in range(1, LARGEST_TP_LISTED + 1):
        try:
            for spec in distinct:
                spec.shard(size)
        except SpecError:
            continue
        if entry.refusal(size, engine) is not None:
            continue
        specs = list(entry.specs(size, engine=engine, published=True)) if published else []
        if _why_not_loaded(entry, size, engine, specs) is None:
            works[size] = WHOLE_EXPERTS[engine] if engine and _why_whole_experts(size, engine, specs) else None
    return works


def plan_data(
    entry: ModelEntry,
    *,
    tp: int,
    rank: int,
    target: str,
    engine: str | None,
    config: FusionConfig | None = None,
    release: str | None = None,
    engine_version: str | None = None,
    enforce_eager: bool = False,
    published: bool = False,
    experts: bool = False,
    unread: bool = False,
) -> dict[str, Any]:
    """The whole answer as plain data; the keys of `layerfuse plan --help` do not change, others are for people (`_SHOWN`).

    Raises:
        TooManyRanksError: the heads cannot be shared by that many ranks.
        UnknownTargetError: no such target.
        UnknownReleaseOfVllmError: nothing is recorded of this release.
    """
    device = Target.named(target)
    inside = None
    if engine == "vllm" and published:
        from ..engines.vllm.releases import inside_as_installed

        inside = inside_as_installed(device, engine_version)
    specs = sharded(entry if inside is None else _quantising(entry, inside), tp, rank, engine, published)
    if experts:
        specs = [(path, _with_experts(spec, entry)) for path, spec in specs]
    if unread:
        specs = list(_as_unread(specs))
    if release is not None:
        from ..fusion.metadata import releases_named

        device = attrs.evolve(device, aiter=releases_named(release).last)
    around = None if engine is None else Engine.named(engine) if engine in ENGINES else Engine(name=engine)
    if engine == "vllm":
        from ..engines.vllm.releases import engine_of

        around = engine_of(
            entry.architectures, target=device, ranks=tp, release=engine_version, enforce_eager=enforce_eager
        )
    elif engine == "sglang":
        from ..engines.sglang import facts

        kinds_said = entry.quant.values() if published else ()
        quantised = [kind for kind in kinds_said if {*kind.linears} != {"experts"}]
        mixtures = stack_of(specs).mixtures.values()
        around = facts.engine_of(entry.architectures, target=device, mixtures=mixtures, kinds=quantised)
    elif engine == "transformers" and published and any(map(_is_in_blocks, entry.quant.values())):
        from ..engines.transformers_facts import keeps

        around = Engine(name=engine, keeps=keeps())
    why = _why_not_loaded(entry, tp, engine, specs) if published else None
    whole = _why_whole_experts(tp, engine, specs) if published and why is None else None
    if around is not None and why is not None:
        around = attrs.evolve(around, refuses={"*": why})
    elif around is not None and whole is not None:
        around = attrs.evolve(around, refuses={**around.refuses, EXPERTS: whole})
    decided, notes = plan(specs, device, config, around), []
    if engine == "vllm":
        from ..engines.vllm import host_bound
        from ..engines.vllm.decode_facts import taking

        decided = taking(decided)
        notes = [*filter(None, [host_bound.note(decided)])]
    notes += _unfound(decided)
    kinds = []
    for kind in (*kinds_of(specs), *mixtures_of(specs)):
        kinds.append(
            {
                "kind": kind.name,
                "family": kind.family,
                "count": len(kind.indices),
                "layers": list(kind.indices),
                "spec": spec_dict(kind.spec),
                "sites": _sites(decided, kind.paths),
                "rows": rows_of(kind.spec),
                "paths": kind.paths,
            }
        )
    does = {} if around is None else {**around.does, **around.keeps}
    return {
        "model": entry.name,
        "hf_id": entry.hf_id,
        "adapter": entry.adapter,
        "tp": tp,
        "rank": rank,
        "engine": engine,
        "planned_for": None if around is None else " ".join(filter(None, [around.name, around.release])),
        "target": decided.target.to_dict(),
        "config": decided.config.to_dict(),
        "num_hidden_layers": entry.num_hidden_layers,
        "kinds": kinds,
        "fusions": summed(decided, kinds, does.values()),
        "off": decided.off,
        "engine_does": does,
        "notes": [
            *_engine_notes(entry, engine),
            *_of_release(engine, engine_version),
            *_of_another_release(decided),
            *_left_alone(decided),
            *_uncompiled(decided),
            *([] if whole is None else [f"{whole}."]),
            *_linears(decided),
            *_leveled(decided),
            *_held(decided),
            *notes,
            *_switched_on(decided),
        ],
        "published": [
            str(kind if published else attrs.evolve(kind, linears=["experts"]))
            for kind in entry.quant.values()
            if published or (experts and "experts" in kind.linears)
        ],
    }


def _with_experts(spec: Any, entry: ModelEntry) -> Any:
    """A layer's spec with what the checkpoint says of its routed experts."""
    if not isinstance(spec, ResidualSpec) or spec.experts is None:
        return spec
    from ..registry.published import Published

    return attrs.evolve(spec, experts=Published(entry.quant).routed(spec.experts))


def _as_unread(specs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The specs of a checkpoint of which a config says how it is quantised, in words that are not read."""
    from ..registry.published import Published

    published = Published({}, unsaid=NOT_READ)
    for path, spec in specs:
        yield path, published.of(spec, shared=False)


def _sites(decided: Plan, paths: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Role -> what was decided at the sites of these layers, equal decisions taken together."""
    layers = set(paths)
    found: dict[str, dict[tuple[Any, ...], int]] = {}
    for site in decided.sites:
        if site.layer in layers:
            rows = found.setdefault(site.role, {})
            for d in decided.at(site.name):
                key = (d.fusion, d.kind, d.reason, str(d.tokens))
                rows[key] = rows.get(key, 0) + 1
    names = ("fusion", "decision", "reason", "tokens", "sites")
    return {role: [dict(zip(names, (*key, n), strict=True)) for key, n in rows.items()] for role, rows in found.items()}


def _engine_notes(entry: ModelEntry, engine: str | None) -> list[str]:
    from ..registry.kinds import EPSILONS

    own = {
        (name, norms): value
        for name, facts in entry.engines.items()
        for field, norms in EPSILONS.items()
        if (value := getattr(facts, field)) is not None
    }
    if engine is not None and any(name == engine for name, _ in own):
        return [f"Epsilons are those that {engine} builds the norms with."]
    if engine is not None:
        return [f"{engine} builds the norms with the published epsilons."]
    return [
        f"{name} builds the {norms} with epsilon {value:g}; --engine {name} shows that"
        for (name, norms), value in own.items()
    ]


def _left_alone(decided: Plan) -> list[str]:
    """Why an engine lets no fusion happen, and at how many sites."""
    engine, refused = decided.engine, decided.refused()
    if engine is None or "*" not in engine.refuses or not refused:
        return []
    return [f"At {_count(refused)} nothing is fused in {SPELT.get(engine.name, engine.name)}: {engine.refuses['*']}."]


def _count(decisions: Iterable[Decision]) -> str:
    """At how many sites something is decided."""
    return sites_in_words(len({each.site for each in decisions}))


def _uncompiled(decided: Plan) -> list[str]:
    engine = decided.engine
    if engine is None or engine.uncompiled is None or "*" in engine.refuses:
        return []
    expected = decided.expected()
    there = f"where they are expected at {_count(expected)}" if expected else "and none is on"
    return [f"{engine.uncompiled}: fused ops can stand in its modules only, {there}."]


def _of_release(engine: str | None, release: str | None) -> list[str]:
    if engine != "vllm":
        return []
    from ..engines.vllm.releases import about_release

    said = about_release(release)
    return [] if said is None else [said]


def _of_another_release(decided: Plan) -> list[str]:
    said = decided.measured_with_another_release()
    return [] if said is None else [f"{said[0].upper()}{said[1:]}."]


def _unfound(decided: Plan) -> list[str]:
    """Of each fusion that is asked for by name and is in no row, why it has no site."""
    if not os.environ.get(ENVIRONMENT):
        return []
    from ..engines.options import Options
    from ..engines.vllm.decode_facts import TAKES

    absent = [name for name in Options().named if not decided.concerns(name)]
    found = decided.unfound(absent, TAKES.values())
    return [f"{name} is asked for, and has no site in this model: {why}." for name, why in found.items()]


def _leveled(decided: Plan) -> list[str]:
    """How to ask for what is off by its level alone, where nobody has said a level."""
    off = [each for each in decided.decisions if each.kind == "refused" and NEEDS_LEVEL in each.reason]
    if not off or decided.config.level is not None:
        return []
    named = ",".join(f"+{name}" for name in dict.fromkeys(each.fusion for each in off))
    return [
        f"{ENVIRONMENT}={named} switches on what level 1 leaves off at {_count(off)}, {ENVIRONMENT}=all whatever can stand."
    ]


def _switched_on(decided: Plan) -> list[str]:
    """What to write where an engine has nothing on: the fusions that were measured together, with their figures, or how any is switched on."""
    off = [each for each in decided.refused() if f" {UNLESS}: " in each.reason]
    engine = decided.engine
    if engine is None or engine.name not in ("vllm", "sglang") or decided.expected() or not off:
        return []
    names, figures, sign, refused = dict[str, None](), [], "", {each.fusion for each in decided.refused()}
    for row in shipped().measurement:
        step = attrs.evolve(row, but=None, note=None, fusions=row.fusions[:1]).figure
        quoted = [each.fusion for each in off if row.but is not None and step.partition(" (")[0] in each.reason]
        if quoted and row.engine == engine.name:
            names.update(dict.fromkeys(name for name in row.fusions if name in refused))
            figures.append(step + _elsewhere(row, [each for each in off if each.fusion in quoted]))
            sign = sign if row.against is None else "+"
    if names:
        said = ",".join(f"{sign}{name}" for name in names)
        together = " together" if len(names) > 1 else ""
        return [f"{ENVIRONMENT}={said} switches on what was measured{together}: {'; '.join(figures)}."]
    alone = {each.fusion for each in off}
    name, which = (alone.pop(), "it") if len(alone) == 1 else ("NAME", "one that is off")
    table = (
        f""", as does --additional-config '{{"layerfuse": {{"fusions": ["+{name}"]}}}}'"""
        if engine.name == "vllm"
        else ""
    )
    return [f"No fusion is on here: {ENVIRONMENT}=+{name} switches on {which}{table}."]


def _elsewhere(row: Measurement, off: Sequence[Decision]) -> str:
    """Where a measurement was made, if not in layers like these, with the number of their sites: behind its figure."""
    there: dict[str, set[str]] = {}
    for each in off:
        where = each.reason.partition(f"{row.but}; ")[2].partition(": ")[0]
        if where:
            there.setdefault(where, set()).add(each.site)
    return "".join(f"; for {sites_in_words(len(sites))} that was {where}" for where, sites in there.items())


def _held(decided: Plan) -> list[str]:
    held = [each for each in decided.decisions if each.reason.startswith(HELD)]
    if not held:
        return []
    return [f"Nothing says how the linears at {_count(held)} hold their weights: --quant {NO_QUANT} plans for 16 bits."]


_BLOCKS = (128, 128)


def _is_in_blocks(kind: QuantKind) -> bool:
    """Whether these are linears in fp8 blocks, and not routed experts alone."""
    return kind.weight == "float8_e4m3fn" and kind.weight_spec.block == _BLOCKS and {*kind.linears} != {"experts"}


def _why_not_loaded(entry: ModelEntry, tp: int, engine: str | None, specs: Sequence[tuple[str, Any]]) -> str | None:
    """Why vLLM and SGLang load no such model, where an expert in fp8 blocks, or a rank's share of a linear, is in no whole ones (`validate_fp8_block_shape_moe`, `validate_fp8_block_shape`)."""
    if engine not in ("vllm", "sglang"):
        return None
    width = _width_of_experts(specs)
    if width is not None and width % _BLOCKS[0]:
        return f"{SPELT[engine]} does not load this checkpoint: {width} features of an expert are in no whole blocks of 128"
    if tp == 1 or not any(map(_is_in_blocks, entry.quant.values())):
        return None
    for site in linear_sites(specs, {}, stack_of(specs), loaded=False):
        if site.linear is None or site.quant is None or site.quant.group_size != _BLOCKS[1] or site.experts is not None:
            continue  # shared experts may be routed ones
        width = next((each for each in _shared_out(site.spec, site.linear, engine) if each and each % _BLOCKS[0]), None)
        if width is not None:
            return (
                f"{SPELT[engine]} does not load this checkpoint on {tp} ranks: each has {width} of {site.linear.path}'s features, which are no whole "
                "blocks of 128, and it shares out whole ones alone"
            )
    return None


def _width_of_experts(specs: Sequence[tuple[str, Any]]) -> int | None:
    """Features of a routed expert in fp8 blocks, or None where there are none."""
    held = ((each, each.weight) for each in stack_of(specs).mixtures.values() if each is not None)
    return next(
        (each.intermediate_size for each, weight in held if weight is not None and weight.block == _BLOCKS), None
    )


WHOLE_EXPERTS = {"vllm": "--enable-expert-parallel", "sglang": "--ep-size"}
"""Engine -> its option for expert parallelism."""


def _why_whole_experts(tp: int, engine: str | None, specs: Sequence[tuple[str, Any]]) -> str | None:
    """Why vLLM and SGLang load routed experts in fp8 blocks with expert parallelism alone, as a sentence (vLLM: `validate_fp8_block_shape_moe`); None where they share them out."""
    width = _width_of_experts(specs)
    if engine not in WHOLE_EXPERTS or width is None or width % (_BLOCKS[0] * tp) == 0:
        return None
    return (
        f"{SPELT[engine]} loads this checkpoint on {tp} ranks with expert parallelism alone ({WHOLE_EXPERTS[engine]}): {width} features of an expert "
        "are in no whole blocks of 128 for each rank"
    )


def _shared_out(spec: Any, linear: LinearSpec, engine: str) -> tuple[int | None, ...]:
    """Features of a linear that ranks share, those of this one, as far as they must be in whole blocks. What gates an MLP is as wide as what its last linear reads."""
    if linear.style == "row":
        return (linear.local_in_features,)
    if linear.path == "qkv_proj" and engine == "sglang":  # vLLM takes what is merged as it is
        return spec.num_local_heads * spec.head_dim, spec.num_local_kv_heads * spec.head_dim
    return (linear.local_out_features,) if linear.style == "column" and linear.path in _ALONE else ()


_ALONE = ("q_b_proj", "q_proj", "up_proj")
"""Column-parallel linears that are not merged of several."""


def _quantising(entry: ModelEntry, how: str) -> ModelEntry:
    """The entry whose linears in fp8 blocks quantise in another way. Routed experts are run by kernels of their own."""
    quant = {}
    for name, kind in entry.quant.items():
        if kind.weight_spec.block == _BLOCKS and kind.quant is not None and kind.quant.group_size == _BLOCKS[1]:
            linears: list[Linears] = [each for each in kind.linears if each != "experts"]
            if "experts" in kind.linears:
                quant[f"{name}_experts"] = attrs.evolve(kind, linears=["experts"])
            quant[name] = attrs.evolve(kind, linears=linears, activation=how)
        else:
            quant[name] = kind
    return attrs.evolve(entry, quant=quant)


def _linears(decided: Plan) -> list[str]:
    """What an engine takes on Hopper for linears in blocks of 128, where that decides on what can be fused (engines/vllm/inside.py)."""
    engine = decided.engine
    if (
        engine is None
        or engine.name not in ("vllm", "sglang")
        or "*" in engine.refuses
        or decided.target.arch != "sm90"
    ):
        return []
    quants = (decided.config.quant_at(site) for site in decided.sites if site.linear is not None)
    blocks = [each for each in quants if each is not None and each.group_size == 128]
    if engine.name == "sglang":
        return _sglangs_linears(engine, len(blocks)) if blocks else []
    from ..engines.vllm.switches import BLOCK_LINEARS, BLOCKS_INSIDE, block_switch

    switch = block_switch()
    if blocks and switch is not None and engine.block_linears is not None:
        return [
            f"{switch} is off: {BLOCK_LINEARS[switch]} multiplies in {len(blocks)} linears with fp8 weights in blocks, as vLLM chooses then."
        ]
    if any(each.inside for each in blocks) and not any(
        each.inside for _, each in decided.config.quant if each is not None
    ):
        return [
            f"FlashInfer is taken to be installed, with which vLLM quantises inside of {len(blocks)} linears; --quant group128 plans for DeepGEMM "
            f"({BLOCKS_INSIDE}=0), or without FlashInfer."
        ]
    if not blocks or any(each.inside for each in blocks):
        return []
    return [
        f"Where FlashInfer is installed, vLLM quantises inside of {len(blocks)} linears: --quant group128,inside plans that; "
        f"{BLOCKS_INSIDE}=0 takes DeepGEMM."
    ]


def _sglangs_linears(engine: Engine, blocks: int) -> list[str]:
    from ..engines.sglang.switches import BY_MARLIN, JIT_DEEPGEMM

    if BY_MARLIN in engine.refuses.values():
        return []
    by = "DeepGEMM's where it is installed" if engine.block_linears is None else f"{engine.block_linears}'s"
    off = "" if engine.block_linears is None else f"{JIT_DEEPGEMM} is off, and "
    return [
        f"{off}SGLang's --fp8-gemm-backend is taken to be auto: products of {blocks} linears with fp8 weights in blocks are {by}; with "
        "flashinfer_deepgemm they quantise inside, and nothing that quantises for them stands there."
    ]


def show_plan(data: dict[str, Any], verbose: bool, to: Console) -> None:
    """The answer for people: what is fused at how many sites, and behind it, if asked for, each kind of layer."""
    from rich.text import Text

    alike = data["alike"] and f"its layers are declared as those of {data['alike']}"
    about = ", ".join(filter(None, [data["hf_id"], f"adapter {data['adapter']}", alike]))
    to.print(Text.assemble((data["model"], "bold"), f" ({about})"))
    within = "" if data["planned_for"] is None else f", engine {data['planned_for']}"
    asked = dict.fromkeys(data.get("asked_quant", ()))
    within += f", --quant {NO_QUANT}" if NO_QUANT in asked else ""
    to.print(
        f"rank {data['rank']} of {data['tp']}, {data['num_hidden_layers']} decoder layers, target {_target(data)}{within}"
    )
    for words in asked:
        role, _, how = words.rpartition("=")
        if words != NO_QUANT:
            reads = "as they are" if how.strip() == NO_QUANT else str(_quant_of(how, words))
            where = f"at {role}" if role else "of every role"
            show(Text(f"as --quant {words} says: activations {where} {reads}"), to, prose_width(to))
    if data["published"]:
        where = "as published" if data["read"] is None else f"as {data['read']} says"
        said = f"{where} (see --quant): {' | '.join(data['published'])}"
        show(Text(said), to, prose_width(to))
    to.print()
    notes = show_summary(data["fusions"], to)
    if data["notes"]:
        to.print()
    for note in data["notes"]:
        show_said(note, to)
    if verbose:
        for kind in data["kinds"]:
            _show_kind(kind, data["engine_does"].values(), data["off"], notes, to)
    if "attention" in data:
        from .attention import show_attention

        show_attention(data["attention"], to)


def _show_kind(
    kind: Mapping[str, Any], done: Collection[str], off: Collection[str], notes: Footnotes, to: Console
) -> None:
    """What layers of a kind hold on this rank, and each decision there with the number of its reason."""
    from rich.text import Text

    to.print()
    to.print(Text.assemble((kind["kind"], "bold cyan"), f": {_where(kind)}"))
    grid = facts((f"  {label}", value) for label, value in kind["rows"])
    for role, decisions in kind["sites"].items():
        for label, decision in _listed(decisions, done):
            open_ = decision["decision"] in ("refused", "not_applicable") and is_open(decision["reason"])
            word = "off" if decision["decision"] == "refused" and decision["reason"] in off else decision["decision"]
            verdict = ("depends", "cyan") if open_ else (_WORDS[word], _STYLES[word])
            # Ranges of tokens are of the same sites: those that start at one token count each site once.
            total = sum(
                other["sites"]
                for other in decisions
                if other["fusion"] == decision["fusion"] and not other["tokens"].startswith("from ")
            )
            some = "" if decision["sites"] == total else f" at {decision['sites']} of {total}"
            tokens = "" if decision["tokens"] == str(ANY) else f", {decision['tokens']}"
            why = notes.mark({with_tokens(decision["reason"], decision["tokens"]): ()})
            grid.add_row(f"  {role}: {label}", Text.assemble(verdict, f"{some}{tokens} {why}"))
    show(grid, to)


def _where(kind: Mapping[str, Any]) -> str:
    if kind["family"] == "final":
        return "the norm after the last layer"
    plural = "layer" if kind["count"] == 1 else "layers"
    return f"{kind['count']} {plural} ({ranges(kind['layers'])})"


def _listed(decisions: Sequence[dict[str, Any]], done: Collection[str]) -> list[tuple[str, dict[str, Any]]]:
    """The decisions on fusions that are possible here, or that the engine does itself, with their names; or why no fusion is.

    What is off unless it was measured or asked for is passed over then.
    """
    here = possible(decisions, done)
    if not here:
        return [("any fusion", decision) for decision in decisions[:1]]
    return [(decision["fusion"], decision) for decision in decisions if decision["fusion"] in here]


def _target(data: dict[str, Any]) -> str:
    target = data["target"]
    fp8 = f", fp8 {target['fp8']}" if target["fp8"] else ""
    return f"{target['arch']} ({target['vendor']}{fp8})"


def _documented(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key not in _SHOWN}


NO_QUANT = "none"
"""What `--quant` calls linears that take their activations as they are."""


def as_published(entry: ModelEntry, quant: Sequence[str]) -> bool:
    """Whether the plan is of the checkpoint as published: unless all roles are said to be something else."""
    return bool(entry.quant) and all("=" in words for words in quant)


def experts_as_published(entry: ModelEntry, quant: Sequence[str]) -> bool:
    """Whether all roles are said to be something else, and routed experts alone are what the checkpoint says of them: `none` is of them too."""
    said = any("experts" in kind.linears for kind in entry.quant.values())
    return said and not as_published(entry, quant) and NO_QUANT not in quant


def config_for(quant: Sequence[str], experts: bool = False) -> FusionConfig:
    """What the environment wants, and the quantisation that was asked about, which level 1 would refuse.

    Args:
        quant: of the command line.
        experts: whether what is said of all roles is not of routed experts, as `experts_as_published` says.

    Raises:
        ActivationQuantError: no such quantisation.
        FusionConfigError: LAYERFUSE_FUSIONS names a fusion that does not exist.
    """
    config = FusionConfig.from_environment()
    if not quant:
        return config
    declared: dict[str, ActivationQuant | None] = {}
    everywhere = [words for words in quant if "=" not in words]
    if len(set(everywhere)) > 1:
        raise FusionConfigError(
            f"--quant {everywhere[0]} and --quant {everywhere[1]} are both of all roles: give one of them, and others as ROLE=HOW, as "
            f"--quant {everywhere[0]} --quant latents={everywhere[1]}"
        )
    if everywhere and everywhere[0] == NO_QUANT:
        declared = {role: None for role in ROLES if role not in UNREAD}
    elif everywhere:
        declared = dict(FusionConfig(quant=_quant_of(everywhere[0], everywhere[0])).quant)
    if experts:
        declared.pop(EXPERTS, None)
    for words in quant:
        role, equals, how = words.partition("=")
        if equals:
            roles = [known for known in ROLES if known not in UNREAD]
            if role.strip() not in roles:
                raise FusionConfigError(
                    f"--quant {cut(words)}: no role is called {shown(role)}{did_you_mean(role, roles) or '.'} Known: {', '.join(roles)}."
                )
            declared[role.strip()] = None if how.strip() == NO_QUANT else _quant_of(how, words)
    quantised = any(each is not None for each in declared.values())
    return attrs.evolve(config, quant=declared, level=2 if quantised and config.level != 0 else config.level)


def _quant_of(how: str, words: str) -> ActivationQuant:
    """What stands for a role, or for all of them."""
    if not how.strip():
        place = words.strip()
        raise FusionConfigError(
            f"--quant {place or repr(words)}: expected how, as --quant {place}group128, or --quant {place}{NO_QUANT}"
        )
    try:
        quant = ActivationQuant.parse(how)
        problem = why_unknown(quant)
    except ActivationQuantError as error:
        problem = str(error)
    if problem is None:
        return quant
    meant = _MEANT.get(how.strip().lower())
    hint = f"; {meant}" if meant else ""
    raise ActivationQuantError(f"--quant {cut(words)}: {problem}; {NO_QUANT} is of linears that quantise nothing{hint}")


_MEANT = {
    "fp8": "fp8 with a scale per token is per_token, in DeepSeek's blocks of 128 it is group128, and with scales from calibration static",
    "w8a8": "w8a8 in fp8 with a scale per token is per_token, and with scales from calibration static; int8 is known to no fusion",
    **dict.fromkeys(("bf16", "bfloat16", "fp16", "float16"), f"linears of 16 bits are {NO_QUANT}"),
}
"""What users call quantisations otherwise, and what is meant by it."""


def answer_plan(
    model: str,
    *,
    tp: int,
    rank: int,
    target: str | None,
    engine: str | None,
    quant: Sequence[str],
    attention: Mapping[str, Any],
    files: Sequence[Path],
    json: bool,
    svg: Path | None,
    verbose: bool,
    **of_vllm: Any,
) -> None:
    """Print the plan, or write it as a picture. `attention` are the fields of `Asked` that were given, `of_vllm` its release and how it is started."""
    from .models import found_model

    require_writable(svg)
    for said in unknown_variables():
        print(f"layerfuse: {said}", file=sys.stderr)
    found = found_model(model, files)
    entry = found.entry
    target, unsaid = (target, None) if target else target_for(engine)
    experts = experts_as_published(entry, quant)
    data = plan_data(
        entry,
        tp=tp,
        rank=rank,
        target=target,
        engine=engine,
        config=config_for(quant, experts),
        published=as_published(entry, quant),
        experts=experts,
        unread=found.unread and not quant,
        release=attention.get("release"),
        **of_vllm,
    )
    data["read"], data["asked_quant"], data["alike"] = found.read, quant, found.alike
    data["defaults"] = {} if found.inspection is None else found.inspection.defaults
    data["notes"] = [*filter(None, [unsaid]), *data["notes"]]
    if attention:
        from .attention import Asked, attention_data

        data["attention"] = attention_data(sharded(entry, tp, rank, engine), target, Asked(**attention))
    if json:
        print_json({**_documented(data), "kinds": list(map(_documented, data["kinds"]))})
    else:
        draw(partial(show_plan, data, verbose), svg, f"layerfuse plan {data['model']} --tp {tp} --target {target}")
