"""Ops of torch's that stand for functions of an engine's, where graphs or kernels of ours name them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


@cache
def _library(namespace: str) -> torch.library.Library:
    return torch.library.Library(namespace, "FRAGMENT")


def define_op(namespace: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any] | None = None) -> str:
    """Let a function be an op.

    Args:
        namespace: of the op.
        schema: `name(arguments) -> results`.
        run: the function.
        fake: the same without computing, for an op that stands in graphs itself: it is given tensors with the strides that it was traced with.

    Returns:
        `namespace::name`.
    """
    name, library = schema.partition("(")[0], _library(namespace)
    library.define(schema, tags=() if fake is None else (torch.Tag.needs_fixed_stride_order,))
    library.impl(name, run, "CompositeExplicitAutograd")
    if fake is not None:
        torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)
    return f"{namespace}::{name}"
