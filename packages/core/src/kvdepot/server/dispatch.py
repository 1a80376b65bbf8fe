"""Dispatches requests that need no session: those of operators, and hellos."""

import os
from collections.abc import Callable
from typing import Any, Final

from kvdepot.errors import ErrorCode
from kvdepot.server import commands
from kvdepot.server.depot import Depot
from kvdepot.server.registration import check_version
from kvdepot.server.replies import Deferred, Refused
from kvdepot.tiers.opening import TierOpener
from kvdepot.tiers.queue import TierQueue
from kvdepot.tiers.tiering import Tiering
from kvdepot.wire import frames
from kvdepot.wire import messages as m
from kvdepot.wire import operations as o

OPEN_TO_ALL: Final = (
    m.Hello, o.Status, o.Clear, o.Warm, o.Unpin, o.Find, o.SetQuota, o.AddTier, o.RemoveTier, o.Drain, o.SetLogLevel,
    o.Configuration,
)  # fmt: skip


class Operators:
    """Answers operators.

    Args:
        depot: that they operate.
        settings: returns the settings in force.
        opener: opens further tiers.
        make_tiering: makes the first tier's `Tiering`.
        status: returns the server's status.
        server_version: of this package.
    """

    def __init__(
        self,
        depot: Depot,
        settings: Callable[[], dict[str, Any]],
        opener: TierOpener,
        make_tiering: Callable[[list[TierQueue]], Tiering],
        status: Callable[[], o.DepotStatus],
        server_version: str,
    ) -> None:
        self._depot = depot
        self._settings = settings
        self._opener = opener
        self._make_tiering = make_tiering
        self._status = status
        self._version = server_version

    def answer(self, request: o.OperatorRequest, who: Callable[[], str]) -> frames.Reply | Deferred:
        """Answer a request, now or later; `who` names its sender for the log.

        Raises:
            Refused: with the reason; nothing was changed.
        """
        depot = self._depot
        match request:
            case m.Hello():
                check_version(request.protocol_version)
                return m.HelloReply(depot.state.epoch, m.PROTOCOL_VERSION, self._version, os.getpid())
            case o.Status():
                return o.StatusReply(depot.state.epoch, self._status())
            case o.Clear() | o.Warm() | o.SetQuota() if depot.state.is_restoring:
                raise Refused(ErrorCode.DRAINING, "the entries of an earlier server are being read: ask again")
            case o.Clear():
                if request.digests:
                    return commands.clear_prefix(depot, request, who())
                return commands.clear(depot, request.tenant, request.model, who())
            case o.Warm():
                return commands.warm(depot, request)
            case o.Unpin():
                return commands.unpin(depot, request.tenant)
            case o.Find():
                return commands.find(depot, request.digests)
            case o.SetQuota():
                return commands.set_quota(depot, request.tenant, request.quota_bytes)
            case o.AddTier():
                return commands.add_tier(depot, self._opener, self._make_tiering, request.url)
            case o.RemoveTier():
                return commands.remove_tier(depot, request.name)
            case o.Drain():
                return commands.drain(depot, request.is_draining)
            case o.SetLogLevel():
                return commands.set_log_level(depot, request.level)
            case o.Configuration():
                return o.ConfigurationReply(depot.state.epoch, self._settings())
