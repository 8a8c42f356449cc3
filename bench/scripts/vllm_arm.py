"""One vLLM engine for `vllm_engine`, in a process of its own (`arm`)."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from arm import DRAWN, STARTED, Row, Texts, prompts, serve


def _forced() -> str:
    """The logits processor of the model runner that vLLM takes: the second where there is one and nobody chose the first."""
    import vllm_forced

    second = hasattr(vllm_forced, "ForcedThere") and os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "1") != "0"
    return "ForcedThere" if second else "Forced"


class Arm(Texts):
    """An engine and what can be asked of it."""

    def __init__(self, asked: dict[str, Any]) -> None:
        from vllm import LLM

        self.vocabulary, self.together = asked["vocabulary"], asked["together"]
        before = time.time()
        self.llm = LLM(
            model=asked["model"], load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=2048,
            gpu_memory_utilization=0.05, kv_cache_memory_bytes=asked["cache"], max_num_seqs=max(asked["batches"]),
            max_num_batched_tokens=8192, enable_prefix_caching=False, seed=0, tensor_parallel_size=asked["tp"],
            worker_extension_cls="vllm_probe.Probe", logits_processors=[f"vllm_forced:{_forced()}"] if self.together == 1 else None,
            compilation_config={"cudagraph_capture_sizes": asked["captured"], **asked["compilation"]},
            additional_config=asked["additional"], **asked["engine"],
        )  # fmt: skip
        self.beside, self.decoding, self.left = 0, list[str](), 0
        self.start = {"import_s": round(before - STARTED, 1), "start_s": round(time.time() - before, 1)}

    def ready(self) -> dict[str, Any]:
        """What was started."""
        config = self.llm.llm_engine.vllm_config.compilation_config
        passes = vars(config.pass_config)
        return {
            **self.start,
            "cudagraph": str(config.cudagraph_mode),
            "custom_ops": list(config.custom_ops),
            "passes": sorted(name for name, on in passes.items() if on is True),
            "workers": self.llm.collective_rpc("probe_state"),
        }

    def _given(self, number: int, length: int, seed: int) -> list[Any]:
        return [{"prompt_token_ids": row} for row in prompts(self.vocabulary, number, length, seed)]

    def draw(self, rows: list[Row]) -> list[Any]:
        """In one batch."""
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0, max_tokens=DRAWN, ignore_eos=True, logprobs=5, detokenize=False)
        given: list[Any] = [{"prompt_token_ids": row} for row in rows]
        several = [each.outputs[0] for each in self.llm.generate(given, greedy, use_tqdm=False)]
        return [
            [
                list(each.token_ids),
                [[[i, round(p.logprob, 5)] for i, p in step.items()] for step in each.logprobs or ()],
            ]
            for each in several
        ]

    def think(self, asked: Sequence[tuple[Row, Row]]) -> list[Any]:
        """In one batch; the sampler is told what to draw (`vllm_forced`)."""
        from vllm import SamplingParams

        wanted = [
            SamplingParams(
                temperature=0, max_tokens=len(row), ignore_eos=True, prompt_logprobs=0, logprobs=2, detokenize=False,
                extra_args={"tokens": row},
            )
            for _, row in asked
        ]  # fmt: skip
        given: list[Any] = [{"prompt_token_ids": prompt} for prompt, _ in asked]
        outputs = self.llm.generate(given, wanted, use_tqdm=False)
        return [_thought(output, row) for output, (_, row) in zip(outputs, asked, strict=True)]

    def settle(self, batch: int, context: int) -> None:
        """Decode so many sequences together behind so many tokens each: the graph's inputs are then those of such a decode step.

        Prompts are prefilled a few at a time, so the first to come would end before the last begins. All end at one step instead, which
        is one of all of them. The tokens are given: random weights draw few different ones, each engine its own, and a mixture then
        reads more or fewer experts. Nor is the last token one for all, which may be the input of the graph's last step.

        Raises:
            RuntimeError: The sequences never decoded all together; the cache may be too small for them.
        """
        from vllm import SamplingParams

        if self.together > 1:
            self._stop_amid(batch, context)
            return
        asked = []
        for row in self._given(batch, 2 * batch + 16, 8):
            *before, last = row["prompt_token_ids"]
            tokens = [each for each in before if each != last] + [last]
            asked.append(
                SamplingParams(
                    temperature=0, max_tokens=len(tokens) - 1, ignore_eos=True, detokenize=False, stop_token_ids=[last],
                    extra_args={"tokens": tokens, "together": batch},
                )
            )  # fmt: skip
        ended = [
            each.outputs[0].finish_reason
            for each in self.llm.generate(self._given(batch, context, 7), asked, use_tqdm=False)
        ]
        if ended != ["stop"] * batch:
            raise RuntimeError(
                f"{batch} sequences of {context} tokens did not decode together: {ended.count('stop')} of them met the step at which "
                "all end. Give the engine more bytes for keys and values."
            )

    def _stop_amid(self, batch: int, context: int) -> None:
        """The same where nobody can say what is drawn: the engine makes no step any more once all have decoded together a few times."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        greedy = SamplingParams(temperature=0, max_tokens=512, ignore_eos=True, detokenize=False)
        names, steps = self._added(self._given(batch, context, 7), greedy), 0
        while steps < 4:
            found = engine.step()
            if any(each.finished for each in found):
                raise RuntimeError(
                    f"{batch} sequences of {context} tokens did not decode together before the first ended"
                )
            # The first such step may hold the last of the prompts.
            steps = steps + 1 if len(found) == batch else 0
        engine.abort_request(names)

    def prompts(self, number: int, length: int, rounds: int) -> list[float]:
        """Milliseconds of vLLM's step for so many prompts together, once for each round: by the host's clock, its own work in it."""
        from vllm import SamplingParams

        one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
        given, times = self._given(number, length, 13), []
        if self.beside:
            self._keep_decoding(4 * rounds)
        for _ in range(rounds):
            began = time.perf_counter()
            if self.beside:
                self._step(self._added(given, one))
            else:
                self.llm.generate(given, one, use_tqdm=False)
            times.append((time.perf_counter() - began) * 1000)
        return times

    def decode_beside(self, number: int) -> None:
        """From here on so many sequences decode in each step of prompts, and a round lasts until the prompts are answered."""
        self.beside = number

    def _keep_decoding(self, steps: int) -> None:
        """So that none of them ends within so many steps."""
        from vllm import SamplingParams

        if self.left >= steps:
            return
        self.llm.llm_engine.abort_request(self.decoding)
        self.left, first = 1900, SamplingParams(temperature=0, max_tokens=1950, ignore_eos=True, detokenize=False)
        self.decoding = self._added(self._given(self.beside, 64, 7), first)
        while self._step() < self.beside:
            if not self.llm.llm_engine.has_unfinished_requests() or self.left < steps:
                raise RuntimeError(
                    f"{self.beside} sequences never decoded together: give the engine more bytes for keys and values"
                )

    def _added(self, given: list[Any], sampling: Any) -> list[str]:
        """The names of requests, which no earlier one has."""
        began = time.time_ns()
        names = [f"{began} {place}" for place in range(len(given))]
        for name, prompt in zip(names, given, strict=True):
            self.llm.llm_engine.add_request(name, prompt, sampling)
        return names

    def _step(self, until: Sequence[str] = ()) -> int:
        """Steps until these requests have ended, one at least: how many the last one answered."""
        waiting, answered = set(until), 0
        while True:
            found = self.llm.llm_engine.step()
            waiting -= {each.request_id for each in found if each.finished}
            self.left, answered = self.left - 1, len(found)
            if not waiting:
                return answered

    def prompt_kernels(self, number: int, length: int) -> list[dict[str, Any]]:
        """Kernel -> launches and microseconds of one such step, of every rank."""
        rounds = 4
        self.llm.collective_rpc("probe_begin")
        self.prompts(number, length, rounds)
        return self.llm.collective_rpc("probe_end", args=(rounds,))

    def prompt_calls(self, number: int, length: int) -> list[dict[str, list[float]]]:
        """Function -> calls of one such step, Python's and C's, and microseconds in itself, of every rank."""
        rounds = 4
        self.llm.collective_rpc("probe_count")
        self.prompts(number, length, rounds)
        return self.llm.collective_rpc("probe_counted", args=(rounds,))

    def prefill(self, lengths: list[int]) -> None:
        """Prompts of these lengths, one after another: whatever is compiled late is compiled now, and vLLM's log says so."""
        from vllm import SamplingParams

        one = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
        for length in lengths:
            # Sequences are no longer than 2048: several make one step of `length` tokens.
            parts = [1024] * (length // 1024) + ([length % 1024] if length % 1024 else [])
            self.llm.generate([self._given(1, part, 11)[0] for part in parts], one, use_tqdm=False)

    def replay(self, batch: int, warm: int, rounds: int, each: int) -> list[list[float]]:
        """Of every rank."""
        return self.llm.collective_rpc("probe_replay", args=(batch * self.together, warm, rounds, each))

    def kernels(self, batch: int) -> list[dict[str, Any]]:
        """Of every rank."""
        return self.llm.collective_rpc("probe_kernels", args=(batch * self.together,))


def _thought(output: Any, tokens: list[int]) -> dict[str, Any]:
    drawn = output.outputs[0]
    if list(drawn.token_ids) != tokens:
        raise RuntimeError(f"vLLM drew {list(drawn.token_ids)[:4]}... where it was to draw {tokens[:4]}...")
    prompt = [
        step[token].logprob for token, step in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True) if step
    ]
    best = [sorted(step.items(), key=lambda each: (-each[1].logprob, each[1].rank))[:2] for step in drawn.logprobs]
    return {
        "prompt": [round(each, 5) for each in prompt],
        "tokens": [round(step[token].logprob, 5) for token, step in zip(tokens, drawn.logprobs, strict=True)],
        "best": [[[token, round(one.logprob, 5)] for token, one in step] for step in best],
    }


if __name__ == "__main__":
    serve(Arm)
