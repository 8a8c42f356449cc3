"""vLLM's own engine with and without layerfuse: GPU time of vLLM's full decode graph, greedy tokens, kernels of a step.

    python bench/scripts/vllm_engine.py [STAGE ...] --out results.json --logs FOLDER [--limit 540] [--turns 6] [--one-by-one]
    python bench/scripts/vllm_engine.py [STAGE ...] --prompts --arms vllm decode --out results.json

A stage is a model at its published widths with few layers and random weights (`vllm_shapes`), and several arms: vLLM without
layerfuse as it is installed and in others of its own ways, and layerfuse in it. Each arm is an engine in processes of its own
(`vllm_arm`). All arms of a stage are started together
on the same GPUs, then take turns: while one is timed, the others wait. A time is that of vLLM's CUDA graph for a decode step,
replayed behind 1024 tokens of context (`vllm_probe`); with several GPUs it is the slowest rank's.
A ratio is the median over the turns, each of which times every arm. Commands that run beside each other start their engines and draw their texts
at the same time, where the GPUs have the memory; while one times, the others wait (`_Turn`).

Steps of prompts are timed by the host's clock, in many short turns, with all arms on the same few cores (`cores`): two processes take different
times for the same work, so `--prompts`, which times nothing else, starts vLLM twice, and `vllm_again` says how far that alone is from 1. Ratios and
differences are medians over the turns with their intervals of 95 %. Beside them stand the times of all kernels of the first
rank, added up (`gpu_ms`; those of an all-reduce wait for the other ranks), and the calls of one step, with the functions that are called more often
than in vLLM alone.

Tokens are compared with those of the first arm. Where two sequences part, the two best logits of the first arm at that step say whether
it was a tie: one bf16 step apart or less. Then every arm is given the first arm's tokens, and its log probabilities of them are compared
(`vllm_tokens`, which also says when they hold).

Results are written after every stage; a stage that the file holds is not run again, unless it is named with --again. One that would
not end before --limit is not begun. `--list` prints the stages.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import math
import os
import re
import selectors
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import asdict, evolve
from vllm_shapes import VOCABULARY, folder_of, layers_of
from vllm_table import table
from vllm_tokens import agreement, distances, drawn, exceeds
from workloads import DEFAULT, STAGES, Stage, Way

from layerfuse.bench.environment import environment

HERE = Path(__file__).parent
BEGAN = time.monotonic()
BATCHES = (1, 8, 64, 256)
CONTEXT = 1024
"""Tokens behind which a decode step is timed."""
OURS = (
    "row_norm",
    "dual_norm",
    "norm_rope_cache",
    "query",
    "gated_norm",
    "silu_mul",
    "all_reduce_row_norm",
    "few_token_linear",
    "few_token_experts",
    "few_token_plain",
)
"""Functions that layerfuse's Triton kernels are compiled from."""
DISTINCT = 50
"""The fewest different tokens that greedy texts of seeded weights hold; fewer say that the weights were not taken."""
LATE = "JIT compilation during inference"
"""In the warnings of vLLM's monitor of kernels that are compiled late."""
CAPTURED = 512
"""The most tokens of a step that vLLM runs in CUDA graphs by default: in pieces around the attention, where prompts are."""
TOGETHER = ((1, 512), (1, 1024), (7, 1024))
"""Prompts of one step, and tokens of each, that are timed."""
FOLDERS = re.compile(r"(?<![\w.])/(?:[\w.-]+/)+")
"""In lines of a log: folders of the machine, in front of a file's name."""
A_TURN = 80
"""Milliseconds that an arm's prompts are timed in a turn."""
AGAIN = "_again"
"""Behind the name of the first arm: a second engine of it. What differs between the two is chance."""
LENGTHS = (65, 300, 500, 800, 1100, 2500, 5000, 8192)
"""Tokens of prefills, one for each step of launch variants."""

QUIET = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo",
    # A sampler of FlashInfer's is compiled by nvcc at the first start; it is in no decode graph.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "PYTHONUNBUFFERED": "1",
    # No NVLink multicast, which is a matter of the whole host: neither NCCL's, nor torch's, nor vLLM's, nor FlashInfer's.
    "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",
}  # fmt: skip


