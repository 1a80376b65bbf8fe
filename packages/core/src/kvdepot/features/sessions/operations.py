"""Operations on the sessions of agents, by name. `feature` answers them."""

from typing import Annotated, Final

from msgspec import Meta

from kvdepot.config import counted, parse_number, parse_tenant
from kvdepot.errors import printable
from kvdepot.features.sessions.messages import RetainSeconds
from kvdepot.wire.messages import Done
from kvdepot.wire.operation import PATIENT_SECONDS, Argument, Command, Endpoint, Group, Operation, TenantName

SessionName = Annotated[str, Meta(min_length=1, max_length=256)]
_SESSION: Final = Argument("name of the session, as in requests", "SESSION")
_TENANT: Final = Argument("tenant of the session (default: default)", read=parse_tenant)
_GROUP: Final = Group(
    "session",
    "keep a session of an agent, or bring it back",
    "Choose what happens to the last prefix of a session between its requests.",
)


def _say_kept(request: "RetainSession | PrefetchSession", reply: Done) -> str:
    staying = f" and stay for {request.retain_seconds:g} s" if request.retain_seconds else ""
    return f"{counted(reply.count, 'chunk')} of {printable(request.session)} are in the pool{staying}"


class RetainSession(Operation[Done], tag="retain_session", frozen=True):
    """Pin the part of a session's last prefix that is in the pool, within the tenant's quota.

    The reply counts its chunks. 0 seconds unpin it.
    """

    command = Command(
        "retain",
        "keep a session in the pool for a time",
        "Keep the last prefix of a session in the pool, for example while an agent's tool runs. All sessions of a"
        " tenant together keep at most half of its quota.",
        _say_kept,
        group=_GROUP,
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
        "prefetch",
        "load a session from the tiers, before it is used again",
        "Load the last prefix of a session from the tiers into the pool, and keep it there for --retain seconds. All"
        " sessions of a tenant together keep at most half of its quota.",
        _say_kept,
        group=_GROUP,
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
        "demote",
        "move a session from the pool to the tiers",
        "Write the chunks that only this session needs to the tiers, and give their space in the pool to others.",
        lambda request, reply: f"{counted(reply.count, 'chunk')} of {printable(request.session)} leave the pool",
        group=_GROUP,
    )
    seconds = PATIENT_SECONDS
    endpoints = (Endpoint("POST", "/sessions/demote", "Move a session from the pool to the tiers"),)
    needs_entries = True

    session: Annotated[SessionName, _SESSION]
    tenant: Annotated[TenantName, _TENANT] = "default"


class ForgetSession(Operation[Done], tag="forget_session", frozen=True):
    """Forget a session, and evict the chunks that only it needs: before all others, or `at_once`.

    The reply counts the chunks. Tiers keep theirs.
    """

    command = Command(
        "forget",
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
        group=_GROUP,
    )
    seconds = PATIENT_SECONDS
    endpoints = (Endpoint("POST", "/sessions/forget", "Evict a session that has ended"),)
    needs_entries = True

    session: Annotated[SessionName, _SESSION]
    tenant: Annotated[TenantName, _TENANT] = "default"
    at_once: Annotated[bool, Argument("remove them now", flag="--now")] = False
