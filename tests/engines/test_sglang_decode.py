"""MLA's decode chain inside SGLang: its own layers, cache and attention backend, built on a CPU, with `mla_decode` and without.

Plain torch stands for the attention kernel, for the kernel that writes the cache (`fa3_on_cpu`), and for those of fp8 linears, and for nothing else.
A whole engine is in `test_sglang_engine.py`.
Run by `make test-engines` in an environment of its own.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("sglang_layers")
from reports import Said
from sglang_fixtures import Kernels

from sglang_host import server_args, sglang_parallel  # isort: skip  (before sglang)
from sglang_layers import build_of  # isort: skip
import torch
from fa3_on_cpu import WRITES, attended, backend_of, written
from sglang.srt.layers.attention import flashattention_backend
from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend, FlashAttentionMetadata
from sglang.srt.layers.layer_boundary import get_attn_tp_context
from sglang.srt.layers.layer_boundary.adapters.attention import AttentionInputs
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.model_executor import cuda_graph_config
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.runner_utils import capture_mode
from sglang.srt.models import deepseek_v2
from sglang.srt.models.deepseek_common import attention_backend_handler as handler
from sglang.srt.models.deepseek_common import deepseek_weight_loader
from test_sglang_handover import DEEPSEEK, deepseek, fill
from test_sglang_plugin import runner_of
from torch import Tensor, nn
from whole_models import ENTRIES

from layerfuse import registry
from layerfuse.engines import handover, trial
from layerfuse.engines.native import native_methods
from layerfuse.engines.rank_report import rank_report_of
from layerfuse.engines.sglang import decode, decode_facts, facts, loading, plugin, products
from layerfuse.engines.sglang.loading import compiled_module_of
from layerfuse.engines.standing import AWAY, Standing
from layerfuse.fusion import FusionConfig, Target, plan
from layerfuse.fusion.backends import counting

NAME = "mla_decode"
ROOT = Path(__file__).parents[2]
LATENT, ROPE, SLOTS = 128, 64, 48
FIRST, LATER, IDS = [5, 20, 33], [9, 30], torch.arange(1)
PLAIN = {name: value for name, value in DEEPSEEK.items() if name != "quantization_config"}


@contextlib.contextmanager
def sglang() -> Iterator[None]:
    """SGLang's configuration and groups as one rank has them while a model runs."""
    with contextlib.ExitStack() as stack:
        given = stack.enter_context(server_args(PLAIN, tp=1, patch={}))
        stack.enter_context(sglang_parallel(given, 0))
        for name in WRITES:
            stack.enter_context(mock.patch.object(memory_pool, name, written))
        stack.enter_context(mock.patch.object(flashattention_backend, "flash_attn_with_kvcache", attended))
        stack.enter_context(torch.inference_mode())
        yield


def loaded(quantised: bool = True) -> nn.Module:
    """As SGLang makes it for a GPU: the absorbing weights are in bfloat16."""
    model: Any
    if quantised:
        model = deepseek()
    else:
        model, _ = build_of(PLAIN, tp=1, rank=0, patch={}, device="cpu")
        fill(model)
        for name, parameter in model.named_parameters():
            parameter.data /= 1 if "norm" in name else 8
    with mock.patch.object(deepseek_weight_loader, "_is_cuda", True), torch.no_grad():
        model.post_load_weights()
    return model


