"""Operations over HTTP: `kvdepot serve --http 127.0.0.1:9460`, with `pip install 'kvdepot[http]'`.

A separate process serves HTTP and asks the depot over its control socket, like any operator's tool. It shares only the
listening socket with the depot (`kvdepot.operate.serve`), so HTTP requests cannot break or block the server's loop, and
the health check tells whether that loop answers. Request bodies and the OpenAPI document are derived from the
declarations of operations (`kvdepot.wire.operation`).

Any user of the machine can connect, so operations need the bearer token. Health, readiness, the page without data, the
OpenAPI document, and metrics on loopback do not need it; without it, metrics do not tell tenants apart. Concurrent
requests without the token share one answer, so many of them cost the depot no more than one. The Host header must be an
address or a name of the depot. Otherwise a foreign page could reach the depot through a browser (DNS rebinding).

A connection carries one request, with a deadline to send it and a deadline to read the answer. When there are too many
connections, the server closes a silent one, so probes are answered, as they send at once.
"""

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import logging
import os
import re
import resource
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import cache
from importlib import resources
from importlib.metadata import version
from typing import Any, ClassVar, Final, Protocol, cast

import msgspec
import uvicorn
from msgspec.structs import asdict
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from kvdepot.client.operator import ask_depot
from kvdepot.errors import DepotUnavailable, KVDepotError, RemoteError, reason_of_invalid
from kvdepot.logs import set_up_logs
from kvdepot.operate import operations as o
from kvdepot.operate.metrics import MEDIA_TYPE, render_metrics
from kvdepot.operate.serve import BACKLOG, HttpSettings
from kvdepot.processes import be_a_child
from kvdepot.wire import messages as m
from kvdepot.wire.operation import Endpoint, Operation, OperatorRequest, R, body_type, known_operations, request_of
from kvdepot.wire.status import TenantStatus

logger = logging.getLogger(__name__)

_STATUS_SECONDS: Final = 5.0  # below the 10 s of a Prometheus scrape
_CHANGE_SECONDS: Final = 90.0  # clearing a large cache alternates with requests of engines
_HEALTH_SECONDS: Final = 1.0  # a healthy loop answers within this
_LARGEST_BODY_BYTES: Final = 8 << 20  # 65,536 keys in hexadecimal take 4 MiB
_STOP_SECONDS: Final = 5.0  # for requests under way, before the process exits
_MOST_CONNECTIONS: Final = 256  # dashboards and scrapers hold a few each
# asyncio's `backlog`: also how often it tries to accept before connections above the limit are closed. With 128 and few
# descriptors, each turn logged 100 tracebacks, and no probe was answered meanwhile.
_ACCEPTED_A_TURN: Final = 8
_HOST: Final = re.compile(r"(?:\[(?P<address>[^\[\]]*)\]|(?P<name>[^:]*))(?::\d*)?")


class Ask(Protocol):
    """Asks the depot."""

    def __call__(self, request: Operation[R], deadline_seconds: float, /) -> R:
        """Send a request and return the reply; raises like `ask_depot`."""
        ...


class Health(msgspec.Struct):
    """Reply of `/healthz` and `/readyz`."""

    status: str
    why: str = ""


_OPEN: Final = (  # to all, without the token
    Endpoint("GET", "/healthz", "200 if the request loop answers, else 503", shown=Health),
    Endpoint("GET", "/readyz", "200 if the depot accepts stores, else 503", shown=Health),
    Endpoint("GET", "/metrics", "Prometheus metrics; off loopback, and by tenant, only with the token", shown=str),
)


def _decode_body(operation: type[OperatorRequest], data: bytes) -> OperatorRequest:
    """Return the request in a JSON body. An empty body means an empty object.

    Raises:
        ValueError: it is malformed: see `request_of`.
        msgspec.MsgspecError: it is no JSON, or a field has the wrong type.
    """
    return request_of(operation, msgspec.json.decode(data or b"{}", type=body_type(operation)))


