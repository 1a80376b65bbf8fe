"""Operations over HTTP: `kvdepot serve --http 127.0.0.1:9460`, with `pip install 'kvdepot[http]'`.

A thread of the server's process that asks the depot as any operator's tool does, over its control socket. It shares
nothing with the depot, so what comes by HTTP can neither break nor block the loop, and health is told by whether the
loop answers. Reading is open to whoever can connect; what changes something takes the bearer token. Off loopback there
must be a token, and everything but health takes it.
"""

import base64
import hashlib
import hmac
import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvdepot import messages as m
from kvdepot.client.connection import ask_depot
from kvdepot.errors import ConfigError, DepotUnavailable, KVDepotError, RemoteError
from kvdepot.metrics import MEDIA_TYPE, render_metrics

logger = logging.getLogger(__name__)

HEALTH_SECONDS: Final = 1.0  # within which a healthy loop answers
_STATUS_SECONDS: Final = 5.0
_CHANGE_SECONDS: Final = 90.0
_LARGEST_BODY_BYTES: Final = 8 << 20
_START_SECONDS: Final = 10.0
_SHORTEST_TOKEN: Final = 16

Ask = Callable[[m.OperatorRequest, float], m.Reply]


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Where to listen, and who may change things.

    Raises:
        ConfigError: off loopback without a token.
    """

    host: str
    port: int  # 0: any that is free
    token: str = ""  # "": nothing can be changed over HTTP

    def __post_init__(self) -> None:
        if not self.is_loopback and not self.token:
            raise ConfigError(
                f"--http {self.host}: off loopback it takes a token, as everybody could read and clear the cache:"
                " give --http-token FILE, or listen on 127.0.0.1"
            )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @classmethod
    def parse(cls, address: str, token_file: Path | None = None) -> "HttpSettings":
        """Return the settings of `HOST:PORT` and a file with a token.

        Raises:
            ConfigError: the address is none, the file cannot be read or has no token that is long enough.
        """
        host, separator, port = address.rpartition(":")
        if not separator or not port.isdigit() or int(port) > 65535:
            raise ConfigError(f"--http {address!r}: give HOST:PORT, for example 127.0.0.1:9460")
        token = ""
        if token_file is not None:
            try:
                token = token_file.read_text().strip()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"--http-token {token_file}: {error}") from error
            if len(token) < _SHORTEST_TOKEN:
                raise ConfigError(
                    f"--http-token {token_file}: a token of {len(token)} characters can be guessed, at least"
                    f" {_SHORTEST_TOKEN}: openssl rand -hex 32 > {token_file}"
                )
        return cls(host.strip("[]") or "127.0.0.1", int(port), token)


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


class HttpServer:
    """The application on a thread of its own.

    Args:
        url: the depot that is asked.
        settings: where to listen.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    def __init__(self, url: str, settings: HttpSettings) -> None:
        def ask(request: m.OperatorRequest, deadline_seconds: float) -> m.Reply:
            return ask_depot(request, url, deadline_seconds)

        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((settings.host, settings.port))
        except OSError as error:
            self._socket.close()
            raise ConfigError(f"--http {settings.host}:{settings.port}: {error}") from error
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            create_app(ask, settings), log_config=None, access_log=False, lifespan="off", timeout_keep_alive=30,
            limit_concurrency=64,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="kvdepot-http", daemon=True
        )
        self._thread.start()
        end = time.monotonic() + _START_SECONDS
        while not self._server.started and self._thread.is_alive() and time.monotonic() < end:
            time.sleep(0.005)
        logger.info("operations at http://%s:%d", settings.host, self.port)

    def close(self) -> None:
        """Stop. Twice is harmless."""
        self._server.should_exit = True
        self._thread.join(_START_SECONDS)
        self._socket.close()


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
