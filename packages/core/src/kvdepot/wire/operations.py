"""Operations: requests of operators to a running depot, and its status.

A new operation needs a class here and a handler in `kvdepot.server.commands`. A command that prints more than a line
also needs a function in `kvdepot.ops.operate`.
"""

import sys
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct, field

from kvdepot.config import LONGEST_TENANT, counted, format_size, parse_number, parse_size, parse_tenant
from kvdepot.errors import printable
from kvdepot.wire.messages import Digests, Done, Identifier, RetainSeconds, Text
from kvdepot.wire.operation import Argument, Command, Endpoint, Operation, Reply
from kvdepot.wire.status import DepotStatus, TenantStatus

TenantName = Annotated[str, Meta(min_length=1, max_length=LONGEST_TENANT)]
_PATIENT_SECONDS: Final = 30.0  # for requests with many steps
_FILE: Final = "KEYS|TRACE"
_FILE_HELP: Final = "file of prefixes, or - for standard input"
_KEYS_HELP: Final = (
    " The file has one prefix per line, as JSON. A prefix is either the keys of its chunks as hex strings,"
    ' {"digests": ["9f..", ..], "tenant": "default"}, or a prompt as the engine sees it, {"tokens": [1, 2, ..],'
    ' "namespace": {"model": ..}, "chunk_tokens": 64}. vLLM\'s log says which namespace and chunks an engine has. Use -'
    " for standard input."
)


def _parse_quota(text: str) -> int:
    return 0 if text == "none" else parse_size(text)


def _or_standard_input(text: str) -> str:
    return sys.stdin.readline().strip() if text == "-" else text


class StatusReply(Reply, tag="status_reply", frozen=True):
    """The depot's state: see `DepotStatus`."""

    status: DepotStatus


class FoundPrefix(Struct, frozen=True, kw_only=True):
    """The part of a prefix that one space of the pool has: `num_chunks` usable leading chunks."""

    num_chunks: int
    num_tokens: int
    tenant: str
    model: str
    dtype: str
    format: str
    chunk_tokens: int
    idle_seconds: float  # since the last of the chunks was stored or used
    is_held: bool  # by a lease, a pin or a write
    num_children: int  # number of chunks that directly follow the last one


class Found(Reply, tag="found", frozen=True):
    """The result of `Find`: one item per space with a part of the prefix, longest first, at most 1,024."""

    prefixes: list[FoundPrefix]


class ConfigurationReply(Reply, tag="configuration_reply", frozen=True):
    """The server's settings by flag. Secrets stay in the files that settings name."""

    settings: dict[str, Any]


class Status(Operation[StatusReply], tag="status", frozen=True):
    """Ask for the status."""

    endpoints = (
        Endpoint(
            "GET",
            "/status",
            "Everything that 'kvdepot status --json' shows",
            lambda _, reply: reply.status,
            DepotStatus,
        ),
        Endpoint(
            "GET",
            "/tenants",
            "Bytes of the pool and quotas by tenant",
            lambda _, reply: reply.status.tenants,
            dict[str, TenantStatus],
        ),
        Endpoint(
            "GET",
            "/loglevel",
            "Show the log level",
            lambda _, reply: {"level": reply.status.log_level},
            dict[str, str],
        ),
    )


class Find(Operation[Found], tag="find", frozen=True):
    """Find the part of a prefix that the pool has, in every space."""

    command = Command(
        "find",
        "show how much of prefixes the pool holds",
        "Show how much of each prefix the pool holds." + _KEYS_HELP,
        has_json=True,
    )
    endpoints = (
        Endpoint(
            "POST",
            "/cache/find",
            "Show how much of a prefix the pool holds",
            lambda _, reply: reply.prefixes,
            list[FoundPrefix],
        ),
    )

    digests: Annotated[Digests, Argument(_FILE_HELP, _FILE, read=str)]


class Clear(Operation[Done], tag="clear", frozen=True):
    """Remove the unused chunks of one tenant and model, or of all, from the pool and the tiers.

    With `digests`, remove only from the pool, and only the chunks that no prefix but this one (from chunk 0 on) needs.
    """

    command = Command(
        "clear",
        "remove entries that are not in use",
        "Remove entries that are not in use from the pool and the tiers. With --prefix, remove only from the pool, and"
        " only entries that no other prefix needs." + _KEYS_HELP,
        options=(("all", Argument("remove everything", default=False)),),
    )
    seconds = 600.0  # for tiers with very many entries
    endpoints = (Endpoint("POST", "/cache/clear", "Remove entries that are not in use"),)
    may_mean_all = True
    needs_entries = True

    tenant: Annotated[TenantName | None, Argument("remove only entries of this tenant", read=parse_tenant)] = None
    model: Annotated[
        Text | None, Argument("remove only entries of this model, by the name that engines registered")
    ] = None
    digests: Annotated[Digests, Argument("remove only the prefixes in this file", _FILE, "--prefix", read=str)] = b""


