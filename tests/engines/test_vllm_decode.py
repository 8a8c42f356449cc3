"""`mla_decode` in vLLM's real MLA wrapper and attention layer: the numbers and the cache of vLLM's own forward, step by step.

Run by `make test-engines` in an environment of its own.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import attrs
import pytest
import torch
from helpers import ROOT, in_turn, shown
from reports import FIRST, Said, missed, told

pytest.importorskip("vllm_paged")
import vllm_paged
from test_vllm_host_bound import calls_of
from test_vllm_inside import as_installed, seen
from test_vllm_plugin import COLUMNS, GROUP_FP8, PER_TOKEN_FP8, ROWS, TOKENS, fp8
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor import custom_op
from vllm.model_executor.layers import mla
from vllm.model_executor.layers.attention import mla_attention
from vllm.v1.attention.backends.mla.triton_mla import TritonMLAImpl
from vllm_layers import RELEASE
from vllm_paged import GUARD, paged, written
from vllm_started import ONE_LAYER, TWO_LAYERS, engine_config, load, loaded_from_cache

from layerfuse.engines import standing
from layerfuse.engines.native import native_methods
from layerfuse.engines.vllm import (
    decode,
    decode_beyond,
    decode_facts,
    decode_ops,
    decode_trial,
    keys,
    loading,
    plugin,
    quantised_latents,
    readers,
)
from layerfuse.engines.vllm.releases import NEWEST
from layerfuse.fusion import FusionMissedError, planning
from layerfuse.fusion.backends import counting, listening
from layerfuse.fusion.policy import Policy, shipped
from layerfuse.fusion.steps.decode import WHY_UNQUANTISED

ON = {"fusions": ["mla_decode"], "strict": True}
DENSE_FP8 = {**GROUP_FP8, "first_k_dense_replace": 2}
IN_FP8: dict[str, Any] = {"dtype": "bfloat16", "overrides": DENSE_FP8}
"""DeepSeek-V3's dense layers as they are published."""
LINE = told("mla_decode", 3)
UNCOMPILED = LINE.replace("profiling run", "first run")
SHORT = -2
"""Two rows of padding without slots."""
STEPS: tuple[tuple[tuple[tuple[int, int], ...], int], ...] = (
    (((0, 5),), 0),  # a prompt
    (((0, 1), (1, 7)), 0),  # decoding beside a prompt
    (((0, 1), (1, 1)), 0),  # nothing but decoding
    (((1, 1), (0, 1)), 6),  # the same, padded for a graph
    (((0, 1), (2, 3), (3, 2)), 3),  # two prompts, one of them a chunk, padded
    (((1, 1), (3, 4)), 0),  # the next chunk
    (((0, 1), (1, 1), (2, 1), (3, 1)), 1),
    (((2, 1), (0, 1)), SHORT),  # padded, and the padding has no slots
    (((2, 1), (1, 2)), SHORT),
)
"""(sequence, new tokens) of each request, and rows of padding."""

VLLMS = "vLLM's cache write"


def decodes(requests: Any, padded: int = 0, most: int = 1) -> bool:
    return all(new <= most for _, new in requests) and padded != SHORT


def expected_of(requests: Any, padded: int = 0, most: int = 1) -> dict[str, int]:
    """One launch for the latents in every step; where all tokens are decoded, nothing else writes to the cache."""
    alone = decodes(requests, padded, most)
    query = "mla_query_absorb" if alone else "mla_query_rope"
    return {"mla_norm_rope_cache_into": 3, query: 3, VLLMS: 0 if alone else 3}


def broken(*_: Any, **__: Any) -> None:
    raise RuntimeError("no such kernel")


DECODED, ASIDE, IN_PIECES = shown("docs/mla-decode.md", "a decode step went through")


def ran(
    name: str,
    path: Path,
    layerfuse: Any,
    meanwhile: Callable[[], None] = lambda: None,
    steps: Any = STEPS,
    **config: Any,
) -> tuple[list[Tensor], list[dict[str, Tensor]], list[dict[str, int]]]:
    """Of each step: what comes out, all bytes of the caches after it, and what was called how often."""
    results, caches, calls = [], [], []
    with paged(name, path, layerfuse=layerfuse, **config) as engine:
        meanwhile()
        for requests, padded in steps:
            written.clear()
            with counting() as counted:
                results.append(engine.step(requests, abs(padded), padded >= 0).float())
            caches.append(engine.bytes())
            calls.append({**counted, VLLMS: len(written)})
    return results, caches, calls


def same(got: Any, own: Any, caches: Any, own_caches: Any) -> None:
    """Bit by bit, in the hidden states and the caches of all steps."""
    for a, b, held, wanted in zip(got, own, caches, own_caches, strict=True):
        assert torch.equal(a, b) and all(torch.equal(each, wanted[name]) for name, each in held.items())


def near(got: Any, own: Any, most: float) -> None:
    """The norm of the difference by that of vLLM's own, in every step."""
    for step, (a, b) in enumerate(zip(got, own, strict=True)):
        assert (a - b).norm() / b.norm() < most, step


def untouched(held: Tensor, wanted: Tensor) -> None:
    """What no token has is as it was: not one byte is written elsewhere."""
    guards, kept = ((each == GUARD).view(-1, held.shape[-1]).all(-1) for each in (held, wanted))
    assert torch.equal(guards, kept)


def values(held: Tensor, cache_dtype: str, dtype: str) -> Tensor:
    return held.view(torch.float8_e4m3fn if cache_dtype == "fp8" else getattr(torch, dtype)).float()


@cache
def own(cache_dtype: str = "auto", dtype: str = "float32") -> tuple[list[Tensor], list[dict[str, Tensor]], list[Any]]:
    """What `ran` gives for vLLM's own forward."""
    with tempfile.TemporaryDirectory() as folder:
        return ran("deepseek-v3", Path(folder), False, mode="NONE", cache_dtype=cache_dtype, dtype=dtype)


def own_states() -> list[Tensor]:
    """What comes out of it, in float32."""
    return own()[0]


CLOSE = {
    ("auto", "float32"): (1e-5, {"rtol": 1e-4, "atol": 1e-5}),
    # An fp8 entry on the edge of two values may become the other one.
    ("fp8", "float32"): (5e-3, {"rtol": 0.13, "atol": 2e-3}),
}
"""Cache and dtype -> how close the hidden states are, as the norm of the difference by theirs, and the entries."""


def hold(stored: tuple[str, str], got: Any, own: Any, caches: Any, own_caches: Any) -> None:
    """The hidden states and the caches of all steps to vLLM's own, as close as `CLOSE` says."""
    states, entries = CLOSE[stored]
    near(got, own, states)
    for found, expected in zip(caches, own_caches, strict=True):
        for name, held in found.items():
            wanted = expected[name]
            torch.testing.assert_close(values(held, *stored), values(wanted, *stored), **entries, equal_nan=True)
            untouched(held, wanted)


