"""layerfuse inside vLLM: real models in vLLM's own compiler on CPU torch, started cold and from vLLM's cache.

Run by `make test-engines` in an environment of its own.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import json
import pickle
import re
import shutil
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import pytest
import torch

pytest.importorskip("vllm_started")
import vllm
from helpers import run_copy, shown
from reports import FIRST, PROFILING, Said, missed, told
from test_vllm_specs import PER_TOKEN, compressed
from torch import Tensor
from vllm.compilation import backends
from vllm.compilation.passes.inductor_pass import CallableInductorPass
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.models.deepseek_v2 import DeepseekV2Model
from vllm.platforms import current_platform
from vllm_host import vllm_config
from vllm_layers import RELEASE
from vllm_started import (
    BLOCK_FP8,
    ONE_LAYER,
    ROUNDING,
    TWO_LAYERS,
    apart,
    as_near,
    close,
    engine_config,
    fp8,
    loaded_from_cache,
    quantised_as_on_cuda,
    started,
    waiting,
)

from layerfuse import registry
from layerfuse.engines import process
from layerfuse.engines.hooks import check_source
from layerfuse.engines.host import Host
from layerfuse.engines.loading import NotFusedError
from layerfuse.engines.plugins import NotHereError
from layerfuse.engines.rank_report import CallsDifferError, rank_report_of
from layerfuse.engines.vllm import defaults, loading, plugin
from layerfuse.engines.vllm.config_probe import engine_for, why_not_compiled
from layerfuse.engines.vllm.hooks import HOOKS
from layerfuse.engines.vllm.host import VLLM
from layerfuse.engines.vllm.passes import FusionPass
from layerfuse.engines.vllm.releases import NEWEST, RELEASES
from layerfuse.fusion import FusionMissedError, Target
from layerfuse.fusion import backends as fused_backends
from layerfuse.fusion.rewrite.driver import Driver

DUAL, ADD = "mla_dual_rms_norm", "add_rms_norm"
BOTH = {"fusions": [DUAL, ADD]}
SHORT = {"overrides": ONE_LAYER}
ALIKE = {"overrides": {"first_k_dense_replace": 3}}
"""All three layers alike, so that a piece of the graph is equal to another."""


def written(cache: Path) -> dict[str, Any]:
    """The module of the one report below a cache."""
    (path,) = cache.rglob("layerfuse-report.json")
    ((name, module),) = json.loads(path.read_text())["modules"].items()
    assert name == "DeepseekV3ForCausalLM.model"
    return module


def outcomes(module: dict[str, Any]) -> Counter[tuple[str, str]]:
    return Counter((row["fusion"], row["outcome"]) for row in module["sites"] if row["decision"] == "expected")


def exact(name: str, cache: Path, **config: Any) -> Tensor:
    """What a model gives in float32, without layerfuse."""
    with started(name, cache, layerfuse=False, mode="NONE", **config) as engine:
        return engine()


@pytest.mark.parametrize(
    ("split", "dtype"), [(True, "float32"), (False, "bfloat16")], ids=["split at attention", "whole, in bfloat16"]
)
def test_every_site_is_fused_called_and_reported_cold_and_warm(
    split: bool, dtype: str, tmp_path: Path, said: Said
) -> None:
    results = []
    layers, short = (3, {}) if split else (1, SHORT)
    for start in ("cold", "warm"):
        said.clear()
        before = loaded_from_cache()
        strict = {**BOTH, "strict": True}
        with started("deepseek-v3", tmp_path, layerfuse=strict, split=split, dtype=dtype, **short) as engine:
            results.append(engine())
            assert loaded_from_cache() - before == (start == "warm")
            own = engine.uncompiled()

        lines = said()
        for fusion, sites in ((ADD, 2 * layers), (DUAL, layers)):
            line = told(fusion, sites)
            assert line in lines
        assert any("the report that was kept" in line for line in lines) == (start == "warm")
        # Layers 1 and 2 differ in nothing but their names: the piece between their attentions is compiled once.
        assert ("graphs that are equal to others, and were compiled with them: 1" in lines) == (
            split and start == "cold"
        )
        if split and start == "cold" and RELEASE == NEWEST:
            page = shown("docs/vllm.md", "DeepseekV2Model on cpu")
            assert lines[: len(page)] == page
        module = written(tmp_path)
        assert outcomes(module) == {(ADD, "fused"): 2 * layers, (DUAL, "fused"): layers}
        assert (module["kept_since"] is not None) == (start == "warm")
    assert torch.equal(*results)
    if dtype == "float32":
        assert apart(results[0], own) < ROUNDING
    else:
        assert as_near(results[0], own, exact("deepseek-v3", tmp_path, **short))


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        pytest.param("kimi-k2", {ADD: 4, DUAL: 2}, marks=pytest.mark.thorough),
        ("gpt-oss-20b", {ADD: 4}),
        # Its norms are zero-centred: vLLM gives them to its op with one added to the weight.
        ("qwen3-next", {"qk_norm_rope": 1, ADD: 4, "gated_rms_norm": 1}),
    ],
)
def test_every_site_of_other_models_is_fused(name: str, fused: dict[str, int], tmp_path: Path, said: Said) -> None:
    of_each_kind = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    options, short = (
        {"fusions": "all", "strict": True},
        {"overrides": TWO_LAYERS.get("deepseek-v3" if name == "kimi-k2" else name, of_each_kind)},
    )
    with started(name, tmp_path, layerfuse=options, dtype="bfloat16", **short) as engine:
        found, own = engine(), engine.uncompiled()
    lines = [line for line in said() if "expected" in line]
    assert lines == [told(fusion, sites) for fusion, sites in fused.items()]
    assert as_near(found, own, exact(name, tmp_path, **short))


GROUP_FP8 = {**TWO_LAYERS["deepseek-v3"], **BLOCK_FP8}
ONE_FP8 = {**GROUP_FP8, **ONE_LAYER}
PER_TOKEN_FP8 = {**GROUP_FP8, "quantization_config": PER_TOKEN}
STATIC_FP8 = {
    **GROUP_FP8,
    "quantization_config": compressed({"strategy": "tensor", "dynamic": False}, strategy="channel"),
}
PER_TOKEN_ONE, STATIC_ONE = {**PER_TOKEN_FP8, **ONE_LAYER}, {**STATIC_FP8, **ONE_LAYER}
ROWS, COLUMNS, TOKENS = (
    "triton:TritonFp8BlockScaledMMKernel",
    "cutlass:CutlassFp8BlockScaledMMKernel",  # which sm90 takes where DeepGEMM is off
    "cutlass:CutlassFP8ScaledMMLinearKernel",
)


@pytest.mark.parametrize(
    ("kernel", "quantised", "scheme"),
    [
        pytest.param(ROWS, contextlib.nullcontext, "group", id="row by row, plain torch", marks=pytest.mark.thorough),
        pytest.param(ROWS, quantised_as_on_cuda, "group", id="row by row, vLLM's op"),
        # By default it is what runs on Hopper, below.
        pytest.param(
            COLUMNS, contextlib.nullcontext, "group", id="column by column, plain torch", marks=pytest.mark.thorough
        ),
        pytest.param(TOKENS, contextlib.nullcontext, "per_token", id="per token, plain torch"),
        pytest.param(TOKENS, quantised_as_on_cuda, "per_token", id="per token, vLLM's op", marks=pytest.mark.thorough),
        pytest.param(TOKENS, contextlib.nullcontext, "static", id="by a static scale, plain torch"),
    ],
)
def test_fp8_is_quantised_inside_the_fused_norms(
    kernel: str, quantised: Any, scheme: str, tmp_path: Path, said: Said
) -> None:
    with (
        quantised(),
        fp8(kernel),
        started(
            "deepseek-v3",
            tmp_path,
            layerfuse={"fusions": "all", "strict": True},
            dtype="bfloat16",
            overrides={"group": GROUP_FP8, "per_token": PER_TOKEN_ONE, "static": STATIC_ONE}[scheme],
        ) as engine,
    ):
        assert close(engine(), engine.uncompiled())
    lines, layers = said(), 2 if scheme == "group" else 1
    assert {line for line in lines if "expected" in line} == {
        told(fusion, sites)
        for fusion, sites in {
            ADD: layers,  # the final norm, whose reader is the head, and of two layers the one in front of the experts
            f"{ADD}_{scheme}_quant": layers,
            f"{DUAL}_{scheme}_quant": layers,
            f"rms_norm_{scheme}_quant": 1,  # the first layer has no residual to add
            f"silu_mul_{scheme}_quant": 1,
        }.items()
    }
    # Shared experts run behind vLLM's op for experts: nothing is expected of them.
    assert not any("outside of what vLLM compiles" in line for line in lines)


@pytest.mark.parametrize(
    ("name", "overrides", "fused"),
    [
        (
            "deepseek-v3",
            GROUP_FP8,
            {
                f"{ADD}_group_quant": 2,
                f"{DUAL}_group_quant": 2,
                "rms_norm_group_quant": 1,
                "silu_mul_group_quant": 1,
            },
        ),
        # By name the first is fused above; two ranks start the second.
        pytest.param("qwen3-next", {}, {"gated_rms_norm": 3}, marks=pytest.mark.thorough),
        pytest.param("gpt-oss-20b", TWO_LAYERS["gpt-oss-20b"], {}, marks=pytest.mark.thorough),
    ],
)
def test_without_a_word_what_was_measured_faster_is_fused_on_hopper(
    name: str, overrides: dict[str, Any], fused: dict[str, int], tmp_path: Path, said: Said
) -> None:
    """No option at all, as installing it leaves vLLM; the plan is for sm90, and the ops run as on a CPU."""
    with (
        fp8(COLUMNS),
        mock.patch.object(loading, "target_of", return_value=Target.named("sm90")),
        mock.patch.object(defaults, "arch_here", return_value="sm90"),
        started(name, tmp_path, dtype="bfloat16", overrides=overrides) as engine,
    ):
        assert close(engine(), engine.uncompiled())
    lines = said()
    decode = [line for line in lines if "mla_decode leaves vLLM's MLA layers alone" in line]
    assert len(decode) == (name == "deepseek-v3"), "on by default, and this attention's forward is a stand-in's"
    assert {line for line in lines if "expected" in line and line not in decode} == {
        told(fusion, sites) for fusion, sites in fused.items()
    }
    assert not any("problem" in line for line in lines)


@pytest.mark.skipif(RELEASE == "0.26", reason="it compiles all of them")
def test_what_vllm_does_not_compile_by_default_is_known() -> None:
    """Kimi-Linear, K3, V3.2 and GLM-5 run in breakable CUDA graphs: no pass of any compiler ever sees them."""
    config = vllm_config("kimi-linear-48b-a3b", tp=1, rank=0, overrides={})
    assert why_not_compiled(config) == (
        "vLLM runs KimiLinearForCausalLM in breakable CUDA graphs by default, and does not compile it"
    )
    config.model_config.enforce_eager = True
    assert why_not_compiled(config) == "enforce_eager is set: vLLM compiles nothing"


@pytest.mark.skipif(RELEASE == "0.26", reason="it compiles all of them")
@pytest.mark.parametrize(
    ("gpu", "eager", "captured", "captures"),
    [(True, False, 512, True), (True, True, 512, False), (True, False, 0, False), (False, False, 0, True)],
)
def test_an_engine_that_captures_no_cuda_graphs_is_known(
    gpu: bool, eager: bool, captured: int, captures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = vllm_config("kimi-linear-48b-a3b", tp=1, rank=0, overrides={})
    config.model_config.enforce_eager = eager
    config.compilation_config.max_cudagraph_capture_size = captured
    monkeypatch.setattr(type(current_platform), "is_cuda_alike", lambda _: gpu)
    engine = engine_for(config, Target.named("sm90"), why_not_compiled(config))
    assert engine.captures is captures


def test_the_table_of_what_is_not_compiled_is_this_releases() -> None:
    module = importlib.import_module("vllm.config.vllm")
    if RELEASE == "0.26":  # in the middle of a function
        (listed,) = re.findall(
            r"BREAKABLE_CUDAGRAPH\" not in os.environ(.*?) for a in", inspect.getsource(module), re.DOTALL
        )
        breakable = set(re.findall(r"\"(\w+)\"", listed))
    else:
        breakable = module.DEFAULT_BREAKABLE_CUDAGRAPH_ARCHITECTURES
    assert "DeepseekV4ForCausalLM" in breakable
    declared = {name for entry in registry.models().values() for name in entry.architectures}
    assert RELEASES[RELEASE].breakable == (declared & breakable if RELEASE == "0.26" else breakable)


def test_the_hooks_are_found_in_the_source_as_in_the_modules() -> None:
    folder = Path(vllm.__file__).parent
    assert [check_source(hook, folder) for hook in HOOKS] == [None] * len(HOOKS)


def test_off_by_default_nothing_is_planned_and_vllm_compiles_as_ever(tmp_path: Path, said: Said) -> None:
    with started("deepseek-v3", tmp_path, **SHORT) as engine:
        engine()
        assert engine.config.additional_config == {}
    assert said() == [
        f"layerfuse: {plugin.NOTHING_ON}",
    ]
    assert not list(tmp_path.rglob("*layerfuse*"))


def test_what_is_asked_for_is_part_of_vllms_cache_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled model with other fusions, or with none, must never be served."""
    hashes = set()
    for options in (None, {"fusions": DUAL}, BOTH, "environment"):
        monkeypatch.setenv("LAYERFUSE_FUSIONS", f"-{ADD}" if options == "environment" else "")
        asked = None if options == "environment" else options
        with started("deepseek-v3", tmp_path, layerfuse=asked, **SHORT) as engine:
            hashes.add(engine.config.compute_hash())
    assert len(hashes) == 4


