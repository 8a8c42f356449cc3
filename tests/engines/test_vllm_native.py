"""Beside packages that patch vLLM's own norms, functions and attention: theirs is what runs, and the report says whose it is.

Every test compares numbers with the same patched vLLM without layerfuse. Run by `make test-engines` in an environment of its own.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import pytest
import torch
from helpers import in_turn

pytest.importorskip("vllm_started")
import vllm
import vllm_paged
from reports import FIRST, Said, missed, told
from test_vllm_modules import GATED, HERE, dual
from test_vllm_plugin import ADD, DUAL, again
from torch import Tensor, nn
from vllm.distributed import parallel_state
from vllm.model_executor import custom_op
from vllm.model_executor.layers import layernorm, mla
from vllm.model_executor.layers.attention import mla_attention
from vllm.model_executor.layers.layernorm import RMSNorm, RMSNormGated
from vllm.model_executor.layers.rotary_embedding import deepseek_scaling_rope
from vllm.model_executor.models.deepseek_v2 import DeepseekV2Model
from vllm.v1.attention.backend import MLAAttentionImpl
from vllm_paged import paged
from vllm_started import ONE_LAYER, ROUNDING, TWO_LAYERS, apart, started

from layerfuse.engines import trial, whose
from layerfuse.engines.native import Look
from layerfuse.engines.vllm import decode, loading
from layerfuse.engines.vllm.config_probe import engine_for
from layerfuse.engines.vllm.decode_facts import taking
from layerfuse.engines.vllm.native import why_not_ops
from layerfuse.engines.vllm.seams import SEAMS
from layerfuse.fusion import FusionMissedError

NORMS = "vllm.model_executor.layers.layernorm"
ir = pytest.mark.skipif(importlib.util.find_spec("vllm.ir") is None, reason="this vLLM has no ops of its own for norms")
HOSTILE = __name__
"""The module of everything that is patched in here."""

Patch = Callable[[pytest.MonkeyPatch], None]


def louder(function: Any) -> Any:
    """As another package's: the same parameters, and a result 1.25 times as large."""

    @functools.wraps(function)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return _louder(function(*args, **kwargs))

    return patched


def _louder(result: Any) -> Any:
    return (result[0] * 1.25, *result[1:]) if isinstance(result, tuple) else result * 1.25


def on_class(owner: Any, name: str) -> Patch:
    return lambda patch: patch.setattr(owner, name, louder(getattr(owner, name)))


def in_place(owner: Any, name: str) -> Patch:
    """Of a method that writes its result to where it is told."""
    own = getattr(owner, name)

    @functools.wraps(own)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs).mul_(1.25)

    return lambda patch: patch.setattr(owner, name, patched)


def twice(patch: pytest.MonkeyPatch) -> None:
    """By two packages, the second of which calls the first."""
    for _ in range(2):
        on_class(RMSNorm, "forward_native")(patch)


def in_its_code(patch: pytest.MonkeyPatch) -> None:
    """The function stays, and its code is another."""

    def forward_native(self: Any, x: Tensor, residual: Tensor | None = None) -> Any:
        return _louder(_own(self, x, residual))  # noqa: F821 (of the namespace below)

    own = RMSNorm.forward_native
    namespace = {**vars(layernorm), "_own": types.FunctionType(own.__code__, own.__globals__), "_louder": _louder}
    patch.setattr(RMSNorm, "forward_native", types.FunctionType(forward_native.__code__, namespace))
    RMSNorm.forward_native.__defaults__ = (None,)


def hides_its_arguments(patch: pytest.MonkeyPatch) -> None:
    own = RMSNorm.forward_native
    patch.setattr(RMSNorm, "forward_native", lambda self, *args, **kwargs: _louder(own(self, *args, **kwargs)))


