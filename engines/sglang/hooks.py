"""The place of SGLang that layerfuse stands at, as data."""

from __future__ import annotations

from ..hooks import Hook

LOADED = Hook(
    name="specs",
    does="plans as a model is loaded",
    module="sglang.srt.model_executor.model_runner",
    path="ModelRunner.load_model",
    takes=("self",),
    others="optional",
)
