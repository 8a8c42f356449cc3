"""The smallest set of fusions, and of sites, that moves a number of a model: found by running it with halves of them switched off.

Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import attrs
from attrs import frozen

from .adapters.errors import ArgumentError, LayerfuseError, shown

if TYPE_CHECKING:
    from .registry.lookup import Registry

Pair: TypeAlias = tuple[str, str]
"""A site and a fusion."""
T = TypeVar("T")
Step = Callable[[str], None]


class PromptsError(LayerfuseError, ValueError):
    """A file of prompts that holds something else than a list of token ids on each line."""


@frozen(kw_only=True)
class Moved:
    """How far the logits of some prompts are from those without fusions."""

    relative: float
    "The largest difference, to the largest logit without fusions."
    prompt: int
    "Counted from 1: that of the largest difference."
    position: int
    "Of the token behind which it is, counted from 1."
    tokens: int
    "Positions of all prompts at which another token has the largest logit."
    beyond: bool
    "Whether that is more than is allowed."

    def __str__(self) -> str:
        most = f"{self.relative:.2e} of the largest logit (prompt {self.prompt}, token {self.position})"
        return f"off by {most}, {self.tokens} other greedy tokens: {'too far' if self.beyond else 'near enough'}"


@frozen(kw_only=True)
class Found:
    """What moves a number."""

    pairs: tuple[Pair, ...]
    "The smallest set; each of them is needed where there are several."
    moved: Moved
    "By it alone."
    others: Moved
    "By all fusions but these."


def prompts_in(path: Path) -> tuple[tuple[int, ...], ...]:
    """The token ids in a file, one JSON list per line; empty lines are passed over.

    Raises:
        PromptsError: a line is something else, or none holds anything.
    """
    import json

    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            ids = json.loads(line)
        except ValueError:
            ids = line
        if not isinstance(ids, list) or not ids or not all(type(each) is int and each >= 0 for each in ids):
            raise PromptsError(
                f"{path}, line {number}: expected token ids in a JSON list, as [1, 15043], got {shown(ids)}"
            )
        found.append(tuple(ids))
    if not found:
        raise PromptsError(f"{path}: expected a JSON list of token ids on each line, and there is none")
    return tuple(found)


def smallest(units: Sequence[T], moves: Callable[[Sequence[T]], bool], beside: Sequence[T] = ()) -> list[T]:
    """A smallest set of units that moves a number (delta debugging: Zeller, "Yesterday, my program worked", 1999).

    Args:
        units: which all together, and beside these others, move one.
        moves: whether so many do.
        beside: what stays on meanwhile.
    """
    if len(units) == 1:
        return [*units]
    half = len(units) // 2
    for part in (units[:half], units[half:]):
        if moves([*beside, *part]):
            return smallest(part, moves, beside)
    # Only together: what of the first half is needed beside the second, and then of the second beside that.
    first = smallest(units[:half], moves, [*beside, *units[half:]])
    return first + smallest(units[half:], moves, [*beside, *first])


def bisect(
    model: Any,
    prompts: Iterable[Sequence[int]],
    *,
    tolerance: float | None = None,
    greedy: bool = False,
    registry: Registry | None = None,
    step: Step = lambda _: None,
) -> Found | None:
    """Find what moves the logits of a model: with the fusions that `LAYERFUSE_FUSIONS` chooses, and without.

    Args:
        model: of transformers: takes `input_ids` and `use_cache`, and gives `logits`. On the device where it is to run.
        prompts: token ids, each run by itself.
        tolerance: the largest difference of a logit that is near enough, as a fraction of the largest one; by default what
            `layerfuse verify` allows for the model's dtype.
        greedy: hold the token of the largest logit at each position instead of the logits.
        registry: what reads the layers; the default one if not given.
        step: told of each run, in a line.

    Returns:
        The smallest set, or None where all fusions together move nothing too far.

    Raises:
        ArgumentError: a prompt holds a token that the model does not know.
    """
    import torch

    from .fusion import FusionConfig, compile, keep_recurrences  # noqa: A004
    from .verify import TOLERANCES

    rows = [torch.tensor([ids], device=next(model.parameters()).device) for ids in prompts]
    vocabulary = model.get_input_embeddings().num_embeddings
    for number, ids in enumerate(rows, 1):
        if int(ids.max()) >= vocabulary:
            raise ArgumentError(
                f"prompt {number}: token {int(ids.max())} is beyond the {vocabulary} that the model knows"
            )
    keep_recurrences(model)
    chosen = FusionConfig.from_environment()
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    most = TOLERANCES.get(dtype, TOLERANCES["bfloat16"]) if tolerance is None else tolerance

    def run(only: Iterable[Pair] | None) -> tuple[list[torch.Tensor], list[Pair]]:
        """The logits of each prompt, and what ran fused."""
        torch._dynamo.reset()
        fused = compile(model, config=attrs.evolve(chosen, only=only), registry=registry)
        with torch.no_grad():
            logits = [fused(input_ids=ids, use_cache=False).logits[0].float() for ids in rows]
        return logits, [*fused.report.executed]

    plain, _ = run(())

    def moved_by(logits: list[torch.Tensor]) -> Moved:
        largest = max(float(each.abs().max()) for each in plain)
        apart = [
            (one - other).abs().nan_to_num_(nan=float("inf")).amax(-1) for one, other in zip(logits, plain, strict=True)
        ]
        prompt = max(range(len(apart)), key=lambda place: float(apart[place].max()))
        relative = float(apart[prompt].max()) / largest
        tokens = sum(int((one.argmax(-1) != other.argmax(-1)).sum()) for one, other in zip(logits, plain, strict=True))
        return Moved(
            relative=relative,
            prompt=prompt + 1,
            position=int(apart[prompt].argmax()) + 1,
            tokens=tokens,
            beyond=tokens > 0 if greedy else not relative <= most,
        )

    known: dict[frozenset[Pair] | None, tuple[Moved, list[Pair]]] = {}

    def tried(only: Iterable[Pair] | None) -> tuple[Moved, list[Pair]]:
        key = None if only is None else frozenset(only)
        if key not in known:
            logits, ran = run(key)
            known[key] = moved_by(logits), ran
            step(f"{_named(ran)}: {known[key][0]}")
        return known[key]

    whole, pairs = tried(None)
    if not whole.beyond or not pairs:
        return None

    def by_fusion(names: Iterable[str]) -> list[Pair]:
        wanted = set(names)
        return [pair for pair in pairs if pair[1] in wanted]

    names = smallest([*dict.fromkeys(name for _, name in pairs)], lambda some: tried(by_fusion(some))[0].beyond)
    found = smallest(by_fusion(names), lambda some: tried(some)[0].beyond)
    moved, ran = tried(found)  # layers that share a graph share what is fused in it
    others, _ = tried(pair for pair in pairs if pair not in ran)
    return Found(pairs=tuple(ran), moved=moved, others=others)


def _named(pairs: Sequence[Pair]) -> str:
    """In a few words: the fusions, each with its site or with how many."""
    sites: dict[str, list[str]] = {}
    for site, name in pairs:
        sites.setdefault(name, []).append(site)
    return (
        ", ".join(
            f"{name} at {several[0] if len(several) == 1 else f'{len(several)} sites'}"
            for name, several in sites.items()
        )
        or "no fusion"
    )
