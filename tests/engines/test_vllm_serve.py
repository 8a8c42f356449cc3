"""bench/scripts/vllm_serve.py beside vLLM's own code: the arguments of its server, and its benchmark against a server that streams."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("vllm_host")  # before vllm: it chooses the platform
pytest.importorskip("vllm.entrypoints.common.cli_args")  # which 0.26 has elsewhere
SCRIPTS = Path(__file__).parents[2] / "bench" / "scripts"


class Streams(BaseHTTPRequestHandler):
    """Answers as OpenAI's interface does, token by token; of those that are asked for more than it has, it answers none."""

    MOST = 128

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        self._say("application/json", b'{"data": [{"id": "m", "root": "m"}]}')

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens = asked["max_tokens"]
        if tokens > self.MOST:
            self.send_error(500)
            return
        parts: list[dict[str, Any]] = [{"choices": [{"index": 0, "text": "t5 "}]}] * tokens
        parts += [{"choices": [], "usage": {"prompt_tokens": 1024, "completion_tokens": tokens}}]
        lines = "".join(f"data: {json.dumps(each)}\n\n" for each in parts)
        self._say("text/event-stream", f"{lines}data: [DONE]\n\n".encode())

    def _say(self, kind: str, what: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(what)))
        self.end_headers()
        self.wfile.write(what)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    with ThreadingHTTPServer(("127.0.0.1", 0), Streams) as server, mock.patch.dict(os.environ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def test_a_round_gives_what_vllms_benchmark_says_and_needs_every_answer(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm_serve
    from vllm_shapes import folder_of

    bench, model = vllm_serve.client(), folder_of("tiny-qwen3", tmp_path)
    found = vllm_serve.ask(bench, model, port, 6, 3, 1)
    assert set(found) == {*vllm_serve.KEYS, "compiled"} and found["compiled"] == 0
    assert found["completed"] == 6 and found["output_throughput"] > 0
    monkeypatch.setattr(vllm_serve, "ANSWER", Streams.MOST + 1)
    with pytest.raises(RuntimeError, match="answered 0 of 2 requests"):
        vllm_serve.ask(bench, model, port, 2, 2, 1)


def test_the_servers_arguments_are_vllms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    monkeypatch.syspath_prepend(str(SCRIPTS))
    import vllm_serve

    begun: list[Any] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **how: begun.append((command, how["env"])))
    for arm in vllm_serve.ARMS:
        vllm_serve.server(arm, tmp_path, 8123, tmp_path, 1 << 30)
    for (command, environment), plugins in zip(begun, ("", "layerfuse"), strict=True):
        asked = make_arg_parser(FlexibleArgumentParser()).parse_args(command[command.index("serve") + 1 :])
        validate_parsed_serve_args(asked)
        assert asked.model_tag == str(tmp_path)
        assert asked.kernel_config.enable_flashinfer_autotune is False
        assert ("layerfuse" in asked.additional_config) == bool(plugins)
        assert (environment["VLLM_PLUGINS"], asked.cudagraph_capture_sizes[-1]) == (plugins, 256)
