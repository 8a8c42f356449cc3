"""Steps that wait for the host: vLLM's own graph runs there, and nothing of layerfuse's is called, counted or compiled.

Run by `make test-engines` in an environment of its own.
"""

from __future__ import annotations

import gc
import logging
import re
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("vllm_started")
from reports import Said, told
from test_vllm_keys import key
from test_vllm_keys import start as begun
from test_vllm_plugin import ADD, BOTH, DUAL, SHORT
from vllm.config import CUDAGraphMode
from vllm_started import loaded_from_cache, started, waiting

from layerfuse.engines.options import OptionsError, options_in
from layerfuse.engines.vllm.host_bound import set_apart, tokens_of, tokens_uncompiled
from layerfuse.fusion import FusionMissedError, backends
from layerfuse.fusion.backends import counting

MOST, CAPTURED, WAITS, MORE = 2048, 8, 20, 40
"""Tokens of a tiny engine's longest step, of its CUDA graphs, and of a step of each kind behind them, where `HERE` is said."""
HERE = {**BOTH, "strict": True, "host_bound": 32}
IN_ALL = {**BOTH, "strict": True}
OWN = "in steps of 9 to {} tokens vLLM's own graph runs"
PUT_OFF = "first run of at most 8 tokens"


def config(endpoints: Any, captured: int | None, mode: str = "FULL_AND_PIECEWISE") -> Any:
    compilation = SimpleNamespace(
        compile_ranges_endpoints=endpoints, max_cudagraph_capture_size=captured, cudagraph_mode=CUDAGraphMode[mode]
    )
    sequences = SimpleNamespace(max_num_seqs=100)
    return SimpleNamespace(compilation_config=compilation, scheduler_config=sequences, num_speculative_tokens=1)


@pytest.mark.parametrize(
    ("endpoints", "captured", "up_to", "ends"),
    [
        ([8192], 512, None, [512, 8192]),
        ([1000, 8192], 512, None, [512, 1000, 8192]),
        ([2048], 512, None, [512, 2048]),
        ([8192], 512, 1024, [512, 1024, 8192]),
        ([8192], 512, 0, [8192]),
        ([8192], 8192, None, [8192]),
        ([8192], 512, 9000, [512, 8192]),
        ([512], 512, None, [512]),
        # Without CUDA graphs every step waits for the host, and is what was asked for.
        ([8192], 0, None, [8192]),
        ([8192], None, None, [8192]),
        (None, 512, None, None),
    ],
)
def test_where_the_graphs_begin_and_end(endpoints: Any, captured: int | None, up_to: int | None, ends: Any) -> None:
    vllms = config(endpoints, captured)
    tokens = tokens_of(vllms, up_to)
    set_apart(vllms.compilation_config, tokens)
    assert vllms.compilation_config.compile_ranges_endpoints == ends
    assert bool(tokens) == (ends != endpoints)


def test_a_release_without_ranges_of_tokens_is_left_alone() -> None:
    older = config(None, 512)
    del older.compilation_config.compile_ranges_endpoints
    assert not tokens_of(older, None)


def test_where_decode_alone_is_captured_the_longest_decode_step_is_where_it_begins() -> None:
    assert tokens_of(config([8192], 512, "FULL_DECODE_ONLY"), None) == range(201, 8193)
    assert tokens_of(config([8192], 128, "FULL_DECODE_ONLY"), None) == range(129, 8193)
    assert tokens_uncompiled(config(None, 512, "FULL_DECODE_ONLY"), 1000) == range(201, 1001)


@pytest.mark.parametrize(
    ("captured", "up_to", "inside", "outside"),
    [
        (512, None, (513, 100_000), (1, 512)),
        (512, 600, (513, 600), (512, 601)),
        (512, 0, (), (513,)),
        (0, None, (), (1,)),
    ],
)
def test_a_model_that_is_not_compiled_needs_no_ranges_of_tokens(
    captured: int, up_to: int | None, inside: tuple[int, ...], outside: tuple[int, ...]
) -> None:
    tokens = tokens_uncompiled(config(None, captured), up_to)
    assert all(each in tokens for each in inside) and not any(each in tokens for each in outside)


def calls_of(step: Any, given: Any) -> int:
    """How many functions a step calls, Python's and C's."""
    counted = 0

    def see(_frame: Any, event: str, _given: Any) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        step(given)
    finally:
        sys.setprofile(None)
    return counted