class Warm(Operation[Done], tag="warm", frozen=True, kw_only=True):
    """Promote a prefix from tiers."""

    command = Command(
        "warm", "load prefixes from the tiers", "Load prefixes from the tiers into the pool." + _KEYS_HELP
    )
    seconds = 90.0  # for one prefix; the depot waits for a minute at most
    endpoints = (Endpoint("POST", "/cache/warm", "Load a prefix from the tiers"),)
    needs_entries = True

    tenant: TenantName = "default"
    digests: Annotated[Digests, Argument(_FILE_HELP, _FILE, read=str)]


SessionName = Annotated[str, Meta(min_length=1, max_length=256)]
_SESSION: Final = Argument("name of the session, as in requests", "SESSION")
_TENANT: Final = Argument("tenant of the session (default: default)", read=parse_tenant)


def _say_kept(request: "RetainSession | PrefetchSession", reply: Done) -> str:
    staying = f" and stay for {request.retain_seconds:g} s" if request.retain_seconds else ""
    return f"{counted(reply.count, 'chunk')} of {printable(request.session)} are in the pool{staying}"


class RetainSession(Operation[Done], tag="retain_session", frozen=True):
    """Pin the part of a session's last prefix that is in the pool, within the tenant's quota.

    The reply counts its chunks. 0 seconds unpin it.
    """

    command = Command(
        "session retain",
        "keep a session in the pool for a time",
        "Keep the last prefix of a session in the pool, for example while an agent's tool runs. All sessions of a"
        " tenant together keep at most half of its quota.",
        _say_kept,
    )
    endpoints = (Endpoint("POST", "/sessions/retain", "Keep a session in the pool for a time"),)
    needs_entries = True

    session: Annotated[SessionName, _SESSION]
    retain_seconds: Annotated[
        RetainSeconds, Argument("how long; 0 ends an earlier request", "SECONDS", read=parse_number)
    ]
    tenant: Annotated[TenantName, _TENANT] = "default"


class PrefetchSession(Operation[Done], tag="prefetch_session", frozen=True):
    """Promote a session's last prefix from the tiers, and pin it for `retain_seconds`.

    The reply comes when it is in the pool, and counts the chunks that are kept, perhaps not all: see `RetainSession`.
    """

    command = Command(
        "session prefetch",
        "load a session from the tiers, before it is used again",
        "Load the last prefix of a session from the tiers into the pool, and keep it there for --retain seconds. All"
        " sessions of a tenant together keep at most half of its quota.",
        _say_kept,
    )
    seconds = 90.0  # the depot waits for a minute at most
    endpoints = (Endpoint("POST", "/sessions/prefetch", "Load a session from the tiers"),)
    needs_entries = True

    session: Annotated[SessionName, _SESSION]
    tenant: Annotated[TenantName, _TENANT] = "default"
    retain_seconds: Annotated[
        RetainSeconds, Argument("keep it in the pool for this long (default 60)", "SECONDS", "--retain", parse_number)
    ] = 60.0


class DemoteSession(Operation[Done], tag="demote_session", frozen=True):
    """Evict the chunks that only a session needs as soon as a tier has them. The reply counts them."""

    command = Command(
        "session demote",
        "move a session from the pool to the tiers",
        "Write the chunks that only this session needs to the tiers, and give their space in the pool to others.",
        lambda request, reply: f"{counted(reply.count, 'chunk')} of {printable(request.session)} leave the pool",
    )
    seconds = _PATIENT_SECONDS
    endpoints = (Endpoint("POST", "/sessions/demote", "Move a session from the pool to the tiers"),)
    needs_entries = True

    session: Annotated[SessionName, _SESSION]
    tenant: Annotated[TenantName, _TENANT] = "default"


class ForgetSession(Operation[Done], tag="forget_session", frozen=True):
    """Forget a session, and evict the chunks that only it needs: before all others, or `at_once`.

    The reply counts the chunks. Tiers keep theirs.
    """

    command = Command(
        "session forget",
        "evict a session that has ended",
        "Forget a session, and evict the chunks that only it needs before all others, or at once. Tiers keep theirs.",
        lambda request, reply: (
            f"{printable(request.session)} is forgotten; "
            + (
                f"entries removed: {reply.count:,}"
                if request.at_once
                else f"{counted(reply.count, 'chunk')} will be evicted first"
            )
        ),
    )
    seconds = _PATIENT_SECONDS
    endpoints = (Endpoint("POST", "/sessions/forget", "Evict a session that has ended"),)
    needs_entries = True

    session: Annotated[SessionName, _SESSION]
    tenant: Annotated[TenantName, _TENANT] = "default"
    at_once: Annotated[bool, Argument("remove them now", flag="--now")] = False


