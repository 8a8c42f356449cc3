"""One SGLang engine for `sglang_engine`, in a process of its own (`arm`)."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from arm import DRAWN, STARTED, Row, Texts, prompts, serve
from sglang_probe import FOLDER, FUSED
from sglang_probe import prompts as together

AFTER = 64
"""Tokens that sequences draw which are to decode together: the first may begin before the last is there."""
PATIENCE = 300
"""Seconds that they may take until they do; kernels that nvcc compiles are among them."""


class Arm(Texts):
    """An engine and what can be asked of it."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.asked, self.vocabulary = asked, asked["vocabulary"]
        self.folder = Path(tempfile.mkdtemp())
        self.held: list[Any] = []
        self.generating: threading.Thread | None = None
        self.batch: int | str = 0
        self.failed = ""
        self.waiting = socket.socket(socket.AF_UNIX)
        self.waiting.bind(str(self.folder / "held"))
        self.waiting.listen()
        self.waiting.settimeout(1)
        os.environ[FOLDER] = str(self.folder)
        _plugin(self.folder)
        from sglang.srt.entrypoints.engine import Engine

        before = time.time()
        self.engine = Engine(**{
            "model_path": asked["model"], "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "context_length": 2048,
            "mem_fraction_static": 0.85, "max_total_tokens": asked["cache"], "max_running_requests": max(8, *asked["batches"]),
            "chunked_prefill_size": 8192, "disable_radix_cache": True, "tp_size": asked["tp"], "random_seed": 0,
            "cuda_graph_bs_decode": asked["batches"], "disable_prefill_cuda_graph": True, "sampling_backend": "pytorch", "grammar_backend": "none",
            "watchdog_timeout": 100_000, "log_level": "info", "port": 20_000 + os.getpid() % 300 * 100, **asked["engine"],
        })  # fmt: skip
        self.start = {"import_s": round(before - STARTED, 1), "start_s": round(time.time() - before, 1)}

    def ready(self) -> dict[str, Any]:
        """What was started."""
        self._generate(
            prompts(self.vocabulary, 1, 8, 1), {"max_new_tokens": 2}
        )  # in this thread first, for its event loop
        self.settle(min(self.asked["batches"]), 16)
        return {**self.start, "workers": self._ask("state")}

    def _generate(self, rows: list[list[int]], sampling: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
        sampling = {"temperature": 0, "ignore_eos": True, **sampling}
        return self.engine.generate(input_ids=rows, sampling_params=sampling, **more)  # type: ignore[no-any-return]

    def settle(self, batch: int, context: int) -> None:
        """Decode so many sequences together behind so many tokens each, and hold that step until the next command of another kind.

        Raises:
            RuntimeError: they never decoded together.
        """
        self._hold(batch, prompts(self.vocabulary, batch, context, 7), AFTER)

    def _hold(self, batch: int | str, rows: list[list[int]], draw: int) -> None:
        self._let_go()
        self.batch, self.failed = batch, ""
        (self.folder / "batch").write_text(str(batch))

        def generate() -> None:
            try:
                self._generate(rows, {"max_new_tokens": draw})
            except Exception as error:
                self.failed = f"{type(error).__name__}: {error}"

        self.generating = threading.Thread(target=generate)
        self.generating.start()
        until = time.monotonic() + PATIENCE
        while len(self.held) < self.asked["tp"]:
            with suppress(TimeoutError):
                held, _ = self.waiting.accept()
                held.settimeout(PATIENCE)
                self.held.append(held.makefile("rw"))
                held.close()
                continue
            if not self.generating.is_alive() or time.monotonic() > until:
                self._let_go()
                raise RuntimeError(
                    f"{batch} sequences behind {len(rows[0])} tokens did not run together. {self.failed}"
                )

    def _let_go(self) -> None:
        """Let the engine go on, to its end."""
        (self.folder / "batch").unlink(missing_ok=True)
        for each in self.held:
            each.close()
        self.held.clear()
        if self.generating is not None:
            self.generating.join(PATIENCE)
        self.generating = None

    def _ask(self, *command: Any) -> list[Any]:
        """Every rank that is held, all at once."""
        if not self.held:
            raise RuntimeError("no step is held")
        for each in self.held:
            each.write(json.dumps(command) + "\n")
            each.flush()
        said = [json.loads(each.readline()) for each in self.held]
        for each in said:
            if "error" in each:
                raise RuntimeError(each["error"])
        return [each["result"] for each in said]

    def replay(self, batch: int, warm: int, rounds: int, each: int) -> list[list[float]]:
        """Of every rank."""
        if batch != self.batch:
            raise RuntimeError(f"a step of {self.batch} sequences is held, not of {batch}")
        return self._ask("replay", warm, rounds, each)

    def kernels(self, _batch: int) -> list[dict[str, Any]]:
        """Of every rank."""
        return self._ask("kernels")

    def prompts(self, number: int, length: int, rounds: int) -> list[float]:
        """Milliseconds of SGLang's forward for so many prompts together, once for each round: by the host's clock, of the slowest rank.

        Raises:
            RuntimeError: they never ran together.
        """
        batch, tries = together(number, length), 5
        while self.batch != batch or not self.held:
            tries -= 1
            try:
                # The first may run alone, while the others come.
                self._hold(batch, prompts(self.vocabulary, number + tries % 2, length, 13), 1)
            except RuntimeError:
                if not tries:
                    raise
        return [max(each) for each in zip(*self._ask("clock", rounds), strict=True)]

    def prompt_kernels(self, number: int, length: int) -> list[dict[str, Any]]:
        """Kernel -> launches and microseconds of one such step, of every rank."""
        self.prompts(number, length, 1)
        return self._ask("kernels")

    def prompt_calls(self, number: int, length: int) -> list[dict[str, Any]]:
        """Function -> calls of its forward, Python's and C's, and microseconds in itself, of every rank."""
        self.prompts(number, length, 1)
        return self._ask("calls")

    def serve(self, requests: int, at_once: int, length: int, answer: int, seed: int) -> dict[str, float]:
        """Answer so many random prompts of `length` tokens with `answer` tokens each, some of them at once; keys are those of SGLang's benchmark."""
        self._let_go()
        rows, seen = prompts(self.vocabulary, requests, length, seed), []
        sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": answer}

        async def one(row: list[int], free: asyncio.Semaphore) -> None:
            async with free:
                times = [time.perf_counter()]
                async for _ in await self.engine.async_generate(input_ids=row, sampling_params=sampling, stream=True):
                    times.append(time.perf_counter())
                seen.append((times[1] - times[0], (times[-1] - times[1]) / max(answer - 1, 1)))

        async def every() -> None:
            free = asyncio.Semaphore(at_once)
            await asyncio.gather(*(one(row, free) for row in rows))

        began = time.perf_counter()
        self.engine.loop.run_until_complete(every())
        took = time.perf_counter() - began
        first, following = ([each * 1000 for each in several] for several in zip(*seen, strict=True))
        found = {
            "output_throughput": requests * answer / took, "request_throughput": requests / took, "duration": took, "completed": len(seen),
            "mean_ttft_ms": statistics.mean(first), "median_ttft_ms": statistics.median(first),
            "mean_tpot_ms": statistics.mean(following), "median_tpot_ms": statistics.median(following),
        }  # fmt: skip
        return {key: round(value, 3) for key, value in found.items()}

    def draw(self, rows: list[Row]) -> list[Any]:
        """In one batch."""
        several = self._generate(rows, {"max_new_tokens": DRAWN}, return_logprob=True, top_logprobs_num=5)
        return [[each["output_ids"], [_best(step) for step in _meta(each, "output_top")]] for each in several]

    def think(self, asked: Sequence[tuple[Row, Row]]) -> list[Any]:
        """Steps of prompts say it, in which the fused ops are called meanwhile, and no decode graph runs."""
        rows = [prompt + row for prompt, row in asked]
        how: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
        several = self._generate(rows, {"max_new_tokens": 1}, **how)
        return [_thought(each, row, len(prompt)) for each, row, (prompt, _) in zip(several, rows, asked, strict=True)]

    def tokens(self) -> dict[str, Any]:
        """As any, of an engine that goes on."""
        self._let_go()
        return super().tokens()

    def forced(self, tokens: dict[str, list[Row]], together: bool = True) -> dict[str, Any]:
        """As any, of an engine that goes on, whose steps of prompts are layerfuse's too."""
        self._let_go()
        (self.folder / FUSED).touch()
        try:
            return super().forced(tokens, together)
        finally:
            (self.folder / FUSED).unlink()


def _meta(answer: dict[str, Any], which: str) -> list[Any]:
    return answer["meta_info"][f"{which}_logprobs"]  # type: ignore[no-any-return]


def _best(step: Any) -> list[list[Any]]:
    return [[token, round(logprob, 5)] for logprob, token, *_ in step]


def _thought(answer: dict[str, Any], row: list[int], length: int) -> dict[str, Any]:
    every, best = _meta(answer, "input_token"), _meta(answer, "input_top")
    if [token for _, token, *_ in every] != row or len(best) != len(row):
        raise RuntimeError("SGLang gives log probabilities of other tokens than those that it was given")
    logprobs = [logprob if logprob is None else round(logprob, 5) for logprob, *_ in every]
    return {"prompt": logprobs[1:length], "tokens": logprobs[length:], "best": [_best(step) for step in best[length:]]}


def _plugin(folder: Path) -> None:
    """Have SGLang find `sglang_probe` among its plugins, in this process and in those that it begins."""
    about = folder / "sglang_probe-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang-probe\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[sglang.srt.plugins]\nsglang_probe = sglang_probe:register\n")
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


if __name__ == "__main__":
    serve(Arm)
