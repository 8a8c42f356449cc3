"""Models that vLLM does not compile: fused ops stand in its own layers, are counted in its first run, and give its numbers.

Run by `make test-engines` in an environment of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

pytest.importorskip("vllm_started")
import vllm
from helpers import shown
from reports import FIRST, Said, missed, told
from test_vllm_host_bound import calls_of
from test_vllm_plugin import ADD, DUAL, runs_on
from torch import Tensor
from vllm.model_executor import custom_op
from vllm.model_executor.layers import mla
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm_host import import_model
from vllm_started import KDA, ONE_LAYER, ROUNDING, apart, as_near, engine_config, started

from layerfuse.engines import process
from layerfuse.engines.hooks import check_source
from layerfuse.engines.vllm import seams
from layerfuse.engines.vllm.host import VLLM
from layerfuse.engines.vllm.releases import RELEASES
from layerfuse.engines.vllm.seams import SEAMS
from layerfuse.fusion import FusionMissedError, backends
from layerfuse.fusion.backends import counting

GATED = "gated_rms_norm"
REDUCED = "all_reduce_add_rms_norm"
HERE = RELEASES[".".join(vllm.__version__.split(".")[:2])].seams
"""The fusions that this vLLM has a place for; the record is held to the source below."""
kimi = pytest.mark.skipif(DUAL not in HERE, reason="this vLLM compiles Kimi-Linear, in other code")
dual = pytest.mark.skipif(DUAL not in HERE, reason="this vLLM has no switch for both latent norms")
STRICT = {"fusions": [ADD], "strict": True}


def strict(fused: dict[str, int]) -> dict[str, Any]:
    """Nothing but what has a site is asked for."""
    return {"fusions": list(fused), "strict": True}


def counts(lines: list[str]) -> list[str]:
    return [line for line in lines if "expected" in line]


MODE = "vLLM's compilation mode is NONE here; fusions need VLLM_COMPILE"
BREAKABLE = "vLLM runs KimiLinearForCausalLM in breakable CUDA graphs by default, and does not compile it"


@pytest.mark.parametrize(
    ("name", "fused", "why"),
    [
        ("deepseek-v3", {ADD: 6, DUAL: 3}, MODE),
        ("kimi-k2", {ADD: 6, DUAL: 3}, MODE),
        ("gpt-oss-20b", {ADD: 8}, MODE),
        ("qwen3-next", {ADD: 8, GATED: 3}, MODE),  # zero-centred norms
        pytest.param("kimi-linear", {ADD: 7, GATED: 3}, BREAKABLE, marks=kimi),  # its final norm stands apart
    ],
)
def test_every_site_of_a_model_that_is_not_compiled_is_fused_called_and_gives_vllms_numbers(
    name: str, fused: dict[str, int], why: str, tmp_path: Path, said: Said
) -> None:
    with started(name, tmp_path, layerfuse=False, mode="NONE") as engine:
        plain = [engine(tokens) for tokens in (6, 1, 33)]
    assert said() == ["layerfuse: all fusions are switched off"]
    said.clear()
    fused = {fusion: sites for fusion, sites in fused.items() if fusion in HERE}
    with started(name, tmp_path, layerfuse=strict(fused), mode="NONE") as engine:
        got = [engine(tokens) for tokens in (6, 1, 33)]
        assert max(apart(*both) for both in zip(got, plain, strict=True)) < ROUNDING
    lines = said()
    assert counts(lines) == [told(fusion, sites, FIRST) for fusion, sites in fused.items()]
    assert lines.count(f"the fused ops stand in the model's modules: {why}") == 1
    (path,) = tmp_path.rglob("layerfuse-report.json")
    ((model, module),) = json.loads(path.read_text())["modules"].items()
    assert model == type(engine.model).__name__
    assert sum(row["outcome"] == "fused" for row in module["sites"]) == sum(fused.values())


@pytest.mark.parametrize(("up_to", "own"), [(None, {33, 12}), (0, set()), (20, {12})])
def test_a_step_of_more_tokens_than_vllm_captures_is_vllms_own_and_costs_the_host_no_more(
    up_to: int | None, own: set[int], tmp_path: Path, said: Said
) -> None:
    with started("deepseek-v3", tmp_path, layerfuse=False, mode="NONE", captured=8) as engine:
        plain, calls = {}, {}
        for tokens in (33, 12):
            plain[tokens] = engine(tokens)
            calls[tokens] = min(calls_of(engine, tokens) for _ in range(3))
    options = {**STRICT, **({} if up_to is None else {"host_bound": up_to})}
    with started("deepseek-v3", tmp_path, layerfuse=options, mode="NONE", captured=8) as engine:
        engine(33)  # the first run is looked at, whatever its size
        for tokens in (33, 8, 12, 12, 1, 33):
            with counting() as counted:
                found = engine(tokens)
            assert counted == ({} if tokens in own else {ADD: 6}), tokens
            if tokens in own:
                assert torch.equal(found, plain[tokens])
        for tokens in own:
            # The model's hook and that of the module around its layers each ask how many tokens there are.
            assert min(calls_of(engine, tokens) for _ in range(3)) <= calls[tokens] + 40
    assert sum("are vLLM's own from now on" in line for line in said()) == bool(own)
    steps = {None: "more than 8 tokens", 20: "9 to 20 tokens"}
    assert [line for line in said() if "own modules run" in line] == [
        f"in steps of {said_of} vLLM's own modules run" for each, said_of in steps.items() if each == up_to and own
    ]


@pytest.mark.parametrize(("captured", "launches"), [(0, 4), (8, 2)])
def test_what_other_numbers_of_tokens_launch_is_launched_behind_the_first_run(
    captured: int, launches: int, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "steps", lambda *_: (2, 10, 20, 100))
    with started("deepseek-v3", tmp_path, layerfuse=STRICT, mode="NONE", captured=captured) as engine:
        engine(33)
    # For 1, 3, 11 and 21 tokens, of which a step of more than 8 that is captured never launches the last two.
    (line,) = [each for each in said() if "launches for other numbers of tokens" in each]
    assert line.startswith(f"layerfuse: {launches} launches")
    assert told(ADD, 6, FIRST) in said()


def test_a_call_that_says_no_positions_changes_nothing(tmp_path: Path) -> None:
    with started("deepseek-v3", tmp_path, layerfuse=STRICT, mode="NONE", captured=8) as engine:
        norm = engine.model.model.layers[0].post_attention_layernorm
        for tokens, stands in ((6, True), (33, False), (6, True)):
            engine(tokens)
            for hook in engine.model._forward_pre_hooks.values():
                hook(engine.model, (), {"hidden_states": torch.zeros(500, 64)})
            assert ("forward" in vars(norm)) is stands


def test_tokens_are_those_of_the_positions() -> None:
    class Layer(torch.nn.Module):
        def forward(self, positions: Tensor, hidden_states: Tensor) -> None: ...

    class Head(torch.nn.Module):
        def forward(self, hidden_states: Tensor) -> None: ...

    class InC(torch.nn.Module):
        forward = map  # type: ignore[assignment]

    of, three = VLLM.tokens, torch.zeros(3, 7)
    assert of is not None
    assert of(Layer(), (torch.zeros(5), torch.zeros(5, 64)), {}) == 5
    assert of(Layer(), (), {"hidden_states": torch.zeros(5, 64), "positions": three}) == 7
    assert of(Head(), (torch.zeros(5, 64),), {}) is None
    assert of(InC(), (torch.zeros(5, 64),), {}) is None and of(InC(), (), {"positions": three}) == 7


def test_in_bfloat16_the_numbers_are_as_near_to_float32_as_vllms(tmp_path: Path) -> None:
    results = []
    for options, dtype in ((strict({ADD: 8, GATED: 3}), "bfloat16"), (False, "bfloat16"), (False, "float32")):
        with started("qwen3-next", tmp_path, layerfuse=options, mode="NONE", dtype=dtype) as engine:
            results.append(engine(33))
    assert as_near(*results)


def test_nothing_stands_in_a_model_unless_it_is_asked_for_by_name_or_where_eager_is_off(
    tmp_path: Path, said: Said
) -> None:
    """Without a name, what vLLM does itself stays its own."""
    for options in ({"level": 2}, {"fusions": [ADD], "eager": False}):
        said.clear()
        process.this.said.clear()
        with started("deepseek-v3", tmp_path, layerfuse=options, mode="NONE") as engine:
            engine()
            norm = engine.model.model.layers[1].input_layernorm
            assert "forward" not in vars(norm)
        assert said() == [f"layerfuse: nothing is fused in DeepseekV3ForCausalLM: {MODE}"]


def test_the_option_is_part_of_vllms_hash() -> None:
    hashes = [
        engine_config("deepseek-v3", layerfuse={"fusions": ADD, **more}, mode="NONE").compute_hash()
        for more in ({}, {"eager": False})
    ]
    assert hashes[0] != hashes[1]


def test_batch_invariance_is_honoured_at_module_level_too(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with started("deepseek-v3", tmp_path, layerfuse={"fusions": [ADD]}, mode="NONE") as engine:
        engine()
        assert not any("forward" in vars(module) for module in engine.model.modules())
    (only,) = said()
    assert only == (
        f"layerfuse: {ADD} is asked for, and has no site in DeepseekV3ForCausalLM: VLLM_BATCH_INVARIANT is set: "
        "vLLM keeps to kernels whose results do not depend on the batch"
    )


@pytest.mark.parametrize(
    ("fusion", "mode", "fused"), [(DUAL, "NONE", False), (DUAL, "VLLM_COMPILE", True), ("mla_decode", "NONE", False)]
)
def test_where_mla_is_switched_off_the_plan_says_what_can_stand_in_vllms_other_code(
    fusion: str, mode: str, fused: bool, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`layerfuse plan` says the same (tests/cli/test_plan_vllm.py): vLLM chooses the class of each layer by this variable."""
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    options = {"fusions": [fusion], "strict": fused}
    with started("deepseek-v3", tmp_path, layerfuse=options, mode=mode, overrides=ONE_LAYER) as engine:
        result = engine()
        assert apart(result, engine.uncompiled()) < ROUNDING
        classes = {type(layer.self_attn).__name__ for layer in engine.model.model.layers}
    assert classes == {"DeepseekV2Attention"}
    lines = said()
    if fused:
        assert told(DUAL, 1) in lines
    else:
        assert any("VLLM_MLA_DISABLE is set: vLLM runs these layers without MLA" in line for line in lines)
        # What was asked for by name and stands nowhere is a miss.
        counted = [line for line in lines if "expected" in line]
        assert counted == ([] if fusion == DUAL else [missed("mla_decode", 1, 0, FIRST)])