class SetQuota(Operation[Done], tag="set_quota", frozen=True):
    """Set a tenant's quota until the server ends; 0 removes it."""

    command = Command(
        "quota",
        "change a tenant's quota",
        "Change the share of the pool reserved for a tenant, until the server stops. Use serve --quota to keep it.",
        lambda request, reply: (
            f"the quota of {request.tenant} is now"
            f" {format_size(request.quota_bytes) if request.quota_bytes else 'none'}; existing chunks that"
            f" {'' if request.quota_bytes else 'no longer '}count against it: {reply.count:,}"
        ),
    )
    seconds = _PATIENT_SECONDS
    endpoints = (
        Endpoint(
            "POST", "/tenants/quota", "Change the share of the pool reserved for a tenant, until the server stops"
        ),
    )
    needs_entries = True

    tenant: Annotated[TenantName, Argument(metavar="TENANT", read=parse_tenant)]
    quota_bytes: Annotated[Identifier, Argument("for example 8GiB", "SIZE|none", read=_parse_quota)]


class AddTier(Operation[Done], tag="add_tier", frozen=True):
    """Add a tier below the others until the server ends."""

    command = Command(
        "tier add",
        "add a tier",
        "Add a tier below the existing ones, until the server stops. Use serve --tier to keep it.",
        lambda _, reply: f"tiers in use: {reply.count}",
    )
    seconds = _PATIENT_SECONDS
    endpoints = (
        Endpoint(
            "POST", "/tiers/add", "Add a tier below the others, until the server stops; returns the number of tiers"
        ),
    )

    url: Annotated[
        str,
        Meta(min_length=1, max_length=4096),
        Argument("as for serve --tier; - reads it from standard input", "URL", read=_or_standard_input),
    ]


class RemoveTier(Operation[Done], tag="remove_tier", frozen=True):
    """Stop using a tier, given by its name in the status. Its entries stay in storage."""

    command = Command(
        "tier remove",
        "stop using a tier",
        "Stop using a tier. Its entries stay in storage; writes still waiting for it are dropped.",
        lambda _, reply: f"tiers in use: {reply.count}",
    )
    endpoints = (
        Endpoint(
            "POST", "/tiers/remove", "Stop using a tier, whose entries stay in storage; returns the number of tiers"
        ),
    )

    name: Annotated[str, Meta(min_length=1, max_length=4096), Argument("as shown by 'kvdepot status'", "NAME")]


class Drain(Operation[Done], tag="drain", frozen=True):
    """Decline stores, or accept them again. Entries in the pool can still be found."""

    command = Command(
        "drain",
        "decline new stores before a stop",
        "Decline new stores; cached prefixes are still found. Exits with 0 once no store is in progress and all waiting"
        " entries are written to the tiers, with 1 if that takes longer than --wait.",
        options=(("wait", Argument("longest time to wait (default 60)", "SECONDS", read=parse_number, default=60.0)),),
    )
    endpoints = (
        Endpoint(
            "POST", "/drain", "Decline new stores, or accept them again; returns the number of stores in progress"
        ),
    )

    is_draining: Annotated[bool, Argument("accept stores again", flag="--resume")] = field(
        default=True, name="draining"
    )


class SetLogLevel(Operation[Done], tag="set_log_level", frozen=True):
    """Change the log level until the server ends."""

    command = Command(
        "loglevel",
        "change the log level of a running depot",
        "Change the log level of a running depot, until it stops. Use serve --log-level to keep it.",
        lambda request, _: f"the depot's log level is now {request.level}",
    )
    endpoints = (
        Endpoint(
            "POST",
            "/loglevel",
            "Change the log level, until the server stops",
            lambda request, _: {"level": request.level},
            dict[str, str],
        ),
    )

    level: Annotated[Literal["debug", "info", "warning", "error"], Argument()]


class Configuration(Operation[ConfigurationReply], tag="configuration", frozen=True):
    """Ask for the server's settings."""

    command = Command(
        "config",
        "show a running depot's settings",
        "Show the settings of a running depot as a file for 'kvdepot serve --config'.",
        has_json=True,
    )
    endpoints = (Endpoint("GET", "/config", "The server's settings", lambda _, reply: reply.settings, dict[str, Any]),)