class ArmError(RuntimeError):
    """An arm did not do what it was asked for."""


class Engine:
    """The process of an arm, seen from here."""

    script = "vllm_arm.py"
    first = "vllm"
    "The arm that all are compared with."
    prompts = True
    "Whether steps of prompts can be timed."

    def __init__(self, arm: str, name: str, stage: Stage, work: Path, logs: Path) -> None:
        ours = stage.arms.get(arm)
        way, fusions = stage.ways[arm if ours is None else ours.way], None if ours is None else ours.fusions
        self.name, self.log = name, logs / f"{name}.log"
        self.report = logs / f"{name}.report.json"
        asked = {
            "model": str(folder_of(stage.shape, work / "models")), "vocabulary": VOCABULARY, "batches": list(BATCHES), "tp": stage.tp,
            "captured": [*(each * stage.together for each in BATCHES), CAPTURED], "together": stage.together, "cache": stage.cache, "engine": {**stage.engine, **way.engine},
            **self.asked(way, fusions, {} if ours is None else ours.options),
        }  # fmt: skip
        variables = {
            **{name: value for name, value in os.environ.items() if name != "LAYERFUSE_FUSIONS"}, **QUIET, **stage.variables, **way.variables,
            **self.variables(fusions, work),
        }  # fmt: skip
        paths = [str(HERE), variables.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, dict.fromkeys(paths)))
        reading, writing = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / self.script), json.dumps(asked), str(writing)],
            stdin=subprocess.PIPE, stdout=self.log.open("w"), stderr=subprocess.STDOUT, text=True, env=variables, pass_fds=(writing,),
            start_new_session=True,
        )  # fmt: skip
        os.close(writing)
        self.answers: int | None = reading
        self.rest = b""

    def asked(self, way: Way, fusions: tuple[str, ...] | None, options: dict[str, Any]) -> dict[str, Any]:
        """What its process is to be told, beside what all are; `fusions` is None without layerfuse."""
        chosen = ({} if fusions == DEFAULT else {"fusions": list(fusions or ())}) | options
        return {
            "additional": {} if fusions is None else {"layerfuse": {**chosen, "report": str(self.report)}},
            "compilation": {"pass_config": way.passes, "custom_ops": list(way.custom_ops)},
        }

    def variables(self, fusions: tuple[str, ...] | None, work: Path) -> dict[str, str]:
        """Of its environment."""
        cache = str(work / "cache" / self.name)
        return {"VLLM_PLUGINS": "" if fusions is None else "layerfuse", "VLLM_CACHE_ROOT": cache}

    def answer(self, until: float) -> Any:
        """The next answer.

        Raises:
            ArmError: an error there, or none came in time.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self.answers, selectors.EVENT_READ)
            while b"\n" not in self.rest:
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise ArmError(f"{self.name}: no answer in time")
                more = os.read(self.answers, 1 << 16)
                if not more:
                    raise ArmError(f"{self.name}: its process has ended; see {self.log.name}")
                self.rest += more
        line, _, self.rest = self.rest.partition(b"\n")
        said = json.loads(line)
        if "error" in said:
            raise ArmError(f"{self.name}: {said['error']}")
        return said["result"]

    def tell(self, *command: Any) -> None:
        """A command, whose answer is to be asked for."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def ask(self, until: float, *command: Any) -> Any:
        """What it answers to a command."""
        self.tell(*command)
        return self.answer(until)

    def threads(self) -> list[int]:
        """Of its process and all that it began; the first is the one that runs vLLM's engine."""
        own = self.process.pid
        processes = [own, *(each for each in map(int, filter(str.isdigit, os.listdir("/proc"))) if each != own)]
        found: list[int] = []
        for each in processes:
            with contextlib.suppress(OSError):  # it has ended
                if os.getsid(each) == own:
                    found += map(int, os.listdir(f"/proc/{each}/task"))
        return sorted(found, key=lambda thread: thread != own)

    def stop(self) -> None:
        """End it and its workers at once: an engine takes ten seconds to end by itself, and nothing of it is wanted."""
        with contextlib.suppress(ProcessLookupError):  # none of its session is left
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.answers is not None:
            os.close(self.answers)
        self.answers = None


