"""Whatever decides what is in a graph is in the key of vLLM's cache, or nothing is kept: starts after starts in bad company.

Run by `make test-engines` in an environment of its own.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import in_turn

pytest.importorskip("vllm_started")
from reports import Said, missed, told
from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.platforms import current_platform
from vllm_started import BLOCK_FP8, ONE_LAYER, ROUNDING, apart, fp8, loaded_from_cache, started, waiting

from layerfuse.engines import process
from layerfuse.engines.hooks import owner_of
from layerfuse.engines.rank_report import CallsDifferError, Outcome, RankReport, lines_of
from layerfuse.engines.vllm import defaults, loading, plugin
from layerfuse.engines.vllm.hooks import HOOKS
from layerfuse.engines.vllm.keys import in_place_of_options
from layerfuse.fusion import FusionMissedError, Target, backends
from layerfuse.fusion.policy import Policy, shipped

ADD = "add_rms_norm"
OPEN = {"fusions": [ADD]}
STRICT = {**OPEN, "strict": True}
FUSED = told(ADD, 2)


@contextlib.contextmanager
def start(cache: Path, **config: Any) -> Iterator[Any]:
    """A model as a new process has it."""
    with mock.patch.object(process, "this", process.Process()):
        plugin.register()
        given = {"layerfuse": STRICT, "split": False, "overrides": ONE_LAYER, **config}
        with started("deepseek-v3", cache, **given) as engine:
            yield engine


def test_whether_linears_of_16_bits_are_layerfuses_is_part_of_it(tmp_path: Path) -> None:
    keys = []
    for on in (False, True, True):
        with start(tmp_path, layerfuse={**OPEN, "few_token_linears": on}, dtype="bfloat16") as engine:
            keys.append(key(engine))
    off, on, again = keys
    assert off != on == again


@pytest.mark.parametrize(
    ("mega", "split"),
    [
        pytest.param("1", False, id="one artefact, whole"),
        pytest.param("0", True, id="an artefact for each piece", marks=pytest.mark.thorough),
    ],
)
def test_a_start_whose_pass_could_not_be_added_leaves_nothing_behind(
    mega: str, split: bool, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_MEGA_AOT_ARTIFACT", mega)
    insert = "layerfuse.engines.vllm.passes.insert"
    # Only of three layers are some pieces equal.
    given, sites = ({"split": True, "overrides": {}}, 6) if split else ({}, 2)
    fused = told(ADD, sites)
    with (
        mock.patch(insert, side_effect=TypeError("a manager has no list of passes")),
        start(tmp_path, **given) as engine,
        pytest.raises(FusionMissedError, match="layerfuse's pass could not be added to vLLM's: a manager has no list"),
    ):
        engine()
    assert missed(ADD, sites) in said.new()
    before = loaded_from_cache()
    for warm in (False, True):
        # Where the report goes decides nothing of what is compiled.
        options = {**STRICT, "report": str(tmp_path / "elsewhere.json")} if warm else STRICT
        with start(tmp_path, layerfuse=options, **given) as engine:
            assert apart(engine(), engine.uncompiled()) < ROUNDING
        assert fused in said.new()
        assert loaded_from_cache() - before == warm
    # What is kept fused serves a start that could not fuse it, which spoils nothing either.
    with mock.patch(insert, side_effect=TypeError("no list")), start(tmp_path, layerfuse=OPEN, **given) as engine:
        engine()
    # Of several artefacts, those of equal pieces are compiled anew at every start.
    assert (fused in said.new()) == (mega == "1")
    with start(tmp_path, **given) as engine:
        engine()
    assert fused in said.new()


class OwnManager(PostGradPassManager):
    """Another plugin's, which keeps its passes in another way."""

    def configure(self, config: Any) -> None:
        super().configure(config)
        self.in_order = self.__dict__.pop("passes")

    def __call__(self, graph: Any) -> None:
        self.passes = self.in_order
        super().__call__(graph)
        del self.passes

    def uuid(self) -> str:
        self.passes = self.in_order
        said = super().uuid()
        del self.passes
        return said


def without_unknown_norms(self: Any, graph: Any) -> None:
    """As a manager calls its passes that leaves out those of others."""
    kept = self.passes
    self.passes = [each for each in kept if type(each).__module__.startswith("vllm.")]
    CALL(self, graph)
    self.passes = kept


