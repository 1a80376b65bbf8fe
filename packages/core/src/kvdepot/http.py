"""Operations over HTTP: `kvdepot serve --http 127.0.0.1:9460`, with `pip install 'kvdepot[http]'`.

A process that asks the depot as any operator's tool does, over its control socket. It shares nothing with the depot but
the listening socket (`kvdepot.http_server`), so what comes by HTTP can neither break nor block the loop, and health is
told by whether the loop answers. Reading is open to whoever can connect; what changes something takes the bearer token.
Off loopback there must be a token, and everything but health takes it.
"""

import base64
import hashlib
import hmac
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.metadata import version
from typing import Annotated, Any, Final, Literal

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvdepot import messages as m
from kvdepot.children import be_a_child
from kvdepot.client.connection import ask_depot
from kvdepot.errors import DepotUnavailable, KVDepotError, RemoteError
from kvdepot.http_server import HttpSettings
from kvdepot.logs import set_up_logs
from kvdepot.metrics import MEDIA_TYPE, render_metrics

logger = logging.getLogger(__name__)

HEALTH_SECONDS: Final = 1.0  # within which a healthy loop answers
_STATUS_SECONDS: Final = 5.0
_CHANGE_SECONDS: Final = 90.0
_LARGEST_BODY_BYTES: Final = 8 << 20
_STOP_SECONDS: Final = 5.0

Ask = Callable[[m.OperatorRequest, float], m.Reply]


@dataclass(frozen=True, slots=True)
class Operation:
    """One path: what it takes and what it answers. The OpenAPI document and the routes are made of these."""

    method: str
    path: str
    summary: str
    answer: Callable[[Ask, Any], object]  # (ask, body); the body is None for GET
    reply: type[Any]
    body: type[Any] | None = None
    changes: bool = False  # takes the token on loopback, too


def create_app(ask: Ask, settings: HttpSettings) -> Starlette:
    """Return the application.

    Args:
        ask: sends one request to the depot and waits for its reply that many seconds; raises as `ask_depot` does.
        settings: who may do what.
    """

    def reading(request: Request) -> Response | None:
        return None if settings.is_loopback else _why_not(request, settings.token)

    def healthz(_request: Request) -> Response:
        began = time.monotonic()
        try:
            reply = ask(m.Hello(m.PROTOCOL_VERSION, "http"), HEALTH_SECONDS)
        except KVDepotError as error:
            return _json({"status": "unhealthy", "why": str(error)}, 503)
        assert isinstance(reply, m.HelloReply)
        return _json({"status": "ok", "epoch": reply.epoch, "answered_seconds": round(time.monotonic() - began, 4)})

    def readyz(_request: Request) -> Response:
        try:
            status = _status(ask, HEALTH_SECONDS)
        except KVDepotError as error:
            return _json({"status": "unhealthy", "why": str(error)}, 503)
        if status.recovering:
            return _json({"status": "starting", "why": "the entries of an earlier server are being read"}, 503)
        if status.draining:
            return _json({"status": "draining", "why": 'stores are declined: POST /drain {"draining": false}'}, 503)
        return _json({"status": "ready", "pool_ready_bytes": status.pool_ready_bytes})

    def metrics(request: Request) -> Response:
        refused = reading(request)
        if refused is not None:
            return refused
        return Response(render_metrics(_status(ask, _STATUS_SECONDS)), media_type=MEDIA_TYPE)

    page, policy = _page()

    def index(_request: Request) -> Response:
        headers = {"content-security-policy": policy, "x-content-type-options": "nosniff", "cache-control": "no-cache"}
        return Response(page, headers=headers, media_type="text/html; charset=utf-8")

    def openapi(_request: Request) -> Response:
        return _json(openapi_document(version("kvdepot"), [*OPERATIONS, *_PLAIN_OPERATIONS]))

    async def body(request: Request, kind: type[Any]) -> Any:
        data = b""
        async for part in request.stream():
            data += part
            if len(data) > _LARGEST_BODY_BYTES:
                raise ValueError(f"more than {_LARGEST_BODY_BYTES} bytes")
        return msgspec.json.decode(data or b"{}", type=kind)

    def endpoint_of(operation: Operation) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            refused = _why_not(request, settings.token) if operation.changes else reading(request)
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
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/metrics", metrics),
            Route("/openapi.json", openapi),
            *(Route(each.path, endpoint_of(each), methods=[each.method]) for each in OPERATIONS),
        ],
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


def _done(ask: Ask, request: m.OperatorRequest) -> Count:
    reply = ask(request, _CHANGE_SECONDS)
    assert isinstance(reply, m.Done)
    return Count(reply.count)


def _settings(ask: Ask) -> dict[str, Any]:
    reply = ask(m.Configuration(), _STATUS_SECONDS)
    assert isinstance(reply, m.ConfigurationReply)
    return reply.settings


