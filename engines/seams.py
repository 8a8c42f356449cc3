"""Places of an engine where a fused op can go in without a compiler, as data: what runs there, and which fusion that is.

Each is checked when it is used, as hooks are: where it is not what this version knows, that place is left alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

from attrs import field, frozen

from .hooks import Hook, HookError, check, owner_of
from .whose import kind_of

if TYPE_CHECKING:
    from ..adapters.activation_quant import ActivationQuant
    from .handover import Reader


def _always(_module: Any) -> bool:
    return True


@frozen(kw_only=True)
class Consumer:
    """Where the linears behind a producer come to what they read in fp8."""

    hook: Hook
    "What they call for it, where they do not quantise inside of their product."
    reader: Callable[[Any, ActivationQuant], Reader | None]
    """Given a linear and how it quantises: how it takes what was quantised before; None where nothing of ours can stand. It raises
    NotNativeError where what runs there is not the engine's own code."""


@frozen(kw_only=True)
class Seam:
    """A producer's call in one class of an engine's, and the calls of those that read its results.

    For a norm the instance's call with a second tensor (the residual, the gate) becomes one call of the fused op, and for a product its
    call with both halves in one. Where there is a `function`, that is what becomes the op, while the instance runs. Where there are methods
    that call two norms, the first norm's call becomes the op. What the op quantises goes by its `consumer`'s way.
    """

    fusion: str
    hook: Hook
    "A method of the class, with what it takes."
    function: Hook | None = None
    "What the instance calls of its module for the same chain."
    callers: tuple[Hook, ...] = ()
    "Methods of the class that call both norms of a site, on parts of one tensor that lie side by side and are not written to in between."
    switch: str | None = None
    "The attribute that makes the instance call it."
    reduces: bool = False
    "Whether the function sums over the ranks of the tensor-parallel group, and is given the norm: for that one it becomes the op."
    consumer: Consumer | None = None
    "Of a chain that quantises."
    plain: Callable[[Any], bool] = field(default=_always, repr=False)
    "Whether an instance computes what the spec says and nothing else; where it has `callers`, each of the two norms."

    @property
    def key(self) -> tuple[str, str]:
        """The module and the name of the class."""
        return self.hook.cls

    @property
    def second(self) -> str:
        """The name of a norm's second tensor."""
        return self.hook.takes[2]

    @property
    def call(self) -> Literal["norm", "pair", "neighbours", "product", "reduced"]:
        """What the producer's call is given."""
        if self.callers:
            return "neighbours"
        if self.reduces:
            return "reduced"
        if self.function is not None:
            return "pair"
        return "norm" if len(self.hook.takes) > 2 else "product"

    @property
    def hooks(self) -> tuple[Hook, ...]:
        """What has to be as expected."""
        reads = None if self.consumer is None else self.consumer.hook
        return tuple(hook for hook in (self.hook, self.function, *self.callers, reads) if hook is not None)

    def is_there(self) -> bool:
        """Whether this engine has something of these names. Imports nothing."""
        try:
            for hook in self.hooks:
                owner_of(hook, sys.modules[hook.module])
        except (KeyError, HookError):
            return False
        return True

    def why_not(self) -> str | None:
        """Why this engine is not what is expected here, or None where it is. Imports nothing."""
        for hook in self.hooks:
            module = sys.modules.get(hook.module)
            if module is None:
                return f"{hook.module} is not loaded"
            try:
                check(hook, module)
            except HookError as error:
                return str(error)
        return None


SCHEMES = "static", "per_token", "group"
"""Those of fp8 by which linears of all engines quantise what they read."""


def quantised(*chains: str, per: Iterable[str] = SCHEMES) -> tuple[str, ...]:
    """The names of chains with the quantisation behind them."""
    return tuple(f"{chain}_{scheme}_quant" for chain in chains for scheme in (*per,))


def seams_at(hook: Hook, fusions: Iterable[str], consumer: Consumer, **more: Any) -> tuple[Seam, ...]:
    """One place for several fusions, of which those that quantise go by the consumer's way."""
    ways = ((name, consumer if name.endswith("_quant") else None) for name in fusions)
    return tuple(Seam(fusion=name, hook=hook, consumer=way, **more) for name, way in ways)


def seam_of(seams: Iterable[Seam], cls: type, fusion: str) -> Seam | None:
    """The place that a class is for a fusion. A class derived from one that is known may do something else, and is none."""
    return next((s for s in seams if s.fusion == fusion and s.key == kind_of(cls)), None)
