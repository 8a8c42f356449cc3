"""`vllm serve` with and without layerfuse, asked by vLLM's `bench serve`: tokens per second, and times to the first and to each next token.

    python bench/scripts/vllm_serve.py SHAPE [--rounds 3] [--at-once 64] [--requests 256] --out serve.json --logs FOLDER

Both servers hold the same random weights of a shape of `vllm_shapes`, stand on one GPU, and are asked in turns: while one is timed, the
other waits. Each round asks both for the same random prompts of 1024 tokens and answers of 128; one round before them is not counted. Beside
commands of `vllm_engine` servers start, and nothing else is timed while they are.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import serving
from vllm_engine import LATE, QUIET
from vllm_shapes import folder_of
from workloads import SAID

HERE = Path(__file__).parent
WORK = Path(tempfile.gettempdir()) / "vllm_serve"
PROMPT, ANSWER = 1024, 128
SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 128, 256)
ARMS = {"vllm": None, "default": {}}
"""Name -> layerfuse's options; None: without it."""
KEYS = (
    "output_throughput", "total_token_throughput", "request_throughput", "mean_ttft_ms", "median_ttft_ms", "mean_tpot_ms", "median_tpot_ms",
    "completed", "duration",
)  # fmt: skip
"""Of what `vllm bench serve` writes."""
CLI = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
QUICK = {**SAID["vllm"]["settings"]["skip"], **SAID["vllm"]["settings"]["untried"]}
"""What only makes a start shorter."""


def server(arm: str, model: Path, port: int, logs: Path, cache: int) -> subprocess.Popen[bytes]:
    """Begin to serve."""
    options = ARMS[arm]
    additional = {} if options is None else {"layerfuse": {**options, "report": str(logs / f"{arm}.report.json")}}
    variables = {
        **os.environ, **QUIET, **QUICK["variables"], "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_PLUGINS": "" if options is None else "layerfuse",
        "VLLM_CACHE_ROOT": str(WORK / "cache" / model.name / arm), "DG_JIT_CACHE_DIR": str(WORK / "cache" / "deep_gemm"),
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }  # fmt: skip
    command = [
        *CLI, "serve", str(model), "--served-model-name", "m", "--port", str(port), "--host", "127.0.0.1", "--load-format", "dummy",
        "--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "256", "--gpu-memory-utilization", "0.05",
        "--kv-cache-memory-bytes", str(cache), "--no-enable-prefix-caching", "--worker-extension-cls", "vllm_probe.Probe",
        # vLLM's own 51 sizes would have DeepGEMM compile kernels for each, which only makes the start longer.
        "--cudagraph-capture-sizes", *map(str, SIZES), "--kernel-config", json.dumps(QUICK["engine"]["kernel_config"]), "--additional-config", json.dumps(additional),
    ]  # fmt: skip
    with (logs / f"{arm}.log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=variables, start_new_session=True)


def wait(process: subprocess.Popen[bytes], port: int, until: float) -> None:
    """Until it answers.

    Raises:
        RuntimeError: it has ended, or did not answer in time.
    """
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise RuntimeError(
        f"the server on port {port} " + ("did not start in time" if process.poll() is None else "has ended")
    )


def client() -> tuple[Any, Any]:
    """The benchmark of vLLM and the parser of its arguments, in this process, which sees no GPU: to import it takes as long as a round."""
    os.environ.update(QUIET, CUDA_VISIBLE_DEVICES="", VLLM_PLUGINS="")
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    return serve, parser


def ask(bench: tuple[Any, Any], model: Path, port: int, requests: int, at_once: int, seed: int) -> dict[str, Any]:
    """One round of `vllm bench serve`.

    Raises:
        RuntimeError: not every request was answered.
    """
    serve, parser = bench
    before = _compiled()
    given = [
        "--backend", "openai", "--base-url", f"http://127.0.0.1:{port}", "--model", "m",
        "--tokenizer", str(model), "--dataset-name", "random", "--random-input-len", str(PROMPT), "--random-output-len", str(ANSWER),
        "--num-prompts", str(requests), "--max-concurrency", str(at_once), "--ignore-eos", "--seed", str(seed), "--disable-tqdm",
        "--percentile-metrics", "ttft,tpot",
    ]  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        said = serve.main(parser.parse_args(given))
    if said["completed"] != requests:
        raise RuntimeError(f"the server on port {port} answered {said['completed']} of {requests} requests")
    return {**{key: round(float(said[key]), 3) for key in KEYS}, "compiled": len(_compiled() - before)}


def _compiled() -> set[Path]:
    """The kernels that DeepGEMM has compiled so far, for both servers."""
    return set((WORK / "cache" / "deep_gemm").rglob("*.cubin"))


@contextlib.contextmanager
def started(given: Any, logs: Path, until: float) -> Iterator[serving.Asked]:
    """Both servers."""
    model = folder_of(given.shape, WORK / "models")
    ports = {arm: given.port + place for place, arm in enumerate(ARMS)}
    servers = {arm: server(arm, model, port, logs, given.cache) for arm, port in ports.items()}
    try:
        bench = client()
        for arm, process in servers.items():
            wait(process, ports[arm], until)
        yield {arm: partial(ask, bench, model, port, given.requests, given.at_once) for arm, port in ports.items()}
    finally:
        for process in servers.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)


def main() -> None:
    port = "--port", {"type": int, "default": 8123}
    given = serving.parsed(__doc__, "vllm", WORK, 12 << 30, "bytes for keys and values, of each server", port)
    logs, until = given.logs / given.shape, time.monotonic() + given.limit
    logs.mkdir(parents=True, exist_ok=True)
    rounds = serving.in_rounds(given, until, started(given, logs, until))
    lines = {arm: (logs / f"{arm}.log").read_text(errors="replace").splitlines() for arm in ARMS}
    late = {arm: sorted({line[-200:] for line in several if LATE in line}) for arm, several in lines.items()}
    said = [line[-300:] for line in lines["default"] if "layerfuse" in line][:40]
    serving.write(given, rounds, KEYS, shape=given.shape, prompt=PROMPT, answer=ANSWER, late=late, said=said)


if __name__ == "__main__":
    main()
