"""How far engines of `vllm_engine` are apart in their tokens, and whether layerfuse's are vLLM's.

Two greedy texts part at the first near-tie, and say nothing behind it. So every engine is also given the text that vLLM alone drew
(`vllm_forced`), and says how likely it finds each token: of the prompts, which are prefilled, and of the 64 tokens behind each, which are
decoded in vLLM's graphs.

The rule: an arm's numbers hold where its log probabilities are no further from vLLM's than vLLM's own ways are from each other. Such ways
are vLLM with its own quant fusions off (where the stage quantises), with its own kernels in place of Inductor's (where it does not), with
NCCL instead of its own all-reduce (over several GPUs), and with the same texts in other batches, which a server's users see at every load. In the prompts and in the decoded tokens each,

- the mean distance is at most `WIDER` times that of the furthest of these ways. Over 22 texts a mean is known to 10 or 20 %, so that a
  smaller excess is not seen to be one. Where vLLM's ways are equal, or nearly so, it is at most `LEAST`: one token in sixty a bf16 step off.
- the largest is at most `FARTHEST` times theirs: one token that is badly wrong does not show in a mean.
"""

from __future__ import annotations

import statistics
from typing import Any

STEP = 0.0625
"""One step of bf16 between 8 and 16, where the best logits are."""
WIDER, FARTHEST, LEAST = 1.25, 4.0, 1e-3
PARTS = ("prompt", "tokens")
"""Of a text: what is prefilled, and what is decoded."""
Texts = dict[str, list[dict[str, Any]]]
"""Name -> of each text, the log probabilities of its parts, and the best two tokens of each decode step with theirs."""


def drawn(tokens: dict[str, Any]) -> dict[str, list[list[int]]]:
    """The tokens alone, of what an arm drew."""
    return {name: [list(each) for each, _ in several] for name, several in tokens.items()}


def distances(first: Texts, other: Texts) -> dict[str, Any]:
    """How far log probabilities of the same tokens are apart; `other` may hold fewer texts."""
    pairs = [pair for name in first for pair in zip(first[name], other[name], strict=False)]
    found: dict[str, Any] = {"texts": len(pairs)}
    for part in PARTS:
        texts = [[abs(a - b) for a, b in zip(here[part], there[part], strict=True)] for here, there in pairs]
        means = [statistics.fmean(text) for text in texts]
        every = [distance for text in texts for distance in text]
        found[part] = {
            "mean": round(statistics.fmean(every), 6),
            "mean's error": round(statistics.stdev(means) / len(means) ** 0.5, 6) if len(means) > 1 else None,
            "largest": round(max(every), 5),
            "of": len(every),
        }
    steps = [step for here, there in pairs for step in zip(here["best"], there["best"], strict=True)]
    margins = [_margin(here, there[0][0]) for here, there in steps]
    found["other best token"] = sum(margin is not None for margin in margins)
    found["other beyond a tie"] = sum(margin is not None and margin > STEP for margin in margins)
    return found


def _margin(two: list[list[Any]], token: int) -> float | None:
    """By how much a token is less likely than the best, which it is not; None: it is the best."""
    if token == two[0][0]:
        return None
    return float(two[0][1] - dict(map(tuple, two)).get(token, float("-inf")))


def exceeds(arm: dict[str, Any], ways: dict[str, dict[str, Any]]) -> list[str]:
    """Where an arm is further from vLLM than its own ways (name -> distances) are: empty where the rule holds."""
    found = []
    for part in PARTS:
        mean = max([LEAST, *(WIDER * way[part]["mean"] for way in ways.values())])
        largest = max([STEP, *(FARTHEST * way[part]["largest"] for way in ways.values())])
        for name, bound in (("mean", mean), ("largest", largest)):
            if not arm[part][name] <= bound:  # also where it is not a number
                found.append(f"{part}: {name} {arm[part][name]:.5f} is above {bound:.5f}")
    return found


def agreement(first: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """How far greedy tokens agree: sequences that are the same, and for others how near the two best logits were."""
    same, margins, apart = 0, [], 0.0
    pairs = [pair for name in first for pair in zip(first[name], other[name], strict=True)]
    for (tokens, best), (others, best_there) in pairs:
        place = next((i for i, (a, b) in enumerate(zip(tokens, others, strict=True)) if a != b), len(tokens))
        for here, there in zip(best[: place + 1], best_there, strict=False):
            known = dict(there)
            apart = max([apart, *(abs(logit - known[token]) for token, logit in here if token in known)])
        if place == len(tokens):
            same += 1
        else:
            two = sorted((logit for _, logit in best[place]), reverse=True)
            margins.append(round(two[0] - two[1], 4))
    return {
        "sequences": len(pairs), "the same": same, "margins where they part": margins,
        "beyond one step": sum(margin > STEP for margin in margins), "log probabilities apart": round(apart, 4),
    }  # fmt: skip
