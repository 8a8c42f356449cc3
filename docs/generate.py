"""Writes the tables of the docs that follow from the code: `python docs/generate.py`, or `--check` to compare only."""

from __future__ import annotations

import inspect
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import attrs

from layerfuse import registry
from layerfuse.adapters import specs
from layerfuse.bench import against
from layerfuse.bench.result import Result
from layerfuse.engines.defaults import beside
from layerfuse.fusion import FUSIONS, ActivationQuant
from layerfuse.fusion.backends.aiter import BINDINGS, ReleaseRange, calls
from layerfuse.fusion.backends.aiter.matching import Function
from layerfuse.fusion.backends.aiter.restrictions import RESTRICTIONS
from layerfuse.fusion.backends.aiter.table import BY_NAME
from layerfuse.fusion.catalog.few_token_linear import TIMED
from layerfuse.fusion.engine import SPELT
from layerfuse.fusion.formats import FORMATS
from layerfuse.fusion.policy import shipped
from layerfuse.registry.schema import docs_of

HERE = Path(__file__).parent
RESULTS = HERE.parent / "bench" / "results"
SPECS = (
    specs.MLASpec,
    specs.GatedDeltaNetSpec,
    specs.GQASpec,
    specs.Mamba2Spec,
    specs.OtherMixerSpec,
    specs.GatedMLPSpec,
    specs.MLPSpec,
    specs.ResidualSpec,
    specs.FinalNormSpec,
    specs.NormSpec,
    specs.GatedNormSpec,
    specs.LayerNormSpec,
    specs.LinearSpec,
    specs.ExpertsSpec,
    specs.WeightSpec,
    specs.RopeSpec,
    specs.Parallel,
    specs.MLAKernelSpec,
    specs.GQAKernelSpec,
    specs.GatedDeltaNetKernelSpec,
)
VALUES = {
    "count": "at least 1",
    "optional_count": "at least 1, or None",
    "width_or_zero": "at least 0",
    "index": "at least 0",
    "optional_index": "at least 0, or None",
    "window": "at least 1, or None",
    "positive": "above 0",
    "optional_positive": "above 0, or None",
    "number": "any",
    "flag": "True or False",
    "optional_flag": "True, False or None",
    "activation": "silu or sigmoid",
    "mlp_activation": ", ".join(specs.MLP_ACTIVATIONS),
    "norm": "NormSpec",
    "optional_norm": "NormSpec or None",
    "norms": "tuple of NormSpec",
    "gated_norm": "GatedNormSpec",
    "optional_gated_norm": "GatedNormSpec, or None",
    "parallel": "Parallel",
    "rank": "below size, or None",
    "text": "text",
    "module_path": "text, or None",
    "optional_text": "text, or None",
    "activation_quant": "ActivationQuant, or None",
    "rope_table": "cos_sin, cos_and_sin, values or none",
    "optional_rope": "RopeSpec, or None",
    "linears": "tuple of LinearSpec",
    "optional_linear": "LinearSpec, or None",
    "optional_mlp": "GatedMLPSpec, or None",
    "optional_experts": "ExpertsSpec, or None",
    "linear_style": "column, row, replicated, or None",
    "linear_activation": "ActivationQuant, a text, or None",
    "weight_scheme": "plain, tensor, channel, block, group or mx",
    "optional_weight": "WeightSpec, or None",
    "block": "two of at least 1, or None",
    "counts": "tuple of numbers",
    "paths": "tuple of texts",
}
ENGINES = ("transformers", "vllm", "sglang", "atom")


def spec_tables() -> Iterator[str]:
    """One section for each spec type."""
    for cls in SPECS:
        said = docs_of(cls)
        yield f"### {cls.__name__}\n"
        yield f"{(inspect.getdoc(cls) or '').strip()}\n"
        yield "| field | value | meaning |\n|---|---|---|"
        for field in attrs.fields(cls):
            text = " ".join(said[field.name].split()).replace("|", "\\|")
            yield f"| `{field.name}` | {VALUES[specs.kind_of(field)]} | {text} |"
        for name in dir(cls):
            value = inspect.getattr_static(cls, name)
            if isinstance(value, property) and not name.startswith("_"):
                text = " ".join((inspect.getdoc(value) or "").split())
                yield f"| `{name}` | derived | {text} |"
        yield ""


