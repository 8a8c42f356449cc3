"""What `vllm_arm` has vLLM's sampler do: draw the tokens that a request names, whatever the model's own would be.

The log probabilities that vLLM gives back are those before any such processor, so each engine says how likely it finds one and the same
text, in its own decode steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class Forced(AdapterLogitsProcessor):
    """A logits processor of vLLM; a request names its tokens in `SamplingParams(extra_args={"tokens": [...]})`."""

    def is_argmax_invariant(self) -> bool:
        """It is not: greedy sampling has to heed it."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[[list[int], Tensor], Tensor] | None:
        """What changes the logits of one request."""
        tokens = (params.extra_args or {}).get("tokens")
        if tokens is None:
            return None

        def force(drawn: list[int], logits: Tensor) -> Tensor:
            if len(drawn) < len(tokens):
                logits[tokens[len(drawn)]] = 1e6
            return logits

        return force


try:
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor
except ImportError:  # a release with one model runner
    pass
else:

    class ForcedThere(LogitsProcessor):
        """The same for vLLM's second model runner."""

        def __init__(self, _vllm_config: Any, req_states: Any) -> None:
            self.state, self.wanted = req_states, {}

        def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
            """Whether this request names its tokens."""
            self.wanted[req_idx] = (sampling_params.extra_args or {}).get("tokens")
            return self.wanted[req_idx] is not None

        def apply(self, logits: Tensor, ctx: Any) -> Tensor:
            """What changes the logits of all requests of a step."""
            slots, positions = ctx.expanded_idx_mapping.tolist(), ctx.pos.tolist()
            for row, (slot, position) in enumerate(zip(slots[: logits.shape[0]], positions, strict=False)):
                tokens, drawn = self.wanted.get(slot), position + 1 - int(self.state.prompt_len.np[slot])
                if tokens is not None and 0 <= drawn < len(tokens):
                    logits[row, tokens[drawn]] = 1e6
            return logits