def test_there_vllms_own_graph_runs_and_costs_the_host_no_more_than_without(tmp_path: Path, said: Said) -> None:
    # To find a step's graph among three takes longer than among one: 0.1 us for a piece.
    ranges, short = {"compile_ranges_endpoints": [CAPTURED, 32]}, SHORT
    with started("deepseek-v3", tmp_path / "own", layerfuse=False, captured=CAPTURED, **ranges, **short) as engine:
        own = engine(WAITS)
        calls = min(calls_of(engine, WAITS) for _ in range(3))  # the first calls of a kind look something up
    for start in ("cold", "warm"):
        said.clear()
        before = loaded_from_cache()
        with started("deepseek-v3", tmp_path, layerfuse=HERE, captured=CAPTURED, **short) as engine:
            engine(MORE)
            assert loaded_from_cache() - before == (start == "warm")
            for tokens in (MORE, WAITS, CAPTURED):
                with counting() as counted:
                    found = engine(tokens)
                assert counted == ({} if tokens == WAITS else {ADD: 2, DUAL: 1}), tokens
                if tokens == WAITS:
                    assert torch.equal(found, own)
            if start == "cold":  # vLLM calls fewer where it has read a model from its cache
                assert min(calls_of(engine, WAITS) for _ in range(3)) <= calls
        lines = said()
        assert {told(ADD, 2), told(DUAL, 1)} <= {*lines}
        assert "over 2 graphs and 2 ranges of tokens: (1, 8), (33, 2048)" in lines
        assert OWN.format(32) in lines


def test_where_the_profiling_run_is_such_a_step_the_first_other_one_is_looked_at(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "steps", lambda *_: (2, 4, 7, 100))
    with started("deepseek-v3", tmp_path, **SHORT, layerfuse=IN_ALL, captured=CAPTURED) as engine:
        for _ in range(2):
            with counting() as counted:
                engine(MORE)
            assert not counted and not any(ADD in line for line in said())
        engine(6)
        # Of what that run has called, for 1, 3, 5 and 8 tokens: of its two graphs one is for up to 8, whatever vLLM captures in the end.
        assert any(line.startswith("layerfuse: 8 launches for other numbers of tokens") for line in said())
        lines = said()
        assert {told(ADD, 2, PUT_OFF), told(DUAL, 1, PUT_OFF), OWN.format(MOST)} <= {*lines}
        engine(6)
        assert said() == lines


def test_nothing_is_launched_beforehand_for_these_numbers_of_tokens_alone(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "steps", lambda *_: (2, 10, 20, 36))
    with started("deepseek-v3", tmp_path, **SHORT, layerfuse=HERE, captured=CAPTURED) as engine:
        engine(MORE)
    # Of each of two ops for 1, 3, 21 and 37 tokens: what is launched for 11 to 20 alone never runs.
    assert any(line.startswith("layerfuse: 8 launches for other numbers of tokens") for line in said())


def test_what_was_compiled_is_kept_before_that_run(tmp_path: Path, said: Said) -> None:
    before = loaded_from_cache()
    for step in (MORE, 6):  # the first start ends before the run that is looked at
        with started("deepseek-v3", tmp_path, **SHORT, layerfuse=IN_ALL, captured=CAPTURED) as engine:
            engine(MORE)
            engine(step)
    assert loaded_from_cache() - before == 1
    assert told(ADD, 2, PUT_OFF) in said()


@pytest.mark.parametrize("steps", [(), (MORE,)], ids=["no run", "the profiling run alone"])
def test_a_start_that_ends_before_the_run_that_is_looked_at_keeps_no_model(
    steps: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # pytest keeps the frames of logged errors
    with started("deepseek-v3", tmp_path, **SHORT, layerfuse=IN_ALL, captured=CAPTURED) as engine:
        for tokens in steps:
            engine(tokens)
        module, compiled = waiting()
        alive = weakref.ref(module), weakref.ref(compiled)
    del engine, module, compiled
    torch._dynamo.convert_frame._bytecode_hooks.clear()  # vLLM's own hold on what it compiles
    torch._dynamo.reset()
    gc.collect()
    assert [each() for each in alive] == [None, None]


def test_a_run_that_raises_is_not_the_one_and_strict_stops_there(tmp_path: Path) -> None:
    with started("deepseek-v3", tmp_path, **SHORT, layerfuse=IN_ALL, captured=CAPTURED) as engine:
        engine(MORE)
        _, compiled = waiting()
        with mock.patch("vllm_started.before_attention", raises), pytest.raises(RuntimeError, match="once"):
            engine(6)
        assert compiled.pieces
        del compiled.pieces[:]
        with pytest.raises(FusionMissedError):
            engine(6)


def raises(_: Any) -> None:
    raise RuntimeError("once")


def test_how_far_it_reaches_is_part_of_vllms_cache_key(tmp_path: Path) -> None:
    keys = []
    for up_to in (32, 0, 64, 32):
        options = {**HERE, "host_bound": up_to}
        with begun(tmp_path, layerfuse=options, captured=CAPTURED) as engine:
            keys.append((key(engine), waiting()[1].key))
    for each in zip(*keys, strict=True):  # vLLM's own, which holds its ranges too, and layerfuse's in it
        assert each[0] == each[3] and len({*each}) == 3


@pytest.mark.parametrize("wrong", [True, -1, 1.5, "vllm"])
def test_it_is_a_number_of_tokens(wrong: Any) -> None:
    with pytest.raises(OptionsError, match=re.escape(f"host_bound: expected a number of tokens, or 0, got {wrong!r}")):
        options_in({"layerfuse": {"host_bound": wrong}})
