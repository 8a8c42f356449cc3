"""From a model that vLLM has loaded to what layerfuse will do in it: specs, a plan for each module that vLLM compiles."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from inspect import unwrap
from typing import Any

import attrs
from torch import nn

from ... import registry
from ...adapters.errors import UnknownLayerError
from ...adapters.linear_quant import kernel_of, quantises_inside
from ...adapters.specs import AnySpec, FinalNormSpec
from ...fusion.live_plan import module_index_of
from ...fusion.planning import plan, unfound
from ...fusion.sites import Site, mixture_sites
from ...fusion.target import target_of
from ..compiled_module import CompiledModule
from ..loading import device_of, linears_left, nothing, say_unknown, tell_unfound
from ..mla import NAME
from ..options import Options
from ..process import once
from . import products, routed_experts, shared_experts
from .config_probe import draft_of, engine_for, runs_modules, why_not_compiled
from .decode import with_placement
from .decode_facts import TAKES
from .host import VLLM
from .keys import check_table
from .native_fusions import by_transformers
from .switches import BATCH_INVARIANT, INVARIANT, is_set

_BY_TRANSFORMERS = "vllm.model_executor.models.transformers."
"""vLLM's classes around the code of transformers, or of a checkpoint."""
_AROUND_LINEARS = "short_conv", "mamba_mixer", "linear_attention", "olmo_hybrid_gdn_full_forward"
"""vLLM's ops that run a whole layer: each is all that a module's forward calls."""


def compiled_modules_of(
    vllm_config: Any, model: nn.Module, options: Options, draft: bool = False
) -> Iterator[tuple[nn.Module, CompiledModule]]:
    """The modules that vLLM will compile, with what layerfuse plans in each.

    Where vLLM runs the model without compiling it, that is the model itself, for fused ops at module level. Where there is nothing
    to do in it, that is said once.

    Args:
        vllm_config: vLLM's own.
        model: as loaded.
        options: what is asked for.
        draft: whether it is loaded beside the model that it drafts for.

    Raises:
        LayerfuseError: a layer cannot be read, or the options are wrong.
        NotFusedError: strict, and nothing can happen in the model of what is asked for, or of a fusion that is named.
        TypeError: vLLM's cache cannot be told of the fusions.
    """
    config = options.config()
    stops = config.strict and not draft and options.asks
    if _is_transformers(model):
        of = (draft and draft_of(vllm_config)) or vllm_config.model_config
        nothing(model, by_transformers("vLLM", str(of.architectures[0])), stops)
        return
    text = _run_by_text(model)
    everywhere = dict(registry.unknown_in(model))
    unknown = {layer: cls for layer, cls in everywhere.items() if _is_below(layer, text)}
    modules = dict(_compiled(model))
    reason = why_not_compiled(vllm_config)
    if reason is None and not modules:
        reason = f"no module of {type(model).__name__} is one that vLLM compiles"
    if reason is not None:
        if not options.eager or not runs_modules(vllm_config):
            nothing(model, reason, stops)
            return
        modules = {"": model}
    say_unknown(unknown)
    _say_quantised_inside(vllm_config, model)
    try:
        specs = registry.specs_in(model)
    except UnknownLayerError:
        if config.strict:
            raise
        nothing(model, "no adapter knows any of its layers")
        return
    if not _is_last_stage():  # which may hold all layers, and a norm that it never calls
        specs = [(layer, spec) for layer, spec in specs if not isinstance(spec, FinalNormSpec)]
    if not specs:  # the last stage has a norm all the same, which says neither how many ranks share its model nor of what stream it is
        nothing(model, "this stage of the pipeline holds none of its layers")
        return
    compiled_modules = []
    held: set[str] = set()
    ignored = set(registry.default.ignored_in(model))
    behind = set(_behind_a_gather(model, specs))
    for path, module in modules.items():
        here = [
            (layer, spec)
            for layer, spec in specs
            if _is_below(layer, path) and _is_below(layer, text) and layer not in behind
        ]
        inside = [(_below(layer, path), spec) for layer, spec in here]
        held.update(layer for layer, _ in here)
        unknown_here = {layer: cls for layer, cls in unknown.items() if _is_below(layer, path)}
        if not inside and not unknown_here:
            continue  # what sees or hears
        target = target_of(module)
        engine = engine_for(vllm_config, target, reason, type(model).__name__)
        engine = attrs.evolve(
            engine,
            linears=_left(module, inside, vllm_config, reason is None),
            loaded=True,
            decodes=True,
            release=VLLM.version(),
        )
        decided, placed = with_placement(plan(inside, target, config, engine), module, vllm_config)
        left = ignored | {layer for layer, _ in specs} - {layer for layer, _ in here}
        around = attrs.evolve(
            module_index_of(module),
            whole=True,
            ignored=frozenset(_below(layer, path) for layer in left if _is_below(layer, path)),
        )
        compiled_modules.append(
            (
                module,
                CompiledModule(
                    name=type(module).__qualname__,
                    model=type(model).__qualname__,
                    path=path,
                    plan=decided,
                    around=around,
                    config=vllm_config,
                    device=device_of(module),
                    strict=config.strict,
                    report_path=options.report,
                    unknown=unknown_here,
                    at_modules=reason,
                    placements={} if placed is None else {NAME: placed},
                    engine=engine,
                ),
            )
        )
    # What has no site here may have one in another stage of the pipeline, or in the model that is loaded beside this one.
    alone = draft_of(vllm_config) is None and vllm_config.parallel_config.pipeline_parallel_size == 1
    stops = stops and alone

    def find_unfound() -> dict[str, str]:
        return unfound(
            options.named, (each for _, made in compiled_modules for each in made.plan.decisions), TAKES.values()
        )

    without = find_unfound()
    tell_unfound(model, without, stops)
    for _, compiled in compiled_modules:
        if stops and compiled.engine is not None and "*" in compiled.engine.refuses:
            nothing(model, compiled.engine.refuses["*"], stops)
    if reason is not None and not any(compiled.active or compiled.placements for _, compiled in compiled_modules):
        if not (without and options.names_alone):
            nothing(model, INVARIANT if is_set(BATCH_INVARIANT) else reason, stops)
        return
    for _, compiled in compiled_modules:
        compiled.find_unfound = find_unfound
    if compiled_modules:
        first = compiled_modules[0][1]
        first.outside = tuple(layer for layer, _ in specs if _is_below(layer, text) and layer not in held)
        first.unread = {layer: cls for layer, cls in everywhere.items() if layer not in unknown}
    check_table(vllm_config)
    yield from compiled_modules