@cache
def _openapi_document() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of this version."""
    endpoints = [(each, operation) for operation in known_operations() for each in operation.endpoints]
    endpoints += [(each, None) for each in _OPEN]
    bodies = {each: body_type(operation) for each, operation in endpoints if operation and each.method == "POST"}
    types = [*bodies.values(), *(each.shown for each, _ in endpoints)]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(map(repr, types), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for each, operation in endpoints:
        media = "text/plain" if each.shown is str else "application/json"
        described: dict[str, Any] = {
            "summary": each.summary,
            "responses": {"200": {"description": "Done", "content": {media: {"schema": schema_of[repr(each.shown)]}}}},
        }
        if each in bodies:
            described["requestBody"] = {"content": {"application/json": {"schema": schema_of[repr(bodies[each])]}}}
            described["responses"]["400"] = {"description": "The body is malformed; nothing was changed"}
        if operation is not None:
            described["security"] = [{"token": []}]
            described["responses"] |= {
                "401": {"description": "The bearer token is missing or wrong"},
                "409": {"description": "The depot refused; nothing was changed"},
            }
        paths.setdefault(each.path, {})[each.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvdepot", "version": version("kvdepot"), "description": "Operations of one depot"},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def create_app(ask: Ask, settings: HttpSettings) -> Starlette:
    """Return the application.

    Args:
        ask: asks the depot.
        settings: the token, and the host names of the depot.
    """

    def healthz() -> Response:
        began = time.monotonic()
        try:
            reply = ask(m.Hello(m.PROTOCOL_VERSION, "http"), _HEALTH_SECONDS)
        except KVDepotError as error:
            return _json({"status": "unhealthy", "why": str(error)}, 503)
        return _json({"status": "ok", "epoch": reply.epoch, "answered_seconds": round(time.monotonic() - began, 4)})

    def readyz() -> Response:
        try:
            status = ask(o.Status(), _HEALTH_SECONDS).status
        except KVDepotError as error:
            return _json({"status": "unhealthy", "why": str(error)}, 503)
        if status.recovering:
            return _json({"status": "starting", "why": "reading the entries of an earlier server"}, 503)
        if status.draining:
            return _json({"status": "draining", "why": 'stores are declined: POST /drain {"draining": false}'}, 503)
        return _json({"status": "ready", "pool_ready_bytes": status.pool_ready_bytes})

    def metrics() -> Response:
        return Response(render_metrics(ask(o.Status(), _STATUS_SECONDS).status), media_type=MEDIA_TYPE)

    def open_metrics() -> Response:
        status = ask(o.Status(), _STATUS_SECONDS).status
        status = msgspec.structs.replace(status, tenants={"(all)": _sum(status.tenants.values())})
        return Response(render_metrics(status), media_type=MEDIA_TYPE)

    share_open_metrics = _shared(open_metrics)

    async def metrics_for(request: Request) -> Response:
        if settings.is_loopback and "authorization" not in request.headers:
            return await share_open_metrics(request)
        return _why_not(request, settings.token) or await run_in_threadpool(metrics)

    page, policy = _page()

    async def index(_request: Request) -> Response:
        headers = {"content-security-policy": policy, "x-content-type-options": "nosniff", "cache-control": "no-cache"}
        return Response(page, headers=headers, media_type="text/html; charset=utf-8")

    async def openapi(_request: Request) -> Response:
        return _json(_openapi_document())

    async def body(request: Request) -> bytes:
        data = b""
        async for part in request.stream():
            data += part
            if len(data) > _LARGEST_BODY_BYTES:
                raise ValueError(f"more than {_LARGEST_BODY_BYTES} bytes")
        return data

    def answer_of(endpoint: Endpoint, operation: type[OperatorRequest]) -> Callable[[Request], Any]:
        is_change = endpoint.method == "POST"

        async def answer(request: Request) -> Response:
            refused = _why_not(request, settings.token)
            if refused is not None:
                return refused
            try:
                wanted = _decode_body(operation, await body(request) if is_change else b"")
                reply = await run_in_threadpool(ask, wanted, _CHANGE_SECONDS if is_change else _STATUS_SECONDS)
            # Before msgspec 0.20, its errors are no ValueErrors.
            except (ValueError, msgspec.MsgspecError, RecursionError) as error:
                return _json({"error": reason_of_invalid(error)}, 400)
            return _json(endpoint.show(wanted, reply))

        return answer

    return Starlette(
        routes=[
            Route("/", index),
            Route("/healthz", _shared(healthz)),
            Route("/readyz", _shared(readyz)),
            Route("/metrics", metrics_for),
            Route("/openapi.json", openapi),
            *(
                Route(each.path, answer_of(each, operation), methods=[each.method])
                for operation in known_operations()
                for each in operation.endpoints
            ),
        ],
        middleware=[Middleware(_KnownHosts, names={settings.host, "localhost", *settings.names})],
        exception_handlers={DepotUnavailable: _unavailable, RemoteError: _remote_error, ClientDisconnect: _unsent},
    )


class _KnownHosts:
    """Refuses requests whose Host header is neither an address nor one of the names."""

    def __init__(self, app: ASGIApp, names: set[str]) -> None:
        self._app = app
        self._names = {name.lower() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and not self._is_known(Request(scope).headers.get("host", "")):
            error = "not a host of this depot: ask by its address, or start it with --http-host NAME"
            app = _json({"error": error}, 421)
        await app(scope, receive, send)

    def _is_known(self, host: str) -> bool:
        match = _HOST.fullmatch(host)
        name = "" if match is None else match["address"] or match["name"] or ""
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name.lower() in self._names
        return True  # no DNS name can pretend to be an address


class HttpConnection(H11Protocol):
    """A connection that closes after its answer, at a deadline, or to make room for another.

    The oldest connection that has been silent for a second makes room, else the oldest of all.
    """

    request_seconds: ClassVar[float] = 10.0  # from connecting to the end of the request
    answer_seconds: ClassVar[float] = _CHANGE_SECONDS + 10.0  # from there until the client has taken the answer

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start the request's deadline, and make room if there are too many connections."""
        super().connection_made(transport)
        self.began = now = self.loop.time()
        self.has_asked = False
        self._end = self.loop.call_later(self.request_seconds, transport.abort)
        most = min(_MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        if len(self.connections) > most:
            others = cast("set[HttpConnection]", self.connections)
            leaves = min(others, key=lambda each: (each.has_asked or each.began > now - 1, each.began))
            others.discard(leaves)
            leaves.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Start the answer's deadline once the request is complete."""
        super().data_received(data)
        cycle = cast("RequestResponseCycle | None", self.cycle)  # None before the first request
        if not self.has_asked and cycle is not None and not cycle.more_body:
            self.has_asked = True
            self._end.cancel()
            self._end = self.loop.call_later(self.answer_seconds, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadline."""
        self._end.cancel()
        super().connection_lost(exc)


class _Server(uvicorn.Server):
    """A server that accepts few connections a turn, and keeps many waiting."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start serving; the loop has set the length of the kernel's queue to the number accepted a turn."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)


def serve(url: str, settings: HttpSettings, listener: socket.socket) -> None:
    """Serve HTTP until standard input is closed."""

    def ask(request: Operation[R], deadline_seconds: float) -> R:
        return ask_depot(request, url, deadline_seconds)

    config = uvicorn.Config(
        create_app(ask, settings),
        http=HttpConnection,
        ws="none",
        lifespan="off",
        backlog=_ACCEPTED_A_TURN,
        headers=[("connection", "close")],
        timeout_keep_alive=1,
        proxy_headers=False,
        log_config=None,
        log_level=logging.ERROR,
        access_log=False,  # clients without the token could fill the log
    )
    server = _Server(config)

    def work() -> None:
        try:
            server.run([listener])
        finally:
            if not server.should_exit:
                os._exit(1)  # the depot then starts another process

    thread = threading.Thread(target=work, name="kvdepot-http", daemon=True)
    thread.start()
    sys.stdin.buffer.read()
    server.should_exit = True
    thread.join(_STOP_SECONDS)


def _page() -> tuple[bytes, str]:
    """Return the live view and its content security policy, which allows only its own script and this server."""
    page = (resources.files("kvdepot.operate") / "page.html").read_bytes()
    script = page[page.index(b"<script>") + len(b"<script>") : page.index(b"</script>")]
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    return page, (
        f"default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'sha256-{digest}';"
        " frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )


def _sum(tenants: Iterable[TenantStatus]) -> TenantStatus:
    total = TenantStatus(used_bytes=0)
    for tenant in tenants:
        for name, value in asdict(tenant).items():
            if value is not None:
                setattr(total, name, (getattr(total, name) or 0) + value)
    return total


def _shared(answer: Callable[[], Response]) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that computes one answer at a time, in a thread, and shares it among concurrent requests."""
    making: asyncio.Task[Response] | None = None

    async def endpoint(_request: Request) -> Response:
        nonlocal making
        if making is None or making.done():
            making = asyncio.create_task(asyncio.to_thread(answer))
        return await asyncio.shield(making)

    return endpoint


def _why_not(request: Request, token: str) -> Response | None:
    """Return the error response to a request without the token, None if it has the token."""
    given = request.headers.get("authorization", "")
    if hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
        return None
    return JSONResponse({"error": "this takes the bearer token"}, 401, {"www-authenticate": "Bearer"})


def _json(value: object, status_code: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code, media_type="application/json")


def _unavailable(_request: Request, error: Exception) -> Response:
    return _json({"error": str(error)}, 503)


def _remote_error(_request: Request, error: Exception) -> Response:
    return _json({"error": str(error)}, 409)


def _unsent(_request: Request, _error: Exception) -> Response:
    return Response(status_code=400)  # the client has disconnected: nothing is sent or logged


def main(arguments: Sequence[str]) -> None:
    """Serve one depot. Arguments: `PARENT_PID LISTENING_FD`; standard input: a line with its URL and settings."""
    parent_pid, listener = map(int, arguments)
    be_a_child(parent_pid)
    set_up_logs("warning", text=f"http {os.getpid()}: %(message)s")
    url, settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=tuple[str, HttpSettings])
    serve(url, settings, socket.socket(fileno=listener))


if __name__ == "__main__":
    main(sys.argv[1:])
