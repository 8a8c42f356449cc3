"""What layerfuse does at each of vLLM's hooks. Whatever goes wrong here is one warning, and vLLM runs on as it would without.

Nothing but `strict` and options that do not exist stops an engine.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import time
import uuid
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .. import process
from ..hooks import Hook, HookError, owner_of, stand_at, wrapped_by
from ..host import enter
from ..imports import when_imported
from ..options import KEY, Options, is_off, misnamed, options_in, unread
from ..plugins import NotHereError, finish, quietly, stop_if
from ..process import leave_alone, once, say_if_untested, say_unknown, troubled
from ..whose import module_of, package
from .hooks import HOOKS
from .host import VLLM

if TYPE_CHECKING:
    from torch import nn

    from ..compiled_module import CompiledModule


WAITS = "__layerfuse_waits__"
"""Under this name a module that vLLM compiles holds its `CompiledModule` until its first call: whoever lets go of the module lets go of both."""

FORCED = "VLLM_FORCE_AOT_LOAD"
"""vLLM's variable: what is in its cache is taken, or the engine stops."""


NOTHING_ON = (
    "no fusion is on in vLLM by default here; `layerfuse plan MODEL --engine vllm` says which there are, and "
    """--additional-config '{"layerfuse": {"fusions": ["add_rms_norm"]}}' takes one"""
)


def register() -> None:
    """Stand at every hook, as vLLM's modules are imported."""
    if process.this.registered:
        return
    process.this.registered = True
    enter(VLLM)
    arounds: dict[str, Callable[..., Any]] = {
        "options": _at_options,
        "specs": _at_specs,
        "loader": _at_loader,
        "pass": _at_pass,
        "piece": _at_piece,
        "artefact": _at_artefact,
        "step": _at_step,
        "metadata": _at_metadata,
    }
    for hook in HOOKS:
        when_imported(hook.module, partial(_stand, hook, arounds[hook.name]))


def _stand(hook: Hook, around: Callable[..., Any], module: ModuleType) -> None:
    try:
        other = wrapped_by(hook, module)
        stand_at(hook, module, around)
    except HookError as error:
        if hook.needed:
            leave_alone(str(error))
        else:
            _say_gone(hook, str(error))
    except Exception as error:  # an import of vLLM's must not fail here
        leave_alone(f"{hook.place}: {type(error).__name__}: {error}")
    else:
        if other is not None:
            VLLM.logger.info("layerfuse: %s is wrapped by %s already; layerfuse stands around it", hook.place, other)


def _say_gone(hook: Hook, problem: str) -> None:
    once(logging.INFO, "layerfuse: %s; nothing %s here", problem, hook.does)


def _argument(function: Callable[..., Any], args: Any, kwargs: Any, name: str) -> Any:
    return inspect.signature(function).bind(*args, **kwargs).arguments[name]


# ---- at vLLM's hooks: each is given the function that it stands at