@pytest.mark.parametrize(("stored", "mode"), in_turn(CLOSE, ["VLLM_COMPILE", "NONE"]))
def test_every_step_gives_vllms_numbers_and_its_cache(
    stored: tuple[str, str], mode: str, tmp_path: Path, said: Said
) -> None:
    cache_dtype, dtype = stored
    wanted_states, own_caches, none = own(*stored)
    assert none == [{VLLMS: 3}] * len(STEPS)
    said.clear()
    got, caches, calls = ran("deepseek-v3", tmp_path, ON, mode=mode, cache_dtype=cache_dtype, dtype=dtype)
    lines = said()
    stands = UNCOMPILED if mode == "NONE" else LINE
    assert lines.index(stands) < lines.index(DECODED) < lines.index(ASIDE)
    hold(stored, got, wanted_states, caches, own_caches)
    assert calls == [expected_of(*step) for step in STEPS]


@pytest.mark.parametrize("stored", [("auto", "float32"), pytest.param(("fp8", "float32"), marks=pytest.mark.thorough)])
def test_steps_of_more_tokens_than_are_captured_are_vllms_own(stored: tuple[str, str], tmp_path: Path) -> None:
    """As if vLLM captured steps of up to four tokens: with more, nothing of layerfuse's is called, and numbers and cache are as ever."""
    cache_dtype, dtype = stored
    config = {"cache_dtype": cache_dtype, "dtype": dtype, "mode": "VLLM_COMPILE", "captured": 4}
    wanted_states, own_caches, _ = own(*stored)
    got, caches, calls = ran("deepseek-v3", tmp_path, ON, **config)
    hold(stored, got, wanted_states, caches, own_caches)
    for (requests, padded), counted in zip(STEPS, calls, strict=True):
        few = sum(new for _, new in requests) + abs(padded) <= 4
        assert counted == (expected_of(requests, padded) if few else {VLLMS: 3}), (requests, padded)


def test_beyond_graphs_layers_that_differ_in_their_caches_alone_are_of_one_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def skipping(*args: Any, **config: Any) -> Any:
        made = engine_config(*args, **config)
        made.cache_config.kv_cache_dtype_skip_layers = ["0"]  # a cache in float32 beside those in fp8
        return made

    monkeypatch.setattr(vllm_paged, "engine_config", skipping)
    config = {"cache_dtype": "fp8", "steps": STEPS[:3]}
    wanted, _, _ = ran("deepseek-v3", tmp_path / "own", False, mode="NONE", **config)
    got, _, calls = ran("deepseek-v3", tmp_path, ON, mode="VLLM_COMPILE", captured=4, **config)
    near(got, wanted, CLOSE["fp8", "float32"][0])
    assert calls == [{VLLMS: 3}, {VLLMS: 3}, expected_of(*STEPS[2])]


class Executed(TorchDispatchMode):
    """Counts the ops that torch runs, in compiled graphs too, which hold one for each op of theirs in these tests."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops[str(op)] += 1
        return op(*args, **(kwargs or {}))


BEYOND = {
    "a prompt": (((0, 12),), 0),
    "its next chunk beside a prompt, padded": (((0, 7), (1, 5)), 3),
    "decoding beside a prompt": (((0, 1), (1, 1), (2, 9)), 0),
    "nothing but decoding, padded": (((0, 1), (1, 1), (2, 1)), 5),
}
"""Steps of more than four tokens."""


@pytest.mark.parametrize(("fp8_linears", "split"), [(False, True), (True, False)])
def test_beyond_graphs_every_op_is_vllms_and_its_attention_one_op_instead_of_two(
    fp8_linears: bool, split: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit what vLLM gives, by the same ops as often, whether graphs are split at attentions or not: nothing is copied that vLLM does not copy."""
    monkeypatch.setattr(vllm_paged, "SPLIT", vllm_paged.SPLIT if split else [])
    # As on a GPU: what vLLM compiles of this layer's method is another function for each attention.
    monkeypatch.setattr(mla_attention._DecodeConcatQuantFP8, "enabled", classmethod(lambda _: False))
    given: dict[str, Any] = {"overrides": TWO_LAYERS["deepseek-v3"]}
    if fp8_linears:
        given = IN_FP8 | {"overrides": {**DENSE_FP8, "num_hidden_layers": 1}}
    found = []
    for on in (False, ON):
        with (
            as_installed() if fp8_linears else contextlib.nullcontext(),
            paged("deepseek-v3", tmp_path / str(bool(on)), layerfuse=on, captured=4, **given) as engine,
        ):
            engine.step(((3, 3),))  # which is looked at in the place of a profiling run
            engine.allocate()
            steps = []
            for requests, padded in BEYOND.values():
                with Executed() as executed:
                    state = engine.step(requests, padded)
                steps.append((state, engine.bytes(), executed.ops))
            found.append(steps)
            layers = len(engine.layers)
    for step, (own, own_caches, expected), (state, caches, ops) in zip(BEYOND, *found, strict=True):
        assert torch.equal(state, own), step
        assert all(torch.equal(caches[name], held) for name, held in own_caches.items()), step
        two = dict.fromkeys(("unified_mla_kv_cache_update", "unified_mla_attention_with_output"), layers)
        assert expected - ops == {f"vllm.{name}.default": count for name, count in two.items()}, step
        assert ops - expected == {"layerfuse_vllm.mla_attend.default": layers}, step


def test_what_a_prompt_copies_is_copied_in_front_of_the_attention(tmp_path: Path) -> None:
    """Where a projection in fp8 wants latents without gaps: the ops in front are in CUDA graphs of pieces, and the attention is launched by the host."""
    given = IN_FP8 | {"overrides": {**DENSE_FP8, "num_hidden_layers": 1}}
    with (
        as_installed(),
        paged("deepseek-v3", tmp_path, layerfuse={"fusions": ["mla_decode"]}, captured=64, **given) as engine,
    ):
        engine.step(((3, 3),))
        engine.allocate()
        with torch.profiler.profile() as profiled:
            engine.step(((0, 12),))
    (attention,) = (each for each in profiled.events() if each.name == "layerfuse_vllm::mla_attend")
    called = [each.name for each in attention.cpu_children]
    ours = called[: called.index("_C_cache_ops::concat_and_cache_mla")]
    assert "aten::split_with_sizes" in ours
    assert not {"aten::contiguous", "aten::clone", "aten::copy_"} & {*ours}


def test_graphs_in_which_vllms_ops_cannot_be_put_keep_layerfuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    monkeypatch.setattr(decode_beyond, "make_fx", broken)
    with (
        paged("deepseek-v3", tmp_path, layerfuse={"fusions": ["mla_decode"]}, captured=4) as engine,
        counting() as counted,
    ):
        got = engine.step(STEPS[0][0])
    torch.testing.assert_close(got.float(), own_states()[0], rtol=1e-4, atol=1e-5)
    assert counted == {"mla_norm_rope_cache_into": 3, "mla_query_rope": 3}
    assert any("putting vLLM's own ops in the place of mla_decode's" in line for line in said())