def run(name: str, stage: Stage, logs: Path, work: Path, until: float, given: argparse.Namespace) -> dict[str, Any]:
    """A stage's results, as far as they came; `given`: the options of the command."""
    result: dict[str, Any] = {
        "shape": stage.shape, "tp": stage.tp, "variables": stage.variables, "context": CONTEXT, "layers": layers_of(stage.shape),
        "first": (first := given.engine.first), "arms": {}, "errors": {},
    }  # fmt: skip
    engines: dict[str, Engine] = {}
    turn = _Turn()
    # A stage that the limit ends is concluded and written within it.
    started, last = time.monotonic(), BEGAN + given.limit - 10
    until = min(until + turn.waited, last)
    try:
        for arm in _arms(stage, given.arms):
            engines[arm] = given.engine(arm, f"{name}.{arm}", stage, work, logs)
            ours = stage.arms.get(arm)
            way = stage.ways[ours.way if ours else arm]
            said = asdict(way, filter=lambda _, value: bool(value))
            result["arms"][arm] = {"fusions": ours and ours.fusions, "way": said}
            if given.one_by_one:
                _try(result, engines, arm, until, None)
        if not given.one_by_one:
            for arm in list(engines):
                _try(result, engines, arm, until, None)
        result["started_s"] = round(time.monotonic() - started, 1)
        # What is compiled at a first call is compiled on all cores, in all arms at once.
        if given.beside:
            _all_at_once(result, engines, until, "decode_beside", given.beside)
        for number, length in TOGETHER if given.prompts else ():
            _all_at_once(result, engines, until, "prompts", number, length, 2)
        for batch in () if given.prompts else BATCHES:
            _all_at_once(result, engines, until, "settle", batch, CONTEXT)
        # vLLM takes no logits processor, by which texts are forced, where tokens are drafted.
        texts = not (given.prompts or given.no_texts or stage.together > 1)
        if texts:
            _texts(result, engines, until)
        turn.take()
        until = min(until + turn.waited, last)
        result["waited_s"] = round(turn.waited, 1)
        for batch in () if given.prompts else BATCHES:
            _time(result, engines, batch, until, given.turns)
        for arm in () if given.prompts else list(engines):
            for batch in BATCHES:
                # A graph that is replayed with what another batch left behind may read and write anywhere: attention kernels
                # take lengths and splits of each sequence from memory.
                _try(result, engines, arm, until, "settle", batch, CONTEXT)
                _try(result, engines, arm, until, "kernels", batch)
        if given.prompts or (texts and given.engine.prompts):
            _all_prompts(result, engines, stage, until, given)
        if texts and given.engine.prompts:
            for arm in [arm for arm in engines if arm == first or arm in stage.arms]:
                _try(result, engines, arm, until, "prefill", list(LENGTHS))
    finally:
        for engine in engines.values():
            engine.stop()
        turn.end()
    result["seconds"] = round(time.monotonic() - started, 1)
    return _concluded(result, {f"{name}.{arm}": arm for arm in result["arms"]}, logs)


class _Turn:
    """At the GPUs of this machine, among all such commands: engines start beside each other, and one alone is timed."""

    waited = 0.0
    "Seconds, for what was asked last."

    def __init__(self) -> None:
        """Wait until nothing is timed."""
        self._file = (Path(tempfile.gettempdir()) / "layerfuse_engines.lock").open("w")
        self._ask(fcntl.LOCK_SH)

    def take(self) -> None:
        """Wait until no other engine starts or is timed."""
        self._ask(fcntl.LOCK_EX)

    def share(self) -> None:
        """Let others start beside this, and nothing be timed."""
        self._ask(fcntl.LOCK_SH)

    def _ask(self, kind: int) -> None:
        began = time.monotonic()
        fcntl.flock(self._file, kind)
        self.waited = time.monotonic() - began

    def end(self) -> None:
        """The others' turn."""
        self._file.close()


