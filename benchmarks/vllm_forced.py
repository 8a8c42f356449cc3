"""What `vllm_arm` has vLLM's sampler do: draw the tokens that a request names, whatever the model's own would be.

The log probabilities that vLLM gives back are those before any such processor, so each engine says how likely it finds one and the same
text, in its own decode steps.
"""

from __future__ import annotations

from collections.abc import Callable

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
