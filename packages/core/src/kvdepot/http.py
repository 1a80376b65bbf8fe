"""Operations over HTTP: `kvdepot serve --http 127.0.0.1:9460`, with `pip install 'kvdepot[http]'`.

A thread of the server's process that asks the depot as any operator's tool does, over its control socket. It shares
nothing with the depot, so what comes by HTTP can neither break nor block the loop, and health is told by whether the
loop answers. Reading is open to whoever can connect; what changes something takes the bearer token. Off loopback there
must be a token, and everything but health takes it.
"""

import hmac
import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvdepot import messages as m
from kvdepot.client.connection import ask_depot
from kvdepot.errors import ConfigError, DepotUnavailable, KVDepotError, RemoteError

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
        return _json({"status": "ready", "pool_ready_bytes": status.pool_ready_bytes})

    def status(request: Request) -> Response:
        return reading(request) or _json(_status(ask, _STATUS_SECONDS))

    def tenants(request: Request) -> Response:
        return reading(request) or _json(_status(ask, _STATUS_SECONDS).tenants)

    def metrics(request: Request) -> Response:
        refused = reading(request)
        if refused is not None:
            return refused
        registry = CollectorRegistry()
        registry.register(StatusCollector(_status(ask, _STATUS_SECONDS)))
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def body(request: Request, kind: type[Any]) -> Any:
        data = b""
        async for part in request.stream():
            data += part
            if len(data) > _LARGEST_BODY_BYTES:
                raise ValueError(f"more than {_LARGEST_BODY_BYTES} bytes")
        return msgspec.json.decode(data or b"{}", type=kind)

    def changing(kind: type[Any], request_of: Callable[[Any], m.OperatorRequest]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            refused = _why_not(request, settings.token)
            if refused is not None:
                return refused
            try:
                wanted = request_of(await body(request, kind))
            except (ValueError, RecursionError, msgspec.DecodeError) as error:
                return _json({"error": str(error)}, 400)
            reply = await _in_thread(lambda: ask(wanted, _CHANGE_SECONDS))
            assert isinstance(reply, m.Done)
            return _json({"count": reply.count})

        return endpoint

    def clear_of(wanted: ClearBody) -> m.OperatorRequest:
        return m.Clear(wanted.tenant, wanted.model)

    def warm_of(wanted: WarmBody) -> m.OperatorRequest:
        return m.Warm(wanted.tenant, b"".join(map(bytes.fromhex, wanted.digests)), wanted.pin_seconds)

    def unpin_of(wanted: UnpinBody) -> m.OperatorRequest:
        return m.Unpin(wanted.tenant)

    return Starlette(
        routes=[
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/status", status),
            Route("/tenants", tenants),
            Route("/metrics", metrics),
            Route("/cache/clear", changing(ClearBody, clear_of), methods=["POST"]),
            Route("/cache/warm", changing(WarmBody, warm_of), methods=["POST"]),
            Route("/cache/unpin", changing(UnpinBody, unpin_of), methods=["POST"]),
        ],
        exception_handlers={DepotUnavailable: _unavailable, RemoteError: _remote_error},
    )


class ClearBody(msgspec.Struct, forbid_unknown_fields=True):
    """What `POST /cache/clear` takes."""

    tenant: str | None = None
    model: str | None = None


class WarmBody(msgspec.Struct, forbid_unknown_fields=True):
    """What `POST /cache/warm` takes: the keys of one prefix's chunks as hex strings."""

    digests: list[str]
    tenant: str = "default"
    pin_seconds: float = 0.0


class UnpinBody(msgspec.Struct, forbid_unknown_fields=True):
    """What `POST /cache/unpin` takes."""

    tenant: str | None = None


class StatusCollector(Collector):
    """A depot's status as Prometheus metrics, each with its unit in its name."""

    def __init__(self, status: m.DepotStatus) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        status = self._status
        gauges = {
            "pool_size_bytes": (status.pool_size_bytes, "The pool"),
            "pool_ready_bytes": (status.pool_ready_bytes, "Of it, allocated so far"),
            "pool_used_bytes": (status.pool_used_bytes, "Of it, in use"),
            "quarantined_bytes": (status.quarantined_bytes, "Held until their writer is back or dead"),
            "entries": (status.num_entries, "Sealed entries of the index"),
            "entries_limit": (status.max_entries, "Entries that the index can hold"),
            "chunks": (status.num_chunks, "Chunks in the index"),
            "leases": (status.num_leases, "Leases of requests"),
            "pins": (status.num_pins, "Prefixes that operators keep"),
            "stores_under_way": (status.num_tickets, "Prepared and not committed"),
            "sessions": (status.num_sessions, "Connected workers and schedulers"),
            "recovering": (int(status.recovering), "Whether an earlier server's entries are being read"),
            "uptime_seconds": (status.uptime_seconds, "Since the server started"),
            "loop_longest_turn_seconds": (status.loop_longest_seconds, "Longest turn of the request loop"),
            "loop_longest_work_seconds": (status.loop_longest_work_seconds, "Most processor time of one turn"),
        }
        for name, (value, text) in gauges.items():
            yield GaugeMetricFamily(f"kvdepot_{name}", text, value)
        yield CounterMetricFamily("kvdepot_loop_slow_turns", "Turns of more than 5 ms of work", status.loop_slow_turns)
        for name, value in sorted(status.counters.items()):
            yield CounterMetricFamily(f"kvdepot_{name}", name.replace("_", " ").capitalize(), value)
        used = GaugeMetricFamily("kvdepot_tenant_used_bytes", "Of the pool", labels=["tenant"])
        quota = GaugeMetricFamily("kvdepot_tenant_quota_bytes", "Kept against others", labels=["tenant"])
        for tenant, usage in sorted(status.tenants.items()):
            used.add_metric([tenant], usage["used_bytes"])
            if "quota_bytes" in usage:
                quota.add_metric([tenant], usage["quota_bytes"])
        yield used
        yield quota
        yield from self._tiers()

    def _tiers(self) -> Iterator[Metric]:
        tiers = self._status.tiers
        for name, text in {
            "num_entries": "Entries, as far as the storage tells",
            "used_bytes": "Of the storage",
            "capacity_bytes": "Of the storage",
            "queued_write_bytes": "Waiting to be written",
            "num_waiting_reads": "Calls that wait",
            "num_waiting_writes": "Calls that wait",
            "num_hung_calls": "Calls that have overrun their deadline and not come back",
        }.items():
            family = GaugeMetricFamily(f"kvdepot_tier_{name.removeprefix('num_')}", text, labels=["tier"])
            for tier in tiers:
                family.add_metric([tier.name], getattr(tier, name))
            yield family
        is_open = GaugeMetricFamily("kvdepot_tier_breaker_open", "Whether it is left alone", labels=["tier"])
        for tier in tiers:
            is_open.add_metric([tier.name], tier.state != "closed")
        yield is_open
        for name in sorted({name for tier in tiers for name in tier.counters}):
            counter = CounterMetricFamily(f"kvdepot_tier_{name}", name.replace("_", " ").capitalize(), labels=["tier"])
            for tier in tiers:
                counter.add_metric([tier.name], tier.counters.get(name, 0))
            yield counter


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


async def _in_thread(work: Callable[[], m.Reply]) -> m.Reply:
    from starlette.concurrency import run_in_threadpool

    return await run_in_threadpool(work)
