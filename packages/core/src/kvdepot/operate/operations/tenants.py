"""The operation on the quotas of tenants."""

from typing import TYPE_CHECKING, Annotated

from kvdepot.config import format_size, parse_size, parse_tenant
from kvdepot.errors import ConfigError, ErrorCode, printable
from kvdepot.server.turns import Refused, Steps
from kvdepot.wire.messages import Done, Identifier
from kvdepot.wire.operation import PATIENT_SECONDS, Argument, Command, Endpoint, Operation, Sender, TenantName

if TYPE_CHECKING:
    from kvdepot.server.app import DepotServer


def _parse_quota(text: str) -> int:
    size = 0 if text == "none" else parse_size(text)
    # 0 means no quota in the request. An operator who types it wants the tenant to get nothing.
    if not size and text != "none":
        raise ConfigError(f"{text!r} is no quota: give at least 1 byte, or none for a tenant without a quota")
    return size


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
    seconds = PATIENT_SECONDS
    endpoints = (
        Endpoint(
            "POST", "/tenants/quota", "Change the share of the pool reserved for a tenant, until the server stops"
        ),
    )
    needs_entries = True

    tenant: Annotated[TenantName, Argument(metavar="TENANT", read=parse_tenant)]
    quota_bytes: Annotated[Identifier, Argument("for example 8GiB", "SIZE|none", read=_parse_quota)]

    def answer(self, server: "DepotServer", sender: Sender) -> Steps:
        """Change a tenant's quota. The reply counts the chunks that moved to another share of the pool."""
        depot = server.depot
        tenant, quota_bytes = self.tenant, self.quota_bytes
        yield from depot.background.operators.first()
        try:
            moved = yield from depot.background.operators.total(depot.index.evictor.set_quota(tenant, quota_bytes))
        except ConfigError as error:
            raise Refused(ErrorCode.OUT_OF_RANGE, str(error)) from error
        quota = format_size(quota_bytes) if quota_bytes else "none"
        depot.note(f"the quota of tenant {printable(tenant)} is now {quota}")
        return Done(depot.state.epoch, moved)