def _find(ask: Ask, body: FindBody) -> list[m.FoundPrefix]:
    reply = ask(m.Find(_packed(body.digests)), _STATUS_SECONDS)
    assert isinstance(reply, m.Found)
    return reply.prefixes


def _clear(ask: Ask, body: ClearBody) -> Count:
    return _done(ask, m.Clear(body.tenant, body.model, _packed(body.digests)))


def _warm(ask: Ask, body: WarmBody) -> Count:
    return _done(ask, m.Warm(body.tenant, _packed(body.digests), body.pin_seconds))


OPERATIONS: Final = (
    Operation(
        "GET", "/status", "Everything that 'kvdepot status --json' shows",
        lambda ask, _: _status(ask, _STATUS_SECONDS), m.DepotStatus,
    ),
    Operation(
        "GET", "/tenants", "Bytes of the pool and quotas by tenant",
        lambda ask, _: _status(ask, _STATUS_SECONDS).tenants, dict[str, dict[str, int]],
    ),
    Operation(
        "POST", "/tenants/quota", "Change what a tenant can keep against others, until the server ends",
        lambda ask, body: _done(ask, m.SetQuota(body.tenant, body.quota_bytes)), Count, QuotaBody, True,
    ),
    Operation("GET", "/config", "The server's settings", lambda ask, _: _settings(ask), dict[str, Any]),
    Operation("POST", "/cache/find", "What the pool has of a prefix", _find, list[m.FoundPrefix], FindBody),
    Operation("POST", "/cache/clear", "Forget what nobody uses", _clear, Count, ClearBody, True),
    Operation("POST", "/cache/warm", "Bring a prefix up from tiers, and pin it", _warm, Count, WarmBody, True),
    Operation(
        "POST", "/cache/unpin", "End pins",
        lambda ask, body: _done(ask, m.Unpin(body.tenant)), Count, UnpinBody, True,
    ),
    Operation(
        "POST", "/tiers/add", "Use one more tier below the others, until the server ends; counts tiers",
        lambda ask, body: _done(ask, m.AddTier(body.url)), Count, TierUrlBody, True,
    ),
    Operation(
        "POST", "/tiers/remove", "Stop using a tier; what it holds stays there; counts tiers",
        lambda ask, body: _done(ask, m.RemoveTier(body.name)), Count, TierNameBody, True,
    ),
    Operation(
        "POST", "/drain", "Take no more stores, or take them again; counts those under way",
        lambda ask, body: _done(ask, m.Drain(body.draining)), Count, DrainBody, True,
    ),
    Operation(
        "GET", "/loglevel", "What is logged",
        lambda ask, _: {"level": _status(ask, _STATUS_SECONDS).log_level}, dict[str, str],
    ),
    Operation(
        "POST", "/loglevel", "Change what is logged, until the server ends",
        lambda ask, body: _done(ask, m.SetLogLevel(body.level)), Count, LogLevelBody, True,
    ),
)  # fmt: skip


def _is_a_route(_ask: Ask, _body: object) -> object:
    raise NotImplementedError("answered by a route of its own")


_PLAIN_OPERATIONS: Final = (
    Operation("GET", "/healthz", "200 if the request loop answers, else 503; takes no token", _is_a_route, Health),
    Operation("GET", "/readyz", "200 if stores are taken, else 503; takes no token", _is_a_route, Health),
    Operation("GET", "/metrics", "Prometheus' text format", _is_a_route, str),
)


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
        if each.changes:
            described["security"] = [{"token": []}]
            described["responses"] |= {
                "401": {"description": "The bearer token is missing or another"},
                "403": {"description": "The depot was started without a token"},
                "409": {"description": "The depot refused; nothing was changed"},
            }
        paths.setdefault(each.path, {})[each.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvdepot", "version": server_version, "description": "Operations of one depot"},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def serve(url: str, settings: HttpSettings, listener: socket.socket) -> None:
    """Answer who connects until standard input ends."""

    def ask(request: m.OperatorRequest, deadline_seconds: float) -> m.Reply:
        return ask_depot(request, url, deadline_seconds)

    config = uvicorn.Config(
        create_app(ask, settings), log_config=None, access_log=False, lifespan="off", timeout_keep_alive=30,
        limit_concurrency=64,
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
    page = (resources.files("kvdepot") / "page.html").read_bytes()
    script = page[page.index(b"<script>") + len(b"<script>") : page.index(b"</script>")]
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    return page, (
        f"default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'sha256-{digest}';"
        " frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )


def _status(ask: Ask, deadline_seconds: float) -> m.DepotStatus:
    reply = ask(m.Status(), deadline_seconds)
    assert isinstance(reply, m.StatusReply)
    return reply.status


def _why_not(request: Request, token: str) -> Response | None:
    """Return the refusal of a request without the token."""
    if not token:
        return _json({"error": "nothing can be changed over HTTP: start the depot with --http-token FILE"}, 403)
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