# ---- a report that is true


def test_a_piece_from_inductors_cache_is_reported_by_the_record_of_who_compiled_it(tmp_path: Path, said: Said) -> None:
    """As another rank of the same host is served, or a start after vLLM's compiled model was deleted."""
    for start in ("cold", "from Inductor's cache", "from a cache without records"):
        for model in tmp_path.rglob("rank_0_0"):
            shutil.rmtree(model)
        if start == "from a cache without records":
            for folder in tmp_path.rglob("inductor_cache/layerfuse"):
                shutil.rmtree(folder)
        said.clear()
        with started("deepseek-v3", tmp_path, **ALIKE, layerfuse={**BOTH, "strict": True}) as engine:
            engine()
        lines = said()
        # Strict does not raise: where nothing is recorded, as many calls as sites prove it.
        assert told(ADD, 6) in lines
        assert told(DUAL, 3) in lines
        sources = Counter(graph["source"] for graph in written(tmp_path)["graphs"])
        assert (
            sources
            == {
                "cold": {"rewritten": 3, "equal": 1},
                "from Inductor's cache": {"cache": 4},
                # One of two equal pieces: what the first one was served is not asked for again.
                "from a cache without records": {"unknown": 3, "rewritten": 1},
            }[start]
        )


def test_a_fusion_that_is_missing_is_named_with_its_reason_and_stops_a_strict_engine(
    tmp_path: Path, said: Said
) -> None:
    """The model's norm is not what its spec says: one epsilon is changed after the specs were read."""
    short = {"overrides": TWO_LAYERS["deepseek-v3"]}
    with started("deepseek-v3", tmp_path, layerfuse={**BOTH, "strict": True}, **short) as engine:
        engine.model.model.layers[1].self_attn.kv_a_layernorm.variance_epsilon = 1e-3
        with pytest.raises(FusionMissedError, match=r"layers.1.self_attn:latents: .*epsilon 0.001"):
            engine()
    assert missed(DUAL, 2, 1) in said()
    (row,) = [row for row in written(tmp_path)["sites"] if row["outcome"] == "missed"]
    assert (row["site"], row["fusion"]) == ("layers.1.self_attn:latents", DUAL)


