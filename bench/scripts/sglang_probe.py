"""What `sglang_engine` has SGLang's scheduler do beside serving: take seeded weights, and run one decode step again and again.

A plugin of SGLang's, in every process of an engine. In the scheduler's, a step of so many sequences as `sglang_arm` waits for is held:
the step runs as ever, then its caller is told, and until that lets it go on the same step can be run again, with all that it reads
as it was. On a GPU a step of decoding sequences is the replay of SGLang's CUDA graph for that batch; elsewhere, and of prompts, it is the forward,
which SGLang may have in CUDA graphs too.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

FOLDER = "SGLANG_PROBE"
"""The variable that names a folder: the file `batch` in it says which step to hold, the socket `held` is told. Without it no step is."""
FUSED = "fused"
"""The file in it that says that steps of prompts are to be layerfuse's too."""
SETTLED = 3
"""The step of all sequences that is held."""
_seen: dict[str, int] = {}
"""The wanted step -> how often it was seen."""


def register() -> None:
    """SGLang's hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    runners = "sglang.srt.model_executor.runner"
    HookRegistry.register("sglang.srt.model_loader.loader.initialize_dummy_weights", _fill, HookType.REPLACE)
    if FOLDER not in os.environ:
        return
    HookRegistry.register(f"{runners}.decode_cuda_graph_runner.DecodeCudaGraphRunner.execute", _graph, HookType.AROUND)
    for forward in ("eager_runner.EagerRunner", "prefill_cuda_graph_runner.PrefillCudaGraphRunner"):
        HookRegistry.register(f"{runners}.{forward}.execute", _forward, HookType.AROUND)


def _fill(model: Any, *_: Any, **__: Any) -> None:
    import steps
    import torch
    from sglang.srt.distributed.parallel_state import get_tp_group
    from vllm_shapes import fill, sharded_in

    group = get_tp_group()
    if steps.ON_GPU:
        steps.one_configuration("sglang.kernels.ops.attention.fla")
    with torch.no_grad():
        fill(model.state_dict(), sharded_in(model), group.rank_in_group, group.world_size)


def _graph(execute: Callable[..., Any], runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    found = execute(runner, batch, *args, **kwargs)
    _step(runner, batch.batch_size, lambda: runner.backend.replay(runner._replay_graph_key, batch))
    return found


def _fused_too(wanted: bool) -> None:
    """Let steps that no graph holds be layerfuse's too, where it is, or not: it leaves them to SGLang once graphs are captured."""
    if "layerfuse.engines.sglang.host" in sys.modules:
        from layerfuse.engines.host import enter
        from layerfuse.engines.sglang.host import SGLANG

        enter(attrs.evolve(SGLANG, captures=None) if wanted else SGLANG)


def _forward(execute: Callable[..., Any], runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    _fused_too(Path(os.environ[FOLDER], FUSED).exists())
    found = execute(runner, batch, *args, **kwargs)
    number = batch.batch_size
    if not batch.forward_mode.is_decode() and number:
        number = prompts(number, len(batch.input_ids) // number)
    _step(runner, number, lambda: execute(runner, batch, *args, **kwargs))
    return found


def prompts(number: int, length: int) -> str:
    """How a step of prompts alone is called, where one of decoding sequences is called by their number."""
    return f"{number} x {length}"


def _step(runner: Any, batch: int | str, step: Callable[[], Any]) -> None:
    try:
        wanted = Path(os.environ[FOLDER], "batch").read_text()
    except OSError:
        _seen.clear()
        return
    if wanted not in _seen:
        _seen.clear()
    seen, settled = _seen.setdefault(wanted, 0), SETTLED if wanted.isdigit() else 1
    if str(batch) != wanted:
        time.sleep(0.05 if wanted.isdigit() else 0.5)  # the others are on their way
    elif seen < settled:
        _seen[wanted] = seen + 1
        if seen + 1 == settled:
            _hold(runner, step)


def _hold(runner: Any, step: Callable[[], Any]) -> None:
    """Serve commands until the caller lets go. What goes wrong is its to know."""
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(Path(os.environ[FOLDER], "held")))
        with caller.makefile("rw") as lines:
            for line in lines:
                name, *arguments = json.loads(line)
                try:
                    answer = {"result": COMMANDS[name](runner, step, *arguments)}
                except Exception as error:
                    answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
                lines.write(json.dumps(answer) + "\n")
                lines.flush()


def _replay(_: Any, step: Callable[[], Any], warm: int, rounds: int, each: int) -> list[float]:
    """Microseconds of one step, once for each round."""
    import steps

    return steps.timed(step, warm, rounds, each)


def _clock(_: Any, step: Callable[[], Any], rounds: int) -> list[float]:
    """Milliseconds of one step by the host's clock, once for each round."""
    import torch

    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append((time.perf_counter() - began) * 1000)
    return found


def _calls(_: Any, step: Callable[[], Any]) -> dict[str, list[float]]:
    """Function -> calls and microseconds in itself, of one step."""
    import cProfile

    import steps

    with cProfile.Profile() as counts:
        for _ in range(4):
            step()
    return steps.calls(counts, 4)


def _kernels(_: Any, step: Callable[[], Any]) -> dict[str, list[float]]:
    """Kernel -> launches and microseconds, of one step."""
    import steps
    import torch
    from torch.profiler import ProfilerActivity, profile

    step()
    with profile(activities=[ProfilerActivity.CUDA if steps.ON_GPU else ProfilerActivity.CPU]) as seen:
        for _ in range(10):
            step()
        if steps.ON_GPU:
            torch.cuda.synchronize()
    return steps.kernels(seen, 10)


def _state(runner: Any, _: Any) -> dict[str, Any]:
    """What runs here."""
    import torch

    model, graphs = runner.model_runner.model, vars(vars(runner).get("backend", object)).get("_graphs", {})
    methods = [vars(each)["quant_method"] for each in model.modules() if vars(each).get("quant_method") is not None]
    linears = [vars(each)["w8a8_block_fp8_linear"] for each in methods if vars(each).get("w8a8_block_fp8_linear")]
    forwards = [vars(each)["_forward_method"] for each in model.modules() if vars(each).get("_forward_method")]
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "runner": type(runner).__name__,
        "graphs": sorted(key.size for key in graphs),
        "graphs_by": type(vars(runner).get("backend")).__name__,
        "attention": type(runner.model_runner.attn_backend).__name__,
        "parameters": sum(each.numel() for each in model.parameters()),
        "linears": sorted({getattr(each, "__name__", str(each)) for each in linears}),
        "methods": sorted({type(each).__name__ for each in methods}),
        "ops": sorted({each.__qualname__ for each in forwards}),
    }


COMMANDS: dict[str, Callable[..., Any]] = {
    "replay": _replay,
    "clock": _clock,
    "kernels": _kernels,
    "calls": _calls,
    "state": _state,
}
