"""The one place where layerfuse ops enter torch.library: schema, kernel, fake and backward.

A `Library` is used rather than `custom_op`, whose Python wrapper costs more per call than a small norm takes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from .. import backends

_LIBRARY = torch.library.Library("layerfuse", "FRAGMENT")


def define(
    schema: str,
    *,
    reference: Callable[..., Any],
    check: Callable[..., None],
    fake: Callable[..., Any],
    case: Callable[..., Hashable],
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> Any:
    """Register an op and return it as callable `torch.ops.layerfuse.<name>.default`.

    Args:
        schema: as torch.library takes it; the first argument is a tensor, whose device picks the backend.
        reference: the meaning of the op in plain torch; it runs on every device.
        check: called with the op's arguments before any launch; raises on what no backend could take.
        fake: output shapes from input shapes.
        case: from the op's arguments to what of them decides which backend takes the call: hashable, quick to make.
        backward: as torch.library.register_autograd takes it; None for an op that is for inference only, whose check
            then refuses inputs that require grad. It costs about 10 us per call outside inference mode.
        setup_context: likewise.
    """
    name = schema.split("(", 1)[0]
    # The row stride of a split view must reach the kernel as it is: Inductor keeps the strides that were traced
    # instead of laying out a copy.
    _LIBRARY.define(schema, tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag))
    backends.register(backends.Backend(name="reference", op=name, load=lambda: reference, runs_on=backends.anywhere))

    def kernel(x: torch.Tensor, *args: Any) -> Any:
        check(x, *args)
        return backends.choose(name, x.device.type, case(x, *args)).function(x, *args)

    def fake_kernel(x: torch.Tensor, *args: Any) -> Any:
        check(x, *args)
        return fake(x, *args)

    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"layerfuse::{name}", fake_kernel, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(f"layerfuse::{name}", backward, setup_context=setup_context, lib=_LIBRARY)
    return getattr(torch.ops.layerfuse, name).default
