"""Arguments of another type are refused where they are given, and the message says what to give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fusion_support import mla_spec

from layerfuse import fusion
from layerfuse.fusion.config import FusionConfigError

CPU = fusion.Target.named("cpu")
SPECS = [("layers.0", mla_spec())]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"target": "gfx950"}, r"target: got 'gfx950'; Target.named"),
        ({"target": None}, "target: got None"),
        ({"config": {"level": 2}}, r"config: .* give FusionConfig"),
        ({"engine": 3}, r"engine: got 3; give one of transformers"),
        ({"specs": mla_spec()}, r"in a list; got MLASpec"),
        ({"specs": 5}, "in a list; got 5"),
        ({"specs": SPECS[0]}, r"pair, got 'layers.0'"),
        ({"specs": [("a", {"num_heads": 3})]}, "pair, got"),
        ({"specs": [("a", "b", "c")]}, "pair, got"),
    ],
)
def test_of_plan(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        fusion.plan(**{"specs": SPECS, "target": CPU, **changes})


@pytest.mark.parametrize(
    ("model", "changes", "says"),
    [
        (3, {}, "model: expected a torch.nn.Module"),
        (None, {"strict": "yes"}, "strict: expected True or False"),
        (None, {"target": "gfx950"}, "target: got"),
        (None, {"specs": mla_spec()}, "in a list; got MLASpec"),
    ],
)
def test_of_compile(model: Any, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        fusion.compile(torch.nn.Identity() if model is None else model, **{"specs": SPECS, **changes})


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"strict": "no"}, "strict"), ({"switches": ["add_rms_norm"]}, "parse"), ({"switches": "-add_rms_norm"}, "parse")],
)
def test_of_a_config(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(FusionConfigError, match=says):
        fusion.FusionConfig(**changes)


def test_words_that_stand_alone() -> None:
    with pytest.raises(FusionConfigError, match="'none' stands alone"):
        fusion.FusionConfig.parse("none,add_rms_norm")
