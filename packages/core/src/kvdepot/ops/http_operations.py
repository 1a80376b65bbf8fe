"""The operations offered over HTTP: paths, request and reply types, and the OpenAPI document derived from them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Annotated, Any, Final, Literal

import msgspec

from kvdepot.wire import frames
from kvdepot.wire import messages as m
from kvdepot.wire import operations as o

STATUS_SECONDS: Final = 5.0
CHANGE_SECONDS: Final = 90.0

Ask = Callable[[o.OperatorRequest, float], frames.Reply]


@dataclass(frozen=True, slots=True)
class Operation:
    """One path with its request and reply types. Routes and the OpenAPI document derive from it."""

    method: str
    path: str
    summary: str
    answer: Callable[[Ask, Any], object]  # (ask, body); the body is None for GET
    reply: type[Any]
    body: type[Any] | None = None
    takes_token: bool = True


def ask_status(ask: Ask, deadline_seconds: float) -> o.DepotStatus:
    """Return the depot's status."""
    reply = ask(o.Status(), deadline_seconds)
    assert isinstance(reply, o.StatusReply)
    return reply.status


class ClearBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /cache/clear`. With the `digests` of one prefix, only the pool is cleared."""

    tenant: str | None = None
    model: str | None = None
    digests: list[str] = []
    everything: bool = msgspec.field(default=False, name="all")

    def __post_init__(self) -> None:
        if self.everything == bool(self.tenant or self.model or self.digests):
            raise ValueError('name what to clear: "tenant", "model" or "digests", or "all": true for everything')


class FindBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /cache/find`: the keys of one prefix's chunks as hex strings."""

    digests: list[str]


class WarmBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /cache/warm`: the keys of one prefix's chunks as hex strings."""

    digests: list[str]
    tenant: str = "default"
    pin_seconds: float = 0.0


class UnpinBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /cache/unpin`."""

    tenant: str | None = None


class QuotaBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /tenants/quota`; 0 bytes remove the quota."""

    tenant: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    quota_bytes: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class TierUrlBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /tiers/add`: a URL as for `serve --tier`."""

    url: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


class TierNameBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /tiers/remove`: a name as shown by `/status`."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


class DrainBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /drain`."""

    draining: bool = True


class LogLevelBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /loglevel`."""

    level: Literal["debug", "info", "warning", "error"]


class Count(msgspec.Struct):
    """The number of entries, chunks, pins, stores or tiers that an operation affected."""

    count: int


class Health(msgspec.Struct):
    """Reply of `/healthz` and `/readyz`."""

    status: str
    why: str = ""


def _packed(digests: list[str]) -> bytes:
    return b"".join(map(bytes.fromhex, digests))


def _done(ask: Ask, request: o.OperatorRequest) -> Count:
    reply = ask(request, CHANGE_SECONDS)
    assert isinstance(reply, m.Done)
    return Count(reply.count)


def _settings(ask: Ask) -> dict[str, Any]:
    reply = ask(o.Configuration(), STATUS_SECONDS)
    assert isinstance(reply, o.ConfigurationReply)
    return reply.settings


def _find(ask: Ask, body: FindBody) -> list[o.FoundPrefix]:
    reply = ask(o.Find(_packed(body.digests)), STATUS_SECONDS)
    assert isinstance(reply, o.Found)
    return reply.prefixes


def _clear(ask: Ask, body: ClearBody) -> Count:
    return _done(ask, o.Clear(body.tenant, body.model, _packed(body.digests)))


def _warm(ask: Ask, body: WarmBody) -> Count:
    return _done(ask, o.Warm(body.tenant, _packed(body.digests), body.pin_seconds))


def _set_log_level(ask: Ask, body: LogLevelBody) -> dict[str, str]:
    ask(o.SetLogLevel(body.level), CHANGE_SECONDS)
    return {"level": body.level}


OPERATIONS: Final = (
    Operation(
        "GET", "/status", "Everything that 'kvdepot status --json' shows",
        lambda ask, _: ask_status(ask, STATUS_SECONDS), o.DepotStatus,
    ),
    Operation(
        "GET", "/tenants", "Bytes of the pool and quotas by tenant",
        lambda ask, _: ask_status(ask, STATUS_SECONDS).tenants, dict[str, dict[str, int]],
    ),
    Operation(
        "POST", "/tenants/quota", "Change the share of the pool reserved for a tenant, until the server stops",
        lambda ask, body: _done(ask, o.SetQuota(body.tenant, body.quota_bytes)), Count, QuotaBody,
    ),
    Operation("GET", "/config", "The server's settings", lambda ask, _: _settings(ask), dict[str, Any]),
    Operation("POST", "/cache/find", "Show how much of a prefix the pool holds", _find, list[o.FoundPrefix], FindBody),
    Operation("POST", "/cache/clear", "Remove entries that are not in use", _clear, Count, ClearBody),
    Operation("POST", "/cache/warm", "Load a prefix from the tiers, and pin it", _warm, Count, WarmBody),
    Operation(
        "POST", "/cache/unpin", "End pins",
        lambda ask, body: _done(ask, o.Unpin(body.tenant)), Count, UnpinBody,
    ),
    Operation(
        "POST", "/tiers/add", "Add a tier below the others, until the server stops; returns the number of tiers",
        lambda ask, body: _done(ask, o.AddTier(body.url)), Count, TierUrlBody,
    ),
    Operation(
        "POST", "/tiers/remove", "Stop using a tier, whose entries stay in storage; returns the number of tiers",
        lambda ask, body: _done(ask, o.RemoveTier(body.name)), Count, TierNameBody,
    ),
    Operation(
        "POST", "/drain", "Decline new stores, or accept them again; returns the number of stores in progress",
        lambda ask, body: _done(ask, o.Drain(body.draining)), Count, DrainBody,
    ),
    Operation(
        "GET", "/loglevel", "Show the log level",
        lambda ask, _: {"level": ask_status(ask, STATUS_SECONDS).log_level}, dict[str, str],
    ),
    Operation(
        "POST", "/loglevel", "Change the log level, until the server stops",
        _set_log_level, dict[str, str], LogLevelBody,
    ),
)  # fmt: skip


def _is_a_route(_ask: Ask, _body: object) -> object:
    raise NotImplementedError("answered by its own route")


_PLAIN_OPERATIONS: Final = (
    Operation("GET", "/healthz", "200 if the request loop answers, else 503", _is_a_route, Health, None, False),
    Operation("GET", "/readyz", "200 if the depot accepts stores, else 503", _is_a_route, Health, None, False),
    Operation(
        "GET", "/metrics", "Prometheus metrics; off loopback, and by tenant, only with the token",
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
            described["responses"]["400"] = {"description": "The body is malformed; nothing was changed"}
        if each.takes_token:
            described["security"] = [{"token": []}]
            described["responses"] |= {
                "401": {"description": "The bearer token is missing or wrong"},
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
def own_document() -> dict[str, Any]:
    """Return the OpenAPI document of this version."""
    return openapi_document(version("kvdepot"), [*OPERATIONS, *_PLAIN_OPERATIONS])