# ---- what the report says where something is not as planned


class OtherWay(torch.nn.Module):
    """What a model may call in the place of its norm."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return x, x + residual


def test_a_norm_that_vllm_does_not_call_is_a_miss_and_stops_a_strict_engine(tmp_path: Path, said: Said) -> None:
    with started("deepseek-v3", tmp_path, layerfuse=STRICT, mode="NONE") as engine:
        layer = engine.model.model.layers[1]
        layer.post_attention_layernorm = OtherWay()
        with pytest.raises(FusionMissedError, match="did not call its norms together"):
            engine()
    assert missed(ADD, 6, 5, FIRST) in said()


@kimi
def test_what_the_profiling_run_does_not_come_to_is_said_and_is_no_miss(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM skips a delta net's core there: it has no cache yet."""

    def skipped(_: Any, *, core_attn_out: Tensor, **__: Any) -> None:
        core_attn_out.zero_()

    with started("kimi-linear", tmp_path, layerfuse=strict({ADD: 7, GATED: 3}), mode="NONE") as engine:
        monkeypatch.setattr(f"{KDA}._forward", skipped)
        engine()
    lines = said()
    assert told(GATED, 3, FIRST, called=0) in lines
    page = shown(
        "docs/vllm.md", "did not come to model.layers.0.self_attn:output and 2 more, where fused ops stand too"
    )
    assert lines[: len(page)] == page
    assert not any("profiling run" in each for each in lines), "vLLM makes none that layerfuse would know of"


