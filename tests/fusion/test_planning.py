"""The plan: pure, quick, without torch, and a sentence for every decision."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fusion_support import FUSION, gqa_spec, mla_spec

import layerfuse
from layerfuse.adapters.specs import MLAKernelSpec, NormSpec
from layerfuse.fusion import FUSIONS, FusionConfig, FusionConfigError, Target, UnknownTargetError, plan
from layerfuse.fusion.config import ENVIRONMENT

CPU = Target.named("cpu")


def kernel_spec() -> MLAKernelSpec:
    return MLAKernelSpec(
        layer_index=0, outer="the DeepseekV2MLAAttention around it", num_local_heads=2, q_lora_rank=1536,
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, softmax_scale=0.1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "kind", "reason"),
    [
        (
            mla_spec(),
            "expected",
            "rms_norm(1536, epsilon 1e-06) and rms_norm(512, epsilon 1e-06) are one launch on cpu",
        ),
        (mla_spec(q_lora_rank=None), "not_applicable", "q_lora_rank is None: there is no query latent norm to pair"),
        (gqa_spec(), "not_applicable", "GQASpec describes no latent norms; only MLA layers have them"),
        (kernel_spec(), "refused", "an inner kernel layer knows no norms; ask the DeepseekV2MLAAttention around it"),
        (
            mla_spec(kv_norm=NormSpec(width=512, epsilon=1e-6, weight_offset=1.0)),
            "refused",
            "kv_norm is zero-centred (gemma style, weight_offset 1.0), and the fused op multiplies by the stored weight",
        ),
    ],
)
def test_decisions(spec: object, kind: str, reason: str) -> None:
    decision = plan([("path", spec)], CPU).decisions[0]  # type: ignore[list-item]
    assert (decision.layer, decision.kind, decision.reason) == ("path", kind, reason)
    assert decision.applies is (kind == "expected")


def test_sixty_one_layers() -> None:
    specs = [(f"model.layers.{i}.self_attn", mla_spec(i)) for i in range(61)]
    start = time.perf_counter()
    made = plan(specs, Target.named("gfx950"))
    assert time.perf_counter() - start < 0.02
    assert len(made.expected(FUSION)) == 61
    assert made.refused() == made.not_applicable(FUSION) == ()
    assert [layer for layer, _ in made.expected_specs(FUSION)] == [path for path, _ in specs]
    assert made.of("model.layers.60.self_attn")[0].applies
    assert "61 x expected" in str(made)
    assert len(json.loads(json.dumps(made.to_dict()))["decisions"]) == 61 * len(FUSIONS)


def test_it_is_pure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "none")
    assert plan([mla_spec()], CPU) == plan([mla_spec()], CPU)
    assert len(plan([mla_spec()], CPU).expected()) == 1


def test_bare_specs_are_named_by_index_and_never_twice() -> None:
    made = plan([mla_spec(3), kernel_spec()], CPU)
    assert [d.layer for d in made.decisions if d.fusion == FUSION] == ["layer 3", "layer 0 kernel"]
    with pytest.raises(ValueError, match=r"more than one spec \('layer 3'"):
        plan([mla_spec(3), mla_spec(3)], CPU)


@pytest.mark.parametrize(
    ("text", "expected", "reason"),
    [
        ("", 1, ""),
        ("all", 1, ""),
        (FUSION, 1, ""),
        ("none", 0, f"{FUSION} needs optimisation level 1, and {ENVIRONMENT}=none sets level 0"),
        (f"-{FUSION}", 0, f"{FUSION} is switched off by {ENVIRONMENT}=-{FUSION}"),
    ],
)
def test_the_environment(text: str, expected: int, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, text)
    made = plan([mla_spec()], CPU, FusionConfig.from_environment())
    assert len(made.expected()) == expected
    assert [d.reason for d in made.refused()] == ([reason] if reason else [])


def test_off_is_not_said_of_what_never_applied() -> None:
    decisions = plan([gqa_spec()], CPU, FusionConfig(level=0)).decisions
    assert {decision.kind for decision in decisions} == {"not_applicable"}


def test_typos() -> None:
    with pytest.raises(
        FusionConfigError, match="LAYERFUSE_FUSIONS=x: no fusion is called 'mla_dual_rmsnorm'; did you "
    ):
        FusionConfig.parse("-mla_dual_rmsnorm", origin="LAYERFUSE_FUSIONS=x")
    with pytest.raises(FusionConfigError, match="did you mean 'mla_dual_rms_norm'"):
        FusionConfig(switches={"mla_dual_norm": True})
    with pytest.raises(FusionConfigError, match="level: expected one of 0, 1, 2, got 3"):
        FusionConfig(level=3)
    with pytest.raises(UnknownTargetError, match="no target is called 'gfx940'; did you mean 'gfx950' or 'gfx942'"):
        Target.named("gfx940")


def test_targets() -> None:
    assert (Target.named("gfx942").fp8, Target.named("gfx950").fp8) == ("e4m3fnuz", "e4m3fn")
    assert Target.named("sm90").has("triton")
    assert not CPU.has("triton")
    assert Target.detect().arch


def test_no_torch_is_imported() -> None:
    code = (
        "import sys; from layerfuse.fusion import plan, Target, FusionConfig; plan([], Target.named('cpu'));"
        "assert 'torch' not in sys.modules"
    )
    root = Path(layerfuse.__path__[0]).parent
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


def test_the_function_stays_a_function() -> None:
    # The submodule `plan` and the function share a name; importing the submodule must not hide the function.
    import layerfuse.fusion.plan

    assert callable(layerfuse.fusion.plan)
    assert callable(layerfuse.fusion.compile)
