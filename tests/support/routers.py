"""Real routers that tests start on loopback: vllm-router and Dynamo's indexer."""

import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol, cast

from kvdepot.lab.processes import DepotProcess, wait_until
from support.events import MODEL, Engine, tokens_of
from support.peer import prompt

PROGRAMS = Path(os.environ.get("ROUTER_PROGRAMS", Path(sys.executable).parent))  # `tox r -e routers` installs them
CHUNK_TOKENS = 64
BELOW_EPHEMERAL_PORTS = range(20_000, 32_768)
HOST_CREDIT = 0.8  # vllm-router's credit for a token in host memory


def free_ports(count: int) -> list[int]:
    """Return free ports outside the ephemeral range, so that no connection takes them while their server restarts."""
    with contextlib.ExitStack() as opened:
        ports: list[int] = []
        while len(ports) < count:
            port = random.choice(BELOW_EPHEMERAL_PORTS)
            probe = opened.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                ports.append(port)
        return ports


def ask(port: int, path: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as reply:
        text = reply.read()
    return json.loads(text) if text else None


class Source(Protocol):
    """An engine behind a router, with the events about the blocks that it or its depot holds."""

    name: str
    url: str
    events: str
    replay: str


class Front(ThreadingHTTPServer):
    """The HTTP server of an engine, which answers prompts with the engine's name and what `serve` returns.

    Args:
        name: name of the engine.
        serve: takes the tokens of a prompt and returns how many of them were not computed.
    """

    def __init__(self, name: str, serve: Callable[[list[int]], int]) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.name = name
        self.answer = serve
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _Answers(BaseHTTPRequestHandler):
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
        front = cast("Front", self.server)
        prompt = json.loads(self.rfile.read(int(self.headers["content-length"])))["prompt"]
        choice = {"index": 0, "text": front.name, "finish_reason": "stop"}
        details = {"cached_tokens": front.answer(prompt)}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2, "prompt_tokens_details": details}
        self._say({"id": "x", "object": "text_completion", "model": MODEL, "choices": [choice], "usage": usage})


class Node(Front):
    """A node: a depot, an engine beside it that computes nothing, and the engine's HTTP server."""

    def __init__(self, name: str, *flags: str) -> None:
        super().__init__(name, lambda _prompt: 0)
        events, replay = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
        self.events, self.replay = events, replay
        self.depot = DepotProcess(
            "--events", events, "--events-replay", replay, "--events-topic", "", *flags, pool_size="1MiB"
        )
        self.engine = Engine(self.depot)

    def store(self, name: str, num_chunks: int) -> None:
        self.engine.store(prompt(num_chunks, name))

    def holds(self, name: str, num_chunks: int) -> int:
        """Return how many chunks of a prompt a lookup finds."""
        return self.engine.holds(prompt(num_chunks, name))

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
        wait_until(lambda: not self.depot.status().recovering, what="the entries of the depot before")
        self.engine = Engine(self.depot)

    def close(self) -> None:
        self.engine.close()
        self.depot.close()
        super().close()


class Program:
    """A running program and its log."""

    def __init__(self, log: Path, *command: str) -> None:
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class VllmRouter(Program):
    """vllm-router, which follows the events of engines or of their depots."""

    def __init__(self, log: Path, sources: Sequence[Source], block_tokens: int = CHUNK_TOKENS) -> None:
        self.port, metrics = free_ports(2)
        self._first_byte = 0  # the log is read from here on
        command = [str(PROGRAMS / "vllm-router"), "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--prometheus-port", str(metrics), "--prometheus-host", "127.0.0.1", "--log-level", "debug"]
        command += ["--policy", "kv_aware", "--kv-event-block-size", str(block_tokens), "--kv-event-model", MODEL]
        command += ["--worker-urls", *(source.url for source in sources)]
        command += [f"--kv-event-source={source.url}={source.events}" for source in sources]
        command += [f"--kv-event-replay-source={source.url}={source.replay}" for source in sources]
        super().__init__(log, *command)
        wait_until(lambda: answers(self.port, "/health"), 60, "vllm-router")

    def route(self, tokens: list[int]) -> tuple[str, int]:
        """Send a prompt. Return the engine that got it and the number of tokens that this engine did not compute."""
        reply = ask(self.port, "/v1/completions", {"model": MODEL, "prompt": tokens, "max_tokens": 1})
        return reply["choices"][0]["text"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]

    def forget(self) -> None:
        """Ignore the log up to here from now on."""
        self._first_byte = self.log.stat().st_size

    def last_heard(self, source: Source) -> int:
        """Return the sequence number of the last batch that the router took from a source, -1 if none."""
        said = self._plain(self._first_byte)
        found = re.findall(rf"sequence advanced source={re.escape(source.url)} .*?seq=(\d+)", said)
        return int(found[-1]) if found else -1

    def choice(self, name: str, num_chunks: int) -> str:
        """Send a prompt and return the name of the node that got it."""
        return self.route(tokens_of(prompt(num_chunks, name), CHUNK_TOKENS))[0]

    def credited(self, name: str, num_chunks: int) -> int:
        """Send a prompt. Return how many of its chunks the chosen node is credited with."""
        return round(self.credit(tokens_of(prompt(num_chunks, name), CHUNK_TOKENS)) / HOST_CREDIT / CHUNK_TOKENS)

    def credit(self, tokens: list[int]) -> int:
        """Send a prompt. Return the tokens credited to the chosen engine. Those in host memory count in part."""
        first_byte = self.log.stat().st_size
        self.route(tokens)
        wait_until(lambda: self._credits(first_byte), 10)
        return self._credits(first_byte)[-1]

    def _credits(self, first_byte: int) -> list[int]:
        said = self._plain(first_byte)
        return [int(each) for each in re.findall(r"prefix_cost.*credited_prefix_tokens\D*=\D*?(\d+)", said)]

    def _plain(self, first_byte: int) -> str:
        with self.log.open("rb") as log:
            log.seek(first_byte)
            return re.sub(r"\x1b\[[0-9;]*m", "", log.read().decode(errors="replace"))


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
        """Return how many chunks of a prompt each node has in its pool, as far as the indexer knows."""
        tokens = tokens_of(prompt(num_chunks, name), CHUNK_TOKENS)
        reply = ask(self.port, "/query", {"model_name": MODEL, "token_ids": tokens})
        return {self.names[each]: found["cpu"] // CHUNK_TOKENS for each, found in reply["instances"].items()}


def answers(port: int, path: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10):
            return True
    except OSError:
        return False
