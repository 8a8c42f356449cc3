"""Configs for tests: published ones, and those of no declared model. `PLAIN` and `MLA` hold what a config needs and no more; `MIMO` is in the words of MiMo-V2-Flash's, which vLLM's and SGLang's models read too."""

import json
from pathlib import Path
from typing import Any

CHECKPOINTS = Path(__file__).parents[1] / "engines" / "checkpoints"
MADE_UP = json.loads((Path(__file__).parent / "bases.json").read_text(encoding="utf-8"))


def published(name: str) -> dict[str, Any]:
    """A config by the name of its model, parsed."""
    if name in MADE_UP:
        return dict(MADE_UP[name])
    config: dict[str, Any] = json.loads((CHECKPOINTS / name / "config.json").read_text(encoding="utf-8"))
    return config
