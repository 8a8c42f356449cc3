"""From a model that vLLM has loaded to what layerfuse will do in it: specs, a plan for each module that vLLM compiles."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from ... import registry
from ...adapters.errors import UnknownLayerError
from ...adapters.specs import AnySpec, GatedMLPSpec
from ...fusion.compiler import surroundings_of
from ...fusion.plan import plan
from ...fusion.target import Target
from .circumstances import engine_for, runs_modules, why_not_compiled
from .decode import Door
from .decode_facts import beside
from .options import KEY, OWN, Options
from .process import once
from .switches import BATCH_INVARIANT, INVARIANT, is_set
from .unit import Unit


def units_of(vllm_config: Any, model: nn.Module, options: Options) -> Iterator[tuple[nn.Module, Unit]]:
    """The modules that vLLM will compile, with what layerfuse plans in each. Writes their key into vLLM's config.

    Where vLLM runs the model without compiling it, that is the model itself, for fused ops at module level. Where there is nothing
    to do in it, that is said once.

    Raises:
        LayerfuseError: a layer cannot be read, or the options are wrong.
    """
    config = options.config()
    unknown = dict(registry.unknown_in(model))
    compiled = dict(_compiled(model))
    reason = why_not_compiled(vllm_config)
    if reason is None and not compiled:
        reason = f"no module of {type(model).__name__} is one that vLLM compiles"
    if reason is not None:
        if not options.eager or not runs_modules(vllm_config):
            _nothing(model, reason)
            return
        compiled = {"": model}
    for layer, cls in unknown.items():
        once(logging.WARNING, "layerfuse: no adapter knows %s (%s): nothing is fused there", cls, layer)
    try:
        specs = registry.specs_in(model)
    except UnknownLayerError:
        if config.strict:
            raise
        _nothing(model, "no adapter knows any of its layers")
        return
    units = []
    held: set[str] = set()
    behind = _behind_experts(model, specs)
    for path, module in compiled.items():
        here = [(layer, spec) for layer, spec in specs if _is_below(layer, path) and layer not in behind]
        inside = [(_below(layer, path), spec) for layer, spec in here]
        held.update(layer for layer, _ in here)
        strangers = {layer: cls for layer, cls in unknown.items() if _is_below(layer, path)}
        if not inside and not strangers:
            continue  # a vision tower
        target = _target_of(module)
        door = Door.of(module, inside, vllm_config) if options.decode else None
        engine = engine_for(vllm_config, target, reason)
        if door is not None and door.stands:
            engine = beside(engine)
        units.append(
            (
                module,
                Unit(
                    name=type(module).__qualname__,
                    model=type(model).__qualname__,
                    path=path,
                    plan=plan(inside, target, config, engine),
                    around=surroundings_of(module),
                    vllm_config=vllm_config,
                    strict=config.strict,
                    report_path=options.report,
                    unknown=strangers,
                    at_modules=reason,
                    door=door,
                ),
            )
        )
    if reason is not None and not any(unit.active or unit.door is not None for _, unit in units):
        _nothing(model, INVARIANT if is_set(BATCH_INVARIANT) else reason)
        return
    if units:
        units[0][1].outside = tuple(layer for layer, _ in specs if layer not in held)
    _write_key(vllm_config, [unit for _, unit in units])
    yield from units


def _nothing(model: nn.Module, why: str) -> None:
    once(logging.WARNING, "layerfuse: nothing is fused in %s: %s", type(model).__name__, why)


def _compiled(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that vLLM compiles, by their path. One inside of another is compiled with that."""
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper

    last: str | None = None
    for path, module in model.named_modules():
        if not isinstance(module, TorchCompileWithNoGuardsWrapper) or module.do_not_compile:
            continue
        if last is None or not _is_below(path, last):
            last = path
            yield path, module


def _behind_experts(model: nn.Module, specs: Iterable[tuple[str, AnySpec]]) -> set[str]:
    """Quantised shared experts: vLLM runs them behind its op for routed experts, so that their activation is in no graph."""
    quantised = [layer for layer, spec in specs if isinstance(spec, GatedMLPSpec) and spec.quant is not None]
    if not quantised:
        return set()
    held = {id(module) for path, module in model.named_modules(remove_duplicate=False) if ".experts." in path}
    return {layer for layer in quantised if id(model.get_submodule(layer)) in held}


def _is_below(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _below(path: str, outer: str) -> str:
    return path if not outer else path.removeprefix(outer).removeprefix(".")


def _target_of(module: nn.Module) -> Target:
    first = next(module.parameters(), None)
    return Target.named("cpu") if first is None or first.device.type == "cpu" else Target.detect()


def _write_key(vllm_config: Any, units: list[Unit]) -> None:
    """Make what is planned part of the key of vLLM's cache, which knows its config only."""
    active = [unit.key for unit in units if unit.active]
    active += [unit.door.key for unit in units if unit.door is not None and unit.door.stands]
    given = vllm_config.additional_config
    if not active:
        return
    if not isinstance(given, dict):
        raise TypeError(
            f"additional_config is {type(given).__name__}: a table is needed to tell vLLM's cache of the fusions"
        )
    own = given.get(KEY)
    own = dict(own) if isinstance(own, dict) else {}
    # A draft model is loaded after the model itself, with the same config.
    digest = hashlib.sha256("".join([own.get(OWN, ""), *active]).encode()).hexdigest()[:16]
    vllm_config.additional_config = {**given, KEY: {**own, OWN: digest}}
