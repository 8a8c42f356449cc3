"""What layerfuse does at SGLang's hook. Whatever goes wrong here is one warning, and SGLang runs on as it would without.

Nothing but `strict` and options that do not exist stops an engine.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .. import process
from ..hooks import HookError, check, wrapped_by
from ..host import enter
from ..imports import when_imported
from ..options import REPORT, Options, check_backend, strict_here
from ..plugins import finish, quietly, stop_if
from ..process import leave_alone, once, say_if_untested, say_unknown
from .hooks import LOADED
from .host import SGLANG, multiplies_by_the_largest_over_amax

NOTHING_ON = (
    "no fusion is on in SGLang by default here; `layerfuse plan MODEL --engine sglang` says which can stand in a model, "
    "how much faster those are that were measured, and what switches them on"
)


def register() -> None:
    """Wait for the module of SGLang's model runner: a process that runs no model never imports it."""
    if process.this.registered:
        return
    process.this.registered = True
    enter(SGLANG)
    when_imported(LOADED.module, _stand)


def _stand(module: ModuleType) -> None:
    """Stand at the hook by SGLang's own registry, so that others' hooks at the same place stay what they are."""
    try:
        check(LOADED, module)
        from sglang.srt.plugins import hook_registry as hooks

        other = wrapped_by(LOADED, module)
        target = f"{LOADED.module}.{LOADED.path}"
        alone = target not in hooks.HookRegistry._hooks
        source = hooks.HookSource(plugin_name="layerfuse", dist_name="layerfuse")
        hooks.HookRegistry.register(target, _at_load, hooks.HookType.AROUND, source=source)
        # While SGLang loads its plugins it will apply all hooks in the end; later it does so for hooks at the same place only.
        if alone and hooks._current_plugin_source.get() is None:
            hooks.HookRegistry.apply_hooks()
    except HookError as error:
        leave_alone(str(error))
    except Exception as error:  # an import of SGLang's must not fail here
        leave_alone(f"{LOADED.place}: {type(error).__name__}: {error}")
    else:
        if other is not None:
            SGLANG.logger.info(
                "layerfuse: %s is wrapped by %s already; layerfuse stands around it", LOADED.place, other
            )


def options_here() -> Options:
    """What the environment asks for.

    Raises:
        OptionsError: a value that says nothing.
        FusionConfigError: a fusion that does not exist.
        BackendError: `LAYERFUSE_BACKEND` names a backend that no op has.
        ArgumentError: `LAYERFUSE_SHADOW` is no number.
    """
    options = Options(strict=strict_here(), report=os.environ.get(REPORT, "").strip() or None)
    if not options.says_nothing:
        options.config()
    check_backend()
    _ = options.compared
    return options


def _at_load(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """When a model is loaded, of an engine or of its draft: plan, put in what is on, and report after the first run."""
    options = options_here()
    result = original(*args, **kwargs)
    say_unknown()
    runner = args[0]
    if process.this.off is not None:
        stop_if(options.strict)
        return result
    with quietly("planning", options.strict):
        if options.says_nothing and _nothing_on(runner):
            once(logging.INFO, "layerfuse: %s", NOTHING_ON)
            return result
        say_if_untested()
        if options.says_nothing:
            _say_where_defaults_come_from(runner)
        from ...fusion.ops.quantisation import Scaling, scale_groups
        from ..standing import at_first_call
        from . import decode, products
        from .loading import compiled_module_of
        from .seams import SEAMS

        compiled = compiled_module_of(runner, options)
        if compiled is not None and not compiled.plan.expected():
            finish(compiled)
        elif compiled is not None:
            if multiplies_by_the_largest_over_amax():
                scale_groups(Scaling.OF_AMAX)
            products.put_in(compiled, runner.model)
            decode.put_in(compiled, runner.model)
            at_first_call(runner.model, compiled, SEAMS, lambda _: None, finish)
            if options.compared:
                from ..shadowing import compare_calls

                compare_calls(runner.model, compiled, options.compared)
    return result


def _arch_of(runner: Any) -> str:
    from ...fusion.target import target_of

    return target_of(runner.model).arch


def _nothing_on(runner: Any) -> bool:
    """Whether nothing is on by default that could find a site: so that what plans is not even imported."""
    from ..defaults import may_find_a_site

    quantised = runner.model_config.quantization is not None
    return not may_find_a_site("sglang", _arch_of(runner), ranks=runner.server_args.tp_size, quantised=quantised)


def _say_where_defaults_come_from(runner: Any) -> None:
    import torch

    from ..defaults import say_if_measured_elsewhere

    arch = _arch_of(runner)
    say_if_measured_elsewhere(arch, "a CPU" if arch == "cpu" else torch.cuda.get_device_name())