def test_an_op_that_refuses_leaves_the_call_to_vllm(tmp_path: Path, said: Said) -> None:
    with started("deepseek-v3", tmp_path, layerfuse=False, mode="NONE") as engine:
        plain = engine()
    said.clear()
    with started("deepseek-v3", tmp_path, layerfuse={"fusions": [ADD]}, mode="NONE") as engine:
        norm = engine.model.model.layers[1].input_layernorm
        every_other = norm.weight.data.repeat_interleave(2)[::2]  # not contiguous, which the op refuses
        norm.weight = torch.nn.Parameter(every_other, requires_grad=False)
        torch.testing.assert_close(engine(), plain, rtol=1e-4, atol=1e-5)
    lines = said()
    assert missed(ADD, 6, 5, FIRST) in lines
    assert any("model.layers.1:input: the fused op refused its arguments" in each for each in lines)


# ---- hostile conditions: vLLM runs on, and one line says why


class Derived(RMSNorm):
    """As another plugin's: it may compute something else."""


def test_a_class_that_another_plugin_put_there_is_left_alone(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(custom_op.op_registry_oot, "RMSNorm", Derived)  # what CustomOp.register_oot does
    with started("deepseek-v3", tmp_path, layerfuse={"fusions": [ADD, DUAL]}, mode="NONE") as engine:
        runs_on(engine)
    lines = said()
    assert missed(ADD, 6, 0, FIRST) in lines
    assert any(f"{__name__}.Derived is no class of vLLM's that layerfuse knows a place in" in each for each in lines)
    # Both latent norms go in at the layer around them.
    assert (told(DUAL, 3, FIRST) in lines) == (DUAL in HERE)


@pytest.mark.parametrize("what", ["the method", pytest.param("the function", marks=dual)])
def test_a_place_that_is_gone_is_said_with_what_is_missing(
    what: str, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "the method":
        changed = tuple(
            attrs.evolve(seam, hook=attrs.evolve(seam.hook, path=seam.hook.path + "_gone")) for seam in SEAMS
        )
        monkeypatch.setattr(seams, "SEAMS", changed)
        fused = {}
    else:
        monkeypatch.delattr(mla, "fused_q_kv_rmsnorm")
        fused = {ADD: 6}
    with started("deepseek-v3", tmp_path, layerfuse={"fusions": [ADD, DUAL]}, mode="NONE") as engine:
        if fused:
            runs_on(engine)
    lines = said()
    if not fused:
        without = "is asked for, and has no site in DeepseekV3ForCausalLM"
        assert sorted(lines) == [
            f"layerfuse: {ADD} {without}: vLLM does it: its own op for the add and the norm (fused_add_rms_norm)",
            f"layerfuse: {DUAL} {without}: {MODE}; at module level there is no place for it",
        ]
        return
    assert told(ADD, 6, FIRST) in lines
    gone = "vllm.model_executor.layers.mla:fused_q_kv_rmsnorm is expected, and vllm.model_executor.layers.mla has no"
    assert any(f"and 2 more: {gone} 'fused_q_kv_rmsnorm'" in each for each in lines)


def test_the_recorded_places_of_this_release_are_those_of_its_source() -> None:
    """Plans made without vLLM go by the record."""
    if REDUCED in HERE:
        import_model("vllm.models.deepseek_v32.nvidia.model:DeepseekV32ForCausalLM")
    folder = Path(vllm.__file__).parent
    whole = {
        seam.fusion
        for seam in SEAMS
        if all(check_source(hook, folder) is None for hook in (seam.hook, seam.function) if hook is not None)
        and (seam.switch is None or seam.switch in (folder / "model_executor/layers/mla.py").read_text())
    }
    assert whole == seams.usable() == HERE
