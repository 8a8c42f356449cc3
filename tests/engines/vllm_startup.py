"""What layerfuse adds to vLLM's start: with fusions, in share of vLLM's own compile time, and where it has nothing to do.

A real DeepSeek-V3 of vLLM's with small widths is compiled by its own backend on a CPU, each start in a process of its own. Timed are layerfuse's own functions at vLLM's hooks, without the functions of vLLM's that they
call, and its pass. Compile time is that of the model's first call. All are seconds of the main thread's CPU, so that what else the
machine does counts for nothing; a C++ compiler in another process does not count either. Inductor takes its fallbacks in
the place of generated C++, so that the share is as large as it can be.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from helpers import run_copy

FUSIONS = ["add_rms_norm", "mla_dual_rms_norm"]


class Timed:
    """Seconds in layerfuse's functions, by their name, without what they call of vLLM's."""

    def __init__(self) -> None:
        self.own: Counter[str] = Counter()

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that is given one of vLLM's as its first argument."""

        @functools.wraps(function)
        def timed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            theirs = 0.0

            @functools.wraps(original)
            def counted(*args: Any, **kwargs: Any) -> Any:
                nonlocal theirs
                began = time.thread_time()
                try:
                    return original(*args, **kwargs)
                finally:
                    theirs += time.thread_time() - began

            began = time.thread_time()
            try:
                return function(counted, *args, **kwargs)
            finally:
                self.own[function.__name__] += time.thread_time() - began - theirs

        return timed

    def plain(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Any other function of layerfuse's."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.own[function.__qualname__] += time.thread_time() - began

        return timed


@contextlib.contextmanager
def timing() -> Iterator[Timed]:
    """Register layerfuse with every function at a hook timed, and its pass."""
    from layerfuse.engines import process
    from layerfuse.engines.vllm import passes, plugin

    timed = Timed()
    hooks = [name for name in vars(plugin) if name.startswith("_at_")]
    with contextlib.ExitStack() as stack:
        for name in hooks:
            stack.enter_context(mock.patch.object(plugin, name, timed.around(getattr(plugin, name))))
        for name in ("finish", "_warm_up"):
            stack.enter_context(mock.patch.object(plugin, name, timed.plain(getattr(plugin, name))))
        whole = timed.plain(passes.FusionPass.__call__)
        stack.enter_context(mock.patch.object(passes.FusionPass, "__call__", whole))
        stack.enter_context(mock.patch.object(process, "this", process.Process()))
        plugin.register()
        yield timed


def with_fusions(layers: int) -> dict[str, Any]:
    """One cold start."""
    from vllm_started import engine_config, in_engine, load

    with tempfile.TemporaryDirectory() as folder, timing() as timed:
        config = engine_config("deepseek-v3", layerfuse={"fusions": FUSIONS}, overrides={"num_hidden_layers": layers})
        with in_engine(config, Path(folder)):
            engine = load(config)
            began = time.thread_time()
            engine()
            compiling = time.thread_time() - began
    own = sum(timed.own.values())
    return {
        "layers": layers,
        "compile_s": round(compiling, 3),
        "own_s": round(own, 4),
        "share": round(own / (compiling - own), 4),
        "by function": {name: round(seconds, 4) for name, seconds in timed.own.most_common()},
    }


def registering() -> float:
    """Seconds to import and register layerfuse where all else is imported already, as in vLLM's own processes."""
    importlib.import_module("vllm.model_executor.model_loader.base_loader")
    began = time.thread_time()
    from layerfuse.engines.vllm import register

    register()
    return time.thread_time() - began


def with_nothing_to_do(options: Any, arch: str) -> float:
    """Seconds in layerfuse's functions while a model is loaded and called with no fusion on.

    Args:
        options: as in `additional_config`.
        arch: said to be the GPU's.
    """
    from vllm_started import engine_config, in_engine, load

    with tempfile.TemporaryDirectory() as folder, timing() as timed:
        config = engine_config("qwen3", layerfuse=options)
        here = mock.patch("layerfuse.engines.vllm.defaults.arch_here", return_value=arch)
        with in_engine(config, Path(folder)), here:
            load(config)()
    return sum(timed.own.values())


def in_a_process(call: str) -> Any:
    """What one of the functions above returns, in a process of its own, in which nothing has loaded layerfuse."""
    done = run_copy(f"import json, vllm_startup; print(json.dumps(vllm_startup.{call}))")
    if done.returncode:
        raise RuntimeError(f"{call}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])
