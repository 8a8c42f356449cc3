"""What `vllm_engine` has vLLM's workers do beside serving: take seeded weights, and replay their own decode graphs.

A class that vLLM adds to its worker (`worker_extension_cls`). The import of this module, which comes before the model is loaded, puts
the weights of `vllm_shapes` in the place of vLLM's dummy ones.
"""

from __future__ import annotations

import cProfile
from typing import Any

import steps
import torch
import vllm.model_executor.model_loader.dummy_loader as loader
import vllm_shapes
from torch.profiler import ProfilerActivity, profile
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.distributed.parallel_state import get_tp_group

try:  # the second model runner, from 0.33 on
    from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager
except ImportError:
    ModelCudaGraphManager = None

_managers: list[Any] = []
_profiles: list[Any] = []
_counts: list[cProfile.Profile] = []
_filled: set[int] = set()


@torch.no_grad()
def _initialize(module: torch.nn.Module, *_: Any, **__: Any) -> None:
    # The loader hands over the whole model first, then every module of it; a model that drafts comes after that.
    if id(module) not in _filled:
        steps.one_configuration("vllm.third_party.flash_linear_attention")
        _filled.update(map(id, module.modules()))
        group = get_tp_group()
        sharded = vllm_shapes.sharded_in(module)
        vllm_shapes.fill(module.state_dict(), sharded, group.rank_in_group, group.world_size)


if hasattr(loader, "initialize_single_dummy_weight"):
    # From 0.33 on the loader fills the weights itself, and calls the function of the next line no more.
    loader.DummyModelLoader.load_weights = lambda _self, model, *_: _initialize(model)
loader.initialize_dummy_weights = _initialize


def _keep_managers(capture: Any) -> Any:
    def kept(self: Any, *args: Any, **kwargs: Any) -> Any:
        _managers.append(self)
        return capture(self, *args, **kwargs)

    return kept


if ModelCudaGraphManager is not None:
    ModelCudaGraphManager.capture = _keep_managers(ModelCudaGraphManager.capture)


class Probe:
    """Methods of a worker, for `LLM.collective_rpc`."""

    def probe_replay(self, tokens: int, warm: int, rounds: int, each: int) -> list[float]:
        """Microseconds of one replay of the full decode graph of so many tokens, once for each round."""
        return steps.timed(_graph(tokens).replay, warm, rounds, each)

    def probe_kernels(self, tokens: int) -> dict[str, list[float]]:
        """Kernel -> launches and microseconds, of one replay."""
        graph, replays = _graph(tokens), 10
        graph.replay()
        self.probe_begin()
        for _ in range(replays):
            graph.replay()
        return self.probe_end(replays)

    def probe_begin(self) -> None:
        """Take note of kernels from now on."""
        torch.cuda.synchronize()
        _profiles.append(profile(activities=[ProfilerActivity.CUDA]).__enter__())

    def probe_end(self, times: int) -> dict[str, list[float]]:
        """Kernel -> launches and microseconds since then, divided by so many times."""
        torch.cuda.synchronize()
        seen = _profiles.pop()
        seen.__exit__(None, None, None)
        return steps.kernels(seen, times)

    def probe_count(self) -> None:
        """Count and time calls of this thread from now on. In one process with the engine, its own are among them."""
        counts = cProfile.Profile()
        _counts.append(counts)
        counts.enable()

    def probe_counted(self, times: int) -> dict[str, list[float]]:
        """Function -> calls since then and microseconds in itself, with what the profiler adds, divided by so many times."""
        counts = _counts.pop()
        counts.disable()
        return steps.calls(counts, times)

    def probe_state(self) -> dict[str, Any]:
        """What this worker runs."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        return {
            "gpu": torch.cuda.get_device_name(),
            "graphs": sorted(_graphs()),
            "attention": sorted(
                {type(vars(each)["impl"]).__name__ for each in model.modules() if "impl" in vars(each)}
            ),
            "parameters": sum(each.numel() for each in model.parameters()),
            "all_reduce": _all_reduce(),
            "linears": sorted(_linears(model)),
        }


def _linears(model: torch.nn.Module) -> set[str]:
    """Classes of the kernels behind quantised linears, where vLLM names them."""
    methods = [vars(each).get("quant_method") for each in model.modules()]
    kernels = [vars(each).get("fp8_linear") or vars(each).get("kernel") for each in methods if each is not None]
    return {type(each).__name__ for each in kernels if each is not None}


def _all_reduce() -> str:
    group = get_tp_group()
    if group.world_size == 1:
        return "none"
    custom = getattr(group.device_communicator, "ca_comm", None)
    return "NCCL" if custom is None or custom.disabled else "vLLM's custom all-reduce, then NCCL"


def _graphs() -> dict[int, Any]:
    """Tokens -> vLLM's full graph for as many sequences that decode, of either model runner."""
    found: dict[int, Any] = {}
    for manager in _managers:
        for what, graph in manager.graphs.items():
            if what.cg_mode.name == "FULL" and not what.num_active_loras and what.num_ubatches == 1:
                found[what.num_tokens] = graph
    for wrapper in CUDAGraphWrapper._all_instances:
        if wrapper.runtime_mode.name == "FULL":
            for batch, entry in wrapper.concrete_cudagraph_entries.items():
                if entry.cudagraph is not None and batch.uniform:
                    found[batch.num_tokens] = entry.cudagraph
    return found


def _graph(tokens: int) -> Any:
    graphs = _graphs()
    if tokens not in graphs:
        raise LookupError(f"vLLM has no full decode graph of {tokens} tokens; it has {sorted(graphs)}")
    return graphs[tokens]
