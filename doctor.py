"""What is installed, and what that enables. Neither engines nor AITER are imported; their files are read.

Importing AMD's AITER may build C++ code, and PyPI has an unrelated project of the same import name.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module, metadata
from importlib.util import find_spec
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from warnings import catch_warnings, simplefilter

from attrs import evolve, frozen

from ._version import version_text
from .adapters.errors import ArgumentError, LayerfuseError, counted, cut, did_you_mean
from .adapters.variables import unknown_variables

if TYPE_CHECKING:
    from .fusion import FusionConfig

ENGINES = ("transformers", "vllm", "sglang")
OVERLAP = "LAYERFUSE_PDL"
"""As `fusion.backends.triton.launcher` reads it, which needs Triton."""


@frozen(kw_only=True)
class Finding:
    """One package, device or setting, and whether it is there."""

    name: str
    state: Literal["found", "absent", "broken"]
    detail: str


@frozen(kw_only=True)
class AiterFunction(Finding):
    """One function of AITER that layerfuse calls, and whether the installed source has it in a known form."""

    convention: str | None = None
    "The function and its parameters as installed, in full, or None where it is not called."


@frozen(kw_only=True)
class Diagnosis:
    """Everything found, and what follows."""

    findings: tuple[Finding, ...]
    enables: tuple[str, ...]
    "Sentences."
    aiter: tuple[AiterFunction, ...] = ()
    "Every function of AITER's that layerfuse calls, in the order of docs/aiter.md; empty without AITER."
    vllm: tuple[Finding, ...] = ()
    sglang: tuple[Finding, ...] = ()
    "Every place that layerfuse stands at in vLLM: hooks, then modules of models that are not compiled; empty without vLLM."

    @property
    def problems(self) -> tuple[str, ...]:
        """What is installed or set and cannot work."""
        return tuple(f"{found.name}: {found.detail}" for found in self.findings if found.state == "broken")

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "findings": {f.name: {"state": f.state, "detail": f.detail} for f in self.findings},
            "enables": list(self.enables),
            "problems": list(self.problems),
            "aiter": {f.name: {"state": f.state, "detail": f.detail, "convention": f.convention} for f in self.aiter},
            "vllm": {f.name: {"state": f.state, "detail": f.detail} for f in self.vllm},
            "sglang": {f.name: {"state": f.state, "detail": f.detail} for f in self.sglang},
        }


def diagnose() -> Diagnosis:
    """Look at this Python's packages and this machine's GPU. Imports torch where it is installed, and plugins."""
    torch, gpu = _torch()
    findings = [
        Finding(name="python", state="found", detail=f"{platform.python_version()} on {platform.machine()}"),
        Finding(name="layerfuse", state="found", detail=version_text()),
        torch,
        _version("triton"),
        gpu,
        _compiler(),
        *map(_version, ENGINES),
        *inside("vllm"),
        *inside("sglang"),
        find_aiter(),
        *plugins(),
        *environment(
            on="cuda" if gpu.state == "found" else "cpu",
            has_torch=torch.state == "found",
        ),
    ]
    enables = tuple(_enables({found.name: found for found in findings}))
    return Diagnosis(
        findings=tuple(findings),
        enables=enables,
        aiter=aiter_bindings(),
        vllm=places_in("vllm"),
        sglang=places_in("sglang"),
    )


def _version(name: str) -> Finding:
    try:
        return Finding(name=name, state="found", detail=metadata.version(name) or "a package without metadata")
    except metadata.PackageNotFoundError:
        return Finding(name=name, state="absent", detail="not installed")


def _torch() -> tuple[Finding, Finding]:
    installed = _version("torch")
    nothing = Finding(name="gpu", state="absent", detail="unknown without torch")
    if installed.state == "absent":
        return installed, nothing
    try:
        import torch
    except Exception as error:  # a broken wheel raises OSError, ImportError and others
        detail = f"{installed.detail} cannot be imported: {type(error).__name__}: {error}"
        return Finding(name="torch", state="broken", detail=detail), nothing
    build = f"HIP {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    if not (torch.version.hip or torch.version.cuda):
        build = "built for the CPU only"
    found = Finding(name="torch", state="found", detail=f"{torch.__version__}, {build}")
    if not torch.cuda.is_available():
        return found, Finding(name="gpu", state="absent", detail="none that torch can use")
    from .fusion import Target

    count = torch.cuda.device_count()
    detail = f"{count} x {torch.cuda.get_device_name()}, {Target.detect()}"
    return found, Finding(name="gpu", state="found", detail=detail)


def _compiler() -> Finding:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        return Finding(name="c++ compiler", state="absent", detail=f"neither of {', '.join(names)} is on PATH")
    return Finding(name="c++ compiler", state="found", detail=found)


# ---- engines ---------------------------------------------------------------------------------------------------------


def inside(engine: str) -> list[Finding]:
    """Whether the installed vLLM or SGLang is one that layerfuse can work inside of, by its source; nothing without it."""
    version, folder = _version(engine), _source_of(engine)
    if version.state == "absent" or folder is None:
        return []
    state, detail = _places_of(engine).inside(version.detail, folder)
    return [Finding(name=f"inside {engine}", state=state, detail=detail)]


def places_in(engine: str) -> tuple[Finding, ...]:
    """Every place that layerfuse stands at in vLLM or SGLang, and whether the installed source has it as expected; empty without it."""
    folder = _source_of(engine)
    return () if folder is None else tuple(starmap(_place, _places_of(engine).places(folder)))


def _places_of(engine: str) -> Any:
    return import_module(f"{__package__}.engines.{engine}.places")


def _place(name: str, does: str, problem: str | None) -> Finding:
    return Finding(name=name, state="absent" if problem else "found", detail=problem or does)


def _source_of(package: str) -> Path | None:
    spec = find_spec(package)
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


# ---- AITER -----------------------------------------------------------------------------------------------------------


def find_aiter() -> Finding:
    """AMD's AITER, PyPI's asyncio helper of the same name, or neither: told apart by their files, not imported."""
    from .fusion.backends import aiter as amd

    build = amd.find_build()
    if isinstance(build, amd.Absent):
        return Finding(name="aiter", state="broken" if build.broken else "absent", detail=build.reason)
    releases = f", by its files {build.releases}"  # its version does not tell the release
    if build.releases.last == amd.RELEASES[-1]:
        releases += f" (nothing is recorded after {amd.RELEASES[-1]})"
    only = "" if build.triton_only is None else f", Triton functions only: {build.triton_only}"
    return Finding(name="aiter", state="found", detail=f"{build.origin}{releases}{only}, not imported")


def aiter_bindings() -> tuple[AiterFunction, ...]:
    """What the source of the installed AITER says of every function that layerfuse calls; empty without one."""
    from .fusion.backends import aiter as amd

    if isinstance(amd.find_build(), amd.Absent):
        return ()
    return tuple(
        AiterFunction(name=found.name, state="absent", detail=found.reason)
        if isinstance(found, amd.Refused)
        else AiterFunction(name=found.binding.name, state="found", detail=found.summary, convention=found.convention)
        for found in amd.probe_all()
    )


# ---- plugins ---------------------------------------------------------------------------------------------------------


def plugins() -> list[Finding]:
    """Installed plugins (entry points), registered one after the other, so that two that clash are found too."""
    from .adapters.builtin import BUILTIN
    from .registry import ConflictError
    from .registry import plugins as found
    from .registry.entries import MODELS_TOML, Entries
    from .registry.lookup import Registry

    registry = Registry()
    registry.register_adapters(BUILTIN, "layerfuse itself")
    registry.register_models(Entries.shipped(), str(MODELS_TOML))
    findings: list[Finding] = []
    owners: dict[str, str] = {}
    for plugin in found.installed():
        name = f"plugin {cut(plugin.name)}"
        if any(other.name == name for other in findings):  # a package may name two alike, and so may two packages
            name = found.owner_of(plugin).removeprefix("the ")
        owners[name] = found.owner_of(plugin)
        before = len(registry.layer_classes()), len(registry.models())
        try:
            found.register_content(registry, plugin, found.import_plugin(plugin))
        except LayerfuseError as error:
            why = str(error)
            if isinstance(error, ConflictError):  # neither wins
                findings = [evolve(f, state="broken", detail=why) if owners[f.name] in why else f for f in findings]
            findings.append(Finding(name=name, state="broken", detail=why))
            continue
        classes, models = len(registry.layer_classes()) - before[0], len(registry.models()) - before[1]
        detail = f"{plugin.value} adds {models} models and {classes} layer classes"
        findings.append(Finding(name=name, state="found", detail=detail))
    return [*findings, *_chain_plugins(), *_backend_plugins(), *_unreadable()]


def _unreadable() -> list[Finding]:
    """Packages that hide their plugins by broken metadata, of this library or not."""
    from .registry.entry_points import unreadable

    return [Finding(name=f"entry points of {name}", state="broken", detail=why) for name, why in unreadable()]


def _chain_plugins() -> list[Finding]:
    """Packages that add fusions or formats. One that cannot be used is refused alone."""
    from .fusion import FUSIONS, catalog, formats
    from .registry.entry_points import of_group

    with catch_warnings():
        simplefilter("ignore", RuntimeWarning)  # what they say is in the findings
        with suppress(
            Exception
        ):  # without a torch that works; with it, a fusion whose ops torch does not take is refused
            from .fusion import ops as _ops  # noqa: F401
        refused = {**FUSIONS.refused, **formats.FORMATS.refused}
    findings = []
    for group, of in ((catalog.GROUP, FUSIONS), (formats.GROUP, formats.FORMATS)):
        for point, package in of_group(group):
            name = f"{group.rpartition('.')[2]} of {package} ({cut(point.name)})"
            why = refused.pop((point.name, package), None)
            known = ", ".join(
                name for name, each in of.items() if (each.entry_point, each.owner) == (point.name, package)
            )
            findings.append(Finding(name=name, state="broken" if why else "found", detail=why or f"known: {known}"))
    return findings


def _backend_plugins() -> list[Finding]:
    """Packages that add backends, with the ops of others that they have kernels for."""
    from .fusion import FUSIONS
    from .fusion.backends.backend import GROUP, BackendError, installed
    from .fusion.catalog import canonical
    from .fusion.latent_ops import MLA
    from .fusion.linear_ops import LINEARS
    from .registry.entry_points import of_group

    declared = [*MLA, *LINEARS, *(form.op for fusion in FUSIONS.values() for form in fusion.forms)]
    if find_spec("torch") is not None:
        from .fusion.ops.canonical import CANONICAL

        declared += CANONICAL
    ops = {**dict.fromkeys(canonical()), **{op.name: op for op in declared}}
    findings = []
    for point, package in of_group(GROUP):
        with catch_warnings():
            simplefilter("ignore", RuntimeWarning)  # what they say is in the findings
            found = installed()[point.name]
        name = f"backend {cut(point.name)} of {package}"
        if isinstance(found, BackendError):
            findings.append(Finding(name=name, state="broken", detail=str(found)))
            continue
        wrong = []
        for each, kernel in found.kernels.items():
            if each not in ops:
                wrong.append(f"it has a kernel for {cut(each)}, and no op is called that{did_you_mean(each, ops)}")
            elif (op := ops[each]) is not None and (why := kernel.why_not_for(op)):
                wrong.append(f"it is left out of {each}: {why}")
        detail = "; ".join(wrong) or f"kernels for {', '.join(found.kernels) or 'its own fusions'}"
        findings.append(Finding(name=name, state="broken" if wrong else "found", detail=detail))
    return findings


# ---- the environment -------------------------------------------------------------------------------------------------


def environment(*, on: str, has_torch: bool) -> list[Finding]:
    """The variables of this library and the known ones of engines that are set and change what happens, and whether what they say can be read.

    Args:
        on: torch's device type here, where a forced backend must run.
        has_torch: without torch no backend is registered, so that none can be looked up.
    """
    from .engines.switches import switched
    from .fusion import FUSIONS, FusionConfig
    from .fusion.backends import ENVIRONMENT as BACKEND
    from .fusion.config import ENVIRONMENT as WANTED
    from .fusion.config import SHADOW, FusionConfigError, shadow_calls
    from .fusion.sites import OWN_PLACE

    findings = []
    if wanted := os.environ.get(WANTED, "").strip():
        try:
            config = FusionConfig.from_environment()
            default = [
                e for e in FUSIONS.values() if not FusionConfig().why_off(e) and not {*OWN_PLACE}.intersection(e.roles)
            ]
            off = ", ".join(fusion.name for fusion in default if config.why_off(fusion)) or "nothing"
            off = "; ".join([f"{off} in fusion.compile", *_off_in_engines(config, on)])
            findings.append(Finding(name=WANTED, state="found", detail=f"{wanted}, turns off: {off}"))
        except FusionConfigError as error:
            findings.append(Finding(name=WANTED, state="broken", detail=str(error)))
    if forced := os.environ.get(BACKEND, ""):
        findings.append(_forced(BACKEND, forced, on) if has_torch else _declared(BACKEND, forced))
    if os.environ.get(SHADOW, "").strip():
        try:
            calls = shadow_calls()
            compared = (
                f"compares {counted(calls, 'call')} of each fused op with its reference"
                if calls
                else "nothing is compared"
            )
            findings.append(Finding(name=SHADOW, state="found", detail=compared))
        except ArgumentError as error:
            findings.append(Finding(name=SHADOW, state="broken", detail=str(error)))
    findings += _of_engines()
    for said in unknown_variables():
        findings.append(Finding(name=cut(said.split()[0]), state="broken", detail=said.partition("set, and ")[2]))
    return [*findings, *(Finding(name=name, state=state, detail=said) for name, state, said in switched())]


def _of_engines() -> list[Finding]:
    """The variables that SGLang's plugin reads, and the one that every launch on NVIDIA does."""
    from .engines.options import REPORT, STRICT, Options, OptionsError, strict_here

    findings = []
    if os.environ.get(STRICT, "").strip():
        try:
            said = "an expected fusion that is missed stops SGLang" if strict_here() else "nothing stops SGLang"
            findings.append(Finding(name=STRICT, state="found", detail=said))
        except OptionsError as error:
            findings.append(Finding(name=STRICT, state="broken", detail=str(error)))
    if report := os.environ.get(REPORT, "").strip():
        try:
            Options(report=report)
            problem = f"{cut(report)} is a folder, and the report a file" if Path(report).is_dir() else None
        except OptionsError as error:
            problem = str(error)
        detail = problem or f"{cut(report)}, where SGLang's report goes"
        findings.append(Finding(name=REPORT, state="broken" if problem else "found", detail=detail))
    if overlap := os.environ.get(OVERLAP, "").strip():
        known = overlap in ("0", "1")
        off = "no kernel starts while the one before it ends" if overlap == "0" else "as by default"
        detail = f"{overlap}, {off}" if known else f"expected 0 or 1, got {cut(overlap)}, which is as 1"
        findings.append(Finding(name=OVERLAP, state="found" if known else "broken", detail=detail))
    return findings


