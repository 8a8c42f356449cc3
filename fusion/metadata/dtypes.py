"""The two dtypes of MLA decoding by their short names, so that planning needs no torch."""

from __future__ import annotations

from typing import Any, Literal

from ...adapters.errors import ArgumentValueError, cut, shown

Dtype = Literal["bf16", "fp8"]

ITEM_SIZE: dict[str, int] = {"bf16": 2, "fp8": 1, "int32": 4, "uint64": 8, "fp32": 4}
"""Bytes of an element."""

_NAMES: dict[str, Dtype] = {
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "float8_e4m3fn": "fp8",
    "float8_e4m3fnuz": "fp8",
}


def dtype_named(dtype: Any) -> Dtype:
    """`bf16` or `fp8`, from one of their names or a torch dtype.

    Raises:
        ArgumentValueError: another dtype.
    """
    said = str(dtype) if isinstance(dtype, str) or type(dtype).__name__ == "dtype" else ""
    name = said.removeprefix("torch.").lower()
    if name not in _NAMES:
        raise ArgumentValueError(f"MLA decoding takes bf16 and fp8, got {cut(said) or shown(dtype)}")
    return _NAMES[name]