def class_table() -> Iterator[str]:
    """Every layer class that is known, by engine."""
    classes = registry.layer_classes()
    adapters = registry.adapters()
    for engine in ENGINES:
        yield f"### {engine}\n"
        yield "| class | read into | declared by |\n|---|---|---|"
        for key, owner in sorted(classes.items(), key=lambda pair: pair[0].rpartition(":")[2]):
            prefix, _, name = key.partition(":")
            if prefix.split(".")[0] == engine:
                kinds = ", ".join(facts.spec.__name__ for facts in adapters[owner].layers[key])
                where = "" if prefix == engine else f" in `{prefix}`"
                yield f"| `{name}`{where} | {kinds} | {owner} |"
        yield ""


def aiter_tables() -> Iterator[str]:
    """Which function of AITER's answers which calls since when, and what is refused of it."""
    yield "### What is called\n"
    yield "| function | in AITER | for |\n|---|---|---|"
    serves: dict[Function, list[str]] = {}
    for binding in BINDINGS:
        serves.setdefault(binding.function, []).append(f"`{binding.name}`")
    for function, names in serves.items():
        module, _, name = function.path.partition(":")
        yield f"| `{name}` in `{module}` | {ReleaseRange(function.since)} | {', '.join(names)} |"
    yield "\n### What is refused of it\n"
    yield "| of | in AITER | refused |\n|---|---|---|"
    for restriction in RESTRICTIONS:
        every = restriction.when is calls.always
        of = map("`{}`".format, restriction.bindings) if every else functions_of(restriction.bindings)
        said = f"{'every call: ' if every else ''}{restriction.reason}"
        yield f"| {', '.join(of)} | {restriction.where} | {said} |"


def functions_of(names: tuple[str, ...]) -> Iterator[str]:
    """The functions that these bindings call, each once, by their own names; Triton's are named so."""
    found = (BY_NAME[name].function for name in names)
    for function in dict.fromkeys(found):
        name = function.path.rpartition(":")[2].rpartition(".")[2]
        yield f"`{name}`{' (Triton)' if function.is_triton else ''}"


def fusion_table() -> Iterator[str]:
    """Every fusion of the catalog that is layerfuse's own, with its forms."""
    yield "| fusion | level | stands at | becomes one launch | further forms |\n|---|---|---|---|---|"
    for name, fusion in sorted(FUSIONS.items()):
        if fusion.owner == "layerfuse":
            roles = ", ".join(f"`{role}`" for role in fusion.roles)
            forms = ", ".join(
                f"`{form.op.name.removeprefix(name)}`" for form in fusion.forms if form.op is not fusion.op
            )
            doc = fusion.doc.removeprefix("one kernel for ")
            yield f"| `{name}` | {fusion.level} | {roles} | {doc} | {forms or '-'} |"


def format_table() -> Iterator[str]:
    """Every format that activations are quantised to, and how it is asked for."""
    yield "| ending | `ActivationQuant` | `--quant` | what becomes of a tensor | values, and scales |\n|---|---|---|---|---|"
    for form in FORMATS.values():
        word = f"{form.scheme}128" if "group_size" in form.options else form.scheme
        said = attrs.asdict(ActivationQuant.parse(word), filter=lambda _, value: value not in (None, False))
        how = ", ".join(f"`{name}={json.dumps(value)}`" for name, value in said.items()) or "the default"
        results = "; ".join(each.doc.rstrip(".") for each in form.results)
        yield f"| `_{form.scheme}_quant` | {how} | `{word}` | {form.says} | {results} |"