def _texts(result: dict[str, Any], engines: dict[str, Engine], until: float) -> None:
    """Greedy texts of all arms, and their log probabilities of the first arm's."""
    for arm, drew in _all_at_once(result, engines, until, "tokens").items():
        few = {each for text in drawn(drew or {}).values() for row in text for each in row}
        if drew and len(few) < DISTINCT:
            what = f"its greedy texts hold {len(few)} different tokens: the engine did not take the seeded weights"
            result["errors"][arm] = what
            engines.pop(arm).stop()
    first = _first(result)
    if first in engines:
        text = drawn(result["arms"][first]["tokens"])
        _all_at_once(result, engines, until, "forced", text)
        _try(result, engines, first, until, "one_by_one", text)


def _arms(stage: Stage, only: list[str]) -> list[str]:
    """Of a stage, its ways first."""
    return [arm for arm in (*stage.ways, *stage.arms) if not only or arm in only or arm.endswith(AGAIN)]


def starts(name: str, stage: Stage, logs: Path, work: Path, until: float, given: argparse.Namespace) -> dict[str, Any]:
    """Each arm's cold start and the next one from its caches, alone on the machine: arm -> what it said and vLLM's lines of its times."""
    found: dict[str, Any] = {}
    turn = _Turn()
    turn.take()
    for arm in _arms(stage, given.arms):
        for kind in ("cold", "warm"):
            engine = given.engine(arm, f"{name}.{arm}", stage, work, logs)
            try:
                ready = engine.answer(until)
            except ArmError as error:
                ready = {"error": str(error)}
            finally:
                engine.stop()
            lines = engine.log.read_text(errors="replace").splitlines()
            said = [line[-240:] for line in lines if " took " in line or "layerfuse" in line or "seconds" in line]
            found[f"{arm}, {kind}"] = {**{key: ready.get(key) for key in ("start_s", "error")}, "said": said}
    turn.end()
    return found


def _try(
    result: dict[str, Any],
    engines: dict[str, Engine],
    arm: str,
    until: float,
    command: str | None,
    *given: Any,
    told: bool = False,
) -> Any:
    """Ask one arm, or take its answer to what it was told; one that fails takes no further part. No command: wait until it has started."""
    if arm not in engines:
        return None
    try:
        asked = command is not None and not told
        found = engines[arm].ask(until, command, *given) if asked else engines[arm].answer(until)
    except (ArmError, OSError) as error:
        result["errors"][arm] = f"{command or 'start'} {' '.join(map(str, given))[:80]}: {error}"
        engines.pop(arm).stop()
        return None
    key = " ".join(["ready" if command is None else command, *(str(each) for each in given if isinstance(each, int))])
    if command not in ("replay", "settle", "prefill", "decode_beside", "prompts", "prompt_kernels", "prompt_calls"):
        result["arms"][arm][key] = found
    return found


def _all_at_once(
    result: dict[str, Any], engines: dict[str, Engine], until: float, command: str, *given: Any
) -> dict[str, Any]:
    """Ask all arms, and wait for all: what each answered."""
    for engine in engines.values():
        with contextlib.suppress(OSError):  # its answer says that it has ended
            engine.tell(command, *given)
    return {arm: _try(result, engines, arm, until, command, *given, told=True) for arm in list(engines)}


def _in_turns(engines: dict[str, Engine], turns: int) -> Iterator[str]:
    """All arms in every turn, in every other one backwards."""
    for turn in range(turns):
        yield from [*engines][:: 1 if turn % 2 == 0 else -1]


def _time(result: dict[str, Any], engines: dict[str, Engine], batch: int, until: float, turns: int) -> None:
    times: dict[str, list[float]] = {arm: [] for arm in engines}
    once: dict[str, float] = {}
    for arm in list(engines):
        _try(result, engines, arm, until, "settle", batch, CONTEXT)
        found = _try(result, engines, arm, until, "replay", batch, 20, 2, 10)
        once[arm] = max(rank[-1] for rank in found) if found else 0.0
    for arm in _in_turns(engines, turns):
        each = max(5, min(100, int(20000 / once[arm])))
        found = _try(result, engines, arm, until, "replay", batch, 4 * each, 5, each)
        if found:
            times[arm].append(statistics.median(map(max, zip(*found, strict=True))))
    for arm, several in times.items():
        if arm in engines and several:
            result["arms"][arm][f"batch {batch}"] = {
                "us": round(statistics.median(several), 2),
                "turns_us": [round(each, 2) for each in several],
                "times_faster": _faster(times.get(_first(result), []), several),
            }


