"""SGLang's stages of bench/scripts/workloads.toml in SGLang's real classes, on the meta device: each fusion that an arm names has a site."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import attrs
import pytest

pytest.importorskip("sglang_layers")
from sglang_layers import build_of  # isort: skip  (before sglang)
from sglang.srt.layers.quantization.fp8 import Fp8Config

from layerfuse import registry
from layerfuse.engines.sglang.facts import engine_of
from layerfuse.fusion import FusionConfig, Target, plan

sys.path.append(str(Path(__file__).parents[2] / "bench" / "scripts"))
from vllm_shapes import folder_of
from workloads import STAGES

SM90 = Target.named("sm90")


@pytest.mark.parametrize("name", [name for name in STAGES["sglang"] if not name.startswith("tiny")])
def test_each_fusion_of_an_arm_has_a_site(name: str, tmp_path: Path) -> None:
    stage = STAGES["sglang"][name]
    config = json.loads((folder_of(stage.shape, tmp_path) / "config.json").read_text())
    model, _ = build_of(
        config, tp=stage.tp, rank=0, patch={}, quantised=Fp8Config.from_config(config["quantization_config"])
    )
    assert not dict(registry.unknown_in(model))
    engine, specs = attrs.evolve(engine_of([type(model).__name__]), loaded=True), [*registry.specs_in(model)]
    for arm in stage.arms.values():
        asked = () if arm.fusions in (("default",), ("none",)) else arm.fusions
        made = plan(specs, SM90, FusionConfig.parse(",".join(asked) or "none"), engine)
        assert made.unfound(asked) == {}
        sites = Counter(decision.fusion for decision in made.expected())
        assert set(sites) == set(asked)