def _left(module: nn.Module, specs: list[tuple[str, AnySpec]], vllm_config: Any, compiled: bool) -> dict[str, str]:
    """Path of a linear or a mixture -> why its product stays vLLM's with few tokens too, as a sentence."""

    def why_left(path: str, site: Site) -> str | None:
        why = why_hidden(module, path) if compiled else None
        if why is not None or site.quant is None:
            return why
        kernel = kernel_of(module.get_submodule(path))
        if not site.quant.inside:
            return products.why_not_by(kernel)
        return None if site.experts is None else shared_experts.why_not(vllm_config, kernel)

    mixtures = ((site.path, module.get_submodule(site.path)) for site in mixture_sites(specs, {}))
    routed = {path: why for path, each in mixtures if (why := routed_experts.why_not(vllm_config, each)) is not None}
    return linears_left(specs, why_left) | routed


def why_hidden(module: nn.Module, path: str) -> str | None:
    """Why no graph of vLLM's compiler shows the product of a linear below a module, as a sentence, or None."""
    parts = path.split(".")
    for end in range(1, len(parts)):
        code = unwrap(type(module.get_submodule(".".join(parts[:end]))).forward).__code__
        op = next((each for each in _AROUND_LINEARS if {"ops", "vllm", each} <= {*code.co_names}), None)
        if op is not None:
            return f"vLLM calls it inside of its op {op}, which no graph shows"
    if vars(module.get_submodule(path)).get("_use_min_latency_gemm"):
        return "vLLM multiplies few tokens there by its own min_latency_fused_qkv_a_proj"
    return None


def _say_quantised_inside(vllm_config: Any, model: nn.Module) -> None:
    """Say that quantised fusions change vLLM's linears too, where their own op quantises."""
    if vllm_config.quant_config is not None:
        inside = sum(quantises_inside(module) for module in model.modules())
        if inside:
            said = "layerfuse: %d linears of %s quantise inside of FlashInfer's op: a quantised fusion takes that out of it"
            once(logging.INFO, said, inside, type(model).__name__)


def _is_last_stage() -> bool:
    from vllm.distributed import parallel_state

    return not parallel_state.model_parallel_is_initialized() or bool(parallel_state.get_pp_group().is_last_rank)


def _is_transformers(model: nn.Module) -> bool:
    """Whether vLLM has no code of its own for a model's layers."""
    return any(f"{cls.__module__}.".startswith(_BY_TRANSFORMERS) for cls in type(model).__mro__)


def _run_by_text(model: nn.Module) -> str:
    """The path of what every step runs: beside the language model stand towers, which run where there is something to see or hear."""
    from vllm.model_executor.models.interfaces import supports_multimodal

    if not supports_multimodal(model):
        return ""
    try:
        language = model.get_language_model()
    except NotImplementedError:  # vLLM finds none
        return ""
    return next((path for path, module in model.named_modules() if module is language), "")


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


def _behind_a_gather(model: nn.Module, specs: Iterable[tuple[str, AnySpec]]) -> Iterator[str]:
    """Drafts whose experts run sequence-parallel: vLLM adds their residual, gathers the sum from all ranks, and norms that."""
    for layer, spec in specs:
        block = model.get_submodule(layer)._modules.get("mtp_block") if isinstance(spec, FinalNormSpec) else None
        if getattr(block, "use_sequence_parallel_moe", False):
            yield layer


def _is_below(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _below(path: str, outer: str) -> str:
    return path if not outer else path.removeprefix(outer).removeprefix(".")