def on_every_instance(patch: pytest.MonkeyPatch) -> None:
    init = RMSNorm.__init__

    def with_forward(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.forward = louder(types.MethodType(custom_op.CustomOp.forward, self))

    patch.setattr(RMSNorm, "__init__", with_forward)


def under_its_name(patch: pytest.MonkeyPatch) -> None:
    """A class of another package's that says that it is vLLM's."""

    class Faked(RMSNorm):
        def forward_native(self, x: Tensor, residual: Tensor | None = None) -> Any:
            return _louder(super().forward_native(x, residual))

    Faked.__module__, Faked.__qualname__, Faked.__name__ = RMSNorm.__module__, "RMSNorm", "RMSNorm"
    patch.setitem(custom_op.op_registry_oot, "RMSNorm", Faked)


def as_dispatched(patch: pytest.MonkeyPatch) -> None:
    dispatch = RMSNorm.dispatch_forward
    patch.setattr(RMSNorm, "dispatch_forward", lambda self, **kwargs: louder(dispatch(self, **kwargs)))


def in_the_op(patch: pytest.MonkeyPatch) -> None:
    """vLLM 0.33 gives norms to an op of its own with several implementations."""
    ops = importlib.import_module("vllm.ir.ops")
    for op in (ops.rms_norm, ops.fused_add_rms_norm):
        impl = op.impls["native"]
        patch.setattr(impl, "impl_fn", louder(impl.impl_fn))


def by_a_provider(patch: pytest.MonkeyPatch) -> None:
    """An implementation of another package's, which vLLM is told to choose."""
    ops = importlib.import_module("vllm.ir.ops")
    for op in (ops.rms_norm, ops.fused_add_rms_norm):
        patch.setattr(op, "impls", dict(op.impls))
        op.register_impl("loud")(louder(op.impls["native"].impl_fn))
        patch.setattr(op, "_priority_impls", [op.impls["loud"]])


def in_place_of_a_module(patch: pytest.MonkeyPatch) -> None:
    """By a module of its own, whose op is another one only for more rows than are tried out."""
    ops, module = importlib.import_module("vllm.ir.ops"), types.ModuleType(HOSTILE)

    def fused_add_rms_norm(x: Tensor, *args: Any) -> Any:
        result = ops.fused_add_rms_norm(x, *args)
        return _louder(result) if len(x) > trial.ROWS else result

    namespace = types.SimpleNamespace(maybe_inplace=fused_add_rms_norm)
    module.ops = types.SimpleNamespace(rms_norm=ops.rms_norm, fused_add_rms_norm=namespace)
    patch.setattr(layernorm, "ir", module)


def numbers(
    name: str, path: Path, options: Any, mode: str = "NONE", loaded: Callable[[], None] = lambda: None, **config: Any
) -> list[Tensor]:
    given = {"overrides": TWO_LAYERS.get(name), **config}
    with started(name, path, layerfuse=options, mode=mode, **given) as engine:
        loaded()
        return [engine(tokens) for tokens in (6, 1)]


SHORT: dict[str, Any] = {"overrides": ONE_LAYER}
ONE_MIXTURE: dict[str, Any] = {"overrides": {"num_hidden_layers": 1, "layer_types": ["full_attention"]}}
NATIVE = f"{NORMS}:RMSNorm.forward_native is not vLLM's own: it is from {HOSTILE}"


ELSE = "what runs there computes something else: its results are off by "
NAMESPACE = f"{NORMS}:ir is not vLLM's own: it is from types"


class Loud:
    """A callable object in the place of a method."""

    def __init__(self, method: Any) -> None:
        self.method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _louder(self.method(*args, **kwargs))


def on_init(change: Callable[[Any], None]) -> Patch:
    init = RMSNorm.__init__

    def changed(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        change(self)

    return lambda patch: patch.setattr(RMSNorm, "__init__", changed)


def calls_an_object(norm: Any) -> None:
    norm._forward_method = Loud(norm._forward_method)


def leaves_the_weight_out(norm: Any) -> None:
    norm.pass_weight = norm.pass_weight_add = False
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)


def in_place_of_the_op(patch: pytest.MonkeyPatch) -> None:
    op = importlib.import_module("vllm.ir.ops").fused_add_rms_norm
    patch.setattr(op, "maybe_inplace", Loud(op.maybe_inplace))


def namespace_of_ops(patch: pytest.MonkeyPatch) -> None:
    ops = importlib.import_module("vllm.ir.ops")
    loud = {name: Loud(vars(ops)[name]) for name in ("rms_norm",)}
    loud["fused_add_rms_norm"] = types.SimpleNamespace(maybe_inplace=Loud(ops.fused_add_rms_norm.maybe_inplace))
    patch.setattr(layernorm, "ir", types.SimpleNamespace(ops=types.SimpleNamespace(**loud)))


@pytest.mark.parametrize(
    ("name", "fusion", "patched", "why"),
    [
        pytest.param("deepseek-v3", ADD, on_class(RMSNorm, "forward_native"), NATIVE, id="the method"),
        pytest.param("deepseek-v3", ADD, twice, NATIVE, id="the method, by two"),
        pytest.param("deepseek-v3", ADD, in_its_code, "RMSNorm.forward_native is not what vLLM's source says: its code is", id="its code alone"),
        pytest.param("deepseek-v3", ADD, under_its_name, NATIVE, id="a class of its name"),
        pytest.param("deepseek-v3", ADD, hides_its_arguments, f"from {HOSTILE}", id="other parameters"),
        pytest.param("deepseek-v3", ADD, on_class(RMSNorm, "forward"), ":RMSNorm.forward is not", id="the dispatch"),
        pytest.param(
            "gpt-oss-20b",
            ADD,
            on_class(custom_op.CustomOp, "forward"),
            f"vllm.model_executor.custom_op:CustomOp.forward is not vLLM's own: it is from {HOSTILE}",
            id="the dispatch of all",
        ),
        pytest.param("deepseek-v3", ADD, on_every_instance, "the forward of this RMSNorm is not", id="the instances"),
        pytest.param("deepseek-v3", ADD, as_dispatched, "_forward_method of this RMSNorm is not", id="what is chosen"),
        pytest.param("deepseek-v3", ADD, in_the_op, "the implementation 'native' of vllm.ir.ops:fused_add_rms_norm is not", marks=ir, id="the op"),
        pytest.param("deepseek-v3", ADD, by_a_provider, "the implementation 'loud' of vllm.ir.ops:fused_add_rms_norm is not", marks=ir, id="a provider"),
        pytest.param("deepseek-v3", ADD, in_place_of_a_module, f"{NORMS}:ir is not vLLM's own: it is from {HOSTILE}", marks=ir, id="a module"),
        pytest.param(
            "qwen3-next",
            GATED,
            lambda patch: patch.setattr(RMSNormGated, "forward_static", staticmethod(louder(RMSNormGated.forward_static))),
            f"{NORMS}:RMSNormGated.forward_static is not vLLM's own: it is from {HOSTILE}",
            id="what the method calls",
        ),
        pytest.param("deepseek-v3", DUAL, on_class(RMSNorm, "forward_native"), NATIVE, marks=dual, id="both norms"),
        pytest.param(
            "deepseek-v3",
            DUAL,
            on_class(mla, "fused_q_kv_rmsnorm") if DUAL in HERE else None,
            f"{mla.__name__}:fused_q_kv_rmsnorm is not vLLM's own: it is from {HOSTILE}",
            marks=dual,
            id="the function",
        ),
        # What no source tells shows in the numbers.
        pytest.param("deepseek-v3", ADD, on_init(calls_an_object), None, id="an object that is called"),
        pytest.param("deepseek-v3", DUAL, on_init(calls_an_object), None, marks=dual, id="objects that are called"),
        pytest.param("deepseek-v3", ADD, on_init(leaves_the_weight_out), None, marks=ir, id="a norm without its weight"),
        pytest.param("deepseek-v3", ADD, in_place_of_the_op, None, marks=ir, id="an object in place of an op"),
        pytest.param("deepseek-v3", ADD, namespace_of_ops, None, marks=ir, id="a namespace of ops"),
    ],
)  # fmt: skip
def test_a_patched_norm_stays_what_it_is_and_the_report_says_whose_it_is(
    name: str, fusion: str, patched: Patch, why: str | None, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`why`: None where no source tells whose it is."""
    patched(monkeypatch)
    theirs = numbers(name, tmp_path, False)
    said.clear()
    again(monkeypatch)
    got = numbers(name, tmp_path, {"fusions": [fusion]})
    assert all(torch.equal(*both) for both in zip(got, theirs, strict=True))
    (count,) = (line for line in said() if line.startswith(f"{fusion}: "))
    missing = [line for line in said() if line.startswith("missed: ")]
    if why is None:
        assert any(each in line for each in (ELSE, HOSTILE, NAMESPACE) for line in missing)
    else:
        assert ", 0 fused, " in count and any(why in line and HOSTILE in line for line in missing)
    with pytest.raises(FusionMissedError, match=why and HOSTILE):
        numbers(name, tmp_path, {"fusions": [fusion], "strict": True})


@pytest.mark.parametrize(
    ("fusion", "when"),
    [
        (ADD, "before the first call"),
        pytest.param(DUAL, "after it", marks=dual),
        pytest.param(ADD, "after it", marks=pytest.mark.thorough),
        pytest.param(DUAL, "before the first call", marks=[dual, pytest.mark.thorough]),
    ],
)
def test_a_norm_that_becomes_another_is_what_runs_from_then_on(
    fusion: str, when: str, tmp_path: Path, said: Said
) -> None:
    """By its class, which leaves the module where it is."""

    class Other(RMSNorm):
        def forward_native(self, x: Tensor, residual: Tensor | None = None) -> Any:
            return _louder(super().forward_native(x, residual))

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.forward_native(*args, **kwargs)

    results = []
    for options in (False, {"fusions": [fusion]}):
        said.clear()
        with started("deepseek-v3", tmp_path, layerfuse=options, mode="NONE") as engine:
            if when == "after it":
                engine()
            for module in engine.model.modules():
                if type(module) is RMSNorm:
                    module.__class__ = Other
            results.append(engine())
    assert apart(*results) < ROUNDING
    assert any("this RMSNorm is not vLLM's own" in line or ELSE in line for line in said())


# ---- what is put there after ours


@pytest.mark.parametrize("when", ["before the first call", "after it"])
@pytest.mark.parametrize(
    ("name", "fusion", "patched"),
    [
        pytest.param("deepseek-v3", ADD, on_class(custom_op.CustomOp, "forward"), id="a norm"),
        pytest.param("deepseek-v3", DUAL, on_class(custom_op.CustomOp, "forward"), marks=dual, id="both norms"),
    ],
)
def test_a_patch_that_comes_after_ours_is_what_runs_from_then_on(
    name: str, fusion: str, patched: Patch, when: str, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for options in (False, {"fusions": [fusion]}):
        said.clear()
        with started(name, tmp_path, layerfuse=options, mode="NONE") as engine, monkeypatch.context() as patch:
            before = engine() if when == "after it" else None
            patched(patch)
            results.append((before, engine()))
    (own, theirs), (ours, got) = results
    assert torch.equal(got, theirs)
    changed = f"layerfuse: a fused op is not called any more: vllm.model_executor.custom_op:CustomOp.forward is not vLLM's own: it is from {HOSTILE}"
    assert said().count(changed) == 1
    if own is not None:
        assert apart(ours, own) < ROUNDING < apart(ours, theirs)
        return
    assert any(line.startswith("missed: ") and HOSTILE in line for line in said())
    with (
        started(name, tmp_path, layerfuse={"fusions": [fusion], "strict": True}, mode="NONE") as engine,
        monkeypatch.context() as patch,
    ):
        patched(patch)
        with pytest.raises(FusionMissedError, match=HOSTILE):
            engine()


@pytest.mark.parametrize("when", ["before the first call", "after it"])
def test_a_forward_that_is_put_on_a_norm_after_ours_is_what_runs_and_is_told(
    when: str, tmp_path: Path, said: Said
) -> None:
    results = []
    for options in (False, {"fusions": [ADD]}):
        said.clear()
        with started("deepseek-v3", tmp_path, layerfuse=options, mode="NONE") as engine:
            if when == "after it":
                engine()
            for module in engine.model.modules():
                if type(module) is RMSNorm:
                    module.forward = louder(module._forward_method)
            results.append(engine())
            engine()
    assert torch.equal(*results)
    other = f"another forward was put where the fused op stands, from {HOSTILE}"
    if when == "after it":
        assert said().count(f"layerfuse: {other}, which calls the op or does not") == 1
    else:
        assert any(line.startswith("missed: ") and other in line for line in said())


def test_an_epsilon_that_is_changed_after_ours_is_the_one_that_counts(tmp_path: Path, said: Said) -> None:
    results = []
    for options in (False, {"fusions": [ADD]}):
        with started("deepseek-v3", tmp_path, layerfuse=options, mode="NONE") as engine:
            first = engine()
            engine.model.model.layers[1].input_layernorm.variance_epsilon = 0.5
            results.append((first, engine()))
    (first, then), (ours, got) = results
    assert apart(ours, first) < ROUNDING and apart(got, then) < ROUNDING < apart(then, first)
    changed = "variance_epsilon of this RMSNorm was 1e-06, and is 0.5"
    assert f"layerfuse: a fused op is not called any more: {changed}" in said()


@dual
def test_a_hook_on_a_norm_that_is_not_called_keeps_both_norms_to_vllm(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    init = DeepseekV2Model.__init__

    def with_hook(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.layers[1].self_attn.q_a_layernorm.register_forward_hook(lambda _, __, result: _louder(result))

    monkeypatch.setattr(DeepseekV2Model, "__init__", with_hook)
    theirs = numbers("deepseek-v3", tmp_path, False)
    got = numbers("deepseek-v3", tmp_path, {"fusions": [DUAL]})
    assert max(apart(*both) for both in zip(got, theirs, strict=True)) < ROUNDING
    assert missed(DUAL, 2, 1, FIRST) in said()
    why = f"a hook of this RMSNorm, from {HOSTILE}, would not be called"
    assert f"missed: model.layers.1.self_attn:latents: {why}" in said()


# ---- in a graph is what was traced

OP_OF = "of vllm.ir.ops:fused_add_rms_norm is not vLLM's own: it is from "


@pytest.mark.parametrize(
    ("patched", "why"),
    [
        pytest.param(on_class(RMSNorm, "forward_native"), None, id="a method", marks=pytest.mark.thorough),
        pytest.param(on_class(custom_op.CustomOp, "forward"), None, id="the dispatch"),
        # A graph holds the op, and not what computes it.
        pytest.param(in_the_op, OP_OF, id="an op", marks=ir),
        pytest.param(by_a_provider, OP_OF, id="a provider", marks=[ir, pytest.mark.thorough]),
    ],
)
def test_a_compiled_model_holds_what_a_patched_norm_computes(
    patched: Patch, why: str | None, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched(monkeypatch)
    theirs = numbers("deepseek-v3", tmp_path, False, **SHORT)
    got = numbers("deepseek-v3", tmp_path, {"fusions": [ADD, DUAL]}, "VLLM_COMPILE", **SHORT)
    assert max(apart(*both) for both in zip(got, theirs, strict=True)) < ROUNDING
    assert why is None or any(ADD in line and why in line and HOSTILE in line for line in said())


@pytest.mark.parametrize("later", [False, True])
def test_a_patched_all_reduce_stays_in_the_graph(
    later: bool, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    reduced, patched = "all_reduce_add_rms_norm", on_class(parallel_state.GroupCoordinator, "_all_reduce_out_place")
    with monkeypatch.context() as patch:
        patched(patch)
        theirs = numbers("gpt-oss-20b", tmp_path, False, tp=2, **ONE_MIXTURE)
    if not later:
        patched(monkeypatch)
    loaded = functools.partial(patched, monkeypatch) if later else lambda: None
    got = numbers("gpt-oss-20b", tmp_path, {"fusions": [reduced, ADD]}, "VLLM_COMPILE", loaded, tp=2, **ONE_MIXTURE)
    assert max(apart(*both) for both in zip(got, theirs, strict=True)) < ROUNDING
    why = f"GroupCoordinator._all_reduce_out_place is not vLLM's own: it is from {HOSTILE}"
    assert any(("missed: " if later else reduced) in line and why in line for line in said())


# ---- all that mla_decode stands for

DECODE = {"fusions": ["mla_decode"]}
STEPS = (((0, 5),), ((0, 1), (1, 7)), ((0, 1), (1, 1)), ((0, 1), (1, 1)))


def steps(path: Path, options: Any, mode: str, meanwhile: Callable[[], None] = lambda: None) -> list[Tensor]:
    with paged("deepseek-v3", path, layerfuse=options, mode=mode, **SHORT) as engine:
        meanwhile()
        return [engine.step(requests).float() for requests in STEPS]


def reads_louder(name: str) -> Patch:
    """What writes the cache, writes 1.25 times the latents."""

    def patched(patch: pytest.MonkeyPatch) -> None:
        owner: Any = importlib.import_module("vllm._custom_ops") if name == "concat_and_cache_mla" else MLAAttentionImpl
        own, latents = getattr(owner, name), int(owner is MLAAttentionImpl)

        @functools.wraps(own)
        def louder_cache(*args: Any, **kwargs: Any) -> Any:
            return own(*args[:latents], args[latents] * 1.25, *args[latents + 1 :], **kwargs)

        patch.setattr(owner, name, louder_cache)

    return patched


ROPE = deepseek_scaling_rope.DeepseekScalingRotaryEmbedding


def module_of_ops(patch: pytest.MonkeyPatch) -> None:
    """What the cache write takes its op from is another as a whole."""
    own = importlib.import_module("vllm._custom_ops").concat_and_cache_mla

    def concat_and_cache_mla(latents: Tensor, *args: Any, **kwargs: Any) -> None:
        own(latents * 1.25, *args, **kwargs)

    ops = types.SimpleNamespace(concat_and_cache_mla=concat_and_cache_mla)
    patch.setattr(vllm, "_custom_ops", ops)


def call_of_every_module(patch: pytest.MonkeyPatch) -> None:
    own = nn.Module._call_impl

    def _call_impl(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = own(self, *args, **kwargs)
        return _louder(result) if isinstance(self, RMSNorm) and self.hidden_size < 128 else result

    patch.setattr(nn.Module, "_call_impl", _call_impl)


@pytest.mark.parametrize(
    ("patched", "what", "mode"),
    [
        (on_class(RMSNorm, "forward_native"), "RMSNorm.forward_native", "NONE"),
        (on_class(custom_op.CustomOp, "forward"), "CustomOp.forward", "NONE"),
        (on_class(ROPE, "forward_native"), "RotaryEmbedding.forward_native", "NONE"),
        (on_class(mla.MultiHeadLatentAttentionWrapper, "forward"), "MultiHeadLatentAttentionWrapper.forward", "NONE"),
        (on_class(vllm_paged, "OWN"), "MLAAttention.forward", "NONE"),
        (in_place(mla_attention.MLAAttention, "forward_impl"), "MLAAttention.forward_impl", "NONE"),
        (reads_louder("do_kv_cache_update"), "MLAAttentionImpl.do_kv_cache_update", "VLLM_COMPILE"),
        (reads_louder("concat_and_cache_mla"), "concat_and_cache_mla", "NONE"),
        (call_of_every_module, "_call_impl is not vLLM's own: it is from", "NONE"),
        # What no source tells shows in the numbers.
        pytest.param(namespace_of_ops, NAMESPACE, "NONE", marks=ir),
        (module_of_ops, ELSE, "NONE"),
    ],
)
def test_all_that_mla_decode_stands_for_is_vllms_own_or_it_does_not_stand(
    patched: Patch, what: str, mode: str, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = steps(tmp_path / "own", False, "NONE") if mode == "NONE" else None
    patched(monkeypatch)
    theirs = steps(tmp_path / "theirs", False, mode)
    said.clear()
    again(monkeypatch)
    got = steps(tmp_path / "ours", DECODE, mode)
    assert all(torch.equal(*both) for both in zip(got, theirs, strict=True))
    assert own is None or not all(apart(*both) < ROUNDING for both in zip(own, theirs, strict=True))
    (warning,) = (line for line in said() if "leaves vLLM's MLA layers alone" in line)
    assert what in warning and (HOSTILE in warning or what in (NAMESPACE, ELSE))


@pytest.mark.parametrize(("traced", "mode"), in_turn([True, False], ["NONE", "VLLM_COMPILE"]))
def test_a_patch_that_comes_after_mla_decode_is_what_runs_as_it_would_without(
    traced: bool, mode: str, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What vLLM has traced stays what it is, with layerfuse or without; what it calls at every step is what stands there."""
    results = []
    for options in (False, DECODE):
        with monkeypatch.context() as patch:
            patched = (
                on_class(custom_op.CustomOp, "forward")
                if traced
                else in_place(mla_attention.MLAAttention, "forward_impl")
            )
            results.append(steps(tmp_path / str(len(results)), options, mode, functools.partial(patched, patch)))
    theirs, got = results
    for a, b in zip(got, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    if mode == "NONE" or not traced:
        assert any("vLLM's own way is taken from now on: " in line and HOSTILE in line for line in said())


@pytest.mark.parametrize("mode", ["VLLM_COMPILE", pytest.param("NONE", marks=dual)])
def test_what_mla_decode_would_have_taken_is_fused_where_it_steps_aside_at_the_first_call(
    mode: str, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for options, how in ((False, "NONE"), ({"fusions": ["mla_decode", DUAL]}, mode)):
        with (
            monkeypatch.context() as patch,
            paged("deepseek-v3", tmp_path, layerfuse=options, profile=False, mode=how, **SHORT) as engine,
        ):
            in_place(mla_attention.MLAAttention, "forward_impl")(patch)
            engine.engine()
            engine.allocate()
            results.append([engine.step(requests).float() for requests in STEPS])
    for got, theirs in zip(*results, strict=True):
        torch.testing.assert_close(got, theirs, rtol=1e-4, atol=1e-5)
    lines, run = said(), "first run" if mode == "NONE" else "profiling run"
    assert missed("mla_decode", 1, 0, run) in lines
    assert told(DUAL, 1, run) in lines


@pytest.mark.parametrize("mode", ["VLLM_COMPILE", "NONE"])
def test_a_strict_engine_says_what_mla_decode_steps_aside_for(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"fusions": ["mla_decode"], "strict": True}
    with paged("deepseek-v3", tmp_path, layerfuse=options, profile=False, mode=mode, **SHORT) as engine:
        in_place(mla_attention.MLAAttention, "forward_impl")(monkeypatch)
        with pytest.raises(FusionMissedError, match=HOSTILE):
            engine.engine()


@pytest.mark.parametrize("mode", [pytest.param("VLLM_COMPILE", marks=pytest.mark.thorough), "NONE"])
def test_what_has_no_site_without_mla_decode_is_told_where_it_steps_aside(
    mode: str, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"fusions": ["mla_decode", DUAL]}
    why = {DUAL: "not here"}
    with (
        mock.patch.object(loading, "engine_for", lambda *given: attrs.evolve(engine_for(*given), refuses=why)),
        mock.patch.object(
            decode, "taking", lambda plan: taking(attrs.evolve(plan, engine=attrs.evolve(plan.engine, refuses={})))
        ),
        paged("deepseek-v3", tmp_path, layerfuse=options, profile=False, mode=mode, **SHORT) as engine,
    ):
        told = f"layerfuse: {DUAL} is asked for, and has no site in DeepseekV3ForCausalLM: not here"
        assert told not in said()
        in_place(mla_attention.MLAAttention, "forward_impl")(monkeypatch)
        engine.engine()
        assert told in said()
    (path,) = tmp_path.rglob("layerfuse-report.json")
    (module,) = json.loads(path.read_text())["modules"].values()
    assert module["unfound"] == why


@pytest.mark.parametrize(("fusion", "where"), [(ADD, "input_layernorm"), ("mla_decode", "self_attn")])
def test_what_another_module_takes_the_place_of_after_the_first_call_is_told(
    fusion: str, where: str, tmp_path: Path, said: Said
) -> None:
    def anew(module: nn.Module) -> nn.Module:
        """As it was made: without what stands in it."""
        copied = copy.copy(module)
        copied._modules = {name: anew(child) for name, child in module._modules.items()}
        vars(copied).pop("forward", None)
        return copied

    with paged("deepseek-v3", tmp_path, layerfuse={"fusions": [fusion]}, mode="NONE") as engine:
        layers = engine.engine.model.model.layers
        told = "layerfuse: a fused op is not called any more: another module stands at "
        engine.step(STEPS[0])
        layers[1] = copy.copy(layers[1])  # with what it holds
        engine.step(STEPS[1])
        assert not any(line.startswith(told) for line in said())
        layers[1].set_submodule(where, anew(layers[1].get_submodule(where)))
        layers[2] = anew(layers[2])
        engine.step(STEPS[2])
        engine.step(STEPS[3])
    for layer in ("model.layers.1", "model.layers.2"):
        assert sum(line.startswith(f"{told}{layer}.{where}") for line in said()) == 1


# ---- what is put there later, and taken away


_own_forward = types.FunctionType(RMSNorm.forward_native.__code__, vars(layernorm), "own", (None,))


def in_the_same_function(patch: pytest.MonkeyPatch, _: Any = None) -> None:
    """The function stays where it is, and its code is another."""

    def forward_native(self: Any, x: Tensor, residual: Tensor | None = None) -> Any:
        import test_vllm_native as here

        return here._louder(here._own_forward(self, x, residual))

    patch.setattr(RMSNorm.forward_native, "__code__", forward_native.__code__)


def epsilon_of_the_class(patch: pytest.MonkeyPatch, _: Any) -> None:
    """What the instances hold stays, and their class answers."""
    patch.setattr(RMSNorm, "variance_epsilon", property(lambda _: 1.0), raising=False)


def on_an_instance(patch: pytest.MonkeyPatch, model: Any) -> None:
    """What its class has, where nothing was."""
    for module in model.modules():
        if isinstance(module, mla_attention.MLAAttention):
            own = module.forward_impl
            patch.setitem(vars(module), "forward_impl", lambda *a, own=own, **k: own(*a, **k).mul_(1.25))
        if isinstance(module, RMSNormGated):
            patch.setitem(vars(module), "forward_static", louder(module.forward_static))


def other_norms(patch: pytest.MonkeyPatch, model: Any) -> None:
    _other(patch, model, "kv_a_layernorm", lambda norm: norm.weight.data)


def other_ropes(patch: pytest.MonkeyPatch, model: Any) -> None:
    _other(patch, model, "rotary_emb", lambda rope: rope.cos_sin_cache)


def _other(patch: pytest.MonkeyPatch, model: Any, name: str, what: Callable[[Any], Tensor]) -> None:
    """Another module of the same class in the place of one, and what it computes with is 1.25 times as large."""
    for module in model.modules():
        if isinstance(module, mla.MultiHeadLatentAttentionWrapper):
            made = copy.deepcopy(module._modules[name])
            what(made).mul_(1.25)
            patch.setitem(module._modules, name, made)


Later = Callable[[pytest.MonkeyPatch, Any], None]
IR: dict[str, Later] = {
    "a provider": lambda patch, _: by_a_provider(patch),
    "a namespace": lambda patch, _: namespace_of_ops(patch),
}
LATER: dict[str, Later] = {
    **(IR if importlib.util.find_spec("vllm.ir") else {}),
    "code": in_the_same_function,
}
MLA_LATER: dict[str, Later] = {
    **LATER,
    "a module of ops": lambda patch, _: module_of_ops(patch),
    "the call": lambda patch, _: call_of_every_module(patch),
    "an instance": on_an_instance,
    "norms": other_norms,
    "ropes": other_ropes,
}


def wrong(results: list[dict[str, tuple[Tensor, Tensor]]]) -> list[str]:
    """The patches without which or with which ours is not what vLLM's own is, or that change nothing."""
    own, ours = results
    return [
        name
        for name, (plain, patched) in own.items()
        if not (apart(ours[name][0], plain) < ROUNDING and apart(ours[name][1], patched) < ROUNDING)
        or apart(patched, plain) < ROUNDING
    ]


@pytest.mark.parametrize(
    ("name", "fusion", "patches"),
    [
        ("deepseek-v3", ADD, {**LATER, "an epsilon": epsilon_of_the_class}),
        pytest.param("deepseek-v3", DUAL, LATER, marks=dual),
        ("qwen3-next", GATED, {"an instance": on_an_instance}),
    ],
)
def test_what_is_put_there_after_the_first_call_is_what_runs_while_it_is_there(
    name: str, fusion: str, patches: dict[str, Later], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[dict[str, tuple[Tensor, Tensor]]] = []
    for options in (False, {"fusions": [fusion]}):
        results.append({})
        with started(name, tmp_path, layerfuse=options, mode="NONE") as engine:
            for each, patched in patches.items():
                plain = engine()
                with monkeypatch.context() as patch:
                    patched(patch, engine.model)
                    results[-1][each] = plain, engine()
    assert wrong(results) == []


def test_what_is_put_there_after_mla_decode_is_what_runs_while_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[dict[str, tuple[Tensor, Tensor]]] = []
    for options in (False, DECODE):
        results.append({})
        with paged("deepseek-v3", tmp_path, layerfuse=options, mode="NONE") as engine:
            for requests in STEPS[:2]:
                engine.step(requests)
            for name, patched in MLA_LATER.items():
                before = dict(engine.lengths)
                plain = engine.step(STEPS[2])
                engine.lengths.update(before)
                with monkeypatch.context() as patch:
                    patched(patch, engine.engine.model)
                    results[-1][name] = plain, engine.step(STEPS[2])
    assert wrong(results) == []


@pytest.mark.parametrize(
    ("name", "when"),
    [
        pytest.param("a provider", "before the first call", marks=ir),
        pytest.param("ropes", "before the first call", marks=pytest.mark.thorough),
        ("norms", "after it"),
    ],
)
def test_a_compiled_model_computes_what_vllms_own_would_with_what_is_put_there_later(
    name: str, when: str, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for options in (False, {"fusions": ["mla_decode", ADD]}):
        # What is there before a model is traced is in it, and what comes later may not be.
        mode = "VLLM_COMPILE" if options or when == "after it" else "NONE"
        path = tmp_path / str(len(results))
        with (
            paged("deepseek-v3", path, layerfuse=options, profile=False, mode=mode, **SHORT) as engine,
            monkeypatch.context() as patch,
        ):
            if when == "after it":
                engine.engine()
            MLA_LATER[name](patch, engine.engine.model)
            engine.engine()
            engine.allocate()
            results.append([engine.step(requests) for requests in STEPS])
    theirs, got = results
    assert max(apart(*both) for both in zip(got, theirs, strict=True)) < ROUNDING
    lines = said()
    if when == "before the first call":
        assert any("leaves vLLM's MLA layers alone: " in line for line in lines)
    if name == "a provider":
        assert any("missed: " in line and "'loud' of vllm.ir.ops:fused_add_rms_norm" in line for line in lines)


# ---- an untouched vLLM is all its own


def test_every_way_that_vllm_dispatches_a_norm_is_its_own() -> None:
    """Those of GPUs too, which no CPU takes."""
    seen = set()
    for seam in SEAMS:
        try:
            importlib.import_module(seam.hook.module)
        except ModuleNotFoundError as error:
            # MiniMax-M3's asks for torchvision; its norms are looked at where its models are built (test_vllm_uncompiled). Some are not in 0.26.
            assert error.name is not None and error.name.startswith(("torchvision", "vllm.models"))
            continue
        seen.add(seam.key[1])
        cls = getattr(importlib.import_module(seam.hook.module), seam.key[1])
        ways = [name for name in dir(cls) if name.startswith("forward")]
        assert "forward" in ways
        for name in ways:
            look = Look()
            look.attribute(cls, name)
            assert look.held
    assert seen >= {"RMSNorm", "GemmaRMSNorm", "RMSNormGated", "SiluAndMul"}


@ir
def test_every_implementation_of_vllms_ops_for_norms_is_its_own() -> None:
    ops = importlib.import_module("vllm.ir.ops")
    for op in (ops.rms_norm, ops.fused_add_rms_norm):
        assert {"native", "vllm_c", "aiter"} <= {*op.impls}
        for impl in op.impls.values():
            Look().function(impl.impl_fn, impl.provider)
    assert why_not_ops() is None


NORMS = [
    ("deepseek-v3", ADD, "model.layers.1.input_layernorm"),
    ("qwen3-next", GATED, "model.layers.0.linear_attn.norm"),
]


@pytest.mark.parametrize(("norm_of", "when"), in_turn(NORMS, ["before the first call", "after it"]))
def test_a_copy_of_a_norm_runs_with_its_own_weight(norm_of: tuple[str, str, str], when: str, tmp_path: Path) -> None:
    model, fusion, path = norm_of
    results = []
    for options in (False, {"fusions": [fusion]}):
        with started(model, tmp_path / str(bool(options)), layerfuse=options, mode="NONE") as engine:
            if when == "after it":
                engine()
            norm = copy.deepcopy(engine.model.get_submodule(path))
            norm.weight.data.mul_(1.25)
            owner, _, name = path.rpartition(".")
            setattr(engine.model.get_submodule(owner), name, norm)
            results.append(engine())
    assert apart(*results) < ROUNDING


def test_what_a_file_imports_is_read_from_its_code() -> None:
    source = """
from __future__ import annotations
import os, json.decoder
import json.encoder as encoder
from a.b import c, d as e
from . import near
from .. import far as further
from a import *
try:
    import g as h
except ImportError:
    h = None
def inside():
    global later
    import own
    from a import later
import z as later
"""
    assert [*whose.imports_of(compile(source, "file", "exec"))] == [
        ("annotations", "__future__.annotations"),
        *[("os", "os"), ("json", "json"), ("encoder", "json.encoder"), ("c", "a.b.c"), ("e", "a.b.d"), ("h", "g")],
        ("later", "z"),
    ]
    assert not [*whose.imports_of(None)]
