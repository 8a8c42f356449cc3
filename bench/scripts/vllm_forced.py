"""What `vllm_arm` has vLLM's sampler do: draw the tokens that a request names, whatever the model's own would be.

The log probabilities that vLLM gives back are those before any such processor, so each engine says how likely it finds one and the same
text, in its own decode steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


def _following(step: list[tuple[dict[str, Any], int]]) -> list[int | None]:
    """What each sequence of a step draws: its next token, or its last one when all that are to end together decode together.

    Args:
        step: of each sequence what its request names (`tokens`, and how many sequences end `together`), and how many tokens it has drawn.
    """
    end = all(len(step) == named.get("together") and drawn >= 2 for named, drawn in step)
    return [
        named["tokens"][-1 if end else drawn] if 0 <= drawn < len(named["tokens"]) else None for named, drawn in step
    ]


def _force(_named: dict[str, Any], _drawn: list[int], logits: Tensor) -> Tensor:
    """Stands in vLLM's list of what changes a request's logits: `Forced.apply` needs all of a step."""
    return logits


class Forced(AdapterLogitsProcessor):
    """A logits processor of vLLM; a request names its tokens in `SamplingParams(extra_args={"tokens": [...]})`."""

    def is_argmax_invariant(self) -> bool:
        """It is not: greedy sampling has to heed it."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[[list[int], Tensor], Tensor] | None:
        """What a request names."""
        named = params.extra_args or {}
        return partial(_force, named) if named.get("tokens") else None

    def apply(self, logits: Tensor) -> Tensor:
        """What changes the logits of all requests of a step."""
        step = [(each.args[0], len(each.args[1])) for each in self.req_info.values()]
        for row, token in zip(self.req_info, _following(step), strict=True):
            if token is not None:
                logits[row, token] = 1e6
        return logits


try:
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor
except ImportError:  # a release with one model runner
    pass
else:

    class ForcedThere(LogitsProcessor):
        """The same for vLLM's second model runner."""

        def __init__(self, _vllm_config: Any, req_states: Any) -> None:
            self.state, self.named = req_states, {}

        def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
            """Whether this request names its tokens."""
            self.named[req_idx] = sampling_params.extra_args or {}
            return bool(self.named[req_idx].get("tokens"))

        def apply(self, logits: Tensor, ctx: Any) -> Tensor:
            """What changes the logits of all requests of a step."""
            slots, positions = ctx.expanded_idx_mapping.tolist()[: logits.shape[0]], ctx.pos.tolist()
            step = [
                ({"tokens": []} | self.named.get(slot, {}), position + 1 - int(self.state.prompt_len.np[slot]))
                for slot, position in zip(slots, positions, strict=False)
            ]
            for row, token in enumerate(_following(step)):
                if token is not None:
                    logits[row, token] = 1e6
            return logits