def test_caches_know_graphs_beyond_by_the_key_of_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the source of all that is traced with, and not of one file alone."""
    given: list[str] = []

    def key_for(_: Any) -> str:
        given.append(f"key {len(given)}")
        return given[-1]

    monkeypatch.setattr(keys, "key_for", key_for)
    with (
        mock.patch.object(decode_beyond, "OwnBeyond", side_effect=decode_beyond.OwnBeyond) as made,
        paged("deepseek-v3", tmp_path, layerfuse={"fusions": ["mla_decode"]}, captured=4) as engine,
    ):
        engine.step(STEPS[0][0])
    passes = [call.args for call in made.call_args_list]
    assert passes and {args[2] for args in passes} == set(given)
    tokens, layers, key = passes[0]
    known = {
        decode_beyond.OwnBeyond(*args).uuid()
        for args in ((tokens, layers, key), (tokens, layers, "another"), (range(9), layers, key))
    }
    assert len(known) == 3


@pytest.mark.parametrize(
    ("mode", "owner", "name"),
    [
        ("NONE", decode_ops.Layer, "heads"),
        ("VLLM_COMPILE", decode_ops.Layer, "heads"),
        ("VLLM_COMPILE", decode.DecodePlacement, "_why_not_together"),  # the ranks do not agree
    ],
)
def test_a_first_call_that_raised_counts_for_nothing(
    mode: str, owner: Any, name: str, tmp_path: Path, said: Said
) -> None:
    line = UNCOMPILED if mode == "NONE" else LINE
    with paged("deepseek-v3", tmp_path, layerfuse=ON, mode=mode, profile=False) as engine:
        with (
            mock.patch.object(owner, name, side_effect=RuntimeError("once")),
            pytest.raises(RuntimeError, match="once"),
        ):
            engine.engine()
        assert line not in said()
        engine.engine()
    assert line in said()


def test_in_graphs_of_pieces_each_step_launches_the_same_and_decodes_as_vllm_does(tmp_path: Path, said: Said) -> None:
    """What a piece holds was captured in one step and runs in all: no op in it may depend on what the step is."""
    steps = [requests for requests, _ in STEPS]
    with paged("deepseek-v3", tmp_path / "own", layerfuse=False, mode="NONE") as engine:
        own = [engine.step(requests) for requests in steps]
    with paged("deepseek-v3", tmp_path / "ours", layerfuse=ON, mode="NONE") as engine:
        for requests, wanted in zip(steps, own, strict=True):
            written.clear()
            with counting() as counted:
                torch.testing.assert_close(engine.step(requests, pieces=True), wanted, rtol=1e-4, atol=1e-5)
            assert counted == {"mla_norm_rope_cache_into": 3, "mla_query_rope": 3} and len(written) == 3
    lines = said()
    assert IN_PIECES in lines and DECODED not in lines


@pytest.mark.skipif(RELEASE != NEWEST, reason="its cache write is not one call")
def test_a_step_beyond_graphs_calls_no_more_functions_than_vllms(tmp_path: Path) -> None:
    """The host's time of a prompt is that of Python: nothing in front of an attention may cost more of it."""
    found, short = [], {"captured": 4, "overrides": ONE_LAYER}
    for fusions in (None, "mla_decode,add_rms_norm"):
        on = fusions and {"fusions": fusions, "strict": True}
        with paged("deepseek-v3", tmp_path / str(fusions), layerfuse=on or False, **short) as engine:
            for sequence, new in ((3, 3), (0, 20), (1, 20)):  # the first is looked at in the place of a profiling run
                engine.step(((sequence, new),))
            found.append(calls_of(engine.step, ((2, 20),)))
    assert max(found) == found[0]


