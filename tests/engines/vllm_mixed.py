"""A real vLLM engine on a CPU that serves seeded mixed steps of an MLA model: prompts, chunks of them, decodes, preempted and resumed requests.

vLLM's own engine, scheduler, cache manager, worker, runner, metadata and sampler; only kernels that need a device are plain torch. The
cache and what layerfuse's ops give to others lie between guards.
"""

from __future__ import annotations

import contextlib
import json
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from helpers import run_copy
from torch import Tensor

import vllm_paged  # isort: skip  (before vllm)
from vllm.model_executor.layers.attention import mla_attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention, MLACommonBackend, MLACommonMetadataBuilder
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backends.mla import triton_mla
from vllm.v1.attention.backends.mla.triton_mla import TritonMLAImpl
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.worker import block_table, cpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm_host import _C
from vllm_paged import GUARD, OWN, SPLIT
from vllm_started import TWO_LAYERS, engine_config, filled, in_engine

BLOCK = 16
BLOCKS = 24
"""Fewer than the requests want, so that some are preempted."""
MARGIN = 4096
"""Bytes of guards in front of a buffer and behind it."""
AT_ONCE, A_STEP = 6, 48
"""The most requests that run together, and the most tokens of a step."""
VOCABULARY = 128
GRAPHS = 8
"""Tokens of a step behind which graphs are vLLM's own, where the model is compiled, as if CUDA graphs ended there."""
EXPERTS, DENSE = TWO_LAYERS["deepseek-v3"], {"num_hidden_layers": 2, "first_k_dense_replace": 2}
"""Of the model. Where two experts are alike, rounding chooses another one, and a text goes on with other numbers."""
_BUILD = MLACommonMetadataBuilder.build

kinds: Counter[str] = Counter()
"""Of steps, how many there were."""


with contextlib.suppress(RuntimeError):  # declared already
    _C.define("init_cpu_memory_env(int[] nodes) -> ()")
    _C.define("greedy_argmax(Tensor logits) -> Tensor")
_C.impl("init_cpu_memory_env", lambda _: None, "CompositeExplicitAutograd")
_C.impl("greedy_argmax", lambda logits: logits.argmax(-1), "CompositeExplicitAutograd")


class Prefill:
    """What is left of vLLM's kernels for prompts."""

    def clone(self) -> Prefill:
        return self

    def get_name(self) -> str:
        return "plain"

    def prepare_metadata(self, _: Any) -> None:
        pass

    def supports_quant_output(self, _: Any) -> bool:
        return False


class Guarded:
    """Tensors between guards."""

    def __init__(self) -> None:
        self.held: list[Tensor] = []

    def __call__(self, like: Tensor, *shape: int) -> Tensor:
        size = torch.Size(shape).numel() * like.element_size()
        held = torch.full((size + 2 * MARGIN,), GUARD, dtype=torch.uint8)
        self.held.append(held)
        return held[MARGIN : MARGIN + size].view(like.dtype).view(shape)

    def check(self, keep: bool = False) -> None:
        """Raises AssertionError: somebody wrote to a guard."""
        for held in self.held:
            assert (held[:MARGIN] == GUARD).all() and (held[-MARGIN:] == GUARD).all(), "a guard was written to"
        if not keep:
            self.held.clear()