@contextlib.contextmanager
def _on_cores(engines: dict[str, Engine], number: int) -> Iterator[list[int]]:
    """Let all arms run on the same cores, whose numbers these are: their engines' threads on the first, where nothing else of theirs is; 0: anywhere."""
    before: dict[int, set[int]] = {}
    cores = sorted(os.sched_getaffinity(0))[-number:] if number else []
    try:
        for engine in engines.values() if cores else ():
            for thread in engine.threads():
                with contextlib.suppress(OSError):  # it has ended
                    before[thread] = os.sched_getaffinity(thread)
                    os.sched_setaffinity(thread, cores[:1] if thread == engine.process.pid else cores[1:] or cores)
        yield cores
    finally:
        for thread, where in before.items():
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread, where)


def _all_prompts(
    result: dict[str, Any], engines: dict[str, Engine], stage: Stage, until: float, given: argparse.Namespace
) -> None:
    with _on_cores(engines, given.cores and given.cores + stage.tp - 1) as cores:
        result["cores"] = cores
        for number, length in TOGETHER:
            _time_prompts(result, engines, number, length, until, given.prompt_turns)
    for number, length in TOGETHER:
        _count_calls(result, engines, number, length, until)


def _time_prompts(
    result: dict[str, Any], engines: dict[str, Engine], number: int, length: int, until: float, turns: int
) -> None:
    """Steps that hold prompts alone. The first of a turn finds what other arms have left in the caches of its cores, and does not count."""
    times: dict[str, list[float]] = {arm: [] for arm in engines}
    warm = [_try(result, engines, arm, until, "prompts", number, length, 5) for arm in list(engines)]
    rounds = 1 + max(3, min(20, int(A_TURN / max([1, *(min(found) for found in warm if found)]))))
    for arm in _in_turns(engines, turns):
        found = _try(result, engines, arm, until, "prompts", number, length, rounds)
        times[arm] += [statistics.median(found[1:])] if found else []
    for arm in list(engines):
        ranks = _try(result, engines, arm, until, "prompt_kernels", number, length)
        if ranks and (several := times[arm]):
            first = times.get(_first(result), [])
            pairs = [*zip(first, several, strict=False)]
            result["arms"][arm][f"prompts {number} x {length}"] = {
                "ms": round(statistics.median(several), 3),
                "turns_ms": [round(each, 3) for each in several],
                "times_faster": _faster(first, several),
                "times_faster_95": _interval([a / b for a, b in pairs]),
                "more_ms": round(statistics.median(b - a for a, b in pairs), 4) if pairs else None,
                "more_ms_95": _interval([b - a for a, b in pairs]),
                "gpu_ms": round(sum(us for _, us in ranks[0].values()) / 1000, 3),
                "launches": round(sum(count for count, _ in ranks[0].values()), 1),
            }


def _count_calls(result: dict[str, Any], engines: dict[str, Engine], number: int, length: int, until: float) -> None:
    """Of such a step, in each arm: all calls, and of which functions there are more or fewer than in the first arm."""
    first: dict[str, list[float]] = {}
    for arm in list(engines):
        ranks = _try(result, engines, arm, until, "prompt_calls", number, length)
        found = result["arms"][arm].get(f"prompts {number} x {length}")
        if ranks and found:
            counted = ranks[0]
            first = counted if arm == _first(result) else first
            found |= {"calls": round(sum(calls for calls, _ in counted.values()))}
            found |= {"more_calls": _more(first, counted) if first else None}


def _more(first: dict[str, list[float]], others: dict[str, list[float]]) -> dict[str, list[float]]:
    """Of which functions there are more calls than in the first arm, or fewer, and how many microseconds more they take: most first."""
    found = {
        name: [round(b - a, 1) for a, b in zip(first.get(name, (0, 0)), others.get(name, (0, 0)), strict=True)]
        for name in {**first, **others}
    }
    return dict(
        sorted(((name, each) for name, each in found.items() if each[0]), key=lambda each: -abs(each[1][1]))[:80]
    )