def _off_in_engines(config: FusionConfig, on: str) -> Iterator[str]:
    """What these switches turn off in each engine, installed or not: on this GPU, or where nothing is on by default on it, on those where something is."""
    from .engines.defaults import on_by_default
    from .fusion import Target
    from .fusion.engine import SPELT

    here = Target.detect().arch if on == "cuda" else None
    for name in ("vllm", "sglang"):
        archs = sorted({arch for archs in on_by_default(name).values() for arch in archs})
        for arch in [here] if here in archs else archs:
            yield f"{', '.join(_off_in(name, arch, config)) or 'nothing'} in {SPELT[name]} on {arch}"


def _off_in(name: str, arch: str, config: FusionConfig) -> list[str]:
    """What is on in an engine by default on such a GPU, and is not with these switches."""
    from .engines.defaults import beside, on_by_default
    from .fusion import FUSIONS, Engine
    from .fusion.policy import shipped

    engine, off, kept, on = Engine(name=name), set(), list[str](), on_by_default(name, arch)
    for each in on:
        if FUSIONS[each].goes_with is None:
            faster = next(row for row in shipped().of(each, name) if row.faster and row.arch == arch)
            if config.why_off(FUSIONS[each], engine, faster) is None:
                kept.append(each)
            else:
                off.add(each)
    for each in beside(name, on, arch):
        with_it = each in beside(name, kept, arch) and FUSIONS[each].goes_with not in off
        if not with_it or config.why_off(FUSIONS[each], engine, companion=True):
            off.add(each)
    return sorted(off)