def _slots(table: Tensor, length: int) -> Tensor:
    at = torch.arange(length)
    return table[at // BLOCK].long() * BLOCK + at % BLOCK


def _map(
    requests: int, tokens: int, _most: int, starts: Tensor, positions: Tensor, tables: Tensor, _stride: int, slots: Tensor,
    size: int, *_: int,
) -> None:  # fmt: skip
    """In the place of vLLM's kernel: the slot of each token, and none for what is behind them."""
    owners = torch.repeat_interleave(torch.arange(requests), starts[: requests + 1].diff().long(), output_size=tokens)
    at = positions[:tokens].long()
    slots[:tokens] = tables[owners, at // size].long() * size + at % size
    slots[tokens:] = -1


def _built(self: Any, prefix: int, common: Any, fast_build: bool = False) -> Any:
    """vLLM's metadata, with what the plain kernels want: the slots that each row sees that is decoded, and those in front of each prompt."""
    made = _BUILD(self, prefix, common, fast_build)
    starts, tables = common.query_start_loc_cpu.tolist(), common.block_table_tensor
    rows, prompts = [], []
    for each, length in enumerate(common.seq_lens[: made.num_decodes + made.num_prefills].tolist()):
        new = starts[each + 1] - starts[each]
        if each < made.num_decodes:
            rows += [_slots(tables[each], length - new + 1 + row) for row in range(new)]
        else:
            prompts.append((_slots(tables[each], length - new), new))
    if made.decode is not None:
        made.decode.slots = rows
    if made.prefill is not None:
        made.prefill.requests = prompts
    kinds["decodes alone" if not prompts else "prompts alone" if not rows else "both"] += 1
    kinds["behind a chunk"] += any(len(before) for before, _ in prompts)
    return made


@contextlib.contextmanager
def _on_cpu() -> Iterator[None]:
    with (
        mock.patch.object(MLAAttention, "forward", OWN),
        mock.patch.object(TritonMLAImpl, "forward_mqa", vllm_paged._decode),
        mock.patch.object(TritonMLAImpl, "forward_mha", vllm_paged._prefill),
        mock.patch.object(TritonMLAImpl, "reserve_workspace", return_value=None, create=True),
        mock.patch.object(triton_mla, "_reserve_attn_logits_workspace"),
        mock.patch.object(MLACommonMetadataBuilder, "build", _built),
        mock.patch.object(MLACommonBackend, "get_supported_head_sizes", return_value=[80]),
        mock.patch.object(mla_attention, "get_mla_prefill_backend", return_value=lambda **_: Prefill()),
        # The groups are there, and so is what the ops of a CPU build would bind.
        mock.patch.object(cpu_worker, "init_worker_distributed_environment"),
        mock.patch.object(type(current_platform), "register_triton_kernel_overrides"),
        mock.patch.object(CPUModelRunner, "_dummy_sampler_run"),  # it draws by chance, by an op of a CPU build
        mock.patch.object(block_table, "_COMPUTE_SLOT_MAPPING_KERNEL", mock.Mock(side_effect=_map)),
    ):
        yield


def served(
    options: Any, steps: int, seed: int, dtype: str, mode: str = "NONE", cache: str = "auto", dense: bool = False
) -> dict[str, Any]:
    """Serve for so many steps. Which requests come, and which are given up, is left to the seed: no step depends on the tokens that were drawn.

    Args:
        options: layerfuse's.
        steps: of the engine.
        seed: of the requests.
        dtype: of the model.
        mode: of vLLM's compiler.
        cache: its form.
        dense: whether the model is without experts.

    Returns:
        `texts`: request -> its tokens, and how far the best two log probabilities were apart at each. `kinds`: how many steps were of each kind.
        `preempted`: how often a request was. `calls`: of layerfuse's ops.
    """
    from layerfuse.engines.vllm import decode_ops, register
    from layerfuse.fusion.backends import counting

    torch.set_num_threads(1)
    register()
    outputs, caches, preempted, chance = Guarded(), Guarded(), [], random.Random(seed)
    preempt = Scheduler._preempt_request

    def noted(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(self, request, *args, **kwargs)

    def made(rows: Tensor, _: Tensor, q_weight: Tensor, kv_weight: Tensor, *__: Any) -> tuple[Tensor, Tensor, Tensor]:
        (tokens, width), q, kv = rows.shape, len(q_weight), len(kv_weight)
        return outputs(rows, tokens, q), outputs(rows, tokens, width - q), outputs(rows, tokens, kv)

    config = engine_config(
        "deepseek-v3", layerfuse=options, dtype=dtype, mode=mode, captured=GRAPHS, overrides=DENSE if dense else EXPERTS
    )
    config.compilation_config.splitting_ops = list(SPLIT)
    config.cache_config.num_gpu_blocks_override, config.cache_config.block_size = BLOCKS, BLOCK
    config.cache_config.cache_dtype = cache
    config.cache_config.user_specified_block_size, config.cache_config.kv_cache_memory_bytes = True, 1 << 28
    scheduler = config.scheduler_config
    scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.enable_chunked_prefill = AT_ONCE, A_STEP, True
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        stack.enter_context(in_engine(config, Path(folder)))
        stack.enter_context(_on_cpu())
        stack.enter_context(mock.patch.object(Scheduler, "_preempt_request", noted))
        stack.enter_context(mock.patch.object(decode_ops, "_made", made))
        engine = LLMEngine(config, UniProcExecutor, log_stats=False)
        runner = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        filled(runner.model)
        for layer in config.compilation_config.static_forward_context.values():
            if isinstance(layer, MLAAttention):
                layer.process_weights_after_loading(getattr(torch, dtype))
                layer.kv_cache = caches(layer.kv_cache, *layer.kv_cache.shape)
        kinds.clear()
        texts: dict[str, list[Any]] = {}
        coming = 0
        with counting() as counted:
            for _ in range(steps):
                while engine.get_num_unfinished_requests() < 2 * AT_ONCE and chance.random() < 0.5:
                    length, new = chance.randint(1, 120), chance.randint(1, 48)
                    prompt = [chance.randrange(VOCABULARY) for _ in range(length)]
                    how = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, logprobs=2, detokenize=False)
                    engine.add_request(str(coming), {"prompt_token_ids": prompt}, how)
                    coming += 1
                if coming and chance.random() < 0.01:  # somebody is no longer there
                    engine.abort_request([str(chance.randrange(coming))])
                for done in engine.step():
                    drawn = done.outputs[0]
                    texts[done.request_id] = [list(drawn.token_ids), [_gap(step) for step in drawn.logprobs]]
                outputs.check()
        caches.check()
    return {
        "texts": texts,
        "kinds": dict(kinds),
        "preempted": len(preempted),
        "calls": dict(counted),
        "requests": coming,
    }


def _gap(step: Any) -> float:
    first, second = sorted((each.logprob for each in step.values()), reverse=True)[:2]
    return round(first - second, 6)


def in_a_process(runs: Sequence[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """`served` of each, one behind another in a process of their own.

    Raises:
        RuntimeError: one failed.
    """
    done = run_copy(f"import json, vllm_mixed; print(json.dumps([vllm_mixed.served(*run) for run in {runs!r}]))")
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def parted(own: dict[str, Any], ours: dict[str, Any]) -> tuple[int, list[float]]:
    """How many tokens were compared, and for each request whose texts part how far apart vLLM's best two were there."""
    compared, gaps = 0, []
    for request, (tokens, between) in own["texts"].items():
        for ours_too, token, gap in zip(ours["texts"][request][0], tokens, between, strict=True):
            compared += 1
            if ours_too != token:
                gaps.append(gap)
                break
    return compared, gaps
