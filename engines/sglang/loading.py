"""From a model that SGLang has loaded to what layerfuse will do in it: its specs, and the plan for it."""

from __future__ import annotations

from typing import Any

import attrs
from torch import nn

from ... import registry
from ...adapters.errors import LayerfuseError, UnknownLayerError
from ...adapters.specs import AnySpec
from ...fusion.engine import Engine
from ...fusion.live_plan import module_index_of
from ...fusion.planning import plan
from ...fusion.sites import DECODE, Site
from ...fusion.target import target_of
from ..compiled_module import CompiledModule
from ..loading import device_of, linears_left, nothing, say_unknown, tell_unfound
from ..options import Options
from . import products
from .decode_facts import why_not_here
from .facts import engine_of
from .host import SGLANG
from .switches import CHOOSES


def compiled_module_of(runner: Any, options: Options) -> CompiledModule | None:
    """What layerfuse plans in the model of a `ModelRunner`; None where nothing of it is read.

    Where nothing can be done in it, which is said once, the plan is one of reasons, for the report, and nothing of it is expected.

    Raises:
        LayerfuseError: a layer cannot be read.
        NotFusedError: strict, and nothing can happen in the model of what is asked for, or of a fusion that is named.
    """
    model, config, engine = runner.model, options.config(), _engine(runner)
    # A draft's layers, or those of another stage of a pipeline, may hold what these do not.
    stops = config.strict and options.asks and not runner.is_draft_worker and runner.server_args.pp_size == 1
    refused = engine.refuses.get("*")
    if refused is not None:
        nothing(model, refused, stops)
    try:
        specs, unknown = registry.specs_in(model), dict(registry.unknown_in(model))
    except LayerfuseError as error:
        if refused is None and not isinstance(error, UnknownLayerError):
            raise
        if refused is None:
            say_unknown(dict(registry.unknown_in(model)))
            nothing(model, "no adapter knows any of its layers", stops)
        return None
    if refused is None:
        say_unknown(unknown)
        engine = attrs.evolve(engine, linears=_linears_left(runner, specs))
    engine = attrs.evolve(engine, loaded=True, release=SGLANG.version())
    name = type(model).__qualname__
    ignored = frozenset(registry.default.ignored_in(model))
    compiled = CompiledModule(
        name=name,
        model=name,
        path="",
        plan=plan(specs, target_of(model), config, engine),
        around=attrs.evolve(module_index_of(model), whole=True, ignored=ignored),
        config=runner,
        device=device_of(model),
        strict=config.strict,
        report_path=options.report,
        unknown=unknown,
        at_modules=engine.uncompiled,
        engine=engine,
    )
    without = compiled.plan.unfound(options.named)
    compiled.find_unfound = without.copy
    if refused is None:
        tell_unfound(model, without, stops)
    if not compiled.plan.expected():
        compiled.strict = False  # nothing is expected
        if refused is None and not (without and options.names_alone):
            nothing(model, "no site of it has a fusion that is on", stops)
    return compiled


def _linears_left(runner: Any, specs: list[tuple[str, AnySpec]]) -> dict[str, str]:
    why_none = products.why_not(runner.server_args)
    known: dict[str, str | None] = {}

    def why_left(path: str, site: Site) -> str | None:
        if site.quant is None:
            return None
        return why_none or products.why_not_by(runner.model.get_submodule(path), site.quant, known)

    return linears_left(specs, why_left)


def _engine(runner: Any) -> Engine:
    """SGLang as it is started here."""
    from sglang.kernels.fused_op import get_fused_op_backend
    from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled

    arguments, model = runner.server_args, runner.model
    backend = arguments.fp8_gemm_runner_backend
    engine = engine_of([type(model).__name__], target=target_of(model), backend=backend)
    engine = attrs.evolve(engine, captures=not _launches_decode_steps(model))
    why = None
    if is_batch_invariant_mode_enabled() or arguments.enable_deterministic_inference:
        why = "SGLang keeps to kernels whose results do not depend on the batch"
    elif arguments.enable_torch_compile:
        why = "enable_torch_compile is set, and layerfuse was not tried inside of what SGLang compiles"
    elif get_fused_op_backend() is not None:
        why = CHOOSES
    if why is not None:
        return attrs.evolve(engine, refuses={"*": why})
    decode = why_not_here(_decodes_by(), arguments)
    return engine if decode is None else attrs.evolve(engine, refuses={DECODE: decode, **engine.refuses})


def _launches_decode_steps(model: nn.Module) -> bool:
    """Whether decode steps are in no CUDA graph on a GPU."""
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend

    on_gpu = device_of(model).type == "cuda"
    return on_gpu and bool(check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED))


def _decodes_by() -> str | None:
    """What attends in decode steps; None where SGLang has not chosen it yet."""
    from sglang.srt.runtime_context import attention_backends, publish_role

    return None if publish_role() is None else attention_backends()[1]