def _forced(variable: str, forced: str, on: str) -> Finding:
    """Which ops a forced backend takes, and which run on another one since they have none of that name."""
    from .fusion import backends, ops

    without = []
    for op in ops.FUNCTIONS:
        try:
            wanted = backends.wanted_for(op)
        except backends.BackendError as error:
            return Finding(name=variable, state="broken", detail=str(error))
        if wanted is None:
            without.append(op)
            continue
        said = _backend(op, on)
        if said.startswith("no"):
            return Finding(name=variable, state="broken", detail=f"{forced}: {said.removeprefix('no: ')}")
    rest = f"; the automatic choice for {', '.join(without)}, which have no such backend" if without else ""
    return Finding(name=variable, state="found", detail=f"{forced}, for every op that has it{rest}")


def _declared(variable: str, forced: str) -> Finding:
    """A forced backend where there is no torch, so that no op is registered."""
    from .fusion import backends

    try:
        backends.check_declared()
    except backends.BackendError as error:
        return Finding(name=variable, state="broken", detail=str(error))
    return Finding(name=variable, state="found", detail=f"{forced}; unknown without torch")


# ---- what follows ----------------------------------------------------------------------------------------------------


def _enables(found: dict[str, Finding]) -> list[str]:
    def has(name: str) -> bool:
        return found[name].state == "found"

    wrong = _misnamed(found)
    planned = "" if wrong else "`plan`, "
    sentences = [f"specs, models.toml, {planned}`inspect` and `check`: yes, they need none of this"]
    if not has("torch"):
        return [*sentences, "reading layers and compiling with fusions: no, torch is missing (pip install torch)"]
    device = "cuda" if has("gpu") else "cpu"
    if wrong:
        return [*sentences, f"plans and fusions: no, {wrong} (above)"]
    sentences += _fusions_on(device)
    if not has("c++ compiler"):
        sentences.append("torch.compile on the CPU: no, without a C++ compiler")
    if "LAYERFUSE_BACKEND" in found and not has("LAYERFUSE_BACKEND"):
        sentences.append("`verify`: no, the backend that LAYERFUSE_BACKEND forces does not run here (above)")
    elif has("transformers") and has("c++ compiler"):
        sentences.append("`verify` and `contract`: yes")
    else:
        missing = [name for name in ("transformers", "c++ compiler") if not has(name)]
        sentences.append(f"`verify`: no, without {' and '.join(missing)}")
    return sentences