def _interval(values: list[float]) -> list[float] | None:
    """Between which of these values their median lies with 95 % (by the sign test, which asks nothing of their distribution); None: too few."""
    count, below, lowest = len(values), 0.0, -1
    while below + math.comb(count, lowest + 1) / 2**count <= 0.025:
        lowest += 1
        below += math.comb(count, lowest) / 2**count
    ordered = sorted(values)
    return None if lowest < 0 else [round(ordered[lowest], 4), round(ordered[count - 1 - lowest], 4)]


def _first(result: dict[str, Any]) -> str:
    """The arm that all are compared with."""
    return str(result.get("first", "vllm"))


def _faster(first: list[float], several: list[float]) -> float | None:
    """The median over the turns of how many times faster than the first arm; None: that was not timed."""
    ratios = [a / b for a, b in zip(first, several, strict=False)]
    return round(statistics.median(ratios), 4) if ratios else None


def _concluded(result: dict[str, Any], names: dict[str, str], logs: Path) -> dict[str, Any]:
    """The results with what follows from them: fused kernels, tokens against the first arm's, late compilations."""
    first = result["arms"].get(_first(result), {}).get("tokens")
    for name, arm in names.items():
        found = result["arms"][arm]
        for batch in BATCHES:
            ranks = found.pop(f"kernels {batch}", None)
            if ranks:
                found[f"fused {batch}"] = _ours(ranks[0])
                found[f"launches {batch}"] = round(sum(count for count, _ in ranks[0].values()), 1)
                most = sorted(ranks[0].items(), key=lambda each: -each[1][1])
                found[f"kernels {batch}"] = [[kernel, *numbers] for kernel, numbers in most[:40]]
        if first is not None and arm != _first(result) and "tokens" in found:
            found["agreement"] = agreement(first, found["tokens"])
        log = logs / f"{name}.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        found["late"] = sorted({line[-200:] for line in lines if LATE in line})
        found["said"] = [FOLDERS.sub("", line)[-300:] for line in lines if "layerfuse" in line][:40]
        report = logs / f"{name}.report.json"
        if report.exists():
            modules = json.loads(report.read_text())["modules"].values()
            found["missed"] = [module["missed"] for module in modules if module["missed"]]
            found["problems"] = [problem for module in modules for problem in module["problems"]]
    _compared(result)
    for found in result["arms"].values():
        for texts in ("tokens", "forced", "one_by_one"):
            found.pop(texts, None)
    return result


def _compared(result: dict[str, Any]) -> None:
    """Log probabilities against the first arm's, and against how far vLLM's own ways are apart."""
    arms = result["arms"]
    first = arms.get(_first(result), {})
    if "forced" in first:
        ways = {"other batches": distances(first["forced"], first["one_by_one"])} if "one_by_one" in first else {}
        for name, found in arms.items():
            if found is not first and "forced" in found:
                found["log probabilities"] = distances(first["forced"], found["forced"])
                if found["fusions"] is None:
                    ways[name] = found["log probabilities"]
        first["ways"] = ways
        for found in arms.values():
            if found["fusions"] is not None and "log probabilities" in found and ways:
                found["exceeds"] = exceeds(found["log probabilities"], ways)


def _ours(kernels: dict[str, list[float]]) -> dict[str, float]:
    counts = {ours: sum(n for kernel, (n, _) in kernels.items() if kernel.startswith(ours)) for ours in OURS}
    return {ours: count for ours, count in counts.items() if count}