def _at_options(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """When a config is made: mistakes in the options are errors now, and the environment becomes part of the config."""
    result = original(*args, **kwargs)
    config = _argument(original, args, kwargs, "vllm_config")
    given = config.additional_config
    options = options_in(given)
    with quietly("reading the environment"):
        say_unknown((*misnamed(given), *unread(options)))
    fusions = os.environ.get("LAYERFUSE_FUSIONS", "").strip()
    if isinstance(given, dict) and options.fusions is None and fusions:
        # Into vLLM's hash, and to workers on other hosts.
        config.additional_config = {**given, KEY: {**given.get(KEY, {}), "fusions": fusions}}
    return result


def _at_specs(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """When a model is loaded: plan, and wait for the first call of what vLLM compiles of it."""
    model = original(*args, **kwargs)
    config = _argument(original, args, kwargs, "vllm_config")
    draft = False
    with quietly("looking what the model is for"):
        draft = _is_draft(original, args, kwargs)
    if draft:
        _check_that_one_was_read(config)  # what it drafts for, which is loaded first
    with quietly("taking note of the model"):
        process.this.read.add(model)
        process.this.know(config.scheduler_config)
    options = Options()
    with quietly("reading the options"):
        options = options_in(config.additional_config)
    if process.this.off is not None:
        stop_if(options.strict)
        return model
    if options.off:
        once(logging.INFO, "layerfuse: all fusions are switched off")
        return model
    if _nothing_on(options, config):
        once(logging.INFO, "layerfuse: %s", NOTHING_ON)
        return model
    say_if_untested()
    if options.says_nothing:
        with quietly("asking where defaults come from"):
            _say_where_defaults_come_from()
    with quietly("looking for vLLM's modules"):
        _say_which_modules_are_gone()
    with quietly("planning", options.strict):
        from .loading import compiled_modules_of

        for module, compiled in compiled_modules_of(config, model, options, draft):
            for each in compiled.placements.values():
                each.put_in()
            with quietly("setting apart which steps wait for the host"):
                _set_apart(compiled, options)
            with quietly("looking at experts"):
                from . import routed_experts, shared_experts

                shared_experts.put_in(compiled, module)
                routed_experts.put_in(compiled, module)
            if compiled.at_modules is None:
                _wait_for(module, compiled)
            else:
                from ..standing import at_first_call
                from .host_bound import tokens_uncompiled
                from .seams import SEAMS

                apart = tokens_uncompiled(config, options.host_bound)
                warm = partial(_warm_up, never=apart)
                at_first_call(module, compiled, SEAMS, partial(_look_again, module), finish, apart, warm)
            if options.compared:
                from ..shadowing import compare_calls

                compare_calls(model, compiled, options.compared)
    return model


def _set_apart(compiled: CompiledModule, options: Options) -> None:
    """Let vLLM compile graphs of its own for the steps that wait for the host."""
    if compiled.stands and compiled.at_modules is None:
        from .host_bound import set_apart, tokens_of

        compiled.untouched = tokens_of(compiled.config, options.host_bound)
        set_apart(compiled.config.compilation_config, compiled.untouched)


def _say_where_defaults_come_from() -> None:
    from vllm.platforms import current_platform

    from ..defaults import say_if_measured_elsewhere
    from .defaults import arch_here

    say_if_measured_elsewhere(arch_here(), current_platform.get_device_name())


def _say_which_modules_are_gone() -> None:
    """Of those that this platform uses: one that is never imported says nothing of itself."""
    from vllm.platforms import current_platform

    for hook in HOOKS:
        if hook.on_rocm and current_platform.is_rocm():
            try:
                found = find_spec(hook.module)
            except ModuleNotFoundError:  # a package around it
                found = None
            if found is None:
                _say_gone(hook, f"{hook.place} is expected, and there is no {hook.module}")


def _nothing_on(options: Options, vllm_config: Any) -> bool:
    """Whether nothing was asked for and nothing is on that could find a site: so that what plans is not even imported."""
    if not options.says_nothing:
        return False
    from .defaults import arch_here, may_find_a_site

    return not may_find_a_site(vllm_config, arch_here())


def _wait_for(module: nn.Module, compiled: CompiledModule) -> None:
    """Be told of a module's first call, in which vLLM compiles it and makes its profiling run. Later calls are its own.

    Where that call is one in which nothing of layerfuse's stands, the first other one is waited for.
    """
    process.this.waiting.add(module)
    vars(module)[WAITS] = compiled
    # vLLM gives a class that it compiles a __call__ of its own; classes derived from it have that too.
    cls: Any = next(each for each in type(module).__mro__ if "__call__" in vars(each))
    own = cls.__call__
    if inspect.unwrap(own).__code__ is not _first_call(own, cls).__code__:  # else it is ours already
        cls.__call__ = _first_call(own, cls)


def _first_call(own: Callable[..., Any], cls: Any) -> Callable[..., Any]:
    def leave() -> None:
        if cls.__call__ is first_call and not any(isinstance(other, cls) for other in process.this.waiting):
            cls.__call__ = own

    def first_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self not in process.this.waiting:
            leave()  # the shadow check stood around the first call, so that it could not
            return own(self, *args, **kwargs)
        from ...fusion.ops.warming import recording
        from ..standing import counted
        from ..trial import possible

        if not possible():  # no kernel may be compiled in a CUDA graph
            return own(self, *args, **kwargs)
        process.this.waiting.remove(self)
        compiled = vars(self).pop(WAITS)
        is_first = not compiled.put_off
        process.this.running.append(compiled)
        try:
            from .keys import in_place_of_options

            leave()
            if is_first:
                _look_again(self, compiled)
                _find_key(compiled)
            # Tracing and compiling run no fused op.
            with in_place_of_options(compiled), counted(compiled), recording() as seen:
                result = own(self, *args, **kwargs)
        except BaseException:
            if is_first:
                compiled.pieces.clear()
            _wait_for(self, compiled)  # a call that raised is none
            raise
        finally:
            process.this.running.pop()
        if compiled.active:
            _say_who_passed_by(compiled, "pass", "piece", "artefact")
        tokens = _tokens(args, kwargs)
        if tokens in compiled.untouched:
            if is_first:
                with quietly("keeping what was compiled"):
                    from ..reporting import keep

                    keep(compiled)
            compiled.put_off = True
            _wait_for(self, compiled)  # for one in which what was put in is called
            return result
        if compiled.active:
            _warm_up(seen, compiled, tokens)
        finish(compiled)
        return result

    return first_call


def _tokens(args: Any, kwargs: Any) -> int:
    """Of a call of a module that vLLM compiles: by the ids or, where those are embedded already, the positions, of which there may be several a token."""
    from torch import Tensor

    given = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and not each.is_floating_point())
    return next((each.shape[-1] for each in given), 0)


def _look_again(module: nn.Module, compiled: CompiledModule) -> None:
    with quietly("looking at the MLA layers again", compiled.strict):
        if compiled.look_again():
            from . import routed_experts, shared_experts

            shared_experts.expect_products(compiled, module)
            routed_experts.put_in(compiled, module)


def _say_who_passed_by(compiled: CompiledModule, *names: str) -> None:
    """Where vLLM compiled without coming to these hooks: who has put something else in their place since layerfuse stood there."""
    if compiled.from_cache or compiled.pieces or compiled.spoiled is not None:
        return
    with quietly("looking who stands at the hooks"):
        for hook in HOOKS:
            other = module_of(owner_of(hook, sys.modules[hook.module])[2]) if hook.name in names else "layerfuse"
            if package(other) != "layerfuse":
                compiled.spoiled = f"{hook.place} is {other}'s by now, which does not call layerfuse"
                return


def _find_key(compiled: CompiledModule) -> None:
    """Before vLLM looks into its cache: tell it by what key this module is known."""
    if process.this.off is None and compiled.stands:
        compiled.key = uuid.uuid4().hex  # where none can be found, one that no other start has
        with quietly("finding the key of the fusions for vLLM's cache", compiled.strict):
            from .keys import key_for

            compiled.key = key_for(compiled)


def _warm_up(seen: dict[Any, None], compiled: CompiledModule, tokens: int = 0, never: range | None = None) -> None:
    """After the run that is looked at: what is launched in another way for fewer tokens is launched now, but for those of steps that are vLLM's own.

    It has the most tokens; where it was put off, those that vLLM captures by now may be fewer than its graphs were made for.
    `never`: the tokens of these steps; None: `compiled.untouched`.
    """
    with quietly("launching kernels for fewer tokens"):
        from ...fusion.ops.warming import warm_up
        from ..placement import aside

        began = time.perf_counter()
        most = compiled.untouched.start - 1 if compiled.put_off else tokens
        with aside():
            launches = warm_up(seen, compiled.untouched if never is None else never, tokens, most)
        if launches:
            took = time.perf_counter() - began
            VLLM.logger.info(
                "layerfuse: %d launches for other numbers of tokens than the first run's, in %.1f s", launches, took
            )


def _running() -> CompiledModule | None:
    return process.this.running[-1] if process.this.running and process.this.off is None else None


def _is_draft(original: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether a model is one that drafts for another, and is loaded beside it."""
    from .config_probe import draft_of

    given = inspect.signature(original).bind(*args, **kwargs).arguments
    draft = draft_of(given["vllm_config"])
    return draft is not None and draft is given.get("model_config")


def _at_loader(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """When vLLM makes a loader: one with a `load_model` of its own may bring a model past layerfuse."""
    loader = original(*args, **kwargs)
    with quietly("looking at a loader"):
        loader.load_model = partial(_loaded, loader.load_model)
    return loader


def _loaded(load_model: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    model = load_model(*args, **kwargs)
    config = None
    with quietly("looking at a loaded model"):
        if not any(module in process.this.read for module in model.modules()):
            # A loader of another package may name no arguments.
            config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    if config is not None:
        _say_not_read(config)
    return model


def _at_step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """When vLLM is about to run a model: every one comes by here, compiled or not, whoever loaded it."""
    result = original(*args, **kwargs)
    # Without asking for its signature.
    _check_that_one_was_read(kwargs.get("vllm_config", args[1] if len(args) > 1 else None))
    return result


def _check_that_one_was_read(config: Any) -> None:
    """Once for an engine, as `_say_not_read`, where no model of it was read so far."""
    # By the scheduler's config: vLLM copies its config for parts of a model, for drafts and for kernels, and keeps that.
    try:  # as `_quietly`, which takes longer: every step comes by here
        known = config.model_config is None or process.this.knows(config.scheduler_config)
    except Exception as error:
        troubled("asking whether the model was read", error)
        return
    if not known:
        _say_not_read(config)
        process.this.know(config.scheduler_config)


def _say_not_read(config: Any) -> None:
    """A model was loaded past layerfuse.

    Raises:
        NotHereError: strict, and it was.
    """
    options, how = Options(), ""
    with quietly("asking how the model was loaded"):
        options = options_in(config.additional_config)
        if process.this.off is None and not options.off and not _nothing_on(options, config):
            format_ = config.load_config.load_format
            how = f"vLLM loaded the model in a way that layerfuse does not know (load_format {format_!r})"
    if process.this.off is not None:
        stop_if(options.strict)
    elif how and options.strict:
        raise NotHereError(f"layerfuse is strict, and {how}")
    elif how:
        once(logging.WARNING, "layerfuse: nothing is fused: %s", how)


def _at_pass(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """When a backend has made its passes: add ours, first."""
    result = original(*args, **kwargs)
    backend, compiled = _argument(original, args, kwargs, "self"), _running()
    _check_that_one_was_read(vars(backend).get("vllm_config"))  # here too: the hook of steps is none that is needed
    if compiled is not None and compiled.active:
        _add_pass(backend, compiled)
    if compiled is not None and any(each.key for each in compiled.placements.values()):
        with quietly("adding mla_decode's passes to vLLM's"):
            from ..mla import NAME
            from . import quantised_latents
            from .decode_beyond import OwnBeyond

            placed: Any = compiled.placements[NAME]
            if placed.quantised:
                own = None if placed.plain else OwnBeyond(compiled.untouched, placed.made, compiled.key)
                added = quantised_latents.QuantisedLatents(compiled.untouched, placed.made, compiled.key, own)
                quantised_latents.insert(backend.pass_manager, added)
            if compiled.untouched:
                backend.pass_manager.passes.insert(0, OwnBeyond(compiled.untouched, placed.made, compiled.key))
    return result


def _add_pass(backend: Any, compiled: CompiledModule) -> None:
    """Add the compiled module's pass. Where that is not possible, this start keeps nothing of what it compiles: the key says that it is fused."""
    try:
        from .passes import FusionPass, caller_of, insert

        compiled.added = insert(backend, FusionPass(compiled.pipeline, compiled.key, untouched=compiled.untouched))
        compiled.manager = caller_of(backend.pass_manager)
        if compiled.distrusts:
            backend.compiler_manager.cache.clear()  # pieces that were kept with the module
    except Exception as error:
        troubled("adding the pass to vLLM's", error)
        compiled.spoiled = f"layerfuse's pass could not be added to vLLM's: {error}"
        with quietly("keeping this start out of vLLM's cache"):
            backend.inductor_config["force_disable_caches"] = True


def _at_piece(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """When a piece is compiled: take down what became of it."""
    compiled = _running()
    if compiled is None or not compiled.active:
        return original(*args, **kwargs)
    started = None
    with quietly("reading a piece of the graph"):
        from ..pieces import outline_of
        from .host_bound import holds

        if compiled.added is None:
            _say_who_passed_by(compiled, "pass")
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        number, tokens = given.get("graph_index", 0), given["compile_range"]
        if not holds(compiled.untouched, tokens):
            outline = outline_of(given["graph"])
            started = compiled.piece_starts(outline, str(tokens))
    result = original(*args, **kwargs)
    with quietly("recording a piece of the graph"):
        if started is not None and not compiled.piece_ends(outline, number, str(tokens), started):
            manager = given["self"]
            manager.cache.pop((tokens, number, manager.compiler.name), None)
    return result


def _at_artefact(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """When vLLM looks for a compiled model in its cache: take one only with the report that was kept with it, and read that.

    Without it nobody knows what is in the model: the start that compiled it could not add the pass, or did not come to its end.
    """
    _check_that_one_was_read(vars(_argument(original, args, kwargs, "model")).get("vllm_config"))
    compiled = _running()
    if compiled is not None:
        with quietly("naming the folder of Triton's kernels"):
            from ..record_cache import name_tritons_folder

            name_tritons_folder(compiled.device.index or 0)
    if compiled is None or not compiled.active:
        return original(*args, **kwargs)
    known = forced = os.environ.get(FORCED) == "1"
    with quietly("looking for the report that was kept"):
        known = compiled.look_beside(Path(_argument(original, args, kwargs, "aot_compilation_path")), forced)
    loaded = original(*args, **kwargs) if known else None
    with quietly("reading the report that was kept"):
        if loaded is None:
            compiled.forget()
        else:
            compiled.take_kept()
    return loaded


def _at_metadata(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """When AITER's MLA metadata has been allocated: compare it with the plan for the same layers."""
    result = original(*args, **kwargs)
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    config = given["vllm_config"]
    if process.this.off is None and not is_off(config.additional_config):
        with quietly("checking the attention metadata"):
            from .attention import say

            say(given["self"], given["layer_names"], config)
    return result