class Steps:
    """A cache and an attention backend of SGLang's, and steps that decode."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self.pool = MLATokenToKVPool(
            size=SLOTS, page_size=1, dtype=dtype, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, layer_num=2, device="cpu",
            enable_memory_saver=False,
        )  # fmt: skip
        self.fill()
        self.backend = backend_of(self.pool)

    def fill(self) -> None:
        """The cache with other sequences' entries in every slot."""
        generator = torch.Generator().manual_seed(3)
        for buffer in self.pool.kv_buffer:
            buffer.copy_(torch.randn(buffer.shape, generator=generator))

    def run(
        self, model: nn.Module, slots: list[int], mode: ForwardMode = ForwardMode.DECODE, each: int = 1, **more: Any
    ) -> Tensor:
        """The attention of every layer, in turn, for new tokens of each sequence, `each` of them in slots side by side, behind others in front of those."""
        count = len(slots)
        x = torch.randn(count, 256, generator=torch.Generator().manual_seed(count)).bfloat16()
        taken, lengths = torch.tensor(slots), torch.arange(1, count // each + 1) + 1 + each
        positions = (lengths[:, None] - each + torch.arange(each)).flatten()
        batch = ForwardBatch(
            forward_mode=mode, batch_size=len(lengths), input_ids=taken, req_pool_indices=lengths, seq_lens=lengths, out_cache_loc=taken,
            seq_lens_sum=int(lengths.sum()), positions=positions, **more,
        )  # fmt: skip
        last = taken.view(-1, each)[:, -1:]
        table = (last - lengths[:, None] + 1 + torch.arange(int(lengths.max()))) % SLOTS
        self.backend.forward_metadata = FlashAttentionMetadata(
            cache_seqlens_int32=lengths.int(),
            page_table=table,
            cu_seqlens_q=torch.arange(0, count + 1, each),
            max_seq_len_q=each,
        )
        context, found = get_attn_tp_context(), []
        with forward_context(ForwardContext(attn_backend=self.backend)):
            for layer in model.model.layers:
                mla = layer.self_attn
                context.set_attn_inputs(AttentionInputs(x, batch, mla.prepare_qkv_latent))
                x = mla(batch.positions, x, batch, None)
                found.append(x)
        return torch.stack(found)


def put_in(model: nn.Module, steps: Steps, *beside: str) -> Any:
    """As it is done when a model is loaded; its forward is a step of three sequences."""
    os.environ["LAYERFUSE_FUSIONS"] = ",".join((NAME, *beside))  # which `fresh` puts back
    model.forward = lambda *_: steps.run(model, FIRST)
    own, planned = decode.put_in, []
    with (
        mock.patch.object(loading, "_decodes_by", return_value="fa3"),
        mock.patch.object(
            products, "native_function", return_value=native_methods()
        ),  # which would find the plain torch
        mock.patch.object(decode, "put_in", lambda *given: (planned.append(given[0]), own(*given))),
    ):
        plugin._at_load(lambda _: None, runner_of(model))
    return planned[0]


def alike(found: Tensor, wanted: Tensor, ours: Steps, theirs: Steps, written_to: list[int]) -> None:
    """What attention gives, and every entry of the caches: those that were not to be written to as they were."""
    assert trial.why_apart([(wanted, found)]) is None
    others = [slot for slot in range(SLOTS + 1) if slot not in written_to]
    for one, other, first in zip(ours.pool.kv_buffer, theirs.pool.kv_buffer, Steps().pool.kv_buffer, strict=True):
        assert trial.why_apart([(other[written_to], one[written_to])]) is None
        assert not torch.equal(one[written_to], first[written_to])
        torch.testing.assert_close(one[others], first[others], rtol=0, atol=0)


DUAL, FEW = "mla_dual_rms_norm", "few_token_linear_group_quant"


@pytest.mark.parametrize(
    ("quantised", "beside"),
    [(True, ()), (True, (f"{DUAL}_group_quant",)), (True, (f"{DUAL}_group_quant", FEW)), (False, ()), (False, (DUAL,))],
)
def test_a_decode_step_is_two_launches_and_says_the_same(
    quantised: bool, beside: tuple[str, ...], kernels: Kernels, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:  # fmt: skip
    monkeypatch.setenv("LAYERFUSE_STRICT", "0" if FEW in beside else "1")  # nothing calls the other linears
    model, own = loaded(quantised), loaded(quantised)
    with sglang():
        ours, theirs = Steps(), Steps()
        compiled = put_in(model, ours, *beside)
        alike(model.forward(IDS), theirs.run(own, FIRST), ours, theirs, FIRST)
        report = rank_report_of(compiled, 0)
        write = "mla_norm_rope_cache" + "_group_quant" * quantised
        assert compiled.counted["mla_query_absorb"] == 2 and "mla_decode_group_quant" not in (report.called or {})
        assert (report.called or {})[NAME] == 2 and report.problems == ()
        assert report.fused[NAME] == ("model.layers.0.self_attn:decode", "model.layers.1.self_attn:decode")
        assert not {NAME, *beside[:1]} & report.missed.keys()
        assert f"{NAME}: 2 of 2 layers had decoded by the end of the first run" in report.notes
        assert decode.DECODED in said.messages()
        for each in (ours, theirs):
            each.fill()
        kernels.quantised = 0
        with counting() as calls:
            found = ours.run(model, LATER)
        assert (calls[write], calls["mla_query_absorb"]) == (2, 2)
        assert not [op for op in calls if "dual" in op]
        by_ours, kernels.quantised = kernels.quantised, 0
        alike(found, theirs.run(own, LATER), ours, theirs, LATER)
        # In front of both latents, of q_b_proj and of the output, where nothing of layerfuse's multiplies.
        assert (by_ours, kernels.quantised) == ((0 if FEW in beside else 4) * quantised, 6 * quantised)


def test_what_the_norm_in_front_has_quantised_still_waits_behind_the_trial_of_a_first_decode_step(
    kernels: Kernels,
) -> None:
    """SGLang captures its graphs with decode steps, so that the first run may be one: its latents are multiplied behind the trial, in which norms quantise too."""
    model, seen = loaded(True), []
    with sglang():
        put_in(model, Steps(), f"{DUAL}_group_quant")
        mla = model.model.layers[0].self_attn
        own = mla.prepare_qkv_latent

        def latents(*given: Any) -> Any:
            seen.append(handover._here.last)
            return own(*given)

        mla.prepare_qkv_latent = latents
        rows = torch.zeros(3, 256)
        handover.give("norm", (rows, rows, rows), None)
        model.forward(IDS)
    assert seen[0] is not None and seen[0].site == "norm"


@pytest.mark.parametrize("beside", [(), (f"{DUAL}_group_quant",)])
def test_once_sglang_has_captured_graphs_a_decode_step_that_it_launches_itself_is_its_own(
    beside: tuple[str, ...], kernels: Kernels, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    model, own, write = loaded(), loaded(), "mla_norm_rope_cache_group_quant"
    with sglang():
        ours, theirs = Steps(), Steps()
        put_in(model, ours, *beside)
        model.forward(IDS)
        monkeypatch.setattr(type(model.model), "forward", lambda _, slots: ours.run(model, slots))
        for _ in range(2):
            with mock.patch.object(capture_mode, "is_capture_mode", True), counting() as calls:
                model.model(LATER)
            assert (calls[write], calls["mla_query_absorb"]) == (2, 2)
            for each in (ours, theirs):
                each.fill()
            with counting() as calls:
                found = model.model(LATER)
            assert not calls
            assert torch.equal(found, theirs.run(own, LATER))
            # Where nothing of ours stands, nothing is looked for: such steps wait for the host.
            with mock.patch.object(Standing, "_look", side_effect=AssertionError):
                model.model(LATER)
    assert said.messages().count(AWAY % "SGLang") == 1


@pytest.mark.parametrize("spec_info", [None, object()])
def test_drafted_tokens_are_verified_so_too(spec_info: Any, kernels: Kernels) -> None:
    """Two of each sequence, by fa3's way for prompts: a step's second token attends to the first."""
    model, own, slots = loaded(), loaded(), [5, 6, 20, 21, 33, 34]
    with sglang():
        ours, theirs = Steps(), Steps()
        put_in(model, ours)
        model.forward(IDS)
        ours.fill()
        with counting() as calls:
            found = ours.run(model, slots, ForwardMode.TARGET_VERIFY, 2, spec_info=spec_info)
        assert (calls["mla_norm_rope_cache_group_quant"], calls["mla_query_absorb"]) == (2, 2)
        wanted = theirs.run(own, slots, ForwardMode.TARGET_VERIFY, 2, spec_info=spec_info)
        alike(found, wanted, ours, theirs, slots)


LEFT_STEPS: dict[str, tuple[ForwardMode, dict[str, Any], str | None]] = {
    "prompts": (
        ForwardMode.EXTEND,
        {"extend_prefix_lens_cpu": [1], "extend_seq_lens_cpu": [1], "seq_lens_cpu": [2]},
        None,
    ),
    "draft": (ForwardMode.DECODE, {"spec_info": object()}, "draft"),
    "draft extends": (ForwardMode.DRAFT_EXTEND_V2, {"spec_info": object()}, None),
}


@pytest.mark.parametrize("case", LEFT_STEPS)
@pytest.mark.parametrize("quantised", [True, False])
def test_what_is_no_decode_step_is_sglangs(quantised: bool, case: str, kernels: Kernels, said: Said) -> None:
    """Bit by bit, with one line for a decode step."""
    mode, more, why = LEFT_STEPS[case]
    model, own = loaded(quantised), loaded(quantised)
    absorbed = mock.patch.dict(handler.AttentionBackendRegistry._handlers, fa3=lambda *_: handler.AttnForwardMethod.MLA)
    with sglang(), absorbed:
        ours, theirs = Steps(), Steps()
        put_in(model, ours)
        with counting() as calls:
            found = ours.run(model, FIRST, mode, **more)
        assert not calls
        torch.testing.assert_close(found, theirs.run(own, FIRST, mode, **more), rtol=0, atol=0)
        for one, other in zip(ours.pool.kv_buffer, theirs.pool.kv_buffer, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    lines = [line for line in said.messages() if line.startswith(decode.STEP[:-2])]
    assert lines == ([] if why is None else [decode.STEP % decode_facts.WHY[why]])


def test_another_backend_verifies_by_its_own_way(kernels: Kernels, said: Said) -> None:
    model, own = loaded(), loaded()
    with sglang():
        ours, theirs = Steps(), Steps()
        for each in (ours, theirs):
            each.backend.prefill_attention_backend_str = "flashinfer"
        put_in(model, ours)
        found = ours.run(model, FIRST, ForwardMode.TARGET_VERIFY)
        torch.testing.assert_close(found, theirs.run(own, FIRST, ForwardMode.TARGET_VERIFY), rtol=0, atol=0)
    assert decode.STEP % decode_facts.WHY["verify"].format(backend="flashinfer") in said.messages()


@pytest.mark.parametrize("why", ["scaled", "slots", "captured"])
def test_a_step_that_is_not_as_usual_is_given_to_sglangs_method(why: str, kernels: Kernels, said: Said) -> None:
    """The arguments as they were."""
    model, seen = loaded(), []

    def own(self: Any, *given: Any) -> Any:
        seen.append(given)
        return type(self.mla).forward_absorb_prepare(self.mla, *given)

    with sglang(), mock.patch.object(decode.Layer, "own", own):
        steps = Steps()
        compiled = put_in(model, steps)
        if why == "captured":
            with mock.patch.object(trial, "possible", return_value=False):
                model.forward(IDS)
        else:
            model.forward(IDS)
            seen.clear()
            mla, rows = model.model.layers[0].self_attn, torch.zeros(2, 128 + LATENT + ROPE).bfloat16()
            lengths = torch.tensor([3, 4])
            batch = ForwardBatch(
                forward_mode=ForwardMode.DECODE, batch_size=2, input_ids=lengths, req_pool_indices=lengths, seq_lens=lengths,
                out_cache_loc=lengths[:1] if why == "slots" else lengths, seq_lens_sum=7, positions=lengths,
            )  # fmt: skip
            scaling = torch.ones(1) if why == "scaled" else None
            with forward_context(ForwardContext(attn_backend=steps.backend)), decode._given(rows):
                mla.forward_absorb_prepare(lengths, rows, batch, None, scaling, None)
            assert [each[4] for each in seen] == [scaling]
    assert seen and decode.STEP % decode_facts.WHY[why] in said.messages()
    assert {each.left for each in compiled.placements[NAME].layers.values()} == {None}, "the next one may be ours"


def left(kernels: Kernels, change: Callable[[nn.Module, Steps], Any], when: str) -> tuple[str, Any]:
    """Why SGLang's own way is gone where something was changed before ours stands there (`load`), before the first step or behind it."""
    model, own = loaded(), loaded()
    with sglang():
        ours, theirs = Steps(), Steps()
        if when == "load":
            change(model, ours), change(own, theirs)
        compiled = put_in(model, ours)
        if when == "first":
            change(model, ours), change(own, theirs)
        found = model.forward(IDS)
        if when == "later":
            theirs.run(own, FIRST)
            change(model, ours), change(own, theirs)
            found = ours.run(model, FIRST)
        torch.testing.assert_close(found, theirs.run(own, FIRST), rtol=0, atol=0)
        missed = dict(compiled.placements[NAME].missed)
        whys = {*missed.values()} or {each.why for each in compiled.placements[NAME].layers.values()}
        assert len(whys) == 1
        return str(whys.pop()), compiled


def of_every(*names: str) -> Callable[[nn.Module], list[Any]]:
    return lambda model: [
        operator.attrgetter(name)(layer.self_attn) if name else layer.self_attn
        for layer in model.model.layers
        for name in names
    ]


LAYERS, NORMS, ROPES = of_every(""), of_every("q_a_layernorm"), of_every("rotary_emb")


def doubled(self: Any, x: Tensor, *more: Any) -> Any:
    return 2 * type(self).forward(self, x, *more)


def _set(of: Callable[[nn.Module], list[Any]], **values: Any) -> Callable[[nn.Module, Steps], None]:
    def change(model: nn.Module, _: Steps) -> None:
        for each in of(model):
            for name, value in values.items():
                setattr(each, name, value.__get__(each) if isinstance(value, FunctionType) else value)

    return change


def _hooked(model: nn.Module, _: Steps) -> None:
    for each in NORMS(model):
        each.register_forward_hook(lambda module, args, result: 2 * result)


def _derived(cls: type) -> Any:
    return type("Another", (cls,), {"__module__": __name__})


def _another_class(model: nn.Module, _: Steps) -> None:
    for each in LAYERS(model):
        each.__class__ = _derived(type(each))


def _half(model: nn.Module, steps: Steps) -> None:
    steps.pool.dtype = torch.float16


def _another_pool(model: nn.Module, steps: Steps) -> None:
    steps.pool.__class__ = _derived(MLATokenToKVPool)


def _joined(model: nn.Module, steps: Steps) -> None:
    steps.backend.__class__ = _derived(FlashAttentionBackend)


def _other_write(model: nn.Module, steps: Steps) -> None:
    memory_pool.set_mla_kv_buffer_dcp_sharded_triton = lambda *given: written(*given[:2], 2 * given[2], given[3])


THEIRS = "is not SGLang's own: it is from test_sglang_decode"
CASES: dict[str, tuple[Callable[[nn.Module, Steps], Any], str, str]] = {
    "layer": (_another_class, "load", "test_sglang_decode.Another is not SGLang's DeepseekV2AttentionMLA"),
    "norm": (_set(NORMS, fp32_residual=True), "load", "does more than its spec says"),
    "norm patched": (_set(NORMS, forward=doubled), "load", THEIRS),
    "norm patched first": (_set(NORMS, forward=doubled), "first", THEIRS),
    "norm patched later": (_set(NORMS, forward=doubled), "later", THEIRS),
    "hook": (_hooked, "load", "would not be called"),
    "hook later": (_hooked, "later", "would not be called"),
    "cache": (_half, "first", "its cache is float16, and the query bfloat16"),
    "pool": (_another_pool, "first", "test_sglang_decode.Another is not SGLang's MLATokenToKVPool"),
    "backend": (_joined, "first", "takes the query joined"),
    "write": (_other_write, "first", "computes something else"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_not_as_expected_is_left_to_sglang(case: str, kernels: Kernels, said: Said) -> None:
    change, when, expected = CASES[case]
    why, compiled = left(kernels, change, when)
    assert expected in why
    assert any(why in line for line in said.messages())
    if when != "later":
        assert set(rank_report_of(compiled, 0).missed[NAME].values()) == {why}


def test_an_op_that_refuses_loses_nothing(kernels: Kernels, monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    """In the middle of a step: the entries are written again."""
    model, own = loaded(), loaded()
    with sglang():
        ours, theirs = Steps(), Steps()
        compiled = put_in(model, ours)
        alike(model.forward(IDS), theirs.run(own, FIRST), ours, theirs, FIRST)

        def refuses(*_: Any) -> Any:
            raise ValueError("not today")

        monkeypatch.setattr(decode, "_absorb", refuses)
        found = ours.run(model, LATER)
        monkeypatch.undo()
        assert trial.why_apart([(theirs.run(own, LATER), found)]) is None
        assert {each.left for each in compiled.placements[NAME].layers.values()} == {"not today"}
        assert decode.LEFT % "not today" in said.messages()
        with counting() as calls:
            torch.testing.assert_close(ours.run(model, FIRST), theirs.run(own, FIRST), rtol=2e-2, atol=2e-2)
        assert not calls


@pytest.mark.parametrize(
    ("backend", "arguments", "why"),
    [
        ("triton", {}, decode_facts.WHY["backend"].format(backend="triton")),
        ("trtllm_mla", {}, decode_facts.WHY["trtllm"].format(backend="trtllm_mla")),
        ("fa3", {"enable_lora": True}, decode_facts.WHY["lora"]),
        ("flashinfer", {"enable_two_batch_overlap": True}, decode_facts.WHY["overlap"]),
    ],
)
def test_an_engine_that_leaves_no_place_for_it_is_told_so(
    backend: str, arguments: dict[str, Any], why: str, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setenv("LAYERFUSE_FUSIONS", NAME)
    monkeypatch.setattr(loading, "_decodes_by", lambda: backend)
    compiled = compiled_module_of(runner_of(deepseek(), **arguments), plugin.options_here())
    assert compiled is not None
    assert compiled.unfound == {NAME: why}


@pytest.mark.parametrize(
    ("device", "backend", "captures"), [("cuda", "disabled", False), ("cuda", "full", True), ("cpu", "disabled", True)]
)
def test_an_engine_that_launches_decode_steps_one_by_one_is_known(
    device: str, backend: str, captures: bool, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    graphs = SimpleNamespace(cuda_graph_config=SimpleNamespace(decode=SimpleNamespace(backend=backend)))
    monkeypatch.setattr(cuda_graph_config, "get_exec", lambda: SimpleNamespace(graph=graphs))
    monkeypatch.setattr(loading, "device_of", lambda _: torch.device(device))
    compiled = compiled_module_of(runner_of(deepseek()), plugin.options_here())
    assert compiled is not None and compiled.engine is not None
    assert compiled.engine.captures is captures


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("deepseek-v3", None),
        ("kimi-k2", None),
        ("deepseek-v3.2", decode_facts.WHY["sparse"]),
        ("kimi-k3", "none of its columns is roped, and the ops turn some in every launch"),
        ("deepseek-v2-lite", "q_lora_rank is None: there is no query latent"),
    ],
)
def test_a_plan_says_where_it_can_stand(entry: str, why: str | None) -> None:
    model = registry.model(ENTRIES.get(entry, entry))
    made = plan(model.specs(), Target.named("sm90"), FusionConfig.parse(NAME), facts.engine_of(model.architectures))
    rows = [each for each in made.decisions if each.fusion == NAME]
    assert rows and {each.kind == "expected" for each in rows} == {why is None}
    assert why is None or {each.reason for each in rows} == {why}


def test_a_plan_for_a_model_whose_code_is_not_known_says_so() -> None:
    specs = registry.model("deepseek-v3").specs()
    made = plan(specs, Target.named("sm90"), FusionConfig.parse(NAME), facts.engine_of(["BailingMoeV3ForCausalLM"]))
    assert made.unfound([NAME]) == {NAME: decode_facts.WHY["class"]}


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"use_dsa": True}, "sparse"),
        ({"dcp_size": 2}, "split"),
        ({"prepare_attention_output_gate": len}, "gate"),
        ({"use_deep_gemm_bmm": True}, "weight"),
        ({"_kimi_split_gguf_kv_b": True}, "weight"),
        ({"w_kc": torch.zeros(4, 128, 128).to(torch.float8_e4m3fn)}, "weight"),
        ({"w_kc": None}, "weight"),
    ],
)
def test_a_layer_that_does_something_else_is_left(values: dict[str, Any], why: str) -> None:
    mla = loaded().model.layers[0].self_attn
    assert decode._why_not_layer(mla) is None
    vars(mla).update(values)
    assert str(decode._why_not_layer(mla)).startswith(decode_facts.WHY[why].split("{")[0])


@pytest.mark.parametrize("method", ["forward_absorb_prepare", "forward_absorb_core"])
def test_a_layer_whose_code_is_anothers_is_left(method: str, kernels: Kernels, said: Said) -> None:
    cls = deepseek_v2.DeepseekV2AttentionMLA
    held = getattr(cls, method)

    @functools.wraps(held)
    def theirs(self: Any, *given: Any, **named: Any) -> Any:
        return held(self, *given, **named)

    model, own = loaded(), loaded()
    with sglang(), mock.patch.object(cls, method, theirs):
        ours, theirs_ = Steps(), Steps()
        compiled = put_in(model, ours)
        torch.testing.assert_close(model.forward(IDS), theirs_.run(own, FIRST), rtol=0, atol=0)
        missed = set(compiled.placements[NAME].missed.values())
    (why,) = missed
    assert why.startswith("sglang.srt.models.deepseek_v2:DeepseekV2AttentionMLA") and "test_sglang_decode" in why
    assert decode.LEFT % why in said.messages()


def test_every_reason_is_in_the_docs() -> None:
    page = (ROOT / "docs" / "sglang.md").read_text()
    assert [why for why in decode_facts.WHY.values() if f"`{why}`" not in page] == []
