"""One engine in a process of its own: starts, then answers one command per line until its input ends.

    python bench/scripts/vllm_arm.py '{"model": ..., "seqs": 64, ...}' ANSWERS

Commands and answers are JSON, the answers to a file descriptor, since standard output is the engine's log.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

STARTED = time.time()
PROMPTS = {"short": (4, 48), "batch": (16, 33), "long": (2, 600)}
"""Name -> sequences and their length. The long ones are prefilled outside of any CUDA graph."""
DRAWN = 64
"""Tokens of a greedy text."""
Row = list[int]
"""The tokens of a sequence."""


def prompts(vocabulary: int, number: int, length: int, seed: int) -> list[Row]:
    """Random tokens, the same at every call."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, vocabulary, (number, length), generator=generator).tolist()  # type: ignore[no-any-return]


class Texts:
    """What an engine draws, and what it thinks of given tokens; of each engine, `draw` and `think`."""

    vocabulary: int

    def draw(self, rows: list[Row]) -> list[Any]:
        """Greedy tokens behind each of these, with the best five of each step: [tokens, [[token, log probability], ...]]."""
        raise NotImplementedError

    def think(self, asked: Sequence[tuple[Row, Row]]) -> list[Any]:
        """Of each prompt and the tokens behind it, in one batch: what `forced` returns."""
        raise NotImplementedError

    def _prompts(self) -> dict[str, list[Row]]:
        every = enumerate(PROMPTS.items())
        return {name: prompts(self.vocabulary, number, length, seed) for seed, (name, (number, length)) in every}

    def tokens(self) -> dict[str, Any]:
        """Name -> what was drawn of each sequence."""
        return {name: self.draw(rows) for name, rows in self._prompts().items()}

    def forced(self, tokens: dict[str, list[Row]], together: bool = True) -> dict[str, Any]:
        """What is thought of given tokens behind the same prompts.

        Args:
            tokens: name -> of each sequence, so many of the first as there are.
            together: all sequences of a name in one batch; otherwise one after another.

        Returns:
            name -> of each sequence the log probabilities of its `prompt`, from the second token, and of its `tokens`, and of each step
            the `best` two tokens with theirs.
        """
        found = {}
        for name, rows in self._prompts().items():
            asked = list(zip(rows, tokens[name], strict=False))
            batches = [asked] if together else [[each] for each in asked]
            found[name] = [each for batch in batches for each in self.think(batch)]
        return found

    def one_by_one(self, tokens: dict[str, list[Row]]) -> dict[str, Any]:
        """`forced`, each of the first four sequences in a batch of its own."""
        return self.forced({name: rows[:4] for name, rows in tokens.items()}, together=False)


def serve(kind: Callable[[dict[str, Any]], Any]) -> None:
    """Serve commands, each a method of what `kind` makes of what was asked for."""
    answers = os.fdopen(int(sys.argv[2]), "w")

    def say(**what: Any) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    try:
        arm = kind(json.loads(sys.argv[1]))
        say(result=arm.ready())
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            say(result=getattr(arm, name)(*arguments))
    except BaseException as error:
        say(error=f"{type(error).__name__}: {error}"[:2000])
        raise
    finally:
        answers.close()
