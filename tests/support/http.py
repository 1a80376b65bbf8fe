"""An HTTP server in front of a depot, and requests to it. Needs kvdepot[http]."""

import asyncio
import json
import socket
import urllib.error
import urllib.request
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.types import Message

from kvdepot.lab.processes import DepotProcess
from kvdepot.operate.serve import HttpServer, HttpSettings

TOKEN = "a token that nobody guesses"


class Http:
    """An HTTP server in front of a depot. It runs in this process, so it answers while the depot is stopped or dead."""

    def __init__(self, depot: DepotProcess) -> None:
        self.server = HttpServer(depot.url, HttpSettings("127.0.0.1", 0, TOKEN, names=("gpu-7.example",)))

    def get(self, path: str, token: str = TOKEN) -> tuple[int, str]:
        return self.send("GET", path, None, token)

    def post(self, path: str, body: object = None, token: str = TOKEN) -> tuple[int, Any]:
        status, text = self.send("POST", path, json.dumps(body or {}).encode(), token)
        return status, json.loads(text)

    def send(self, method: str, path: str, body: bytes | None, token: str, host: str = "") -> tuple[int, str]:
        request = urllib.request.Request(f"http://127.0.0.1:{self.server.port}{path}", body, method=method)
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        if host:
            request.add_header("Host", host)
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=30)

    def metrics(self, token: str = TOKEN) -> dict[str, float]:
        status, text = self.get("/metrics", token)
        assert status == 200
        return {
            sample.name + "".join(f"[{value}]" for value in sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


def status_of_app(app: Starlette, path: str, host: str = "127.0.0.1") -> int:
    """Return the status of the application's answer to a request without the token. No socket listens."""
    statuses: list[int] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    scope = {"type": "http", "method": "GET", "path": path, "headers": [(b"host", host.encode())]}
    asyncio.run(app(scope, receive, send))
    return statuses[0]