@pytest.mark.parametrize("mode", ["VLLM_COMPILE", "NONE"])
def test_calls_that_the_report_does_not_account_for_are_named_and_stop_a_strict_engine(
    mode: str, tmp_path: Path, said: Said
) -> None:
    def once_more(*_: Any) -> None:
        x, weight = torch.ones(2, 8), torch.ones(8)
        torch.ops.layerfuse.add_rms_norm(x, x, weight, 1e-6, 0.0)

    with (
        started("deepseek-v3", tmp_path, **SHORT, mode=mode, layerfuse={"fusions": [ADD], "strict": True}) as engine,
        # Inside the run that is looked at, and in no graph that was rewritten.
        mock.patch("vllm_started.before_attention", once_more),
        pytest.raises(CallsDifferError, match="add_rms_norm was called 3 times"),
    ):
        engine()
    run = PROFILING if mode == "VLLM_COMPILE" else FIRST
    assert f"problem: add_rms_norm was called 3 times in the {run}; the graphs hold it 2 times" in said()


def test_without_vllms_ahead_of_time_compilation_the_report_is_the_records(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
    with started("deepseek-v3", tmp_path, **SHORT, layerfuse={**BOTH, "strict": True}) as engine:
        engine()
    assert told(ADD, 2) in said()


def test_launches_for_fewer_tokens_are_made_behind_the_profiling_run_and_count_for_nothing(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a GPU's kernels, which are compiled when they are first launched."""
    monkeypatch.setattr(fused_backends, "steps", lambda *_: (2, 4, 100))
    with started("deepseek-v3", tmp_path, **SHORT, layerfuse={**BOTH, "strict": True}) as engine:
        engine(tokens=6)
    lines = said()
    # One add and norm, one dual norm, whatever the layer: 1, 3 and 5 tokens of each.
    assert sum(line.startswith("layerfuse: 6 launches for other numbers of tokens") for line in lines) == 1
    assert told(ADD, 2) in lines


def test_copies_of_the_pass_write_to_the_same_report(tmp_path: Path) -> None:
    with started("deepseek-v3", tmp_path, **SHORT, layerfuse=BOTH):
        _, compiled = waiting()
        added = FusionPass(compiled.pipeline, compiled.key)
        for copied in (copy.deepcopy(added), pickle.loads(pickle.dumps(added))):
            assert copied.uuid() == added.uuid()
            assert copied.pipeline.report is compiled.pipeline.report


# ---- hostile conditions: vLLM runs on, and one line says why


def runs_on(engine: Any) -> None:
    torch.testing.assert_close(engine(), engine.uncompiled(), rtol=1e-4, atol=1e-4)


def again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register as a new process would, with what is there now."""
    monkeypatch.setattr(process, "this", process.Process())
    plugin.register()


def test_a_hook_that_is_gone_or_hides_its_arguments_leaves_vllm_alone(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_piece = backends.CompilerManager.compile
    for name, problem in (
        ("gone", "VllmBackend has no 'configure_post_pass'"),
        (
            "hides its arguments",
            "is expected to take self, graph, compile_range, graph_index, and takes self, args, kwargs",
        ),
    ):
        with monkeypatch.context() as patch:
            if name == "gone":
                patch.delattr(backends.VllmBackend, "configure_post_pass")
            else:
                patch.setattr(
                    backends.CompilerManager,
                    "compile",
                    lambda self, *args, **kwargs: compile_piece(self, *args, **kwargs),
                )
            again(patch)
            with started("deepseek-v3", tmp_path, **SHORT, layerfuse=BOTH) as engine:
                if name != "gone":  # one of them is enough: nothing is added in either
                    runs_on(engine)
            (line,) = said()
            assert line.startswith(
                f"layerfuse leaves vLLM {vllm.__version__} alone (tested with 0.26.0, 0.33.0): vllm.compilation.backends:"
            )
            assert line.endswith(problem)
            if name == "gone":
                (page,) = shown("docs/vllm.md", "VllmBackend has no")
                assert line == page.replace("0.40.0", vllm.__version__)
            said.clear()
            with (
                pytest.raises(NotHereError, match="layerfuse is strict"),
                started("deepseek-v3", tmp_path, **SHORT, layerfuse={**BOTH, "strict": True}),
            ):
                pass
            said.clear()


class OwnLoader(DummyModelLoader):
    """One of another package's, which loads in its own way."""

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        return inspect.unwrap(BaseModelLoader.load_model)(self, *args, **kwargs)


def test_an_optional_hook_that_is_gone_is_one_line_and_vllm_is_not_left_alone(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = attrs.evolve(HOOKS[-1], module="vllm.v1.attention.backends.mla.moved")
    renamed = attrs.evolve(HOOKS[2], path="TensorizerLoader.load")
    assert (moved.name, moved.on_rocm, renamed.needed) == ("metadata", True, False)
    monkeypatch.setattr(plugin, "HOOKS", (*HOOKS[:2], *HOOKS[3:-1], renamed, moved))
    gone = [
        f"layerfuse: {renamed.place} is expected, and TensorizerLoader has no 'load'; nothing {renamed.does} here",
        f"layerfuse: {moved.place} is expected, and there is no {moved.module}; nothing {moved.does} here",
    ]
    again(monkeypatch)
    with started("deepseek-v3", tmp_path, **SHORT, layerfuse=BOTH, mode="NONE"):
        assert said() == gone[:1]
        monkeypatch.setattr(type(current_platform), "is_rocm", lambda _: True)
        plugin._say_which_modules_are_gone()
    assert said() == gone


def test_hooks_that_another_plugin_wraps_and_a_pass_in_the_slot_go_together_with_ours(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()
    compile_piece = backends.CompilerManager.compile

    @functools.wraps(compile_piece)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls["wrapper"] += 1
        return compile_piece(self, *args, **kwargs)

    del wrapped.__dict__["__layerfuse__"]  # copied from ours, which stands below
    monkeypatch.setattr(backends.CompilerManager, "compile", wrapped)
    again(monkeypatch)

    def slot_pass(graph: Any) -> None:
        calls["slot"] += 1
        # Ours has run: it stands ahead of every pass of vLLM's that fuses.
        calls["seen there"] += len(
            graph.find_nodes(op="call_function", target=torch.ops.layerfuse.add_rms_norm.default)
        )

    slot = CallableInductorPass(slot_pass, uuid="of the tests")
    with started("deepseek-v3", tmp_path, **ALIKE, layerfuse=BOTH, slot=slot) as engine:
        runs_on(engine)
    assert calls == {"wrapper": 4, "slot": 3, "seen there": 4}  # of the six, two are in an equal graph
    assert told(ADD, 6) in said()
    assert f"is wrapped by {__name__} already; layerfuse stands around it" in said()[0]


def test_what_is_odd_is_a_line_each_and_it_is_fused_all_the_same(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release that nobody tested, layers of a class that nobody knows, and a cache in which no report can be written."""

    class SomeAttention(torch.nn.Module):
        """What looks like attention, and is known to nobody."""

    init = DeepseekV2Model.__init__

    def with_unknown(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.extra = torch.nn.ModuleList(SomeAttention() for _ in range(64))

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Host, "version", lambda _: "0.40.0")
    monkeypatch.setattr(DeepseekV2Model, "__init__", with_unknown)
    # As root every folder can be written.
    monkeypatch.setattr("layerfuse.engines.record_cache.tempfile.NamedTemporaryFile", refuse)
    with started("deepseek-v3", tmp_path, **SHORT, layerfuse=BOTH) as engine:
        runs_on(engine)
    lines = said()
    assert told(ADD, 2) in lines
    assert lines[0] == f"layerfuse: vLLM 0.40.0 is not tested ({', '.join(VLLM.tested)} are); its hooks are as expected"
    assert sum("not tested" in line for line in lines) == 1
    assert any("the report is in this log only" in line and "Permission denied" in line for line in lines)
    at_once, reported = (line for line in lines if "SomeAttention" in line)
    assert at_once.startswith("layerfuse: ")
    assert "SomeAttention (model.extra.0 and 63 more): nothing is fused there" in at_once
    assert reported.startswith("unknown: ") and reported.endswith("SomeAttention (model.extra.0 and 63 more)")


def test_an_error_inside_layerfuse_leaves_the_graph_as_it_was(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It strikes after some of a graph has been rewritten."""
    rewrite, seen = Driver._fuse, Counter[str]()

    def fails(self: Any, use: Any, moved: Any) -> Any:
        result = rewrite(self, use, moved)
        seen["uses"] += 1
        if seen["uses"] % 3 == 0:
            raise ZeroDivisionError("of the tests")
        return result

    monkeypatch.setattr(Driver, "_fuse", fails)
    with started("deepseek-v3", tmp_path, **SHORT, layerfuse=BOTH, split=False) as engine:
        runs_on(engine)
    lines, failed = said(), "rewriting a graph failed: ZeroDivisionError: of the tests"
    assert f"layerfuse: {failed}" in lines
    assert missed(ADD, 2) in lines
    assert f"missed: layers.0:post_attention and 1 more: {failed}" in lines
    assert not any("came from a cache" in line for line in lines)


def test_a_class_derived_from_one_that_vllm_compiles_is_known_by_its_first_call(tmp_path: Path, said: Said) -> None:
    with started("deepseek-v3", tmp_path, **SHORT, layerfuse=BOTH, split=False) as engine:
        module, _ = waiting()
        own = DeepseekV2Model.__call__
        module.__class__ = type("Derived", (DeepseekV2Model,), {"__module__": DeepseekV2Model.__module__})
        engine()
        assert DeepseekV2Model.__call__ is not own  # later calls are vLLM's own
        engine()
    assert told(ADD, 2) in said()
    assert len([line for line in said() if line.startswith("layerfuse 0")]) == 1


def test_vllm_loads_the_plugin_by_its_entry_point(tmp_path: Path) -> None:
    """With the entry points as pyproject.toml declares them, in a process of its own."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    info = tmp_path / "declared-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: declared\nVersion: 1\n")
    points = project["entry-points"]["vllm.general_plugins"]
    lines = [f"{name} = {value}" for name, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *lines]))
    code = (
        "from vllm.plugins import load_general_plugins; load_general_plugins()\n"
        "from vllm.platforms import current_platform\n"
        "print(current_platform.check_and_update_config.__func__.__layerfuse__)\n"
        "import vllm.model_executor.model_loader.base_loader as loader\n"
        "print(loader.BaseModelLoader.load_model.__layerfuse__)"
    )
    done = run_copy(code, tmp_path, VLLM_PLUGINS="layerfuse")
    assert done.stdout.splitlines() == [hook.place for hook in HOOKS[:2]], done.stderr


def test_options_that_do_not_exist_stop_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no option is called 'fusion'; did you mean 'fusions'"):
        engine_config("deepseek-v3", layerfuse={"fusion": "all"})
    with pytest.raises(ValueError, match="no fusion is called 'add_rms'"):
        engine_config("deepseek-v3", layerfuse={"fusions": "add_rms"})


@pytest.mark.parametrize("mode", ["NONE", "DYNAMO_TRACE_ONCE", "STOCK_TORCH_COMPILE"])
def test_a_model_that_vllms_compiler_does_not_see_is_said_once_with_the_reason(
    mode: str, tmp_path: Path, said: Said
) -> None:
    options = {**BOTH, "eager": mode != "NONE"}
    with started("deepseek-v3", tmp_path, **SHORT, layerfuse=options, mode=mode):
        pass
    nothing = (
        f"nothing is fused in DeepseekV3ForCausalLM: vLLM's compilation mode is {mode} here; fusions need VLLM_COMPILE"
    )
    assert said() == [f"layerfuse: {nothing}"]
    if mode == "DYNAMO_TRACE_ONCE":
        assert said() == shown("docs/vllm.md", mode)
    with (
        pytest.raises(NotFusedError, match=f"layerfuse is strict, and {nothing}"),
        started("deepseek-v3", tmp_path, **SHORT, layerfuse={**options, "strict": True}, mode=mode),
    ):
        pass
    with started("deepseek-v3", tmp_path, **SHORT, layerfuse={"strict": True}, mode=mode):  # nothing is asked for
        pass


def test_the_report_says_with_which_other_release_its_figures_were_measured(tmp_path: Path) -> None:
    with started("deepseek-v3", tmp_path, **SHORT, layerfuse=BOTH):
        _, compiled = waiting()
        assert compiled.plan.measured_with_another_release() is None
        compiled.plan = attrs.evolve(compiled.plan, measured=((ADD, "0.1.0"),))
        notes = rank_report_of(compiled, 0).notes
        assert notes[0] == f"the figures here were measured with vLLM 0.1.0; this is {vllm.__version__}"


def test_batch_invariance_is_honoured(tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with (
        pytest.raises(NotFusedError, match=f"{ADD} is asked for, and has no site .* VLLM_BATCH_INVARIANT is set"),
        started("deepseek-v3", tmp_path, **SHORT, layerfuse={**BOTH, "strict": True}),
    ):
        pass
    for asks in ({"fusions": "all"}, {"level": 2}):
        with (
            pytest.raises(
                NotFusedError, match="nothing is fused in DeepseekV3ForCausalLM: VLLM_BATCH_INVARIANT is set"
            ),
            started("deepseek-v3", tmp_path, **SHORT, layerfuse={**asks, "strict": True}),
        ):
            pass
    with started("deepseek-v3", tmp_path, **SHORT, layerfuse={"strict": True}):  # nothing is asked for
        pass
    why = "VLLM_BATCH_INVARIANT is set: vLLM keeps to kernels whose results do not depend on the batch"
    said.clear()
    with started("deepseek-v3", tmp_path, **SHORT, layerfuse=BOTH) as engine:
        _, compiled = waiting()
        assert not compiled.active
        assert {d.reason for d in compiled.plan.refused(ADD)} == {why}
        engine()
    (line,) = [line for line in said() if " sites: " in line]
    assert re.fullmatch(f"[a-z_, ]*{ADD}, [a-z_, ]*{DUAL}[a-z_, ]*: cannot stand at \\d+ sites: {re.escape(why)}", line)