@pytest.mark.parametrize("direct", [True, False])
def test_vllms_cache_write_of_a_prompt_is_called_as_its_op_calls_it(
    direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That op finds the layer that ours has found already: where it then makes one call, that is made without it."""
    assert (RELEASE == NEWEST) == decode_ops._IS_ONE_CALL
    monkeypatch.setattr(decode_ops, "_IS_ONE_CALL", direct and decode_ops._IS_ONE_CALL)
    with paged("deepseek-v3", tmp_path / "own", layerfuse=False, mode="NONE") as engine:
        engine.step(STEPS[0][0])
        own = engine.bytes()
    with paged("deepseek-v3", tmp_path / "ours", layerfuse=ON, mode="NONE") as engine:
        written.clear()
        engine.step(STEPS[0][0])
        assert len(written) == 3
        for name, held in engine.bytes().items():
            torch.testing.assert_close(held.view(torch.float32), own[name].view(torch.float32), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stored", [None, "fp8"])
def test_entries_of_a_prompt_are_copied_for_a_projection_that_quantises_alone(
    stored: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: set[tuple[int, ...]] = set()
    prefill = vllm_paged._prefill

    def noted(impl: Any, q: Tensor, latent: Tensor, *args: Any, **kwargs: Any) -> None:
        given.add(latent.stride())
        prefill(impl, q, latent, *args, **kwargs)

    monkeypatch.setattr(vllm_paged, "_prefill", noted)
    kernel = fp8(ROWS) if stored else contextlib.nullcontext()
    with kernel, paged("deepseek-v3", tmp_path, layerfuse=ON, mode="NONE", **(IN_FP8 if stored else {})) as engine:
        engine.step(STEPS[0][0])
        (attention, *_) = engine.layers.values()
        width, rope = attention.kv_lora_rank, attention.qk_rope_head_dim
    assert given == {(width if stored else width + rope, 1)}


def test_a_refusal_elsewhere_meanwhile_leaves_a_step_as_it_began(tmp_path: Path) -> None:
    """Two micro-batches run a layer in two threads: its latents are in the cache by now, and not in the buffer."""
    with paged("deepseek-v3", tmp_path, layerfuse=ON, mode="NONE") as engine:
        for requests, _ in STEPS[:2]:
            engine.step(requests)
        made = [engine.layer(name) for name in engine.layers]
        for layer in made:
            layer.wrapper.q_b_proj.register_forward_hook(lambda *_, layer=layer: setattr(layer, "refused", True))
        with counting() as counted:
            got = engine.step(STEPS[2][0])
    torch.testing.assert_close(got.float(), own_states()[2], rtol=1e-4, atol=1e-5)
    assert counted == {"mla_norm_rope_cache_into": 3, "mla_query_absorb": 3}


def test_a_second_engine_of_the_process_whose_layers_have_the_same_names_leaves_the_first_as_it_is(
    tmp_path: Path,
) -> None:
    expected = own_states()
    with paged("deepseek-v3", tmp_path, layerfuse=ON, mode="NONE") as engine:
        second = engine_config("deepseek-v3", layerfuse=ON, mode="NONE")
        with set_current_vllm_config(second):
            other = load(second)
        for parameter in other.model.parameters():
            parameter.data.mul_(3)
        assert engine.layers.keys() <= second.compilation_config.static_forward_context.keys()
        for (requests, padded), own in zip(STEPS[:4], expected, strict=False):
            torch.testing.assert_close(engine.step(requests, abs(padded)).float(), own, rtol=1e-4, atol=1e-5)


def test_what_every_step_reads_is_the_models_own_and_sleeps_with_it(tmp_path: Path) -> None:
    """VLLM keeps a model's buffers while its memory is given away, and nothing else that was made as it was loaded."""
    with paged("deepseek-v3", tmp_path, layerfuse=ON, mode="NONE") as engine:
        found = {name: each for name, each in engine.engine.model.named_buffers() if name.endswith("layerfuse_rows")}
        (rows,) = found.values()
        assert all(engine.layer(name).rows is rows for name in engine.layers)
        assert not any("layerfuse" in name for name in engine.engine.model.state_dict())
        most = engine.engine.config.scheduler_config.max_num_batched_tokens
        assert torch.equal(rows, torch.arange(most))
        layer = engine.layer(next(iter(engine.layers)))
        assert torch.equal(layer.buffer_slots(most + 3), torch.arange(most + 3))


def test_the_query_of_many_tokens_is_that_of_few(tmp_path: Path) -> None:
    with paged("deepseek-v3", tmp_path, layerfuse=ON, mode="NONE") as engine:
        (name, attention), *_ = engine.layers.items()
        layer = engine.layer(name)
        q = torch.randn(100, attention.num_heads, attention.qk_nope_head_dim + attention.qk_rope_head_dim)
        positions = torch.arange(100)
        with counting() as counted:
            many = layer.query(q, positions)
            few = torch.cat([layer.query(q[part], positions[part]) for part in (slice(0, 60), slice(60, 100))])
        assert counted == {"mla_query_absorb": 3}
        torch.testing.assert_close(many, few, rtol=1e-5, atol=1e-5)


def test_in_bfloat16_it_is_as_near_to_float32_as_vllm(tmp_path: Path) -> None:
    truth = own_states()
    runs = [ran("deepseek-v3", tmp_path / str(on), on, mode="NONE", dtype="bfloat16")[0] for on in (False, ON)]
    own, ours = ([(a - b).norm() / b.norm() for a, b in zip(each, truth, strict=True)] for each in runs)
    assert sum(ours) < 1.1 * sum(own)


def test_a_start_from_vllms_cache_is_the_same_and_takes_nothing_of_a_start_without_it(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiled model holds the ops by name, and finds the layers of the process that loads it. Graphs that are not split are alike."""
    monkeypatch.setattr(vllm_paged, "SPLIT", [])
    results, dense = {}, {"num_hidden_layers": 2, "first_k_dense_replace": 2}
    for start in ("cold", "without", "warm"):
        said.clear()
        before = loaded_from_cache()
        with monkeypatch.context() as patch:
            if start == "without":
                patch.setattr(decode_ops, "_rope", broken)
            results[start] = ran("deepseek-v3", tmp_path, {"fusions": ["mla_decode"]}, overrides=dense)[0]
        assert loaded_from_cache() - before == (start == "warm")
        assert (LINE.replace("3", "2") in said()) == (start != "without")
    assert all(torch.equal(*both) for both in zip(results["cold"], results["warm"], strict=True))
    torch.testing.assert_close(results["without"], results["cold"], rtol=1e-4, atol=1e-4)


def test_fusions_of_the_graphs_around_it_are_as_ever(tmp_path: Path, said: Said) -> None:
    """But for both latent norms, which are no longer there."""
    own = own_states()
    said.clear()
    asked = {"fusions": ["mla_decode", "add_rms_norm", "mla_dual_rms_norm"], "strict": True}
    got = ran("deepseek-v3", tmp_path / "ours", asked)[0]
    torch.testing.assert_close(got, own, rtol=1e-4, atol=1e-4)
    lines = said()
    assert LINE in lines
    assert told("add_rms_norm", 6) in lines
    assert not any(line.startswith(("mla_dual_rms_norm", "problem")) for line in lines)


def as_steady(impl: type) -> Any:
    """Let attention take its query in fp8 where its cache is, as the kernels for Hopper do."""
    yes = property(lambda _: True, lambda _, __: None)
    return mock.patch.object(impl, "supports_quant_query_input", yes, create=True)


def test_the_query_comes_in_fp8_where_attention_takes_that(tmp_path: Path) -> None:
    taken: set[torch.dtype] = set()
    attend = vllm_paged._decode

    def decode_in_fp8(impl: Any, q: Any, *args: Any) -> Any:
        taken.add(q.dtype)
        return attend(impl, q, *args)

    config = {"cache_dtype": "fp8", "mode": "NONE"}
    with as_steady(TritonMLAImpl), mock.patch.object(vllm_paged, "_decode", decode_in_fp8):
        own = ran("deepseek-v3", tmp_path / "own", False, **config)[0]
        assert taken == {torch.float8_e4m3fn}
        got, _, calls = ran("deepseek-v3", tmp_path / "ours", ON, **config)
        assert taken == {torch.float8_e4m3fn}
    assert sum("mla_query_absorb_static_quant" in counted for counted in calls) == 3
    assert not any("mla_query_absorb" in counted for counted in calls)
    near(got, own, 2e-2)  # a column on the edge of two fp8 values may become the other one


DRAFTED: tuple[tuple[tuple[tuple[int, int], ...], int], ...] = (
    (((0, 5), (1, 7)), 0),
    (((0, 2), (1, 2)), 0),  # two tokens of each, one of them drafted
    (((1, 2), (0, 2)), 4),  # the same, padded for a graph
    (((0, 1), (1, 2)), 0),  # one sequence without a draft
    (((0, 2), (1, 1), (2, 3)), 0),  # beside a prompt
    (((0, 2), (1, 2), (2, 2)), 0),
)


@pytest.mark.parametrize(("stored", "mode"), in_turn(CLOSE, ["VLLM_COMPILE", "NONE"]))
def test_tokens_that_were_drafted_are_decoded_with_the_one_before(
    stored: tuple[str, str], mode: str, tmp_path: Path
) -> None:
    """Speculative decoding: several tokens of a sequence, where vLLM's metadata calls them decoded."""
    config = {"cache_dtype": stored[0], "dtype": stored[1], "steps": DRAFTED, "drafted": 1}
    own, own_caches, _ = ran("deepseek-v3", tmp_path / "own", False, mode="NONE", **config)
    got, caches, calls = ran("deepseek-v3", tmp_path / "ours", ON, mode=mode, **config)
    hold(stored, got, own, caches, own_caches)
    assert calls == [expected_of(*step, most=2) for step in DRAFTED]


@pytest.mark.parametrize(
    ("heads", "stored", "served"), [(4, "auto", True), (8, "auto", False), (8, "fp8", True), (8, "fp8 alone", False)]
)
def test_heads_that_a_kernel_counts_otherwise(
    heads: int, stored: str, served: bool, tmp_path: Path, said: Said
) -> None:
    """CUTLASS's kernel reads 128 of each token. In fp8 vLLM gives it the query as it is; otherwise it leaves room behind fewer."""
    counts = property(lambda _: heads, lambda _, __: None)
    steady = as_steady(TritonMLAImpl) if stored == "fp8" else contextlib.nullcontext()
    given = {"cache_dtype": stored.partition(" ")[0], "mode": "NONE"}
    with mock.patch.object(TritonMLAImpl, "q_pad_num_heads", counts, create=True), steady:
        if not served:
            why = alone(tmp_path, said, **given)
            assert why.endswith(f"TRITON_MLA takes 4 heads as {heads}, and the query in {given['cache_dtype']}")
            return
        own = ran("deepseek-v3", tmp_path / "own", False, **given)[0]
        got, _, calls = ran("deepseek-v3", tmp_path / "ours", ON, **given)
    near(got, own, 1e-4 if stored == "auto" else 2e-2)
    assert sum("mla_query_absorb" in str(counted) for counted in calls) == 3


def test_which_attention_writes_its_cache_itself_and_that_every_other_takes_a_joined_query() -> None:
    """FlashInfer's, CUTLASS's and FlashMLA's cannot be imported here; their source says it."""
    folder = Path(mla_attention.__file__).parents[3] / "v1" / "attention" / "backends" / "mla"
    own, joined = set(), set()
    for path in folder.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name.endswith("Impl"):
                methods = {each.name: ast.unparse(each) for each in node.body if isinstance(each, ast.FunctionDef)}
                if "do_kv_cache_update" in methods and "sparse" not in path.name:
                    own.add(path.stem)
                if re.search(r"(isinstance\(q, tuple\)|type\(q\) is tuple)", methods.get("forward_mqa", "")):
                    joined.add(path.stem)
    assert own <= {"amx_mla", "cpu_mla"}
    assert joined >= {"cutlass_mla", "flashattn_mla", "flashinfer_mla", "flashmla", "triton_mla"}


def test_the_page_has_every_reason_of_refusal_as_it_is_said() -> None:
    page = (ROOT / "docs" / "mla-decode.md").read_text()
    (table,) = re.findall(r"^\| said as \|.*?\n\n", page, re.MULTILINE | re.DOTALL)
    rows = [line.split(" | ")[0].removeprefix("| ").strip("`") for line in table.strip().splitlines()[2:]]
    assert rows == list(decode_facts.WHY.values())


class Shared:
    """Two ranks with the same part of a cache, in the place of what gathers their queries and combines what they found."""

    seen: list[tuple[Tensor, ...]]

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def query_gather(self, query: Tensor) -> Tensor:
        self.seen.append((query.clone(),))
        return torch.cat([query, query * 0.5], 1)

    def combine(self, attended: Tensor, weights: Tensor, *, seq_lens: Tensor, query_start_loc: Tensor) -> Tensor:
        self.seen.append((weights, seq_lens, query_start_loc))
        first, second = attended.chunk(2, 1)
        return first * 0.75 + second * 0.25


@pytest.mark.skipif(not hasattr(mla_attention, "MLADCPManager"), reason="0.26 shares a cache in another way")
@pytest.mark.parametrize("known", [True, False])
def test_a_cache_that_ranks_share_is_attended_to_as_vllm_does_it(
    known: bool, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode context parallelism: queries of all ranks to each, results back, around the attention kernel."""
    attend, make = vllm_paged._decode, vllm_paged.engine_config

    def decode_with_weights(*args: Any) -> tuple[Tensor, Tensor]:
        attended = attend(*args)[0]
        return attended, attended.sum(-1)

    def shared_config(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        made.parallel_config.decode_context_parallel_size = 2
        return made

    monkeypatch.setattr(vllm_paged, "_decode", decode_with_weights)
    monkeypatch.setattr(vllm_paged, "engine_config", shared_config)
    monkeypatch.setattr(parallel_state, "get_dcp_world_size_and_rank", lambda _=True: (2, 0))
    monkeypatch.setattr(mla_attention, "MLADCPManager", Shared if known else lambda *_, **__: None)
    if not known:
        assert alone(tmp_path, said).endswith(decode_facts.WHY["own ranks"])
        return
    config = {"mode": "NONE", "steps": DRAFTED, "drafted": 1}
    found = []
    for on in (False, ON):
        monkeypatch.setattr(Shared, "seen", [], raising=False)
        results, _, calls = ran("deepseek-v3", tmp_path / str(bool(on)), on, **config)
        found.append((results, Shared.seen))
    (own, own_seen), (got, seen) = found
    assert sum("mla_query_absorb" in counted for counted in calls) == 4
    assert len(seen) == len(own_seen) == 2 * 3 * (len(DRAFTED) - 1), "two for each layer in a step that decodes"
    for given, wanted in zip(seen, own_seen, strict=True):
        torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got, own, rtol=1e-4, atol=1e-4)


QUANTISED = {
    "in blocks": (ROWS, DENSE_FP8),
    "in blocks, column by column": (COLUMNS, DENSE_FP8),
    "per token": (TOKENS, {**PER_TOKEN_FP8, "first_k_dense_replace": 2}),
}


@pytest.mark.parametrize(
    ("how", "mode"), [("in blocks", "VLLM_COMPILE"), ("in blocks, column by column", "NONE"), ("per token", "NONE")]
)
def test_a_projection_that_quantises_by_itself_does_so_behind_the_ops(how: str, mode: str, tmp_path: Path) -> None:
    """As with DeepGEMM's and CUTLASS's linears: one launch more than where nothing quantises."""
    kernel, overrides = QUANTISED[how]
    given = IN_FP8 | {"overrides": overrides}
    with fp8(kernel):
        own = ran("deepseek-v3", tmp_path / "own", False, mode="NONE", **given)[0]
        got, _, calls = ran("deepseek-v3", tmp_path / "ours", ON, mode=mode, **given)
    near(got, own, 0.1)
    assert [counted.get("mla_query_absorb", 0) > 0 for counted in calls] == [decodes(*step) for step in STEPS]


# ---- what is said of decode steps, and what is tried before


def test_only_decode_steps_that_ran_in_two_launches_are_reported(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    with paged("deepseek-v3", tmp_path, layerfuse=ON, mode="NONE") as engine:
        (path,) = tmp_path.rglob("layerfuse-report.json")
        (module,) = json.loads(path.read_text())["modules"].values()
        assert {row["outcome"] for row in module["sites"] if row["fusion"] == "mla_decode"} == {"fused"}
        engine.step(((0, 5),))
        with monkeypatch.context() as patch:
            patch.setattr(decode_ops.Layer, "decodes", lambda *_: False)
            engine.step(((0, 1),))
        assert UNCOMPILED in said() and DECODED not in said()
        engine.step(((0, 1),))
        engine.step(((0, 1),))
        assert said().count(DECODED) == 1


def test_a_first_call_that_decodes_is_counted_as_one(tmp_path: Path, said: Said) -> None:
    with paged("deepseek-v3", tmp_path, layerfuse=ON, mode="NONE", profile=False) as engine:
        engine.allocate()
        engine.lengths[0] = 3
        engine.step(((0, 1),))
    assert UNCOMPILED.replace("none", "3") in said()


def test_every_kind_of_layer_is_tried_with_every_way_to_launch_its_ops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches: set[torch.dtype] = set()
    with paged("deepseek-v3", tmp_path, layerfuse=ON, mode="NONE", cache_dtype="fp8", profile=False) as engine:
        made = [engine.layer(name) for name in engine.layers]

        def listen(op: str, given: tuple[Any, ...]) -> None:
            if op == decode_ops.WRITE:
                caches.add(given[11].dtype)

        with listening(listen):
            # Into a buffer, into the cache, the query absorbed, and roped alone.
            assert decode_ops.try_out(made, engine.engine.config) == 4
        assert caches == {torch.float32, torch.float8_e4m3fn}
        monkeypatch.setattr(decode_ops, "steps", lambda op, *_: (1, 10**9) if "absorb" in op else (3, 7))
        assert decode_ops.try_out(made, engine.engine.config) == 3 + 3 + 2 + 3
        made[1].pairs = "halves"
        assert decode_ops.try_out(made, engine.engine.config) == 2 * (3 + 3 + 2 + 3)


def test_the_numbers_of_each_kind_of_layer_are_tried_once_and_nothing_else_sees_it(tmp_path: Path) -> None:
    with paged("deepseek-v3", tmp_path, layerfuse=ON, mode="NONE") as engine:
        made, config = [engine.layer(name) for name in engine.layers], engine.engine.config
        once = {"mla_norm_rope_cache_into": 2, "mla_query_rope": 1, "mla_query_absorb": 1}
        before, state = engine.bytes(), torch.get_rng_state()
        with counting() as counted:
            assert decode_trial.difference(made, config) is None
        assert counted == once
        assert torch.equal(torch.get_rng_state(), state)
        assert all(torch.equal(held, before[name]) for name, held in engine.bytes().items())
        made[1].pairs = "halves"
        with counting() as counted:
            why = decode_trial.difference(made, config)
        assert why is not None and why.startswith(f"{made[1].name}: what runs there computes something else: ")
        assert counted["mla_norm_rope_cache_into"] > 2


# ---- where it cannot stand: vLLM runs on, and one line says why


def alone(tmp_path: Path, said: pytest.LogCaptureFixture, **config: Any) -> str:
    """Why the layers are left to vLLM, as it is said."""
    given = {"mode": "NONE", **config}
    with paged("deepseek-v3", tmp_path, layerfuse={"fusions": ["mla_decode"]}, **given) as engine:
        wrappers = [m for m in engine.engine.model.modules() if isinstance(m, mla.MultiHeadLatentAttentionWrapper)]
        assert len(wrappers) == 3 and not any("forward" in vars(wrapper) for wrapper in wrappers)
    lines = said()
    assert missed("mla_decode", 3, 0, FIRST) in lines
    (warning,) = [line for line in lines if line.startswith("layerfuse: mla_decode leaves vLLM's MLA layers alone: ")]
    why = warning.partition("alone: ")[2]
    assert f"missed: model.layers.0.self_attn:decode and 2 more: {why}" in lines
    return str(why)


def test_a_vllm_that_does_more_than_is_known_is_left_alone(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = "MultiHeadLatentAttentionWrapper.forward"
    known = attrs.evolve(decode.SEAM.hook, reads=decode_facts.READS[method] - {"o_proj"})
    monkeypatch.setattr(decode, "SEAM", attrs.evolve(decode.SEAM, hook=known))
    place = f"vllm.model_executor.layers.mla:{method}"
    assert alone(tmp_path, said) == f"{place} reads self.o_proj, of which this version of layerfuse knows nothing"


def test_a_function_that_is_not_there_is_named(tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = tuple(attrs.evolve(h, path=h.path.replace("_v_up_proj", "_v_up")) for h in decode.SEAM.callers)
    monkeypatch.setattr(decode, "SEAM", attrs.evolve(decode.SEAM, callers=changed))
    why = alone(tmp_path, said)
    assert why == f"{mla_attention.__name__}:MLAAttention._v_up is expected, and MLAAttention has no '_v_up'"


def test_a_function_that_wants_one_more_argument_is_left_alone(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mla_attention.MLAAttention, "_v_up_proj", lambda self, x, out, scales: None)
    assert alone(tmp_path, said) == (
        f"{mla_attention.__name__}:MLAAttention._v_up_proj, from {__name__}, is expected to take self, x, out "
        "and others with a default only, and takes self, x, out, scales"
    )


@pytest.mark.parametrize(("mode", "stands"), [("PIECEWISE", False), ("FULL_AND_PIECEWISE", True), ("NONE", True)])
def test_where_decode_steps_are_in_graphs_of_pieces_alone_nothing_is_to_be_gained(mode: str, stands: bool) -> None:
    compilation = SimpleNamespace(
        cudagraph_mode=CUDAGraphMode[mode], mode=None, pass_config=SimpleNamespace(fuse_attn_quant=False)
    )
    model = SimpleNamespace(architectures=["DeepseekV3ForCausalLM"])
    given = SimpleNamespace(parallel_config=None, compilation_config=compilation, model_config=model)
    why = decode_facts.why_not_here(given)
    assert stands if why is None else "cudagraph_mode is PIECEWISE" in why and not stands


@pytest.mark.parametrize("derived", [False, True])
def test_attention_with_a_cache_write_of_its_own_is_left_alone(
    derived: bool, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    if derived:
        other = type("Padded", (mla_attention.MLAAttention,), {"__module__": "another"})
        monkeypatch.setattr(mla, "MLAAttention", other)
        assert alone(tmp_path, said).endswith("another.Padded is not vLLM's MLAAttention")
    else:
        monkeypatch.setattr(TritonMLAImpl, "do_kv_cache_update", lambda *_: None)
        assert alone(tmp_path, said).endswith("TRITON_MLA has a cache write of its own")


def test_a_cache_in_a_form_of_sparse_backends_is_left_alone() -> None:
    assert decode._cache_of(SimpleNamespace(kv_cache_dtype="fp8_ds_mla")) is None


def test_a_class_of_another_plugins_is_left_alone(tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    class Derived(mla.MultiHeadLatentAttentionWrapper):
        """It may compute something else."""

    monkeypatch.setitem(custom_op.op_registry_oot, "MultiHeadLatentAttentionWrapper", Derived)
    why = alone(tmp_path, said)
    assert "is not vLLM's MultiHeadLatentAttentionWrapper, and holds none" in why


@pytest.fixture
def _measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it was measured faster on this machine."""
    known = next(each for each in shipped().measurement if each.fusions == ("mla_decode",))
    faster = attrs.evolve(known, arch="cpu", compiled=False, but=None)
    monkeypatch.setattr(planning, "shipped", lambda: Policy(measurement=(faster,)))
    monkeypatch.setattr(plugin, "_nothing_on", lambda *_: False)


@pytest.mark.usefixtures("_measured")
@pytest.mark.parametrize(
    ("fusions", "stands"),
    [(None, True), ("-add_rms_norm", True), ("-mla_decode", False), ("add_rms_norm", False), ("none", False)],
)
def test_where_it_was_measured_faster_it_is_on_unless_it_is_switched_off(
    fusions: str | None, stands: bool, tmp_path: Path, said: Said
) -> None:
    with paged("deepseek-v3", tmp_path, layerfuse={} if fusions is None else {"fusions": fusions}, mode="NONE"):
        pass
    assert any(line == UNCOMPILED for line in said()) is stands


@pytest.mark.usefixtures("_measured")
@pytest.mark.parametrize("options", [{}, {"fusions": "-mla_decode_group_quant"}])
def test_what_is_on_by_itself_and_cannot_be_done_is_one_line_and_no_miss(
    options: dict[str, str], tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "why_not_here", lambda _: "no place")
    with paged("deepseek-v3", tmp_path, layerfuse={"strict": True, **options}, mode="NONE"):
        pass
    lines = [line for line in said() if "mla_decode" in line]
    assert lines == ["layerfuse: mla_decode leaves vLLM's MLA layers alone: no place (it is on by default here)"]


def test_a_strict_engine_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_facts, "why_not_here", lambda _: "no place")
    monkeypatch.setattr(decode, "why_not_here", lambda _: "no place")
    with pytest.raises(FusionMissedError, match="no place"), paged("deepseek-v3", tmp_path, layerfuse=ON, mode="NONE"):
        pass


def test_an_op_that_does_not_run_here_is_found_before_anything_stands(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_ops, "_rope", broken)
    assert alone(tmp_path / "alone", said) == "RuntimeError: no such kernel"
    got, _, calls = ran("deepseek-v3", tmp_path / "ours", {"fusions": ["mla_decode"]}, mode="NONE")
    assert all(torch.equal(*both) for both in zip(got, own_states(), strict=True))
    assert calls == [{VLLMS: 3}] * len(STEPS)


@pytest.mark.parametrize("what", ["latents", "query"])
def test_a_step_that_an_op_refuses_is_done_as_vllm_does_it_and_so_are_all_after_it(
    what: str, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache in another form than was read off the layer, or a query that the op does not take."""

    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("no such entries of a query")

    def change() -> None:
        if what == "latents":
            monkeypatch.setattr(decode_ops.Layer, "seen", lambda _, cache: cache[..., ::2])
        else:
            monkeypatch.setattr(decode_ops, "_absorb", refuse)

    got, _, calls = ran("deepseek-v3", tmp_path, ON, change, mode="NONE")
    torch.testing.assert_close(got, own_states(), rtol=1e-4, atol=1e-4)
    assert sum("entries of" in line for line in said()) == 3  # once for each layer
    first = next(place for place, step in enumerate(STEPS) if decodes(*step))
    # Of the first refused step the latents are in the cache already, where it was the query that was refused.
    assert [counted[VLLMS] for counted in calls] == [3] * first + [3 if what == "latents" else 0] + [3] * (
        len(STEPS) - first - 1
    )


@pytest.mark.parametrize("stored", ["auto", "fp8"])
def test_linears_that_quantise_inside_of_their_op_are_multiplied_beside_it(stored: str, tmp_path: Path) -> None:
    """DeepSeek-V3's dense layers as they are published, in a vLLM as it is installed: nothing in front of `q_b_proj` quantises. (A router may choose other experts.)"""
    given = IN_FP8 | {"cache_dtype": stored}
    with as_installed():
        with paged("deepseek-v3", tmp_path / "own", layerfuse=False, mode="NONE", **given) as engine:
            own = [engine.step(requests).float() for requests, _ in STEPS[:3]]
        options = {
            "fusions": ["mla_decode", "add_rms_norm_group_quant", "few_token_linear_group_quant"],
            "strict": True,
        }
        with paged("deepseek-v3", tmp_path / "ours", layerfuse=options, **given) as engine:
            found, calls = [], []
            for requests, _ in STEPS[:3]:
                with counting() as counted:
                    found.append(engine.step(requests).float())
                calls.append(counted)
            layers = len(engine.layers)
    near(found, own, 0.1)
    for counted, query in zip(calls, ("mla_query_rope", "mla_query_rope", "mla_query_absorb"), strict=True):
        assert counted["mla_norm_rope_cache_into"] == counted[query] == layers
        assert counted["group_quant_linear"] and counted["block_scaled_linear"]


QUANTISED_DECODE = "mla_decode_group_quant"


def quantising(tmp_path: Path, fusions: list[str], strict: bool = True, rounds: bool = False, **config: Any) -> Any:
    """As `ran`, in DeepSeek-V3's dense layers as they are published, in a vLLM as it is installed."""
    layerfuse = {"fusions": fusions, "strict": strict} if fusions else False
    with as_installed(rounds):
        return ran("deepseek-v3", tmp_path / (fusions or ["own"])[0], layerfuse, **IN_FP8, **config)


@pytest.mark.parametrize(
    ("stored", "others", "rounds"),
    in_turn(["auto", "fp8"], [(), ("add_rms_norm_group_quant", "few_token_linear_group_quant")], [False, True]),
)
def test_query_latents_are_quantised_in_the_launch_of_their_norms(
    stored: str, others: tuple[str, ...], rounds: bool, tmp_path: Path, said: Said
) -> None:
    """One launch less for each layer in every step, whatever it is; entries are those of the plain form, byte by byte."""
    config: dict[str, Any] = {"cache_dtype": stored, "rounds": rounds}
    own, own_caches, _ = quantising(tmp_path, [], mode="NONE", **config)
    plain, plain_caches, plain_calls = quantising(tmp_path, ["mla_decode", *others], **config)
    said.clear()
    got, caches, calls = quantising(tmp_path, [QUANTISED_DECODE, *others], **config)
    layers = len(caches[0])
    lines = said()
    assert told(QUANTISED_DECODE, layers) in lines and DECODED in lines
    assert not any(line.startswith("problem") for line in lines)
    near(got, own, 0.1)
    near(got, plain, 0.1)
    first = next(iter(caches[0]))
    for found, expected, vllms in zip(caches, plain_caches, own_caches, strict=True):
        # In front of the first layer's latents both are alike; behind it a query may be the next number.
        assert torch.equal(found[first], expected[first])
        for name, held in found.items():
            untouched(held, vllms[name])
    for step, counted, before in zip(STEPS, calls, plain_calls, strict=True):
        if others:
            products = [each.get("block_scaled_linear", 0) for each in (counted, before)]
            quantising_too = [each.get("group_quant_linear", 0) for each in (before, counted)]
            assert products[0] - products[1] == quantising_too[0] - quantising_too[1] == layers
        assert counted[decode_ops.WRITE_QUANT] == layers and not counted.get(decode_ops.WRITE)
        assert counted["mla_query_absorb" if decodes(*step) else "mla_query_rope"] == layers
        assert counted[VLLMS] == (0 if decodes(*step) else layers)


def test_of_more_than_few_tokens_flashinfer_takes_the_quantised_latent_and_from_32_deep_gemm(tmp_path: Path) -> None:
    found = []
    for fusions in ("mla_decode", QUANTISED_DECODE):
        options = {"fusions": [fusions, "few_token_linear_group_quant"], "strict": True}
        with as_installed(), paged("deepseek-v3", tmp_path / fusions, layerfuse=options, **IN_FP8) as engine:
            taken = []
            for tokens, sequences in ((20, (0, 1)), (40, (2, 3))):
                seen.clear()
                engine.step([(sequence, tokens // 2) for sequence in sequences])
                taken.append(Counter((whose, dtype) for whose, dtype, many in seen if many == tokens))
            layers = len(engine.layers)
        found.append(taken)
    (few, many), (few_quantised, many_quantised) = found
    assert few_quantised - few == {("FlashInfer", torch.float8_e4m3fn): layers}
    assert few - few_quantised == {("FlashInfer", torch.bfloat16): layers}
    assert many == many_quantised and all(whose == "DeepGEMM" for whose, _ in many)


def test_steps_of_more_tokens_than_are_captured_quantise_nothing_of_ours(tmp_path: Path) -> None:
    """As if vLLM captured steps of up to four tokens: with more, all ops are vLLM's, and what they give too, bit by bit."""
    own, own_caches, _ = quantising(tmp_path, [], steps=STEPS[:3], captured=4)
    got, caches, calls = quantising(tmp_path, [QUANTISED_DECODE], steps=STEPS[:3], captured=4)
    assert [decode_ops.WRITE_QUANT in counted for counted in calls] == [False, False, True]
    same(got[:2], own[:2], caches[:2], own_caches[:2])


def test_a_start_from_vllms_cache_quantises_as_the_one_that_filled_it(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_paged, "SPLIT", [])
    found = []
    for warm in (False, True):
        said.clear()
        before = loaded_from_cache()
        found.append(quantising(tmp_path, [QUANTISED_DECODE], steps=STEPS[:3]))
        assert loaded_from_cache() - before == warm
        assert told(QUANTISED_DECODE, len(found[0][1][0])) in said()
    (cold, _, calls), (again, _, calls_again) = found
    assert all(torch.equal(*both) for both in zip(cold, again, strict=True)) and calls == calls_again


def test_a_latent_that_no_graph_quantises_is_a_miss_and_the_plain_form_stands(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised_latents, "_read", lambda _: iter(()))
    with pytest.raises(FusionMissedError, match="it quantises by itself"):
        quantising(tmp_path, [QUANTISED_DECODE])
    said.clear()
    _, _, calls = quantising(tmp_path / "plain", [QUANTISED_DECODE, "mla_decode"], strict=False, steps=STEPS[:3])
    assert [counted[decode_ops.WRITE] for counted in calls] == [2] * 3
    lines = said()
    assert missed(QUANTISED_DECODE, 2) in lines
    assert (
        f"missed: layers.0.self_attn:decode and 1 more: {decode.LATENT_UNREAD}; mla_decode was fused there instead"
        in lines
    )
    assert DECODED in lines and not any(line.startswith("problem") for line in lines)


@pytest.mark.parametrize("fusions", [["-mla_decode", f"+{QUANTISED_DECODE}"], [QUANTISED_DECODE]])
def test_where_no_graph_quantises_a_latent_and_the_plain_form_is_off_all_is_vllms(
    fusions: list[str], tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second layer's product is of a form that the pass does not read: that layer alone is vLLM's, in every step."""
    own, own_caches, _ = quantising(tmp_path, [], steps=STEPS[:3])
    read = quantised_latents._read
    known: list[Any] = []

    def first(graph: Any) -> Any:
        found = list(read(graph))
        known.extend(found)
        return found if len(known) == len(found) else ()

    monkeypatch.setattr(quantised_latents, "_read", first)
    said.clear()
    _, _, calls = quantising(tmp_path / "some", fusions, strict=False, steps=STEPS[:3])
    assert [(counted[decode_ops.WRITE_QUANT], decode_ops.WRITE in counted) for counted in calls] == [(1, False)] * 3
    assert missed(QUANTISED_DECODE, 2, 1) in said()
    monkeypatch.setattr(quantised_latents, "_read", lambda _: iter(()))
    said.clear()
    got, caches, calls = quantising(tmp_path / "none", fusions, strict=False, steps=STEPS[:3])
    assert not any({decode_ops.WRITE, decode_ops.WRITE_QUANT, "mla_query_absorb"} & {*counted} for counted in calls)
    same(got, own, caches, own_caches)
    lines = said()
    assert f"missed: layers.0.self_attn:decode and 1 more: {decode.LATENT_UNREAD}" in lines
    assert not any("mla_decode was fused" in line or line.startswith("problem") for line in lines)


@pytest.mark.parametrize("fusions", [[QUANTISED_DECODE], [QUANTISED_DECODE, "mla_decode"]])
def test_that_no_graph_quantised_is_said_of_the_run_that_is_looked_at_where_a_layer_was_vllms_for_that(
    fusions: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of more tokens than are captured, which is vLLM's with the plain form beside it too, and then nothing."""
    monkeypatch.setattr(quantised_latents, "_read", lambda _: iter(()))
    placed: list[Any] = []
    own = loading.with_placement
    monkeypatch.setattr(loading, "with_placement", lambda *given: placed.append(own(*given)) or placed[-1])
    found = []
    with (
        as_installed(),
        paged("deepseek-v3", tmp_path, layerfuse={"fusions": fusions}, captured=4, **IN_FP8) as engine,
    ):
        ((_, placement),) = placed
        for requests in (STEPS[0][0], None):
            with standing.counted(SimpleNamespace(placements={"": placement})):  # type: ignore[arg-type]
                if requests is not None:
                    engine.step(requests)
            found.append(placement.why_left("layers.0.self_attn:decode", "run"))
    absent = "vLLM did not call this layer in the run"
    assert found == [absent if "mla_decode" in fusions else decode.LATENT_UNREAD, absent]


@pytest.mark.parametrize("how", ["bfloat16", "by itself", "uncompiled"])
def test_where_q_b_proj_takes_no_quantised_latent_a_plan_says_why(how: str, tmp_path: Path, said: Said) -> None:
    given = {"dtype": "bfloat16"} if how == "bfloat16" else IN_FP8
    kernel = {"bfloat16": contextlib.nullcontext(), "by itself": fp8(ROWS), "uncompiled": as_installed()}[how]
    mode = "NONE" if how == "uncompiled" else "VLLM_COMPILE"
    with kernel, paged("deepseek-v3", tmp_path, layerfuse={"fusions": [QUANTISED_DECODE]}, mode=mode, **given):
        pass
    why = {
        "bfloat16": WHY_UNQUANTISED["no blocks"], "by itself": WHY_UNQUANTISED["by itself"],
        "uncompiled": "at module level there is no place for it",
    }[how]  # fmt: skip
    (line,) = [each for each in said() if "is asked for, and has no site in DeepseekV3ForCausalLM: " in each]
    assert line.startswith(f"layerfuse: {QUANTISED_DECODE} is asked") and line.endswith(why)


def test_products_behind_norms_that_it_leaves_before_the_first_call_are_layerfuses(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantised = "add_rms_norm_group_quant", "mla_dual_rms_norm_group_quant", "few_token_linear_group_quant"
    options = {"fusions": ["mla_decode", *quantised]}
    with (
        as_installed(),
        mock.patch.object(readers, "native_methods", return_value=native_methods()),
        paged("deepseek-v3", tmp_path, layerfuse=options, mode="NONE", profile=False, **IN_FP8) as engine,
    ):
        own = TritonMLAImpl.do_kv_cache_update
        monkeypatch.setattr(TritonMLAImpl, "do_kv_cache_update", lambda *args: own(*args))
        engine.engine()
    lines = said()
    assert any(line.startswith("layerfuse: mla_decode leaves vLLM's MLA layers alone: ") for line in lines)
    counts = {"add_rms_norm_group_quant": 3, "mla_dual_rms_norm_group_quant": 2, "few_token_linear_group_quant": 3 + 2}
    assert {told(name, n, FIRST) for name, n in counts.items()} <= set(lines)