def main(about: str | None = __doc__, engine: type[Engine] = Engine, stages: dict[str, Stage] = STAGES["vllm"]) -> None:
    """The command, for an engine and its stages."""
    global BATCHES, CONTEXT
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help="of --list; all that fit the GPUs if none")
    parser.add_argument("--out", type=Path, default=Path(f"{engine.first}_engine.json"))
    parser.add_argument("--logs", type=Path, default=None)
    parser.add_argument("--limit", type=float, default=3600, help="seconds for everything")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--prompts", action="store_true", help="time prompts alone, with the first arm once more")
    parser.add_argument("--prompt-turns", type=int, default=40, help="in which prompts are timed; short ones")
    parser.add_argument(
        "--beside", type=int, default=0, help="sequences that decode in each step of prompts; vLLM alone"
    )
    parser.add_argument(
        "--cores",
        type=int,
        default=4,
        help="that all arms share while prompts are timed, besides one for each further rank; 0: any",
    )
    parser.add_argument("--one-by-one", action="store_true", help="start engines one after another")
    parser.add_argument(
        "--arms",
        nargs="*",
        default=[],
        help=f"of each stage, where not all; {engine.first + AGAIN}: the first once more",
    )
    parser.add_argument(
        "--no-texts", action="store_true", help="times and kernels alone: no tokens, no log probabilities, no prompts"
    )
    parser.add_argument("--starts", action="store_true", help="time cold and warm starts alone, nothing else")
    parser.add_argument("--again", action="store_true", help="also stages that --out holds")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="sequences of decode steps")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens behind which a decode step is timed")
    given = parser.parse_args(namespace=argparse.Namespace(engine=engine))
    BATCHES, CONTEXT = tuple(given.batches), given.context
    if given.list:
        for name, stage in stages.items():
            print(f"{name}: {stage.shape}, tp {stage.tp}: {', '.join([*stage.ways, *stage.arms])}")
        return
    unknown = [name for name in given.stages if name not in stages]
    if unknown:
        parser.error(f"no stage is called {unknown[0]!r}; known: {', '.join(stages)}")
    asked = [stages[name] for name in given.stages or stages]
    if given.beside and not (given.prompts and engine.prompts):
        parser.error("--beside is of steps of prompts in vLLM: give --prompts too")
    if given.beside and given.beside + max(number for number, _ in TOGETHER) > max(BATCHES):
        parser.error(f"--beside {given.beside} leaves no room for prompts in an engine of {max(BATCHES)} sequences")
    nowhere = [
        arm for arm in given.arms if not any(arm.removesuffix(AGAIN) in {**stage.ways, **stage.arms} for stage in asked)
    ]
    if nowhere:
        known = dict.fromkeys(arm for stage in asked for arm in (*stage.ways, *stage.arms))
        parser.error(f"no arm of these stages is called {nowhere[0]!r}; known: {', '.join(known)}")
    work = Path(tempfile.gettempdir()) / f"{engine.first}_engine"
    logs = given.logs or work / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    results = json.loads(given.out.read_text()) if given.out.exists() else {"stages": {}}
    results["environment"] = {**environment(), "began": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())}
    gpus = _gpus()
    results["environment"]["gpus"] = gpus
    kind = "starts" if given.starts else "prompts" if given.prompts else "stages"
    for name in given.stages or [name for name in stages if not name.startswith("tiny")]:
        stage = stages[name]
        again = engine.first + AGAIN
        if given.prompts or again in given.arms:
            stage = evolve(stage, ways={**stage.ways, again: stage.ways[engine.first]})
        left = given.limit - (time.monotonic() - BEGAN)
        key = f"{name}, beside {given.beside} that decode" if given.beside else name
        if key in results.get(kind, {}) and not given.again:
            print(f"{name}: done before")
        elif stage.tp > len(gpus) and stage.engine.get("device") != "cpu":
            print(f"{name}: needs {stage.tp} GPUs, and there are {len(gpus)}")
        elif left < stage.needs:
            print(f"{name}: not begun, {left:.0f} s are left and it needs about {stage.needs}")
        else:
            print(f"{name}: begins at {time.monotonic() - BEGAN:.0f} s", flush=True)
            until = min(BEGAN + given.limit, time.monotonic() + 2 * stage.needs + 60)
            measure = starts if given.starts else run
            results.setdefault(kind, {})[key] = measure(name, stage, logs, work, until, given)
            given.out.write_text(json.dumps(results, indent=1) + "\n")
            if not given.starts:
                print(table({"stages": {key: results[kind][key]}}, BATCHES), flush=True)
    print(f"after {time.monotonic() - BEGAN:.0f} s\n{table(results, BATCHES)}")


def _gpus() -> list[str]:
    try:
        asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.sm", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip().splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []


if __name__ == "__main__":
    main()
