"""Real routers, started by the tests on loopback: vllm-router and Dynamo's indexer."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

from kvdepot.lab.processes import DepotProcess, wait_until
from support.events import MODEL, Engine, tokens_of
from support.peer import prompt

PROGRAMS = Path(os.environ.get("ROUTER_PROGRAMS", Path(sys.executable).parent))  # `tox r -e routers` installs them
CHUNK_TOKENS = 64
HOST_CREDIT = 0.8  # of vllm-router, for tokens in host memory


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def ask(port: int, path: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as reply:
        text = reply.read()
    return json.loads(text) if text else None


class _Answers(BaseHTTPRequestHandler):
    """An engine that answers every request with the name of its node."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def _say(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self._say({"status": "ok", "data": [{"id": MODEL, "object": "model"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        choice = {"index": 0, "text": cast("Node", self.server).name, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        self._say({"id": "x", "object": "text_completion", "model": MODEL, "choices": [choice], "usage": usage})


class Node(ThreadingHTTPServer):
    """A node: a depot, an engine beside it, and the engine's HTTP server."""

    def __init__(self, name: str, *flags: str) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.name = name
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()
        events, replay = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
        self.events, self.replay = events, replay
        self.depot = DepotProcess(
            "--events", events, "--events-replay", replay, "--events-topic", "", *flags, pool_size="1MiB"
        )
        self.engine = Engine(self.depot)

    def store(self, name: str, num_chunks: int) -> None:
        self.engine.store(prompt(num_chunks, name))

    def holds(self, name: str, num_chunks: int) -> int:
        """Return how many chunks of a prompt a lookup finds; describe them if the depot asks for it, as engines do."""
        run, scheduler = prompt(num_chunks, name), self.engine.scheduler
        reply = scheduler.find(run)
        if reply.wants_tokens:
            self.engine.describe(run.slice(0, reply.num_chunks))
        return reply.num_chunks

    def restart_engine(self) -> None:
        self.engine.close()
        self.engine = Engine(self.depot)

    def restart(self, *, is_cold: bool) -> None:
        """Kill the depot and start it again, with its pool or without."""
        self.engine.close()
        self.depot.kill()
        if is_cold:
            for file in self.depot.pool_directory.iterdir():
                file.unlink()
        self.depot.start()
        self.engine = Engine(self.depot)

    def close(self) -> None:
        self.engine.close()
        self.depot.close()
        self.shutdown()
        self.server_close()


class Program:
    """A program with its log."""

    def __init__(self, log: Path, *command: str) -> None:
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class VllmRouter(Program):
    """vllm-router, which follows the depots' events."""

    def __init__(self, log: Path, nodes: Sequence[Node]) -> None:
        self.port, metrics = free_ports(2)
        command = [str(PROGRAMS / "vllm-router"), "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--prometheus-port", str(metrics), "--prometheus-host", "127.0.0.1", "--log-level", "debug"]
        command += ["--policy", "kv_aware", "--kv-event-block-size", str(CHUNK_TOKENS), "--kv-event-model", MODEL]
        command += ["--worker-urls", *(node.url for node in nodes)]
        command += [f"--kv-event-source={node.url}={node.events}" for node in nodes]
        command += [f"--kv-event-replay-source={node.url}={node.replay}" for node in nodes]
        super().__init__(log, *command)
        wait_until(lambda: answers(self.port, "/health"), 60, "vllm-router")

    def choice(self, name: str, num_chunks: int) -> str:
        """Return the node that gets a prompt."""
        tokens = tokens_of(prompt(num_chunks, name), CHUNK_TOKENS)
        reply = ask(self.port, "/v1/completions", {"model": MODEL, "prompt": tokens, "max_tokens": 1})
        return reply["choices"][0]["text"]

    def credited(self, name: str, num_chunks: int) -> int:
        """Return how many chunks of a prompt the chosen node is credited with."""
        before = self._credits()
        self.choice(name, num_chunks)
        wait_until(lambda: len(self._credits()) > len(before), 10)
        return round(self._credits()[-1] / HOST_CREDIT / CHUNK_TOKENS)

    def _credits(self) -> list[int]:
        return [int(each) for each in re.findall(r"prefix_cost.*credited_prefix_tokens\D*=\D*?(\d+)", self._plain())]

    def _plain(self) -> str:
        return re.sub(r"\x1b\[[0-9;]*m", "", self.log.read_text(errors="replace"))


class DynamoIndexer(Program):
    """Dynamo's standalone indexer, which follows the depots' events."""

    def __init__(self, log: Path, nodes: Sequence[Node]) -> None:
        (self.port,) = free_ports(1)
        python = str(PROGRAMS / "python")
        options = ("--block-size", str(CHUNK_TOKENS), "--port", str(self.port), "--model-name", MODEL)
        super().__init__(log, python, "-m", "dynamo.indexer", *options)
        wait_until(lambda: answers(self.port, "/health"), 60, "dynamo.indexer")
        self.names = {str(number): node.name for number, node in enumerate(nodes, 1)}
        for number, node in enumerate(nodes, 1):
            source = {"endpoint": node.events, "replay_endpoint": node.replay, "block_size": CHUNK_TOKENS}
            ask(self.port, "/register", {"instance_id": number, "model_name": MODEL, **source})

    def known(self, name: str, num_chunks: int) -> dict[str, int]:
        """Return how many chunks of a prompt each node is known to have in its pool."""
        tokens = tokens_of(prompt(num_chunks, name), CHUNK_TOKENS)
        reply = ask(self.port, "/query", {"model_name": MODEL, "token_ids": tokens})
        return {self.names[each]: found["cpu"] // CHUNK_TOKENS for each, found in reply["instances"].items()}


def answers(port: int, path: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10):
            return True
    except OSError:
        return False
