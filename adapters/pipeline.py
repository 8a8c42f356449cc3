"""What stands in a model where another rank of a pipeline holds the layer."""

from __future__ import annotations

from typing import Any

ELSEWHERE = "stands for what another rank of the pipeline holds"


def stands_for_missing(module: Any) -> bool:
    """Whether this stands where another rank of a pipeline holds a layer: what vLLM, SGLang and ATOM all call a PPMissingLayer."""
    return _is_called(module, "PPMissingLayer")


def norms_nothing(module: Any) -> bool:
    """Whether this stands where another rank holds a model's final norm: None, a PPMissingLayer, or torch's Identity."""
    return module is None or stands_for_missing(module) or _is_called(module, "Identity")


def _is_called(module: Any, name: str) -> bool:
    return any(base.__name__ == name for base in type(module).__mro__)
