"""Asks a depot for an operation without a socket, as `kvdepot.server.commands.Operators` does."""

from kvdepot.server.commands import HANDLERS
from kvdepot.server.depot import Depot
from kvdepot.server.replies import PendingReply
from kvdepot.wire import operations as o


def operate(depot: Depot, request: o.OperatorRequest) -> PendingReply:
    """Begin an operation. The reply may be there already.

    Raises:
        Refused: nothing was changed.
    """
    reply = depot.state.answer(HANDLERS[type(request)](depot, request, lambda: "this test"))
    return reply if isinstance(reply, PendingReply) else PendingReply(reply)
