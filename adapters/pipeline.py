"""What stands in a model where another rank of a pipeline holds the layer."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import Any

ELSEWHERE = "stands for what another rank of the pipeline holds"


def stands_for_missing(module: Any) -> bool:
    """Whether this stands where another rank of a pipeline holds a layer: what vLLM, SGLang and ATOM all call a PPMissingLayer."""
    return _is_called(module, "PPMissingLayer")


def norms_nothing(module: Any) -> bool:
    """Whether this stands where another rank holds a model's final norm: None, a PPMissingLayer, or torch's Identity."""
    return module is None or stands_for_missing(module) or _is_called(module, "Identity")


def _is_called(module: Any, name: str) -> bool:
    cls: Any = type(module)
    return name in _names_of(cls)


@lru_cache(maxsize=1024)
def _names_of(cls: Hashable) -> frozenset[str]:
    assert isinstance(cls, type)
    return frozenset(base.__name__ for base in cls.__mro__)
