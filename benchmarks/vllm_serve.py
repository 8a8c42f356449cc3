"""`vllm serve` with the plugin on, and a few hundred requests over HTTP: every answer must come whole, and nothing be compiled late.

    python benchmarks/vllm_serve.py [--shape deepseek-v3-fp8] [--fusions a,b] [--requests 300] [--at-once 32] --out serve.json --logs FOLDER

The model has random weights (`vllm_shapes`) and a tokenizer of one word per token. Prompts have 8 to 1500 tokens, answers 16; they are
sent by the standard library alone. The same requests are sent twice, so that the second time nothing may be new.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from environment import environment
from vllm_engine import LATE, QUIET
from vllm_shapes import MLA, SHAPES, VOCABULARY, folder_of
from vllm_stages import STAGES

HERE = Path(__file__).parent
ANSWER = 16
"""Tokens of an answer."""


async def _exchange(port: int, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """One request over a connection of its own: status and body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    raw = await reader.read()
    writer.close()
    head_raw, _, rest = raw.partition(b"\r\n\r\n")
    status = int(head_raw.split()[1])
    if b"transfer-encoding: chunked" in head_raw.lower():
        whole = b""
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            count = int(size, 16)
            whole, rest = whole + rest[:count], rest[count + 2 :]
            if not count:
                break
        rest = whole
    return status, rest


async def _complete(port: int, prompt: list[int], gate: asyncio.Semaphore) -> tuple[float, str]:
    """Seconds, and the text of the answer or what was wrong."""
    body = {"model": "m", "prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
    async with gate:
        began = time.monotonic()
        status, raw = await _exchange(port, "POST", "/v1/completions", json.dumps(body).encode())
        took = time.monotonic() - began
    if status != 200:
        return took, f"! status {status}: {raw[:200].decode(errors='replace')}"
    said = json.loads(raw)
    number = said["usage"]["completion_tokens"]
    return took, said["choices"][0]["text"] if number == ANSWER else f"! {number} tokens"


async def _send(port: int, requests: int, at_once: int) -> dict[str, Any]:
    draw = random.Random(0)
    lengths = [draw.choice((8, 33, 120, 400, 900, 1500)) for _ in range(requests)]
    prompts = [[draw.randrange(2, VOCABULARY) for _ in range(length)] for length in lengths]
    gate, began = asyncio.Semaphore(at_once), time.monotonic()
    answers = await asyncio.gather(*(_complete(port, prompt, gate) for prompt in prompts))
    took = time.monotonic() - began
    wrong = [text for _, text in answers if text.startswith("!")]
    return {
        "requests": requests, "wrong": len(wrong), "first wrong": wrong[:3], "seconds": round(took, 2),
        "requests_per_s": round(requests / took, 1), "tokens_per_s": round(requests * ANSWER / took),
        "median_s": round(statistics.median(each for each, _ in answers), 3), "texts": [text for _, text in answers],
    }  # fmt: skip


async def _ready(port: int, server: subprocess.Popen[bytes], until: float) -> bool:
    while time.monotonic() < until and server.poll() is None:
        try:
            if (await _exchange(port, "GET", "/health"))[0] == 200:
                return True
        except (OSError, ValueError, IndexError):
            pass
        await asyncio.sleep(1)
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="deepseek-v3-fp8", choices=[*SHAPES])
    parser.add_argument("--fusions", default=",".join(STAGES["fp8"].arms["all"]), help="empty: without layerfuse")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--limit", type=float, default=240)
    parser.add_argument("--out", type=Path, default=Path("vllm_serve.json"))
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "vllm_engine" / "logs")
    given = parser.parse_args()
    given.logs.mkdir(parents=True, exist_ok=True)
    work, until = Path(tempfile.gettempdir()) / "vllm_engine", time.monotonic() + given.limit
    log = given.logs / "serve.log"
    additional = {"layerfuse": {"fusions": given.fusions}} if given.fusions else {}
    variables = {
        **os.environ, **QUIET, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_USE_DEEP_GEMM": "0",
        "VLLM_PLUGINS": "layerfuse" if given.fusions else "", "VLLM_CACHE_ROOT": str(work / "cache" / "serve"),
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }  # fmt: skip
    command = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder_of(given.shape, work / "models")),
        "--served-model-name", "m", "--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", "2048",
        "--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", str(4 << 30), "--max-num-seqs", "64",
        "--max-num-batched-tokens", "8192", "--no-enable-prefix-caching", "--host", "127.0.0.1", "--port", str(given.port),
        "--tensor-parallel-size", str(given.tp), "--worker-extension-cls", "vllm_probe.Probe",
        "--additional-config", json.dumps(additional),
        *(["--attention-backend", "TRITON_MLA"] if given.shape in MLA else []),
    ]  # fmt: skip
    result: dict[str, Any] = {"environment": environment(), "shape": given.shape, "fusions": given.fusions}
    began = time.monotonic()
    with log.open("wb") as file:
        server = subprocess.Popen(command, env=variables, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            result["ready"] = asyncio.run(_ready(given.port, server, until))
            result["started_s"] = round(time.monotonic() - began, 1)
            if result["ready"]:
                sent = [asyncio.run(_send(given.port, given.requests, given.at_once)) for _ in range(2)]
                texts = [each.pop("texts") for each in sent]
                result["sent"] = sent
                # Which requests share a step is chance, and so is a tie's outcome.
                result["answers alike both times"] = sum(a == b for a, b in zip(*texts, strict=True))
        finally:
            os.killpg(server.pid, signal.SIGINT)
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
    lines = log.read_text(errors="replace").splitlines()
    result["late"] = sorted({line[-200:] for line in lines if LATE in line})
    result["said"] = [line[-300:] for line in lines if "layerfuse" in line][:40]
    result["errors"] = [line[-300:] for line in lines if " ERROR " in line or "Traceback" in line][:20]
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key not in ("environment", "said")}, indent=1))
    if not result["ready"]:
        print("\n".join(lines[-40:]))
        sys.exit(1)


if __name__ == "__main__":
    main()