CALL = PostGradPassManager.__call__


# Variable, its value, whether the graph is split, whether vLLM keeps what it compiled.
CACHES = [
    ("VLLM_USE_MEGA_AOT_ARTIFACT", "1", False, True),
    ("VLLM_USE_MEGA_AOT_ARTIFACT", "0", True, True),
    ("VLLM_DISABLE_COMPILE_CACHE", "1", False, False),
    ("VLLM_USE_AOT_COMPILE", "0", False, False),
]
# What is in the place of what, and what is said of it.
TROUBLES = [
    (
        "layerfuse.fusion.rewrite.driver.Driver.__call__",
        {"side_effect": RuntimeError("no memory")},
        "rewriting a graph failed: RuntimeError: no memory",
    ),
    (
        f"{PostGradPassManager.__module__}.PostGradPassManager.__call__",
        {"new": without_unknown_norms},
        f"PostGradPassManager, called by {__name__}) compiled it without calling layerfuse's pass",
    ),
]


@pytest.mark.parametrize(("held", "trouble"), in_turn(CACHES, TROUBLES))
def test_what_was_left_unfused_is_never_served_again(
    held: tuple[str, str, bool, bool],
    trouble: tuple[str, dict[str, Any], str],
    tmp_path: Path,
    said: Said,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither by the next start, which compiles anew, nor by those behind it, which are served what that one has kept."""
    variable, value, split, kept = held
    place, instead, why = trouble
    monkeypatch.setenv(variable, value)
    # Only of three layers are some pieces equal, which vLLM does not keep: it asks Inductor for them at every start.
    given, sites = ({"split": True, "overrides": {"first_k_dense_replace": 3}}, 6) if split else ({}, 2)
    with mock.patch(place, **instead), start(tmp_path, layerfuse=OPEN, **given) as engine:
        engine()
    assert any(why in line for line in said.new())
    # A split model is compiled in part at every start; where nothing is kept, one start is as any other.
    for warm in (0, 1) if kept else (0,):
        before = loaded_from_cache()
        with start(tmp_path, **given) as engine:
            assert apart(engine(), engine.uncompiled()) < ROUNDING
        assert told(ADD, sites) in said.new()
        assert loaded_from_cache() - before == (warm and kept)


@pytest.mark.parametrize(
    ("mode", "where"),
    [
        ("VLLM_COMPILE", "vllm.compilation.backends.VllmBackend.__call__"),
        ("VLLM_COMPILE", "layerfuse.engines.vllm.keys.kernels_here"),
        ("NONE", "vllm.model_executor.models.deepseek_v2.DeepseekV2Model.forward"),
    ],
)
def test_a_first_call_that_raises_is_none(mode: str, where: str, tmp_path: Path, said: Said) -> None:
    """Who catches its error and calls again has what was planned, and its report."""
    with start(tmp_path, mode=mode) as engine:
        with mock.patch(where, side_effect=RuntimeError("no memory")), pytest.raises(Exception, match="no memory"):
            engine()
        torch._dynamo.reset()
        engine()
    run = "profiling run" if mode == "VLLM_COMPILE" else "first run"
    assert told(ADD, 2, run) in said.new()


def test_another_manager_of_passes_has_a_key_of_its_own(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bad company, beside a start in good company: each has its own, cold and warm."""
    theirs = mock.patch.object(
        type(current_platform), "get_pass_manager_cls", classmethod(lambda _: f"{__name__}.OwnManager")
    )
    for _ in ("cold", "warm"):
        with (
            theirs,
            start(tmp_path) as engine,
            pytest.raises(FusionMissedError, match="OwnManager has no list of passes"),
        ):
            engine()
        said.new()
        with start(tmp_path) as engine:
            assert apart(engine(), engine.uncompiled()) < ROUNDING
        assert FUSED in said.new()


def bypassed(*hooks: str) -> contextlib.AbstractContextManager[None]:
    """Another package's functions stand at hooks since layerfuse stood there, and call vLLM's own."""
    stack = contextlib.ExitStack()
    for hook in HOOKS:
        if hook.name in hooks:
            owner, name, held = owner_of(hook, importlib.import_module(hook.module))
            own = inspect.unwrap(held)
            theirs = functools.wraps(own)(lambda *args, own=own, **kwargs: own(*args, **kwargs))
            stack.enter_context(mock.patch.object(owner, name, theirs))
    return stack


PASSED_BY = f"is {__name__}'s by now, which does not call layerfuse"
CONFIGURE = "vllm.compilation.backends:VllmBackend.configure_post_pass"


@pytest.mark.parametrize("hooks", [("pass",), ("pass", "piece")])
def test_a_start_whose_hook_another_package_has_taken_away_says_whose_it_is_and_leaves_nothing_behind(
    hooks: tuple[str, ...], tmp_path: Path, said: Said
) -> None:
    with (
        start(tmp_path) as engine,
        bypassed(*hooks),
        pytest.raises(FusionMissedError, match=f"{CONFIGURE} {PASSED_BY}"),
    ):
        engine()
    assert missed(ADD, 2) in said.new()
    before = loaded_from_cache()
    for warm in (False, True):
        with start(tmp_path) as engine:
            assert apart(engine(), engine.uncompiled()) < ROUNDING
        assert FUSED in said.new()
        assert loaded_from_cache() - before == warm


@pytest.mark.parametrize("hook", ["piece", "artefact"])
def test_where_nobody_tells_of_graphs_the_calls_tell_what_is_fused(hook: str, tmp_path: Path, said: Said) -> None:
    if hook == "artefact":
        with start(tmp_path) as engine:
            engine()
    said.new()
    with start(tmp_path) as engine, bypassed(hook):
        assert apart(engine(), engine.uncompiled()) < ROUNDING
    told = said.new()
    assert FUSED in told
    assert any(f"{PASSED_BY}: what is fused is known by the calls of the profiling run alone" in line for line in told)


class OneManager(PostGradPassManager):
    """One of which one object serves every model of a process, and keeps what was added."""

    def configure(self, config: Any) -> None:
        before = [each for each in vars(self).get("passes", ()) if type(each).__module__.startswith("layerfuse")]
        super().configure(config)
        self.passes[:0] = before


def test_a_manager_that_serves_all_models_of_a_process_has_the_pass_of_the_one_that_is_compiled(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = OneManager()
    monkeypatch.setattr(f"{__name__}.the_manager", lambda: manager, raising=False)
    monkeypatch.setattr(
        type(current_platform), "get_pass_manager_cls", classmethod(lambda _: f"{__name__}.the_manager")
    )
    for fusion in (ADD, "mla_dual_rms_norm", ADD):
        with start(tmp_path, layerfuse={"fusions": [fusion], "strict": True}) as engine:
            assert apart(engine(), engine.uncompiled()) < ROUNDING
        assert told(fusion, 2 if fusion == ADD else 1) in said.new()


def key(engine: Any) -> str:
    """What vLLM's cache knows the engine's model by."""
    _, compiled = waiting()
    plugin._find_key(compiled)
    with in_place_of_options(compiled):
        return str(engine.config.compute_hash())


def test_the_key_holds_what_decides_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def keys(**options: Any) -> str:
        with start(tmp_path, layerfuse={**OPEN, **options}) as engine:
            return key(engine)

    plain = keys()
    for other in ({"report": str(tmp_path / "elsewhere.json")}, {"strict": True}, {"eager": False}):
        assert keys(**other) == plain
    others = [keys(fusions=[ADD, "mla_dual_rms_norm"]), keys(fusions=None, level=2)]
    monkeypatch.setenv("LAYERFUSE_BACKEND", "reference")
    others.append(keys())
    monkeypatch.setenv("LAYERFUSE_BACKEND", "")
    assert keys() == plain
    backends.force("reference")
    try:
        assert keys() == others[-1]
    finally:
        backends.force(None)
    monkeypatch.setattr(torch, "__version__", torch.__version__ + ".other")
    others.append(keys())
    assert len({plain, *others}) == 5


def test_where_nothing_is_on_vllm_has_its_own_key(tmp_path: Path) -> None:
    with start(tmp_path, layerfuse=None) as engine:
        own = engine.config.compute_hash()
    with start(tmp_path, layerfuse={"fusions": "gated_rms_norm"}) as engine:
        assert key(engine) == own
    # As is a start in which layerfuse never came to the model's first call.
    with start(tmp_path) as engine:
        assert own != engine.config.compute_hash() != key(engine)


def test_a_key_that_cannot_be_found_is_one_that_no_other_start_has(tmp_path: Path, said: Said) -> None:
    with (
        mock.patch("layerfuse.engines.vllm.keys.kernels_here", side_effect=RuntimeError("of the tests")),
        start(tmp_path, layerfuse=OPEN) as engine,
    ):
        assert key(engine) != key(engine)
    failed = "layerfuse: finding the key of the fusions for vLLM's cache failed: RuntimeError: of the tests"
    assert failed in said.new()


def test_a_compiled_model_without_its_report_is_compiled_anew(tmp_path: Path, said: Said) -> None:
    """As a start leaves it that ended before its profiling run did."""
    for there in ("nothing", "the model alone", "both"):
        if there == "the model alone":
            (kept,) = tmp_path.rglob("layerfuse.json")
            kept.unlink()
        before = loaded_from_cache()
        with start(tmp_path) as engine:
            engine()
        assert FUSED in said.new()
        assert loaded_from_cache() - before == (there == "both")


def test_a_compiled_model_that_is_another_than_its_report_is_served_once(tmp_path: Path, said: Said) -> None:
    """As two starts at the same time leave it, of which one could not fuse: the last to write the model, and the last to write the report."""
    models = {}
    for options in (OPEN, False):
        with start(tmp_path / str(options), layerfuse=options) as engine:
            engine()
        (models[str(options)],) = (path for path in (tmp_path / str(options)).rglob("model") if path.is_file())
    models[str(OPEN)].write_bytes(models["False"].read_bytes())
    said.new()
    with (
        start(tmp_path / str(OPEN)) as engine,
        pytest.raises(CallsDifferError, match="was called 0 times in the profiling run; the graphs hold it 2 times"),
    ):
        engine()
    with start(tmp_path / str(OPEN)) as engine:
        assert apart(engine(), engine.uncompiled()) < ROUNDING
    assert FUSED in said.new()


def test_triton_keeps_its_kernels_in_one_folder_cold_and_warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every launch: those of the profiling run, and those for fewer tokens behind it. Inductor alone names it, as it compiles."""
    seen: dict[str, set[str | None]] = {}

    def look(*_: Any) -> None:
        seen[now].add(os.environ.get("TRITON_CACHE_DIR"))

    for now in ("cold", "warm", "own"):
        monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
        if now == "own":
            monkeypatch.setenv("TRITON_CACHE_DIR", "/of/the/user")
        seen[now] = set()
        before = loaded_from_cache()
        with (
            mock.patch("vllm_started.before_attention", look),
            mock.patch.object(plugin, "_warm_up", look),
            start(tmp_path, split=True) as engine,
        ):
            engine()
        assert loaded_from_cache() - before == (now != "cold")
    (folder,) = seen["cold"]
    assert seen == {"cold": {folder}, "warm": {folder}, "own": {"/of/the/user"}}
    # Where Inductor puts it, on the device of the model.
    (inductor,) = tmp_path.rglob("inductor_cache")
    assert folder == str(inductor / "triton" / "0")


def test_two_engines_with_one_path_write_two_reports(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines of one process, of one that still runs, and of one that does not."""
    path = tmp_path / "report.json"
    runs = {"mode": "NONE", "layerfuse": {**OPEN, "report": str(path)}}
    wrote = []
    with subprocess.Popen(["sleep", "60"]) as other:
        path.write_text(json.dumps({"pid": other.pid, "modules": {}}))
        for name in ("deepseek-v3", "gpt-oss-20b"):
            with mock.patch.object(process, "this", process.Process()):
                plugin.register()
                with started(name, tmp_path, **runs) as engine:
                    engine()
            wrote += [Path(line.removeprefix("in full: ")) for line in said.new() if line.startswith("in full")]
        other.kill()
    assert wrote == [tmp_path / "report-2.json", tmp_path / "report-3.json"]
    models = [list(json.loads(each.read_text())["modules"]) for each in wrote]
    assert models == [["DeepseekV3ForCausalLM"], ["GptOssForCausalLM"]]
    assert json.loads(path.read_text())["modules"] == {}
    with start(tmp_path, **runs) as engine:
        engine()
    assert f"in full: {path}" in said.new()


@pytest.mark.parametrize(
    ("reasons", "alike"),
    [
        (("the part mm_3 (4, 256) is not contiguous", "the part mm (4, 256) is not contiguous"), True),
        (("epsilon 0.001", "epsilon 0.002"), False),
        (("mm_3 gives (4, 256)", "mm_4 gives (4, 128)"), False),
    ],
)
def test_ranks_differ_where_their_reasons_do_and_not_in_the_numbers_of_nodes(
    reasons: tuple[str, str], alike: bool
) -> None:
    first, second = (
        RankReport(rank=rank, fused={}, missed={ADD: {"layers.0:input": why}}, called={ADD: 0})
        for rank, why in enumerate(reasons)
    )
    assert first.same_as(second) == alike


def test_misses_that_differ_in_the_names_of_nodes_are_one_line(tmp_path: Path) -> None:
    with start(tmp_path) as engine:
        _, compiled = waiting()
        sites = [decision.site for decision in compiled.plan.expected(ADD)]
        missed = {ADD: {site: f"mm_{number} is read twice" for number, site in enumerate(sites)}}
        said = lines_of(Outcome(plan=compiled.plan, ranks=(RankReport(rank=0, fused={}, missed=missed, called=None),)))
    assert f"{ADD}: 2 expected, 0 fused, 2 missed" in said
    assert "  missed: layers.0:post_attention and 1 more: mm_0 is read twice" in said
    assert engine is not None


def test_the_log_repeats_no_figures_of_another_machine(tmp_path: Path, said: Said) -> None:
    with start(tmp_path, layerfuse={"fusions": "+mla_dual_rms_norm"}) as engine:
        engine()
    (off,) = [line for line in said.new() if line.startswith(f"{ADD}: off at")]
    assert off.endswith("merges the add into the norm by itself: with the fusion a decode step took as long")
    (path,) = tmp_path.rglob("layerfuse-report.json")
    assert "H200" in path.read_text()


def test_linears_that_quantise_inside_of_flashinfers_kernel_are_said_at_load(tmp_path: Path, said: Said) -> None:
    """VLLM's own choice on Hopper where FlashInfer runs."""
    kernel = "flashinfer:FlashInferFp8DeepGEMMDynamicBlockScaledKernel"
    given = {"dtype": "bfloat16", "overrides": BLOCK_FP8}
    with fp8(kernel), start(tmp_path, layerfuse={"fusions": "+add_rms_norm"}, **given):
        _, compiled = waiting()
        assert not any(decision.fusion.endswith("_group_quant") for decision in compiled.plan.expected())
    (line,) = [line for line in said.new() if "FlashInfer" in line]
    assert re.match(r"layerfuse: \d+ linears of DeepseekV3ForCausalLM quantise inside of FlashInfer's op", line)
    with fp8("cutlass:CutlassFp8BlockScaledMMKernel"), start(tmp_path, layerfuse={"fusions": "all"}, **given):
        _, compiled = waiting()
        assert any(decision.fusion.endswith("_group_quant") for decision in compiled.plan.expected())
    assert not any("FlashInfer" in line for line in said.new())


def test_a_policy_that_changes_between_two_starts_is_followed_by_the_next(tmp_path: Path, said: Said) -> None:
    """Without options, planned for sm90. What was kept with one policy is not served with the other."""
    every, product = shipped(), "silu_mul_group_quant"
    fewer = Policy(measurement=tuple(row for row in every.measurement if product not in row.fusions))
    given = {"dtype": "bfloat16", "overrides": {**ONE_LAYER, **BLOCK_FP8}}
    for policy, products in ((every, 1), (fewer, 0), (every, 1)):
        said.clear()
        places = ("engines.defaults", "fusion.config", "fusion.planning")
        with contextlib.ExitStack() as stack:
            for place in places:
                stack.enter_context(mock.patch(f"layerfuse.{place}.shipped", lambda policy=policy: policy))
            stack.enter_context(fp8("cutlass:CutlassFp8BlockScaledMMKernel"))
            stack.enter_context(mock.patch.object(loading, "target_of", return_value=Target.named("sm90")))
            stack.enter_context(mock.patch.object(defaults, "arch_here", return_value="sm90"))
            stack.enter_context(start(tmp_path, layerfuse=None, **given))()
        found = [line for line in said.new() if "expected" in line]
        assert sum(line.startswith(f"{product}: 1 expected, 1 fused, 0 missed") for line in found) == products, found
        assert any(line.startswith(f"{ADD}_group_quant: 1 expected, 1 fused, 0 missed") for line in found), found