def _misnamed(found: dict[str, Finding]) -> str | None:
    """Which variable names what does not exist, so that nothing is planned, as part of a sentence."""
    from .fusion import backends

    if "LAYERFUSE_FUSIONS" in found and found["LAYERFUSE_FUSIONS"].state == "broken":
        return "LAYERFUSE_FUSIONS cannot be read"
    try:
        backends.check_declared()
    except backends.BackendError:
        return "LAYERFUSE_BACKEND names no backend"
    return None


def _fusions_on(device: str) -> list[str]:
    """What runs each fusion; those of which the same is true are one sentence."""
    from .fusion import FUSIONS

    alike: dict[str, list[str]] = {}
    for name, fusion in FUSIONS.items():
        owner = "" if fusion.owner == "layerfuse" else f" (of {fusion.owner})"
        alike.setdefault(_backend(fusion.op.name, device), []).append(f"{name}{owner}")
    if len(alike) == 1:
        ((said, names),) = alike.items()
        return [f"all {len(names)} fusions on {device}: {said}"]
    return [f"{', '.join(names)} on {device}: {said}" for said, names in alike.items()]


def _backend(op: str, device: str) -> str:
    """Which backend would be taken, and why not a more preferred one. Loads none: AITER may build C++ when imported."""
    from .fusion import backends
    from .fusion import ops as _ops  # noqa: F401 - registers the backends

    try:
        forced, seen = backends.wanted_for(op), backends.survey(op, device)
    except backends.BackendError as error:
        return f"no: {error}"
    passed: list[str] = []
    for name, reason in seen:
        if forced not in (None, name):
            continue
        if reason is None:
            others = f"; not by {'; '.join(passed)}" if passed and device != "cpu" else ""
            return f"yes, by the backend `{name}`{others}"
        passed.append(f"`{name}`: {reason}")
    return f"no: {op} cannot run on {device}: {'; '.join(passed) or 'it has no backend'}"
