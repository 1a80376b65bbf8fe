"""Operations over HTTP: `kvdepot serve --http 127.0.0.1:9460`, with `pip install 'kvdepot[http]'`.

A process of its own asks the depot over its control socket, as any operator's tool does. It shares only the listening
socket with the depot (`kvdepot.ops.http_process`), so HTTP requests can neither break nor block the loop, and the
health check says whether the loop answers.

Any user of the machine can connect, so everything takes the bearer token but health, readiness, the empty page, the
OpenAPI document and, on loopback, metrics, which count all tenants as one without it. Requests without the token that
come together get one answer, so that many cost the depot as little as one does. The Host header has to be an address or
a name of the depot, as a page whose name was bound to the depot's address could ask in a browser otherwise.

A connection has one request, a time to make it and a time to take the answer. When there are too many, one that is
silent is cut off, so a probe, which asks as soon as it is connected, is answered.
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
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.metadata import version
from typing import Annotated, Any, ClassVar, Final, Literal, cast

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from kvdepot.client.operator import ask_depot
from kvdepot.errors import DepotUnavailable, KVDepotError, RemoteError
from kvdepot.operators.metrics import MEDIA_TYPE, render_metrics
from kvdepot.ops.http_process import HttpSettings
from kvdepot.processes.children import be_a_child
from kvdepot.processes.logs import set_up_logs
from kvdepot.wire import frames
from kvdepot.wire import messages as m
from kvdepot.wire import operations as o

logger = logging.getLogger(__name__)

HEALTH_SECONDS: Final = 1.0  # within which a healthy loop answers
_STATUS_SECONDS: Final = 5.0
_CHANGE_SECONDS: Final = 90.0
_LARGEST_BODY_BYTES: Final = 8 << 20
_STOP_SECONDS: Final = 5.0
_MOST_CONNECTIONS: Final = 256
_BACKLOG: Final = 128  # connections that are accepted at once
_HOST: Final = re.compile(r"(?:\[(?P<address>[^\[\]]*)\]|(?P<name>[^:]*))(?::\d*)?")

Ask = Callable[[o.OperatorRequest, float], frames.Reply]


@dataclass(frozen=True, slots=True)
class Operation:
    """One path: what it takes and what it answers. The OpenAPI document and the routes are made of these."""

    method: str
    path: str
    summary: str
    answer: Callable[[Ask, Any], object]  # (ask, body); the body is None for GET
    reply: type[Any]
    body: type[Any] | None = None
    takes_token: bool = True


def create_app(ask: Ask, settings: HttpSettings) -> Starlette:
    """Return the application.

    Args:
        ask: sends one request to the depot and waits for its reply that many seconds; raises as `ask_depot` does.
        settings: the token, and the names that the depot is known by.
    """

    def healthz() -> Response:
        began = time.monotonic()
        try:
            reply = ask(m.Hello(m.PROTOCOL_VERSION, "http"), HEALTH_SECONDS)
        except KVDepotError as error:
            return _json({"status": "unhealthy", "why": str(error)}, 503)
        assert isinstance(reply, m.HelloReply)
        return _json({"status": "ok", "epoch": reply.epoch, "answered_seconds": round(time.monotonic() - began, 4)})

    def readyz() -> Response:
        try:
            status = _status(ask, HEALTH_SECONDS)
        except KVDepotError as error:
            return _json({"status": "unhealthy", "why": str(error)}, 503)
        if status.recovering:
            return _json({"status": "starting", "why": "the entries of an earlier server are being read"}, 503)
        if status.draining:
            return _json({"status": "draining", "why": 'stores are declined: POST /drain {"draining": false}'}, 503)
        return _json({"status": "ready", "pool_ready_bytes": status.pool_ready_bytes})

    def metrics() -> Response:
        return Response(render_metrics(_status(ask, _STATUS_SECONDS)), media_type=MEDIA_TYPE)

    def open_metrics() -> Response:
        status = _status(ask, _STATUS_SECONDS)
        status = msgspec.structs.replace(status, tenants={"(all)": _sum(status.tenants)})
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
        return _json(_own_document())

    async def body(request: Request, kind: type[Any]) -> Any:
        data = b""
        async for part in request.stream():
            data += part
            if len(data) > _LARGEST_BODY_BYTES:
                raise ValueError(f"more than {_LARGEST_BODY_BYTES} bytes")
        return msgspec.json.decode(data or b"{}", type=kind)

    def endpoint_of(operation: Operation) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            refused = _why_not(request, settings.token)
            if refused is not None:
                return refused
            try:
                wanted = None if operation.body is None else await body(request, operation.body)
                answer = await run_in_threadpool(operation.answer, ask, wanted)
            except (ValueError, RecursionError, msgspec.DecodeError) as error:
                return _json({"error": str(error)}, 400)
            return _json(answer)

        return endpoint

    return Starlette(
        routes=[
            Route("/", index),
            Route("/healthz", _shared(healthz)),
            Route("/readyz", _shared(readyz)),
            Route("/metrics", metrics_for),
            Route("/openapi.json", openapi),
            *(Route(each.path, endpoint_of(each), methods=[each.method]) for each in OPERATIONS),
        ],
        middleware=[Middleware(_KnownHosts, names={settings.host, "localhost", *settings.names})],
        exception_handlers={DepotUnavailable: _unavailable, RemoteError: _remote_error},
    )


class ClearBody(msgspec.Struct, forbid_unknown_fields=True):
    """What `POST /cache/clear` takes; with `digests`, of one prefix, only the pool is cleared."""

    tenant: str | None = None
    model: str | None = None
    digests: list[str] = []


class FindBody(msgspec.Struct, forbid_unknown_fields=True):
    """What `POST /cache/find` takes: the keys of one prefix's chunks as hex strings."""

    digests: list[str]


