"""Verification on small real models: specs are read, fusions planned, applied and counted, and outputs compared.

Each model is a real one of transformers with few layers, heads and a small hidden size, but the true widths of every
head and latent, and random weights. Nothing is downloaded. Importing this module imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import attrs
from attrs import frozen

from .adapters.errors import LayerfuseError

if TYPE_CHECKING:
    from .registry.catalog import ModelEntry
    from .registry.lookup import Registry

FOUR = ("deepseek-v3", "kimi-k2.5", "kimi-linear-48b-a3b", "gpt-oss-20b")
"""The architectures that `layerfuse verify` builds unless told otherwise."""

TOLERANCES = {"float32": 1e-5, "bfloat16": 3e-2}
"""Largest difference of a logit, as a fraction of the eager model's largest logit. float32 sums in another order move
the seventh digit; bfloat16 carries 8 bits, and the unfused compiled model differs from the eager one as much."""

TOKENS = 9
"""Tokens per sequence: no multiple of a vector width."""

Step = Callable[[str], None]


class CannotVerifyError(LayerfuseError, RuntimeError):
    """Something that verifying needs is not installed; the text says what to do."""


@frozen(kw_only=True)
class Difference:
    """Between the logits of two runs of one model."""

    absolute: float
    relative: float
    "To the largest logit of the eager model."


@frozen(kw_only=True)
class Comparison:
    """One model in one dtype."""

    dtype: str
    fused_to_eager: Difference
    fused_to_compiled: Difference
    "To torch.compile without fusions."
    compiled_to_eager: Difference
    tolerance: float

    @property
    def within(self) -> bool:
        """Whether both differences of the fused model are within the tolerance."""
        return max(self.fused_to_eager.relative, self.fused_to_compiled.relative) <= self.tolerance


@frozen(kw_only=True)
class Verified:
    """What came of one model."""

    model: str
    device: str
    "cpu or cuda."
    specs: tuple[tuple[str, Any], ...]
    "As read off the real layers."
    fusions: dict[str, dict[str, Any]]
    """Fusion -> its report: expected and matched sites, refused and not applicable with reasons, uses that ran, and the
    backend that ran them; of the first dtype."""
    comparisons: tuple[Comparison, ...]
    problems: tuple[str, ...]
    "Empty where all is well."
    kept: tuple[str, ...]
    "Functions that ran as one op each; see `fusion.keep_recurrences`."
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        data = attrs.asdict(self, filter=lambda attribute, _: attribute.name != "specs")
        return {**data, "specs": {path: attrs.asdict(spec) for path, spec in self.specs}, "ok": not self.problems}


def steps_per_model() -> int:
    """How often `verify` calls `step` for one model."""
    return 1 + 4 * len(TOLERANCES)


def buildable(entries: Iterable[ModelEntry]) -> list[ModelEntry]:
    """The entries that transformers can build."""
    from .testing import why_not

    return [entry for entry in entries if why_not(entry) is None]


def require(entries: Iterable[ModelEntry], device: str | None = None) -> None:
    """Check that everything is there before anything takes long.

    Args:
        entries: what is to be verified.
        device: cpu or cuda; the GPU if there is one and nothing is said.

    Raises:
        CannotVerifyError: torch, transformers, a C++ compiler or the GPU that was asked for is missing, or a model cannot
            be built.
    """
    try:
        import torch._inductor.cpp_builder as builder
    except ModuleNotFoundError as error:
        raise CannotVerifyError(f"{error.name} is not installed; pip install 'layerfuse[hf]'") from None
    from .testing import why_not

    reasons = [f"{entry.name} cannot be built: {reason}" for entry in entries if (reason := why_not(entry)) is not None]
    if reasons:
        raise CannotVerifyError("\n".join(reasons))
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise CannotVerifyError(
            "--device cuda: torch finds no GPU that it can use; `layerfuse doctor` says what is there"
        )
    if device_of(device) == "cuda":
        return
    try:
        builder.get_cpp_compiler()
    except Exception as error:
        raise CannotVerifyError(
            f"torch.compile finds no C++ compiler ({type(error).__name__}); install one (Debian: g++ and python3-dev) or "
            "name it in CXX"
        ) from None


def one_of_each(entry: ModelEntry, *, at_least: int = 2) -> ModelEntry:
    """The entry with one layer of each kind, in the order in which they first come; more of them up to `at_least`."""
    kinds = list(dict.fromkeys(entry.kind_at()))
    total = max(at_least, len(kinds))
    places = {kind: list(range(i, total, len(kinds))) for i, kind in enumerate(kinds)}
    layers = {kind: attrs.evolve(entry.layers[kind], at=at) for kind, at in places.items()}
    mlps = {name: attrs.evolve(kind, at="all") for name, kind in [*entry.mlps.items()][:1]}
    return attrs.evolve(entry, num_hidden_layers=total, layers=layers, mlps=mlps)


def device_of(device: str | None) -> str:
    """The device that is meant: the GPU if there is one and nothing is said."""
    import torch

    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def verify(
    entry: ModelEntry, *, registry: Registry | None = None, device: str | None = None, step: Step = lambda _: None
) -> Verified:
    """Build, read, fuse, run and compare one model.

    Args:
        entry: a declared model that transformers can build.
        registry: what reads the layers; the default one if not given.
        device: cpu or cuda; the GPU if there is one and nothing is said.
        step: told of each step as it begins, for a progress bar.

    Raises:
        NotBuildableError: transformers has no such model.
        FusionConfigError: LAYERFUSE_FUSIONS names a fusion that does not exist.
        BackendError: LAYERFUSE_BACKEND names a backend that no op has.
    """
    import torch
    from torch._inductor import config as inductor

    from . import registry as package
    from .fusion import FusionConfig, backends, keep_recurrences
    from .testing import small_model

    registry = package.default if registry is None else registry
    FusionConfig.from_environment()  # before minutes of work
    backends.check_declared()
    device = device_of(device)
    started = time.perf_counter()
    few = one_of_each(entry)
    problems: list[str] = []
    fusions: dict[str, dict[str, Any]] = {}
    comparisons = []
    step("reading specs")
    model = small_model(few, layers=few.num_hidden_layers)
    specs = tuple(registry.specs_in(model))
    problems += _contradictions(few, specs)
    kept: tuple[str, ...] = ()
    for name, tolerance in TOLERANCES.items():
        step(f"eager, {name}")
        model = small_model(few, layers=few.num_hidden_layers, dtype=getattr(torch, name)).to(device)
        kept = keep_recurrences(model)
        # Code without vectors takes a C++ compiler half as long, and needs no trial of the CPU's. On a GPU this decides nothing.
        with torch.no_grad(), inductor.patch({"cpp.simdlen": 1, "cpp.vec_isa_ok": True}):
            comparison, report = _compare(model, specs, name, tolerance, registry, step)
        comparisons.append(comparison)
        for fusion, found in report.items():
            fusions.setdefault(fusion, found)
            problems += [f"{fusion}: {site}, {name}: {why}" for site, why in found["missed"].items()]
        if not comparison.within:
            problems.append(f"{name}: the fused model differs by more than {tolerance:g} of the largest logit")
    return Verified(
        model=entry.name,
        device=device,
        specs=specs,
        fusions=fusions,
        comparisons=tuple(comparisons),
        problems=tuple(problems),
        kept=kept,
        seconds=time.perf_counter() - started,
    )


def _contradictions(few: ModelEntry, specs: Iterable[tuple[str, Any]]) -> list[str]:
    from .testing import small_entry

    declared = small_entry(few, layers=few.num_hidden_layers).specs(engine="transformers")
    read = [spec for _, spec in specs]
    missing = [name for name, spec in declared if spec not in read]
    return [f"{name}: the real layer does not say what is declared" for name in missing]


def _compare(
    model: Any, specs: Any, dtype: str, tolerance: float, registry: Any, step: Step
) -> tuple[Comparison, dict[str, dict[str, Any]]]:
    import torch

    from . import fusion

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 100, (2, TOKENS), generator=generator).to(model.device)

    def logits(of: Any) -> Any:
        return of(input_ids=ids, use_cache=False).logits.float()

    eager = logits(model)
    step(f"compiling with fusions, {dtype}")
    torch._dynamo.reset()
    fused_model = fusion.compile(model, specs=specs, registry=registry)
    fused = logits(fused_model)
    step(f"compiling without, {dtype}")
    torch._dynamo.reset()
    compiled = logits(torch.compile(model))
    step(f"comparing, {dtype}")
    torch._dynamo.reset()
    largest = eager.abs().max().item()

    def difference(a: Any, b: Any) -> Difference:
        absolute = (a - b).abs().max().item()
        return Difference(absolute=absolute, relative=absolute / largest)

    comparison = Comparison(
        dtype=dtype,
        fused_to_eager=difference(fused, eager),
        fused_to_compiled=difference(fused, compiled),
        compiled_to_eager=difference(compiled, eager),
        tolerance=tolerance,
    )
    return comparison, _with_backends(fused_model.report.to_dict()["fusions"], model.device.type)


def _with_backends(found: dict[str, dict[str, Any]], device: str) -> dict[str, dict[str, Any]]:
    from .fusion import FUSIONS, backends

    chosen = backends.chosen()
    return {
        name: {**report, "backend": chosen.get((FUSIONS[name].op.name, device), "none")}
        for name, report in found.items()
    }
