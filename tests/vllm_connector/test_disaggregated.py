"""The example with a prefill engine, a decode engine and a proxy, as a user runs it."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from kvdepot.lab.processes import wait_until
from support.vllm.engines import MakeModel
from support.vllm.examples import ENVIRONMENT, EXAMPLES, OPTIONS, free_port, run

# vLLM uses AMX's tiles in bfloat16 alone. In a process that has not asked the kernel for them, they end it with SIGILL.
HAS_AMX = "amx_tile" in Path("/proc/cpuinfo").read_text().split()
SETTINGS = OPTIONS | {"dtype": "bfloat16" if HAS_AMX else OPTIONS["dtype"]}


def command(model: Path) -> list[str]:
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in SETTINGS.items() if key != "enforce_eager"]
    return ["bash", str(EXAMPLES / "disaggregated" / "serve.sh"), str(model), *flags, "--enforce-eager"]


def descendants(pid: int) -> list[int]:
    """Return all descendants of a process."""
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return children + [found for child in children for found in descendants(child)]


def pid_in(log: Path) -> int:
    """Return the PID of the API server that wrote a log."""
    (pid,) = re.findall(r"Started server process \[(\d+)\]", log.read_text())
    return int(pid)


def test_prefill_and_decode_engines_share_a_depot(model: MakeModel, serve: dict[str, str]) -> None:
    output = run(*command(model("gqa")), PORT=str(free_port(3)), POOL_SIZE="128MiB", **serve)
    for name in ("prefill first", "both at once", "without the prefill engine"):
        (answer,) = re.findall(rf"^{name}: (.*?\[DONE\])", output, re.MULTILINE | re.DOTALL)
        assert '"text"' in answer
        assert '"finish_reason":"length"' in answer, "all four tokens, in fewer pieces if vLLM's server is slow"
    (loaded,) = re.findall(r"decode engine loaded: ([\d.]+)", output)
    assert float(loaded) in (692 + 640, 692 + 692), "at once, the last 53 tokens may be computed as quickly"


def test_the_example_ends_with_one_line_when_a_worker_of_the_decode_engine_dies(
    model: MakeModel, serve: dict[str, str], tmp_path: Path
) -> None:
    output, errors = tmp_path / "output", tmp_path / "errors"
    variables = {"PORT": str(free_port(3)), "POOL_SIZE": "128MiB", "TMPDIR": str(tmp_path), **serve}
    with output.open("wb") as out, errors.open("wb") as err:
        script = subprocess.Popen(
            command(model("gqa")), env={**os.environ, **ENVIRONMENT, **variables}, stdout=out, stderr=err
        )
    try:
        wait_until(lambda: b"prefill first:" in output.read_bytes(), 240)
        (log,) = tmp_path.glob("*/decode-engine")
        for pid in descendants(pid_in(log)):
            os.kill(pid, signal.SIGILL)
        assert script.wait(120) == 1
    finally:
        script.terminate()  # its trap ends the other processes
        script.wait(60)
    last = errors.read_text().splitlines()[-1]
    assert re.fullmatch(r"the decode-engine ended with status \d+; the end of its log, \S+, says why", last)
    assert "Traceback" not in errors.read_text()


class Engine(ThreadingHTTPServer):
    """Stands for an engine. It keeps the bodies of its requests and always gives the same answer."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.bodies: list[dict[str, Any]] = []
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
                """Log nothing."""

            def do_POST(self) -> None:
                engine.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                body = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        super().__init__(("127.0.0.1", 0), Handler)
        Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@pytest.mark.parametrize("concurrent", [False, True])
def test_the_proxy_names_the_session_of_a_header_to_both_engines(*, concurrent: bool) -> None:
    prefill, decode, port = Engine({"kv_transfer_params": {"by": "prefill"}}), Engine({"choices": []}), free_port()
    arguments = ["--prefill", prefill.url, "--decode", decode.url, "--port", str(port)]
    script = [sys.executable, str(EXAMPLES / "disaggregated" / "proxy.py")]
    proxy = subprocess.Popen([*script, *arguments, *(["--concurrent"] if concurrent else [])])

    def post(body: dict[str, Any], headers: dict[str, str]) -> bool:
        url, kind = f"http://127.0.0.1:{port}/v1/completions", {"Content-Type": "application/json"}
        with suppress(URLError), urlopen(Request(url, json.dumps(body).encode(), {**kind, **headers})) as answer:
            return answer.status == 200
        return False

    try:
        wait_until(lambda: post({"prompt": "a"}, {}), 60)
        assert post({"prompt": "b"}, {"X-Session-ID": "agent 7"})
        assert post({"prompt": "c", "session_id": "its own"}, {"X-Session-ID": "agent 7"})
        named = {"a": None, "b": "agent 7", "c": "its own"}
        wait_until(lambda: len(prefill.bodies) == len(named))
        for engine in (prefill, decode):
            assert {body["prompt"]: body.get("session_id") for body in engine.bodies} == named
        told = {"do_remote_prefill": True} if concurrent else {"by": "prefill"}
        assert all(body["kv_transfer_params"] == told for body in decode.bodies)
    finally:
        proxy.terminate()
        proxy.wait(30)
        for engine in (prefill, decode):
            engine.shutdown()
            engine.server_close()