class WarmBody(msgspec.Struct, forbid_unknown_fields=True):
    """What `POST /cache/warm` takes: the keys of one prefix's chunks as hex strings."""

    digests: list[str]
    tenant: str = "default"
    pin_seconds: float = 0.0


class UnpinBody(msgspec.Struct, forbid_unknown_fields=True):
    """What `POST /cache/unpin` takes."""

    tenant: str | None = None


class QuotaBody(msgspec.Struct, forbid_unknown_fields=True):
    """What `POST /tenants/quota` takes; 0 bytes end a quota."""

    tenant: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    quota_bytes: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class TierUrlBody(msgspec.Struct, forbid_unknown_fields=True):
    """What `POST /tiers/add` takes: a URL as `serve --tier` does."""

    url: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


class TierNameBody(msgspec.Struct, forbid_unknown_fields=True):
    """What `POST /tiers/remove` takes: a name as `/status` shows it."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


class DrainBody(msgspec.Struct, forbid_unknown_fields=True):
    """What `POST /drain` takes."""

    draining: bool = True


class LogLevelBody(msgspec.Struct, forbid_unknown_fields=True):
    """What `POST /loglevel` takes."""

    level: Literal["debug", "info", "warning", "error"]


class Count(msgspec.Struct):
    """How many entries, chunks, pins, stores or tiers an operation was about."""

    count: int


class Health(msgspec.Struct):
    """What `/healthz` and `/readyz` say."""

    status: str
    why: str = ""


def _packed(digests: list[str]) -> bytes:
    return b"".join(map(bytes.fromhex, digests))


def _done(ask: Ask, request: o.OperatorRequest) -> Count:
    reply = ask(request, _CHANGE_SECONDS)
    assert isinstance(reply, m.Done)
    return Count(reply.count)


def _settings(ask: Ask) -> dict[str, Any]:
    reply = ask(o.Configuration(), _STATUS_SECONDS)
    assert isinstance(reply, o.ConfigurationReply)
    return reply.settings


def _find(ask: Ask, body: FindBody) -> list[o.FoundPrefix]:
    reply = ask(o.Find(_packed(body.digests)), _STATUS_SECONDS)
    assert isinstance(reply, o.Found)
    return reply.prefixes


def _clear(ask: Ask, body: ClearBody) -> Count:
    return _done(ask, o.Clear(body.tenant, body.model, _packed(body.digests)))


def _warm(ask: Ask, body: WarmBody) -> Count:
    return _done(ask, o.Warm(body.tenant, _packed(body.digests), body.pin_seconds))


OPERATIONS: Final = (
    Operation(
        "GET", "/status", "Everything that 'kvdepot status --json' shows",
        lambda ask, _: _status(ask, _STATUS_SECONDS), o.DepotStatus,
    ),
    Operation(
        "GET", "/tenants", "Bytes of the pool and quotas by tenant",
        lambda ask, _: _status(ask, _STATUS_SECONDS).tenants, dict[str, dict[str, int]],
    ),
    Operation(
        "POST", "/tenants/quota", "Change what a tenant can keep against others, until the server ends",
        lambda ask, body: _done(ask, o.SetQuota(body.tenant, body.quota_bytes)), Count, QuotaBody,
    ),
    Operation("GET", "/config", "The server's settings", lambda ask, _: _settings(ask), dict[str, Any]),
    Operation("POST", "/cache/find", "What the pool has of a prefix", _find, list[o.FoundPrefix], FindBody),
    Operation("POST", "/cache/clear", "Forget what nobody uses", _clear, Count, ClearBody),
    Operation("POST", "/cache/warm", "Bring a prefix up from tiers, and pin it", _warm, Count, WarmBody),
    Operation(
        "POST", "/cache/unpin", "End pins",
        lambda ask, body: _done(ask, o.Unpin(body.tenant)), Count, UnpinBody,
    ),
    Operation(
        "POST", "/tiers/add", "Use one more tier below the others, until the server ends; counts tiers",
        lambda ask, body: _done(ask, o.AddTier(body.url)), Count, TierUrlBody,
    ),
    Operation(
        "POST", "/tiers/remove", "Stop using a tier; what it holds stays there; counts tiers",
        lambda ask, body: _done(ask, o.RemoveTier(body.name)), Count, TierNameBody,
    ),
    Operation(
        "POST", "/drain", "Take no more stores, or take them again; counts those under way",
        lambda ask, body: _done(ask, o.Drain(body.draining)), Count, DrainBody,
    ),
    Operation(
        "GET", "/loglevel", "What is logged",
        lambda ask, _: {"level": _status(ask, _STATUS_SECONDS).log_level}, dict[str, str],
    ),
    Operation(
        "POST", "/loglevel", "Change what is logged, until the server ends",
        lambda ask, body: _done(ask, o.SetLogLevel(body.level)), Count, LogLevelBody,
    ),
)  # fmt: skip


def _is_a_route(_ask: Ask, _body: object) -> object:
    raise NotImplementedError("answered by a route of its own")


_PLAIN_OPERATIONS: Final = (
    Operation("GET", "/healthz", "200 if the request loop answers, else 503", _is_a_route, Health, None, False),
    Operation("GET", "/readyz", "200 if stores are taken, else 503", _is_a_route, Health, None, False),
    Operation(
        "GET", "/metrics", "Prometheus' text format; by tenant with the token, off loopback only with it",
        _is_a_route, str, None, False,
    ),
)  # fmt: skip


def openapi_document(server_version: str, operations: Sequence[Operation]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of these paths."""
    types = [kind for each in operations for kind in (each.body, each.reply) if kind is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(map(repr, types), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for each in operations:
        media = "text/plain" if each.reply is str else "application/json"
        described: dict[str, Any] = {
            "summary": each.summary,
            "responses": {"200": {"description": "Done", "content": {media: {"schema": schema_of[repr(each.reply)]}}}},
        }
        if each.body is not None:
            described["requestBody"] = {"content": {"application/json": {"schema": schema_of[repr(each.body)]}}}
            described["responses"]["400"] = {"description": "The body is not what this takes; nothing was changed"}
        if each.takes_token:
            described["security"] = [{"token": []}]
            described["responses"] |= {
                "401": {"description": "The bearer token is missing or another"},
                "409": {"description": "The depot refused; nothing was changed"},
            }
        paths.setdefault(each.path, {})[each.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvdepot", "version": server_version, "description": "Operations of one depot"},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


@cache
def _own_document() -> dict[str, Any]:
    return openapi_document(version("kvdepot"), [*OPERATIONS, *_PLAIN_OPERATIONS])


class _KnownHosts:
    """Refuse requests whose Host header is neither an address nor one of the names."""

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
        return True  # an address is nobody's to bind


class Connection(H11Protocol):
    """A connection that ends: with its answer, when its time is over, or to make room for another.

    Room is made by the oldest that has been silent for a second; if there is none, by the oldest.
    """

    request_seconds: ClassVar[float] = 10.0  # from connecting to the end of the request
    answer_seconds: ClassVar[float] = _CHANGE_SECONDS + 10.0  # from there until the answer is taken

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begin the time for the request, and make room."""
        super().connection_made(transport)
        self.began = now = self.loop.time()
        self.has_asked = False
        self._end = self.loop.call_later(self.request_seconds, transport.abort)
        most = min(_MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        if len(self.connections) > most:
            others = cast("set[Connection]", self.connections)
            leaves = min(others, key=lambda each: (each.has_asked or each.began > now - 1, each.began))
            others.discard(leaves)
            leaves.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Begin the time for the answer when the request is complete."""
        super().data_received(data)
        cycle = cast("RequestResponseCycle | None", self.cycle)  # None before the first request
        if not self.has_asked and cycle is not None and not cycle.more_body:
            self.has_asked = True
            self._end.cancel()
            self._end = self.loop.call_later(self.answer_seconds, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the time."""
        self._end.cancel()
        super().connection_lost(exc)


def serve(url: str, settings: HttpSettings, listener: socket.socket) -> None:
    """Answer who connects until standard input ends."""

    def ask(request: o.OperatorRequest, deadline_seconds: float) -> frames.Reply:
        return ask_depot(request, url, deadline_seconds)

    config = uvicorn.Config(
        create_app(ask, settings), http=Connection, ws="none", lifespan="off", backlog=_BACKLOG,
        headers=[("connection", "close")], timeout_keep_alive=1, proxy_headers=False,
        log_config=None, log_level=logging.ERROR, access_log=False,  # what strangers send is no line of the log
    )  # fmt: skip
    server = uvicorn.Server(config)

    def work() -> None:
        try:
            server.run([listener])
        finally:
            if not server.should_exit:
                os._exit(1)  # the depot starts another one

    thread = threading.Thread(target=work, name="kvdepot-http", daemon=True)
    thread.start()
    sys.stdin.buffer.read()
    server.should_exit = True
    thread.join(_STOP_SECONDS)


def _page() -> tuple[bytes, str]:
    """Return the live view, and the policy by which a browser runs its script and no other, and asks nobody but us."""
    page = (resources.files("kvdepot.ops") / "page.html").read_bytes()
    script = page[page.index(b"<script>") + len(b"<script>") : page.index(b"</script>")]
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    return page, (
        f"default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'sha256-{digest}';"
        " frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )


def _status(ask: Ask, deadline_seconds: float) -> o.DepotStatus:
    reply = ask(o.Status(), deadline_seconds)
    assert isinstance(reply, o.StatusReply)
    return reply.status


def _sum(tenants: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Return what all tenants have together."""
    total = Counter(used_bytes=0)
    for usage in tenants.values():
        total.update(usage)
    return dict(total)


def _shared(answer: Callable[[], Response]) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that makes one answer at a time, in a thread, for all who ask meanwhile."""
    making: asyncio.Task[Response] | None = None

    async def endpoint(_request: Request) -> Response:
        nonlocal making
        if making is None or making.done():
            making = asyncio.create_task(asyncio.to_thread(answer))
        return await asyncio.shield(making)

    return endpoint


def _why_not(request: Request, token: str) -> Response | None:
    """Return the refusal of a request without the token."""
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


def main(arguments: Sequence[str]) -> None:
    """Serve one depot: `PARENT_PID LISTENING_FD`, and a line with its URL and the settings at standard input."""
    parent_pid, listener = map(int, arguments)
    be_a_child(parent_pid)
    set_up_logs("warning", text=f"http {os.getpid()}: %(message)s")
    url, settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=tuple[str, HttpSettings])
    serve(url, settings, socket.socket(fileno=listener))


if __name__ == "__main__":
    main(sys.argv[1:])