def defaults_table(engine: str) -> Iterator[str]:
    """What is on in an engine by default and what is not, with the measurements: what several fusions were measured with together stands once."""
    yield f"| fusion | on by default in {SPELT[engine]} | measured |\n|---|---|---|"
    # Where nothing is compiled a product has a place of its own, and is on where it was measured.
    compiled = [each for each in shipped().measurement if each.engine == engine and each.compiled]
    on = dict.fromkeys(name for each in compiled if each.faster and each.arch == TIMED for name in each.fusions)
    others, along = [], beside(engine, on, TIMED)
    rows: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted(FUSIONS):
        measured = [*shipped().of(name, engine)]
        for each in measured:
            rows[f"{f'yes: {each.where}' if each.faster else 'no'} | {each.figure}"].append(f"`{name}`")
        goes_with = FUSIONS[name].goes_with
        if name in along and not any(each.compiled for each in measured):
            others_on = f"`{goes_with}` is" if goes_with in FUSIONS else "fusions that quantise in the same way are"
            rows[f"yes: where {others_on} on | with these ([few tokens](#few-tokens))"].append(f"`{name}`")
        elif not measured:
            others.append(name)
    yield from (f"| {', '.join(names)} | {said} |" for said, names in rows.items())
    if others:
        yield f"| the other {len(others)} | no | not measured in {SPELT[engine]} |"


REDUCED = ("2", "2880"), ("2", "7168"), ("4", "2880"), ("4", "7168")
"""GPUs and columns of the measured all-reduces."""
COUNTS = (1, 32, 80, 256, 1024, 4096)


def all_reduce_table() -> Iterator[str]:
    """What fused all-reduces take beside others, in microseconds, and which all-reduces alone are as fast."""
    columns = ("layerfuse", "best unfused", "NCCL, add and norm", "torch's one-shot, no norm", "FlashInfer's fused op")
    yield f"| `all_reduce_add_rms_norm` | tokens | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 2)}"
    faster: list[str] = []
    for gpus, width in REDUCED:
        name = f"all_reduce_add_rms_norm-width{width}-bf16-{gpus}-ranks-nvidia-h200.json"
        result = Result.from_dict(json.loads((RESULTS / name).read_text()))
        for row in result.rows:
            ours, best = row.us(result.ours or "") or 0.0, against.best_unfused(row)
            if row.tokens in COUNTS:
                us = (
                    ours,
                    best and best[1],
                    against.of_library(row),
                    against.one_shot_alone(row),
                    row.us("flashinfer fused"),
                )
                head = f"{gpus} GPUs, {width} columns" if row.tokens == COUNTS[0] else ""
                cells = ("-" if each is None else f"{each:.1f}" for each in us)
                yield f"| {head} | {row.tokens} | {' | '.join(cells)} |"
            alone = {one.peer: one.us for one in row.measured if against.ALONE in one.peer or "flashinfer" in one.peer}
            faster += [
                f"{peer} at {row.tokens} x {width} on {gpus} GPUs ({us:.1f})"
                for peer, us in alone.items()
                if us is not None and us <= ours
            ]
    yield f"\nAs fast as ours or faster, without add and norm or as FlashInfer's fused op: {'; '.join(faster)}."


PAGES: dict[str, dict[str, Callable[[], Iterator[str]]]] = {
    "specs.md": {"specs": spec_tables},
    "engines.md": {"classes": class_table},
    "aiter.md": {"aiter": aiter_tables},
    "fusions.md": {"fusions": fusion_table, "formats": format_table},
    "vllm-measured.md": {"defaults": partial(defaults_table, "vllm")},
    "sglang.md": {"defaults": partial(defaults_table, "sglang")},
    "all-reduce.md": {"times": all_reduce_table},
}


def rewritten(page: str) -> str:
    """The page with its generated parts as the code says them now."""
    text = (HERE / page).read_text()
    for name, table in PAGES[page].items():
        start, end = f"<!-- generated: {name} -->", "<!-- end -->"
        before, _, rest = text.partition(start)
        _, _, after = rest.partition(end)
        text = before + start + "\n\n" + "\n".join(table()).rstrip() + "\n\n" + end + after
    return text


def main() -> int:
    """Rewrite the pages; with --check, only say which ones are out of date."""
    stale = [page for page in PAGES if rewritten(page) != (HERE / page).read_text()]
    for page in stale:
        if "--check" not in sys.argv:
            (HERE / page).write_text(rewritten(page))
        print(f"docs/{page}: {'out of date; run docs/generate.py' if '--check' in sys.argv else 'written'}")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
